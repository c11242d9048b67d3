"""The names that the authors of LieTransformer gave to their choices, translated to ours."""

from __future__ import annotations

from typing import Any

_KERNELS = {
    "mlp": "sum",
    "dot_product_only": "content",
    "location_only": "location",
    "relative_position": "relative_position",
}
_NORMALIZATIONS = {
    "softmax": "softmax",
    "dot_product": "mean",
    "mean": "mean",
    "norm_exp": "exp-mean",
    "exp_mean": "exp-mean",
}
_FEATURES = {"1": "product", "2": "linear", "3": "mixed"}
_LOCATIONS = {"0": "coordinates", "1": "network", "2": "coordinates"}
_FAILURES = (
    ({"0": "leaves the weights undefined"}, "N"),
    (
        {
            "0": "has neither sum nor network to join features and location",
            "1": "adds parts whose shapes do not fit",
            "3": "multiplies parts whose shapes do not fit",
        },
        "C",
    ),
    ({"0": "leaves no features for the network"}, "F"),
)


def published_kernel(kernel: str, *, attention_fn: str = "softmax") -> dict[str, Any]:
    """Options of :class:`lieattn.nn.LieSelfAttention` for a ``kernel_type`` and ``attention_fn`` of the authors.

    Parameters
    ----------
    kernel
        ``"mlp"``, ``"dot_product_only"``, ``"location_only"``, ``"relative_position"``, or four digits N C F P:
        normalization (1 softmax, 2 mean), combination (2 a network), features (1 dot product, 2 linear maps,
        3 linear maps and a shared one), location (0 and 2 the coordinates, 1 a network of them).
    attention_fn
        ``"softmax"``, ``"dot_product"`` (also ``"mean"``), or ``"norm_exp"`` (also ``"exp_mean"``). A code's first
        digit takes its place, as in the authors' code.

    Returns
    -------
    dict
        ``kernel``, ``normalize`` and, for codes, ``features`` and ``location``.

    Raises
    ------
    ValueError
        For names that do not exist, and for codes that fail in the authors' code; the message says why.

    Examples
    --------
    >>> published_kernel("2232")
    {'kernel': 'combined', 'normalize': 'mean', 'features': 'mixed', 'location': 'coordinates'}
    """
    if kernel in _KERNELS:
        if attention_fn not in _NORMALIZATIONS:
            raise ValueError(f"attention_fn: expected one of {list(_NORMALIZATIONS)}, got {attention_fn!r}")
        return {"kernel": _KERNELS[kernel], "normalize": _NORMALIZATIONS[attention_fn]}
    if len(kernel) != 4 or not kernel.isdigit():
        raise ValueError(f"kernel: expected one of {list(_KERNELS)} or four digits, got {kernel!r}")
    for (reasons, letter), digit in zip(_FAILURES, kernel, strict=False):
        if digit in reasons:
            raise ValueError(f"kernel: {kernel!r} fails in the authors' code too: {letter} = {digit} {reasons[digit]}")
    normalization, combination, features, location = list(kernel)
    if normalization not in "12" or combination != "2" or features not in _FEATURES or location not in _LOCATIONS:
        raise ValueError(
            f"kernel: {kernel!r} is no code; N is 1 or 2, C is 2, F is 1, 2 or 3, and P is 0, 1 or 2 where they run"
        )
    return {
        "kernel": "combined",
        "normalize": "softmax" if normalization == "1" else "mean",
        "features": _FEATURES[features],
        "location": _LOCATIONS[location],
    }
