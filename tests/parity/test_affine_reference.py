"""Tests of the parity runner on generated files: groups, borders, heads and networks that the goldens do not have.

The reference evaluates the formulas in the README of the goldens, position by position, in its own indices.
"""

import numpy as np
import pytest
import torch

from tests.parity import affine_self_conv

ROT, MIR = np.array([[0, -1], [1, 0]]), np.array([[-1, 0], [0, 1]])
ORDERS = {"z2": [(0, 0)], "p4": [(0, r) for r in range(4)], "p4m": [(m, r) for m in range(2) for r in range(4)]}


class Plane:
    """A group on displacements (row, column) with the formulas for products of its elements."""

    def __init__(self, name):
        self.name, self.elements = name, ORDERS[name]
        self.order = len(self.elements)
        power = np.linalg.matrix_power
        self.inverse = [np.rint(np.linalg.inv(power(MIR, m) @ power(ROT, r))).astype(int) for m, r in self.elements]

    def relative(self, p, r):
        (mp, rp), (mr, rr) = self.elements[p], self.elements[r]
        return (rr - rp) % 4 if mp == mr else 4 + (rr + rp) % 4

    def fiber(self, array):
        """Add a pose axis after the channels to arrays of z2, which have none."""
        return array[:, None] if self.name == "z2" else array


def embed(plane, x, weight, bias=None):
    """Apply a linear map [o, C, (H)] to [B, C, H, X, Y]."""
    weight = weight[..., None] if plane.name == "z2" else weight
    poses = range(plane.order)
    out = torch.stack(
        [
            sum(torch.einsum("oc,bcxy->boxy", weight[..., plane.relative(p, r)], x[:, :, r]) for r in poses)
            for p in poses
        ],
        dim=2,
    )
    return out if bias is None else out + bias[:, None, None, None]


def affine(plane, f, psi, beta, p, at, offset):
    """Return A(P, x; y) [B, d] for psi [d, H, k, k] and beta [d, k, k], which may be None."""
    rows, columns = f.shape[-2:]
    size = (psi if beta is None else beta).shape[-1]
    here = plane.inverse[p] @ np.array(offset) + size // 2
    row, column = at[0] + offset[0], at[1] + offset[1]
    total = f.new_zeros(f.shape[:2])
    if 0 <= row < rows and 0 <= column < columns:
        for r in range(plane.order):
            total = total + f[:, :, r, row, column] * psi[:, plane.relative(p, r), here[0], here[1]]
    return total if beta is None else total + beta[:, here[0], here[1]]


def attend(plane, signals, tables, heads, scale, border):
    """Return alpha and z from query, key, value and their tables (psi, beta). Those of the query have one entry."""
    (query, key, value), (query_table, key_table, value_table) = signals, tables
    images, _, _, rows, columns = value.shape
    size = value_table[0].shape[-1]
    steps = range(-(size // 2), size // 2 + 1)
    alpha = value.new_zeros(images, heads, plane.order, rows, columns, size**2)
    z = torch.zeros_like(value)
    for p, row, column in np.ndindex(plane.order, rows, columns):
        offsets = [(i, j) for i in steps for j in steps]
        kept = [
            n
            for n, (i, j) in enumerate(offsets)
            if border == "zero" or (0 <= row + i < rows and 0 <= column + j < columns)
        ]
        q = affine(plane, query, *query_table, p, (row, column), (0, 0)).unflatten(1, (heads, -1))
        k, v = (
            torch.stack([affine(plane, f, *table, p, (row, column), offsets[n]) for n in kept], -1)
            for f, table in ((key, key_table), (value, value_table))
        )
        score = scale * torch.einsum("bed,bedn->ben", q, k.unflatten(1, (heads, -1)))
        weight = score.softmax(-1)
        alpha[:, :, p, row, column, kept] = weight
        z[:, :, p, row, column] = torch.einsum("ben,bedn->bed", weight, v.unflatten(1, (heads, -1))).flatten(1)
    return alpha, z


def layer(plane, a, x):
    """Return alpha, z and out for the arrays of one layer."""
    heads, scale, border = int(a["heads"]), float(a["score_scale"]), str(a["border"])
    if "psi" in a:
        f = embed(plane, x, a["W"], a["b"]) if "W" in a else x
        table = (plane.fiber(a["psi"]), a["beta"])
        middle = table[0].shape[-1] // 2
        center = tuple(t[..., middle : middle + 1, middle : middle + 1] for t in table)
        alpha, z = attend(plane, (f, f, f), (center, table, table), heads, scale, border)
        return alpha, z, embed(plane, z, a["W_O"]) if "W" in a else z
    signals = [embed(plane, x, a[f"W_{n}"], a[f"b_{n}"]) for n in "QKV"]
    if "psi_K" in a:
        query = (plane.fiber(a["psi_Q"]).reshape(len(a["psi_Q"]), -1, 1, 1), a["beta_Q"][:, None, None])
        tables = [query, *((plane.fiber(a[f"psi_{n}"]), a[f"beta_{n}"]) for n in "KV")]
    else:
        size = a["beta_row"].shape[-1]
        row, column = (
            a["beta_row"][..., None].expand(-1, -1, -1, size),
            a["beta_col"][:, :, None].expand(-1, -1, size, -1),
        )
        one = torch.ones(len(a["W_Q"]), plane.order, size, size, dtype=torch.float64)
        tables = [(one[..., :1, :1], None), (one, torch.cat([row, column], 1).flatten(0, 1)), (one, None)]
    alpha, z = attend(plane, signals, tables, heads, scale, border)
    return alpha, z, embed(plane, z, a["W_O"])


def excite(a, x):
    mean = x.mean(dim=(2, 3, 4))
    scale = torch.sigmoid(torch.relu(mean @ a["W2"].mT + a["b2"]) @ a["W1"].mT + a["b1"])
    return scale, scale[:, :, None, None, None] * x


def norm(a, x):
    def wide(name):
        return a[name][:, None, None, None]

    return wide("gamma") * (x - wide("mean")) / (wide("var") + 1e-5).sqrt() + wide("beta")


def sub(a, prefix):
    return {name.removeprefix(prefix): array for name, array in a.items() if name.startswith(prefix)}


def halve(x):
    return x.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2)).mean(dim=(-3, -1))


def block(plane, a, x):
    h = torch.relu(norm(sub(a, "bn1."), embed(plane, x, a["W_in"])))
    h = layer(plane, sub(a, "asc."), h)[2]
    if int(a["downsample"]):
        h = halve(h)
        x = halve(x) if str(a["shortcut"]) == "pooled" else x[..., ::2, ::2]
    h = norm(sub(a, "bn3."), embed(plane, torch.relu(norm(sub(a, "bn2."), h)), a["W_out"]))
    if "se.W2" in a:
        h = excite(sub(a, "se."), h)[1]
    if "W_short" in a:
        x = norm(sub(a, "bn_short."), embed(plane, x, a["W_short"]))
    return torch.relu(h + x)


def lifted(plane, kernel, x):
    """Apply a 3 x 3 lifting convolution with zero border."""
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1))
    rows, columns = x.shape[-2:]
    poses = []
    for p in range(plane.order):
        out = 0
        for offset in np.ndindex(3, 3):
            here = plane.inverse[p] @ (np.array(offset) - 1) + 1
            window = padded[..., offset[0] : offset[0] + rows, offset[1] : offset[1] + columns]
            out = out + torch.einsum("oc,bcxy->boxy", kernel[:, :, here[0], here[1]], window)
        poses.append(out)
    return torch.stack(poses, dim=2)


def evaluate(plane, a, x):
    """Return the outputs by name, with an axis of poses in every field."""
    case = str(a["case"])
    if case in ("asc", "simple", "sasa"):
        return dict(zip(("alpha", "z", "out"), layer(plane, a, x), strict=True))
    if case == "group_se":
        return dict(zip(("scale", "out"), excite(a, x), strict=True))
    if case == "bottleneck":
        return {"out": block(plane, a, x)}
    field = torch.relu(norm(sub(a, "stem.bn."), lifted(plane, a["stem.kernel"], x)))
    for number in range(int(a["blocks"])):
        field = block(plane, sub(a, f"block{number + 1}."), field)
    return {"features": field, "logits": field.mean(dim=(2, 3, 4)) @ a["fc.weight"].mT + a["fc.bias"]}


# --- files ----------------------------------------------------------------------------------------------------


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def fan(*shape):
    """Return a linear map that preserves the size of its input, so that float32 stays accurate in a deep network."""
    weight = draw(*shape)
    return weight / weight[0].numel() ** 0.5


def layer_arrays(plane, case, c_in, d, c_out, size, heads, scale, border, embedded=True):
    pose = () if plane.name == "z2" else (plane.order,)
    a = {"heads": np.array(heads), "score_scale": np.array(scale), "border": np.array(border)}
    names = ["Q", "K", "V"]
    if case == "simple":
        names = [""] if embedded else []
        a |= {"psi": draw(d, *pose, size, size), "beta": draw(d, size, size)}
    for name in names:
        mark = f"_{name}" if name else ""
        a |= {f"W{mark}": fan(d, c_in, *pose), f"b{mark}": draw(d)}
    if case == "asc":
        a |= {"psi_Q": draw(d, *pose), "beta_Q": draw(d)}
        for name in "KV":
            a |= {f"psi_{name}": draw(d, *pose, size, size), f"beta_{name}": draw(d, size, size)}
    if case == "sasa":
        a |= {f"beta_{axis}": draw(heads, d // heads // 2, size) for axis in ("row", "col")}
    return a | ({"W_O": fan(c_out, d, *pose)} if names else {})


def block_arrays(plane, c_in, width, *, case="asc", downsample=0, shortcut="pooled", project=True, se=0, **options):
    pose, out = () if plane.name == "z2" else (plane.order,), 4 * width
    options = {"size": 3, "heads": 2, "scale": 0.3, "border": "zero", **options}
    a = {"W_in": fan(width, c_in, *pose), "W_out": fan(out, width, *pose)}
    a |= {"downsample": np.array(downsample), "shortcut": np.array(shortcut)}
    a |= {f"asc.{name}": array for name, array in layer_arrays(plane, case, width, width, width, **options).items()}
    norms = {"bn1": width, "bn2": width, "bn3": out}
    if project:
        a["W_short"] = fan(out, c_in, *pose)
        norms["bn_short"] = out
    for name, channels in norms.items():
        a |= {f"{name}.{part}": draw(channels) for part in ("gamma", "beta", "mean")}
        a[f"{name}.var"] = draw(channels).exp()
    if se:
        a |= {"se.W2": draw(se, out), "se.b2": draw(se), "se.W1": draw(out, se), "se.b1": draw(out)}
    return a


def network_arrays(plane, blocks):
    a = {"stem.kernel": draw(2, 3, 3, 3), "stem.bn.gamma": draw(2), "stem.bn.beta": draw(2)}
    a |= {"stem.bn.mean": draw(2), "stem.bn.var": draw(2).exp(), "blocks": np.array(len(blocks))}
    channels = 2
    for number, (width, options) in enumerate(blocks):
        arrays = block_arrays(plane, channels, width, **options)
        a |= {f"block{number + 1}.{name}": array for name, array in arrays.items()}
        channels = 4 * width
    return a | {"fc.weight": fan(3, channels), "fc.bias": draw(3)}


def asc_file(group, sides, case="asc", *, size=3, heads=2, scale=0.2, border="zero", embedded=True):
    plane = Plane(group)
    a = layer_arrays(plane, case, 4 if not embedded else 3, 4, 2, size, heads, scale, border, embedded)
    return plane, {"case": case, **a}, (1, 4 if not embedded else 3, plane.order, *sides)


def block_file(group, **options):
    plane = Plane(group)
    c_in = 3 if options.get("project", True) else 8
    return plane, {"case": "bottleneck", **block_arrays(plane, c_in, 2, **options)}, (1, c_in, plane.order, 4, 4)


def excite_file(group, hidden=3):
    plane = Plane(group)
    a = {"W2": draw(hidden, 6), "b2": draw(hidden), "W1": draw(6, hidden), "b1": draw(6)}
    return plane, {"case": "group_se", **a}, (2, 6, plane.order, 3, 4)


def network_file(group, blocks):
    plane = Plane(group)
    return plane, {"case": "network", **network_arrays(plane, blocks)}, (1, 3, 4, 4)


FILES = {
    "asc p4m k5 mask": lambda: asc_file("p4m", (2, 3), size=5, border="mask", heads=4),
    "asc p4 one pixel a window": lambda: asc_file("p4", (3, 3), size=1),
    "asc z2 k7": lambda: asc_file("z2", (4, 3), size=7),
    "simple p4 plain": lambda: asc_file("p4", (3, 4), "simple", embedded=False),
    "sasa p4": lambda: asc_file("p4", (3, 4), "sasa"),
    "sasa z2 mask": lambda: asc_file("z2", (4, 3), "sasa", border="mask"),
    "se p4m": lambda: excite_file("p4m"),
    "se p4 hidden units that do not divide channels": lambda: excite_file("p4", hidden=4),
    "se z2 more hidden units than channels": lambda: excite_file("z2", hidden=7),
    "block z2 strided": lambda: block_file("z2", downsample=1, shortcut="strided", size=5),
    "block p4 simple": lambda: block_file("p4", case="simple"),
    "network z2": lambda: network_file(
        "z2", [(2, {}), (2, {"project": False}), (4, {"downsample": 1, "shortcut": "strided"})]
    ),
}


def stored(plane, a, shape, gradients):
    """Return the arrays of a file: inputs, outputs and gradients, without poses for z2."""
    x = draw(*shape)
    leaves = {name: t.requires_grad_() for name, t in {"x": x, **a}.items() if isinstance(t, torch.Tensor)}
    outputs = evaluate(plane, {**a, **leaves}, leaves["x"])
    last = list(outputs)[-1]
    cotangent = torch.randn_like(outputs[last])
    names = [name for name in leaves if not name.endswith((".mean", ".var"))]
    found = torch.autograd.grad((outputs[last] * cotangent).sum(), [leaves[name] for name in names])

    def flat(name, t):
        bare = plane.name == "z2" and name in ("x", "alpha", "z", "out", "features", "cotangent") and t.ndim > 4
        return t.detach().squeeze(2).numpy() if bare else t.detach().numpy()

    arrays = {name: t if isinstance(t, str | np.ndarray) else flat(name, t) for name, t in a.items()}
    arrays |= {"x": flat("x", x), "group": plane.name, "outputs": np.array(list(outputs))}
    arrays |= {name: flat(name, t) for name, t in outputs.items()}
    if gradients:
        arrays |= {"cotangent": flat("cotangent", cotangent), "gradients": np.array(names)}
        arrays |= {f"grad_{name}": flat(name, t) for name, t in zip(names, found, strict=True)}
    return arrays


@pytest.mark.parametrize("name", FILES)
def test_files_like_the_goldens(name, tmp_path):
    plane, a, shape = FILES[name]()
    arrays = stored(plane, a, shape, gradients=True)
    path = tmp_path / "file.npz"
    np.savez(path, **arrays)
    affine_self_conv.check(path)
    last = str(arrays["outputs"][-1])
    for spoiled in {last, "grad_x"}:
        np.savez(path, **{**arrays, spoiled: arrays[spoiled] + 1e-3 * np.abs(arrays[spoiled]).max()})
        with pytest.raises(AssertionError, match=f"{spoiled} in"):
            affine_self_conv.check(path)


def test_gradients_that_vanish(tmp_path):
    """A bias that all keys of a softmax share has no effect; its gradient in float32 is a rounding error."""
    plane, a, shape = asc_file("p4", (3, 4), "sasa", border="mask")
    arrays = stored(plane, a, shape, gradients=True)
    assert np.abs(arrays["grad_b_K"]).max() < 1e-12 < np.abs(arrays["grad_b_V"]).max()
    arrays |= {name: 1e3 * arrays[name] for name in arrays if name.startswith("grad_") or name == "cotangent"}
    path = tmp_path / "file.npz"
    np.savez(path, **arrays)
    affine_self_conv.check(path)
    np.savez(path, **{**arrays, "grad_b_K": arrays["grad_b_K"] + 1e-5})
    with pytest.raises(AssertionError, match="grad_b_K in"):
        affine_self_conv.check(path)
