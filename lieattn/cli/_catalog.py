"""``lieattn models`` and ``lieattn datasets``: what there is, in the words of the classes themselves."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from types import ModuleType

from torch.utils.data import Dataset

from lieattn.cli._options import ArgumentParser, import_catalog
from lieattn.models import EquivariantModule, Wrapper

_EQUIVARIANCE = re.compile(r"\*\*Equivariance\.\*\*(.*?)(?:\n\n|\Z)", re.DOTALL)
_MARKUP = (
    (re.compile(r":\w+:`[~]?(.*?)`"), r"\1"),
    (re.compile(r"``|\*\*|(?<=\s)\*(?=\w)|(?<=\w)\*(?=[\s.,])"), ""),
    (re.compile(r"\\partial "), "∂"),
    (re.compile(r"\\sum_"), "Σ_"),
    (re.compile(r"\\bar "), "mean "),
)
_WIDTH = 110
_MORE = {
    "models": "arguments: lieattn fit --model PointSetClassifier --model.network.help lieattn.models.GSANet",
    "datasets": "arguments: lieattn fit --data.train.help lieattn_datasets.Digits; sources, terms, splits and checks: "
    "datasets/README.md",
}


def run(name: str, arguments: Sequence[str]) -> int:
    """Print the table of ``"models"`` or ``"datasets"``, and return the exit status 0."""
    description = f"List the {name} that configurations can name, each with or without its package."
    ArgumentParser(prog=f"lieattn {name}", description=description).parse_args(arguments)
    entries = _models if name == "models" else _datasets
    for module in import_catalog()[name]:
        print(f"{module.__name__}\n")
        table = dict(entries(module))
        width = max(map(len, table))
        for title, lines in table.items():
            wrapped = [part for line in lines for part in textwrap.wrap(line, _WIDTH - width - 4)]
            print(f"  {title:{width}}  " + f"\n{'':{width + 4}}".join(wrapped))
        print()
    print(_MORE[name])
    return 0


def _models(module: ModuleType) -> Iterator[tuple[str, list[str]]]:
    for name, kind in _classes(module, EquivariantModule):
        promise = _EQUIVARIANCE.search(inspect.getdoc(kind) or "")
        if kind not in (EquivariantModule, Wrapper):
            yield name, [_plain(_first(kind)), *([f"Exact: {_plain(promise[1])}"] if promise else [])]


def _datasets(module: ModuleType) -> Iterator[tuple[str, list[str]]]:
    for name, kind in _classes(module, Dataset):
        known = inspect.signature(kind).parameters
        needs = " Can be downloaded." if "download" in known else " Reads files in `root`." if "root" in known else ""
        yield name, [f"{_plain(_first(kind))}{needs}"]


def _classes(module: ModuleType, base: type) -> Iterator[tuple[str, type]]:
    for name in sorted(module.__all__):
        kind = getattr(module, name)
        if inspect.isclass(kind) and issubclass(kind, base) and not inspect.isabstract(kind):
            yield name, kind


def _first(kind: type) -> str:
    """The first sentence of a docstring, which is its first paragraph."""
    return (inspect.getdoc(kind) or "").partition("\n\n")[0]


def _plain(text: str) -> str:
    """Text without the markup of documentation, in one line."""
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return " ".join(text.split())
