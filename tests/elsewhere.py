"""Tensors that pretend to be on another device, for tests of devices without one.

Their device is ``meta``, but they have numbers, which are on the CPU. An operation on tensors of both devices raises
RuntimeError, as it would for a GPU, and copies between the devices work.
"""

from collections.abc import Iterable

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")


class Elsewhere(torch.Tensor):
    """A tensor whose numbers are in ``here``, a tensor on the CPU."""

    @staticmethod
    def __new__(cls, here):
        facts = {"strides": here.stride(), "storage_offset": here.storage_offset(), "dtype": here.dtype}
        tensor = torch.Tensor._make_wrapper_subclass(cls, here.shape, device=DEVICE, **facts)
        tensor.here = here
        return tensor

    def __repr__(self):
        return f"Elsewhere({self.here})"

    def tolist(self):
        return self.here.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})


class _FromNumbers(TorchFunctionMode):
    """Creates tensors from numbers, which torch does without an operation."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        numbers = func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor)
        if numbers and torch.device(kwargs.get("device") or "cpu") == DEVICE:
            return Elsewhere(func(*args, **kwargs | {"device": "cpu"}))
        return func(*args, **kwargs)


class Device(TorchDispatchMode):
    """A block in which tensors can be created on, and moved to, the other device."""

    def __enter__(self):
        self.numbers = _FromNumbers()
        self.numbers.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.numbers.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})


def computed(func, args, kwargs):
    """Return the result of an operation, on the other device if its operands or its argument ``device`` are there."""
    tensors = list(tensors_of((args, kwargs.values())))
    there = any(isinstance(t, Elsewhere) for t in tensors)
    device = kwargs.get("device")
    if device is not None:
        kwargs = kwargs | {"device": "cpu"}
    name = func._opname
    copies = name in ("_to_copy", "copy_", "lift_fresh", "set_data")
    # Index tensors on the CPU are allowed, and so are numbers.
    strangers = [t for t in tensors if not isinstance(t, Elsewhere) and t.ndim > 0]
    if there and strangers and not copies and name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        raise RuntimeError(f"{func}: operands on two devices, {[tuple(t.shape) for t in strangers]} on the CPU")
    if there:
        args, kwargs = replaced(args, numbers_of), {key: replaced(v, numbers_of) for key, v in kwargs.items()}
    found = func(*args, **kwargs)
    there = there if device is None else torch.device(device) == DEVICE
    if not there:
        return found
    inputs = {id(t.here): t for t in tensors if isinstance(t, Elsewhere)}
    return replaced(found, lambda t: inputs[id(t)] if id(t) in inputs else Elsewhere(t))


def numbers_of(tensor):
    return tensor.here if isinstance(tensor, Elsewhere) else tensor


def tensors_of(values):
    """Yield the tensors among operands, which torch flattens more slowly than it computes small results."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Iterable) and not isinstance(value, str):
            yield from tensors_of(value)


def replaced(value, change):
    """Return operands or results with other tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return type(value)([replaced(part, change) for part in value]) if isinstance(value, list | tuple) else value


def moved(network):
    """Move a network to the other device, in place."""
    for module in network.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                there = torch.nn.Parameter(Elsewhere(weight.detach()), requires_grad=weight.requires_grad)
                module._parameters[name] = there
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = Elsewhere(buffer)
    return network
