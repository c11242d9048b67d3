"""A network together with the transform of its inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lieattn._core.checks import check_arguments, kind
from lieattn.models._base.inputs import check_data
from lieattn.models._base.network import Wrapper


class Preprocessed(Wrapper):
    """A network together with the transform of its training data, so that it accepts untransformed data.

    **Equivariance.** That of the network, if the transform is invariant (it standardizes features, or computes them
    from nuclear charges) or equivariant (it subtracts the mean of the points).

    Parameters
    ----------
    network
        Called with the transformed data.
    transform
        Called with a ``Data`` or ``Batch``, and returns a new one: ``MoleculeFeatures`` or ``Standardize`` of
        ``lieattn_datasets``, a transform of ``torch_geometric.transforms``, or several in its ``Compose``. If its
        result has no ``pos``, the forward call raises TypeError.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> from torch_geometric.transforms import Constant
    >>> from lieattn.groups import cyclic
    >>> from lieattn.models import FramewiseTransformer
    >>> network = Preprocessed(FramewiseTransformer(cyclic(4), 1, 3, channels=4), Constant(cat=False))
    >>> network(Data(pos=torch.randn(7, 2))).shape
    torch.Size([1, 3])
    """

    def __init__(self, network: nn.Module, transform: Callable[[Any], Any]) -> None:
        check_arguments(Preprocessed.__init__, locals())
        super().__init__(network)
        self.network, self.transform = network, transform

    def geometry(self, data: Any) -> Any:
        """Return ``network.geometry(transform(data))``; AttributeError if the network has no such method."""
        network: Any = self.network
        return network.geometry(self._transformed(data))

    def forward(self, data: Any, geometry: Any = None, **options: Any) -> Any:
        """Return ``network(transform(data), geometry, **options)``, without the geometry if none is given."""
        given = () if geometry is None else (geometry,)
        return self.network(self._transformed(data), *given, **options)

    def _transformed(self, data: Any) -> Any:
        if isinstance(data, Tensor):
            raise TypeError(f"data: expected a torch_geometric Data or Batch, got {kind(data)}")
        check_data(data)
        found = self.transform(data)
        if getattr(found, "pos", None) is None:
            raise TypeError(f"transform: expected data with pos from {self.transform!r}, got {kind(found)}")
        # Some transforms, such as Constant of PyTorch Geometric, put new attributes on the CPU.
        return copy.copy(found).to(found.pos.device) if hasattr(found, "to") else found

    def extra_repr(self) -> str:
        """Return the transform as text."""
        return f"transform={self.transform!r}"
