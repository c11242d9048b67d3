"""``lieattn models`` or ``lieattn datasets``: tables from the docstrings of the classes."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from types import ModuleType

from torch.utils.data import Dataset

from lieattn.cli import ArgumentParser, import_catalog
from lieattn.io import trained_cards
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
    "models": "To list the arguments of a model:\n"
    "  lieattn fit --model PointSetClassifier --model.network.help lieattn.models.GSANet\n"
    "To list trained networks:\n  lieattn models --trained",
    "datasets": "To list the arguments of a data set:\n  lieattn fit --data.train.help lieattn_datasets.Digits\n"
    "Splits, files and checks are described in datasets/README.md.",
}


def run(name: str, arguments: Sequence[str]) -> int:
    """Print the table of ``"models"``, of ``"datasets"``, or of trained networks, and return the exit status 0."""
    description = f"List the {name} that configurations can name, with or without their package."
    parser = ArgumentParser(prog=f"lieattn {name}", description=description)
    if name == "models":
        told = "list the trained networks that lieattn.load takes by name, or show the card of one"
        parser.add_argument("--trained", nargs="?", const="", metavar="NAME", help=told)
    if (trained := getattr(parser.parse_args(arguments), "trained", None)) is not None:
        print(_trained(trained))
        return 0
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


def _trained(name: str) -> str:
    """The table of trained networks, or the card of a single one without its example."""
    cards = trained_cards()
    if not name:
        width = max(map(len, cards))
        lines = []
        for title, card in cards.items():
            figures = ", ".join(f"{key} {value:,}" for key, value in card["test"].items())
            rows = [card["task"], f"Test: {figures}", f"Exact: {card['guarantee']}"]
            wrapped = [part for row in rows for part in textwrap.wrap(row, _WIDTH - width - 4)]
            lines.append(f"  {title:{width}}  " + f"\n{'':{width + 4}}".join(wrapped))
        return "\n".join(
            [*lines, "", "To load one: lieattn.load(NAME). To show its card: lieattn models --trained NAME"]
        )
    if name not in cards:
        raise argparse.ArgumentError(None, f"--trained: expected one of {', '.join(cards)}, got {name!r}")
    shown = {key: value for key, value in cards[name].items() if key != "example"}
    return json.dumps(shown, indent=2, ensure_ascii=False)


def _models(module: ModuleType) -> Iterator[tuple[str, list[str]]]:
    for name, kind in _classes(module, EquivariantModule):
        promise = _EQUIVARIANCE.search(inspect.getdoc(kind) or "")
        if kind not in (EquivariantModule, Wrapper):
            yield name, [_plain(_first(kind)), *([f"Exact: {_plain(promise[1])}"] if promise else [])]


def _datasets(module: ModuleType) -> Iterator[tuple[str, list[str]]]:
    for name, kind in _classes(module, Dataset):
        known = inspect.signature(kind).parameters
        needs = " Can be downloaded." if "download" in known else " Reads files in `root`." if "root" in known else ""
        card = vars(kind).get("card")
        origin = [f"Source: {card.source}. Terms: {card.terms}. Size: {card.size}."] if card else []
        yield name, [f"{_plain(_first(kind))}{needs}", *origin]


def _classes(module: ModuleType, base: type) -> Iterator[tuple[str, type]]:
    for name in sorted(module.__all__):
        kind = getattr(module, name)
        if inspect.isclass(kind) and issubclass(kind, base) and not inspect.isabstract(kind):
            yield name, kind


def _first(kind: type) -> str:
    """The first paragraph of a docstring, which is one sentence."""
    return (inspect.getdoc(kind) or "").partition("\n\n")[0]


def _plain(text: str) -> str:
    """Remove the markup of the documentation, and join the lines."""
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return " ".join(text.split())
