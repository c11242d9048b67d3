"""Outputs in the units of the data, which the module around the network knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lieattn._checks import check_arguments, check_choice, check_number
from lieattn.geometry import point_clouds
from lieattn.models._network import Wrapper


class Rescaled(Wrapper):
    r"""A network with outputs in the units of the data: shift + scale times the output of another network.

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
    extensive
        Names of outputs ``[clouds]`` or ``[clouds, numbers]`` that are sums over the points, whose shift is one for
        each point.

    Examples
    --------
    >>> import torch
    >>> Rescaled(torch.nn.Identity(), {"y": 2.0}, {"y": 1.0})(torch.tensor([0.0, 3.0]))
    tensor([1., 7.])
    """

    def __init__(
        self,
        network: nn.Module,
        scale: Mapping[str, Tensor | float],
        shift: Mapping[str, Tensor | float] | None = None,
        extensive: Sequence[str] = (),
    ) -> None:
        check_arguments(Rescaled.__init__, locals())
        super().__init__(network)
        shift = shift or {}
        if not scale or not shift.keys() <= scale.keys():
            raise ValueError(f"scale: expected all outputs, with {sorted(shift)} of shift, got {sorted(scale)}")
        for argument, numbers in (("scale", scale), ("shift", shift)):
            for name, number in numbers.items():
                if not isinstance(name, str) or not name.isidentifier():
                    raise ValueError(f"{argument}: expected names of outputs, got {name!r}")
                if not isinstance(number, Tensor):
                    check_number(f"{argument}[{name!r}]", number)
        if unknown := set(extensive) - set(scale):
            raise ValueError(f"extensive: {sorted(unknown)} are not among the outputs {sorted(scale)}")
        self.network, self.names, self.extensive = network, tuple(scale), tuple(extensive)
        for name in self.names:
            # Copies, since load_state_dict writes into buffers.
            self.register_buffer(f"shift_{name}", torch.as_tensor(shift.get(name, 0.0)).clone())
            self.register_buffer(f"scale_{name}", torch.as_tensor(scale[name]).clone())

    @property
    def kind(self) -> Any:
        """That of the network."""
        return getattr(self.network, "kind", "invariant")

    def units(self, name: str) -> tuple[Tensor, Tensor]:
        """Scale and shift of an output; the shift is that of a point where the output is extensive."""
        check_choice("name", name, self.names)
        return self.get_buffer(f"scale_{name}"), self.get_buffer(f"shift_{name}")

    def geometry(self, data: Any) -> Any:
        """That of the network; AttributeError if it has none."""
        network: Any = self.network
        return network.geometry(data)

    def forward(self, data: Any, **options: Any) -> Any:
        """Outputs of ``network(data, **options)`` in the units of the data."""
        found = self.network(data, **options)
        if isinstance(found, Tensor):
            if len(self.names) > 1:
                raise ValueError(f"network: expected a mapping with {sorted(self.names)} as output, got a tensor")
            return self._rescaled(self.names[0], found, data)
        outputs = found._asdict() if hasattr(found, "_asdict") else dict(found)
        if missing := set(self.names) - set(outputs):
            raise ValueError(f"network: has outputs {sorted(outputs)}, but {sorted(missing)} are missing")
        rescaled = {name: self._rescaled(name, outputs[name], data) for name in self.names}
        return type(found)(**rescaled) if hasattr(found, "_asdict") and rescaled.keys() == outputs.keys() else rescaled

    def shift_of(self, name: str, output: Tensor, data: Any) -> Tensor:
        """The shift of an output of the network, which broadcasts to it: that of its points where it is extensive."""
        shift = self.units(name)[1].to(output)
        if name not in self.extensive:
            return shift
        counts = _points_of_clouds(data, len(output)).to(output)
        if len(counts) != len(output):
            found = tuple(output.shape)
            raise ValueError(f"extensive: expected one {name} for each of {len(counts)} clouds, got {found}")
        return shift * counts.view(-1, *[1] * (output.ndim - 1))

    def _rescaled(self, name: str, output: Tensor, data: Any) -> Tensor:
        return self.shift_of(name, output, data) + self.units(name)[0].to(output) * output


def _points_of_clouds(data: Any, clouds: int) -> Tensor:
    """``[clouds]``, the number of points of each cloud. Compiled code, which cannot look at them, is told how many."""
    if not torch.compiler.is_compiling():
        return point_clouds(data).counts
    batch, ptr = getattr(data, "batch", None), getattr(data, "ptr", None)
    if ptr is not None:
        return torch.diff(ptr)
    if batch is None:
        return torch.full((1,), len(data.pos), device=data.pos.device)
    return batch.new_zeros(clouds).index_add(0, batch, torch.ones_like(batch))
