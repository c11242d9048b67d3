"""LieTransformer: equivariant self-attention for Lie groups (Hutchinson et al., ICML 2021, arXiv 2012.10885)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from lieattn._checks import check_count
from lieattn.geometry import AllPairs, LiftedGraph, Neighborhood, SampledFrames
from lieattn.groups import SE, Translations
from lieattn.models._network import GroupField
from lieattn.models.lie._inputs import SortedDistances, Species
from lieattn.models.lie._network import AnyFrames, LieNetwork
from lieattn.models.lie._options import AttentionOptions, Lifting, Readout
from lieattn.nn import LieBlock, LieSelfAttention
from lieattn.spaces import Euclidean, HomogeneousSpace


class LieTransformer(LieNetwork):
    r"""Self-attention on points lifted to a group, and outputs for every cloud or point.

    Points x_i of X = G/H are lifted to group elements g_ia; a linear map embeds the features, the same over the whole
    fiber; a convolution adds what each element sees of its neighbors; blocks of :class:`lieattn.nn.LieSelfAttention`
    and an MLP follow; the field is pooled.

    **Equivariance.** Outputs do not change, or turn along, when all elements move by one element of G.
    :attr:`guarantee` says in words for which motions of the *points* that is so with the frames chosen: exactly for a
    finite group of frames and for frames made of the data, on average for sampled ones.

    Parameters
    ----------
    in_channels
        Number of features ``data.x`` of a point; or :class:`Species` or :class:`SortedDistances`, which make them.
    out_channels
        Numbers, or vectors, for every cloud or point.
    frames
        What stands over each point, see :func:`lieattn.geometry.lift`; None where the stabilizer H is trivial.
    neighborhood
        Which points attend to which.
    space
        X = G/H, for example ``Sphere()`` or ``Euclidean(SE(2))``; if absent, R^3 (for a finite group R^d) under the
        motions that the frames belong to, see :func:`lieattn.geometry.natural_space`.
    channels, layers, heads
        Of the attention blocks.
    vector_inputs
        Names of attributes of the data with vectors ``[points, dim]``, such as ``("vel",)``, for orthogonal frames;
        each enters by its components in the frames.
    lifting, attention, readout
        Further options.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> from lieattn.geometry import PrincipalFrames, Radius
    >>> from lieattn.models import LieTransformer
    >>> network = LieTransformer(2, 1, frames=PrincipalFrames(), neighborhood=Radius(3.0), channels=32, layers=2)
    >>> network(Data(x=torch.randn(9, 2), pos=torch.randn(9, 3))).shape
    torch.Size([1, 1])
    """

    def __init__(
        self,
        in_channels: int | Species | SortedDistances,
        out_channels: int = 1,
        *,
        frames: AnyFrames | None = None,
        neighborhood: Neighborhood,
        space: HomogeneousSpace | None = None,
        channels: int = 512,
        layers: int = 6,
        heads: int = 8,
        vector_inputs: Sequence[str] = (),
        lifting: Lifting | None = None,
        attention: AttentionOptions | None = None,
        readout: Readout | None = None,
    ) -> None:
        super().__init__(in_channels, channels, frames, neighborhood, space, vector_inputs, lifting)
        check_count("out_channels", out_channels)
        check_count("layers", layers)
        attention, readout = attention or AttentionOptions(), readout or Readout()
        scores = asdict(attention)
        block = {name: scores.pop(name) for name in ("norm", "eps")}
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            layer = LieSelfAttention(channels, self.num_coordinates, heads=heads, **scores)
            self.blocks.append(LieBlock(layer, channels, activation=attention.activation, **block))
        self.head = readout.head(channels, out_channels, self.space.group.dim, "pool_first")
        self.local = self._local(channels)

    @classmethod
    def qm9(cls, out_channels: int = 1, **options: Any) -> LieTransformer:
        """Network for molecules with the widths of the paper, on average invariant to SE(3)."""
        preset = {"frames": SampledFrames(1), "neighborhood": AllPairs(), "lifting": Lifting(local=0)}
        return cls(Species(), out_channels, **{**preset, **options})

    @classmethod
    def constellation(cls, repetitions: int = 2, *, samples: int = 4, **options: Any) -> LieTransformer:
        """Network that counts four patterns among points of the plane, ``[clouds, 4 * (repetitions + 1)]`` logits."""
        preset = {
            "space": Euclidean(SE(2)),
            "frames": SampledFrames(samples),
            "neighborhood": AllPairs(),
            "lifting": Lifting(local=0),
        }
        return cls(SortedDistances(17 * repetitions - 1), 4 * (repetitions + 1), **{**preset, **options})

    @classmethod
    def springs(cls, **options: Any) -> LieTransformer:
        """Potential of particles on springs, invariant to translations: 841,641 parameters. Inputs are (mass, k)."""
        preset = {
            "space": Euclidean(Translations(2)),
            "neighborhood": AllPairs(),
            "channels": 160,
            "layers": 5,
            "lifting": Lifting(local=0),
            "attention": AttentionOptions(normalize="mean"),
        }
        return cls(2, 1, **{**preset, **options})

    def geometry(self, data: Any, *, generator: torch.Generator | None = None) -> LiftedGraph:
        """Lifted clouds with the coordinates of all pairs.

        In training mode random frames and neighbors that are left out are new at every call, drawn from the generator
        or torch's default one; in eval mode the same data gives the same graph.
        """
        generator = self._generator(generator)
        return self._prepared(self._lifted(data, generator), generator)

    def field(self, data: Any, geometry: LiftedGraph | None = None) -> GroupField:
        """Field behind the last block and its graph.

        Parameters
        ----------
        data
            torch_geometric ``Data`` or ``Batch`` with ``pos`` ``[points, dim]`` and features ``x``
            ``[points, in_channels]`` or what else makes them.
        geometry
            What :meth:`geometry` gives for ``data``; made here if absent.
        """
        graph = self.geometry(data) if geometry is None else geometry
        x = self._embedded(data, graph)
        for block in self.blocks:
            x = block(x, graph)
        return GroupField(x, graph)
