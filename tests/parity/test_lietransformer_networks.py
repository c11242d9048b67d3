"""Tests of the parity runner on whole networks of LieTransformer: groups and options that the goldens do not have.

As in ``test_lietransformer_reference``, the reference evaluates the formulas in the README of the goldens in numpy.
"""

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from tests.parity import lietransformer
from tests.parity.test_lietransformer_reference import C, affine, attend, parameters, swish, write

CLOUDS, POINTS, FEATURES = 2, 4, 3


def wrap(angle):
    """Map angles to (-π, π]. Half turns become +π in spite of rounding."""
    wrapped = np.pi - (np.pi - angle) % (2 * np.pi)
    return np.where(wrapped < 1e-7 - np.pi, wrapped + 2 * np.pi, wrapped)


def turn(angle):
    c, s = np.cos(angle), np.sin(angle)
    return np.stack([np.stack([c, -s], -1), np.stack([s, c], -1)], -2)


def all_pairs(elements):
    """Return g_j at [b, i, j] and g_i at [b, i, j]."""
    shape = (*elements.shape[:2], elements.shape[1], *elements.shape[2:])
    return np.broadcast_to(elements[:, None], shape), np.broadcast_to(elements[:, :, None], shape)


def rotation_of(q):
    return Rotation.from_quat(q[..., [1, 2, 3, 0]].reshape(-1, 4)).as_matrix().reshape(*q.shape[:-1], 3, 3)


def log_se2(angle, t):
    half = angle / 2
    small = np.abs(angle) < 1e-6
    factor = np.where(small, 1 - half**2 / 3, half / np.tan(np.where(small, 1.0, half)))
    u = np.stack([factor * t[..., 0] + half * t[..., 1], factor * t[..., 1] - half * t[..., 0]], -1)
    return np.concatenate([angle[..., None], u], -1)


def log_se3(rotation, t):
    w = Rotation.from_matrix(rotation.reshape(-1, 3, 3)).as_rotvec().reshape(*t.shape)
    angle = np.linalg.norm(w, axis=-1)
    safe = np.where(angle < 1e-4, 1.0, angle)
    factor = np.where(angle < 1e-4, 1 / 12, (1 - safe / 2 / np.tan(safe / 2)) / safe**2)[..., None]
    return np.concatenate([w, t - np.cross(w, t) / 2 + factor * np.cross(w, np.cross(w, t))], -1)


def quaternion_pair(q, x):
    """Return conj(q_j) q_i and R_j^T (x_i - x_j)."""
    (qj, qi), (xj, xi) = all_pairs(q), all_pairs(x)
    real = (qj * qi).sum(-1, keepdims=True)
    vector = qj[..., :1] * qi[..., 1:] - qi[..., :1] * qj[..., 1:] - np.cross(qj[..., 1:], qi[..., 1:])
    shift = np.einsum("bijyx,bijy->bijx", rotation_of(qj), xi - xj)
    return np.concatenate([real, vector, shift], -1)


def pairs_of(a, group, samples, choice=wrap):
    """Return pairs [b, N, N, g] from positions and draws. ``choice`` wraps the angle if it is a separate coordinate."""
    x = np.repeat(a["positions"], samples, axis=1)
    xj, xi = all_pairs(x)
    if group.startswith("T"):
        return xi - xj
    if group in ("SO2", "RxSO2"):
        rj, ri = all_pairs(np.linalg.norm(x, axis=-1, keepdims=True))
        tj, ti = all_pairs(np.arctan2(x[..., 1], x[..., 0]))
        angle = choice(ti - tj)[..., None]
        return np.concatenate([angle, ri, rj] if group == "SO2" else [np.log(ri / rj), angle], -1)
    if group == "SE2grid":
        k = np.tile(np.arange(samples), POINTS)[None].repeat(CLOUDS, 0)
        kj, ki = all_pairs(k)
        shift = np.einsum("bijxy,bijy->bijx", turn(-2 * np.pi * ki / samples), xj - xi)
        return np.concatenate([shift, ((kj - ki) % samples)[..., None]], -1)
    if group == "SE2":
        steps = np.arange(1, samples + 1) / samples
        angle = (-np.pi + 2 * np.pi * (steps + a["grid_offset_fraction"])).reshape(CLOUDS, -1)
        aj, ai = all_pairs(angle)
        return log_se2(wrap(ai - aj), np.einsum("bijxy,bijy->bijx", turn(-aj), xi - xj))
    q = np.broadcast_to(a["frame_quaternion"], (CLOUDS, POINTS, samples, 4)).reshape(CLOUDS, -1, 4)
    if group == "SE3quat":
        return quaternion_pair(q, x)
    rj, ri = all_pairs(rotation_of(q))
    return log_se3(rj.swapaxes(-1, -2) @ ri, np.einsum("bijyx,bijy->bijx", rj, xi - xj))


def normalized(a, name, x, eps=1e-5):
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt(x.var(-1, keepdims=True) + eps) * a[f"{name}_gain"] + a[f"{name}_bias"]


def batch_normalized(a, name, x, mask, meta, least=np.maximum):
    """Normalize over the rows of a mask; others are 0 before. ``least`` keeps eps below or adds it to the variance."""
    x = np.where(mask[..., None], x, 0)
    mean, variance = x[mask].mean(0), x[mask].var(0)
    if not meta.get("training"):
        mean, variance = (a[f"{name}_running_{part}"] for part in ("mean", "var"))
    return (x - mean) / np.sqrt(least(variance, meta["norm_eps"])) * a[f"{name}_gain"] + a[f"{name}_bias"]


def blocks_of(a, meta, f, pair):
    """Return the fields after each block."""
    fields, kind = [], meta["block_norm"]
    for number in range(meta["layers"]):
        own = {name.removeprefix(f"block{number}."): array for name, array in a.items()}
        own |= {"pair": pair, "mask": np.repeat(a["mask"], meta["lift_samples"], axis=1)}

        def norm(where, name, x, own=own):
            if not kind.endswith(where):
                return x
            if kind.startswith("batch"):
                return batch_normalized(own, name, x, own["mask"], meta)
            return normalized(own, name, x, meta["norm_eps"])

        f = f + norm("post", "norm_attn", attend(own, meta, norm("pre", "norm_attn", f))[2])
        y = norm("pre", "norm_mlp", f)
        for k in (1, 2):
            y = swish(y @ own[f"mlp_W{k}"].T + own[f"mlp_b{k}"])
        f = f + norm("post", "norm_mlp", y)
        fields.append(f)
    return fields


def pooled(a, meta, f):
    mask = np.repeat(a["mask"], meta["lift_samples"], axis=1)[..., None]
    if meta["pool"] == "max":
        return np.where(mask, f, -np.inf).max(axis=1)
    return (f * mask).sum(axis=1) / mask.sum(axis=1)


def read_out(a, meta, f):
    if meta["readout"] == "lieconv":
        return pooled(a, meta, affine(a, "readout", swish(f)))
    y = pooled(a, meta, f)
    for k in (1, 2, 3):
        if meta["output_norm"] == "batch":
            y = batch_normalized(a, f"head_norm{k}", y, np.ones(len(y), bool), meta, np.add)
        elif meta["output_norm"] == "layer":
            y = normalized(a, f"head_norm{k}", y, meta["norm_eps"])
        y = swish(y) @ a[f"head_W{k}"].T + a[f"head_b{k}"]
    return y


def model_case(group, samples=1, kernel="mlp", normalisation="softmax", seed=0, choice=wrap, **options):
    rng = np.random.default_rng(seed)
    dim = 3 if group in ("T3", "SE3", "SE3shared", "SE3quat") else 2
    meta = {
        "kind": "model",
        "group": group,
        "lift_samples": samples,
        "kernel": kernel,
        "normalisation": normalisation,
        "activation": "swish",
        "heads": 2,
        "layers": 2,
        "block_norm": "layer_pre",
        "norm_eps": 1e-5,
        "readout": "model_1",
        "output_norm": "none",
        "pool": "mean",
        "squash": "none",
        "tol": 1e-9,
        **options,
    }
    mask = np.arange(POINTS) < np.array([[POINTS], [POINTS - 1]])
    a = {"mask": mask, "positions": rng.normal(size=(CLOUDS, POINTS, dim)) * mask[..., None]}
    a["features"] = rng.normal(size=(CLOUDS, POINTS, FEATURES)) * mask[..., None]
    if group == "SE2":
        a["grid_offset_fraction"] = rng.random(size=(CLOUDS, POINTS, 1))
    if group.startswith("SE3"):
        q = rng.normal(size=(CLOUDS, 1 if group == "SE3shared" else POINTS, samples, 4))
        a["frame_quaternion"] = q / np.linalg.norm(q, axis=-1, keepdims=True)
    with np.errstate(all="ignore"):  # padded points are at the origin
        a["pair"] = pairs_of(a, group, samples, choice)
    a["pair"] = np.nan_to_num(a["pair"], posinf=0, neginf=0)
    a |= {"embed_W": rng.normal(size=(C, FEATURES)), "embed_b": rng.normal(size=C)}
    for number in range(2):
        own = parameters(rng, kernel, a["pair"].shape[-1])
        for k in (1, 2):
            own |= {f"mlp_W{k}": rng.normal(size=(C, C)) / 3, f"mlp_b{k}": rng.normal(size=C)}
        for norm in ("norm_attn", "norm_mlp") if meta["block_norm"] != "none" else ():
            own |= norm_arrays(rng, norm, meta["block_norm"].startswith("batch") and not meta.get("training"))
        a |= {f"block{number}.{name}": array for name, array in own.items()}
    a |= {"readout_W": rng.normal(size=(2, C)), "readout_b": rng.normal(size=2)} if meta["readout"] == "lieconv" else {}
    for k, width in () if meta["readout"] == "lieconv" else ((1, C), (2, C), (3, 5)):
        a |= {f"head_W{k}": rng.normal(size=(width, C)) / 3, f"head_b{k}": rng.normal(size=width)}
        if meta["output_norm"] != "none":
            a |= norm_arrays(rng, f"head_norm{k}", meta["output_norm"] == "batch")
    return a, meta


def norm_arrays(rng, name, statistics):
    a = {f"{name}_gain": rng.normal(size=C), f"{name}_bias": rng.normal(size=C)}
    if statistics:
        a |= {f"{name}_running_mean": rng.normal(size=C), f"{name}_running_var": 0.5 + rng.random(size=C)}
    return a


def finished_model(*args, **options):
    a, meta = model_case(*args, **options)
    pair = a["pair"]
    if meta["squash"] == "tanh":
        length = np.linalg.norm(pair, axis=-1, keepdims=True) + 1e-6
        pair = pair * np.tanh(length / 7) / length
    a["embedded"] = np.repeat(affine(a, "embed", a["features"]), meta["lift_samples"], axis=1)
    for number, field in enumerate(blocks_of(a, meta, a["embedded"], pair)):
        a[f"after_block{number}"] = field
    a["prediction"] = read_out(a, meta, field)
    return a, meta


CASES = {
    "T2, max pool": (("T2",), {"pool": "max"}),
    "T3, no norm": (("T3",), {"block_norm": "none", "readout": "lieconv", "pool": "max"}),
    "T3, a norm that the read-out does not use": (("T3",), {"output_norm": "layer", "readout": "lieconv"}),
    "SO2": (("SO2",), {"squash": "tanh"}),
    "RxSO2, head norm": (("RxSO2",), {"output_norm": "layer"}),
    "SE2 with half turns": (("SE2", 2), {"block_norm": "layer_post"}),
    "T3, batch norms": (("T3",), {"block_norm": "batch_pre", "output_norm": "batch", "pool": "max"}),
    "SE2 in training": (("SE2", 2), {"block_norm": "batch_post", "training": True}),
    "SE2, 5 frames": (("SE2", 5, "2212", "mean"), {}),
    "SE2grid": (("SE2grid", 3, "relative_position", "mean"), {"pool": "max"}),
    "SE3": (("SE3", 2, "1231", "softmax"), {"squash": "tanh"}),
    "SE3shared": (("SE3shared", 3), {}),
    "SE3quat": (("SE3quat", 2, "1222", "softmax"), {"readout": "lieconv", "squash": "tanh"}),
}


@pytest.mark.parametrize("name", CASES)
def test_networks_like_the_goldens(name, tmp_path):
    arguments, options = CASES[name]
    arrays, meta = finished_model(*arguments, **options)
    lietransformer.check(write(tmp_path / "file.npz", arrays, meta))
    arrays["prediction"] = arrays["prediction"] + 1e-7
    with pytest.raises(AssertionError, match="prediction: error"):
        lietransformer.check(write(tmp_path / "file.npz", arrays, meta))


@pytest.mark.parametrize("normalisation", ["softmax", "mean", "exp_mean"])
def test_blocks_with_chosen_neighbors(normalisation, tmp_path):
    """The attention of a block has the neighbors of the file, as that of a file of one layer has."""
    arrays, meta = model_case("T3", normalisation=normalisation, layers=1)
    order = np.random.default_rng(6).random((CLOUDS, POINTS, POINTS)) - np.eye(POINTS)  # each point has itself
    arrays["neighbour_index"] = order.argsort(axis=2)[..., :2]
    arrays["features"] = affine(arrays, "embed", arrays["features"])
    arrays["out"] = blocks_of(arrays, meta, arrays["features"], arrays["pair"])[0]
    arrays = {name.removeprefix("block0."): array for name, array in arrays.items() if not name.startswith("block1.")}
    meta["kind"] = "block"
    lietransformer.check(write(tmp_path / "file.npz", arrays, meta))
    with pytest.raises(AssertionError, match="out: error"):
        lietransformer.check(write(tmp_path / "file.npz", {**arrays, "out": arrays["out"] + 1e-7}, meta))


# --- dynamics -------------------------------------------------------------------------------------------------------


def dynamics_case(group, samples=1):
    """Return a potential on random states, with the field by central differences."""
    a, meta = model_case(group, samples, readout="lieconv")
    meta |= {"kind": "hamiltonian", "tol": 1e-7}
    for name in ("positions", "features", "pair"):
        del a[name]
    rng = np.random.default_rng(5)
    a |= {"mask": np.ones((CLOUDS, POINTS), bool), "embed_W": a["embed_W"][:, :2]}
    a |= {name: a[name][:1] for name in ("readout_W", "readout_b")}
    a |= {"q": rng.normal(size=(CLOUDS, POINTS, 2)), "p": rng.normal(size=(CLOUDS, POINTS, 2))}
    a |= {"mass": 0.5 + rng.random((CLOUDS, POINTS)), "spring": rng.random((CLOUDS, POINTS))}

    def potential(q):
        own = {**a, "positions": q - q.mean(axis=1, keepdims=True)}
        features = np.repeat(np.stack([a["mass"], a["spring"]], -1), samples, axis=1)
        fields = blocks_of(a, meta, affine(a, "embed", features), pairs_of(own, group, samples))
        return read_out(a, meta, fields[-1])[:, 0]

    kinetic = ((a["p"] ** 2).sum(-1) / (2 * a["mass"])).sum(1)
    force, step = np.zeros((CLOUDS, POINTS, 2)), 1e-5
    for place in np.ndindex(POINTS, 2):
        moved = np.zeros((POINTS, 2))
        moved[place] = step
        force[:, *place] = -(potential(a["q"] + moved) - potential(a["q"] - moved)) / (2 * step)
    velocity = a["p"] / a["mass"][..., None]
    found = {"potential": potential(a["q"]), "hamiltonian": potential(a["q"]) + kinetic}
    found["field"] = np.stack([velocity, force], axis=1).reshape(CLOUDS, -1)
    return {name: array for name, array in a.items() if name != "mask"} | found, meta


@pytest.mark.parametrize("group", ["T2", "SO2", "RxSO2", "SE2grid"])
def test_dynamics_like_the_goldens(group, tmp_path):
    arrays, meta = dynamics_case(group, 3 if group == "SE2grid" else 1)
    lietransformer.check(write(tmp_path / "file.npz", arrays, meta))
    for name in ("potential", "hamiltonian", "field"):
        with pytest.raises(AssertionError, match=f"{name}: error"):
            lietransformer.check(write(tmp_path / "file.npz", {**arrays, name: arrays[name] + 1e-6}, meta))


# --- the finite SE(2) variant ---------------------------------------------------------------------------------------


def set_attention(a, prefix, queries, keys, valid, norm):
    """Apply an attention block with the residual around the query projection."""

    def heads(x):
        return x.reshape(*x.shape[:-1], 2, -1)

    q, k, v = affine(a, f"{prefix}query", queries), affine(a, f"{prefix}key", keys), affine(a, f"{prefix}value", keys)
    score = np.einsum("bihd,bjhd->bhij", heads(q), heads(k)) / np.sqrt(C)
    score = np.where(valid[:, None, None], score, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    o = q + np.einsum("bhij,bjhd->bihd", weight, heads(v)).reshape(q.shape)
    o = normalized(a, f"{prefix}norm0", o) if norm else o
    o = o + np.maximum(affine(a, f"{prefix}out", o), 0)
    return normalized(a, f"{prefix}norm1", o) if norm else o


def finite_layer(a, prefix, f, pair, valid, norm, mean):
    def heads(x):
        return x.reshape(*x.shape[:-1], 2, -1)

    q, k, v = (heads(affine(a, f"{prefix}{name}", f)) for name in ("query", "key", "value"))
    hidden = np.maximum(np.einsum("bijk,hmk->bijhm", pair, a[f"{prefix}loc_W1"]) + a[f"{prefix}loc_b1"], 0)
    location = np.einsum("bijhm,hom->bijho", hidden, a[f"{prefix}loc_W2"]) + a[f"{prefix}loc_b2"]
    score = np.einsum("bihd,bjhd->bijh", q, k) / np.sqrt(C) + location[..., 0]
    there = valid[:, None, :, None]
    if mean:
        weight = score * there / valid.sum(1)[:, None, None, None]
    else:
        score = np.where(there, score, -np.inf)
        weight = np.exp(score - score.max(2, keepdims=True))
        weight /= weight.sum(2, keepdims=True)
    o = (v + np.einsum("bijh,bjhd->bihd", weight, v)).reshape(f.shape)
    o = normalized(a, f"{prefix}norm0", o) if norm else o
    o = o + np.maximum(affine(a, f"{prefix}out", o), 0)
    return normalized(a, f"{prefix}norm1", o) if norm else o


def finite_case(readout, content, rotations, similarity, norm, hidden=C, decoders=1):
    rng = np.random.default_rng(3)
    meta = {
        "kind": "finite_se2",
        "readout": readout,
        "content": content,
        "rotations": rotations,
        "similarity": similarity,
        "layer_norm": norm,
        "heads": 2,
        "layers": 2,
        "moments": 5,
        "n_outputs": 2,
        "dim_output": 3,
        "tol": 1e-10,
    }
    mask = np.arange(POINTS) < np.array([[POINTS], [POINTS - 1]])
    # Rounding errors of fifth powers of distances far above 1 would exceed the absolute tolerance.
    a = {"mask": mask, "positions": rng.normal(size=(CLOUDS, POINTS, 2)) / 2 * mask[..., None]}

    def linear(name, rows, columns, tag=""):
        a[f"{name}_W{tag}"], a[f"{name}_b{tag}"] = rng.normal(size=(rows, columns)) / 2, rng.normal(size=rows)

    set_blocks = ["pool.", *(f"decoder{k}." for k in range(decoders))]
    blocks = ["layer0.", "layer1.", *(set_blocks if readout == "set_transf" else ())]
    for block in blocks:
        for name in ("query", "key", "value", "out"):
            linear(block + name, C, C)
        for number in (0, 1) if norm else ():
            a |= {f"{block}norm{number}_{part}": rng.normal(size=C) for part in ("gain", "bias")}
        if block.startswith("layer"):
            a |= {f"{block}loc_W1": rng.normal(size=(2, 3, 3)), f"{block}loc_b1": rng.normal(size=(2, 3))}
            a |= {f"{block}loc_W2": rng.normal(size=(2, 1, 3)), f"{block}loc_b2": rng.normal(size=(2, 1))}
    if content == "constant":
        a["embed_constant"] = rng.normal(size=C)
    else:
        linear("embed", hidden, 2 if content == "centroidal" else 5, "1")
        linear("embed", C, hidden, "2")
    if readout == "set_transf":
        a["pool_seeds"] = rng.normal(size=(1, 2, C))
        linear("head", 3, C)
    else:
        linear("head", hidden, C, "1")
        linear("head", 6, hidden, "2")
    return a, meta


def finish_finite(a, meta):
    rotations, norm, x = meta["rotations"], meta["layer_norm"], a["positions"]
    steps = np.repeat(np.arange(rotations), POINTS)
    places = np.tile(x, (1, rotations, 1))
    back = turn(-2 * np.pi * steps / rotations)
    shift = np.einsum("ixy,bijy->bijx", back, places[:, None] - places[:, :, None])
    index = np.broadcast_to((steps - steps[:, None]) % rotations, shift.shape[:3])
    a["pair"] = np.concatenate([shift, index[..., None]], -1)
    valid = np.tile(a["mask"], (1, rotations))
    if meta["content"] == "constant":
        f = np.broadcast_to(a["embed_constant"], (*valid.shape, C))
    else:
        if meta["content"] == "centroidal":
            content = np.einsum("ixy,biy->bix", back, places - x.mean(1, keepdims=True))
        else:
            distance = np.linalg.norm(x[:, :, None] - x[:, None], axis=-1)[..., None] ** np.arange(1, 6)
            moments = (distance * a["mask"][:, None, :, None]).sum(2) / a["mask"].sum(1)[:, None, None]
            content = np.tile(moments, (1, rotations, 1))
        hidden = np.maximum(content @ a["embed_W1"].T + a["embed_b1"], 0)
        f = hidden @ a["embed_W2"].T + a["embed_b2"]
    a["features_lifted"] = f
    for number in range(2):
        f = finite_layer(a, f"layer{number}.", f, a["pair"], valid, norm, meta["similarity"] == "mean")
        a[f"after_layer{number}"] = f
    if meta["readout"] == "set_transf":
        seeds = np.broadcast_to(a["pool_seeds"], (CLOUDS, 2, C))
        y = set_attention(a, "pool.", seeds, f, valid, norm)
        for decoder in sorted({name.split(".")[0] for name in a if name.startswith("decoder")}):
            y = set_attention(a, f"{decoder}.", y, y, np.ones(y.shape[:2], bool), norm)
        a["prediction"] = affine(a, "head", y)
    else:
        y = (f * valid[..., None]).mean(1)
        y = np.maximum(y @ a["head_W1"].T + a["head_b1"], 0) @ a["head_W2"].T + a["head_b2"]
        a["prediction"] = y.reshape(CLOUDS, 2, 3)


@pytest.mark.parametrize(
    "options",
    [
        ("set_transf", "constant", 4, "softmax", False),
        ("set_transf", "centroidal", 3, "mean", True),
        ("set_transf", "centroidal", 2, "softmax", True, C, 3),
        ("set_transf", "constant", 3, "mean", False, C, 0),
        ("only_eqv_sa", "centroidal", 5, "softmax", True),
        ("only_eqv_sa", "pairwise_distances", 2, "mean", True),
        ("only_eqv_sa", "pairwise_distances", 3, "softmax", False, 5),
    ],
    ids=str,
)
def test_finite_se2_like_the_goldens(options, tmp_path):
    arrays, meta = finite_case(*options)
    finish_finite(arrays, meta)
    lietransformer.check(write(tmp_path / "file.npz", arrays, meta))
    arrays["prediction"] = arrays["prediction"] + 1e-8
    with pytest.raises(AssertionError, match="prediction: error"):
        lietransformer.check(write(tmp_path / "file.npz", arrays, meta))


def test_gradients_are_not_taken_for_parameters(tmp_path):
    """Gradients of networks are not compared. Their names contain those of the parameters, and may come before them."""
    finite, settings = finite_case("set_transf", "constant", 2, "softmax", True)
    finish_finite(finite, settings)
    for arrays, meta in (finished_model("T2", output_norm="layer"), (finite, settings)):
        gradients = {f"grad_{name}": np.ones(array.shape) for name, array in arrays.items()}
        lietransformer.check(write(tmp_path / "file.npz", gradients | arrays, meta))
