"""Compare a golden file of attentive group convolution with the layers and networks of the library.

The groups are built with their elements in the order of the files, so that all indices agree.
"""

import numpy as np
import torch
from torch import nn

from lieattn.groups import FiniteGroup
from lieattn.models import (
    AttentiveAllCNN,
    AttentiveCNN,
    AttentiveDenseBlock,
    AttentiveResidualBlock,
    AttentiveTransition,
    published_attentive_cnn,
)
from lieattn.nn import (
    FieldBatchNorm,
    GridAttentiveConvolution,
    GridAttentiveLifting,
    GridGroupConvolution,
    GridInputAttention,
    GridLiftingConvolution,
    GridPoseAttention,
    GridSpatialPool,
)
from lieattn.ops import AttentionMaps, residual_branch
from lieattn.viz import attention_picture
from tests.parity import files


def check(path):
    arrays = files.load(path)
    case = files.text(arrays["case"])
    if case not in CASES:
        raise AssertionError(f"{path.name}: unknown case {case!r}; known are {sorted(CASES)}")
    for dtype in files.dtypes(arrays):
        file = File(arrays, dtype)
        found = CASES[case](file)
        listed = arrays.get("outputs", [name for name in found if name in arrays])
        outputs = [files.text(name) for name in np.atleast_1d(listed)]
        assert outputs, "a file must hold outputs"
        for name in outputs:
            if found.get(name) is None:
                there = sorted(other for other, output in found.items() if output is not None)
                raise AssertionError(f"{path.name}: no output {name!r}; there are {there}")
            file.compare(name, found[name])
        file.check_gradients(found[outputs[-1]])
        if "x_g" in arrays and f"{outputs[-1]}_g" in arrays:
            with torch.no_grad():
                moved = CASES[case](File(arrays | {"x": arrays["x_g"]}, dtype))
            file.compare(f"{outputs[-1]}_g", moved[outputs[-1]])


class File:
    """The arrays of a file as tensors of one dtype, and the parameters that were loaded from it."""

    def __init__(self, arrays, dtype):
        self.arrays, self.dtype = arrays, dtype
        self.group = group_named(files.text(arrays["group"]))
        self.parameters = {}
        self.x = None
        if files.text(arrays["case"]) != "residual":
            self.x = self.parameters["x"] = self.tensor("x").requires_grad_()

    def __contains__(self, name):
        return name in self.arrays

    def tensor(self, name):
        return torch.from_numpy(np.ascontiguousarray(self.arrays[name])).to(self.dtype)

    def number(self, name, default):
        return files.plain(self.arrays[name]) if name in self.arrays else default

    def text(self, name, default):
        return files.text(self.arrays.get(name, default))

    def field(self):
        """Return x with an axis of poses, also for the group of translations."""
        batch, channels = self.x.shape[:2]
        return self.x.reshape(batch, channels, self.group.order, *self.x.shape[-2:])

    def load(self, name, parameter):
        stored = self.tensor(name)
        assert stored.numel() == parameter.numel(), f"{name}: {tuple(stored.shape)} for {tuple(parameter.shape)}"
        with torch.no_grad():
            parameter.copy_(stored.reshape(parameter.shape))
        self.parameters[name] = parameter

    def compare(self, name, found, size=None):
        """Compare with an array of the file, which may lack the axis of poses."""
        expected = torch.from_numpy(np.asarray(self.arrays[name])).double()
        assert found.numel() == expected.numel(), f"{name}: {tuple(found.shape)}, stored {tuple(expected.shape)}"
        self.agree(name, found.reshape(expected.shape), expected, size)

    def agree(self, name, found, expected, size=None):
        """Compare up to 1e-10 in float64, in float32 relative to ``size``, by default the largest expected entry."""
        found, expected = found.detach().double(), expected.detach().double()
        size = files.largest(expected) if size is None else size
        allowed = max(1e-10, files.ROUNDING * size) if self.dtype == torch.float64 else 1e-5 * size
        error = files.largest(found - expected)
        assert error <= allowed, f"{name} in {self.dtype}: error {error:.1e}, allowed {allowed:.1e}"

    def check_gradients(self, out):
        if names := files.gradients(self.arrays):
            (out * self.tensor("cotangent").reshape(out.shape)).sum().backward()
            # Vanishing gradients are differences of large terms, so all are compared with the largest entry of all.
            size = max(files.largest(self.arrays[f"grad_{name}"]) for name in names)
            for name in names:
                leaf = self.parameters[name]
                self.compare(f"grad_{name}", torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, size)


# --- layers ---------------------------------------------------------------------------------------------------


def group_named(name):
    """Return z2, p4 or p4m with elements MIR^m ROT^r in the order of the files, acting on (right, up)."""
    known = {"z2": (1, 1), "p4": (1, 4), "p4m": (2, 4)}
    if name not in known:
        raise AssertionError(f"unknown group {name!r}; known are {sorted(known)}")
    mirrors, turns = known[name]
    rot, mir = torch.tensor([[0.0, -1.0], [1.0, 0.0]]), torch.diag(torch.tensor([-1.0, 1.0]))
    # From (row, column) to (right, up).
    to_plane = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    power = torch.linalg.matrix_power
    elements = [to_plane @ power(mir, m) @ power(rot, r) @ to_plane.T for m in range(mirrors) for r in range(turns)]
    return FiniteGroup.from_matrices(torch.stack(elements), name)


def build(file, prefix, *, lifting, attention="none"):
    """Return the layer, with its attention and gates, from the arrays that start with ``prefix``.

    ``attention`` is that of a file that does not state one.
    """
    kernel = file.arrays[f"{prefix}kernel"]
    sizes = (file.group, kernel.shape[1], kernel.shape[0], kernel.shape[-1])
    options = {"pad": file.number(f"{prefix}pad", 0), "stride": file.number(f"{prefix}stride", 1), "inexact": "allow"}
    if not lifting:
        options["measure"] = file.number(f"{prefix}measure", 1.0)
    attention = file.text(f"{prefix}attention", attention)
    has = [f"{prefix}{name}" in file for name in ("W1", "psi_X")]
    which = {(True, True): "full", (True, False): "channel", (False, True): "spatial"}.get(tuple(has))
    attend = {"spatial_dilation": file.number(f"{prefix}dilation", 1)}
    if has[0]:
        attend["hidden"] = file.arrays[f"{prefix}W1"].shape[1 if attention == "full" else 0]
    if has[1]:
        attend["spatial_size"] = file.arrays[f"{prefix}psi_X"].shape[-1]
    if attention == "full":
        if not lifting:
            attend["channel_action"] = file.text(f"{prefix}channel_action", "group")
        cls = GridAttentiveLifting if lifting else GridAttentiveConvolution
        layer = cls(*sizes, attention=which, **attend, **options).to(file.dtype)
        names = {"kernel": layer.weight}
        names |= {"W1": layer.attention.first, "W2": layer.attention.second, "psi_X": layer.attention.spatial}
    else:
        if attention == "none":
            options["dilation"] = file.number(f"{prefix}dilation", 1)
        convolution = (GridLiftingConvolution if lifting else GridGroupConvolution)(*sizes, **options).to(file.dtype)
        layer, names = convolution, {"kernel": convolution.weight}
        measure = {} if lifting else {"measure": options["measure"]}
        if attention == "input":
            gate = GridInputAttention(file.group, sizes[1], attention=which, lifting=lifting, **attend, **measure).to(
                file.dtype
            )
            names |= {} if gate.channel is None else {"W1": gate.channel.first, "W2": gate.channel.second}
            names |= {} if gate.spatial is None else {"psi_X": gate.spatial.weight}
        elif attention == "rh":
            gate = GridPoseAttention(file.group, sizes[1], lifting=lifting, **measure).to(file.dtype)
            names["w_H"] = gate.weight
        if attention != "none":
            layer = nn.Sequential()
            layer.add_module("gate", gate)
            layer.add_module("convolution", convolution)
    for name, parameter in names.items():
        if parameter is not None:
            file.load(f"{prefix}{name}", parameter)
    return layer.eval()


def norm(file, name):
    made = FieldBatchNorm(len(file.arrays[f"{name}.gamma"]), eps=2e-5, axis=1).to(file.dtype).eval()
    parts = {"gamma": made.weight, "beta": made.bias, "mean": made.running_mean, "var": made.running_var}
    for part, own in parts.items():
        file.load(f"{name}.{part}", own)
    return made


def pool(reduction):
    """Return a pooling of 2 x 2 pixels, which ignores the last ones on odd sides."""
    return GridSpatialPool(2, reduction, inexact="allow")


def convolve(file, *, lifting):
    layer = build(file, "", lifting=lifting)
    return {"kernels": layer.kernels(), "out": layer(file.x if lifting else file.field())}


def attend_to_responses(file, *, lifting):
    layer = build(file, "", lifting=lifting, attention="full")
    x = file.x if lifting else file.field()
    out, maps = layer.attend(x, return_maps=True)
    # The maps come from a separate evaluation, and the output without them must be the same.
    alone = layer(x)
    file.agree("out with and without maps", alone, out)
    return {"f_tilde": layer.responses(x), "alpha_C": maps.channel, "alpha_X": maps.spatial, "out": alone}


def attend_to_input(file, *, lifting, attention="input"):
    layer = build(file, "", lifting=lifting, attention=attention)
    gated, maps = layer.gate.attend(file.x if lifting else file.field(), return_maps=True)
    found = {"f_att": gated, "alpha_C": maps.channel, "alpha_X": maps.spatial, "alpha_H": maps.spatial}
    return found | {"out": layer.convolution(gated)}


def residual(file):
    def given(name):
        """Return an array with an axis of input poses, which is added for responses of a lifting layer."""
        tensor = file.parameters[name] = file.tensor(name).requires_grad_()
        return tensor.unsqueeze(4) if tensor.ndim == 6 else tensor

    maps = AttentionMaps(*(given(name) if name in file else None for name in ("alpha_C", "alpha_X")))
    responses = given("f_tilde")
    out = residual_branch(responses, maps, file.number("measure", 1.0))
    found = {"alpha_minus": maps.removed, "alpha_plus": maps.passed}
    for name, factor in found.items():
        # A file with one factor alone has it in its own shape or for each response.
        if name in file and factor.numel() != file.arrays[name].size:
            found[name] = factor.expand_as(responses)
    return found | {"out": out}


# --- networks -------------------------------------------------------------------------------------------------


def residual_block(file):
    down = bool(file.number("downsample", 0))
    first = file.arrays["conv1.kernel"]
    block = AttentiveResidualBlock(file.group, first.shape[1], first.shape[0], down=down).to(file.dtype).eval()
    block.layer1, block.layer2 = (build(file, f"{name}.", lifting=False) for name in ("conv1", "conv2"))
    block.norm1, block.norm2 = norm(file, "bn1"), norm(file, "bn2")
    if down:
        block.pool = pool("max")
    # The library has a convolution in every block that goes down.
    block.shortcut = build(file, "shortcut.", lifting=False) if "shortcut.kernel" in file else nn.Identity()
    return {"out": block(file.field())}


def dense_block(file):
    """Check a dense block. Its layer has the input channels of ``x``, and that of the transition has more."""
    names = [name for name in file.arrays if not name.startswith("grad_")]
    layers = [name.removesuffix(".kernel") for name in names if name.endswith(".kernel")]
    norms = [name.removesuffix(".gamma") for name in names if name.endswith(".gamma")]
    layers.sort(key=lambda name: file.arrays[f"{name}.kernel"].shape[1])
    norms.sort(key=lambda name: len(file.arrays[f"{name}.gamma"]))
    block, transition = (
        cls(build(file, f"{name}.", lifting=False), 1)
        for cls, name in zip((AttentiveDenseBlock, AttentiveTransition), layers, strict=True)
    )
    block.norm, transition.norm = (norm(file, name) for name in norms)
    transition.pool = pool("mean")
    dense = block(file.field())
    return {"dense_out": dense, "out": transition(dense)}


def put_together(file, network, count):
    """Replace the layers and normalizations of a network by those of the file."""
    for number in range(count):
        network.layers[number] = build(file, f"conv{number + 1}.", lifting=number == 0)
    for number in range(len(network.norms)):
        network.norms[number] = norm(file, f"bn{number + 1}")
    network.pool = pool("max")
    return network.to(file.dtype).eval()


def net_rotmnist(file):
    channels, in_channels = file.arrays["conv1.kernel"].shape[:2]
    classes = len(file.arrays["conv7.kernel"])
    network = put_together(file, AttentiveCNN(file.group, in_channels, classes, channels=channels), 7)
    *fields, logits = network.features(file.x)
    found = {f"act{number}": field for number, field in enumerate(fields, start=1)} | {"logits": logits}
    if "parameter_count" in file:
        found |= published(file, logits)
    return found


def published(file, logits):
    """Check that the published network has the same logits and the stated size, and return its attention maps."""
    network = published_attentive_cnn(file.arrays).to(file.dtype)
    count, stated = sum(parameter.numel() for parameter in network.parameters()), file.number("parameter_count", 0)
    assert count == stated, f"parameter_count: {count}, stored {stated}"
    file.agree("logits of the published network", network(file.x), logits)
    found = {}
    if network.attention == "input":
        for number, maps in enumerate(network.attention_maps(file.x).values(), start=1):
            found[f"map{number}"] = maps.spatial
        picture = attention_picture(network, file.x)
        found |= {"picture_h": picture, "picture": picture.sum(dim=1)}
    return found


def net_allcnn(file):
    channels, in_channels = file.arrays["conv1.kernel"].shape[:2]
    classes = len(file.arrays["conv9.kernel"])
    network = put_together(file, AttentiveAllCNN(file.group, in_channels, classes, channels=channels), 9)
    *fields, logits = network.features(file.x)
    return {f"act{number}": field for number, field in enumerate(fields, start=1)} | {"logits": logits}


CASES = {
    "lifting": lambda file: convolve(file, lifting=True),
    "gconv": lambda file: convolve(file, lifting=False),
    "att_lifting": lambda file: attend_to_responses(file, lifting=True),
    "att_gconv": lambda file: attend_to_responses(file, lifting=False),
    "fatt_lifting": lambda file: attend_to_input(file, lifting=True),
    "fatt_gconv": lambda file: attend_to_input(file, lifting=False),
    "rh_lifting": lambda file: attend_to_input(file, lifting=True, attention="rh"),
    "rh_gconv": lambda file: attend_to_input(file, lifting=False, attention="rh"),
    "residual": residual,
    "res_block": residual_block,
    "dense_block": dense_block,
    "net_rotmnist": net_rotmnist,
    "net_allcnn": net_allcnn,
}
