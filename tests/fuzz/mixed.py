"""Lists of clouds that differ in their attributes and periodic directions: a batch is its clouds, or is refused."""

from __future__ import annotations

import functools
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch_geometric.data import Data

from lieattn.geometry import Radius
from lieattn.models import EnergyForces
from lieattn.models.irreps import DistanceTransformer
from lieattn.testing import randomize
from lieattn.train import PointSetData
from tests.fuzz._target import Finding, Target, Verdict, named

_ATTRIBUTES: dict[str, list[Any]] = {
    "y": [None, 1, 2.5, torch.ones(1), torch.ones(1).double(), torch.ones(1, 2), "one"],
    "y_mask": [None, torch.tensor([False])],
    "weight": [None, torch.ones(1)],
    "charge": [None, 1.0, torch.ones(1)],
}


@functools.cache
def _model() -> nn.Module:
    network = DistanceTransformer(1, 1, neighborhood=Radius(1.7), channels=4, layers=1, heads=2, pool="sum")
    return EnergyForces(randomize(network).double(), stress=True).eval()


@st.composite
def _cases(draw: st.DrawFn) -> Any:
    mixed = draw(st.sets(st.sampled_from(sorted(_ATTRIBUTES)), max_size=1))
    kinds = st.tuples(st.integers(1, 5), st.sampled_from(["none", "all", *range(8)]), st.integers(0, 2**31))
    clouds = draw(st.lists(kinds, min_size=2, max_size=4))
    return clouds, [{name: draw(st.integers(0, len(_ATTRIBUTES[name]) - 1)) for name in sorted(mixed)} for _ in clouds]


def _cloud(kind: tuple[int, Any, int], attributes: dict[str, int]) -> Data:
    points, periodic, seed = kind
    generator = torch.Generator().manual_seed(seed)
    pos = 2 * torch.rand(points, 3, generator=generator, dtype=torch.float64)
    data = Data(x=torch.ones(points, 1).double(), pos=pos, y=torch.ones(1))
    if periodic != "none":
        data.cell = (2.0 * torch.eye(3) + 0.3 * torch.rand(3, 3, generator=generator)).double()[None]
    if isinstance(periodic, int):
        data.pbc = torch.tensor([[bool(periodic & 1), bool(periodic & 2), bool(periodic & 4)]])
    return data.update({name: _ATTRIBUTES[name][choice] for name, choice in attributes.items()})


def _check(case: Any) -> Finding | Verdict:
    clouds = [_cloud(kind, attributes) for kind, attributes in zip(*case, strict=True)]
    alone = [_model()(cloud) for cloud in clouds]
    try:
        (batch,) = PointSetData(clouds, batch_size=len(clouds), shuffle=False).train_dataloader()
    except ValueError as error:
        return Verdict.NAMED if named(error, *(f"data.{name}:" for name in case[1][0])) else Verdict.UNNAMED
    for name, found in _model()(batch)._asdict().items():
        expected = torch.cat([getattr(one, name) for one in alone])
        if not torch.allclose(found, expected, rtol=1e-8, atol=1e-9, equal_nan=True):
            return Finding(Verdict.SILENT, f"{name} in a batch is not that of its clouds: {case}")
    return Verdict.CORRECT


TARGETS = {"mixed": Target("lists of different clouds", _cases(), _check, long=2000)}
