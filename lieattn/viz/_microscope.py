"""A microscope for networks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxtyping import Float
from torch import Tensor, nn
from torch_geometric.data import Data

from lieattn._core.checks import check_arguments, check_counts
from lieattn.viz import _draw as draw
from lieattn.viz._observation import Choice, Observation, Turn
from lieattn.viz._views import attention_board, attention_moments, field_board, field_moments, overview

if TYPE_CHECKING:
    from matplotlib.figure import Figure

View = Literal["overview", "attention", "rollout", "field"]

_USED: dict[str, tuple[str, ...]] = {
    "overview": ("point",),
    "attention": ("point", "frame", "head", "layer"),
    "rollout": ("point", "frame", "layer"),
    "field": ("frame", "layer", "channel"),
}


class Microscope:
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

    def __init__(self, network: nn.Module, data: Data, *, turns: int | Sequence[float] = 12, seed: int = 0) -> None:
        check_arguments(Microscope.__init__, locals())
        if isinstance(turns, int):
            check_counts(turns=turns)
        elif not all(math.isfinite(angle) for angle in turns):
            raise ValueError(f"turns: expected finite angles in radians, got {turns!r}")
        self._seen = Observation(network, data, turns, seed)

    @property
    def attention_layers(self) -> tuple[str, ...]:
        """Names of the layers of attention; empty if there are none."""
        return tuple(layer.name for layer in self._seen.recording.attention)

    @property
    def field_layers(self) -> tuple[str, ...]:
        """Names of the layers that have a field as output."""
        return tuple(layer.name for layer in self._seen.recording.fields)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The maps by which the cloud is transformed, starting with the identity."""
        return self._seen.turns

    def attention(
        self, point: int | None = None, *, frame: int | None = None, head: int | None = None, layer: int = -1
    ) -> Float[Tensor, "points keys"]:
        """Return the weights ``[points, keys]`` float64 with which a query attends to the frames of each point.

        Parameters
        ----------
        point
            Index of the query among the points of the layer. Default: the point nearest to the center of the cloud or,
            on a sphere, nearest to the viewer.
        frame, head
            Indices of the frame of the query and of the attention head. Default: the mean over all of them.
        layer
            Number of the layer in :attr:`attention_layers`.

        Returns
        -------
        Tensor
            The weights as the layer computes them. After a softmax they sum to 1, or to less if the query also attends
            to the zeros outside of an image. The shape is ``[points, 1]`` if all frames of a key point share one
            weight. GSA-Nets sum over the frames of the query; for them the weights are the mean over these frames.
        """
        check_arguments(Microscope.attention, locals())
        return self._seen.attention(point, frame, head, layer)

    def rollout(
        self, point: int | None = None, *, frame: int | None = None, layer: int = -1
    ) -> Float[Tensor, "points keys"]:
        """Return the attention of a query that is rolled out from a layer to the input, ``[points, keys]`` float64.

        Points and keys are those of the first layer of attention. The matrices of all layers up to this one are
        multiplied. Each is the mean over the heads of a layer, averaged with the identity, which represents the
        residual connection: see docs/microscope.md. Arguments and errors are those of :meth:`attention`; ValueError is
        also raised if weights are negative.
        """
        check_arguments(Microscope.rollout, locals())
        return self._seen.rollout(point, frame, layer)

    def fields(self, layer: int = -1) -> Float[Tensor, "turns points fiber channels"]:
        """Return the fields of the transformed clouds, ``[turns, points, fiber, channels]`` float64.

        The points are in the same order for all clouds.
        """
        check_arguments(Microscope.fields, locals())
        return self._seen.fields(layer)[0]

    def stabilized(self, layer: int = -1) -> Float[Tensor, "turns points fiber channels"]:
        """Return the fields of the transformed clouds, pulled back by the map u: (u⁻¹ f_u)(g) = f_u(u g).

        The shape is ``[turns, points, fiber, channels]``. If the network is equivariant, the values are the same for
        all maps, up to rounding. It is not known how the channels of modules of other libraries transform; their fields
        are norms over the channels, ``[turns, points, 1, 1]``.
        """
        check_arguments(Microscope.stabilized, locals())
        return self._seen.fields(layer)[1]

    def deviation(self, layer: int = -1) -> float:
        """Return the equivariance error: the largest difference of a stabilized field to that of the given cloud."""
        check_arguments(Microscope.deviation, locals())
        stable = self._seen.fields(layer)[1]
        return float((stable - stable[0]).abs().max())

    # --- pictures -------------------------------------------------------------------------------------------------

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
            return overview(self._seen, point)
        return (field_board if view == "field" else attention_board)(self._seen, choice)

    def save(
        self,
        path: str | Path,
        view: View | None = None,
        *,
        point: int | None = None,
        frame: int | None = None,
        head: int | None = None,
        layer: int | None = None,
        channel: int | None = None,
    ) -> Path:
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
        point, frame, head, layer, channel
            See :meth:`picture`.
        """
        check_arguments(Microscope.save, locals())
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix not in (".gif", ".html"):
            chosen: dict[str, Any] = {"point": point, "frame": frame, "head": head, "layer": layer, "channel": channel}
            return draw.save_picture(self.picture(view or "overview", **chosen), path, ("html",))
        view = view or ("attention" if self._seen.recording.attention else "field")
        if view == "overview":
            raise ValueError(f"view: a {suffix} file shows 'attention', 'rollout' or 'field', got 'overview'")
        draw.require_matplotlib()
        choice = Choice(view, point, frame, head, layer, channel)
        if suffix == ".html":
            from lieattn.viz._page import write_page

            return write_page(self._seen, path, choice)
        _checked(choice)
        if point is not None:
            raise ValueError(f"point: expected None for an animation, whose query moves over the points, got {point}")
        moments = field_moments if view == "field" else attention_moments
        return draw.save_animation(moments(self._seen, choice), path)


def _checked(choice: Choice) -> Choice:
    """Raise ValueError if a view does not depend on an argument that is given."""
    for name, value in choice._asdict().items():
        if name != "view" and value is not None and name not in _USED[choice.view]:
            raise ValueError(f"{name}: expected None, since view {choice.view!r} does not depend on it, got {value}")
    return choice
