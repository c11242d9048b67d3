"""What the operator takes besides queries, keys and values, and the checks of its arguments."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from torch import Tensor

from lieattn.geometry import Neighbors

Pattern = Literal["joint", "framewise", "pooled", "query_sum"]
Normalization = Literal["softmax", "mean", "exp-mean", "none"]
ROW_TABLES = ("positional_key", "displacement_bias", "psi", "beta", "key_psi")


_NO_TABLES = ("row", "rotary", "rotary_values")


@dataclass(frozen=True, eq=False)
class RelativeTerms:
    """What the scores and values take from the relative element u = (h_a⁻¹(x_j - x_i), h_a⁻¹ h_b).

    Tables that depend on the displacement have a row per *type* of displacement; ``row`` says which one an edge
    reads. ``out`` is the fiber of the output, ``query`` and ``key`` those of queries and keys; an axis of size 1
    stands for all its values. Absent terms are None.

    Attributes
    ----------
    positional_key
        ``[types, out, heads, dim]``: adds ⟨q, ρ⟩ to the score, a key made of the displacement (GSA Eq. 14).
    displacement_bias
        ``[types, out, key, heads]``: adds to the score (location kernels of LieTransformer).
    fiber_key
        ``[query, key, heads, dim]`` or ``[out, query, key, heads, dim]``: adds ⟨q, ρ⟩ for a pair of frames.
    fiber_bias
        ``[query, key, heads]``: adds to the score of a pair of frames.
    psi
        ``[types, out, key, heads, value_dim]``: multiplies the values (Affine Self Convolution).
    beta
        ``[types, out, key, heads, value_dim]``: is added to the values; with pattern ``"pooled"`` once for each
        neighbor, so that its key axis is 1.
    key_psi
        ``[types, out, key, heads, dim]``: multiplies the keys, with patterns ``"pooled"`` and ``"framewise"`` (Affine
        Self Convolution, where ``positional_key`` is what is added to the keys).
    row
        ``[edges]`` int64, the row of the displacement tables that each edge reads; None: row e belongs to edge e.
    rotary
        ``[points, fiber, heads, dim / 2, 2]``, cosines and sines of the angles by which channel pairs of queries and
        keys are turned.
    rotary_values
        Whether values are turned too, and what is attended is turned back by the angles of the target.
    """

    positional_key: Tensor | None = None
    displacement_bias: Tensor | None = None
    fiber_key: Tensor | None = None
    fiber_bias: Tensor | None = None
    psi: Tensor | None = None
    beta: Tensor | None = None
    key_psi: Tensor | None = None
    row: Tensor | None = None
    rotary: Tensor | None = None
    rotary_values: bool = False

    def tables(self) -> dict[str, Tensor]:
        """The terms that are given, by their names."""
        every = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NO_TABLES}
        return {name: table for name, table in every.items() if table is not None}

    def plus(self, other: RelativeTerms) -> RelativeTerms:
        """Both sets of terms together.

        Raises ValueError where both give the same term, and where both have tables with a row for each type of
        displacement but not the same ``row``.
        """
        mine, theirs = self.tables(), other.tables()
        for name in mine:
            if name in theirs:
                raise ValueError(f"both sets of relative terms give {name!r}")
        owners = [terms for terms in (self, other) if any(name in ROW_TABLES for name in terms.tables())]
        if len(owners) == 2 and self.row is not other.row:
            raise ValueError("row: the displacement tables of both sets of relative terms must share one row index")
        if self.rotary is not None and other.rotary is not None:
            raise ValueError("both sets of relative terms give 'rotary'")
        turning = self if self.rotary is not None else other
        row = owners[0].row if owners else None
        return RelativeTerms(**mine, **theirs, row=row, rotary=turning.rotary, rotary_values=turning.rotary_values)


def check_operands(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    neighbors: Neighbors,
    terms: RelativeTerms,
    pattern: Pattern,
    normalize: Normalization,
    dropout: float,
) -> None:
    """Raise ValueError, naming the argument, if the operator cannot take these operands together."""
    for argument, option, allowed in (("pattern", pattern, Pattern), ("normalize", normalize, Normalization)):
        if option not in get_args(allowed):
            raise ValueError(f"{argument}: expected one of {get_args(allowed)}, got {option!r}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout: expected a probability in [0, 1), got {dropout}")
    _check_signals(query, key, value, neighbors)
    fiber = value.shape[1]
    queries = fiber if query is None else query.shape[1]
    if pattern in ("joint", "framewise") and queries != fiber:
        raise ValueError(f"query: pattern {pattern!r} needs a fiber of {fiber} as in value, got {queries}")
    types = neighbors.num_edges
    if terms.row is not None:
        if terms.row.shape != (neighbors.num_edges,):
            raise ValueError(
                f"terms.row: expected [{neighbors.num_edges}], one row of the displacement tables for each edge, got "
                f"{tuple(terms.row.shape)}"
            )
        types = -1
    _check_terms(terms, types, queries, fiber, value, query, pattern)


def _check_signals(query: Tensor | None, key: Tensor | None, value: Tensor, neighbors: Neighbors) -> None:
    if (query is None) != (key is None):
        raise ValueError("query and key: give both, or neither for scores made of the terms alone")
    for argument, signal in (("query", query), ("key", key), ("value", value)):
        if signal is None:
            continue
        if signal.ndim != 4 or signal.shape[0] != neighbors.num_points:
            raise ValueError(
                f"{argument}: expected [points={neighbors.num_points}, fiber, heads, dim], got {tuple(signal.shape)}"
            )
        if signal.shape[2] != value.shape[2]:
            raise ValueError(f"{argument}: has {signal.shape[2]} heads, value has {value.shape[2]}")
        if signal.device != neighbors.device:
            raise ValueError(f"{argument}: is on {signal.device}, the neighbor lists are on {neighbors.device}")
    if query is not None and key is not None:
        if query.shape[-1] != key.shape[-1]:
            raise ValueError(f"key: has dim {key.shape[-1]}, query has dim {query.shape[-1]}")
        if key.shape[1] != value.shape[1]:
            raise ValueError(f"key: has a fiber of {key.shape[1]}, value has one of {value.shape[1]}")


def _check_terms(
    terms: RelativeTerms,
    types: int,
    queries: int,
    keys: int,
    value: Tensor,
    query: Tensor | None,
    pattern: Pattern,
) -> None:
    heads, value_dim = value.shape[2:]
    dim = -1 if query is None else query.shape[-1]
    out = -1 if pattern in ("query_sum", "pooled") else keys
    # An entry -1 stands for any size; an axis may always be 1 where one entry serves all.
    expected = {
        "positional_key": (types, out, heads, dim),
        "displacement_bias": (types, out, keys, heads),
        "fiber_key": (queries, keys, heads, dim),
        "fiber_bias": (queries, keys, heads),
        "psi": (types, out, keys, heads, value_dim),
        "beta": (types, out, keys, heads, value_dim),
        "key_psi": (types, out, keys, heads, dim),
    }
    for name, shape in expected.items():
        table = getattr(terms, name)
        if table is None:
            continue
        if name in ("positional_key", "fiber_key", "key_psi") and query is None:
            raise ValueError(f"terms.{name}: is multiplied with the query, but query is None")
        if name == "fiber_key" and table.ndim == 5 and out == -1:
            shape = (-1, *shape)
        fits = table.ndim == len(shape) and all(
            want in (-1, got) or (got == 1 and (axis > 0 or name not in ROW_TABLES))
            for axis, (want, got) in enumerate(zip(shape, table.shape, strict=True))
        )
        if not fits:
            raise ValueError(f"terms.{name}: expected shape {shape} (-1: any), got {tuple(table.shape)}")
        reason = _reason_against(name, pattern, table)
        if reason is not None:
            raise ValueError(f"terms.{name}: {reason}")
    if pattern == "pooled":
        _check_pooled_frames(query, terms)


def _reason_against(name: str, pattern: Pattern, table: Tensor) -> str | None:
    """Why a pattern does not take a term of the right shape, in words; None if it does."""
    if pattern == "framewise" and name in ("displacement_bias", "psi", "beta", "key_psi") and table.shape[2] > 1:
        return f"frames attend alone, so the key axis must be 1, got {table.shape[2]}"
    if pattern == "pooled" and name in ("displacement_bias", "beta") and table.shape[2] > 1:
        return f"pattern 'pooled' adds it once for each neighbor, so the key axis must be 1, got {table.shape[2]}"
    if pattern == "pooled" and name in ("fiber_key", "fiber_bias"):
        return "pattern 'pooled' has one score for all frames of a neighbor, so there are no pairs of frames"
    if pattern not in ("pooled", "framewise") and name == "key_psi":
        return f"is for the patterns 'pooled' and 'framewise', not for {pattern!r}"
    return None


def _check_pooled_frames(query: Tensor | None, terms: RelativeTerms) -> None:
    """Refuse queries and tables that do not have one number of output frames."""
    sizes = {} if query is None else {"query": query.shape[1]}
    for name in ROW_TABLES:
        table = getattr(terms, name)
        if table is not None:
            sizes[f"terms.{name}"] = table.shape[1]
    several = {argument: size for argument, size in sizes.items() if size > 1}
    if len(set(several.values())) > 1:
        found = ", ".join(f"{argument} has {size}" for argument, size in several.items())
        raise ValueError(f"{next(iter(several))}: expected one number of output frames everywhere, but {found}")
