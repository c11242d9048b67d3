"""``lieattn certify``: the certificate of a checkpoint."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.utils.data import Dataset
from torch_geometric.data import Data

from lieattn.certify import TOLERANCES, Certificate, Kind, certify
from lieattn.train import UsageError, build, load_network, random_clouds, read_checkpoint

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCES}


def run(name: str, arguments: Sequence[str]) -> int:
    """Print the certificate of a checkpoint, and write it as JSON if asked to.

    Parameters
    ----------
    name
        What the subcommand was called.
    arguments
        What follows it on the command line.

    Returns
    -------
    int
        Exit status: 0, 1 if an error is beyond its tolerance, 2 for a checkpoint or data that cannot be used.
    """
    options = _parser(name).parse_args(arguments)
    try:
        checkpoint = read_checkpoint(options.checkpoint)
        network = load_network(options.checkpoint)
        clouds, source = _test_clouds(checkpoint["lieattn"], network, options)
        certificate = certify(
            network,
            clouds,
            inputs=_kinds(options.input),
            outputs=_kinds(options.output),
            elements=options.elements,
            dtypes=[_DTYPES[dtype] for dtype in options.dtype],
            tolerances={
                _DTYPES[name]: value for dtype, value in options.tolerance for name in ([dtype] if dtype else _DTYPES)
            },
            seed=options.seed,
        )
    except (TypeError, ValueError) as error:
        sys.stderr.write(f"lieattn {name}: {error}\n")
        return 2
    lines = (
        f"guarantee: {certificate.guarantee}",
        f"group: {_group(certificate)}",
        f"measured on: {source}; outputs differ between clouds by up to {certificate.spread:.1e}",
        *_units(checkpoint["state_dict"]),
        "",
        certificate.table(),
        "",
        _verdict(certificate),
    )
    sys.stdout.write("\n".join(lines) + "\n")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(certificate.to_json() + "\n")
    return 0 if certificate.passed else 1


def _group(certificate: Certificate) -> str:
    if certificate.group is None:
        return "none"
    tried = "random and special elements" if certificate.order is None else f"{certificate.order} elements"
    return f"{certificate.group}, {tried}"


def _verdict(certificate: Certificate) -> str:
    if not certificate.promised:
        return "nothing is promised exactly: the errors are for information"
    return "guarantee kept" if certificate.passed else "guarantee NOT kept: an error is beyond its tolerance"


def _units(weights: dict[str, torch.Tensor]) -> list[str]:
    """What outputs of a regressor are in the units of the data."""
    prefix = "scale_"
    scales = {key.removeprefix(prefix): value.flatten() for key, value in weights.items() if key.startswith(prefix)}
    numbers = {name: ", ".join(f"{number:.4g}" for number in scale.tolist()) for name, scale in scales.items()}
    return [f"units: 1 in the outputs is {found} in those of {name}" for name, found in numbers.items()]


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"lieattn {name}",
        description="Measure how far the outputs of a trained network are from what they should be when its group "
        "moves the clouds: under all elements of a finite group, random and special ones of a Lie group.",
    )
    add = parser.add_argument
    add("checkpoint", help="a checkpoint of `lieattn fit`")
    add(
        "--data",
        type=Path,
        metavar="YAML",
        help="file with class_path and init_args of a data set; by default the test set that the checkpoint names, "
        "and random clouds if it names none",
    )
    add("--random", action="store_true", help="random clouds, although the checkpoint names a test set")
    add("--clouds", type=_positive, default=4, help="number of clouds (default 4)")
    add("--elements", type=_positive, default=8, help="number of random elements of a Lie group (default 8)")
    several: dict[str, Any] = {"action": "extend", "nargs": "+", "default": []}
    add(
        "--input",
        **several,
        type=_kind,
        metavar="NAME=KIND",
        help="attributes of the data that transform, beside those that the network names itself; kinds are position, "
        "vector, pseudovector, pseudoscalar and tensor, several that follow each other joined by +",
    )
    add(
        "--output",
        **several,
        type=_kind,
        metavar="NAME=KIND",
        help="kinds of outputs, if the network does not state them itself; of outputs without names: --output KIND",
    )
    add("--seed", type=int, default=0, help="seed of all that is drawn (default 0)")
    add("--dtype", nargs="+", choices=list(_DTYPES), default=["float32", "float64"], help="precisions to measure in")
    defaults = ", ".join(f"{dtype}={TOLERANCES[value]:g}" for dtype, value in _DTYPES.items())
    add(
        "--tolerance",
        **several,
        type=_tolerance,
        metavar="[DTYPE=]VALUE",
        help=f"largest error in units of max(1, largest output): for one dtype, or all (default {defaults})",
    )
    add("--json", type=Path, metavar="FILE", help="write the certificate here")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return value


def _kind(text: str) -> tuple[str, Kind]:
    name, _, given = text.rpartition("=")
    kinds = tuple(given.split("+"))
    return name, kinds if len(kinds) > 1 else given


def _kinds(given: list[tuple[str, Kind]]) -> Any:
    """By name, the kind alone if it has no name, None if nothing was given."""
    kinds = dict(given)
    return kinds[""] if kinds.keys() == {""} else kinds or None


def _tolerance(text: str) -> tuple[str, float]:
    dtype, _, number = text.rpartition("=")
    value = float(number)
    if (dtype and dtype not in _DTYPES) or not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected VALUE or {'|'.join(_DTYPES)}=VALUE, at least 0, got {text!r}")
    return dtype, value


def _test_clouds(entry: dict[str, Any], network: nn.Module, options: argparse.Namespace) -> tuple[list[Data], str]:
    """Clouds to measure on, and where they are from."""
    if options.data is not None:
        try:
            spec = yaml.safe_load(options.data.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise UsageError(f"--data {options.data} cannot be read: {error}") from error
        if not isinstance(spec, dict):
            raise UsageError(f"--data {options.data}: expected class_path and init_args of a data set")
    else:
        spec = None if options.random else entry["config"].get("data", {}).get("test")
    if spec is not None:
        dataset: Any = build(Dataset, spec, "the data set")
        number = min(options.clouds, len(dataset))
        return [dataset[index] for index in range(number)], f"the first {number} clouds of {spec['class_path']}"
    vectors = tuple(getattr(network, "vector_inputs", ()))
    clouds = random_clouds(entry["input"], options.clouds, options.seed, vectors)
    return clouds, f"{options.clouds} random clouds of {clouds[0].num_nodes} points"
