"""Arrays in HDF5 files, which are read within limits of size."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lieattn._core.messages import needs_extra
from lieattn_datasets._files import MOST_BYTES, Release

_FILTERS = {1, 2, 3}  # deflate, shuffle and a checksum; HDF5 searches for other filters in libraries on the disk


def open_hdf5(release: Release, path: Path, key: str) -> Any:
    """Open an array of a file; raise ValueError if its values are in other files, or incomplete."""
    with needs_extra(release.dataset, "data"):
        import h5py
    try:
        file = h5py.File(path, "r")
        link = file.get(key, getlink=True)
        source = file[key] if isinstance(link, h5py.HardLink) else None
        if not isinstance(source, h5py.Dataset):
            problem = f"has no array {key!r}, only {', '.join(file) or 'nothing'}"
        else:
            problem = _problem(source)
    except Exception as error:  # a damaged file can fail in any way
        raise release.damaged(path, f"is not a complete HDF5 file ({error})") from error
    if problem:
        file.close()
        raise release.damaged(path, problem)
    return source


def read_hdf5(release: Release, path: Path, expected: Mapping[str, str]) -> list[NDArray[Any]]:
    """Return whole arrays of a file, with descriptions and errors as for :meth:`Release.read_npz`."""
    sizes: dict[str, int] = {}
    arrays = []
    for key, wanted in expected.items():
        source = open_hdf5(release, path, key)
        try:
            small = source.size * source.dtype.itemsize <= MOST_BYTES
            release.require(
                small, path, f"has {key} of {source.dtype} {source.shape}, which exceeds {MOST_BYTES} bytes"
            )
            array = np.asarray(source[...])
        except OSError as error:
            raise release.damaged(path, f"cannot be read ({error})") from error
        finally:
            source.file.close()
        release.check_array(path, key, array, wanted, sizes)
        arrays.append(array)
    return arrays


def _problem(source: Any) -> str:
    """Return a description of the problem with the storage of an array, or an empty string."""
    stored = source.id.get_create_plist()
    filters = {stored.get_filter(number)[0] for number in range(stored.get_nfilters())}
    if source.is_virtual or stored.get_external_count():
        return f"has an array {source.name!r} whose values are in other files"
    if not filters <= _FILTERS:
        return f"has an array {source.name!r} with the filters {sorted(filters)}, expected some of {sorted(_FILTERS)}"
    if source.chunks is None:
        complete = source.id.get_storage_size() == source.size * source.dtype.itemsize
    else:
        if math.prod(source.chunks) * source.dtype.itemsize > MOST_BYTES:
            return f"has an array {source.name!r} in chunks of {source.chunks}, which exceed {MOST_BYTES} bytes"
        pieces = zip(source.shape, source.chunks, strict=True)
        complete = source.id.get_num_chunks() == math.prod(-(-size // chunk) for size, chunk in pieces)
    return "" if complete else f"has an array {source.name!r} that was written only in part"
