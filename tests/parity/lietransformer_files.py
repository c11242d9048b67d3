"""Reading of golden files of LieTransformer, in the layout and with the names of the library."""

import re

import numpy as np
import torch

from lieattn.geometry import LiftedGraph, Neighbors, RelativeElements
from lieattn.groups import Translations, trivial
from lieattn.spaces import Euclidean
from tests.parity import files

DEFAULTS = {
    "activation": "swish",
    "alpha": 0.2,
    "block_norm": "layer_pre",
    "lift_samples": 1,
    "norm_eps": 1e-5,
    "output_norm": "none",
    "pool": "mean",
    "squash": "none",
    "tol": 1e-8,
    "tol_exp": 1e-12,
    "tol_log": 1e-9,
}
SWITCHES = ("block_norm", "output_norm", "squash")
MASKS = ("mask", "mask_lifted", "neighbour_valid")
FLOAT32 = 1e-4  # relative to the largest entry; the README has tolerances only for float64
SINGLE = 1e-5  # where all results of a file were rounded to float32


def read(path):
    """Return arrays in the types of the README, with a mask if there is none, and settings with their defaults."""
    arrays, meta = files.read(path)
    single = files.single(arrays)
    for name, array in arrays.items():
        if name in MASKS:
            arrays[name] = array.astype(bool)
        elif array.dtype.kind == "f":
            arrays[name] = array.astype(np.float64)
    points = "positions" if meta.get("kind") in ("lift", "model", "finite_se2") else "features"
    for name in (points, "distance"):
        if name in arrays:
            arrays.setdefault("mask", np.ones(arrays[name].shape[:2], bool))
    counted = {"layers": sum(re.fullmatch(r"(block|layer)\d+\.value_W", name) is not None for name in arrays)}
    # A setting that is null is not there, and these are the ones that are switched off by a word.
    meta = {name: "none" if value is None and name in SWITCHES else value for name, value in meta.items()}
    meta = DEFAULTS | counted | {"readout": "lieconv" if "readout_W" in arrays else "model_1"} | meta
    if single:
        meta |= {name: max(meta[name], SINGLE) for name in ("tol", "tol_exp", "tol_log")}
    meta["activation"] = {"swish": "silu"}.get(meta["activation"], meta["activation"])
    return arrays, files.Named(path.name, meta | ({"kernel": str(meta["kernel"])} if "kernel" in meta else {}))


def tensor(array):
    return torch.from_numpy(np.array(array))


def pair_graph(neighbors, coordinates, batch, clouds):
    """Return a graph of points whose relative elements have these coordinates, ``[edges, 1, 1, k]``."""
    pos = torch.zeros(len(batch), 1, dtype=coordinates.dtype)
    relative = RelativeElements(
        space=Euclidean(Translations(1)), pos=pos, batch=batch, neighbors=neighbors, group=trivial(1), given=coordinates
    )
    return LiftedGraph(pos=pos, batch=batch, num_clouds=clouds, relative=relative)


class Padded:
    """Clouds padded to one size, with the mask of valid points."""

    def __init__(self, mask):
        self.mask = tensor(mask)
        self.number = torch.full(mask.shape, -1)
        self.number[self.mask] = torch.arange(int(self.mask.sum()))
        self.cloud = self.mask.nonzero()[:, 0]
        self.slot = self.mask.nonzero()[:, 1]

    def points(self, padded):
        """Select the rows of valid points: [b, N, *] to [points, *]."""
        return tensor(padded)[self.mask]

    def graph(self, pair, index=None, valid=None, keys=None, dtype=torch.float64):
        """Return the graph of the pairs of the file. ``keys`` [b, N] restricts the keys."""
        clouds, size = self.mask.shape
        if index is None:
            adjacent = torch.ones(clouds, size, size, dtype=torch.bool)
        else:
            adjacent = torch.zeros(clouds, size, size)
            there = torch.ones(index.shape) if valid is None else tensor(valid).float()
            adjacent = adjacent.scatter_add(2, tensor(index), there) > 0
        adjacent = adjacent & self.mask[:, :, None] & self.mask[:, None]
        if keys is not None:
            adjacent = adjacent & tensor(keys)[:, None]
        cloud, i, j = adjacent.nonzero(as_tuple=True)
        edges = torch.stack([self.number[cloud, j], self.number[cloud, i]])
        neighbors = Neighbors.from_edge_index(edges, int(self.mask.sum()))
        coordinates = tensor(pair)[self.edges_of(neighbors)][:, None, None].to(dtype)
        return pair_graph(neighbors, coordinates, self.cloud, clouds)

    def edges_of(self, neighbors):
        """Return the index (cloud, i, j) of each edge in an array [b, N, N, *]."""
        target, source = neighbors.target, neighbors.source
        return self.cloud[target], self.slot[target], self.slot[source]

    def dense(self, values, neighbors):
        """Convert [edges, h] to [points, h, N], with zeros for pairs without an edge."""
        out = torch.zeros(*self.mask.shape, self.mask.shape[1], values.shape[-1], dtype=values.dtype)
        out[self.edges_of(neighbors)] = values.detach()
        return out[self.mask].transpose(1, 2)

    def receivers(self, attention):
        """Convert [b, h, N, N] of the file to [points, h, N]."""
        return tensor(attention).transpose(1, 2)[self.mask]


def compare(name, found, expected, meta, tolerance=None, size=None):
    """Compare with the absolute tolerance of the file in float64, and relative to ``size`` in float32.

    The default of ``size`` is the largest expected entry.
    """
    found = found.detach()
    expected = expected if isinstance(expected, torch.Tensor) else tensor(expected)
    expected = expected.detach()
    assert found.shape == expected.shape, f"{name}: shape {tuple(found.shape)}, stored {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    error = (found.double() - expected.double()).abs().max()
    size = files.largest(expected[expected.isfinite()]) if size is None else size
    allowed = max(meta["tol"] if tolerance is None else tolerance, files.ROUNDING * size)
    if found.dtype == torch.float32:
        allowed = FLOAT32 * size
    assert error <= allowed, f"{name}: error {error:.1e} in {found.dtype}, allowed {allowed:.0e}"


def compare_stored(found, arrays, meta):
    """Compare tensors by name with the arrays of the file, which must contain at least one of them."""
    names = [name for name in found if name in arrays]
    assert names, f"nothing to compare: the file has none of {sorted(found)}"
    for name in names:
        compare(name, found[name], arrays[name], meta)


def load(module, parameters):
    """Load all parameters of a module from the file. In training it needs no running statistics."""
    statistics = {name: value for name, value in module.named_buffers() if "running" in name or "tracked" in name}
    module.load_state_dict(statistics | parameters, strict=True)
    return module.eval()


def linear(arrays, theirs, ours):
    return {f"{ours}.weight": tensor(arrays[f"{theirs}_W"]), f"{ours}.bias": tensor(arrays[f"{theirs}_b"])}


def head_network(arrays, theirs, ours):
    names = {}
    for number in (1, 2, 3):
        names[f"{ours}.weights.{number - 1}"] = tensor(arrays[f"{theirs}_W{number}"])
        names[f"{ours}.biases.{number - 1}"] = tensor(arrays[f"{theirs}_b{number}"])
    return names


def attention_parameters(arrays, prefix):
    names = linear(arrays, prefix + "value", "value") | linear(arrays, prefix + "out", "output")
    content = prefix + "query_W" in arrays
    alone = content and not any(prefix + other in arrays for other in ("loc_mlp_W1", "comb_mlp_W1", "location_W"))
    if content:
        where = "score" if alone else "score.content"
        names |= linear(arrays, prefix + "query", f"{where}.query") | linear(arrays, prefix + "key", f"{where}.key")
    if prefix + "loc_mlp_W1" in arrays:
        names |= head_network(arrays, prefix + "loc_mlp", "score.location")
    if prefix + "comb_mlp_W1" in arrays:
        names |= head_network(arrays, prefix + "comb_mlp", "score.combine")
    for theirs, ours in (("receiver", "receiver"), ("neighbour", "sender"), ("pair", "mix"), ("location", "position")):
        if prefix + theirs + "_W" in arrays:
            names |= linear(arrays, prefix + theirs, f"score.{ours}")
    for theirs, ours in (("content_bias", "content_bias"), ("location_bias", "position_bias")):
        if prefix + theirs in arrays:
            names[f"score.{ours}"] = tensor(arrays[prefix + theirs])
    return names


def norm_parameters(arrays, theirs, ours):
    names = {}
    for theirs_part, ours_part in (
        ("gain", "weight"),
        ("bias", "bias"),
        ("running_mean", "running_mean"),
        ("running_var", "running_var"),
    ):
        if f"{theirs}_{theirs_part}" in arrays:
            names[f"{ours}.{ours_part}"] = tensor(arrays[f"{theirs}_{theirs_part}"])
    return names


def block_parameters(arrays, prefix):
    names = {f"attention.{name}": array for name, array in attention_parameters(arrays, prefix).items()}
    for number in (1, 2):
        names[f"linear{number}.weight"] = tensor(arrays[f"{prefix}mlp_W{number}"])
        names[f"linear{number}.bias"] = tensor(arrays[f"{prefix}mlp_b{number}"])
    names |= norm_parameters(arrays, prefix + "norm_attn", "norm_attention")
    return names | norm_parameters(arrays, prefix + "norm_mlp", "norm_mlp")
