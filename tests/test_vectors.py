"""The vector operations of the CPU kernels, against NumPy."""

import numpy as np
import pytest

numba = pytest.importorskip("numba")
from lieattn.ops.kernels._calls import lanes_on  # noqa: E402
from lieattn.ops.kernels._compiled import compiled  # noqa: E402
from lieattn.ops.kernels._vectors import at_address, exp, load, store  # noqa: E402
from lieattn.ops.kernels.attention import _bundle  # noqa: E402
from lieattn.ops.kernels.attention._bundle import HeadRange, head_ranges, lanes_of  # noqa: E402


def vector(kind):
    return (kind[0](0),) * kind[1]


@compiled
def _exp_all(x, out, vectors, lanes):
    for number in range(vectors):
        at = number * len(lanes)
        store(at_address(out, lanes), at, exp(load(at_address(x, lanes), at, lanes)))


def exponential(x):
    lanes = 16 if x.dtype == np.float32 else 4
    x = np.ascontiguousarray(np.pad(x, (0, -len(x) % lanes)))
    out = np.empty_like(x)
    _exp_all(x.ctypes.data, out.ctypes.data, len(x) // lanes, vector((x.dtype.type, lanes)))
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponential(dtype):
    """Within 2 units in the last place wherever the result is normal."""
    smallest, largest = np.log(np.finfo(dtype).smallest_normal) + 0.5, np.log(np.finfo(dtype).max) - 0.5
    x = np.linspace(smallest, largest, 400_000).astype(dtype)
    found = exponential(x)[: len(x)]
    exact = np.exp(x.astype(np.longdouble))
    assert (abs(found - exact) <= 2 * np.spacing(exact.astype(dtype))).all()
    ends = np.array([-np.inf, -3e38, smallest - 2, 0, largest + 2, np.inf, np.nan], dtype)
    np.testing.assert_array_equal(exponential(ends)[:7], np.array([0, 0, 0, 1, np.inf, np.inf, np.nan], dtype))


def test_lanes_of_machines():
    """A tile of 2 x 4 sums and its operands, 13 vectors, fits the registers."""
    pc = "x86_64-unknown-linux-gnu"
    assert lanes_on(pc, "+avx,+avx2,+avx512f,+fma") == 16
    assert lanes_on(pc, "+avx,+avx2,-avx512f,+fma") == 8
    assert lanes_on(pc, "-avx,+sse2") == 4
    assert lanes_on("aarch64-unknown-linux-gnu", "+neon") == lanes_on("arm64-apple-darwin", "") == 8


@pytest.mark.parametrize("widest", [16, 8, 4])
def test_ranges_of_heads(widest, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(_bundle, "widest_lanes", lambda: widest)
    ranges = {
        16: ([(0, 64, 16), (64, 8, 8)], [(0, 16, 16), (16, 4, 4)]),
        8: ([(0, 72, 8)], [(0, 16, 8), (16, 4, 4)]),
        4: ([(0, 72, 4)], [(0, 20, 4)]),
    }[widest]
    for heads, wanted in zip((72, 20), ranges, strict=True):
        assert head_ranges(heads, torch.float32) == [HeadRange(*part) for part in wanted]
    for heads in range(1, 100):
        for dtype in (torch.float32, torch.float64):
            ranges = head_ranges(heads, dtype)
            assert [part.first for part in ranges] == [0, *(part.first + part.heads for part in ranges[:-1])]
            assert sum(part.heads for part in ranges) == heads
            assert all(part.heads % part.lanes == 0 for part in ranges[:-1])
            assert ranges[-1].first % lanes_of(heads, dtype) == 0
