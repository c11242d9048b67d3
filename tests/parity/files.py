"""Reading of golden files as arrays and settings, with any numpy types."""

import json

import numpy as np


def read(path):
    """Return the arrays of a file by name, and its settings from the JSON string ``meta`` and scalar arrays."""
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    settings = json.loads(text(arrays.pop("meta"))) if "meta" in arrays else {}
    for name, array in arrays.items():
        if array.ndim == 0:
            settings.setdefault(name, array)
    return arrays, {name: plain(value) for name, value in settings.items()}


def text(value):
    """Return a string that is stored as string, bytes, or an array of one of them."""
    value = np.asarray(value).item()
    return value.decode() if isinstance(value, bytes) else str(value)


def plain(value):
    """Return a setting as bool, int, float, str or list. Numbers without a fraction become integers."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.item() if value.size == 1 else value.tolist()
    if isinstance(value, bytes):
        return value.decode()
    return int(value) if isinstance(value, float) and value.is_integer() else value
