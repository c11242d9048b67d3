"""The compiler of the kernels for CPUs."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding
from numba import types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher

from lieattn._core.messages import warn
from lieattn.ops.kernels import _ahead

_INSTRUCTIONS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sse2": "SSE2", "sve": "SVE", "neon": "NEON"}
_OPTIONS = {"nopython": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_WINDOWS = os.name == "nt"
_DIGEST = hashlib.sha256().digest_size


def compiled(kernel: Callable[..., Any]) -> Any:
    """Compile a kernel at its first call, and store it on disk. It runs without the interpreter's lock."""
    options = _OPTIONS | {"nogil": True}
    dispatcher: Any = CPUDispatcher(kernel, targetoptions=options, pipeline_class=_KernelCompiler)
    try:
        dispatcher._cache = _Cache(kernel)
    except RuntimeError as error:  # neither the package nor the user's cache folder is writable
        _cannot_be_kept(str(Path(__file__).parent), error)
    return dispatcher


def part(function: Callable[..., Any]) -> Any:
    """Mark a function that only kernels can call, and that is compiled with each of them."""
    options = _OPTIONS | {"no_cpython_wrapper": True}
    return _Part(function, targetoptions=options, pipeline_class=_PartCompiler)


class _Part(CPUDispatcher):
    """Numba's dispatcher without machine code and without calls from Python.

    By default, Numba optimizes a function together with all functions that it calls, generates machine code, and
    repeats this for each caller up to the kernel. Most of the compilation time is then spent on code that never runs.
    """

    def __call__(self, *arguments: Any) -> Any:
        raise TypeError(f"{self.py_func.__qualname__} can be called by other kernels only")

    def add_overload(self, result: Any) -> None:
        """Register a compiled version, so that kernels and other parts can call it."""
        key = object()  # the key by which Numba finds it, in place of an entry point for Python
        self.targetctx.insert_user_function(key, result.fndesc, [result.library])
        self.overloads[tuple(result.signature.args)] = result._replace(entry_point=key)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Return a template without literal types, for which Numba would compile separate versions."""
        plain = (types.unliteral(argument) for argument in args)
        return super().get_call_template(tuple(types.int64 if t == types.boolean else t for t in plain), kws)


class _PartLibrary(JITCodeLibrary):
    """The code of a part and its references to other code, neither optimized nor linked."""

    def finalize(self) -> None:
        self._finalized = True


class _KernelLibrary(JITCodeLibrary):
    """The code of a kernel, which is linked with the code of all its parts and then optimized once."""

    def finalize(self) -> None:
        found = dict.fromkeys(self._linking_libraries)
        left = list(found)
        for library in left:
            if isinstance(library, _PartLibrary):
                further = [called for called in library._linking_libraries if called not in found]
                found.update(dict.fromkeys(further))
                left += further
        self._linking_libraries = left
        super().finalize()


class _KernelCompiler(Compiler):
    def compile_extra(self, func: Callable[..., Any]) -> Any:
        self.state.library = _KernelLibrary(self.state.targetctx.codegen(), func.__qualname__)
        self.state.library.enable_object_caching()
        return super().compile_extra(func)


class _PartCompiler(Compiler):
    def compile_extra(self, func: Callable[..., Any]) -> Any:
        self.state.library = _PartLibrary(self.state.targetctx.codegen(), func.__qualname__)
        self.state.flags.no_compile = True
        return super().compile_extra(func)


class _Cache(FunctionCache):
    """Numba's cache of a function. If its folder cannot be used, the function is compiled in every process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        # Numba checks only the file of the function itself, and would not notice changes of functions that it calls.
        self._cache_file: _Files = _Files(self.cache_path, self._impl.filename_base, _source_stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the stored version, or None, with a message about the compilation, if there is none."""
        found = super().load_overload(sig, target_context)
        if found is None:
            _announce()
            if _ahead.finish(self._place(sig, target_context)):
                found = super().load_overload(sig, target_context)
        return found

    def missing(self, kernel: Any, arguments: tuple[Any, ...]) -> str | None:
        """Return the place of a kernel for arguments of these types, or None if it has already been compiled."""
        signature = self.signature(arguments)
        key = self._index_key(signature, kernel.targetctx.codegen())
        ready = signature in kernel.overloads or self._cache_file.has(key)
        return None if ready else self._place(signature, kernel.targetctx)

    def _place(self, sig: Any, target_context: Any) -> str:
        return self._cache_file.place(self._index_key(sig, target_context.codegen()))

    @staticmethod
    def signature(arguments: tuple[Any, ...]) -> tuple[types.Type, ...]:
        """Return the signature with which a kernel is compiled for a call."""
        return tuple(numba.typeof(argument) for argument in arguments)

    @contextmanager
    def _guard_against_spurious_io_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not (_WINDOWS and error.errno == errno.EACCES):  # another process reads or replaces the file
                _cannot_be_kept(self.cache_path, error)


class _Files(IndexDataCacheFile):
    """A file for each kernel and types, with a digest at its end. Damaged files are not read, but written again.

    Numba's own files are numbered by an index, in which two processes could give two kernels the same number.
    """

    def load(self, key: Any) -> Any:
        """Return the data stored for a key, or None if there are none of these versions of Numba and the kernels."""
        path = self.path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(content[:-_DIGEST]).digest() != content[-_DIGEST:]:
            _say_once("damage", f"{path}: this compiled kernel is damaged; damaged kernels are compiled again")
            return None
        return pickle.loads(content[_DIGEST:-_DIGEST]) if content[:_DIGEST] == self._origin(key) else None

    def save(self, key: Any, data: Any) -> None:
        """Store compiled data. The file is written completely or not at all."""
        content = self._origin(key) + self._dump(data)
        with self._open_for_write(str(self.path(key))) as file:
            file.write(content + hashlib.sha256(content).digest())

    def path(self, key: Any) -> Path:
        """Return the path of the file for a key."""
        name = hashlib.sha256(repr(key).encode()).hexdigest()
        return Path(self._data_path(f"{Path(self._index_name).stem}.{name[:16]}.nbc"))

    def has(self, key: Any) -> bool:
        """Return whether there is a file for a key, of the current versions."""
        try:
            with self.path(key).open("rb") as file:
                return file.read(_DIGEST) == self._origin(key)
        except OSError:
            return False

    def place(self, key: Any) -> str:
        """Return the path and versions of the file for a key, which are equal in processes that share it."""
        return f"{self.path(key)} {self._origin(key).hex()}"

    def _origin(self, key: Any) -> bytes:
        """Return the digest of the versions that a file must have."""
        return hashlib.sha256(repr((self._version, self._source_stamp, key)).encode()).digest()


@cache
def _announce() -> None:
    """Log why the first call is slow. The cache of this function limits it to one message per process."""
    logging.getLogger("lieattn").warning(
        "compiling kernels for this processor (once, about ten seconds); `lieattn warm-up` does it in advance"
    )


@cache
def instruction_set() -> str:
    """Return the widest vector instructions that Numba uses, and the processor: ``"AVX-512 (znver4)"``."""
    config: Any = numba.config
    processor = config.CPU_NAME or binding.get_host_cpu_name()
    features = binding.get_host_cpu_features().flatten() if config.CPU_FEATURES is None else config.CPU_FEATURES
    found = (name for feature, name in _INSTRUCTIONS.items() if f"+{feature}" in features.split(","))
    return f"{next(found, 'no vector instructions')} ({processor})"


@cache
def _source_stamp() -> tuple[tuple[int, int], ...]:
    """Return times and sizes of the source files of kernels and of their calls."""
    paths = sorted(path for path in Path(__file__).parent.rglob("*.py") if path.parent.name != "triton")
    return tuple((file.st_mtime_ns, file.st_size) for file in map(Path.stat, paths))


_told: set[str] = set()


def _say_once(about: str, what: str) -> None:
    """Warn once about a folder or the files in it."""
    if about not in _told:
        _told.add(about)
        warn(what)


def _cannot_be_kept(folder: str, error: Exception) -> None:
    _say_once(
        folder,
        f"{folder}: compiled kernels cannot be stored here ({error}), so every process compiles them again; make the "
        "folder writable and free some space, or set the environment variable NUMBA_CACHE_DIR to another folder",
    )
