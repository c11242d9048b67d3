"""Tests of the parity runner on files of SO(2), R x SO(2) and SE(2): exponentials, lifts, attention and networks.

The range of angles is a choice: files have them in (-π, π], in [0, 2π), or as differences that are not wrapped.
"""

import numpy as np
import pytest

from tests.parity import lietransformer
from tests.parity.test_lietransformer_networks import finished_model, turn, wrap
from tests.parity.test_lietransformer_reference import finished_layer, write

CHOICES = {
    "half turn up": wrap,
    "half turn down": lambda angle: -wrap(-angle),
    "from 0": lambda angle: angle % (2 * np.pi),
    "as it comes": lambda angle: angle,
}


def passes(path, arrays, meta):
    lietransformer.check(write(path / "file.npz", arrays, meta))


def fails(path, arrays, meta, match):
    with pytest.raises(AssertionError, match=match):
        passes(path, arrays, meta)


def changed(arrays, name, error):
    return {**arrays, name: arrays[name] + error}


# --- exponential and logarithm --------------------------------------------------------------------------------------


def exponential_case(group, choice):
    rng = np.random.default_rng(1)
    angle = np.concatenate([rng.uniform(-np.pi, np.pi, 12), [0.0, 1e-9, np.pi - 1e-9, np.pi, -np.pi]])
    other = rng.normal(size=(len(angle), {"SO2": 0, "RxSO2": 1, "SE2": 2}[group]))
    chosen = CHOICES[choice](angle)
    parts = [other, chosen[:, None]] if group == "RxSO2" else [chosen[:, None], other]
    matrix = turn(angle)
    if group == "RxSO2":
        matrix = matrix * np.exp(other)[..., None]
    if group == "SE2":
        small = np.abs(chosen) < 1e-4
        safe = np.where(small, 1.0, chosen)
        a = np.where(small, 1 - chosen**2 / 6, np.sin(safe) / safe)
        b = np.where(small, chosen / 2, (1 - np.cos(safe)) / safe)
        shift = np.stack([a * other[:, 0] - b * other[:, 1], b * other[:, 0] + a * other[:, 1]], -1)
        matrix = np.concatenate([matrix, shift[..., None]], -1)
        matrix = np.concatenate([matrix, np.tile([[[0.0, 0.0, 1.0]]], (len(angle), 1, 1))], 1)
    coords = np.concatenate(parts, -1)
    arrays = {"coords": coords, "exp_exact": matrix, "matrix": matrix, "log_exact": coords, "angle": chosen}
    return arrays, {"kind": "explog", "group": group, "tol_exp": 1e-12, "tol_log": 1e-9}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("group", ["SO2", "RxSO2", "SE2"])
def test_exponentials(group, choice, tmp_path):
    if group == "SE2" and choice == "from 0":
        choice = "half turn up"  # since the other coordinates depend on the angle
    arrays, meta = exponential_case(group, choice)
    passes(tmp_path, arrays, meta)
    few = {name: arrays[name] for name in ("coords", "exp_exact")}
    passes(tmp_path, few, {"kind": "explog", "group": group})
    for row in (0, -1):
        error = np.zeros((len(arrays["angle"]), arrays["coords"].shape[1]))
        error[row] = 1e-6
        fails(tmp_path, changed(arrays, "log_exact", error), meta, "log_exact")
        error = np.zeros(len(arrays["angle"]))
        error[row] = np.pi
        fails(tmp_path, changed(arrays, "angle", error), meta, "angle: error")


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_exponentials_of_translations(dim, tmp_path):
    coords = np.random.default_rng(1).normal(size=(4, dim))
    matrix = np.tile(np.eye(dim + 1), (4, 1, 1))
    matrix[:, :-1, -1] = coords
    arrays = {"coords": coords, "exp_exact": matrix, "log_exact": coords, "angle": np.zeros(4)}
    meta = {"kind": "explog", "group": f"T{dim}"}
    passes(tmp_path, arrays, meta)
    for name in ("exp_exact", "log_exact", "angle"):
        fails(tmp_path, changed(arrays, name, 1e-6), meta, f"{name}: error")


# --- lifts ----------------------------------------------------------------------------------------------------------


def lift_case(group, choice):
    """Return positions that include points on both sides of the negative first axis, where the angle jumps."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, 6, 2))
    x[0, :4] = [[-1.5, 0.0], [-0.5, -0.0], [-2.0, 1e-17], [3.0, -0.0]]
    if group == "SO2":
        x[0, 4] = 0  # its angle is 0, and the logarithm of its radius is not finite
    mask = np.arange(6) < np.array([[6], [4]])
    x = x * mask[..., None]
    angle = CHOICES[choice](np.arctan2(x[..., 1], x[..., 0]))
    radius = np.linalg.norm(x, axis=-1)
    with np.errstate(all="ignore"):  # padded points are at the origin
        log = np.log(radius)
        difference = CHOICES[choice](angle[:, :, None] - angle[:, None])[..., None]
        i, j = np.broadcast_to(radius[:, :, None], (2, 6, 6)), np.broadcast_to(radius[:, None], (2, 6, 6))
        if group == "SO2":
            pair = np.concatenate([difference, i[..., None], j[..., None]], -1)
            apart = np.abs(i - j) / (i + j + 1e-3)
        else:
            pair = np.concatenate([(log[:, :, None] - log[:, None])[..., None], difference], -1)
            apart = np.abs(np.log(i / j))
    features = rng.normal(size=(2, 6, 3)) * mask[..., None]
    arrays = {
        "positions": x,
        "features": features,
        "mask": mask,
        "element": angle[..., None] if group == "SO2" else np.stack([log, angle], -1),
        "pair": pair,
        "features_lifted": features,
        "mask_lifted": mask,
        "distance": 0.3 * np.abs(wrap(difference[..., 0])) + 0.7 * apart,
    }
    if group == "SO2":
        arrays["orbit"] = radius[..., None]
    meta = {"kind": "lift", "group": group, "lift_samples": 1, "alpha": 0.3, "tol": 1e-9}
    return arrays, meta


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("group", ["SO2", "RxSO2"])
def test_lifts(group, choice, tmp_path):
    arrays, meta = lift_case(group, choice)
    passes(tmp_path, arrays, meta)
    optional = {"element", "orbit", "distance", "features_lifted", "mask_lifted"}
    passes(tmp_path, {name: array for name, array in arrays.items() if name not in optional}, meta)
    passes(tmp_path, {**arrays, "mask": arrays["mask"].astype(np.float32)}, meta)
    for name in ("pair", "element", "distance"):
        for error in (1e-6, np.pi):
            fails(tmp_path, changed(arrays, name, error), meta, f"{name}: error")
    radial = np.zeros(arrays["pair"].shape[-1])
    radial[1 if group == "SO2" else 0] = 2 * np.pi  # a full turn is an error, except in an angle
    fails(tmp_path, changed(arrays, "pair", radial), meta, "pair: error")


def test_points_without_a_mask(tmp_path):
    arrays, meta = lift_case("RxSO2", "from 0")
    first = {name: array[:1] for name, array in arrays.items() if name not in ("mask", "mask_lifted")}
    passes(tmp_path, first, {name: meta[name] for name in ("kind", "group", "alpha")})


# --- attention ------------------------------------------------------------------------------------------------------


def test_attention_where_padded_points_have_no_coordinates(tmp_path):
    """The logarithm of the radius of a padded point is -inf. Its output is not compared, but those of others are."""
    arrays, meta = finished_layer("mlp", "softmax", g=2, sizes=(5, 3))
    padded = ~arrays["mask"]
    spoiled = {name: array.copy() for name, array in arrays.items()}
    rows = padded[:, :, None] | padded[:, None]
    spoiled["pair"][rows, 0] = -np.inf
    spoiled["out"][padded] = np.nan
    spoiled["attention"][np.broadcast_to(padded[:, None], spoiled["attention"].shape[:3])] = np.nan
    passes(tmp_path, spoiled, {**meta, "group": "RxSO2"})
    few = {name: array for name, array in spoiled.items() if name not in ("logits", "attention")}
    passes(tmp_path, few, {**meta, "group": "RxSO2"})
    spoiled["out"][0, 0] += 1e-6
    fails(tmp_path, spoiled, meta, "out: error")


# --- networks -------------------------------------------------------------------------------------------------------

NAMES = (
    "head_norm_{part}{number}",
    "head_norm{number}_{part}",
    "output_norm_{number}_{part}",
    "head_ln_{part}_{number}",
)


def renamed(arrays, pattern, gain="gain"):
    """Return the arrays with other names for the normalizations of the head."""
    words = {"gain": gain, "bias": "bias"}
    found = {}
    for name, array in arrays.items():
        if name.startswith("head_norm"):
            number, part = name.removeprefix("head_norm").split("_")
            name = pattern.format(number=number, part=words[part])
        found[name] = array
    return found


@pytest.mark.parametrize(("group", "pattern"), [*zip(("RxSO2", "T2", "SE2", "SE2"), NAMES, strict=True)])
def test_normalizations_of_a_head(group, pattern, tmp_path):
    arrays, meta = finished_model(group, 2 if group == "SE2" else 1, output_norm="layer")
    arrays = renamed(arrays, pattern)
    passes(tmp_path, arrays, meta)
    for number in (1, 2, 3):
        for part in ("gain", "bias"):
            name = pattern.format(number=number, part=part)
            fails(tmp_path, changed(arrays, name, 0.01), meta, "prediction: error")


def test_normalizations_of_a_head_are_told_by_their_arrays(tmp_path):
    arrays, meta = finished_model("T3", output_norm="layer", norm_eps=1e-3)
    arrays = renamed(arrays, "head_norm_{part}{number}", gain="weight")
    passes(tmp_path, arrays, {name: value for name, value in meta.items() if name not in ("output_norm", "layers")})


@pytest.mark.parametrize("squash", ["none", "tanh"])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("group", ["SO2", "RxSO2"])
def test_networks_see_the_angles_of_the_file(group, choice, squash, tmp_path):
    """The input angles of the network are those of the file, which match its positions up to full turns."""
    arrays, meta = finished_model(group, squash=squash, choice=CHOICES[choice])
    passes(tmp_path, arrays, meta)
    passes(
        tmp_path, {name: array for name, array in arrays.items() if not name.startswith(("after", "embedded"))}, meta
    )
    place = 0 if group == "SO2" else 1
    half = np.zeros(arrays["pair"].shape[-1])
    half[place] = np.pi
    fails(tmp_path, changed(arrays, "pair", half), meta, "pair: error")
    # Angles shifted by full turns give the same pairs, but not the same input of the network.
    fails(tmp_path, changed(arrays, "pair", 2 * half), meta, "(after_block0|prediction): error")
