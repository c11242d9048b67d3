"""Golden files as arrays and settings, whatever numpy types a writer gave them."""

import json

import numpy as np


def read(path):
    """Arrays of a file by name, and its settings: those of the JSON string ``meta``, and scalar arrays."""
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    settings = json.loads(text(arrays.pop("meta"))) if "meta" in arrays else {}
    for name, array in arrays.items():
        if array.ndim == 0:
            settings.setdefault(name, array)
    return arrays, {name: plain(value) for name, value in settings.items()}


def text(value):
    """A string given as string, bytes, or an array of one of them."""
    value = np.asarray(value).item()
    return value.decode() if isinstance(value, bytes) else str(value)


def plain(value):
    """A setting as bool, int, float, str or list; numbers without a fraction are integers."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.item() if value.size == 1 else value.tolist()
    if isinstance(value, bytes):
        return value.decode()
    return int(value) if isinstance(value, float) and value.is_integer() else value
