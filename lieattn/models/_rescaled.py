"""Outputs in the units of the data, which the module around the network knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lieattn._checks import check_arguments, check_choice, check_number
from lieattn.models._network import Wrapper


class Rescaled(Wrapper):
    r"""A network with its outputs in the units of the data: shift + scale times what it gives.

    The numbers are buffers, so they go where the network goes. It is what ``task.model`` of a
    :class:`lieattn.train.PointSetRegressor` is, with the statistics of its training set.

    **Equivariance.** That of the network; only invariant numbers can have a shift.

    Parameters
    ----------
    network
        ``network(data)`` gives a tensor, or several by name: a mapping or a named tuple.
    scale, shift
        By the name of the output, numbers or tensors that broadcast to it, in the units of the data; shift 0 where it
        is absent. A tensor without a name takes the only entry. Outputs without a scale are left out.

    Examples
    --------
    >>> import torch
    >>> Rescaled(torch.nn.Identity(), {"y": 2.0}, {"y": 1.0})(torch.tensor([0.0, 3.0]))
    tensor([1., 7.])
    """

    def __init__(
        self, network: nn.Module, scale: Mapping[str, Tensor | float], shift: Mapping[str, Tensor | float] | None = None
    ) -> None:
        check_arguments(Rescaled.__init__, locals())
        super().__init__(network)
        shift = shift or {}
        if not scale or not shift.keys() <= scale.keys():
            raise ValueError(f"scale: expected one for each output, also for {sorted(shift)}, got {sorted(scale)}")
        for argument, numbers in (("scale", scale), ("shift", shift)):
            for name, number in numbers.items():
                if not isinstance(name, str) or not name.isidentifier():
                    raise ValueError(f"{argument}: expected names of outputs, got {name!r}")
                if not isinstance(number, Tensor):
                    check_number(f"{argument}[{name!r}]", number)
        self.network, self.names = network, tuple(scale)
        for name in self.names:
            self.register_buffer(f"shift_{name}", torch.as_tensor(shift.get(name, 0.0)))
            self.register_buffer(f"scale_{name}", torch.as_tensor(scale[name]))

    @property
    def kind(self) -> Any:
        """That of the network."""
        return getattr(self.network, "kind", "invariant")

    def units(self, name: str) -> tuple[Tensor, Tensor]:
        """Scale and shift of an output."""
        check_choice("name", name, self.names)
        return self.get_buffer(f"scale_{name}"), self.get_buffer(f"shift_{name}")

    def forward(self, data: Any, **options: Any) -> Any:
        """Outputs of ``network(data, **options)`` in the units of the data."""
        found = self.network(data, **options)
        if isinstance(found, Tensor):
            if len(self.names) > 1:
                raise ValueError(f"network: expected a mapping with {sorted(self.names)}, got a tensor")
            return self._rescaled(self.names[0], found)
        outputs = found._asdict() if hasattr(found, "_asdict") else dict(found)
        if missing := set(self.names) - set(outputs):
            raise ValueError(f"network: gives {sorted(outputs)}, but {sorted(missing)} are to be learned")
        rescaled = {name: self._rescaled(name, outputs[name]) for name in self.names}
        return type(found)(**rescaled) if hasattr(found, "_asdict") and rescaled.keys() == outputs.keys() else rescaled

    def _rescaled(self, name: str, output: Tensor) -> Tensor:
        scale, shift = self.units(name)
        return shift.to(output) + scale.to(output) * output
