"""Tests of the parity runner on generated files of GSA-Nets: layers and networks that the goldens do not have.

The reference evaluates the formulas in the README of the goldens in numpy, by loops over frames, in its own indices.
"""

import json

import numpy as np
import pytest

from tests.parity import gsa

HEADS, C_IN, C_OUT = 2, 2, 3


def family(name, n):
    turns = [2 * np.pi * k / n for k in range(n)]
    rotations = [np.array([[np.cos(t), -np.sin(t)], [np.sin(t), np.cos(t)]]) for t in turns]
    mirrored = [] if name == "C" else [r @ np.diag([1.0, -1.0]) for r in rotations]
    return np.stack(rotations + mirrored)


def index_of(matrices, product):
    return int(np.abs(matrices - product).max(axis=(1, 2)).argmin())


def swish(t):
    return t / (1 + np.exp(-t))


def encode(arrays, axis, p):
    u = arrays[f"{axis}_w1"] * p[..., None] + arrays[f"{axis}_b1"]
    normal = (u - u.mean(-1, keepdims=True)) / np.sqrt(u.var(-1, keepdims=True) + 1e-12)
    return (
        swish(arrays[f"{axis}_gain"] * normal + arrays[f"{axis}_shift"]) @ arrays[f"{axis}_w2"].T + arrays[f"{axis}_b2"]
    )


def evaluate(arrays, lifting, local, size):
    """Return the output [B, c_out, O, H, W] of a layer, in float64."""
    a = {name: array.astype(np.float64) for name, array in arrays.items()}
    order, (heads, depth, c_in) = len(a["coords"]), a["W_q"].shape
    x = a["x"][:, :, None] if lifting else a["x"]
    images, _, frames, height, width = x.shape
    q, k, v = (
        np.einsum("edc,bcghw->bedghw", a[f"W_{name}"], x) + a[f"b_{name}"][None, :, :, None, None, None]
        for name in "qkv"
    )
    rho = np.concatenate([encode(a, "row", a["coords"][..., 0]), encode(a, "col", a["coords"][..., 1])], axis=-1)
    center = np.array(rho.shape[1:3]) // 2
    out = np.zeros((images, heads, depth, order, height, width))
    table = np.zeros((order, 1, 1), int) if lifting else arrays["table"]
    group = np.zeros((order, 0)) if lifting else a["E_group"]
    reach = (size - 1) // 2 if local else max(height, width)
    for r, c, h, g in np.ndindex(height, width, order, frames):
        rows = range(max(0, r - reach), min(height, r + reach + 1))
        columns = range(max(0, c - reach), min(width, c + reach + 1))
        window = np.ix_(range(images), range(heads), range(depth), range(frames), rows, columns)
        position = rho[h][np.ix_([i - r + center[0] for i in rows], [j - c + center[1] for j in columns])]
        wide = np.zeros((frames, *position.shape[:2], depth))
        wide[..., : position.shape[-1]] = position
        wide[..., position.shape[-1] :] = group[table[h, g]][:, None, None]
        keys = k[window] + wide.transpose(3, 0, 1, 2)
        score = np.einsum("bed,bedmij->bemij", q[:, :, :, g, r, c], keys) / np.sqrt(c_in)
        weight = np.exp(score - score.max(axis=(2, 3, 4), keepdims=True))
        weight /= weight.sum(axis=(2, 3, 4), keepdims=True)
        out[:, :, :, h, r, c] += np.einsum("bemij,bedmij->bed", weight, v[window])
    return np.einsum("oed,bedhij->bohij", a["W_o"], out) + a["b_o"][:, None, None, None]


def layer_arrays(draw, matrices, channels, depth, side, *, lifting):
    """Return weights and coordinates of a layer: ``depth`` channels per head, ``side`` x ``side`` offsets."""
    c_in, c_out = channels
    steps = np.arange(side) - side // 2
    offsets = np.stack(np.meshgrid(steps, steps, indexing="ij"), axis=-1) / (side // 2)
    per_axis = depth // 2 if lifting else depth // 3
    arrays = {"W_o": draw(c_out, HEADS, depth), "b_o": draw(c_out)}
    for letter in "qkv":
        arrays |= {f"W_{letter}": draw(HEADS, depth, c_in), f"b_{letter}": draw(HEADS, depth)}
    for axis in ("row", "col"):
        arrays |= {f"{axis}_{part}": draw(16) for part in ("w1", "b1", "gain", "shift")}
        arrays |= {f"{axis}_w2": draw(per_axis, 16), f"{axis}_b2": draw(per_axis)}
    arrays["coords"] = np.einsum("hxy,ijy->hijx", matrices, offsets).astype(np.float32)
    return arrays if lifting else arrays | {"E_group": draw(len(matrices), depth - 2 * per_axis)}


def equivariant_table(matrices):
    order = len(matrices)
    relative = [[index_of(matrices, m @ np.linalg.inv(g)) for m in matrices] for g in matrices]
    return np.broadcast_to(np.array(relative), (order, order, order)).copy()


def golden(name, n, kind, height, width, size, table="equivariant"):
    rng = np.random.default_rng(7)
    matrices = family(name, n)
    order = len(matrices)
    lifting, local = kind.startswith("lift"), kind.endswith("local")

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    arrays = {"x": draw(1, C_IN, *(() if lifting else (order,)), height, width), "A": matrices}
    side = size if local else 2 * size - 1
    arrays |= layer_arrays(draw, matrices, (C_IN, C_OUT), 6 if lifting else 7, side, lifting=lifting)
    if not lifting:
        arrays["table"] = equivariant_table(matrices)
        if table == "any":
            arrays["table"] = rng.integers(order, size=(order, order, order))
    meta = {"kind": kind, "c_out": C_OUT, "size": size}
    return arrays, meta


CASES = {
    "group r12": ("C", 12, "group_local", 4, 5, 3),
    "group p8m": ("D", 8, "group_local", 4, 3, 3),
    "group with any table": ("D", 3, "group_local", 5, 4, 3, "any"),
    "lifting, tall": ("C", 4, "lift_local", 7, 4, 5),
    "lifting p8m": ("D", 8, "lift_local", 4, 6, 3),
    "global lifting r12": ("C", 12, "lift_global", 4, 4, 4),
    "global group": ("D", 3, "group_global", 4, 4, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_files_like_the_goldens(name, tmp_path):
    arrays, meta = golden(*CASES[name])
    out = evaluate(arrays, meta["kind"].startswith("lift"), meta["kind"].endswith("local"), meta["size"])
    path = tmp_path / "file.npz"
    np.savez(path, **arrays, out_f64=out, out_f32=out.astype(np.float32), meta=np.array(json.dumps(meta)))
    gsa.check(path)
    np.savez(path, **arrays, out_f64=out + 1e-3, out_f32=out.astype(np.float32), meta=np.array(json.dumps(meta)))
    with pytest.raises(AssertionError):
        gsa.check(path)


# --- networks -------------------------------------------------------------------------------------------------

IMAGES, CHANNELS, CLASSES, SIZE = 2, 8, 3, 3
ACTIVATIONS = {"swish": swish, "relu": lambda t: np.maximum(t, 0)}


def below(arrays, prefix):
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def normalized(arrays, name, x):
    mean, var = (moment(axis=(1, 2, 3, 4), keepdims=True) for moment in (x.mean, x.var))
    gain, shift = (arrays[f"{name}_{part}"][:, None, None, None] for part in ("gain", "shift"))
    return (x - mean) / np.sqrt(var + 1e-12) * gain + shift


def linear(weight, bias, x):
    return np.einsum("oc,bchyx->bohyx", weight, x) + bias[:, None, None, None]


def through_block(arrays, name, x, crop, table, act):
    own = below(arrays, f"{name}/")
    field = {"x": act(normalized(own, "norm_in", x)), "table": table}
    y = act(normalized(own, "norm_attn", evaluate(below(own, "attn/") | field, False, True, SIZE)))
    skip = linear(own["skip_w"], own["skip_b"], x) if "skip_w" in own else x
    inner = (..., slice(crop, y.shape[-2] - crop), slice(crop, y.shape[-1] - crop))
    z = y[inner] + skip[inner]
    hidden = act(normalized(own, "mlp_norm1", linear(own["mlp_w1"], own["mlp_b1"], z)))
    return z + normalized(own, "mlp_norm2", linear(own["mlp_w2"], own["mlp_b2"], hidden))


def run(arrays, meta, image, table):
    """Return the fields by the names of the file, and the logits."""
    act = ACTIVATIONS[meta["activation"]]
    arrays = {name: array if name == "table" else array.astype(np.float64) for name, array in arrays.items()}
    fields = {"lift": evaluate(below(arrays, "lift/") | {"x": image}, True, True, SIZE)}
    x = act(normalized(arrays, "lift_norm", fields["lift"]))
    for step in meta["program"]:
        if step["op"] == "block":
            x = fields[step["name"]] = through_block(arrays, step["name"], x, step["crop"], table, act)
        elif step["op"] == "norm, activation":
            x = act(normalized(arrays, step["name"], x))
        elif step["op"] == "maxpool2x2":
            rows, columns = x.shape[-2] // 2, x.shape[-1] // 2
            cells = x[..., : 2 * rows, : 2 * columns].reshape(*x.shape[:3], rows, 2, columns, 2)
            x = cells.max(axis=(-1, -3))
    fields["head"] = np.einsum("oc,bchyx->bohyx", arrays["head_w"], x)
    return fields, fields["head"].sum(axis=(-2, -1)).max(axis=2)


def network_file(name, n, steps, sides=(8, 8), *, between=False, skips=False, activation="swish", table="equivariant"):
    """Return the contents of a file of a network. ``steps`` are "pool", or the width and the crop of a block."""
    rng = np.random.default_rng(11)
    matrices = family(name, n)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32) / (np.sqrt(shape[-1]) if len(shape) > 1 else 1)

    def norm(arrays, name, channels):
        arrays |= {f"{name}_gain": 1 + draw(channels) / 4, f"{name}_shift": draw(channels)}

    def layer(prefix, channels, lifting):
        made = layer_arrays(draw, matrices, channels, channels[1] // 2, SIZE, lifting=lifting)
        return {f"{prefix}/{name}": array for name, array in made.items()}

    a = {"A": matrices, "x": draw(IMAGES, C_IN, *sides)} | layer("lift", (C_IN, CHANNELS), True)
    norm(a, "lift_norm", CHANNELS)
    width, program, count = CHANNELS, [], 0
    for step in steps:
        if step == "pool":
            program += [{"op": "maxpool2x2"}, {"op": "dropout (identity here)"}]
            continue
        (wider, crop), block = step, f"block{count}"
        program.append({"op": "block", "name": block, "crop": crop})
        a |= layer(f"{block}/attn", (width, wider), False)
        a |= {f"{block}/mlp_w1": draw(wider // 2, wider), f"{block}/mlp_b1": draw(wider // 2)}
        a |= {f"{block}/mlp_w2": draw(wider, wider // 2), f"{block}/mlp_b2": draw(wider)}
        for part, channels in (("in", width), ("attn", wider)):
            norm(a, f"{block}/norm_{part}", channels)
        for part, channels in ((1, wider // 2), (2, wider)):
            norm(a, f"{block}/mlp_norm{part}", channels)
        if skips or width != wider:
            a |= {f"{block}/skip_w": draw(wider, width), f"{block}/skip_b": draw(wider)}
        if between:
            norm(a, f"between{count}", wider)
            program.append({"op": "norm, activation", "name": f"between{count}"})
        width, count = wider, count + 1
    a["head_w"] = draw(CLASSES, width)
    program.append({"op": "linear", "name": "head"})
    order = len(matrices)
    a["table"] = equivariant_table(matrices)
    if table == "any":
        a["table"] = rng.integers(order, size=(order, order, order))
    meta = {"kind": "network", "channels": CHANNELS, "classes": CLASSES, "heads": HEADS, "size": SIZE}
    meta |= {"activation": activation, "program": program}
    fields, logits = run(a, meta, a["x"].astype(np.float64), a["table"])
    _, turned = run(a, meta, np.rot90(a["x"], 1, (-2, -1)).astype(np.float64), a["table"])
    a |= {f"act_f64/{name}": field for name, field in fields.items()}
    return a | {"out_f64": logits, "out_rot90_f64": turned, "meta": np.array(json.dumps(meta))}


FILES = {
    "crops and poolings": lambda: network_file("C", 4, [(8, 1), "pool", (8, 0), "pool"], (9, 9)),
    "mirrors, any table": lambda: network_file("D", 2, [(8, 0), "pool", (8, 0)], table="any"),
    "norms between": lambda: network_file("C", 3, ["pool", (8, 0), (8, 0), "pool", (16, 0)], between=True),
    "wider inside of a stage": lambda: network_file("C", 4, [(8, 0), (16, 0)], (5, 6), activation="relu"),
    "wider, then narrower": lambda: network_file("C", 2, [(12, 0), "pool", (8, 0)], between=True),
    "skips without other widths": lambda: network_file("C", 2, [(8, 1), "pool", (8, 0)], skips=True),
    "no blocks": lambda: network_file("D", 1, [], (4, 3)),
}


@pytest.mark.parametrize("name", FILES)
def test_networks_like_the_golden(name, tmp_path):
    arrays, path = FILES[name](), tmp_path / "file.npz"
    np.savez(path, **arrays)
    gsa.check(path)
    for spoiled in ("out_f64", "out_rot90_f64", "act_f64/head"):
        np.savez(path, **{**arrays, spoiled: arrays[spoiled] * (1 + 1e-3)})
        with pytest.raises(AssertionError, match=f"{spoiled} in"):
            gsa.check(path)


def test_steps_that_are_unknown_fail(tmp_path):
    arrays = FILES["no blocks"]()
    settings = json.loads(str(arrays["meta"]))
    settings["program"].append({"op": "avgpool2x2"})
    np.savez(tmp_path / "file.npz", **{**arrays, "meta": np.array(json.dumps(settings))})
    with pytest.raises(AssertionError, match="unknown step"):
        gsa.check(tmp_path / "file.npz")
