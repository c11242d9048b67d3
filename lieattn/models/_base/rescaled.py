"""A module that converts the outputs of a network to the units of the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lieattn._core.checks import (
    check_arguments,
    check_choice,
    check_number,
    check_tensor,
    kind,
    may_read_values,
    shown,
)
from lieattn._core.numerics import WideStatistics, counts
from lieattn.geometry import point_clouds
from lieattn.models._base.network import Wrapper
from lieattn.reps import DirectSum, Irreps, Multiple, Representation, Scalar

_TURNING = ("vector", "position", "pseudovector", "pseudoscalar", "tensor", "rotation")


class Rescaled(WideStatistics, Wrapper):
    r"""A network with outputs in the units of the data: shift + scale times the output of another network.

    Scales and shifts are buffers, so they are moved and saved with the network. They and the outputs are at least
    float32, also if the network is cast to half precision; energies with ``references`` are float64. ``task.model`` of
    a :class:`lieattn.train.PointSetRegressor` is of this class, with the statistics of its training set.

    **Equivariance.** That of the network. Only invariant numbers can have a shift, and all components of a vector have
    the same scale. Positions have the scale 1, because others would change how they move with the points.

    Parameters
    ----------
    network
        ``network(data)`` returns a tensor, or several tensors by name: a mapping or a named tuple.
    scale, shift
        For each output, by name, a number or a tensor that broadcasts to it, in the units of the data; the default
        shift is 0. If the network returns a single tensor, there must be one entry, with any name. Outputs without a
        scale are left out.
    extensive
        Names of outputs ``[clouds]`` or ``[clouds, numbers]`` that are sums over the points. Their shift is multiplied
        by the number of points of the cloud.
    references
        For outputs ``[clouds]`` or ``[clouds, 1]``, by name, a table ``[elements, 2]``: the numbers z of elements in
        ``data.z``, and what each point with this z adds to the output, such as the energy of its atom.

    Raises
    ------
    ValueError
        If names or elements are unknown, or if an output that changes under rotations according to ``network.kind`` has
        a shift or components with different scales, or positions have another scale than 1. Components of a sum of
        representations may differ, since some of them may be invariant.

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
        references: Mapping[str, Tensor] | None = None,
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
        _check_sums(extensive, references := dict(references or {}), scale)
        kinds = _kinds(network, scale)
        for name in self.turning(network, scale):
            _check_turning(name, kinds[name], torch.as_tensor(scale[name]), torch.as_tensor(shift.get(name, 0.0)))
        self.network, self.names, self.extensive = network, tuple(scale), tuple(extensive)
        self.tied = {"extensive": repr(tuple(sorted(extensive)))}  # the shifts depend on it
        for name in self.names:
            # Copied, because load_state_dict writes into buffers.
            self.register_buffer(f"shift_{name}", torch.as_tensor(shift.get(name, 0.0)).clone())
            self.register_buffer(f"scale_{name}", torch.as_tensor(scale[name]).clone())
            self.register_buffer(f"references_{name}", references[name].clone() if name in references else None)

    @staticmethod
    def turning(network: object, names: Iterable[str]) -> list[str]:
        """Return those of the named outputs that change under rotations according to ``network.kind``."""
        kinds = _kinds(network, names)
        return [name for name, one in kinds.items() if any(map(_turns, one if isinstance(one, tuple) else (one,)))]

    @staticmethod
    def placed(network: object, names: Iterable[str]) -> list[str]:
        """Return those of the named outputs that are positions, or contain some, according to ``network.kind``."""
        return [name for name, one in _kinds(network, names).items() if _is_placed(one)]

    @property
    def kind(self) -> Any:
        """Kind of the outputs of the network; without those that are left out, if they have names."""
        found = super().kind
        return {name: found[name] for name in self.names if name in found} if isinstance(found, Mapping) else found

    def units(self, name: str) -> tuple[Tensor, Tensor]:
        """Return scale and shift of an output; for extensive outputs the shift is that of a single point."""
        check_choice("name", name, self.names)
        return self.get_buffer(f"scale_{name}"), self.get_buffer(f"shift_{name}")

    def references(self, name: str) -> Tensor | None:
        """Return the table ``[elements, 2]`` of an output, or None if it has none."""
        check_choice("name", name, self.names)
        return self._buffers[f"references_{name}"]

    @staticmethod
    def sum_over_atoms(table: Tensor, data: Any, clouds: int) -> Tensor:
        """Return the sum of the entries of a table for the atoms of each cloud, ``[clouds]`` in float64.

        ValueError is raised for elements without an entry.
        """
        z = getattr(data, "z", None)
        if not isinstance(z, Tensor) or z.ndim != 1:
            raise ValueError(f"data.z: expected elements [points], to which references belong, got {shown(z)}")
        table = table.double().to(z.device)
        same = z[:, None] == table[:, 0]
        if may_read_values(z) and bool((alone := ~same.any(dim=1)).any()):
            known = [int(number) for number in table[:, 0]]
            raise ValueError(f"data.z: expected elements with references, {known}, got {int(z[alone][0])}")
        batch = getattr(data, "batch", None)
        batch = torch.zeros_like(z) if batch is None else batch
        return table.new_zeros(clouds).index_add(0, batch, (same * table[:, 1]).sum(dim=1))

    def _parts(self) -> list[tuple[str, str, str]]:
        rows = super()._parts()
        for name in self.names:
            if (table := self.references(name)) is not None:
                numbers = ", ".join(f"{int(z)}: {value:.6g}" for z, value in table.tolist())
                rows.append((f"references of {name}", f"{{{numbers}}}", ""))
        return rows

    def geometry(self, data: Any) -> Any:
        """Return ``network.geometry(data)``; AttributeError if the network has no such method."""
        network: Any = self.network
        return network.geometry(data)

    def forward(self, data: Any, geometry: Any = None, **options: Any) -> Any:
        """Return the outputs of ``network(data, geometry, **options)`` in the units of the data.

        They are at least float32, since a shift can be much larger than the outputs of the network. The geometry is
        left out if there is none. ValueError is raised if an output is missing, or an extensive output does
        not have one entry per cloud.
        """
        found = self.network(data, *(() if geometry is None else (geometry,)), **options)
        if isinstance(found, Tensor):
            if len(self.names) > 1:
                raise ValueError(f"network: expected a mapping with {sorted(self.names)} as output, got a tensor")
            return self.in_units(self.names[0], found, data)
        outputs = found._asdict() if hasattr(found, "_asdict") else found
        if not isinstance(outputs, Mapping):
            raise TypeError(f"network: expected a tensor, a mapping or a named tuple as output, got {kind(found)}")
        if missing := set(self.names) - set(outputs):
            raise ValueError(f"network: has outputs {sorted(outputs)}, but {sorted(missing)} are missing")
        rescaled = {name: self.in_units(name, outputs[name], data) for name in self.names}
        return type(found)(**rescaled) if hasattr(found, "_asdict") and rescaled.keys() == outputs.keys() else rescaled

    def shift_of(self, name: str, output: Tensor, data: Any) -> Tensor:
        """Return the shift of an output of the network, which broadcasts to it; extensive ones sum over the points.

        It includes references, in float64. ValueError is raised for elements without one.
        """
        shift, axes = self.units(name)[1].to(output), [1] * (output.ndim - 1)
        if name in self.extensive:
            counts = _points_of_clouds(data, len(output)).to(output)
            if len(counts) != len(output):
                found = tuple(output.shape)
                raise ValueError(f"extensive: expected one {name} for each of {len(counts)} clouds, got {found}")
            shift = shift * counts.view(-1, *axes)
        if (table := self.references(name)) is None:
            return shift
        return shift + self.sum_over_atoms(table, data, len(output)).to(output.device).view(-1, *axes)

    def in_units(self, name: str, output: Tensor, data: Any) -> Tensor:
        """Return an output of the network in the units of the data, at least in float32."""
        # Half precision would round energies that are far from 0.
        output = output.to(torch.promote_types(output.dtype, torch.float32))
        return self.shift_of(name, output, data) + self.units(name)[0].to(output) * output


def _check_sums(extensive: Sequence[str], references: Mapping[str, Tensor], outputs: Iterable[str]) -> None:
    """Raise ValueError for names that are no outputs, and tables that do not have an element and a number in a row."""
    for argument, names in (("extensive", extensive), ("references", references)):
        if unknown := set(names) - set(outputs):
            raise ValueError(f"{argument}: {sorted(unknown)} are not among the outputs {sorted(outputs)}")
    for name, table in references.items():
        check_tensor(f"references[{name!r}]", table, "a floating tensor")
        if table.ndim != 2 or table.shape[1] != 2:
            raise ValueError(f"references[{name!r}]: expected a table [elements, 2], got {tuple(table.shape)}")


def _kinds(network: object, names: Iterable[str]) -> dict[str, Any]:
    """Return the kind of each named output, or None if the network does not state it."""
    stated = getattr(network, "kind", "invariant")
    return {name: stated.get(name) if isinstance(stated, Mapping) else stated for name in names}


def _turns(kind: Any) -> bool:
    return kind in _TURNING if isinstance(kind, str) else isinstance(kind, Representation) and kind != Scalar()


def _is_placed(kind: Any) -> bool:
    return "position" in kind if isinstance(kind, tuple) else kind == "position"


def _check_turning(name: str, kind: Any, scale: Tensor, shift: Tensor) -> None:
    """Raise ValueError if an output that changes under rotations would no longer be equivariant."""
    for argument, numbers in (("scale", scale), ("shift", shift)):
        by_component = numbers.ndim > 0 and numbers.shape[-1] > 1
        if numbers.is_meta or (by_component and isinstance(kind, DirectSum | Multiple | Irreps)):
            continue
        if argument == "shift" and bool(numbers.any()):
            raise ValueError(f"shift[{name!r}]: expected 0 or none, since {name} turns with the points, got {shift}")
        if argument == "scale" and by_component and bool((numbers != numbers[..., :1]).any()):
            raise ValueError(f"scale[{name!r}]: expected one for all components of {name}, which turns, got {scale}")
    if _is_placed(kind) and not scale.is_meta and bool((scale != 1).any()):
        raise ValueError(f"scale[{name!r}]: expected 1, since {name} moves with the points, got {scale}")


def _points_of_clouds(data: Any, clouds: int) -> Tensor:
    """Return the number of points of each cloud, ``[clouds]``.

    Data are checked where checks may read them. Elsewhere the number of clouds cannot be read from the data, so it is
    an argument.
    """
    pos, batch, ptr = (getattr(data, name, None) for name in ("pos", "batch", "ptr"))
    if not isinstance(pos, Tensor) or may_read_values(pos):
        return point_clouds(data).counts
    if ptr is not None:
        return torch.diff(ptr)
    if batch is None:
        return torch.full((1,), len(pos), device=pos.device)
    return counts(batch, clouds)
