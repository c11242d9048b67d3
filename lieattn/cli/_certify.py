"""``lieattn certify``: the certificate of a network."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lieattn._core.checks import counted
from lieattn.certify import TOLERANCES, Certificate, Kind, certify
from lieattn.cli import ArgumentParser, natural, output_file, positive
from lieattn.cli._target import (
    add_cloud_options,
    built,
    drawn_clouds,
    drawn_images,
    given_clouds,
    is_named,
    is_network,
    is_trained,
    item_of_card,
    made,
    parsed,
    refuse,
    settings_of,
    test_clouds,
)
from lieattn.groups import Group
from lieattn.io import load, replace_text, trained_cards
from lieattn.models import EnergyForceStress
from lieattn.train import UsageError, load_network, read_checkpoint

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCES}
_DEFAULTS = ", ".join(f"{name}={TOLERANCES[dtype]:g}" for name, dtype in _DTYPES.items())
_VERDICTS = {
    "not promised": "no exact guarantee: the errors are for information only",
    "failed": "guarantee NOT kept: {failure}",
    "vacuous": "guarantee vacuous: an output does not depend on its input",
    "kept": "guarantee kept",
}
_UNIQUE = {
    True: "unique: all motions outside of the group that were tried change the outputs",
    False: "not unique: outputs are also equivariant to a motion outside of the group",
}

_OTHER_DATA = "for others: --data CLASS, --images CHANNELS ROWS COLUMNS, --points, --dim, --features"


def run(name: str, arguments: Sequence[str]) -> int:
    """Print the certificate of a network, and write it as JSON or HTML if ``--json`` or ``--html`` is given.

    The exit status is 1 if an error exceeds its tolerance, or if outputs are not finite or constant, and 0 otherwise.
    """
    options = parsed(_parser(name), arguments, ("data", "group", "model"))
    foreign = is_network(options.checkpoint) or is_named(options.checkpoint)
    if not foreign and not Path(options.checkpoint).exists() and Path(options.checkpoint).suffix == "":
        known = f"trained networks are {', '.join(trained_cards())}"
        raise UsageError(f"{options.checkpoint} is neither a file nor a trained network nor MODULE:NAME; {known}")
    _check_used(options, arguments, foreign)
    network, clouds, source, weights = _foreign(options) if foreign else _trained(options)
    if options.device is not None and isinstance(network, nn.Module):
        network = network.to(options.device)
    group: Group | Literal["search"] | None = None
    if options.group == "search" or (options.group is None and not hasattr(network, "symmetry")):
        group = "search"
    elif options.group is not None:
        group = built(Group, "group", options.group, options.settings)
    try:
        certificate = certify(
            network,
            clouds,
            inputs=_kinds(options.input),
            outputs=_kinds(options.output),
            group=group,
            elements=options.elements,
            rotations=options.outside,
            dtypes=[_DTYPES[dtype] for dtype in options.dtype],
            tolerances=_tolerances(options),
            seed=options.seed,
        )
    except Exception as error:
        if foreign and options.data is None:
            error.add_note(f"the network was called with {source}; {_OTHER_DATA}")
        raise
    sys.stdout.write(_text(certificate, source, weights))
    if options.json is not None:
        replace_text(options.json, certificate.to_json() + "\n")
    if options.html is not None:
        replace_text(options.html, certificate.to_html())
    return 0 if certificate.passed else 1


def _tolerances(options: argparse.Namespace) -> dict[torch.dtype, float]:
    """The given tolerances, and otherwise those on the card of a trained network."""
    card = trained_cards()[options.checkpoint]["certificate"]["tolerances"] if is_trained(options.checkpoint) else {}
    given = {dtype: value for names, value in options.tolerance for dtype in names}
    return {_DTYPES[dtype]: value for dtype, value in {**card, **given}.items()}


def _trained(options: argparse.Namespace) -> tuple[Any, Any, str, dict[str, Tensor]]:
    """The network of a checkpoint, clouds, a text that names their source, and the weights with the units."""
    checkpoint = read_checkpoint(options.checkpoint)
    network = load_network(options.checkpoint, options.trust)
    clouds, source, _ = test_clouds(checkpoint["lieattn"], network, options)
    return network, clouds, source, checkpoint["state_dict"]


def _foreign(options: argparse.Namespace) -> tuple[Any, Any, str, dict[str, Tensor]]:
    """The network given by name or by a file of ``lieattn.save``, and clouds given by name or drawn at random."""
    torch.manual_seed(options.seed)
    if is_named(options.checkpoint):
        network = made("TARGET", options.checkpoint, settings_of("model", options.settings))
    else:
        network = load(options.checkpoint, options.trust)
    if options.data is not None and is_named(options.data):
        clouds: Any = given_clouds(options.data, options.clouds, settings_of("data", options.settings))
        source = f"{len(clouds)} clouds of {options.data}"
    elif options.data is not None:
        clouds, source, _ = test_clouds({"config": {}, "input": None}, network, options)
    elif options.images is not None:
        clouds = drawn_images(network, options.clouds, options.images, options.seed)
        source = f"{options.clouds} random images of {' x '.join(map(str, options.images))}"
    elif is_trained(options.checkpoint) and not options.random:
        clouds, source, _ = item_of_card(options.checkpoint)
    else:
        clouds = drawn_clouds(network, options.clouds, options.points, options.dim, options.features, options.seed)
        source = f"{options.clouds} random clouds of {options.points} points in {clouds[0].pos.shape[1]} dimensions"
    return network, clouds, source, {}


def _check_used(options: argparse.Namespace, arguments: Sequence[str], foreign: bool) -> None:
    """Raise UsageError if an option is given that has no effect beside the other ones."""
    alone = (dtype for (dtype, *others), _ in options.tolerance if not others)
    if unmeasured := [dtype for dtype in alone if dtype not in options.dtype]:
        raise UsageError(f"--tolerance: expected one of the measured {options.dtype}, got {unmeasured[0]}; see --dtype")
    if options.json is not None and options.html is not None and options.json.resolve() == options.html.resolve():
        raise UsageError(f"--json, --html: expected different files, got {options.json} for both")
    if options.images is not None and len(options.images) not in (3, 4):
        expected, got = "CHANNELS ROWS COLUMNS, or CHANNELS LAYERS ROWS COLUMNS", " ".join(map(str, options.images))
        raise UsageError(f"--images: expected {expected}, got {got}")
    name, drawn = options.checkpoint, ("--points", "--dim", "--features")
    random, of_card = (*drawn, "--images"), is_trained(name) and not (options.data or options.images or options.random)
    refuse(
        arguments,
        (options.data is not None, ("--random", *random), "there are no random clouds with --data"),
        (options.data is None, ("--data.",), "it needs --data CLASS"),
        (options.group in (None, "search"), ("--group.",), "it needs --group CLASS"),
        (not is_named(name), ("--model.",), f"{name} is not MODULE:NAME"),
        (not foreign, random, "random clouds of a checkpoint are like those that it was trained on"),
        (options.images is not None, drawn, "there are no random clouds with --images"),
        (
            of_card,
            ("--clouds", *random),
            f"{name} is certified on the item of its card; use --random for random clouds",
        ),
    )


def _text(certificate: Certificate, source: str, weights: dict[str, Tensor]) -> str:
    tried = "random and special elements" if certificate.order is None else counted(certificate.order, "element")
    lines = [
        f"guarantee: {certificate.guarantee}",
        "group: none" if certificate.group is None else f"group: {certificate.group}, {tried}",
        f"measured on: {source}, {certificate.device}; outputs differ between clouds by up to {certificate.spread:.1e}",
    ]
    for key, scale in weights.items():
        if key.startswith("scale_"):  # the scale of a target of a regressor
            name = key.removeprefix("scale_")
            gain = float(weights.get("gain", 1.0)) if name in EnergyForceStress._fields else 1.0
            numbers = ", ".join(f"{gain * number:.4g}" for number in scale.flatten().tolist())
            lines.append(f"units: 1 in the outputs is {numbers} in the units of {name}")
    unique = [] if certificate.unique is None else [_UNIQUE[certificate.unique]]
    told = [str(diagnosis) for diagnosis in certificate.diagnoses]
    verdict = _VERDICTS[certificate.verdict].format(failure=certificate.failure)
    return "\n".join([*lines, "", certificate.table(), "", verdict, *told, *unique, ""])


def _parser(name: str) -> ArgumentParser:
    parser = ArgumentParser(
        prog=f"lieattn {name}",
        usage=f"lieattn {name} TARGET [options]",
        description="Measure the equivariance error of a network under motions of its group, and the effect of other "
        "motions. The network is read from a file, is a trained one of the library (see `lieattn models --trained`), "
        "or is imported: a torch module, its class, a function of a batch, an ASE calculator, or a function that "
        "returns one of these. Clouds are the test set of the checkpoint, the item of the card, or random. Kinds are "
        "invariant, position, vector, pseudovector, pseudoscalar, tensor and rotation, several joined by +.",
    )
    add_cloud_options(parser, 4, "checkpoint of `lieattn fit`, name or file of a trained network, or MODULE:NAME")
    add = parser.add_argument
    several: dict[str, Any] = {"action": "extend", "nargs": "+", "default": []}
    given = "group to measure, such as --group lieattn.groups.cyclic --group.n 8, or search"
    add("--group", metavar="CLASS", help=given)
    add("--outside", type=natural, default=4, help="number of motions outside of the group (default 4)")
    add("--elements", type=positive, default=8, help="number of random elements of a Lie group (default 8)")
    more = "attributes of the data that transform, besides those that the network states"
    add("--input", **several, type=_kind, metavar="NAME=KIND", help=more)
    stated = "kinds of outputs that the network does not state; without names: --output KIND"
    add("--output", **several, type=_kind, metavar="NAME=KIND", help=stated)
    add("--dtype", nargs="+", choices=list(_DTYPES), default=["float32", "float64"], help="precisions to measure in")
    usual = f"the card's, or {_DEFAULTS} and what rounding explains"
    largest = f"largest error allowed, relative to max(1, largest output) (default: {usual})"
    add("--tolerance", **several, type=_tolerance, metavar="[DTYPE=]VALUE", help=largest)
    add("--json", type=output_file, metavar="FILE", help="write the certificate as JSON")
    add("--html", type=output_file, metavar="FILE", help="write the certificate as a page for the browser")
    add("--device", type=_device, help="device to measure on, such as cuda (default: that of the network)")
    named = "of random clouds for MODULE:NAME; its arguments are given as --model.OPTION VALUE"
    add("--points", type=positive, default=12, help=f"points {named} (default 12)")
    add("--dim", type=positive, help="dimension of random clouds (default: that of the network's group, or 3)")
    needed = "channels of features x of random clouds (default: as many as needed)"
    add("--features", type=positive, metavar="CHANNELS", help=needed)
    add("--images", type=positive, nargs="+", metavar="SIZE", help="use random images instead: channels, rows, columns")
    return parser


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(f"cannot use {text!r}: {str(error).splitlines()[0]}") from error
    return device


def _kind(text: str) -> tuple[str, Kind]:
    name, _, given = text.rpartition("=")
    kinds = tuple(given.split("+"))
    return name, kinds if len(kinds) > 1 else given


def _kinds(given: list[tuple[str, Kind]]) -> Any:
    """Kinds by name, or a single kind without a name, or None if nothing was given."""
    kinds = dict(given)
    return kinds[""] if kinds.keys() == {""} else kinds or None


def _tolerance(text: str) -> tuple[list[str], float]:
    dtype, _, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if (dtype and dtype not in _DTYPES) or not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected VALUE or {'|'.join(_DTYPES)}=VALUE, at least 0, got {text!r}")
    return [dtype] if dtype else list(_DTYPES), value
