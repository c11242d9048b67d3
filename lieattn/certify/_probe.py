"""Calls of all kinds of networks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from lieattn._core.checks import counted
from lieattn.certify._moves import Kind, images_of_clouds

REFUSALS = (AssertionError, IndexError, RuntimeError, ValueError)
"""Errors with which networks refuse clouds that their users never pass, such as clouds without edges."""


class Probe:
    """A network in one precision, which is called with clouds and returns outputs by name, in float64 on the CPU.

    The name of an unnamed single output is ``""``. Modules are copied, converted, and set to eval mode; functions are
    called as they are. If one argument of the network is ``pos``, it is called with the attributes of the batch that
    have the names of its arguments; otherwise, with the batch.
    """

    def __init__(self, network: Callable[..., Any], dtype: torch.dtype, as_images: bool) -> None:
        self._given_network = network
        if isinstance(network, nn.Module):
            network = _cast(network, dtype).eval()
        self.network, self.dtype, self.as_images = network, dtype, as_images
        self.names = _named_after_attributes(network)
        if as_images and self.names is not None:
            arguments = ", ".join(self.names)
            raise ValueError(f"network: expected a function of images, which data contains, got one of ({arguments})")
        weights = network.parameters() if isinstance(network, nn.Module) else iter(())
        self.device: torch.device = next((weight.device for weight in weights), torch.device("cpu"))
        self._gradients = False  # whether the network needs gradients, because its forward pass computes derivatives
        self._rounding = dtype

    @property
    def precision(self) -> str:
        """Name of the dtype, such as ``"float64"``."""
        return str(self.dtype).removeprefix("torch.")

    def __call__(self, clouds: Sequence[Data]) -> dict[str, Tensor]:
        try:
            with torch.set_grad_enabled(self._gradients):
                found = self._named(self._given(clouds))
        except RuntimeError as error:
            if self._gradients or "does not require grad" not in str(error):
                raise
            self._gradients = True
            return self(clouds)
        outputs = {name: _real(value.detach()).double().cpu() for name, value in found.items()}
        if "stress" in outputs and len(outputs["stress"]) == len(clouds):  # NaN where it is not defined counts as 0
            flat = torch.tensor([not _has_volume(cloud) for cloud in clouds])
            outputs["stress"][flat] = outputs["stress"][flat].nan_to_num(0.0, torch.inf, -torch.inf)
        return outputs

    def at_once(self, several: Sequence[Sequence[Data]]) -> list[dict[str, Tensor]]:
        """Return the outputs for each of several sequences of clouds of the same sizes, which are one batch."""
        if len(several) == 1:
            return [self(several[0])]
        found = self([cloud for clouds in several for cloud in clouds])
        parts = {name: value.unflatten(0, (len(several), -1)) for name, value in found.items()}
        return [{name: part[number] for name, part in parts.items()} for number in range(len(several))]

    @cached_property
    def double(self) -> Probe:
        """The network in float64."""
        return Probe(self._given_network, torch.float64, self.as_images)

    def rounded(self, dtype: torch.dtype) -> Probe:
        """Return the same network, whose inputs are rounded to a coarser dtype first."""
        other = copy.copy(self)
        other._rounding = dtype
        return other

    def derivatives(self, clouds: Sequence[Data], velocity: Tensor) -> dict[str, Tensor]:
        """Return derivatives ``[clouds]`` of a weighted sum of each output while all points move.

        ``velocity`` ``[points, dim]`` is that of each cloud. Outputs that are not real, or do not depend on the
        positions, are left out.
        """
        given = self._given(clouds)
        pos = given.pos.requires_grad_(True)
        found = {}
        with torch.enable_grad():
            given.pos = pos.clone()  # the network may change its input in place, which is impossible for a leaf
            for name, value in self._named(given).items():
                if not value.is_floating_point():
                    continue
                weights = torch.linspace(0.5, 1.5, value[0].numel(), dtype=value.dtype, device=value.device)
                total = (value.reshape(len(value), -1) @ weights).sum()
                slope = None
                if total.requires_grad:
                    (slope,) = torch.autograd.grad(total, pos, retain_graph=True, allow_unused=True)
                if slope is not None:
                    slope = slope.double().cpu().unflatten(0, (len(clouds), -1))[..., : velocity.shape[1]]
                    found[name] = (slope * velocity).sum(dim=(1, 2))
        return found

    def _given(self, clouds: Sequence[Data]) -> Any:
        def cast(value: Tensor) -> Tensor:
            return value.to(self._rounding).to(self.dtype) if value.is_floating_point() else value

        given = [copy.copy(cloud).apply(cast) for cloud in clouds]
        return (images_of_clouds(given) if self.as_images else Batch.from_data_list(given)).to(self.device)

    def _named(self, given: Any) -> dict[str, Tensor]:
        outputs: Any = self.network(given) if self.names is None else self._by_name(given)
        outputs = outputs._asdict() if hasattr(outputs, "_asdict") else outputs
        named = dict(outputs) if isinstance(outputs, Mapping) else {"": outputs}
        for name, value in named.items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"network: expected a tensor, or a mapping or named tuple of tensors, got {type(value).__name__} "
                    f"{name}".rstrip()
                )
        if not named:
            raise ValueError("network: expected outputs, got an empty mapping")
        return named

    def _by_name(self, batch: Batch) -> Any:
        arguments = {}
        for name, required in (self.names or {}).items():
            if batch.get(name) is not None:
                arguments[name] = batch[name]
            elif required:
                known = sorted(batch.keys())
                raise ValueError(
                    f"data: expected {name!r}, which is an argument of the network, got clouds with {known}"
                )
        return self.network(**arguments)


def _cast(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a network in another precision."""
    memo: dict[int, Any] = {}
    for module in network.modules():
        memo |= {id(value): value.detach().clone() for value in _results(vars(module))}
    network = copy.deepcopy(network, memo)
    if not any(value.is_complex() for value in (*network.parameters(), *network.buffers())):
        return network.to(dtype)
    # For complex weights, ``to`` would drop the imaginary part.
    complex_dtype = dtype.to_complex()

    def cast(value: Tensor) -> Tensor:
        return (
            value.to(complex_dtype) if value.is_complex() else value.to(dtype) if value.is_floating_point() else value
        )

    return network._apply(cast)


def _results(value: Any) -> Iterator[Tensor]:
    """Yield the results of operations that a module has stored. Their autograd graphs cannot be copied."""
    if isinstance(value, Tensor):
        if not value.is_leaf:
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _results(part)


def _real(value: Tensor) -> Tensor:
    """Convert complex outputs ``[rows, *]`` to real ones ``[rows, 2, *]``, which transform in the same way."""
    if not value.is_complex():
        return value
    return torch.view_as_real(value.resolve_conj()).movedim(-1, min(1, value.ndim))


class FromCalculator:
    """An ASE calculator as a function of a batch.

    It returns energies ``[clouds]``, forces ``[points, 3]`` and stresses ``[clouds, 3, 3]``, which are NaN for clouds
    that are not periodic along three vectors, and left out if no cloud is. Atoms have the positions ``data.pos``, the
    elements ``data.z`` (hydrogen if absent), and ``cell`` and ``pbc``. Their ``info`` has the other attributes that
    are one number for each cloud, such as a charge.
    """

    def __init__(self, calculator: Any, clouds: Sequence[Data]) -> None:
        self.calculator = calculator
        given = set(calculator.implemented_properties)
        if not any(map(_has_volume, clouds)):
            given.discard("stress")
        kinds: dict[str, Kind] = {"energy": "invariant", "forces": "vector", "stress": "tensor"}
        self.kind = {name: kind for name, kind in kinds.items() if name in given}
        if "energy" not in self.kind:
            raise ValueError(
                f"network: expected a calculator that computes energies, got one that computes {sorted(given)}"
            )

    def __call__(self, data: Batch) -> dict[str, Tensor]:
        from ase import Atoms

        found: dict[str, list[Tensor]] = {name: [] for name in self.kind}
        for cloud in data.to_data_list():
            z, pos = cloud.get("z"), cloud.pos.detach().numpy()
            info = {name: value.item() for name, value in cloud if isinstance(value, Tensor) and value.shape == (1,)}
            atoms = Atoms(numbers=[1] * len(pos) if z is None else z.tolist(), positions=pos, info=info)
            if cloud.get("cell") is not None:
                atoms.cell = cloud.cell.view(3, 3).numpy()
                atoms.pbc = True if cloud.get("pbc") is None else cloud.pbc.view(3).numpy()
            atoms.calc = self.calculator
            found["energy"].append(torch.tensor([atoms.get_potential_energy()], dtype=torch.float64))
            if "forces" in found:
                found["forces"].append(torch.tensor(atoms.get_forces(), dtype=torch.float64))
            if "stress" in found:
                stress = atoms.get_stress(voigt=False) if _has_volume(cloud) else np.full((3, 3), np.nan)
                found["stress"].append(torch.tensor(stress, dtype=torch.float64)[None])
        return {name: torch.cat(values) for name, values in found.items()}


def _has_volume(cloud: Data) -> bool:
    """Return whether a cloud is periodic along three vectors, so that its stress is defined."""
    cell, pbc = cloud.get("cell"), cloud.get("pbc")
    return cell is not None and (pbc is None or bool(pbc.all()))


def is_calculator(network: object) -> bool:
    """Return whether this is an ASE calculator. ASE may be absent."""
    return hasattr(network, "get_potential_energy") and hasattr(network, "implemented_properties")


def _named_after_attributes(network: Callable[..., Any]) -> dict[str, bool] | None:
    """Return which arguments are required if a network takes attributes, and None if it takes a batch."""
    function = network.forward if isinstance(network, nn.Module) else network
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    named = {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if "pos" not in named and sum(named.values()) > 1:
        expected = "expected one argument, a batch, or arguments with the names of attributes of the data, such as pos"
        raise ValueError(f"network: {expected}, got a function of ({', '.join(named)}); put a module around it")
    return named if "pos" in named else None


def possible_kinds(values: Tensor, dim: int) -> list[Kind]:
    """Return the kinds that outputs of this shape may have, starting with the most common."""
    kinds: list[Kind] = ["invariant"]
    if values.ndim > 1 and values.shape[-1] == dim:
        kinds += ["vector", "position", *(["pseudovector"] if dim == 3 else [])]
    if values.ndim > 2 and values.shape[-2:] == (dim, dim):
        kinds += ["tensor"]
    return [*kinds, "pseudoscalar"]


def checked_outputs(outputs: Mapping[str, Tensor], sizes: Tensor) -> Mapping[str, Tensor]:
    """Return outputs by name, or raise ValueError unless each has a row for each cloud or for each point."""
    clouds, points = len(sizes), int(sizes.sum())
    for name, value in outputs.items():
        if value.ndim == 0 or len(value) not in (clouds, points) or value.numel() == 0:
            what = f"output {name!r}" if name else "an output"
            of = f"{counted(clouds, 'cloud')} and {counted(points, 'point')}"
            got = tuple(value.shape)
            raise ValueError(f"network: expected {what} [clouds, *] or [points, *] with {of}, got {got}")
    return outputs
