"""Reading of golden files as arrays and settings, with any numpy types."""

import json
import math
import zipfile
import zlib

import numpy as np
import torch

# Rounding errors of a float64 evaluation, relative to the largest entry: where that is above 1e3, they may exceed an
# absolute tolerance of 1e-10.
ROUNDING = 1e-13
# All other arrays of numbers are floating, also if they are stored as integers.
INDICES = frozenset(
    {"chosen", "compose", "neighbour_index", "perm_fliplr", "perm_rot90", "probs_pixels", "start", "table", "table_eq"}
)


class Named(dict):
    """The arrays or the settings of a file, by name."""

    def __init__(self, file, values):
        super().__init__(values)
        self.file = file

    def __missing__(self, name):
        raise AssertionError(f"{self.file}: no {name!r}; there are {sorted(self)}")


def load(path):
    """Return the arrays of a file by name, in types that torch accepts."""
    try:
        # numpy does not close damaged files itself, and the warning about it would fail the test of another file.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            return Named(path.name, {name: _accepted(name, archive[name]) for name in archive.files})
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise AssertionError(f"{path.name}: expected an .npz file of arrays: {error}") from error


def _accepted(name, array):
    """Return indices as int64, other numbers as floating, and strings as str, a single one without axes."""
    if array.dtype.kind in "SU":
        array = np.char.decode(array) if array.dtype.kind == "S" else array
        return array.reshape(()) if array.size == 1 else array
    if array.dtype.kind not in "iuf":
        return array
    if name in INDICES:
        return array.astype(np.int64)
    # torch has no other byte orders and no long doubles.
    short = array.dtype.kind == "f" and array.dtype.itemsize < 8
    return array.astype(array.dtype.newbyteorder("=") if short else np.float64)


def read(path):
    """Return the arrays of a file by name, and its settings from the JSON string ``meta`` and scalar arrays."""
    arrays = load(path)
    settings = json.loads(text(arrays.pop("meta"))) if "meta" in arrays else {}
    for name, array in arrays.items():
        if array.ndim == 0:
            settings.setdefault(name, array)
    return arrays, Named(path.name, {name: plain(value) for name, value in settings.items()})


def single(arrays):
    """Return whether a file has no array of numbers in double precision, so that its results are rounded to single."""
    sizes = [array.dtype.itemsize for array in arrays.values() if array.dtype.kind == "f" and array.ndim]
    return max(sizes, default=8) < 8


def dtypes(arrays):
    """Return the precisions in which the results of a file are compared."""
    return (torch.float32,) if single(arrays) else (torch.float64, torch.float32)


def gradients(arrays):
    """Return the names of the arrays whose gradients are in the file, which its list of them must equal."""
    names = [name.removeprefix("grad_") for name in arrays if name.startswith("grad_")]
    listed = [text(name) for name in np.atleast_1d(arrays.get("gradients", names))]
    assert set(listed) == set(names), f"gradients: the file lists {sorted(listed)} and has {sorted(names)}"
    return names


def choose(name, value, choices):
    """Return the choice of this value of a setting."""
    if value not in choices:
        raise AssertionError(f"{name}: expected one of {sorted(choices)}, got {value!r}")
    return choices[value]


def text(value):
    """Return a string that is stored as string or as an array of one."""
    return str(np.asarray(value).item())


def plain(value):
    """Return a setting as bool, int, float, str, list or dict. Numbers without a fraction become integers."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.item() if value.size == 1 else value.tolist()
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def largest(array):
    """Return the largest magnitude in an array or tensor. It is 0 for arrays without entries, as of empty batches."""
    return float(abs(array).max()) if math.prod(array.shape) else 0.0
