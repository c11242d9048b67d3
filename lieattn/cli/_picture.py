"""``lieattn picture``: what the network of a checkpoint makes of some clouds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lieattn.cli._certify import add_cloud_options, parsed, test_clouds
from lieattn.cli._options import ArgumentParser, natural
from lieattn.train import load_network, read_checkpoint


def run(name: str, arguments: Sequence[str]) -> int:
    """Write a picture of each cloud, :func:`lieattn.viz.model_picture`, and return the exit status 0."""
    parser = ArgumentParser(
        prog=f"lieattn {name}",
        usage=f"lieattn {name} CHECKPOINT [options]",
        description="Draw what a trained network makes of clouds of the test set that its checkpoint names: the field "
        "behind the last layer, the field of the cloud turned, and what one point attends to in every layer.",
    )
    add_cloud_options(parser, clouds=1)
    parser.add_argument("--point", type=natural, help="index of the point that attends (default: one in the middle)")
    parser.add_argument("--out", type=Path, default=Path("pictures"), metavar="DIR", help="folder (default pictures)")
    options = parsed(parser, arguments, ("data",))
    from lieattn.viz import model_picture, save

    network = load_network(options.checkpoint, options.trust)
    clouds, source = test_clouds(read_checkpoint(options.checkpoint)["lieattn"], network, options)
    print(f"clouds: {source}")
    for number, cloud in enumerate(clouds):
        figure = model_picture(network, cloud, point=options.point, seed=options.seed)
        print(f"picture: {save(figure, options.out / f'{Path(options.checkpoint).stem}_cloud_{number}.png')}")
    return 0
