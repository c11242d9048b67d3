"""Training steps in CUDA graphs."""

from __future__ import annotations

import copy
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lieattn._core.checks import check_arguments
from lieattn._core.machine import processes
from lieattn._core.messages import warn
from lieattn.models._base.inputs import has_geometry
from lieattn.models._base.network import ImageNetwork, Wrapper

_MOST_GRAPHS = 4  # shapes of batches for which graphs are kept
_GEOMETRY = "geometry "  # before the numbers of its tensors
_PATIENCE = 10  # number of steps after which a network that could not be captured warns


class Captured(Wrapper):
    """A network whose training steps on a GPU are replayed as CUDA graphs, for data that differ only in ``inputs``.

    On a GPU, small networks wait for the CPU, which launches hundreds of kernels in each step. A graph launches all of
    them together. A step is captured if its batch and the last one before it that was not replayed agree in shapes and
    in all attributes that are neither in ``inputs`` nor in ``unread``, such as positions and grids of images of one
    size. Other batches, evaluation, other devices, and training on several GPUs are computed as usual, with the same
    results. Networks on images, such as :class:`AttentiveCNN`, may be given tensors as well, and pixels in any order.

    The outputs of one forward pass have to be differentiated, or dropped, before the next one can be replayed; until
    then, it is computed as usual. Outputs can be differentiated once, so forces as gradients of energies cannot be
    captured. Graphs are not copied or saved with the network, and are discarded if weights are moved or frozen.

    **Equivariance.** That of the network.

    Parameters
    ----------
    network
        Called with ``data``, or, if it has the method ``geometry``, with ``data`` and its geometry. RuntimeError is
        raised in the second step if it waits for the GPU, as transforms of PyTorch Geometric may; a transform goes
        around this module, ``Preprocessed(Captured(network), transform)``.
    inputs
        Attributes that differ between batches. ValueError is raised if there is none, or if one is in ``unread``.
    unread
        Attributes that the network does not use, such as labels, which may differ as well.

    Examples
    --------
    >>> import torch
    >>> from lieattn.groups import cyclic
    >>> from lieattn.models import AttentiveCNN
    >>> network = Captured(AttentiveCNN(cyclic(4), channels=2))
    >>> network(torch.randn(2, 1, 28, 28)).shape  # on the CPU as usual
    torch.Size([2, 10])
    """

    def __init__(self, network: nn.Module, inputs: Sequence[str] = ("x",), unread: Sequence[str] = ("y",)) -> None:
        check_arguments(Captured.__init__, locals())
        if not inputs or set(inputs) & set(unread):
            raise ValueError(
                f"inputs: expected names of attributes, at least one and none that is in unread, got {tuple(inputs)} "
                f"beside {tuple(unread)}"
            )
        super().__init__(network)
        self.network, self.inputs, self.unread = network, tuple(inputs), tuple(unread)
        self._known = _Known()

    def geometry(self, data: Any) -> Any:
        """Return ``network.geometry(data)``; AttributeError if the network has no such method."""
        network: Any = self.network
        return network.geometry(data)

    def forward(self, data: Any, geometry: Any = None) -> Any:
        """Return the outputs of ``network(data)``, or of ``network(data, geometry)``."""
        if not self.training or not torch.is_grad_enabled() or not _can_be_captured(self.network):
            return self._plainly(data, geometry)
        if (step := self._step(data, geometry)) is None or self._known.is_open():
            return self._plainly(data, geometry)
        return self._replayed(step, data, geometry)

    def extra_repr(self) -> str:
        """Return the names of the inputs."""
        return f"inputs={self.inputs}, unread={self.unread}"

    def _plainly(self, data: Any, geometry: Any) -> Any:
        return self.network(data) if geometry is None else self.network(data, geometry)

    def _step(self, data: Any, geometry: Any) -> _Step | None:
        """Return the inputs and the constants of a batch, or None if it has to be computed as usual."""
        network = self.network
        if isinstance(network, ImageNetwork) and not (network.vectors.fields or network.cloud_inputs):
            step = _Step({"images": network.images(data).contiguous()}, {})
        elif hasattr(data, "to_dict"):
            constants = {name: value for name, value in data.to_dict().items() if name not in self.unread}
            inputs = {name: constants.pop(name) for name in self.inputs if isinstance(constants.get(name), Tensor)}
            step = _Step(inputs, constants | _named(geometry))
        else:
            return None
        values = (*step.inputs.values(), *step.constants.values())
        watched = any(isinstance(value, Tensor) and value.requires_grad for value in values)
        return None if watched or not step.inputs else step

    def _replayed(self, step: _Step, data: Any, geometry: Any) -> Any:
        if (state := _state(self.network)) != self._known.state:
            self._known = _Known(state)
        known = self._known
        for of, graph in known.graphs:
            if of.difference(step) is None:
                return known.watched(graph(*step.inputs.values()), self.network)
        last, known.last = known.last, step
        known.waited += 1
        differs = "" if last is None else last.difference(step)
        if differs is None and len(known.graphs) < _MOST_GRAPHS:
            if geometry is None and has_geometry(self.network):
                geometry, again = (cast(Any, self.network).geometry(data) for _ in range(2))
                differs = _Step({}, _named(geometry)).difference(_Step({}, _named(again)))
            if differs is None:
                graph = _capture(self.network, step, data, geometry)
                known.graphs.append((step.kept(), graph))
                return known.watched(graph(*step.inputs.values()), self.network)
            geometry = None  # it is random, and each step has its own
        if known.waited == _PATIENCE and not known.graphs:
            warn(
                f"Captured: no step was captured, since batches differ in {differs}; name it in inputs, or in unread "
                f"if the network does not use it. If it does and the shapes differ, or if its geometry is random, the "
                f"network cannot be captured"
            )
        return self._plainly(data, geometry)


class _Known:
    """The graphs of a network, and what is known about its steps; copies know nothing."""

    def __init__(self, state: Any = None) -> None:
        self.state = state
        self.graphs: list[tuple[_Step, Callable[..., Any]]] = []
        self.last: _Step | None = None
        self.waited = 0
        self.node: Any = None  # where the gradients of the last replay begin, until they are computed

    def __reduce__(self) -> tuple[type[_Known], tuple[()]]:
        return _Known, ()

    def watched(self, outputs: Any, network: nn.Module) -> Any:
        """Return copies of the outputs, which the next step does not overwrite, and watch until they are used."""
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.node = weakref.ref(leaf.grad_fn)
                leaf.register_hook(partial(self.close, network))
        return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, outputs)

    def is_open(self) -> bool:
        """Return whether outputs of the last replay are waiting for their gradients."""
        return self.node is not None and self.node() is not None

    def close(self, network: nn.Module, grad: Tensor) -> None:
        """Note that the gradients are being computed; gradients of weights that they are added to become copies.

        Otherwise they may be the memory of the graph, which overwrites them before it adds the new ones.
        """
        self.node = None
        for weight in network.parameters():
            if weight.grad is not None:
                weight.grad = weight.grad.clone()


class _Step:
    """Attributes of a batch: tensors that differ between steps, and all others that the network uses."""

    def __init__(self, inputs: dict[str, Tensor], constants: dict[str, Any]) -> None:
        self.inputs, self.constants = inputs, constants
        tensors = {name: value for name, value in constants.items() if isinstance(value, Tensor)}
        self.versions = {name: value._version for name, value in tensors.items()}

    def kept(self) -> _Step:
        """Return this step with copies, which do not change with the data; geometry is not copied."""
        copied = self.versions.keys() - {name for name in self.versions if name.startswith(_GEOMETRY)}
        constants = {name: value.clone() if name in copied else value for name, value in self.constants.items()}
        return _Step(self.inputs, constants)

    def difference(self, other: _Step) -> str | None:
        """Return the name of an attribute that a graph of this step does not accept, or None."""
        for ours, theirs in ((self.inputs, other.inputs), (self.constants, other.constants)):
            for name in (*ours, *theirs):
                if name not in ours or name not in theirs or _form(ours[name]) != _form(theirs[name]):
                    return name.partition(" ")[0]
        pairs = {name: (self.constants[name], other.constants[name]) for name in self.versions}
        same = {name for name, (one, two) in pairs.items() if one is two}
        if changed := next((name for name in same if self.versions[name] != other.versions[name]), None):
            return changed.partition(" ")[0]
        names = [name for name in pairs if name not in same]
        # One copy from the GPU for all attributes.
        equal = torch.stack([(pairs[name][0] == pairs[name][1]).all() for name in names]).tolist() if names else []
        return next((name.partition(" ")[0] for name, alike in zip(names, equal, strict=True) if not alike), None)


class _Body(nn.Module):
    """The network as a function of the inputs of a step."""

    def __init__(self, network: nn.Module, step: _Step, data: Any, geometry: Any) -> None:
        super().__init__()
        self.network, self.names, self.data, self.geometry = network, tuple(step.inputs), data, geometry

    def forward(self, *inputs: Tensor) -> Any:
        if self.names == ("images",) and isinstance(self.network, ImageNetwork):
            return self.network(inputs[0])
        data = copy.copy(self.data)
        for name, value in zip(self.names, inputs, strict=True):
            data[name] = value
        return self.network(data) if self.geometry is None else self.network(data, self.geometry)


def _capture(network: nn.Module, step: _Step, data: Any, geometry: Any) -> Callable[..., Any]:
    """Return forward and backward pass of a step as CUDA graphs; buffers and random generators do not change."""
    inputs = tuple(value.detach().clone() for value in step.inputs.values())
    buffers = [(buffer, buffer.clone()) for buffer in network.buffers()]
    body = _Body(network, step, data, geometry)  # in training mode, and the network in the modes of its parts
    kind = inputs[0].device.type
    # Weights that autocast converted and keeps would not follow the weights.
    uncached = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), False)
    with torch.random.fork_rng([inputs[0].device]), uncached, warnings.catch_warnings():
        # Torch captures on a stream of its own, and the last step, which may still be alive, was not on it.
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
        try:
            graph: Callable[..., Any] = torch.cuda.make_graphed_callables(body, inputs, allow_unused_input=True)
        except RuntimeError as error:
            error.add_note(f"Captured: {type(network).__name__} cannot be captured; use it without Captured")
            raise
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    return graph


def _can_be_captured(network: nn.Module) -> bool:
    if torch.compiler.is_compiling() or processes() > 1:
        return False
    weights = list(network.parameters())
    return any(weight.requires_grad for weight in weights) and all(weight.is_cuda for weight in weights)


def _state(network: nn.Module) -> tuple[Any, ...]:
    """Return what a graph depends on besides its inputs: where weights are, which are trained, and precision."""
    device = next(network.parameters()).device.type
    places = [(weight.data_ptr(), weight.requires_grad) for weight in (*network.parameters(), *network.buffers())]
    modes = [module.training for module in network.modules()]
    return places, modes, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _named(geometry: Any) -> dict[str, Tensor]:
    """Return all tensors of a geometry, of dataclasses and tuples in it, by names with numbers."""
    values, found = [geometry], dict[str, Tensor]()
    while values:
        value = values.pop()
        if isinstance(value, Tensor):
            found[f"{_GEOMETRY}{len(found)}"] = value
        elif isinstance(value, tuple | list):
            values += value
        elif dataclasses.is_dataclass(value):
            values += [getattr(value, field.name) for field in dataclasses.fields(value)]
    return found


def _form(value: Any) -> Any:
    """Return what must be equal before values are compared: all of it if it is no tensor."""
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else repr(value)
