"""``lieattn picture``: pictures of a trained network, or of its training."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn
from torch_geometric.data import Data

from lieattn import viz
from lieattn._core.checks import check_counts, check_index
from lieattn.cli import ArgumentParser, natural, output_file
from lieattn.cli._target import (
    Clouds,
    add_cloud_options,
    is_network,
    is_trained,
    item_of_card,
    parsed,
    refuse,
    test_clouds,
)
from lieattn.geometry import PixelSquare, Radius, pixel_positions
from lieattn.groups import cyclic
from lieattn.io import load, trained_cards
from lieattn.models import (
    AttentiveAllCNN,
    AttentiveNetwork,
    GSANet,
    GSAOptions,
    published_attentive_cnn,
)
from lieattn.nn import act_on_grid
from lieattn.testing import relative_error
from lieattn.train import UsageError, load_network, read_checkpoint, short_message

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_OUT = Path("pictures")
_OF_FIGURES = (".png", ".pdf", ".svg")
_SUFFIXES = (*_OF_FIGURES, ".gif", ".html")
_CHOICES = ("view", "point", "layer", "frame", "head", "channel")  # options that the microscope takes


def run(name: str, arguments: Sequence[str]) -> int:
    """Write a picture or page of each cloud, or a figure of the papers, and return the exit status 0."""
    if arguments and arguments[0] in FIGURES:
        return _figure(name, arguments[0], arguments[1:])
    if arguments and (Path(arguments[0]).is_dir() or arguments[0].endswith(".csv")):
        return _run(name, *arguments)
    options = parsed(_parser(name), arguments, ("data",))
    named = options.checkpoint in trained_cards() or options.checkpoint.startswith("hf:")
    if not named and not Path(options.checkpoint).exists():
        known = f"figures are {', '.join(FIGURES)}; trained networks are {', '.join(trained_cards())}"
        raise UsageError(f"{options.checkpoint} is not a file, a figure or a trained network; {known}")
    card = f"{options.checkpoint} is drawn for the item of its card; use --data CLASS for others"
    refuse(
        arguments,
        (options.data is None, ("--data.",), "it needs --data CLASS"),
        (options.data is not None, ("--random",), "there are no random clouds with --data"),
        (is_trained(options.checkpoint) and options.data is None, ("--random", "--clouds"), card),
    )
    network, (clouds, source, classes) = _loaded(options)
    print(f"clouds: {source}")
    chosen = {key: getattr(options, key) for key in _CHOICES}
    is_file = options.out.suffix in _SUFFIXES
    for number, cloud in enumerate(clouds):
        stem = f"{Path(options.checkpoint).stem}_cloud_{number}"
        path = options.out / f"{stem}.png"
        if is_file:
            path = options.out.with_stem(f"{options.out.stem}_{number}") if len(clouds) > 1 else options.out
        print(f"picture: {viz.Microscope(network, cloud, seed=options.seed, classes=classes).save(path, **chosen)}")
        if options.view is None and not is_file:
            _draw_attention_map(network, cloud, options.out / f"{stem}_attention.png")
    return 0


def _parser(name: str) -> ArgumentParser:
    """The parser for pictures of networks; its description lists the figures of the papers."""
    summaries = {figure: _summary(function.__doc__) for figure, function in FIGURES.items()}
    lines = [f"  {figure:{max(map(len, FIGURES))}}  {summary}" for figure, summary in summaries.items()]
    parser = ArgumentParser(
        prog=f"lieattn {name}",
        usage=f"lieattn {name} TARGET [options], lieattn {name} RUN, or lieattn {name} FIGURE [options]",
        description="Draw attention maps, attention rollout and fields of a trained network for clouds of its test\n"
        "set. Those of `lieattn models --trained` are drawn for the item of their card, or for --data.\n\n"
        "Or draw learning curves and predictions of a run of `lieattn fit`: its folder, or a table of predictions.\n\n"
        "Or draw a figure of the papers, with its own options (FIGURE --help):\n" + "\n".join(lines),
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=32, width=110),
    )
    add_cloud_options(parser, 1, "checkpoint of `lieattn fit`, or name or file of a trained network")
    add = parser.add_argument
    views = ["overview", "attention", "rollout", "field"]
    add("--view", choices=views, help="what to draw (default: overview, or attention for .gif and .html)")
    add("--point", type=natural, help="index of the query point (default: one in the middle)")
    add("--layer", type=int, help="index of the layer, negative from the last (default: up to four layers, one field)")
    add(
        "--frame",
        type=natural,
        help="index of the frame of the point (default: the mean, and the first six) or field (the first four)",
    )
    add("--head", type=natural, help="index of the attention head (default: the mean over heads)")
    add("--channel", type=natural, help="index of the channel of the field (default: the norm over channels)")
    told = f"file .png, .pdf, .svg, .gif (animated) or .html (interactive), or a folder (default {_OUT})"
    add("--out", type=partial(_out, _SUFFIXES), default=_OUT, metavar="FILE|DIR", help=told)
    return parser


def _draw_attention_map(network: nn.Module, cloud: Data, path: Path) -> None:
    """Draw the attention to a square image under the group, if all output channels of the network share one map."""
    if not isinstance(network, AttentiveNetwork) or network.attention not in ("input", "pose"):
        return
    if network.group.dim != 2:
        return
    image = network.images(cloud)[0]
    if image.shape[-1] == image.shape[-2]:
        print(f"picture: {viz.save(viz.attention_under_group(network, image), path)}")


def _out(suffixes: Sequence[str], text: str) -> Path:
    path = Path(text)
    if path.suffix and path.suffix not in suffixes and not path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file {', '.join(suffixes)}, or a folder, got {text!r}")
    output_file(str(path if path.suffix in suffixes and not path.is_dir() else path / "picture"))
    return path


def _loaded(options: argparse.Namespace) -> tuple[nn.Module, Clouds]:
    """The network and the clouds."""
    trained, given = is_trained(options.checkpoint), options.data
    if not is_network(options.checkpoint):
        network = load_network(options.checkpoint, options.trust)
        return network, test_clouds(read_checkpoint(options.checkpoint)["lieattn"], network, options)
    network = load(options.checkpoint, options.trust)
    if given is not None:
        return network, test_clouds({"config": {}, "input": None}, network, options)
    if not trained:
        raise UsageError(f"--data: expected --data CLASS, since {options.checkpoint} has no test set")
    return network, item_of_card(options.checkpoint)


def _figure(name: str, figure: str, arguments: Sequence[str]) -> int:
    """Draw one figure of the papers, with the keyword arguments of its function as options."""
    from jsonargparse import ArgumentParser as SignatureParser

    function = FIGURES[figure]
    parser = SignatureParser(prog=f"lieattn {name} {figure}", exit_on_error=False, allow_abbrev=False)
    parser.add_function_arguments(function, as_group=False)
    told = f"file {', '.join(_OF_FIGURES)}, or a folder"
    parser.add_argument("--out", type=str, default=str(_OUT), metavar="FILE|DIR", help=told)
    parser.description = (inspect.getdoc(function) or "").partition("\n\nParameters")[0]
    try:
        given = vars(parser.parse_args(list(arguments)))
    except argparse.ArgumentError as error:
        told, required, missing = short_message(ValueError(str(error))).partition("arguments are required: ")
        names = [f"--{name}" for name in missing.split(", ") if name]
        raise UsageError(f"{told}{required}{', '.join(names)}") from error
    try:
        out = _out(_OF_FIGURES, given.pop("out"))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--out: {error}") from error
    drawn = function(**given)
    one_file = out.suffix in _OF_FIGURES and not out.is_dir()
    if one_file and len(drawn) > 1:
        raise UsageError(f"--out: {figure} draws {len(drawn)} pictures, {' and '.join(drawn)}; expected a folder")
    for stem, picture in drawn.items():
        print(f"picture: {viz.save(picture, out if one_file else out / f'{stem}.png')}")
    return 0


def _run(name: str, *arguments: str) -> int:
    """Draw learning curves and predictions of a run, by default into its folder."""
    parser = ArgumentParser(prog=f"lieattn {name} RUN", description="Draw learning curves and predictions of a run.")
    parser.add_argument("path", type=Path, metavar="RUN", help="folder of a run, or a table of `lieattn predict`")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the pictures (default: pictures in the run)")
    options = parser.parse_args(arguments)
    folder = options.out or (options.path if options.path.is_dir() else options.path.parent) / _OUT
    for stem, picture in viz.run_pictures(options.path).items():
        print(f"picture: {viz.save(picture, folder / f'{stem}.png')}")
    return 0


def _summary(documentation: str | None) -> str:
    return (documentation or "").partition("\n")[0].removesuffix(".")


_SIZES: dict[str, Any] = {"sides": range(16, 34), "channels": 8}  # of images and networks
_GLYPH = (".......", ".#####.", ".#.....", ".###...", ".#.....", ".#.....", ".......")  # a letter without symmetry


def gsa_fields(*, order: int = 4, side: int = 15) -> dict[str, Figure]:
    """Fields of a GSA-Net when its input is rotated (GSA-Nets, Figure 1).

    The network is untrained. For groups with other rotations than quarter turns, its neighborhoods are discs in place
    of pixel squares.

    Parameters
    ----------
    order
        Number of rotations of the group; the input is rotated by the same angles.
    side
        Side of the input in pixels.
    """
    check_counts(order=order, side=side)
    torch.manual_seed(0)
    near = PixelSquare(5) if 4 % order == 0 else Radius(2.5)
    paper = GSAOptions(pattern="query_sum")
    network = GSANet(cyclic(order), neighborhood=near, channels=8, blocks=(1,), heads=2, options=paper)
    seen = viz.Microscope(network, _glyph(side), turns=order)
    names = ("lifting", "self-attention")
    return {f"gsa-fields_{name}": seen.picture("field", channel=0, layer=k) for k, name in enumerate(names)}


def attention_maps(weights: Path, *, image: int = 0) -> dict[str, Figure]:
    """Attention maps of a released network, input rotated (attentive group convolution, Figures 7, 8 and 11).

    One picture shows α⁻, the attention that the layers subtract, as in the figures of the paper. The other one shows
    1 - α⁻, which the layers let pass. For networks of `lieattn fit` use `lieattn picture CHECKPOINT`.

    Parameters
    ----------
    weights
        Released weights of a network with attention to its input, as an .npz file for
        `lieattn.models.published_attentive_cnn`. It must also contain images `x` as inputs of the network.
    image
        Index of the image that is drawn.
    """
    network = published_attentive_cnn(weights)
    with np.load(weights, allow_pickle=False) as archive:
        if "x" not in archive:
            raise ValueError(f"weights: expected images as an array 'x' beside the weights, got none in {weights}")
        check_index("image", image, len(archive["x"]))
        shown = torch.from_numpy(archive["x"][image]).to(torch.float32)
    kinds = {"subtracted": False, "passed": True}
    return {
        f"attention-maps_{kind}": viz.attention_under_group(network, shown, passed=passed)
        for kind, passed in kinds.items()
    }


def stride_parity() -> dict[str, Figure]:
    """Equivariance of p4 All-CNN for images of even and odd sides (attentive group convolution, Figures 9 and 10).

    On even sides, strides of 2 sample pixels off center, so that a rotated image is sampled at other places. Maxima
    in place of strides are exact on the sides that they divide. The weights are random.
    """
    group, curves = cyclic(4), {}
    names: dict[str, Literal["strided", "pooled"]] = {"strides of 2": "strided", "maxima of 2 x 2": "pooled"}
    for name, downsampling in names.items():
        generator = torch.manual_seed(0)
        network = AttentiveAllCNN(group, channels=_SIZES["channels"], downsampling=downsampling).double().eval()
        sides = [side for side in _SIZES["sides"] if downsampling == "strided" or side % 4 == 0]
        errors = []
        with torch.no_grad():
            for side in sides:
                image = torch.randn(1, 3, side, side, generator=generator, dtype=torch.float64)
                logits = network(image).expand(group.order, -1)
                moved = network(torch.cat([act_on_grid(group, h, image) for h in range(group.order)]))
                errors.append(relative_error(moved, logits, floor=1e-30))
        curves[name] = (sides, errors)
    return {"stride-parity": viz.error_curves(curves, "side of the images (pixels)", "relative change under the group")}


def gsa_steerability(*, size: int = 7, order: int = 16) -> dict[str, Figure]:
    """Weights of a convolution and of attention, rotated (GSA-Nets, Figure 2).

    Positional scores rotate without interpolation. Their error is compared with the error of interpolated weights.

    Parameters
    ----------
    size
        Side of the neighborhood in pixels, odd.
    order
        Number of angles in a full turn, a multiple of 4.
    """
    return {"gsa-steerability": viz.steerability(size=size, order=order)}


def _glyph(side: int) -> Data:
    """A gray image of a letter F."""
    letter = torch.tensor([[float(pixel == "#") for pixel in row] for row in _GLYPH])
    image = torch.nn.functional.interpolate(letter[None, None], (side, side), mode="bilinear", antialias=True)
    return Data(x=image.reshape(-1, 1), pos=pixel_positions(side, side), grid=torch.tensor([[side, side]]))


FIGURES: Mapping[str, Callable[..., dict[str, Figure]]] = {
    "gsa-fields": gsa_fields,
    "attention-maps": attention_maps,
    "stride-parity": stride_parity,
    "gsa-steerability": gsa_steerability,
}
"""Functions by the names of the figures. They return figures by the names of their files.

The first line of a docstring is shown in the help, and the keyword arguments are the options.
"""
