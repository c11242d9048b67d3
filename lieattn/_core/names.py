"""Names of classes in settings, which are found in the sources, because imports take seconds."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGES = (
    *("lieattn.models", "lieattn.models.irreps", "lieattn.train", "lieattn.geometry", "lieattn.groups"),
    *("lieattn.spaces", "lieattn.reps", "lieattn_datasets"),
)
_FOREIGN = ("torch.optim", "torch.optim.lr_scheduler", "torch.nn.modules")  # jsonargparse finds names of their classes
# Annotations of arguments whose text names a class.
_OBJECT = re.compile(r"Module|Network|Dataset|Group|Frames|Neighborhood|Space|Rep\b|Task|Schedule|Optimizer|Transform")
_TEXT = re.compile(r"\b(str|Literal)\b")
_NEAR = 0.75  # similarity of a misspelled name

_ABSTRACT = ("abc.ABC", "ABC", "Protocol")  # bases without fields


def full_names(value: Any, place: str = "", annotation: str = "") -> Any:
    """Return settings in which short names of this library, such as ``cyclic``, are full class paths.

    ValueError, which names the place and the nearest names, is raised for a misspelled class or function, and for an
    argument that its class does not have. Classes whose source is not found are left to jsonargparse.
    """
    if isinstance(value, str):
        return _full(value, place) if _OBJECT.search(annotation) and not _TEXT.search(annotation) else value
    if isinstance(value, list):
        return [full_names(part, place, annotation) for part in value]
    if not isinstance(value, Mapping):
        return value
    if not isinstance(name := value.get("class_path"), str):
        return {key: full_names(part, f"{place}.{key}".lstrip("."), annotation) for key, part in value.items()}
    known, given = arguments(path := _full(name, place)), value.get("init_args")
    if isinstance(given, Mapping):
        if known is not None and (wrong := [key for key in given if str(key).rstrip("+") not in known]):
            raise ValueError(f"{place}: {path} has no argument {wrong[0]!r}{_advice(str(wrong[0]), known)}")
        typed = {key: (known or {}).get(str(key).rstrip("+"), "") for key in given}
        given = {key: full_names(part, f"{place}.{key}".lstrip("."), typed[key]) for key, part in given.items()}
    return {**value, "class_path": path} | ({"init_args": given} if "init_args" in value else {})


def _full(name: str, place: str) -> str:
    """Return the full path of a class; other texts are returned as they are."""
    if not all(map(str.isidentifier, name.split("."))):
        return name
    if "." not in name:
        if (names := _public()).get(name) or any(definition(f"{home}.{name}") for home in _FOREIGN):
            return names.get(name, name)
        if near := difflib.get_close_matches(name, names, 3, _NEAR):
            raise ValueError(f"{place}: there is no {name}; is it {' or '.join(names[one] for one in near)}?")
        return name
    module, _, last = name.rpartition(".")
    if module in _PACKAGES and not definition(name):
        raise ValueError(f"{place}: {module} has no {last}{_advice(last, imports(module))}")
    return name


def _advice(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known := sorted(known))
    return f"; is it {' or '.join(near)}?" if near else f"; it has {', '.join(known) or 'none'}"


@cache
def _public() -> dict[str, str]:
    """Return the full path of each public name."""
    given = ((home, name, path) for home in _PACKAGES for name, path in imports(home).items())
    return {name: f"{home}.{name}" for home, name, path in given if path.startswith("lieattn")}


@cache
def _source(module: str) -> ast.Module | None:
    """Return the syntax tree of a module, whose packages are not imported."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
        folders = (spec and spec.submodule_search_locations) or []
        places = [Path(folder, *rest) for folder in folders] or [Path(str(spec and spec.origin)).with_suffix("")]
        files = (file for place in places for file in (place.with_suffix(".py"), place / "__init__.py"))
        return next((ast.parse(file.read_text(encoding="utf-8")) for file in files if file.is_file()), None)
    except (ImportError, OSError, SyntaxError, ValueError):
        return None


@cache
def imports(module: str) -> dict[str, str]:
    """Return from where a module imports names."""
    nodes = [node for node in ast.walk(_source(module) or ast.Module([], [])) if isinstance(node, ast.ImportFrom)]
    return {(one.asname or one.name): f"{node.module}.{one.name}" for node in nodes for one in node.names}


def definition(path: str) -> tuple[str, ast.ClassDef | ast.FunctionDef] | None:
    """Return the definition of a class or function, and its module, which imports of names lead to."""
    module, _, name = path.rpartition(".")
    for node in getattr(_source(module), "body", ()) if module else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
    origin = imports(module).get(name, path) if module else path
    return definition(origin) if origin != path else None


def lineage(path: str) -> list[tuple[str, ast.ClassDef]]:
    """Return the definitions of a class and of its bases in this library, with their modules, derived ones first."""
    module, node = definition(path) or ("", None)
    if not isinstance(node, ast.ClassDef):
        return []
    return [(module, node), *(one for base in node.bases for one in lineage(f"{module}.{ast.unparse(base)}"))]


def arguments(path: str) -> dict[str, str] | None:
    """Return the annotations of the arguments of a class or function; None if they are unknown, or it takes any."""
    if (found := definition(path)) is None:
        return None
    module, node = found
    if isinstance(node, ast.ClassDef):
        own = next((part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
        if own is None:
            bases = [arguments(f"{module}.{base}") for base in map(ast.unparse, node.bases) if base not in _ABSTRACT]
            fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            if not any("dataclass" in ast.unparse(one) for one in node.decorator_list):
                return next((base for base in bases if base != {}), {})
            merged: dict[str, str] | None = {}
            for part in bases:
                merged = None if merged is None or part is None else merged | part
            new = {ast.unparse(part.target): ast.unparse(part.annotation) for part in fields}
            return None if merged is None else merged | new
        node = own
    if node.args.kwarg:
        return None
    listed = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return {one.arg: ast.unparse(one.annotation) if one.annotation else "" for one in listed if one.arg != "self"}
