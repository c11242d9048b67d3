"""A microscope for networks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lieattn._core.checks import check_arguments
from lieattn.viz import _draw as draw
from lieattn.viz._observation import Observation
from lieattn.viz._views import Choice, attention_board, attention_moments, field_board, field_moments, overview

if TYPE_CHECKING:
    from matplotlib.figure import Figure

View = Literal["overview", "attention", "rollout", "field"]

_USED: dict[str, tuple[str, ...]] = {
    "overview": ("point",),
    "attention": ("point", "frame", "head", "layer"),
    "rollout": ("point", "frame", "layer"),
    "field": ("frame", "layer", "channel"),
}


class Microscope(Observation):
    """Visualize what a network computes for one cloud.

    One forward pass of a copy of the network in eval mode is recorded: the weights of each layer of attention, and the
    field after each layer. The cloud is also transformed by elements of the group that the network states, to show how
    its fields transform. Layers are numbered from 0 in the order of the forward pass, and negative numbers count from
    the last; :attr:`attention_layers` and :attr:`field_layers` are their names. Frames are numbered as in the layer.

    Parameters
    ----------
    network
        Any ``network(data)``. Convolutional networks have fields but no attention; the gates of attentive convolutions
        are among the fields.
    data
        One cloud with ``pos`` ``[points, dim]``, an input of the network. Two or three coordinates are drawn. Molecules
        with ``edge_index``, or with ``z`` if ase is installed, are drawn with bonds.
    turns
        Largest number of transformed clouds, including the unchanged one: elements of a finite group, or otherwise
        rotations by equal angles about one axis. Or the angles, in radians, by which the cloud is rotated.
    seed
        Seed of that axis, which is drawn at random for points in space.
    classes
        Names of the classes, which an interactive page shows in place of their numbers.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> from lieattn.groups import cyclic
    >>> from lieattn.models import FramewiseTransformer
    >>> network = FramewiseTransformer(cyclic(4), 1, 1, channels=4, layers=2)
    >>> microscope = Microscope(network, Data(x=torch.ones(7, 1), pos=torch.randn(7, 2)))
    >>> microscope.attention_layers
    ('blocks.0', 'blocks.1')
    >>> microscope.attention(0, frame=1, layer=0).shape  # by point and frame of the keys
    torch.Size([7, 4])
    >>> microscope.deviation() < 1e-4
    True
    """

    def picture(
        self,
        view: View = "overview",
        *,
        point: int | None = None,
        frame: int | None = None,
        head: int | None = None,
        layer: int | None = None,
        channel: int | None = None,
    ) -> Figure:
        """Draw a view.

        Parameters
        ----------
        view
            ``"overview"`` shows features, field, field of the transformed cloud, and the attention of up to four
            layers. ``"attention"`` shows the attention of a query: rows are layers, and columns are the mean over the
            frames of the query and each of its first six frames; or, if ``frame`` is given, frames of the keys.
            ``"rollout"`` shows the same from each layer to the input. ``"field"`` shows raw and stabilized fields; rows
            are transformed clouds, and columns are the first four frames.
        point, frame, head
            See :meth:`attention`. ValueError is raised if the view does not depend on an argument that is given.
        layer
            Index of one layer. Default: up to four layers of attention, and the last field.
        channel
            Index of a channel of a field. Default: the norm over all channels.
        """
        draw.require_matplotlib()
        check_arguments(Microscope.picture, locals())
        choice = _checked(Choice(view, point, frame, head, layer, channel))
        if view == "overview":
            return overview(self, point)
        return (field_board if view == "field" else attention_board)(self, choice)

    def save(self, path: str | Path, view: View | None = None, **indices: int | None) -> Path:
        """Write a view to a file, and return its path. Missing folders are created.

        Parameters
        ----------
        path
            A file with ``.png`` or the suffix of another format of matplotlib contains the figure of :meth:`picture`. A
            ``.gif`` file is an animation: the query moves over the points, or the cloud is transformed (``"field"``).
            An ``.html`` file opens in any browser without a connection. View, layer, head, frame, query and
            transformation can be chosen in it, and start with the arguments of this call.
        view
            Default: the overview in figures. In other files it is the attention, if the network has attention layers,
            or otherwise the field.
        indices
            ``point``, ``frame``, ``head``, ``layer`` and ``channel``, see :meth:`picture`.
        """
        check_arguments(Microscope.save, locals())
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix not in (".gif", ".html"):
            return draw.save_picture(self.picture(view or "overview", **indices), path, ("html",))
        view = view or ("attention" if self.recording.attention else "field")
        if view == "overview":
            raise ValueError(f"view: a {suffix} file shows 'attention', 'rollout' or 'field', got 'overview'")
        draw.require_matplotlib()
        choice = Choice(view, **indices)
        if suffix == ".html":
            from lieattn.viz._page import write_page

            return write_page(self, path, choice)
        _checked(choice)
        if choice.point is not None:
            raise ValueError(
                f"point: expected None for an animation, whose query moves over the points, got {choice.point}"
            )
        moments = field_moments if view == "field" else attention_moments
        return draw.save_animation(moments(self, choice), path)


def _checked(choice: Choice) -> Choice:
    """Raise ValueError if a view does not depend on an argument that is given."""
    for name, value in choice._asdict().items():
        if name != "view" and value is not None and name not in _USED[choice.view]:
            raise ValueError(f"{name}: expected None, since view {choice.view!r} does not depend on it, got {value}")
    return choice
