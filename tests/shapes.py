"""Annotations, executed: each call of a function with shapes in its signature is compared with the signature.

Calls are compared after they return. So wrong arguments are refused by the library's own errors, and arguments that are
accepted although they do not fit the signature are found. What torch compiles is not compared, nor are kernels, whose
functions other compilers read.

Heavy packages are imported with the library, since the process that only distributes tests needs none of them.
"""

import inspect
import sys
import threading
from functools import cache, partial, wraps
from importlib.machinery import PathFinder, SourceFileLoader
from operator import attrgetter
from types import FunctionType
from typing import Self

PACKAGES = {"lieattn", "lieattn_datasets"}
COMPILED = ("lieattn.ops.kernels",)
RESULTS = threading.local()  # of the calls to be compared


@cache
def comparing():
    """Return a decorator that compares calls with annotations."""
    import numpy as np
    from beartype import BeartypeConf, FrozenDict, beartype
    from jaxtyping import jaxtyped

    # Numbers of NumPy are numbers, and ``Self`` can only be compared in classes.
    numbers = {int: int | np.integer, float: float | int | np.floating | np.integer}
    like = BeartypeConf(hint_overrides=FrozenDict({Self: object, **numbers}))
    return partial(jaxtyped, typechecker=beartype(conf=like))


def has_shapes(function):
    annotations = map(str, getattr(function, "__annotations__", {}).values())
    return any("[Tensor, " in annotation or "ndarray, " in annotation for annotation in annotations)


def promised(function, cls):
    """Return the function whose annotations hold: one without shapes keeps the promise of the one that it overrides."""
    inherited = [vars(base).get(function.__name__) for base in cls.__mro__[1:]] if cls else []
    alike = [other for other in inherited if has_shapes(other) and parameters(other) == parameters(function)]
    return next((other for other in [function, *alike] if has_shapes(other)), None)


def parameters(function):
    return list(inspect.signature(function).parameters)


class Forms(dict):
    """Functions, by type, that return all that annotations say about a value. There are millions of values."""

    def __missing__(self, kind):
        self[kind] = found = self.of(kind)
        return found

    def of(self, kind):
        import numpy as np
        import torch

        if issubclass(kind, torch.Tensor | np.ndarray):
            return attrgetter("shape", "dtype")
        if issubclass(kind, tuple | list):
            return lambda values: (kind, *[self[type(value)](value) for value in values])
        if issubclass(kind, dict):
            return lambda values: (dict, *values, *[self[type(value)](value) for value in values.values()])
        return str if issubclass(kind, str) else type


FORMS = Forms()


def compared(function, cls=None):
    """Return a function that compares arguments and results with the annotations, if these have shapes."""
    if (promise := promised(function, cls)) is None:
        return function
    from torch.compiler import is_compiling

    promise = inspect.unwrap(promise)
    key, results = promise.__qualname__, RESULTS

    def echo(*args, **options):
        return results.__dict__[key]  # classes made of named tuples have no builtins among their globals

    # Names in annotations are looked up among the globals of the function.
    echo = FunctionType(echo.__code__, promise.__globals__, echo.__name__, None, echo.__closure__)
    made = []  # at the first call, since many functions are never called in a process
    fitting = set()  # forms of calls that were compared: the same ones need not be compared again

    def compare(*args, **options):
        if not made:
            made.append(comparing()(wraps(promise)(echo)))
        made[0](*args, **options)

    @wraps(function)
    def call(*args, **options):
        result = function(*args, **options)
        if not is_compiling():
            values = *args, *options.values(), result
            forms = (*options,), *[FORMS[type(value)](value) for value in values]
            if forms not in fitting:
                setattr(RESULTS, key, result)
                compare(*args, **options)
                fitting.add(forms)
        return result

    return call


def compare_all(home, module):
    """Compare the functions that a module defines, in the module or in its class ``home``."""
    for name, value in list(vars(home).items()):
        method = isinstance(home, type)
        if method and isinstance(value, staticmethod | classmethod):
            setattr(home, name, type(value)(compared(value.__func__, home)))
        elif method and type(value) is property:
            setattr(home, name, property(compared(value.fget), value.fset, value.fdel, value.__doc__))
        elif getattr(value, "__module__", None) == module and isinstance(value, FunctionType):
            setattr(home, name, compared(value, home if method else None))
        elif getattr(value, "__module__", None) == module and isinstance(value, type) and not method:
            compare_all(value, module)


class Loader(SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        compare_all(module, module.__name__)


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] not in PACKAGES or name.startswith(COMPILED):
            return None
        spec = super().find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def install():
    """Compare the calls of all modules that are imported from now on."""
    if "lieattn" not in sys.modules:
        sys.meta_path.insert(0, Finder)
