"""Kernels compiled by other processes during the first call; if that fails, this process compiles them."""

import importlib
import os
import subprocess
import sys
import warnings

import pytest
import torch

numba = pytest.importorskip("numba")
from lieattn.cli import _machine  # noqa: E402
from lieattn.ops import backend, group_attention  # noqa: E402
from lieattn.ops.kernels import _ahead, _calls, _compiled  # noqa: E402
from lieattn.ops.kernels.attention._bundle import head_ranges  # noqa: E402
from tests.test_kernels import problem  # noqa: E402

TINY = """
from lieattn.ops.kernels._compiled import compiled  # noqa: E402
@compiled
def first(x):
    return x + 1
@compiled
def second(x):
    return x + 2
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Yield two kernels of a module that processes can import, and an empty folder for compiled kernels."""
    (tmp_path / "tiny_kernels.py").write_text(TINY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    numba.config.reload_config()  # Numba does this too, but only when it compiles
    monkeypatch.setattr(_ahead, "_compiling", {})
    yield importlib.import_module("tiny_kernels")
    _ahead.stop()
    del sys.modules["tiny_kernels"]
    monkeypatch.undo()
    numba.config.reload_config()


def start(kernels, processes=2):
    """Have the second kernel compiled in another process, and return the process, or None."""
    _ahead.start([(kernels.first, (1,)), (kernels.second, (1,))], processes)
    return next(iter(_ahead._compiling.values()), None)


def compiled_here(kernel):
    """Call a kernel, and return how often this process has compiled it."""
    assert kernel(1) == (3 if kernel.__name__ == "second" else 2)
    return sum(kernel.stats.cache_misses.values())


def test_what_another_process_compiles_is_found(tiny, monkeypatch):
    process = start(tiny)
    assert compiled_here(tiny.second) == 0  # called at once, so that it has to wait
    assert (process.returncode, _ahead._compiling) == (0, {})
    assert compiled_here(tiny.first) == 1
    monkeypatch.delattr(subprocess, "Popen")
    assert start(tiny) is None  # in memory
    assert start(importlib.reload(tiny)) is None  # on disk


BROKEN = {
    "not started": (subprocess, "Popen", lambda *a, **k: exec("raise OSError('no more processes')")),
    "fails": (_ahead, "_SCRIPT", "raise ValueError"),
    "does nothing": (_ahead, "_SCRIPT", "pass"),
    "ends before it is told": (_ahead, "_SCRIPT", "import os; os.close(0)"),
    "no python": (_ahead.sys, "executable", "/bin/true"),
    "no executable": (_ahead.sys, "executable", None),
    "is gone": (_ahead.sys, "executable", "/nowhere/python"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_processes_that_fail(tiny, monkeypatch, how):
    with monkeypatch.context() as patch:
        patch.setattr(*BROKEN[how])
        start(tiny)
    assert [compiled_here(tiny.first), compiled_here(tiny.second), _ahead._compiling] == [1, 1, {}]


@pytest.mark.slow
def test_processes_that_are_killed_hang_or_keep_elsewhere(tiny, monkeypatch, tmp_path):
    start(tiny).kill()
    assert [compiled_here(tiny.second), _ahead._compiling] == [1, {}]

    tiny = importlib.reload(tiny)
    (tmp_path / "kept").rename(tmp_path / "before")
    monkeypatch.setattr(_ahead, "_LONGEST", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(_ahead, "_SCRIPT", "import time; time.sleep(600)")
        process = start(tiny)
    assert [compiled_here(tiny.second), _ahead._compiling] == [1, {}]
    assert process.returncode not in (None, 0)

    tiny = importlib.reload(tiny)
    (tmp_path / "kept").rename(tmp_path / "earlier")
    monkeypatch.setattr(_ahead, "_LONGEST", 300)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "elsewhere"))
    process = start(tiny)
    assert [compiled_here(tiny.second), process.returncode] == [1, 0]
    assert not list(tmp_path.glob("elsewhere/**/*.nbc"))


def test_one_core_frozen_programs_and_no_folder_start_nothing(tiny, monkeypatch):
    monkeypatch.delattr(subprocess, "Popen")
    assert start(tiny, processes=1) is None
    with monkeypatch.context() as patch:
        patch.setattr(sys, "frozen", True, raising=False)
        assert start(tiny) is None
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    monkeypatch.setattr(_compiled, "_told", set())
    with pytest.warns(UserWarning, match="cannot be stored"):
        assert start(importlib.reload(tiny)) is None


@pytest.mark.slow
def test_an_interrupt_while_waiting(tiny, monkeypatch):
    process = start(tiny)
    with monkeypatch.context() as patch:
        patch.setattr(process, "wait", lambda *a: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            tiny.second(1)
    assert [compiled_here(tiny.second), process.returncode, _ahead._compiling] == [0, 0, {}]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_wait_for_those_of_its_parent(tiny, monkeypatch):
    monkeypatch.setattr(_ahead, "_SCRIPT", "import time; time.sleep(600)")
    process = start(tiny)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        good = tiny.second(1) == 3
        _ahead.stop()
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert process.poll() is None


SCRIPT = """
print("the script of the user")
import sys
from lieattn.ops.kernels import _ahead  # noqa: E402
import tiny_kernels as tiny
_ahead._SCRIPT = "import time; time.sleep(600)"
_ahead.start([(tiny.first, (1,)), (tiny.second, (1,))], 2)
print(next(iter(_ahead._compiling.values())).pid)
"""


def test_nothing_is_left_when_a_process_ends_and_scripts_run_once(tiny, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    said, pid = done.stdout.splitlines()
    assert said == "the script of the user"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


@pytest.fixture
def asked(monkeypatch):
    """Record the calls whose kernels would be compiled on two cores."""
    calls = []
    monkeypatch.setattr(_calls, "_prepared", set())
    monkeypatch.setattr(_ahead, "start", lambda more, processes: calls.extend((*call, processes) for call in more))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(_calls, "usable_cores", lambda: 8)
    return calls


@pytest.mark.parametrize("case", _machine._CASES)
def test_no_kernel_of_a_backward_pass_that_will_not_follow(case, asked, monkeypatch):
    monkeypatch.setattr("logging.Logger.setLevel", lambda logger, level: None)
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        _machine.compile_case(case, "float32")
    assert asked
    assert all("forward" in kernel.__name__ for kernel, *_ in asked)


@pytest.mark.parametrize("case", _machine._CASES)
def test_kernels_are_asked_for_with_the_types_that_they_are_called_with(case, asked, monkeypatch):
    monkeypatch.setattr("logging.Logger.setLevel", lambda logger, level: None)
    _machine.compile_case(case, "float32")
    passes = ["forward" in kernel.__name__ for kernel, *_ in asked]
    assert passes
    assert passes == [True, False] * (len(passes) // 2)
    for kernel, arguments, processes in asked:
        assert kernel._cache.signature(arguments) in kernel.overloads
        assert processes == 2
    asked.clear()
    _machine.compile_case(case, "float32")
    assert asked == []  # once


def test_all_vectors_of_a_call_and_no_backward_pass_without_gradients(asked):
    signals, neighbors, _, _ = problem("joint", ())
    wide = [torch.randn(*s.shape[:2], 20, s.shape[3], requires_grad=True) for s in signals]
    with backend("numba"):
        with torch.no_grad():
            group_attention(*wide, neighbors)
        lanes = [len(arguments[-1]) for _, arguments, _ in asked]
        assert lanes == [part.lanes for part in head_ranges(20, torch.float32)]
        assert {kernel.__name__ for kernel, *_ in asked} == {"forward"}
        group_attention(*wide, neighbors)
    assert len(asked) == 3 * len(lanes)


FIRST_CALL = """
import os
os.sched_getaffinity = lambda process: {0, 1}
import torch
torch.set_num_threads(2)
from lieattn.geometry import Radius
from lieattn.ops import group_attention
from lieattn.ops.kernels.attention._launch import backward, forward
x = torch.randn(8, 2, 8, 4, requires_grad=True)
group_attention(x, x, x, Radius(1.5)(torch.arange(8.0)[:, None]))[0].sum().backward()
print(*(sum(kernel.stats.cache_misses.values()) for kernel in (forward, backward)))
"""


@pytest.mark.slow
def test_a_first_call_finds_the_kernels_of_its_backward_pass(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "LIEATTN_BACKEND": "numba"}
    command = [sys.executable, "-c", FIRST_CALL]
    for missed in ("1 0", "0 0"):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == missed
