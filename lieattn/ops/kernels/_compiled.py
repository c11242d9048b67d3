"""The compiler of the kernels for CPUs, and the files in which it keeps what it has compiled."""

from __future__ import annotations

import hashlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding
from numba import types
from numba.core.caching import FunctionCache, IndexDataCacheFile

_NOT_COMPILED = ("__init__.py", "_bundle.py", "_host.py", "_launch.py", "_operator.py")
_INSTRUCTIONS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sse2": "SSE2", "sve": "SVE", "neon": "NEON"}
_DIGEST = hashlib.sha256().digest_size


def compiled(function: Callable[..., Any]) -> Any:
    """Compile at the first call, without the interpreter's lock; kept on disk wherever a folder can be written."""
    dispatcher: Any = numba.njit(function, nogil=True, error_model="numpy")
    try:
        dispatcher._cache = _Cache(function)
    except RuntimeError as error:  # neither the package nor the user's cache folder can be written
        _cannot_be_kept(str(Path(__file__).parent), error)
    find = dispatcher.get_call_template

    def find_once(arguments: tuple[types.Type, ...], keywords: dict[str, types.Type]) -> Any:
        return find(tuple(types.unliteral(argument) for argument in arguments), keywords)

    # Numba would compile a function once more for every constant it is called with.
    dispatcher.get_call_template = find_once
    return dispatcher


class _Cache(FunctionCache):
    """Numba's cache of a function; where its folder cannot be used, the function is compiled in every process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        # Numba looks at the file of the function alone: a change to what it calls would go unnoticed.
        self._cache_file = _Files(self.cache_path, f"{self._impl.filename_base}.checked", _source_stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What has been compiled before; None, and a word about the time to come, where it has not."""
        found = super().load_overload(sig, target_context)
        if found is None:
            _announce()
        return found

    @contextmanager
    def _guard_against_spurious_io_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            _cannot_be_kept(self.cache_path, error)


class _Files(IndexDataCacheFile):
    """Numba's files with a digest at their ends: what is damaged is never unpickled, but compiled and written again."""

    def _load_index(self) -> Any:
        return super()._load_index() if _intact(Path(self._index_path)) else {}

    def _load_data(self, name: str) -> Any:
        if not _intact(Path(self._data_path(name))):
            raise OSError("damaged")  # to Numba the same as a file that is missing
        return super()._load_data(name)

    @contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[io.BytesIO]:
        with super()._open_for_write(filepath) as file:
            yield (content := io.BytesIO())
            file.write(content.getvalue() + hashlib.sha256(content.getvalue()).digest())


def _intact(path: Path) -> bool:
    """Whether a file, if there is one, ends with the digest of what comes before."""
    if not path.exists():
        return True
    content = path.read_bytes()
    if hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]:
        return True
    _say_once(
        "damage", f"{path}: this compiled kernel is damaged, perhaps others too; they are compiled and written again"
    )
    return False


@cache
def _announce() -> None:
    """Say why the first call takes its time; the cache of this function makes it once in a process."""
    logging.getLogger("lieattn").warning(
        "compiling kernels for this processor: half a minute, once; `lieattn warm-up` does it beforehand"
    )


@cache
def instruction_set() -> str:
    """The widest vector instructions that Numba compiles for, and the processor: ``"AVX-512 (znver4)"``."""
    config: Any = numba.config
    processor = config.CPU_NAME or binding.get_host_cpu_name()
    features = binding.get_host_cpu_features().flatten() if config.CPU_FEATURES is None else config.CPU_FEATURES
    found = (name for feature, name in _INSTRUCTIONS.items() if f"+{feature}" in features.split(","))
    return f"{next(found, 'no vector instructions')} ({processor})"


@cache
def _source_stamp() -> tuple[tuple[int, int], ...]:
    """Time and size of the files that kernels may be compiled from."""
    paths = sorted(Path(__file__).parent.glob("*/*.py"))
    found = (path.stat() for path in paths if path.parent.name != "triton" and path.name not in _NOT_COMPILED)
    return tuple((file.st_mtime_ns, file.st_size) for file in found)


_told: set[str] = set()


def _say_once(about: str, what: str) -> None:
    """Warn about a folder or a file in it, the first time."""
    if about not in _told:
        _told.add(about)
        warnings.warn(what, stacklevel=2)


def _cannot_be_kept(folder: str, error: Exception) -> None:
    _say_once(
        folder,
        f"{folder}: compiled kernels cannot be kept here ({error}), so that every process takes a minute to compile "
        "them; make it writable and make room, or let the environment variable NUMBA_CACHE_DIR name another folder",
    )
