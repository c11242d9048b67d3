"""Options and fixtures of the whole suite."""

import gc
import importlib
import itertools
import logging
import logging.handlers
import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

# Two workers import the same files in the same order, and each would compile nearly all that have no bytecode yet.
# Therefore one worker begins with packages that the other imports last.
LATE = "scipy.signal scipy.stats sklearn.datasets trimesh ase.build numba matplotlib.figure".split()
for name in LATE if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" else ():
    with suppress(ImportError):
        importlib.import_module(name)


def pytest_addoption(parser):
    parser.addoption(
        "--goldens",
        default=str(Path(__file__).parent / "goldens"),
        help="folder with <system>/*.npz files for the parity tests (default: tests/goldens)",
    )
    parser.addoption("--write-messages", action="store_true", help="write tests/messages.txt, the wording of errors")


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request):
    """Yield a function that sets the number of torch threads, which is restored afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# The longest tests start first, so that none of them starts when all others have finished.
FIRST = (
    "test_in_the_interpreter",
    "test_operators_are_compiled_with_their_gradients",
    "test_a_few_kills_and_interrupts",
    "test_jobs_share_the_cells",
    "test_jobs_are_stopped_together_and_continue",
    "test_jobs_end_with_a_command_that_is_killed",
    "test_registration_with_torch",
)


def pytest_collection(session):
    # The process that only distributes tests to others imports no heavy packages.
    if "LIEATTN_SLOW" not in os.environ and not session.config.pluginmanager.hasplugin("dsession"):
        import e3nn

        # It would spend most of the time of many tests on the order of products of small matrices.
        e3nn.set_optimization_defaults(optimize_einsums=False)


MANY = 4_000  # tests, which need most kernels

# The modules and the list of tests are some millions of objects, which every collection of garbage would visit.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: getattr(item, "originalname", None) not in FIRST)
    if "LIEATTN_SLOW" not in os.environ:  # skipping a test takes as long as a short one
        slow = [item for item in items if "slow" in item.keywords]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if "slow" not in item.keywords]


if "PYTEST_XDIST_WORKER" in os.environ:

    def pytest_runtest_protocol(item, nextitem):
        """Report a test once if it passes, instead of its setup, call and end, which takes longer than many tests."""
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            if report.when == "call" or not report.passed:
                item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


@pytest.fixture(autouse=True)
def seed():
    """Set the seed faster than ``torch.manual_seed``, which records the call stack if CUDA is not initialized."""
    import torch

    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def records():
    """Yield the list of records that were logged in a test; ``caplog`` is switched off in pyproject.toml."""
    handler, root = logging.handlers.BufferingHandler(1_000_000), logging.getLogger()
    root.addHandler(handler)
    yield handler.buffer
    root.removeHandler(handler)


@pytest.fixture(autouse=True, scope="session")
def without_waiting(request, tmp_path_factory):
    """Let files be written without ``os.fsync``, and share the compilation of kernels with the other worker.

    Without ``os.fsync``, files are lost in a power failure only. Kernels are compiled without further processes, which
    would import Numba first, while the cores are in use.
    """
    from lieattn.ops.kernels import _calls

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        patch.setattr(_calls, "usable_cores", lambda: 1)
        if "PYTEST_XDIST_WORKER" in os.environ and len(request.session.items) > MANY and find_spec("numba"):
            compile_kernels(tmp_path_factory.getbasetemp().parent)
        yield


def compile_kernels(claims):
    """Compile kernels that no other worker has claimed. Later, each worker would compile nearly all of them."""
    import torch

    from lieattn.cli import _machine
    from lieattn.ops.kernels import _attentive
    from lieattn.ops.kernels.attention._bundle import lanes_of

    before, logger = torch.get_num_threads(), logging.getLogger("lieattn")
    level = logger.level
    for case, (name, dtype) in itertools.product(_machine._CASES, _machine._DTYPES.items()):
        heads, outs = _machine._ATTENTION.get(case), _machine._ATTENTIVE.get(case)
        kernels = case if heads is None else f"attention of {lanes_of(heads, dtype)} lanes"
        kernels = kernels if outs is None else f"attentive convolution of {_attentive._lanes(outs, dtype)} lanes"
        with suppress(FileExistsError):
            (claims / f"{kernels}, {name}").touch(exist_ok=False)
            _machine.compile_case(case, name)
    torch.set_num_threads(before)
    logger.setLevel(level)


@pytest.fixture
def plain():
    """Use the plain implementation, which needs no compiled kernels."""
    from lieattn.ops import backend

    with backend("plain"):
        yield


@pytest.fixture
def double():
    """Set the default dtype to float64, to which e3nn rounds its coupling coefficients when a layer is created."""
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


BACKENDS = ["plain", "dense", "numba"]


@pytest.fixture(params=BACKENDS)
def every_backend(request):
    """Run a test with each CPU backend. Backends use the plain implementation for unsupported cases."""
    from lieattn.ops import backend

    if request.param == "numba":
        pytest.importorskip("numba")
    with backend(request.param):
        yield request.param
