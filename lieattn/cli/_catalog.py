"""``lieattn models`` or ``lieattn datasets``: tables from the sources of the classes, without imports of torch."""

from __future__ import annotations

import argparse
import ast
import json
import re
import textwrap
from collections.abc import Mapping, Sequence

from lieattn._core.names import arguments as arguments_of
from lieattn._core.names import imports, lineage
from lieattn.cli import CATALOG, ArgumentParser

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
    for package in CATALOG[name]:
        print(f"{package}\n\n{_table(listed(package))}\n")
    print(_MORE[name])
    return 0


def _trained(name: str) -> str:
    """The table of trained networks, or the card of a single one without its example."""
    from lieattn.io import trained_cards

    cards = trained_cards()
    if not name:
        figures = {
            title: ", ".join(f"{key} {value:,}" for key, value in cards[title]["test"].items()) for title in cards
        }
        rows = {
            title: [card["task"], f"Test: {figures[title]}", f"Guarantee: {card['guarantee']}"]
            for title, card in cards.items()
        }
        more = "To load one: lieattn.load(NAME). To show its card: lieattn models --trained NAME"
        return f"{_table(rows)}\n\n{more}"
    if name not in cards:
        raise argparse.ArgumentError(None, f"--trained: expected one of {', '.join(cards)}, got {name!r}")
    shown = {key: value for key, value in cards[name].items() if key != "example"}
    return json.dumps(shown, indent=2, ensure_ascii=False)


def _table(rows: Mapping[str, Sequence[str]]) -> str:
    """Paragraphs beside their titles."""
    width = max(map(len, rows))
    texts = {
        title: [part for text in lines for part in textwrap.wrap(text, _WIDTH - width - 4)]
        for title, lines in rows.items()
    }
    return "\n".join(f"  {title:{width}}  " + f"\n{'':{width + 4}}".join(lines) for title, lines in texts.items())


def listed(package: str) -> dict[str, list[str]]:
    """The paragraphs on each public model or data set of a package by its name, from the sources alone.

    Abstract classes and wrappers, which are not constructed by themselves, are left out.
    """
    found = {}
    for name in sorted(imports(package)):
        kin = lineage(f"{package}.{name}")
        kinds = {node.name for _, node in kin}
        if (
            kinds & {"EquivariantModule", "Clouds"}
            and name != "Wrapper"
            and not _is_abstract([node for _, node in kin])
        ):
            text = ast.get_docstring(kin[0][1]) or ""
            found[name] = _of_data(f"{package}.{name}", text) if "Clouds" in kinds else _of_model(text)
    return found


def _is_abstract(classes: Sequence[ast.ClassDef]) -> bool:
    methods = {
        part.name: any("abstract" in ast.unparse(one) for one in part.decorator_list)
        for node in reversed(classes)
        for part in node.body
        if isinstance(part, ast.FunctionDef)
    }
    return any(methods.values())


def _of_model(text: str) -> list[str]:
    promise = _EQUIVARIANCE.search(text)
    return [_first(text), *([f"Equivariance: {_plain(promise[1])}"] if promise else [])]


def _of_data(path: str, text: str) -> list[str]:
    known = arguments_of(path) or ()
    needs = " Can be downloaded." if "download" in known else " Reads files in `root`." if "root" in known else ""
    card = _card(path)
    return [_first(text) + needs, *(["Source: {}. Terms: {}. Size: {}.".format(*card)] if card else [])]


def _card(path: str) -> list[str]:
    """The arguments of the card in the body of a class, or of the other class whose card it has."""
    module, node = lineage(path)[0]
    values = (
        part.value for part in node.body if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "card"
    )
    value = next(values, None)
    if isinstance(value, ast.Call):
        return [ast.literal_eval(text) for text in value.args]
    return [] if value is None else _card(f"{module}.{ast.unparse(value).removesuffix('.card')}")


def _first(text: str) -> str:
    """The first paragraph of a docstring, which is one sentence."""
    return _plain(text.partition("\n\n")[0])


def _plain(text: str) -> str:
    """Remove the markup of the documentation, and join the lines."""
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return " ".join(text.split())
