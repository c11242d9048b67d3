"""Compare a golden file of LieTransformer or LieConv with the layers and models of the library.

Pairs in the files are coordinates of g_j⁻¹ g_i, where i is the receiver. Layers accept any coordinates of a graph, so
the pairs of the file are passed unchanged; the coordinates that the library computes from positions and frames are
checked by the kinds ``lift`` and ``model``. In these files lifted elements have separate neighbors, so here they are
points with a fiber of 1. For the kind ``attention``, padded receivers are points to which no point attends. For other
kinds they are left out, since no valid point depends on them.
"""

import numpy as np
import torch

from lieattn.models.published import published_kernel
from lieattn.nn import LieBlock, LieBottleneck, LieConvolution, LieSelfAttention
from tests.parity import files
from tests.parity.lietransformer_files import (
    Padded,
    attention_parameters,
    block_parameters,
    compare,
    load,
    read,
    tensor,
)
from tests.parity.lietransformer_geometry import check_explog, check_lift, check_subsampling
from tests.parity.lietransformer_models import check_finite_se2, check_hamiltonian, check_model


def check(path):
    arrays, meta = read(path)
    kind = meta.get("kind")
    if kind not in KINDS:
        raise AssertionError(f"{path.name}: unknown kind {kind!r}; known are {sorted(KINDS)}")
    KINDS[kind](arrays, meta)


def attention_layer(arrays, meta, prefix=""):
    channels = len(arrays[prefix + "value_b"])
    options = published_kernel(meta["kernel"], attention_fn=meta["normalisation"])
    layer = LieSelfAttention(
        channels,
        arrays["pair"].shape[-1],
        heads=meta["heads"],
        activation={"swish": "silu"}.get(meta["activation"], meta["activation"]),
        **_widths(arrays, meta, prefix),
        **options,
    ).double()
    return load(layer, attention_parameters(arrays, prefix))


def _widths(arrays, meta, prefix):
    widths = {}
    for name in ("loc_mlp_b1", "comb_mlp_b1"):
        if prefix + name in arrays:
            widths["hidden"] = arrays[prefix + name].shape[1]
    if prefix + "pair_b" in arrays:
        widths["feature_channels"] = len(arrays[prefix + "pair_b"])
    elif prefix + "receiver_b" in arrays:
        widths["feature_channels"] = 2 * len(arrays[prefix + "receiver_b"]) // meta["heads"]
    return widths


def check_attention(arrays, meta):
    for dtype in (torch.float64, torch.float32):
        _check_attention(arrays, meta, dtype)


def _check_attention(arrays, meta, dtype):
    mask, index = arrays["mask"], arrays.get("neighbour_index")
    # Padded points are at the origin, where some groups have no coordinates.
    seen = np.isfinite(arrays["pair"]).all(-1)
    if index is not None:
        seen |= ~_chosen(index, mask.shape[1])
    padded = Padded(mask | (seen | ~mask[:, None]).all(2))
    graph = padded.graph(arrays["pair"], index, keys=mask, dtype=dtype)
    layer = attention_layer(arrays, meta).to(dtype)
    graph.relative.coordinates.requires_grad_()
    x = padded.points(arrays["features"]).to(dtype)[:, None].requires_grad_()
    out = layer(x, graph)[:, 0]
    # A padded receiver may have only padded neighbors, and then its output is zero in the library.
    known = (graph.neighbors.degree > 0) | padded.points(mask)
    compare("out", out[known], padded.points(arrays["out"])[known], meta)
    weights = layer.weights(x, graph)[:, 0, 0]
    if "attention" in arrays:
        stored = padded.receivers(arrays["attention"])
        compare("attention", padded.dense(weights, graph.neighbors)[known], stored[known], meta)
    if "logits" in arrays:
        stored = arrays["logits"]
        if index is not None:
            stored = np.zeros((*arrays["pair"].shape[:3], meta["heads"]))
            np.put_along_axis(stored, index[..., None], arrays["logits"], axis=2)
        compare("logits", layer.scores(x, graph)[:, 0, 0], tensor(stored)[padded.edges_of(graph.neighbors)], meta)
    if names := files.gradients(arrays):
        (out * padded.points(arrays["cotangent"])).sum().backward()
        _check_gradients({name: arrays[f"grad_{name}"] for name in names}, meta, layer, padded, graph, x)


def _chosen(index, size):
    """Return whether j is a neighbor of i, [b, N, N]."""
    chosen = np.zeros((*index.shape[:2], size), bool)
    np.put_along_axis(chosen, index, True, axis=2)
    return chosen


def _check_gradients(stored, meta, layer, padded, graph, x):
    # In float32, a vanishing gradient, such as that of a key bias under a softmax, is a rounding error of the others.
    size = max(float(np.abs(array[np.isfinite(array)]).max(initial=0)) for array in stored.values())
    if "pair" in stored:
        found = torch.zeros(stored["pair"].shape, dtype=x.dtype)
        if graph.relative.coordinates.grad is not None:
            found[padded.edges_of(graph.neighbors)] = graph.relative.coordinates.grad[:, 0, 0]
        compare("grad_pair", found[padded.mask], stored["pair"][padded.mask.numpy()], meta, size=size)
    if "features" in stored:
        compare("grad_features", x.grad[:, 0], padded.points(stored["features"]), meta, size=size)
    expected = attention_parameters(stored, "")
    for name, parameter in layer.named_parameters():
        compare(f"gradient of {name}", parameter.grad, expected[name], meta, size=size)


def check_block(arrays, meta):
    padded = Padded(arrays["mask"])
    graph = padded.graph(arrays["pair"])
    attention = attention_layer(arrays, meta)
    block = LieBlock(
        attention,
        attention.in_channels,
        norm=meta["block_norm"],
        activation={"swish": "silu"}.get(meta["activation"], meta["activation"]),
        eps=meta["norm_eps"],
    ).double()
    load(block, block_parameters(arrays, ""))
    block.train(bool(meta.get("training", False)))
    x = padded.points(arrays["features"])[:, None]
    with torch.no_grad():
        after = block.attend(x, graph)
        if "after_attention" in arrays:
            compare("after_attention", after[:, 0], padded.points(arrays["after_attention"]), meta)
        compare("out", block.feed_forward(after)[:, 0], padded.points(arrays["out"]), meta)


def check_lieconv(arrays, meta):
    padded = Padded(arrays["mask"])
    graph = padded.graph(arrays["pair"], arrays.get("neighbour_index"), valid=arrays.get("neighbour_valid"))
    rank, hidden = len(arrays["kernel_b3"]), len(arrays["kernel_b1"])
    options = {
        "rank": rank,
        "hidden": hidden,
        "activation": {"swish": "silu"}.get(meta["activation"], meta["activation"]),
        "divide": "published" if meta.get("mean", True) else "none",
    }
    coordinates = arrays["pair"].shape[-1]
    in_channels, out_channels = arrays["features"].shape[-1], arrays["out"].shape[-1]
    mix = tensor(arrays["mix_W"]).unflatten(1, (-1, rank))
    parameters = {"weight": mix, "bias": tensor(arrays["mix_b"])}
    for number in (1, 2, 3):
        parameters[f"kernel.linear{number}.weight"] = tensor(arrays[f"kernel_W{number}"])
        parameters[f"kernel.linear{number}.bias"] = tensor(arrays[f"kernel_b{number}"])
    if "down_W" in arrays:
        layer = LieBottleneck(
            in_channels, out_channels, coordinates, widths=(mix.shape[1], mix.shape[0]), norm="none", **options
        )
        parameters = {f"convolution.{name}": array for name, array in parameters.items()}
        for name in ("down", "up"):
            parameters[f"{name}.weight"] = tensor(arrays[f"{name}_W"])
            parameters[f"{name}.bias"] = tensor(arrays[f"{name}_b"])
    else:
        layer = LieConvolution(in_channels, out_channels, coordinates, **options)
    load(layer.double(), parameters)
    out = layer(padded.points(arrays["features"])[:, None], graph)
    compare("out", out[:, 0], padded.points(arrays["out"]), meta)


KINDS = {
    "explog": check_explog,
    "lift": check_lift,
    "attention": check_attention,
    "block": check_block,
    "model": check_model,
    "hamiltonian": check_hamiltonian,
    "finite_se2": check_finite_se2,
    "lieconv": check_lieconv,
    "fps": check_subsampling,
}
