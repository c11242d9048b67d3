"""Tests of the parity runner on generated files of attentive group convolution.

They have groups, sizes, strides and vanishing gradients that the goldens do not have. The reference evaluates the
formulas in the README of the goldens in numpy, by loops over poses and positions, in its own indices.
"""

import math

import numpy as np
import pytest

from tests.parity import attentive_gconv

ORDERS = {"z2": (1, 1), "p4": (1, 4), "p4m": (2, 4)}


def elements(name):
    mirrors, turns = ORDERS[name]
    return [(m, r) for m in range(mirrors) for r in range(turns)]


def moved(plane, m, r):
    """Apply MIR^m ROT^r to the last two axes, by the formula of the README in array indices."""
    plane = np.rot90(plane, r, axes=(-2, -1))
    return plane[..., ::-1, :] if m else plane


def relative(name, h, k):
    """Return the number of h⁻¹ k."""
    (mh, rh), (mk, rk) = elements(name)[h], elements(name)[k]
    return (rk - rh) % 4 if mh == mk else 4 + (rk + rh) % 4


def acted(name, kernel, h):
    """Apply L_h to a kernel [..., H, k, k] on the group."""
    return np.stack(
        [moved(kernel[..., relative(name, h, k), :, :], *elements(name)[h]) for k in range(len(elements(name)))],
        axis=-3,
    )


def correlate(f, kernel, stride, pad, dilation):
    """Correlate [X, Y] with [k, k], with zero border."""
    f = np.pad(f, pad)
    reach = dilation * (len(kernel) - 1)
    rows, columns = ((side - reach - 1) // stride + 1 for side in f.shape)
    out = np.zeros((rows, columns), np.result_type(f, kernel))
    for i, j in np.ndindex(*kernel.shape):
        window = f[dilation * i :, dilation * j :][
            : stride * (rows - 1) + 1 : stride, : stride * (columns - 1) + 1 : stride
        ]
        out += kernel[i, j] * window
    return out


def responses(a, lifting):
    """Return f_tilde [B, O, H, C, (H~), X', Y'] and the kernels."""
    name, kernel, x = a["group"], a["kernel"], a["x"]
    order = range(len(elements(name)))
    options = [int(a.get(option, default)) for option, default in (("stride", 1), ("pad", 0), ("dilation", 1))]
    if lifting:
        kernels = np.stack([moved(kernel, *elements(name)[h]) for h in order], axis=1)
    else:
        kernels = np.stack([acted(name, kernel, h) for h in order], axis=1)
    inner = x.shape[1:-2]
    found = np.array(
        [
            [
                [[correlate(image[c], kernels[(o, h, *c)], *options) for c in np.ndindex(*inner)] for h in order]
                for o in range(len(kernel))
            ]
            for image in x
        ]
    )
    return found.reshape(*found.shape[:3], *inner, *found.shape[-2:]), kernels


def convolution(a, lifting):
    f_tilde, kernels = responses(a, lifting)
    out = f_tilde.sum(axis=3) if lifting else float(a["measure"]) * f_tilde.sum(axis=(3, 4))
    return {"kernels": kernels, "out": out}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def channel_attention(a):
    """Return the attention to the channels of the responses of a group convolution, with weights at h⁻¹ h~."""
    name = a["group"]
    f_tilde, _ = responses({**a, "dilation": 1}, False)
    alpha = np.zeros((*f_tilde.shape[:5], 1, 1))
    for o, h, k in np.ndindex(f_tilde.shape[1], f_tilde.shape[2], f_tilde.shape[4]):
        first, second = (a[weight][o, :, :, relative(name, h, k)] for weight in ("W1", "W2"))
        here = f_tilde[:, o, h, :, k]
        total = sum(np.maximum(s @ first.T, 0) @ second.T for s in (here.mean(axis=(2, 3)), here.max(axis=(2, 3))))
        alpha[:, o, h, :, k, 0, 0] = sigmoid(total)
    out = float(a["measure"]) * ((1 - alpha) * f_tilde).sum(axis=(3, 4))
    return {"f_tilde": f_tilde, "alpha_C": alpha, "out": out}


def pose_attention(a):
    """Return the output of the gate of poses before a group convolution."""
    name, x, weight = a["group"], a["x"], a["w_H"][..., 0, 0]
    order = range(len(elements(name)))
    alpha = np.stack(
        [sum(np.einsum("c,bcxy->bxy", weight[0, :, relative(name, h, k)], x[:, :, k]) for k in order) for h in order],
        axis=1,
    )
    alpha = sigmoid(float(a["measure"]) * alpha)[:, None]
    gated = (1 - alpha) * x
    return {"alpha_H": alpha, "f_att": gated, "out": convolution({**a, "x": gated}, False)["out"]}


EVALUATE = {
    "lifting": lambda a: convolution(a, True),
    "gconv": lambda a: convolution(a, False),
    "att_gconv": channel_attention,
    "rh_gconv": pose_attention,
}


def case(name, group, sides, size, *, c_in=2, c_out=3, images=2, constant=False, **options):
    rng = np.random.default_rng(5)
    order, lifting = len(elements(group)), name == "lifting"
    poses = () if lifting else (order,)
    a = {"case": name, "group": group, **{option: np.array(value) for option, value in options.items()}}
    a["x"] = rng.normal(size=(images, c_in, *poses, *sides))
    if constant:
        a["x"] = np.broadcast_to(a["x"][..., :1, :1], a["x"].shape).copy()
    a["kernel"] = rng.normal(size=(c_out, c_in, *poses, size, size))
    if not lifting:
        a["measure"] = np.array(options.get("measure", 2 * np.pi / order))
    if name == "att_gconv":
        a |= {"attention": "full", "W1": rng.normal(size=(c_out, 3, c_in, order))}
        a["W2"] = rng.normal(size=(c_out, c_in, 3, order))
    if name == "rh_gconv":
        a |= {"attention": "rh", "w_H": rng.normal(size=(1, c_in, order, 1, 1))}
    found = EVALUATE[name](a)
    return a | found | {"outputs": np.array(list(found))}


def with_gradients(a, *, balanced):
    """Return gradients of sum(out * cotangent). A convolution is linear in its input and in its kernel."""
    rng = np.random.default_rng(6)
    cotangent = 100 * rng.normal(size=a["out"].shape)
    if balanced:
        cotangent -= cotangent.mean(axis=(-2, -1), keepdims=True)
    found = {"cotangent": cotangent, "gradients": np.array(["x", "kernel"])}
    for name in ("x", "kernel"):
        gradient = np.zeros(a[name].shape)
        for place in np.ndindex(gradient.shape):
            unit = np.zeros(gradient.shape)
            unit[place] = 1
            gradient[place] = (EVALUATE[a["case"]]({**a, name: unit})["out"] * cotangent).sum()
        found[f"grad_{name}"] = gradient
    return a | found


def residual_case(group, sides, *, lifting, factors=("alpha_C", "alpha_X"), expanded=False):
    """Multiply responses by attention maps. In a lifting layer responses have no axis of input poses.

    ``expanded`` stores the products of the maps for each response, also if there is one map alone.
    """
    rng, order = np.random.default_rng(5), len(elements(group))
    poses = () if lifting else (order,)
    shapes = {"alpha_C": (2, *poses, 1, 1), "alpha_X": (1, *poses, *sides)}
    a = {"case": "residual", "group": group, "measure": np.array(1.0 if lifting else 2 * np.pi / order)}
    f_tilde = a["f_tilde"] = rng.normal(size=(2, 3, order, 2, *poses, *sides))
    a |= {name: sigmoid(rng.normal(size=(2, 3, order, *shapes[name]))) for name in factors}
    minus = math.prod(a[name] for name in factors) * np.ones(f_tilde.shape if expanded else 1)
    axes = 3 if lifting else (3, 4)
    found = {"alpha_minus": minus, "alpha_plus": 1 - minus}
    found["out"] = float(a["measure"]) * ((1 - minus) * f_tilde).sum(axis=axes)
    return a | found | {"outputs": np.array(list(found))}


def normalized(a, name, x):
    gamma, beta, mean, var = (a[f"{name}.{part}"][:, None, None, None] for part in ("gamma", "beta", "mean", "var"))
    return np.maximum((x - mean) / np.sqrt(var + 2e-5) * gamma + beta, 0)


def dense_block(a):
    """Return a dense block (its cropped input and the output of a layer), and the transition after it."""

    def layer(name, x):
        return convolution({"group": a["group"], "kernel": a[f"{name}.kernel"], "measure": 1.0, "x": x}, False)["out"]

    dense = np.concatenate([layer("conv", normalized(a, "bn", a["x"])), a["x"][..., 1:-1, 1:-1]], axis=1)
    out = layer("transition", normalized(a, "bn_transition", dense))
    rows, columns = out.shape[3] // 2, out.shape[4] // 2
    cells = out[..., : 2 * rows, : 2 * columns].reshape(*out.shape[:3], rows, 2, columns, 2)
    return {"dense_out": dense, "out": cells.mean(axis=(4, 6))}


def dense_case(group, c_in, growth, side=4):
    rng, order = np.random.default_rng(5), len(elements(group))
    a = {"case": "dense_block", "group": group, "x": rng.normal(size=(1, c_in, order, side, side))}
    for name, width, out, size in (("conv", c_in, growth, 3), ("transition", c_in + growth, 2, 1)):
        a[f"{name}.kernel"] = rng.normal(size=(out, width, order, size, size))
    for name, width in (("bn", c_in), ("bn_transition", c_in + growth)):
        a |= {f"{name}.{part}": rng.normal(size=width) for part in ("beta", "mean")}
        a |= {f"{name}.{part}": rng.random(size=width) + 0.5 for part in ("gamma", "var")}
    found = dense_block(a)
    return a | found | {"outputs": np.array(list(found))}


def pooled(x):
    rows, columns = x.shape[-2] // 2, x.shape[-1] // 2
    return x[..., : 2 * rows, : 2 * columns].reshape(*x.shape[:-2], rows, 2, columns, 2).max(axis=(-3, -1))


def residual_block_case(group, sides, widths, *, down, shortcut):
    rng, order = np.random.default_rng(5), len(elements(group))
    a = {"case": "res_block", "group": group, "downsample": int(down)}
    a["x"] = rng.normal(size=(2, widths[0], order, *sides))
    convolutions = [("conv1", *widths, 3), ("conv2", widths[1], widths[1], 3)]
    for name, width, out, size in convolutions + ([("shortcut", *widths, 1)] if shortcut else []):
        a |= {f"{name}.kernel": rng.normal(size=(out, width, order, size, size)), f"{name}.pad": size // 2}
    for name, width in zip(("bn1", "bn2"), widths, strict=True):
        a |= {f"{name}.{part}": rng.normal(size=width) for part in ("beta", "mean")}
        a |= {f"{name}.{part}": rng.random(size=width) + 0.5 for part in ("gamma", "var")}

    def layer(name, x):
        own = {"group": group, "kernel": a[f"{name}.kernel"], "pad": a[f"{name}.pad"], "measure": 1.0, "x": x}
        return convolution(own, False)["out"]

    y, s = layer("conv1", normalized(a, "bn1", a["x"])), layer("shortcut", a["x"]) if shortcut else a["x"]
    y, s = (pooled(field) if down else field for field in (y, s))
    return a | {"out": s + layer("conv2", normalized(a, "bn2", y)), "outputs": np.array(["out"])}


FILES = {
    "residual block p4": lambda: residual_block_case("p4", (4, 5), (2, 2), down=False, shortcut=False),
    "residual block p4, down alone": lambda: residual_block_case("p4", (6, 4), (2, 2), down=True, shortcut=False),
    "residual block p4m, wider": lambda: residual_block_case("p4m", (4, 4), (1, 2), down=False, shortcut=True),
    "residual block p4, down": lambda: residual_block_case("p4", (5, 4), (2, 1), down=True, shortcut=True),
    "dense block p4": lambda: dense_case("p4", 2, 1),
    "dense block p4, odd": lambda: dense_case("p4", 1, 1, 5),
    "dense block p4m": lambda: dense_case("p4m", 1, 2),
    "residual p4 lifting": lambda: residual_case("p4", (4, 5), lifting=True),
    "residual p4m lifting, space": lambda: residual_case("p4m", (3, 4), lifting=True, factors=("alpha_X",)),
    "residual p4 lifting, channels of each": lambda: residual_case(
        "p4", (4, 5), lifting=True, factors=("alpha_C",), expanded=True
    ),
    "residual p4, space of each": lambda: residual_case(
        "p4", (3, 4), lifting=False, factors=("alpha_X",), expanded=True
    ),
    "residual p4m": lambda: residual_case("p4m", (3, 4), lifting=False),
    "lifting p4m, tall": lambda: case("lifting", "p4m", (7, 5), 3),
    "lifting p4, border, dilation": lambda: case("lifting", "p4", (5, 6), 3, pad=2, dilation=2, c_in=1),
    "lifting p4, stride": lambda: case("lifting", "p4", (7, 7), 3, stride=2, c_out=1),
    "gconv p4, one image": lambda: case("gconv", "p4", (4, 6), 3, images=1, pad=1),
    "gconv p4m, even kernel": lambda: case("gconv", "p4m", (4, 4), 2, c_in=1, c_out=2, measure=1.0),
    "gconv p4, dilation": lambda: case("gconv", "p4", (6, 5), 3, dilation=2),
    "channels p4m": lambda: case("att_gconv", "p4m", (4, 5), 3, c_out=2, measure=np.pi / 4),
    "channels p4": lambda: case("att_gconv", "p4", (5, 4), 3, c_in=3, pad=1),
    "poses p4m": lambda: case("rh_gconv", "p4m", (4, 5), 3, measure=np.pi),
}


def passes(path, arrays):
    np.savez(path / "file.npz", **arrays)
    attentive_gconv.check(path / "file.npz")


@pytest.mark.parametrize("name", FILES)
def test_files_like_the_goldens(name, tmp_path):
    arrays = FILES[name]()
    passes(tmp_path, arrays)
    for output in arrays["outputs"]:
        error = 1e-3 * np.abs(arrays[output]).max()
        with pytest.raises(AssertionError, match=f"{output} in"):
            passes(tmp_path, {**arrays, output: arrays[output] + error})


@pytest.mark.parametrize("group", ["p4", pytest.param("p4m", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["lifting", "gconv"])
def test_gradients_that_vanish(name, group, tmp_path):
    """On constant images the gradient of a kernel is the sum of the cotangent: zero if that is balanced."""
    small = {"images": 1, "c_in": 1, "c_out": 2}
    arrays = with_gradients(case(name, group, (5, 4), 2, constant=True, **small), balanced=True)
    assert np.abs(arrays["grad_kernel"]).max() < 1e-10 < 1 < np.abs(arrays["grad_x"]).max()
    passes(tmp_path, arrays)
    passes(tmp_path, with_gradients(case(name, group, (5, 4), 2, **small), balanced=False))
    for gradient in ("grad_kernel", "grad_x"):
        with pytest.raises(AssertionError, match=f"{gradient} in"):
            passes(tmp_path, {**arrays, gradient: arrays[gradient] + 1e-3})


def test_large_numbers_are_compared_up_to_rounding(tmp_path):
    arrays = case("gconv", "p4", (4, 4), 3, measure=1.0)
    large = arrays | {name: 1e6 * arrays[name] for name in ("x", "out")}
    passes(tmp_path, large)
    with pytest.raises(AssertionError, match=r"out in torch\.float64"):
        passes(tmp_path, {**large, "out": large["out"] + 1e-4})


def test_gradients_of_a_dense_block(tmp_path):
    """Gradients are computed by complex steps. Their names end like those of layers and normalizations."""
    a = dense_case("p4", 2, 1)
    names, step = ["conv.kernel", "transition.kernel", "bn.gamma"], 1e-30j
    a |= {"cotangent": np.random.default_rng(6).normal(size=a["out"].shape), "gradients": np.array(names)}
    for name in names:
        gradient = a[f"grad_{name}"] = np.zeros(a[name].shape)
        for place in np.ndindex(gradient.shape):
            moved_on = a[name].astype(complex)
            moved_on[place] += step
            out = dense_block({**a, name: moved_on})["out"]
            gradient[place] = (out.imag * a["cotangent"]).sum() / step.imag
    assert all(np.abs(a[f"grad_{name}"]).max() > 1 for name in names)
    passes(tmp_path, a)
    with pytest.raises(AssertionError, match=r"grad_conv\.kernel in"):
        passes(tmp_path, {**a, "grad_conv.kernel": 1.001 * a["grad_conv.kernel"]})


@pytest.mark.parametrize("name", ["att_gconv", "rh_gconv"])
def test_layers_whose_attention_is_that_of_the_case(name, tmp_path):
    arrays = case(name, "p4", (5, 4), 3, measure=1.0)
    del arrays["attention"]
    passes(tmp_path, arrays)
    with pytest.raises(AssertionError, match="out in"):
        passes(tmp_path, {**arrays, "out": arrays["out"] + 1e-3})


@pytest.mark.parametrize("other", ["alpha_C", "out_2"])
def test_unknown_outputs_are_named(other, tmp_path):
    arrays = case("rh_gconv", "p4", (4, 4), 3, measure=1.0) | {other: np.zeros(3), "outputs": np.array([other])}
    with pytest.raises(AssertionError, match=f"file.npz: no output '{other}'; there are .*'out'"):
        passes(tmp_path, arrays)


def test_numbers_of_parameters_are_compared(tmp_path, pytestconfig):
    path = pytestconfig.rootpath / "tests" / "goldens" / "attentive_gconv" / "trained_rotmnist_p4cnn.npz"
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    with pytest.raises(AssertionError, match="parameter_count: 24610, stored 24611"):
        passes(tmp_path, {**arrays, "parameter_count": np.array(24611)})
