"""Tests of the parity runner on networks of GSA-Nets: programs, groups and widths that the golden does not have.

As in ``test_reference``, the reference evaluates the formulas in the README of the goldens in numpy.
"""

import json

import numpy as np
import pytest

from tests.parity import gsa
from tests.parity.test_reference import HEADS, equivariant_table, evaluate, family, layer_arrays, swish

IMAGES, C_IN, CHANNELS, CLASSES, SIZE = 2, 2, 8, 3, 3
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
