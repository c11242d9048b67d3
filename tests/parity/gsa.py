"""Compare a golden file of GSA-Nets with the layers of the library.

The index k of a frame in the file stands for the encoding of A_k (x_j - x_i); the library encodes h⁻¹(x_j - x_i) at
frame h. All indices, including the rows of the frame encoding, agree for the group whose k-th element is A_k⁻¹.
"""

import copy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch.func import functional_call

from lieattn.geometry import AllPairs, PixelSquare, lift, point_clouds
from lieattn.groups import FiniteGroup
from lieattn.models import GSANet, GSAOptions, Stages
from lieattn.nn import CloudNorm, GroupSelfAttention, LiftingSelfAttention, PreNormBlock
from lieattn.nn.relative import CoordinateEncoding, CoordinateNetwork
from tests.parity import files

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def check(path):
    arrays, meta = files.read(path)
    kind = meta.get("kind")
    if kind not in KINDS:
        raise AssertionError(f"{path.name}: unknown kind {kind!r}; known are {sorted(KINDS)}")
    for dtype in files.dtypes(arrays):
        KINDS[kind](arrays, meta, dtype)


def check_encoding(arrays, meta, dtype):
    network = CoordinateNetwork(len(arrays["row_b2"]), len(arrays["row_w1"])).to(dtype)
    out = functional_call(network, _network_parameters(_leaves(arrays, dtype), "row"), _tensor(arrays["p"], dtype))
    _compare("out_f64", out, arrays["out_f64"], dtype)


def check_layer(arrays, meta, dtype):
    leaves = _leaves(arrays, dtype)
    layer, graph = _layer(arrays, meta, dtype)
    x = leaves["x"]
    points = _to_points(x)
    parameters = _layer_parameters(leaves)

    if meta["kind"].endswith("local") or graph.length == meta["size"] - 1:
        own = functional_call(layer, parameters, (points, graph))
        error = files.largest(_to_images(own, x).detach() - _tensor(arrays["out_f64"], dtype))
        assert error < 1e-5 * max(1, files.largest(arrays["out_f64"])), f"own coordinates: {error:.1e}"

    graph = _with_coordinates(graph, arrays["coords"])
    attend = _Attend(layer)
    out, weights = functional_call(attend, {f"layer.{k}": v for k, v in parameters.items()}, (points, graph))
    out = _to_images(out, x)
    _compare("out_f64", out, arrays["out_f64"], dtype)
    if "out_f32" in arrays:
        _compare("out_f32", out, arrays["out_f32"], torch.float32)
    for found, expected in _probabilities(weights, graph, arrays, meta) if "probs_f64" in arrays else ():
        _compare("probs_f64", found, expected, dtype)
    names = files.gradients(arrays)
    assert names or "R" not in arrays, "a file with R must hold gradients"
    if names:
        (out * _tensor(arrays["R"], dtype)).sum().backward()
        # Vanishing gradients are differences of large terms, so all are compared with the largest entry of all.
        # Arrays that do not vanish are also compared with the looser bound that the README states for float32.
        stored = {name: arrays[f"grad_{name}"] for name in names}
        largest = max(files.largest(array) for array in stored.values())
        for name, expected in stored.items():
            leaf = leaves[name]
            found = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            _compare(f"grad_{name}", found, expected, dtype, size=largest)
            if dtype == torch.float32 and files.largest(expected) > 1e-9 * largest:
                error = files.largest(found - _tensor(expected, dtype))
                assert error < 1e-4 * max(1, files.largest(expected)), f"grad_{name}: error {error:.1e}"


def check_network(arrays, meta, dtype):
    for table, out, turned in (("table", "out", "out_rot90"), ("table_eq", "out_eq", "out_eq_rot90")):
        if table not in arrays or f"{out}_f64" not in arrays:
            assert table == "table_eq", f"a file of a network must hold {table} and {out}_f64"
            continue
        network = _network(arrays, meta, dtype, arrays[table])
        parameters = _network_arrays(_leaves(arrays, dtype), network)
        network.load_state_dict(parameters, strict=True)
        image = _tensor(arrays["x"], dtype)
        with torch.no_grad():
            fields, logits = _run_network(network, image, arrays)
            _compare(f"{out}_f64", logits, arrays[f"{out}_f64"], dtype)
            if f"{out}_f32" in arrays:
                _compare(f"{out}_f32", logits, arrays[f"{out}_f32"], torch.float32)
            for name, field in fields.items():
                if table == "table" and f"act_f64/{name}" in arrays:
                    _compare(f"act_f64/{name}", field, arrays[f"act_f64/{name}"], dtype)
            if f"{turned}_f64" in arrays:
                _, logits = _run_network(network, image.rot90(1, (-2, -1)), arrays)
                _compare(f"{turned}_f64", logits, arrays[f"{turned}_f64"], dtype)


KINDS = {
    "positional_mlp": check_encoding,
    "lift_local": check_layer,
    "lift_global": check_layer,
    "group_local": check_layer,
    "group_global": check_layer,
    "network": check_network,
}


class _Attend(torch.nn.Module):
    """A layer that also returns its weights, for functional_call."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, graph):
        return self.layer.attend(x, graph, return_weights=True)


def _layer(arrays, meta, dtype):
    group = _group(arrays)
    heads, width, c_in = arrays["W_q"].shape
    sizes = {"heads": heads, "head_channels": width}
    if meta["kind"].startswith("lift"):
        layer = LiftingSelfAttention(group, c_in, len(arrays["W_o"]), **sizes)
    else:
        encoding = CoordinateEncoding(2, width, group, torch.from_numpy(arrays["table"]).long())
        layer = GroupSelfAttention(group, c_in, len(arrays["W_o"]), encoding=encoding, **sizes)
    height, columns = arrays["x"].shape[-2:]
    local = meta["kind"].endswith("local")
    neighborhood = PixelSquare(meta["size"]) if local else AllPairs()
    length = None if local else float(max(height, columns, meta["size"]) - 1)
    return layer.to(dtype).eval(), _graph(len(arrays["x"]), height, columns, group, neighborhood, length, dtype)


def _graph(images, height, width, group, neighborhood, length, dtype):
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    pos = torch.stack([rows, columns], dim=-1).reshape(1, -1, 2).to(dtype).repeat(images, 1, 1)
    return lift(pos, group, neighborhood, length=length)


def _with_coordinates(graph, coords):
    """Return the graph with the coordinates of the file, which were rounded to float32."""
    radius = (np.array(coords.shape[1:3]) - 1) // 2
    own = graph.relative.positions[:, graph.group.identity_index] * int(radius.max())
    offset = own.round().long() + torch.from_numpy(radius)
    assert files.largest(own - own.round()) < 1e-3, f"coords: {tuple(coords.shape)} does not fit the neighborhood"
    stored = _tensor(coords, graph.pos.dtype)[:, offset[:, 0], offset[:, 1]]
    relative = copy.copy(graph.relative)
    object.__setattr__(relative, "_positions", stored.transpose(0, 1))
    return graph.with_relative(relative)


def _layer_parameters(leaves, prefix=""):
    def array(name):
        return leaves[prefix + name]

    parameters = {"output.weight": array("W_o").flatten(1), "output.bias": array("b_o")}
    for name in ("query", "key", "value"):
        parameters[f"{name}.weight"] = array(f"W_{name[0]}").flatten(0, 1)
        parameters[f"{name}.bias"] = array(f"b_{name[0]}").flatten()
    for number, axis in enumerate(("row", "col")):
        for name, tensor in _network_parameters(leaves, prefix + axis).items():
            parameters[f"encoding.axes.{number}.{name}"] = tensor
    if prefix + "E_group" in leaves:
        parameters["encoding.fiber.weight"] = array("E_group")
    return parameters


def _network_parameters(leaves, axis):
    return {
        "linear1.weight": leaves[f"{axis}_w1"][:, None],
        "linear1.bias": leaves[f"{axis}_b1"],
        "norm.weight": leaves[f"{axis}_gain"],
        "norm.bias": leaves[f"{axis}_shift"],
        "linear2.weight": leaves[f"{axis}_w2"],
        "linear2.bias": leaves[f"{axis}_b2"],
    }


def _probabilities(weights, graph, arrays, meta):
    """Yield pairs (found, stored) for each query pixel and image."""
    height, width = arrays["x"].shape[-2:]
    stored = arrays["probs_f64"]
    local = meta["kind"].endswith("local")
    lifting = meta["kind"].startswith("lift")
    radius = (meta["size"] - 1) // 2
    for image in range(len(arrays["x"])):
        for number, (row, column) in enumerate(arrays["probs_pixels"].tolist()):
            edges = (graph.neighbors.target == (image * height + row) * width + column).nonzero()[:, 0]
            source = graph.neighbors.source[edges] % (height * width)
            at = torch.stack([source // width, source % width])
            if local:
                at = at - torch.tensor([[row], [column]]) + radius
            found = weights.new_zeros(*weights.shape[1:], *stored.shape[-2:])
            found[..., at[0], at[1]] = weights[edges].movedim(0, -1)
            # [out, query, key, heads, K, K] to the file's [heads, out(, query, key), K, K]
            found = found.movedim(3, 0)
            expected = stored[image, :, :, number] if lifting else stored[image, :, :, :, number]
            yield (found[:, :, 0, 0] if lifting else found), expected


def _network(arrays, meta, dtype, table):
    blocks, crops, widths, pool_last = [0], [], [meta["channels"]], False
    for step in meta["program"]:
        op = step["op"]
        if op == "block":
            if pool_last:
                blocks.append(0)
                pool_last = False
            widths.append(len(arrays[f"{step['name']}/attn/W_o"]))
            blocks[-1] += 1
            crops.append(step["crop"])
        elif op == "maxpool2x2":
            if pool_last:
                blocks.append(0)
            pool_last = True
        elif "norm" not in op and not op.startswith(("dropout", "linear", "act", "between")):
            raise AssertionError(f"unknown step {step} in the program of a network")
    activation = {"swish": "silu"}.get(meta["activation"], meta["activation"])
    between = any(name.startswith("between") for name in arrays)
    network = GSANet(
        _group(arrays),
        arrays["x"].shape[1],
        meta["classes"],
        channels=meta["channels"],
        blocks=Stages(blocks, None, crops, pool_last, between, inexact="allow"),
        heads=meta["heads"],
        neighborhood=PixelSquare(meta["size"]),
        options=GSAOptions(
            values=False, frame_table=torch.from_numpy(table).long(), pattern="query_sum", activation=activation
        ),
    )
    if len(set(widths)) > 1:
        _widen(network, widths)
    for number, (block, (width, wider)) in enumerate(zip(network.blocks, pairwise(widths), strict=True)):
        # In the library only a block that changes the width has a linear map beside the attention.
        if f"block{number}/skip_w" in arrays:
            block.skip = torch.nn.Linear(width, wider)
    return network.to(dtype).eval()


def _widen(network, widths):
    """Give each block its own number of output channels, since in the library all blocks of a stage have the same."""
    heads, frame_table = network.lifting.heads, network.options.frame_table
    for number, (width, wider) in enumerate(pairwise(widths)):
        encoding = CoordinateEncoding(2, wider // 2, network.group, frame_table)
        attention = GroupSelfAttention(
            network.group, width, wider, heads=heads, head_channels=wider // 2, encoding=encoding
        )
        network.blocks[number] = PreNormBlock(attention, width, wider, activation=network.activation)
        if network.stages.norm_between:
            network.between[number] = CloudNorm(wider)
    network.head.weight = torch.nn.Parameter(network.head.weight.new_empty(len(network.head.weight), widths[-1]))


def _network_arrays(leaves, network):
    parameters = {f"lifting.{k}": v for k, v in _layer_parameters(leaves, "lift/").items()}
    parameters["head.weight"] = leaves["head_w"]
    norms = {"lifting_norm": "lift_norm"}
    for i in range(len(network.blocks)):
        block, theirs = f"blocks.{i}", f"block{i}"
        attention = _layer_parameters(leaves, f"{theirs}/attn/")
        parameters |= {f"{block}.attention.{k}": v for k, v in attention.items()}
        norms |= {f"{block}.norm_in": f"{theirs}/norm_in", f"{block}.norm_attention": f"{theirs}/norm_attn"}
        norms |= {f"{block}.norm{k}": f"{theirs}/mlp_norm{k}" for k in (1, 2)}
        for k in (1, 2):
            parameters[f"{block}.linear{k}.weight"] = leaves[f"{theirs}/mlp_w{k}"]
            parameters[f"{block}.linear{k}.bias"] = leaves[f"{theirs}/mlp_b{k}"]
        if f"{theirs}/skip_w" in leaves:
            parameters[f"{block}.skip.weight"] = leaves[f"{theirs}/skip_w"]
            parameters[f"{block}.skip.bias"] = leaves[f"{theirs}/skip_b"]
        if network.stages.norm_between:
            norms[f"between.{i}"] = f"between{i}"
    for ours, theirs in norms.items():
        parameters[f"{ours}.weight"] = leaves[f"{theirs}_gain"]
        parameters[f"{ours}.bias"] = leaves[f"{theirs}_shift"]
    return {name: tensor.detach() for name, tensor in parameters.items()}


def _run_network(network, image, arrays):
    """Return the fields by the names of the file, and the logits."""
    images, _, height, width = image.shape
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    pos = torch.stack([rows, columns], dim=-1).reshape(1, -1, 2).to(image).repeat(images, 1, 1)
    grid = torch.tensor([[height, width]]).repeat(images, 1)
    mask = torch.ones(pos.shape[:2], dtype=torch.bool)
    geometry = network.geometry(point_clouds(pos, mask=mask, grid=grid))
    steps = []
    numbers = iter(range(len(network.blocks)))
    for stage in geometry.stages:
        renewed = [_with_coordinates(graph, arrays[f"block{next(numbers)}/attn/coords"]) for graph in stage]
        steps.append(tuple(renewed))
    lifting = _with_coordinates(geometry.lifting, arrays["lift/coords"])
    geometry = replace(geometry, lifting=lifting, stages=tuple(steps))
    features = network.features(_to_points(image), geometry)
    head = features[-1] @ network.head.weight.mT
    logits = network.head(features[-1], geometry.graph)
    left = [graph if graph.kept is None else graph.kept.clouds for stage in geometry.stages for graph in stage]
    sizes = [geometry.lifting, *left, geometry.graph]
    names = ["lift"] + [f"block{i}" for i in range(len(network.blocks))] + ["head"]
    fields = {
        name: _images_of(field, size) for name, field, size in zip(names, [*features[:-1], head], sizes, strict=True)
    }
    return fields, logits


def _images_of(field, clouds):
    height, width = clouds.grid[0].tolist()
    return field.unflatten(0, (clouds.num_clouds, height, width)).permute(0, 4, 3, 1, 2)


def _group(arrays):
    return FiniteGroup.from_matrices(torch.from_numpy(arrays["A"]).mT, "golden", tolerance=1e-6)


def _leaves(arrays, dtype):
    leaves = {
        name: _tensor(array, dtype).requires_grad_()
        for name, array in arrays.items()
        if np.issubdtype(array.dtype, np.floating)
    }
    return files.Named(arrays.file, leaves)


def _tensor(array, dtype):
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)


def _to_points(x):
    """Convert [B, C, (O,) H, W] to [points, (O,) C]."""
    if x.ndim == 4:
        return x.permute(0, 2, 3, 1).flatten(0, 2)
    return x.permute(0, 3, 4, 2, 1).flatten(0, 2)


def _to_images(field, like):
    """Convert [points, O, C] to [B, C, O, H, W]."""
    return field.unflatten(0, (like.shape[0], *like.shape[-2:])).permute(0, 4, 3, 1, 2)


def _compare(name, found, expected, dtype, size=None):
    found, expected = found.detach().double(), torch.from_numpy(np.asarray(expected)).double()
    assert found.shape == expected.shape, f"{name}: shape {tuple(found.shape)}, stored {tuple(expected.shape)}"
    size = max(1, files.largest(expected) if size is None else size)
    error = files.largest(found - expected) / size
    assert error < TOLERANCE[dtype], f"{name} in {dtype}: relative error {error:.1e}"
