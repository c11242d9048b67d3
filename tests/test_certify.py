"""Certificates: what they measure, that they can fail, and that they tell the truth about it."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import global_add_pool, global_mean_pool

from lieattn.certify import certify
from lieattn.groups import FiniteGroup, cyclic, dihedral, octahedral, tetrahedral


class Pairs(nn.Module):
    """Mean over the pairs of a cloud of a function of the difference: invariant if the function is."""

    guarantee = "invariant to translations and to what keeps the function"

    def __init__(self, group: FiniteGroup | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        if group is not None:
            self.group = group
        self.mlp = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))

    def feature(self, difference: torch.Tensor) -> torch.Tensor:
        return difference.norm(dim=1, keepdim=True)

    def forward(self, data: Batch) -> torch.Tensor:
        i, j = (data.batch[:, None] == data.batch[None, :]).nonzero(as_tuple=True)
        found = self.feature(data.pos[i] - data.pos[j])
        return global_mean_pool(self.mlp(torch.cat([data.x[j], found], dim=1)), data.batch[i])


class Squares(Pairs):
    """Sees |x| + |y| of a difference, which quarter turns keep and eighth turns do not."""

    def feature(self, difference: torch.Tensor) -> torch.Tensor:
        return difference.abs().sum(dim=1, keepdim=True)


class Absolute(Pairs):
    """Sees distances from the origin: not invariant to translations."""

    def forward(self, data: Batch) -> torch.Tensor:
        radius = data.pos.norm(dim=1, keepdim=True)
        return global_mean_pool(self.mlp(torch.cat([data.x, radius], dim=1)), data.batch)


class FirstPoint(Pairs):
    """Looks at the first point of each cloud: depends on the order of the points."""

    def forward(self, data: Batch) -> torch.Tensor:
        return super().forward(data) + data.x[data.ptr[:-1]]


class Leaking(Pairs):
    """Subtracts a mean over the whole batch."""

    def forward(self, data: Batch) -> torch.Tensor:
        return super().forward(data) - data.x.mean()


class NotANumber(Pairs):
    def forward(self, data: Batch) -> torch.Tensor:
        return super().forward(data) * float("nan")


class PerPoint(Pairs):
    def forward(self, data: Batch) -> torch.Tensor:
        return data.x


def clouds(dim: int = 2, number: int = 3, seed: int = 0) -> list[Data]:
    generator = torch.Generator().manual_seed(seed)
    sizes = range(4, 4 + number)
    return [
        Data(
            x=torch.randn(size, 1, generator=generator),
            pos=torch.randn(size, dim, generator=generator),
            y=torch.tensor([1]),
        )
        for size in sizes
    ]


def failed(certificate) -> set[str]:
    return {row.check for row in certificate.rows if row.passed is False}


@pytest.mark.parametrize("group", [cyclic(1), cyclic(8), dihedral(3), tetrahedral(), octahedral()], ids=str)
def test_an_invariant_network_passes(group):
    torch.manual_seed(0)
    certificate = certify(Pairs(group), clouds(group.dim))
    assert certificate.passed
    assert (certificate.group, certificate.order) == (group.name, group.order)
    elements = [row for row in certificate.rows if row.check == "element"]
    assert len(elements) == 2 * group.order
    assert {(row.label, row.dtype) for row in elements} == {
        (str(h), dtype) for h in range(group.order) for dtype in ("float32", "float64")
    }
    assert certificate.worst()["float64"] < 1e-14
    assert 0 < certificate.worst()["float32"] < 1e-5
    assert certificate.spread > 1e-3


def test_a_network_is_only_as_invariant_as_it_is():
    """Quarter turns pass and eighth turns fail, as they must for this function."""
    torch.manual_seed(0)
    network = Squares()
    assert certify(network, clouds(), cyclic(4)).passed
    certificate = certify(network, clouds(), cyclic(8))
    assert not certificate.passed
    verdicts = {int(row.label): row.passed for row in certificate.rows if row.check == "element"}
    assert verdicts == {h: h % 2 == 0 for h in range(8)}
    outside = [row for row in certify(network, clouds(), cyclic(4)).rows if row.check == "outside"]
    assert all(row.passed is None and row.allowed is None and row.max_error > 1e-3 for row in outside)


@pytest.mark.parametrize(
    ("network", "checks"),
    [(Absolute, {"element"}), (FirstPoint, {"permutation"}), (Leaking, {"alone"})],
)
def test_each_check_fails_for_its_own_fault(network, checks):
    torch.manual_seed(0)
    assert failed(certify(network(cyclic(4)), clouds())) == checks


def test_nan_is_a_failure_and_is_written_as_such():
    certificate = certify(NotANumber(cyclic(2)), clouds())
    assert not certificate.passed
    assert failed(certificate) == {"element", "permutation", "alone"}
    assert all(math.isnan(row.max_error) for row in certificate.rows)
    assert math.isnan(certificate.worst()["float64"])
    content = json.loads(certificate.to_json())
    assert content["passed"] is False
    assert content["rows"][0]["max_error"] == "nan"
    assert "FAILED" in certificate.table()


def test_errors_are_those_of_the_outputs():
    """One rotation worked out by hand: the outputs are sums of coordinates."""

    class Sum(nn.Module):
        def forward(self, data: Batch) -> torch.Tensor:
            spread = data.pos - global_mean_pool(data.pos, data.batch)[data.batch]
            return global_add_pool(spread.abs()[:, :1], data.batch)

    cloud = Data(pos=torch.tensor([[3.0, 1.0], [-3.0, -1.0]]))
    rows = certify(Sum(), cloud, cyclic(4), dtypes=[torch.float64], tolerances={torch.float64: 0.5}).rows
    assert [row.max_error for row in rows[:4]] == pytest.approx([0.0, 4.0, 0.0, 4.0], abs=1e-12)
    assert rows[1].relative == pytest.approx(4 / 6)
    assert rows[1].allowed == pytest.approx(0.5 * 6)
    assert [row.passed for row in rows[:4]] == [True, False, True, False]


def test_the_network_and_the_data_stay_as_they_were():
    network = Pairs(cyclic(4), dropout=0.5).train()
    data = Batch.from_data_list(clouds())
    before, positions = copy.deepcopy(network.state_dict()), data.pos.clone()
    state = torch.get_rng_state()
    assert certify(network, data).passed
    assert network.training
    assert network.mlp[2].training
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(data.pos, positions)
    for key, value in network.state_dict().items():
        assert value.dtype == before[key].dtype
        assert torch.equal(value, before[key])


def test_certificates_are_reproducible_and_depend_on_the_seed():
    network = Squares(cyclic(4))
    assert certify(network, clouds(), seed=1) == certify(network, clouds(), seed=1)
    assert certify(network, clouds(), seed=1).rows != certify(network, clouds(), seed=2).rows


def test_images_keep_the_order_of_their_points():
    image = [Data(x=torch.rand(6, 1), pos=torch.randn(6, 2), grid=torch.tensor([[2, 3]])) for _ in range(2)]
    network = FirstPoint(cyclic(4))
    assert certify(network, image).passed
    assert failed(certify(network, image, permute=True)) == {"permutation"}


def test_table_and_json_hold_everything():
    certificate = certify(Pairs(cyclic(3)), clouds(), dtypes=[torch.float64], rotations=1)
    lines = certificate.table().splitlines()
    assert len(lines) == 2 + len(certificate.rows) == 2 + 3 + 1 + 1 + 1
    assert len({line.index("float64") for line in lines[2:]}) == 1
    assert sum(line.endswith("ok") for line in lines) == 5
    assert sum(line.endswith("not promised") for line in lines) == 1
    content = json.loads(certificate.to_json())
    assert content["guarantee"] == Pairs.guarantee
    assert content["points"] == 4 + 5 + 6
    assert len(content["rows"]) == len(certificate.rows)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"data": []}, ValueError, "data: expected at least one cloud"),
        ({"data": [Data(x=torch.ones(2, 1))]}, ValueError, "data: cloud 0 needs pos, .* got none"),
        ({"data": Data(pos=torch.ones(2, dtype=torch.int64))}, ValueError, r"got \(2,\) of torch.int64"),
        ({"data": clouds(3)}, ValueError, "group: C4 acts on 2 coordinates, the clouds have 3"),
        ({"network": Pairs()}, ValueError, "group: the network has no attribute `group`"),
        (
            {"dtypes": [torch.float16]},
            TypeError,
            "dtypes: expected floating dtypes with a tolerance, got torch.float16",
        ),
        ({"dtypes": [torch.int64]}, TypeError, "got torch.int64"),
        ({"network": PerPoint(cyclic(4))}, ValueError, r"expected outputs .* with 3 clouds, got \(15, 1\)"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        certify(**{"network": Pairs(cyclic(4)), "data": clouds(), **arguments})
