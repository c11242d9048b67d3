"""Tests of the parity runner on files that are damaged or incomplete."""

import gc
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


@pytest.fixture(params=FILES)
def golden(request, tmp_path, pytestconfig):
    """Yield the name and the arrays of a file with gradients, and a function that checks other arrays."""
    path = tmp_path / f"{request.param}.npz"
    path.parent.mkdir()
    shutil.copy(pytestconfig.rootpath / "tests" / "goldens" / f"{request.param}.npz", path)
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}

    def check(arrays):
        np.savez(path, **arrays)
        test_parity.test_golden(path)

    return request.param, arrays, check


def test_missing_arrays_are_named(golden):
    name, arrays, check = golden
    for missing in FILES[name]:
        with pytest.raises(AssertionError, match=rf"{name.split('/')[1]}\.npz: no '{missing}'; there are \['"):
            check({kept: array for kept, array in arrays.items() if kept != missing})


def test_gradients_are_compared_without_a_list_of_them(golden):
    name, arrays, check = golden
    arrays.pop("gradients", None)
    check(arrays)
    gradient = "grad_features" if "lietransformer" in name else "grad_x"
    with pytest.raises(AssertionError, match=gradient):
        check({**arrays, gradient: arrays[gradient] + 1e-4 * np.abs(arrays[gradient]).max()})


@pytest.mark.parametrize("name", ["model_qm9_t3: squash", "model_qm9_t3: readout", "finite_se2_mean: similarity"])
def test_unknown_settings_are_named(name, tmp_path, pytestconfig):
    file, setting = name.split(": ")
    with np.load(pytestconfig.rootpath / "tests" / "goldens" / "lietransformer" / f"{file}.npz") as archive:
        arrays = {name: archive[name] for name in archive.files}
    arrays["meta"] = np.array(json.dumps(json.loads(str(arrays["meta"])) | {setting: "other"}))
    path = tmp_path / "lietransformer" / "file.npz"
    path.parent.mkdir()
    np.savez(path, **arrays)
    with pytest.raises(AssertionError, match=rf"{setting}: expected one of \['.*\], got 'other'") as caught:
        test_parity.test_golden(path)
    assert caught.value.__notes__ == [f"{path}, with backend 'plain'"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("lietransformer/block_t3_batch_pre_train", {"training": 1}),
        ("lietransformer/finite_se2_softmax", {"layer_norm": 0}),
        ("lietransformer/model_qm9_t3", {"squash": None, "output_norm": None}),
        ("gsa/network_p4", {"program": [{"op": "block", "name": "block0", "crop": 1.0}]}),
    ],
)
def test_settings_of_other_types(name, settings, tmp_path, pytestconfig):
    """The runner accepts switches as 0 and 1 or null, and integers in lists of settings as floats."""
    with np.load(pytestconfig.rootpath / "tests" / "goldens" / f"{name}.npz") as archive:
        arrays = {name: archive[name] for name in archive.files}
    meta = json.loads(str(arrays["meta"]))
    if "program" in settings:
        settings = {"program": settings["program"] + meta["program"][1:]}
    path = tmp_path / f"{name}.npz"
    path.parent.mkdir()
    np.savez(path, **{**arrays, "meta": np.array(json.dumps(meta | settings))})
    test_parity.test_golden(path)


@pytest.mark.parametrize(
    ("name", "batches"),
    [
        ("affine_self_conv/grad_asc_p4", ("x", "alpha", "z", "out", "cotangent", "grad_x")),
        (
            "attentive_gconv/grad_att_full_gconv_p4",
            ("x", "f_tilde", "alpha_C", "alpha_X", "out", "cotangent", "grad_x"),
        ),
        ("gsa/lift_local_p4", ("x", "out_f32", "out_f64", "probs_f64", "R", "grad_x")),
    ],
)
def test_batches_without_images(name, batches, tmp_path, pytestconfig):
    with np.load(pytestconfig.rootpath / "tests" / "goldens" / f"{name}.npz") as archive:
        arrays = {name: archive[name] for name in archive.files}
    arrays |= {batch: arrays[batch][:0] for batch in batches}
    arrays |= {key: np.zeros_like(array) for key, array in arrays.items() if key.startswith("grad_")}
    path = tmp_path / f"{name}.npz"
    path.parent.mkdir()
    np.savez(path, **arrays)
    test_parity.test_golden(path)
    weight = next(key for key in arrays if key.startswith("grad_") and arrays[key].size)
    np.savez(path, **{**arrays, weight: arrays[weight] + 1})
    with pytest.raises(AssertionError, match=weight):
        test_parity.test_golden(path)


@pytest.mark.parametrize("size", [0, 40, 3000])
@pytest.mark.parametrize("system", test_parity.SYSTEMS)
def test_damaged_files_are_named_and_closed(system, size, tmp_path, pytestconfig):
    whole = pytestconfig.rootpath / "tests" / "goldens" / "gsa" / "lift_local_p4.npz"
    path = tmp_path / system / "damaged.npz"
    path.parent.mkdir()
    path.write_bytes(whole.read_bytes()[:size])
    with pytest.raises(AssertionError, match=r"damaged\.npz: expected an \.npz file of arrays"):
        test_parity.test_golden(path)
    gc.collect()


def test_files_of_other_systems_fail(tmp_path, pytestconfig):
    whole = pytestconfig.rootpath / "tests" / "goldens" / "gsa" / "posenc.npz"
    for system in ("affine_self_conv", "attentive_gconv", "lietransformer"):
        (tmp_path / system).mkdir()
        shutil.copy(whole, tmp_path / system)
        with pytest.raises(AssertionError, match=r"posenc\.npz: (no 'case'|unknown kind)"):
            test_parity.test_golden(tmp_path / system / "posenc.npz")
