"""Golden numbers of the four papers: one test for every file DIR/<system>/*.npz."""

from pathlib import Path

from lieattn.ops import backend
from tests.conftest import BACKENDS
from tests.parity import affine_self_conv, attentive_gconv, gsa, lietransformer

SYSTEMS = {
    "affine_self_conv": affine_self_conv.check,
    "attentive_gconv": attentive_gconv.check,
    "gsa": gsa.check,
    "lietransformer": lietransformer.check,
}
OTHERS = ("weights_0_1",)  # folders of tests/test_weights.py


def pytest_generate_tests(metafunc):
    root = Path(metafunc.config.getoption("--goldens"))
    files = sorted(path for path in root.glob("*/*.npz") if path.parent.name not in OTHERS)
    names = [f"{path.parent.name}/{path.stem}" for path in files]
    if not files:
        # A wrong folder must not look like success.
        files, names = [root], ["no-files"]
    metafunc.parametrize("golden", files, ids=names)


def test_golden(golden):
    if golden.is_dir() or not golden.exists():
        raise AssertionError(f"no <system>/*.npz files in {golden}")
    system = golden.parent.name
    if system not in SYSTEMS:
        raise AssertionError(f"{golden.name}: unknown system {system!r}; known are {sorted(SYSTEMS)}")
    # Goldens of other systems have terms or lists that the dense evaluation leaves to the plain one.
    for evaluation in BACKENDS if system == "lietransformer" else ("plain", "numba"):
        try:
            with backend(evaluation):
                SYSTEMS[system](golden)
        except Exception as error:
            error.add_note(f"{golden}, with backend {evaluation!r}")
            raise
