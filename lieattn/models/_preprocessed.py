"""A network together with what its inputs need first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lieattn._checks import check_arguments, kind
from lieattn.models._network import Wrapper


class Preprocessed(Wrapper):
    """A network together with the transform of its training data, so that it takes data without transforms.

    **Equivariance.** That of the network, if the transform sees what the group leaves alone (features that are
    standardized or made of nuclear charges), or turns along (means of points).

    Parameters
    ----------
    network
        Called with the data that the transform gives.
    transform
        Called with a ``Data`` or ``Batch``, gives a new one: ``MoleculeFeatures`` or ``Standardize`` of
        ``lieattn_datasets``, those of ``torch_geometric.transforms``, or several in its ``Compose``. TypeError is
        raised, when it is called, if it gives none.

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

    @property
    def kind(self) -> Any:
        """That of the network."""
        return getattr(self.network, "kind", "invariant")

    def forward(self, data: Any, **options: Any) -> Any:
        """Outputs of ``network(transform(data), **options)``."""
        found = self.transform(data)
        if getattr(found, "pos", None) is None:
            raise TypeError(f"transform: expected data with pos from {self.transform!r}, got {kind(found)}")
        return self.network(found, **options)

    def extra_repr(self) -> str:
        """The transform."""
        return f"transform={self.transform!r}"
