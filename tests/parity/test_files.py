"""Tests of the parity runner on files that are damaged or incomplete, or have other types and settings."""

import gc
import itertools
import json
import shutil

import numpy as np
import pytest

from tests.parity import test_parity

FILES = {
    "affine_self_conv/grad_asc_p4": ("W_Q", "cotangent"),
    "attentive_gconv/grad_att_full_gconv_p4": ("x", "kernel", "cotangent"),
    "gsa/lift_local_p4": ("W_q", "b_v", "R"),
    "lietransformer/grad_attn_se3_mlp_softmax": ("value_W", "cotangent"),
}
every_file = pytest.mark.parametrize("name", FILES)


@pytest.fixture
def file(name, tmp_path, pytestconfig):
    """Return the arrays of a file, and a function that checks other arrays under its name."""
    path = tmp_path / f"{name}.npz"
    path.parent.mkdir()
    with np.load(pytestconfig.rootpath / "tests" / "goldens" / f"{name}.npz") as archive:
        arrays = {name: archive[name] for name in archive.files}

    def check(arrays):
        np.savez(path, **arrays)
        test_parity.SYSTEMS[path.parent.name](path)  # evaluated once: how files are read does not depend on backends

    return arrays, check


def changed(arrays, **settings):
    return {**arrays, "meta": np.array(json.dumps(json.loads(str(arrays["meta"])) | settings))}


def fails(check, arrays, message):
    with pytest.raises(AssertionError, match=message):
        check(arrays)


@every_file
def test_missing_arrays_are_named(name, file):
    arrays, check = file
    for missing in FILES[name]:
        kept = {kept: array for kept, array in arrays.items() if kept != missing}
        fails(check, kept, rf"{name.split('/')[1]}\.npz: no '{missing}'; there are \['")


def of_kinds(kinds, convert):
    return lambda arrays: {
        name: convert(array) if array.dtype.kind in kinds else array for name, array in arrays.items()
    }


def without_meta(arrays):
    """Return the settings of ``meta`` as arrays without axes."""
    settings = json.loads(str(arrays["meta"])) if "meta" in arrays else {}
    scalars = {name: np.array(value) for name, value in settings.items() if not isinstance(value, dict)}
    return scalars | {name: array for name, array in arrays.items() if name != "meta"}


FORMS = {
    "bytes": of_kinds("U", np.char.encode),
    "rows": of_kinds("Ui", np.atleast_1d),
    "another byte order": of_kinds("fi", lambda array: array.astype(array.dtype.newbyteorder(">"))),
    "numbers as floats": of_kinds("ib", lambda array: array.astype(">f4")),
    "small numbers": of_kinds("ib", lambda array: array.astype(np.int32)),
    "scalars": without_meta,
    "single precision": of_kinds("f", lambda array: array.astype(np.float32)),
    "no lists": lambda arrays: {name: array for name, array in arrays.items() if name not in ("outputs", "gradients")},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["affine_self_conv/grad_asc_p4", "lietransformer/grad_attn_se3_mlp_softmax"])
def test_arrays_and_settings_of_other_types(name, form, file):
    arrays, check = file
    arrays = FORMS[form](arrays)
    check(arrays)
    compared = "grad_features" if "lietransformer" in name else "grad_x"
    wrong = arrays[compared] + 1e-4 * np.abs(arrays[compared]).max()
    fails(check, {**arrays, compared: wrong}, compared)


@pytest.mark.parametrize("name", ["affine_self_conv/grad_asc_p4"])
def test_one_gradient_may_have_a_name_without_axes(name, file):
    arrays, check = file
    few = {name: array for name, array in arrays.items() if not name.startswith("grad_")}
    check({**few, "grad_x": arrays["grad_x"], "gradients": np.array("x")})


UNKNOWN = [
    *(("lietransformer/model_qm9_t3", setting) for setting in ("squash", "readout")),
    ("lietransformer/finite_se2_mean", "similarity"),
]


@pytest.mark.parametrize(("name", "setting"), UNKNOWN)
def test_unknown_settings_are_named(name, setting, file, tmp_path):
    path = tmp_path / f"{name}.npz"
    np.savez(path, **changed(file[0], **{setting: "other"}))
    with pytest.raises(AssertionError, match=rf"{setting}: expected one of \['.*\], got 'other'") as caught:
        test_parity.test_golden(path)
    assert caught.value.__notes__ == [f"{path}, with backend 'plain'"]


@every_file
def test_unknown_kinds_are_named(name, file):
    arrays, check = file
    if "meta" in arrays:
        fails(check, changed(arrays, kind="spherical"), "unknown kind 'spherical'")
    else:
        fails(check, {**arrays, "case": "conv"}, "unknown case 'conv'")
        fails(check, {**arrays, "group": "p6"}, "unknown group 'p6'")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("lietransformer/block_t3_batch_pre_train", {"training": 1}),
        ("lietransformer/finite_se2_softmax", {"layer_norm": 0}),
        ("lietransformer/model_qm9_t3", {"squash": None, "output_norm": None}),
        ("gsa/network_p4", {"program": [{"op": "block", "name": "block0", "crop": 1.0}]}),
    ],
)
def test_switches_as_numbers_or_null_and_integers_as_floats(name, settings, file):
    arrays, check = file
    if "program" in settings:
        settings = {"program": settings["program"] + json.loads(str(arrays["meta"]))["program"][1:]}
    check(changed(arrays, **settings))


BATCHES = {
    "affine_self_conv/grad_asc_p4": ("x", "alpha", "z", "out", "cotangent", "grad_x"),
    "attentive_gconv/grad_att_full_gconv_p4": ("x", "f_tilde", "alpha_C", "alpha_X", "out", "cotangent", "grad_x"),
    "gsa/lift_local_p4": ("x", "out_f32", "out_f64", "probs_f64", "R", "grad_x"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_without_images(name, file):
    arrays, check = file
    arrays |= {batch: arrays[batch][:0] for batch in BATCHES[name]}
    arrays |= {key: np.zeros_like(array) for key, array in arrays.items() if key.startswith("grad_")}
    check(arrays)
    weight = next(key for key in arrays if key.startswith("grad_") and arrays[key].size)
    fails(check, {**arrays, weight: arrays[weight] + 1}, weight)


@pytest.mark.parametrize("name", ["lietransformer/lift_se3_s2", "lietransformer/model_constellation_se2"])
def test_lifts_without_clouds(name, file):
    arrays, check = file
    padded = [key for key in arrays if key != "meta" and len(arrays[key]) == 2 and not key.startswith("block")]
    assert {"positions", "pair", "mask"} < set(padded)
    check(arrays | {key: arrays[key][:0] for key in padded})


def test_damaged_files_are_named_and_closed(tmp_path, pytestconfig):
    whole = pytestconfig.rootpath / "tests" / "goldens" / "gsa" / "lift_local_p4.npz"
    for system, size in itertools.product(test_parity.SYSTEMS, (0, 40, 3000)):
        path = tmp_path / system / "damaged.npz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(whole.read_bytes()[:size])
        with pytest.raises(AssertionError, match=r"damaged\.npz: expected an \.npz file of arrays"):
            test_parity.test_golden(path)
    gc.collect()  # a file that was not closed gives a warning here


@pytest.mark.parametrize("system", ["affine_self_conv", "attentive_gconv", "lietransformer"])
def test_files_of_other_systems_fail(system, tmp_path, pytestconfig):
    (tmp_path / system).mkdir()
    shutil.copy(pytestconfig.rootpath / "tests" / "goldens" / "gsa" / "posenc.npz", tmp_path / system)
    with pytest.raises(AssertionError, match=r"posenc\.npz: (no 'case'|unknown kind)"):
        test_parity.test_golden(tmp_path / system / "posenc.npz")
