"""``lieattn picture``: what the network of a checkpoint makes of some clouds, and figures of the papers by name."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lieattn.cli._certify import add_cloud_options, parsed, test_clouds
from lieattn.cli._options import ArgumentParser, natural
from lieattn.train import UsageError, load_network, read_checkpoint, short_message

_OUT = Path("pictures")


def run(name: str, arguments: Sequence[str]) -> int:
    """Write a picture of each cloud, or a figure of the papers, and return the exit status 0."""
    from lieattn.cli._figures import FIGURES

    if arguments and arguments[0] in FIGURES:
        return _figure(name, arguments[0], arguments[1:])
    summaries = {figure: _summary(function.__doc__) for figure, function in FIGURES.items()}
    lines = [f"  {figure:{max(map(len, FIGURES))}}  {summary}" for figure, summary in summaries.items()]
    parser = ArgumentParser(
        prog=f"lieattn {name}",
        usage=f"lieattn {name} CHECKPOINT [options], or lieattn {name} FIGURE [options]",
        description="Draw what a trained network makes of clouds of the test set that its checkpoint names: the field\n"
        "behind the last layer, the field of the cloud turned, and what one point attends to in every layer.\n\n"
        "Or draw a figure of the papers, each with options of its own (FIGURE --help):\n" + "\n".join(lines),
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=32, width=110),
    )
    add_cloud_options(parser, clouds=1)
    parser.add_argument("--point", type=natural, help="index of the point that attends (default: one in the middle)")
    parser.add_argument("--out", type=Path, default=_OUT, metavar="DIR", help=f"folder (default {_OUT})")
    options = parsed(parser, arguments, ("data",))
    if not Path(options.checkpoint).exists():
        raise UsageError(f"{options.checkpoint} is neither a file nor a figure; figures are {', '.join(FIGURES)}")
    from lieattn.models import AttentiveNetwork
    from lieattn.viz import attention_under_group, model_picture, save

    network = load_network(options.checkpoint, options.trust)
    clouds, source = test_clouds(read_checkpoint(options.checkpoint)["lieattn"], network, options)
    print(f"clouds: {source}")
    for number, cloud in enumerate(clouds):
        figure = model_picture(network, cloud, point=options.point, seed=options.seed)
        stem = f"{Path(options.checkpoint).stem}_cloud_{number}"
        print(f"picture: {save(figure, options.out / f'{stem}.png')}")
        # Maps that all output channels share make one picture of a square image.
        if isinstance(network, AttentiveNetwork) and network.attention in ("input", "pose") and network.group.dim == 2:
            image = network.images(cloud)[0]
            if image.shape[-1] == image.shape[-2]:
                figure = attention_under_group(network, image)
                print(f"picture: {save(figure, options.out / f'{stem}_attention.png')}")
    return 0


def _figure(name: str, figure: str, arguments: Sequence[str]) -> int:
    """Draw one figure of the papers, with the keyword arguments of its function as options."""
    from jsonargparse import ArgumentParser as FunctionParser

    from lieattn.cli._figures import FIGURES
    from lieattn.viz import save

    function = FIGURES[figure]
    parser = FunctionParser(prog=f"lieattn {name} {figure}", exit_on_error=False, allow_abbrev=False)
    parser.add_function_arguments(function, as_group=False)
    parser.add_argument("--out", type=Path, default=_OUT, metavar="DIR", help="folder")
    parser.description = (inspect.getdoc(function) or "").partition("\n\nParameters")[0]
    try:
        options = parser.parse_args(list(arguments))
    except argparse.ArgumentError as error:
        raise UsageError(short_message(ValueError(str(error)))) from error
    given = vars(options)
    out = given.pop("out")
    for stem, drawn in function(**given).items():
        print(f"picture: {save(drawn, out / f'{stem}.png')}")
    return 0


def _summary(documentation: str | None) -> str:
    return (documentation or "").partition("\n")[0].removesuffix(".")
