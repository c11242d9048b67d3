"""Compare a golden file of Affine Self Convolution with the layers of the library.

The files number group elements MIR^m ROT^r on displacements (row, column), and index tables by row and column. The
library has ``trivial(2)``, ``cyclic(4)`` and ``dihedral(4)`` on (right, up). Elements of both are matched as matrices,
not by formulas for their numbers.
"""

import math

import numpy as np
import torch
from torch.func import functional_call

from lieattn.geometry import PixelSquare, PointClouds, Raster, lift, pixel_positions
from lieattn.groups import cyclic, dihedral, trivial
from lieattn.models import AffineSelfConvNet, BottleneckBlock
from lieattn.models.affine._network import MeanReadout
from lieattn.nn import AffineSelfConvolution, GroupSqueezeExcite, SimpleAffineSelfConvolution, StandAloneSelfAttention
from lieattn.nn.relative import RelativePositionTable
from tests.parity import files

# In float32 a network rounds in every layer, not only its input.
ROUNDINGS = 8
ROT = np.array([[0, -1], [1, 0]])
MIR = np.array([[-1, 0], [0, 1]])
GROUPS = {"z2": (trivial(2), 1, 1), "p4": (cyclic(4), 1, 4), "p4m": (dihedral(4), 2, 4)}
# From displacements (row, column) to (right, up).
TO_PLANE = np.array([[0, 1], [-1, 0]])


def check(path):
    arrays = files.load(path)
    case = files.text(arrays["case"])
    if case not in CASES:
        raise AssertionError(f"{path.name}: unknown case {case!r}; known are {sorted(CASES)}")
    for dtype in files.dtypes(arrays):
        file = File(arrays, dtype)
        if case == "network" and dtype == torch.float32:
            file.conditioning = conditioning(arrays, case)
        outputs = CASES[case](file, file.leaf("x"))
        file.compare_all(outputs)
        if "x_g" in arrays and f"{file.names(outputs)[-1]}_g" in arrays:
            with torch.no_grad():
                moved = CASES[case](file, file.tensor("x_g"))
            file.compare(f"{file.names(moved)[-1]}_g", moved[file.names(moved)[-1]])


def conditioning(arrays, case):
    """Return the errors of outputs, relative to their largest entries, if only the input is rounded to float32.

    Scores of a network can be so large that softmax magnifies rounding errors of earlier layers: half a unit in the
    last place of the input of ``net_p4_asc_small`` changes its features by up to 6e-6, and the errors of float32
    evaluations of it, with plain operations or fused, are 2e-6 to 2e-5.
    """
    file, largest = File(arrays, torch.float64), {}
    x, draw = file.tensor("x"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        exact = CASES[case](file, x)
        for _ in range(8):
            noise = torch.rand(x.shape, generator=draw, dtype=x.dtype) - 0.5
            moved = CASES[case](file, x * (1 + torch.finfo(torch.float32).eps * noise))
            for name, value in moved.items():
                change = float((value - exact[name]).abs().max() / exact[name].abs().max())
                largest[name] = max(largest.get(name, 0.0), change)
    return largest


class File:
    """Arrays of a file as tensors of one dtype, and its conventions."""

    def __init__(self, arrays, dtype):
        self.arrays, self.dtype, self.leaves, self.conditioning = arrays, dtype, {}, {}
        name = files.text(arrays["group"])
        if name not in GROUPS:
            raise AssertionError(f"unknown group {name!r}; known are {sorted(GROUPS)}")
        self.group, mirrors, turns = GROUPS[name]
        self.planar = name == "z2"
        matrices = [
            TO_PLANE @ np.linalg.matrix_power(MIR, m) @ np.linalg.matrix_power(ROT, r) @ TO_PLANE.T
            for m in range(mirrors)
            for r in range(turns)
        ]
        # ours[k] is the library's number of the file's element k, and theirs[k] is the inverse map.
        self.ours = self.group.index(torch.from_numpy(np.stack(matrices)).double())
        self.theirs = self.ours.argsort()

    def tensor(self, name):
        return torch.from_numpy(np.ascontiguousarray(self.arrays[name])).to(self.dtype)

    def leaf(self, name):
        if name not in self.leaves:
            self.leaves[name] = self.tensor(name).requires_grad_()
        return self.leaves[name]

    def text(self, name, default=None):
        return files.text(self.arrays[name]) if name in self.arrays else default

    def number(self, name, default=None):
        return files.plain(self.arrays[name]) if name in self.arrays else default

    def names(self, found):
        """Return the names of the outputs in the file: those that it lists, or all that are found."""
        listed = self.arrays.get("outputs", [name for name in found if name in self.arrays])
        return [files.text(name) for name in np.atleast_1d(listed)]

    def points(self, x):
        """Convert [B, C, (H), X, Y] to [points, fiber, C]."""
        x = x[:, :, None] if self.planar else x[:, :, self.theirs]
        return x.permute(0, 3, 4, 2, 1).flatten(0, 2)

    def images(self, field, raster):
        """Convert [points, fiber, C] to [B, C, (H), X, Y]."""
        x = field.unflatten(0, (raster.images, *raster.sides)).permute(0, 4, 3, 1, 2)
        return x[:, :, 0] if self.planar else x[:, :, self.ours]

    def graph(self, raster, size):
        pos = pixel_positions(*raster.sides, dtype=self.dtype).repeat(raster.images, 1, 1)
        return lift(pos, self.group, PixelSquare(size))

    def frames(self, table):
        """Convert [d, (H), ...] to [H, d, ...], with H in the order of the library."""
        return table[None] if self.planar else table[:, self.theirs].movedim(1, 0)

    def linear(self, name):
        """Convert [o, C, (H)] to [H, o, C]."""
        weight = self.leaf(name)
        return weight[None] if self.planar else weight[..., self.theirs].movedim(-1, 0)

    def compare_all(self, outputs):
        names = self.names(outputs)
        assert names, "a file must hold outputs"
        for name in names:
            if name not in outputs:
                raise AssertionError(f"no output {name!r}; there are {sorted(outputs)}")
            self.compare(name, outputs[name])
        if gradients := files.gradients(self.arrays):
            (outputs[names[-1]] * self.tensor("cotangent")).sum().backward()
            # Vanishing gradients are differences of large terms, so all are compared with the largest entry of all.
            size = max(files.largest(self.arrays[f"grad_{name}"]) for name in gradients)
            for name in gradients:
                leaf = self.leaves[name]
                self.compare(f"grad_{name}", torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, size)

    def compare(self, name, found, size=None):
        found, expected = found.detach().double(), torch.from_numpy(np.asarray(self.arrays[name])).double()
        assert found.shape == expected.shape, f"{name}: shape {tuple(found.shape)}, stored {tuple(expected.shape)}"
        assert torch.isfinite(found).all(), name
        size = files.largest(expected) if size is None else size
        error = files.largest(found - expected)
        allowed = 1e-5 * size if self.dtype == torch.float32 else 1e-10 * max(1.0, size)
        allowed = max(allowed, ROUNDINGS * self.conditioning.get(name.removesuffix("_g"), 0.0) * size)
        if self.dtype == torch.float64 and name in ("features", "features_g"):
            allowed = 1e-11 * size
        assert error <= allowed, f"{name} in {self.dtype}: error {error:.1e}, largest entry {size:.1e}"


def offset_numbers(size):
    """Return the file's number, row by row, of each row of the window in the library."""
    right, up = torch.tensor(RelativePositionTable.square(size).offsets).round().long().unbind(1)
    return (size // 2 - up) * size + size // 2 + right


def table_rows(table):
    """Convert [..., k, k] to [..., rows] in the order of the library."""
    return table.flatten(-2)[..., offset_numbers(table.shape[-1])]


def affine_layer(file, prefix=""):
    """Return the layer that a file or a block of it describes, and its parameters by the names of the library."""

    def has(name):
        return prefix + name in file.arrays

    def leaf(name):
        return file.leaf(prefix + name)

    table = "psi_K" if has("psi_K") else "psi" if has("psi") else "beta_row"
    size = file.arrays[prefix + table].shape[-1]
    heads = file.number(f"{prefix}heads", 1)
    options = {"heads": heads, "scale": file.number(f"{prefix}score_scale")}
    positions = RelativePositionTable.square(size, border=file.text(f"{prefix}border", "zero"))
    if table == "psi" and not has("W"):
        channels = in_channels = out_channels = len(file.arrays[prefix + "psi"])
    else:
        channels, in_channels = file.arrays[prefix + ("W" if table == "psi" else "W_Q")].shape[:2]
        out_channels = len(file.arrays[prefix + "W_O"])
    kind = {"psi_K": AffineSelfConvolution, "psi": SimpleAffineSelfConvolution, "beta_row": StandAloneSelfAttention}
    layer = kind[table](file.group, in_channels, out_channels, positions, channels=channels, **options)

    def map_parameters(name, suffix=""):
        psi = file.frames(leaf(f"psi{suffix}"))
        return {f"{name}.psi": table_rows(psi).movedim(1, 2), f"{name}.beta": table_rows(leaf(f"beta{suffix}")).mT}

    names = {"query": "Q", "key": "K", "value": "V"}
    if table == "psi" and not has("W"):
        eye = torch.zeros(file.group.order, channels, channels, dtype=file.dtype)
        eye[file.group.identity_index] = torch.eye(channels, dtype=file.dtype)
        return layer.to(file.dtype), map_parameters("affine_map") | {
            "embedding.weight": eye,
            "embedding.bias": torch.zeros(channels, dtype=file.dtype),
            "output.weight": eye,
        }
    parameters = {"output.weight": file.linear(f"{prefix}W_O")}
    if table == "psi":
        parameters |= {"embedding.weight": file.linear(f"{prefix}W"), "embedding.bias": leaf("b")}
        return layer.to(file.dtype), parameters | map_parameters("affine_map")
    for ours, theirs in names.items():
        parameters |= {f"{ours}.weight": file.linear(f"{prefix}W_{theirs}"), f"{ours}.bias": leaf(f"b_{theirs}")}
    if table == "psi_K":
        parameters |= {"query_map.psi": file.frames(leaf("psi_Q")), "query_map.beta": leaf("beta_Q")}
        parameters |= map_parameters("key_map", "_K") | map_parameters("value_map", "_V")
        return layer.to(file.dtype), parameters
    # The first half of a head belongs to the coordinate to the right in the library, and to the row in the file.
    halves = torch.arange(channels).unflatten(0, (heads, 2, -1)).flip(1).flatten()
    for name in ("query", "key"):
        parameters[f"{name}.weight"] = parameters[f"{name}.weight"][:, halves]
        parameters[f"{name}.bias"] = parameters[f"{name}.bias"][halves]
    parameters["axis_keys.axes.0"] = leaf("beta_col").movedim(2, 0)
    parameters["axis_keys.axes.1"] = leaf("beta_row").movedim(2, 0).flip(0)
    return layer.to(file.dtype), parameters


class _Attend(torch.nn.Module):
    """A layer that also returns its weights and the input of its output map, for functional_call."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, graph):
        before = []
        handle = self.layer.output.register_forward_pre_hook(lambda module, inputs: before.append(inputs[0]))
        out, weights = self.layer.attend(x, graph, return_weights=True)
        handle.remove()
        return out, before[0], weights


def check_layer(file, x):
    layer, parameters = affine_layer(file)
    raster = Raster(len(x), tuple(x.shape[-2:]))
    size = round(len(layer.positions.offsets) ** 0.5)
    graph = file.graph(raster, size)
    inputs = (file.points(x), graph)
    out, z, weights = called(_Attend(layer), within("layer", parameters), *inputs)
    edges = layer.positions.edges(graph)
    numbers = offset_numbers(size)[edges.index]
    alpha = weights.new_zeros(graph.num_points, size**2, *weights.shape[1:])
    alpha = alpha.index_put((edges.neighbors.target, numbers), weights)
    # [points, offsets, fiber, heads] to [B, heads, (H), X, Y, offsets]
    alpha = alpha.unflatten(0, (raster.images, *raster.sides)).permute(0, 5, 4, 1, 2, 3)
    alpha = alpha[:, :, 0] if file.planar else alpha[:, :, file.ours]
    return {"alpha": alpha, "z": file.images(z, raster), "out": file.images(out, raster)}


def check_squeeze_excite(file, x):
    raster = Raster(len(x), tuple(x.shape[-2:]))
    layer, state = squeeze_excite(file, "")
    points = math.prod(raster.sides)
    clouds = PointClouds(
        pos=torch.zeros(raster.images * points, 2, dtype=file.dtype),
        batch=torch.arange(raster.images).repeat_interleave(points),
        num_clouds=raster.images,
    )
    field = file.points(x)
    out = file.images(called(layer, state, field, clouds), raster)
    with torch.no_grad():
        layer.load_state_dict(state)
        return {"scale": layer.scale(field, clouds), "out": out}


def squeeze_excite(file, prefix):
    hidden, channels = file.arrays[f"{prefix}W2"].shape
    names = {"squeeze.weight": "W2", "squeeze.bias": "b2", "excite.weight": "W1", "excite.bias": "b1"}
    layer = GroupSqueezeExcite(channels)
    # The number of hidden units need not divide that of the channels.
    layer.squeeze, layer.excite = torch.nn.Linear(channels, hidden), torch.nn.Linear(hidden, channels)
    layer = layer.to(file.dtype)
    return layer, {ours: file.leaf(prefix + theirs) for ours, theirs in names.items()}


def check_bottleneck(file, x):
    block, state = bottleneck(file)
    out, raster = called(block, state, file.points(x), Raster(len(x), tuple(x.shape[-2:])))
    return {"out": file.images(out, raster)}


def bottleneck(file, prefix=""):
    """Return the block of a file, in eval mode, and its parameters and statistics."""
    layer, parameters = affine_layer(file, f"{prefix}asc.")
    width, in_channels = file.arrays[f"{prefix}W_in"].shape[:2]
    out_channels = len(file.arrays[f"{prefix}W_out"])
    projection, excited = f"{prefix}W_short" in file.arrays, f"{prefix}se.W2" in file.arrays
    block = BottleneckBlock(
        file.group,
        in_channels,
        width,
        out_channels,
        layer,
        size=round(len(layer.positions.offsets) ** 0.5),
        downsample=bool(file.number(f"{prefix}downsample", 0)),
        shortcut=file.text(f"{prefix}shortcut", "pooled"),
        projection=projection,
    )
    state = within("layer", parameters)
    linears = {"linear1": "W_in", "linear2": "W_out"} | ({"shortcut_linear": "W_short"} if projection else {})
    state |= {f"{ours}.weight": file.linear(prefix + theirs) for ours, theirs in linears.items()}
    norms = {"norm1": "bn1", "norm2": "bn2", "norm3": "bn3"} | ({"shortcut_norm": "bn_short"} if projection else {})
    for ours, theirs in norms.items():
        state |= norm_state(file, ours, prefix + theirs)
    if excited:
        block.squeeze_excite, parameters = squeeze_excite(file, f"{prefix}se.")
        state |= within("squeeze_excite", parameters)
    return block.to(file.dtype).eval(), state


def norm_state(file, ours, theirs):
    parameters = {"weight": file.leaf(f"{theirs}.gamma"), "bias": file.leaf(f"{theirs}.beta")}
    statistics = {"running_mean": file.tensor(f"{theirs}.mean"), "running_var": file.tensor(f"{theirs}.var")}
    return within(ours, parameters | statistics | {"num_batches_tracked": torch.tensor(0)})


def called(module, state, *inputs):
    """Call the module with these parameters and statistics, which must be complete."""
    different = sorted(set(state) ^ set(module.state_dict()))
    assert not different, f"parameters of only one of the file and the library: {different}"
    return functional_call(module, state, inputs)


def within(prefix, state):
    return {f"{prefix}.{name}": tensor for name, tensor in state.items()}


class _Features(torch.nn.Module):
    """A network that also returns its last field, for functional_call."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):
        return self.network.field(images).x, self.network(images)


def check_network(file, x):
    parts = [bottleneck(file, f"block{number + 1}.") for number in range(file.number("blocks"))]
    (width, in_channels, *_), (classes, last) = (file.arrays[name].shape for name in ("stem.kernel", "fc.weight"))
    network = AffineSelfConvNet(file.group, in_channels, classes, channels=width, heads=1, blocks=1)
    network.blocks = torch.nn.ModuleList(block for block, _ in parts)
    network.head = MeanReadout(last, classes)
    state = {"stem.weight": file.leaf("stem.kernel"), **norm_state(file, "stem_norm", "stem.bn")}
    state |= {"head.weight": file.leaf("fc.weight"), "head.bias": file.leaf("fc.bias")}
    for number, (_, part) in enumerate(parts):
        state |= within(f"blocks.{number}", part)
    network = _Features(network.to(file.dtype).eval())
    field, logits = called(network, within("network", state), x)
    halvings = sum(block.downsample for block, _ in parts)
    raster = Raster(len(x), tuple(side // 2**halvings for side in x.shape[-2:]))
    return {"features": file.images(field, raster), "logits": logits}


CASES = {
    "asc": check_layer,
    "simple": check_layer,
    "sasa": check_layer,
    "group_se": check_squeeze_excite,
    "bottleneck": check_bottleneck,
    "network": check_network,
}
