"""All targets by their names on the command line. Other modules of this package define them in ``TARGETS``."""

from __future__ import annotations

import importlib
import pkgutil

import tests.fuzz
from tests.fuzz._target import Target

_MODULES = sorted(module.name for module in pkgutil.iter_modules(tests.fuzz.__path__))
TARGETS: dict[str, Target] = {
    name: target
    for module in _MODULES
    if not module.startswith("_") and module != "targets"
    for name, target in importlib.import_module(f"tests.fuzz.{module}").TARGETS.items()
}
