"""Group-equivariant transformers for point clouds and homogeneous spaces.

The subpackages are, from the lowest layer to the highest, ``groups``, ``spaces``, ``reps``, ``geometry``, ``ops``,
``nn`` and ``models``. Import names from them. The tools around a model (``train``, ``certify``, ``viz``, ``ase``,
``torchsim``, ``transforms``, ``bench``, ``compare``) need heavier packages. Each subpackage is imported on first use.
:func:`lieattn.save` writes a network to a file, and :func:`lieattn.load` reads it.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from lieattn import (
        ase,
        bench,
        certify,
        compare,
        geometry,
        groups,
        models,
        nn,
        ops,
        reps,
        spaces,
        testing,
        torchsim,
        train,
        transforms,
        viz,
    )
    from lieattn.io import load, save

__all__ = [
    "ase",
    "bench",
    "certify",
    "compare",
    "geometry",
    "groups",
    "load",
    "models",
    "nn",
    "ops",
    "reps",
    "save",
    "spaces",
    "testing",
    "torchsim",
    "train",
    "transforms",
    "viz",
]


def __getattr__(name: str) -> Any:
    if name in ("load", "save"):
        return getattr(importlib.import_module("lieattn.io"), name)
    if name in __all__:
        return importlib.import_module(f"lieattn.{name}")
    if name == "__version__":
        return importlib.metadata.version("lieattn")
    raise AttributeError(f"module 'lieattn' has no attribute {name!r}")
