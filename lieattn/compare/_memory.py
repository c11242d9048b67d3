"""Peak memory of a training step, measured in a process of its own."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from torch import Tensor, nn
from torch_geometric.data import Batch

from lieattn.bench import peak_memory
from lieattn.compare._settings import Spec
from lieattn.train import build


def training_memory(network: Spec, batch: Batch) -> float:
    """Peak resident memory in MiB of a forward and backward pass above that before it, on the CPU.

    Weights, gradients and the state of the optimizer are in the memory before; NaN where the system does not tell.
    """
    # As bytes, since tensors sent to another process would need shared memory.
    return peak_memory(partial(_problem, network, pickle.dumps(batch)))


def scalar(outputs: Tensor | Mapping[str, Tensor]) -> Tensor:
    """A number that depends on all outputs, to start a backward pass from."""
    parts = outputs.values() if isinstance(outputs, Mapping) else [outputs]
    return sum((part.square().mean() for part in parts), start=Tensor([0.0]).to(next(iter(parts)))).sum()


def _problem(network: Spec, batch: bytes) -> Callable[[], Iterator[Tensor]]:
    return partial(_step, build(nn.Module, network, "the network"), pickle.loads(batch))


def _step(network: nn.Module, batch: Batch) -> Iterator[Tensor]:
    yield scalar(network(batch))
