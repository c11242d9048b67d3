"""Tests of the parity runner on generated files of LieTransformer.

They have kernels, options and sizes that the goldens do not have. The reference evaluates the formulas in the README of
the goldens in numpy, on dense arrays in its own indices.
"""

import json

import numpy as np
import pytest

from tests.parity import lietransformer

HEADS, WIDTH = 2, 4
C = HEADS * WIDTH


def swish(x):
    return x / (1 + np.exp(-x))


ACTIVATIONS = {
    "swish": swish,
    "relu": lambda x: np.maximum(x, 0),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "softplus": lambda x: np.logaddexp(x, 0),
    "tanh": np.tanh,
}


def heads_of(x):
    return x.reshape(*x.shape[:-1], HEADS, -1)


def mlp3(a, prefix, x, act):
    """Apply a network per head to x [b, N, N, h, in]."""
    for number in (1, 2, 3):
        x = act(np.einsum("bijhk,hkm->bijhm", x, a[f"{prefix}_W{number}"]) + a[f"{prefix}_b{number}"])
    return x[..., 0]


def affine(a, name, x):
    return x @ a[f"{name}_W"].T + a[f"{name}_b"]


def dot_products(a, f):
    q, k = heads_of(affine(a, "query", f)), heads_of(affine(a, "key", f))
    return q, k, np.einsum("bihd,bjhd->bijh", q, k) / np.sqrt(WIDTH)


def logits(a, meta, f):
    kernel, act, pair = meta["kernel"], ACTIVATIONS[meta["activation"]], a["pair"]
    wide = np.repeat(pair[:, :, :, None], HEADS, axis=3)
    if kernel == "mlp":
        return dot_products(a, f)[2] + mlp3(a, "loc_mlp", wide, act)
    if kernel == "dot_product_only":
        return dot_products(a, f)[2]
    if kernel == "location_only":
        return mlp3(a, "loc_mlp", wide, act)
    if kernel == "relative_position":
        q, k, product = dot_products(a, f)
        e = heads_of(affine(a, "location", pair))
        rest = np.einsum("bijhd,bihd->bijh", e, q + a["location_bias"])
        return product + (rest + np.einsum("hd,bjhd->bjh", a["content_bias"], k)[:, None]) / np.sqrt(WIDTH)
    if kernel[2] == "1":
        part = dot_products(a, f)[2][..., None]
    else:
        receiver, neighbour = heads_of(affine(a, "receiver", f)), heads_of(affine(a, "neighbour", f))
        size = f.shape[1]
        part = np.concatenate(
            [np.repeat(receiver[:, :, None], size, 2), np.repeat(neighbour[:, None], size, 1)], axis=-1
        )
        if kernel[2] == "3":
            part = affine(a, "pair", part)
    location = mlp3(a, "loc_mlp", wide, act)[..., None] if kernel[3] == "1" else wide
    return mlp3(a, "comb_mlp", np.concatenate([part, location], axis=-1), act)


def attend(a, meta, f):
    """Return logits, attention [b, h, N, N] and output."""
    score = logits(a, meta, f)
    valid = np.repeat(a["mask"][:, None], f.shape[1], axis=1)
    if "neighbour_index" in a:
        near = np.zeros(valid.shape, bool)
        np.put_along_axis(near, a["neighbour_index"], True, axis=2)
        valid = valid & near
    count = np.maximum(valid.sum(2), 1)[..., None, None]
    if meta["normalisation"] == "softmax":
        top = np.where(valid[..., None], score, -np.inf).max(axis=2, keepdims=True)
        weight = np.where(valid[..., None], np.exp(score - np.where(np.isfinite(top), top, 0)), 0)
        weight = weight / np.maximum(weight.sum(axis=2, keepdims=True), 1e-300)
    else:
        weight = (np.exp(score) if meta["normalisation"] == "exp_mean" else score) / count * valid[..., None]
    value = heads_of(affine(a, "value", f))
    out = np.einsum("bijh,bjhd->bihd", weight, value).reshape(f.shape)
    return score, weight.transpose(0, 3, 1, 2), affine(a, "out", out)


def parameters(rng, kernel, g, hidden=5, e=6):
    """Return random weights of an attention layer."""
    a = {}

    def linear(name, rows, columns):
        a[f"{name}_W"], a[f"{name}_b"] = rng.normal(size=(rows, columns)) / np.sqrt(columns), rng.normal(size=rows)

    def network(name, inputs):
        for number, (rows, columns) in enumerate([(inputs, hidden), (hidden, hidden), (hidden, 1)], 1):
            a[f"{name}_W{number}"] = rng.normal(size=(HEADS, rows, columns)) / np.sqrt(rows)
            a[f"{name}_b{number}"] = rng.normal(size=(HEADS, columns))

    linear("value", C, C)
    linear("out", C, C)
    code = kernel if kernel.isdigit() else None
    if kernel in ("mlp", "dot_product_only", "relative_position") or (code and code[2] == "1"):
        linear("query", C, C)
        linear("key", C, C)
    if kernel in ("mlp", "location_only") or (code and code[3] == "1"):
        network("loc_mlp", g)
    if kernel == "relative_position":
        linear("location", C, g)
        a |= {name: rng.normal(size=(HEADS, WIDTH)) for name in ("content_bias", "location_bias")}
    if code:
        if code[2] != "1":
            width = HEADS * (e // 2 if code[2] == "2" else e)
            linear("receiver", width, C)
            linear("neighbour", width, C)
        if code[2] == "3":
            linear("pair", e, 2 * e)
        network("comb_mlp", (1 if code[2] == "1" else e) + (1 if code[3] == "1" else g))
    return a


def layer_case(kernel, normalisation, activation="swish", neighbours=0, seed=0, g=5, sizes=(6, 1, 4)):
    rng = np.random.default_rng(seed)
    a = parameters(rng, kernel, g)
    size = max(sizes)
    a["mask"] = np.arange(size) < np.array(sizes)[:, None]
    a["features"] = rng.normal(size=(len(sizes), size, C)) * a["mask"][..., None]
    a["pair"] = rng.normal(size=(len(sizes), size, size, g))
    if kernel.isdigit():
        normalisation = "softmax" if kernel[0] == "1" else "mean"
    meta = {
        "kind": "attention",
        "kernel": kernel,
        "normalisation": normalisation,
        "activation": activation,
        "heads": HEADS,
        "neighbours": neighbours,
        "tol": 1e-10,
    }
    if neighbours:
        # Keys are in random order and include padded ones.
        shuffled = np.argsort(rng.random(size=(len(sizes), size, size)), axis=2)
        a["neighbour_index"] = shuffled[..., :neighbours]
    return a, meta


def finished_layer(*args, **kwargs):
    a, meta = layer_case(*args, **kwargs)
    score, weight, a["out"] = attend(a, meta, a["features"])
    a["attention"] = weight
    a["logits"] = score
    if "neighbour_index" in a:
        a["logits"] = np.take_along_axis(score, a["neighbour_index"][..., None], axis=2)
    return a, meta


CODES = [f"{n}2{f}{p}" for n in "12" for f in "123" for p in "012"]
CASES = {
    **{code: (code, None) for code in CODES},
    **{
        f"{kernel} {normalisation}": (kernel, normalisation)
        for kernel in ("mlp", "dot_product_only", "location_only", "relative_position")
        for normalisation in ("softmax", "mean", "exp_mean")
    },
    "mlp with relu": ("mlp", "softmax", "relu"),
    "2222 with relu": ("2222", "mean", "relu"),
    "mlp with tanh": ("mlp", "softmax", "tanh"),
    "2222 with softplus": ("2222", "mean", "softplus"),
    "2232 with leaky_relu": ("2232", "softmax", "leaky_relu"),
    "mlp, 3 random neighbors": ("mlp", "mean", "swish", 3),
    "2231, 4 random neighbors": ("2231", "mean", "swish", 4),
    "mlp softmax, 3 random neighbors": ("mlp", "softmax", "swish", 3),
}


def write(path, arrays, meta):
    np.savez(path, **arrays, meta=np.array(json.dumps(meta)))
    return path


@pytest.mark.parametrize("name", CASES)
def test_attention_like_the_goldens(name, tmp_path):
    arrays, meta = finished_layer(*CASES[name])
    lietransformer.check(write(tmp_path / "file.npz", arrays, meta))
    arrays["out"] = arrays["out"] + 1e-9
    with pytest.raises(AssertionError, match="out: error"):
        lietransformer.check(write(tmp_path / "file.npz", arrays, meta))


STEP = 1e-30


def with_gradients(arrays, meta, scale):
    """Return gradients of sum(out * cotangent) by complex steps: the imaginary part of a step is the derivative."""
    rng = np.random.default_rng(4)
    cotangent = scale * rng.normal(size=arrays["out"].shape)
    results = ("mask", "out", "attention", "logits", "neighbour_index")
    gradients = {}
    for name in [name for name in arrays if name not in results]:
        gradient = np.zeros(arrays[name].shape)
        for place in np.ndindex(gradient.shape):
            moved = arrays[name].astype(complex)
            moved[place] += 1j * STEP
            a = {**arrays, name: moved}
            gradient[place] = (attend(a, meta, a["features"])[2].imag * cotangent).sum() / STEP
        gradients[f"grad_{name}"] = gradient
    return {**arrays, "cotangent": cotangent, **gradients}


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize(
    "case", [("dot_product_only", "softmax"), ("1212", "softmax"), ("mlp", "softmax"), ("mlp", "mean")]
)
def test_gradients_that_vanish(case, scale, tmp_path):
    """Under a softmax a bias of the keys has no effect; its gradient in float32 is a rounding error."""
    arrays, meta = finished_layer(*case, g=2, sizes=(3, 2))
    arrays = with_gradients(arrays, meta, scale)
    gradients = {name: np.abs(array).max() for name, array in arrays.items() if name.startswith("grad_")}
    largest = max(gradients.values())
    assert (gradients["grad_key_b"] < 1e-12 * largest) == (case[0] != "1212" and case[1] == "softmax")
    lietransformer.check(write(tmp_path / "file.npz", arrays, meta))
    for name in ("grad_key_b", "grad_pair", "grad_features"):
        if name == "grad_pair" and case[0] == "dot_product_only":
            continue
        wrong = {**arrays, name: arrays[name] + 1e-6 * max(1.0, scale)}
        with pytest.raises(AssertionError, match="error"):
            lietransformer.check(write(tmp_path / "file.npz", wrong, meta))


def test_float32_gradients_are_compared(tmp_path):
    """Control: float32 detects errors above rounding that the tolerance of float64 allows."""
    arrays, meta = finished_layer("mlp", "softmax", g=2, sizes=(3, 2))
    arrays = with_gradients(arrays, meta, 1.0)
    meta["tol"] = 1.0
    lietransformer.check(write(tmp_path / "file.npz", arrays, meta))
    arrays["grad_key_b"] = arrays["grad_key_b"] + 1e-3 * max(
        np.abs(arrays[name]).max() for name in arrays if "grad" in name
    )
    with pytest.raises(AssertionError, match=r"score\.content\.key\.bias: error .* in torch\.float32"):
        lietransformer.check(write(tmp_path / "file.npz", arrays, meta))


def farthest(distance, mask, start, count):
    """The definition in the README of the golden files, literally."""
    chosen = [start]
    for _ in range(count - 1):
        chosen.append(int(np.where(mask, distance[chosen].min(0), -100).argmax()))
    return chosen


@pytest.mark.parametrize("distinct", [1, 3, 8])
def test_subsampling_of_clouds_with_coincident_points(distinct, tmp_path):
    rng = np.random.default_rng(distinct)
    clouds, size = 6, 8
    x = rng.normal(size=(clouds, distinct, 2))[np.arange(clouds)[:, None], rng.integers(distinct, size=(clouds, size))]
    distance = np.linalg.norm(x[:, :, None] - x[:, None], axis=-1).astype(np.float32)
    mask = np.arange(size) < rng.integers(1, size + 1, size=(clouds, 1))
    start = rng.integers(mask.sum(1))
    chosen = np.array([farthest(*cloud, 6) for cloud in zip(distance, mask, start, strict=True)])
    arrays = {"distance": distance, "mask": mask, "start": start, "chosen": chosen}
    path = tmp_path / "file.npz"
    lietransformer.check(write(path, arrays, {"kind": "fps", "fraction": 0.75}))
    with pytest.raises(AssertionError, match="chosen"):
        lietransformer.check(write(path, {**arrays, "chosen": chosen[:, ::-1]}, {"kind": "fps", "fraction": 0.75}))
