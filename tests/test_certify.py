"""Certificates: what they measure, that they can fail, and that their report is correct."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import global_add_pool, global_mean_pool

from lieattn._core.messages import aligned, page, table, titled_table
from lieattn.certify import Certificate, certify, moved
from lieattn.certify._certificate import Row
from lieattn.cli import main
from lieattn.geometry import Radius, SampledFrames
from lieattn.groups import (
    SE,
    SO,
    E,
    FiniteGroup,
    RotationDilations,
    Translations,
    cyclic,
    cyclic_about,
    dihedral,
    octahedral,
    tetrahedral,
)
from lieattn.io import KEY, describe_group
from lieattn.models import (
    AffineSelfConvNet,
    EnergyForces,
    FieldModel,
    FramewiseOptions,
    FramewiseTransformer,
    Rescaled,
)
from lieattn.nn import DipoleHead, Heads, InvariantHead, RotationHead, VectorHead
from lieattn.reps import Irreps, SymmetricTensor, Vector
from lieattn.spaces import Euclidean, Sphere
from lieattn.testing import randomize
from lieattn.train._checkpoint import describe_input, random_clouds
from tests.test_networks import AFFINE, crystals, directed, framewise, images, lie, molecules, pixels


def distance(difference: torch.Tensor) -> torch.Tensor:
    return difference.norm(dim=1, keepdim=True)


def pinwheel(difference: torch.Tensor) -> torch.Tensor:
    """Return a function that is invariant to quarter turns, but not to eighth turns or mirrors."""
    x, y = difference.split(1, dim=1)
    return x.abs() + y.abs() + x * y * (x.square() - y.square())


class Pairs(nn.Module):
    """The mean of a function of the difference over all pairs of a cloud, as invariant as the function."""

    guarantee = "invariant to translations and to what keeps the function"

    def __init__(self, group: FiniteGroup | None = None, dropout: float = 0.0, feature: Callable = distance) -> None:
        super().__init__()
        if group is not None:
            self.symmetry = group
        self.feature = feature
        self.mlp = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))

    def forward(self, data: Batch) -> torch.Tensor:
        i, j = (data.batch[:, None] == data.batch[None, :]).nonzero(as_tuple=True)
        found = self.feature(data.pos[i] - data.pos[j])
        return global_mean_pool(self.mlp(torch.cat([data.x[j], found], dim=1)), data.batch[i])


class Absolute(Pairs):
    """Depends on distances from the origin, so it is not invariant to translations."""

    def forward(self, data: Batch) -> torch.Tensor:
        radius = data.pos.norm(dim=1, keepdim=True)
        return global_mean_pool(self.mlp(torch.cat([data.x, radius], dim=1)), data.batch)


class After(Pairs):
    """Changes the outputs by a function of them and of the data."""

    def __init__(self, change: Callable, group: FiniteGroup | None = None) -> None:
        super().__init__(group)
        self.change = change

    def forward(self, data: Batch) -> torch.Tensor | dict[str, torch.Tensor]:
        return self.change(super().forward(data), data)


Squares = partial(Pairs, feature=lambda one: one.abs().sum(dim=1, keepdim=True))  # invariant to quarter turns
Pinwheel = partial(Pairs, feature=pinwheel)
FirstPoint = partial(After, lambda out, data: out + data.x[data.ptr[:-1]])  # depends on the order of the points
Leaking = partial(After, lambda out, data: out - data.x.mean())  # clouds of a batch affect each other
NotANumber = partial(After, lambda out, data: out * math.nan)
Twice = partial(After, lambda out, data: data.x.repeat(2, 1))
Blind = partial(After, lambda out, data: global_add_pool(data.x, data.batch))  # depends on features and numbers alone
Named = partial(After, lambda out, data: {"constant": data.x.new_ones(data.num_graphs, 1), "seen": out})


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


@pytest.mark.parametrize("group", [cyclic(1), dihedral(3), tetrahedral()], ids=str)
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
    """Quarter turns pass and eighth turns fail, as expected of this function."""
    torch.manual_seed(0)
    network = Squares()
    assert certify(network, clouds(), cyclic(4), continuity=False).passed
    certificate = certify(network, clouds(), cyclic(8), continuity=False)
    assert not certificate.passed
    verdicts = {int(row.label): row.passed for row in certificate.rows if row.check == "element"}
    assert verdicts == {h: h % 2 == 0 for h in range(8)}
    rows = certify(network, clouds(), dihedral(4), continuity=False).rows
    outside = [row for row in rows if row.check == "outside"]
    assert outside
    assert all(row.passed is None and row.allowed is None and row.max_error > 1e-3 for row in outside)


@pytest.mark.parametrize(
    ("network", "checks"),
    [(Absolute, {"element", "degenerate"}), (FirstPoint, {"permutation"}), (Leaking, {"alone"})],
)
def test_each_check_fails_for_its_own_fault(network, checks):
    torch.manual_seed(0)
    assert failed(certify(network(cyclic(4)), clouds())) == checks


def test_nan_is_a_failure_and_is_written_as_such():
    certificate = certify(NotANumber(cyclic(2)), clouds())
    assert not certificate.passed
    assert failed(certificate) == {"finite", "element", "degenerate", "permutation", "alone"}
    assert all(math.isnan(row.max_error) for row in certificate.rows)
    assert math.isnan(certificate.worst()["float64"])
    content = json.loads(certificate.to_json())
    assert content["passed"] is False
    assert content["rows"][0]["max_error"] == "nan"
    assert "FAILED" in certificate.table()
    endless = dataclasses.replace(certificate, spread=math.inf)
    assert Certificate.from_json(endless.to_json()).spread == math.inf


def test_the_worst_row_of_each_output_is_printed():
    row = Row("element", "0", "a", "float64", 1e-3, 1e-3, 1e-6, False)
    rows = (
        row,
        dataclasses.replace(row, label="1", output="b"),
        dataclasses.replace(row, label="2", max_error=math.nan),
    )
    certificate = Certificate("none", "C3", 3, 1, 4, 1.0, 0, rows)
    assert certificate.failure == "outputs are not finite, and an error is beyond its tolerance"
    other = [dataclasses.replace(row, check="outside", max_error=error) for error in (math.nan, 1.0)]
    assert dataclasses.replace(certificate, rows=(*rows, *other)).unique is True  # refused clouds say nothing
    assert dataclasses.replace(certificate, rows=(*rows, *other[:1])).unique is None
    text = str(certificate)
    assert re.findall(r"element .*\)", text) == ["element 2, worst of 2 (a)", "element 1 (b)"]


def test_errors_are_those_of_the_outputs():
    """One rotation computed by hand: the outputs are sums of coordinates."""

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
    one_by_one = clouds()
    kept = [cloud.clone() for cloud in one_by_one]
    certify(Pairs(cyclic(4)), one_by_one, continuity=False)
    for cloud, known in zip(one_by_one, kept, strict=True):
        assert set(cloud.keys()) == set(known.keys())
        assert all(cloud[key].dtype == known[key].dtype and torch.equal(cloud[key], known[key]) for key in known.keys())
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


class Walks(Pairs):
    """Sums a function of differences along edges and along rings of three points, where ``-1`` is no third point."""

    def forward(self, data: Batch) -> torch.Tensor:
        (j, i), (a, b, c) = data.edge_index.long(), data.ring_index
        along = self.weigh(data.pos[j] - data.pos[i]) * data.x[j]
        third = torch.where((c >= 0)[:, None], data.pos[c] - data.pos[a], data.pos.new_ones(()))
        around = self.weigh(data.pos[b] - data.pos[a]) * self.weigh(third)
        return global_add_pool(along, data.batch[i]) + global_add_pool(around, data.batch[a])

    def weigh(self, differences: torch.Tensor) -> torch.Tensor:
        return self.mlp(differences.norm(dim=1, keepdim=True).expand(-1, 2))


class Molecule(Data):
    def __inc__(self, key: str, value: object, *rest: object) -> object:
        return torch.tensor([[self.num_nodes]] * 2 + [[0]]) if key == "ring_index" else super().__inc__(key, value)

    def __cat_dim__(self, key: str, value: object, *rest: object) -> int:
        return -1 if key == "ring_index" else super().__cat_dim__(key, value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_points_are_numbered_anew_where_they_change_places(dtype):
    """There are as many edges and rings as points, so only the concatenated axis tells what belongs to points."""
    data = []
    for points in (5, 4):
        ring = torch.stack([torch.arange(points), torch.arange(points).roll(1), torch.full((points,), -1)])
        edges = torch.randint(points, (2, points))
        data.append(
            Molecule(x=torch.rand(points, 1), pos=torch.randn(points, 2), edge_index=edges.to(dtype), ring_index=ring)
        )
    certificate = certify(Walks(SO(2)), data)
    assert certificate.passed, str(certificate)
    assert {row.check for row in certificate.rows} >= {"permutation", "alone", "element"}


def test_certificates_are_printed_on_one_screen():
    certificate = certify(Pairs(octahedral()), clouds(3))
    assert repr(certificate).startswith("Certificate('kept', group=O, 3 clouds, 15 points, ")
    lines = str(certificate).splitlines()
    assert len(lines) < 25
    assert max(map(len, lines)) < 120
    assert lines[2].startswith("verdict: kept; 3 clouds")
    assert any(line.startswith("element ") and "worst of 24" in line for line in lines)


def test_tables_of_reports():
    assert aligned([["a", "bcd"], ["ef", "g"]]) == "a   bcd\n--  ---\nef  g"
    assert table([[1, "<2>"]]) == "<table><tr><td>1</td><td>&lt;2&gt;</td></tr></table>"
    found = titled_table("<t>", [["x"]], ["<h>"])
    rows = "<tr><th>&lt;h&gt;</th></tr><tr><td>x</td></tr>"
    assert found == f"<div><b>&lt;t&gt;</b><table>{rows}</table></div>"
    assert "<title>&lt;t&gt;</title>" in page("<t>", "<p>text</p>")
    assert '<div class="lieattn"><p>text</p>' in page("<t>", "<p>text</p>")


def test_gpus_multiply_in_float32_while_it_measures():
    class Watching(nn.Module):
        def forward(self, data):
            assert not torch.backends.cudnn.allow_tf32
            assert not torch.backends.cuda.matmul.allow_tf32
            return global_mean_pool(data.pos.square(), data.batch)

    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    certify(Watching(), Data(pos=torch.randn(3, 2)), cyclic(1), continuity=False)
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == before == (True, False)


def test_symmetry_is_unique_or_larger_than_promised():
    quick = {"continuity": False, "dtypes": [torch.float64]}
    assert certify(Pairs(cyclic(4)), clouds(), **quick).unique is False  # only distances
    assert certify(Pairs(cyclic(4)), clouds(), rotations=0, **quick).unique is None
    certificate = certify(Pinwheel(cyclic(4)), clouds(), **quick)
    assert certificate.unique
    labels = [row.label for row in certificate.rows if row.check == "outside"]
    assert labels[3:8] == [
        f"{what}, outside of C4" for what in ("random reflection", *(f"element of {n}" for n in "C8 C12 D4 D8".split()))
    ]
    assert certify(Squares(cyclic(4)), clouds(), **quick).unique is False  # it is invariant to mirrors too
    assert certify(Pinwheel(cyclic(2)), clouds(), **quick).unique is False  # it is invariant to quarter turns too
    assert certify(Squares(dihedral(4)), clouds(), **quick).unique
    far = Rescaled(Pinwheel(cyclic(4)), {"y": 1.0}, {"y": 1e5})
    assert certify(far, clouds(), cyclic(4), continuity=False).unique  # although float32 rounds the differences away
    inversions = [row.label for row in certify(Pairs(tetrahedral()), clouds(3), **quick).rows if row.check == "outside"]
    assert {f"element of {name}, outside of T" for name in ("O", "Td", "Th", "I")} <= set(inversions)
    about = [row.label for row in certify(Pairs(cyclic_about(3)), clouds(3), **quick).rows if row.check == "outside"]
    assert {f"element of {name} about its axis, outside of C3z" for name in ("C6", "SO(2)")} <= set(about)


class Large(nn.Module):
    """A large constant, of which only rounding depends on the points, and a large number that vanishes at one place."""

    symmetry = SE(2)

    def forward(self, data: Batch) -> dict[str, torch.Tensor]:
        arrow = data.pos - global_mean_pool(data.pos, data.batch)[data.batch]
        length = arrow.norm(dim=1)
        return {
            "constant": global_add_pool(1e8 / 3 * length / length, data.batch),
            "spread": global_add_pool(1e8 * length, data.batch),
        }


def test_rounding_of_large_outputs_is_no_dependence_and_no_failure():
    certificate = certify(Large(), clouds(), continuity=False)
    assert certificate.vacuous == ("constant",)
    rows = [row for row in certificate.rows if row.output == "spread" and row.passed is not None]
    assert {row.check for row in rows} == {"element", "degenerate", "permutation", "alone"}
    assert all(row.passed for row in rows), certificate.table()


def test_the_order_of_points_is_judged_if_asked_for():
    network = FirstPoint(cyclic(4))
    network.sees_order = True
    for permute, judged in ((None, None), (True, False)):
        rows = certify(network, clouds(), permute=permute, continuity=False).rows
        assert {row.passed for row in rows if row.check == "permutation"} == {judged}


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float64], [torch.float32, torch.float64]], ids=str)
def test_what_does_not_depend_on_its_input_is_vacuous(dtypes):
    alike = clouds()
    for cloud in alike:
        cloud.x = torch.ones_like(cloud.x)
    certificate = certify(Blind(cyclic(4)), alike, dtypes=dtypes)
    assert certificate.vacuous == ("",)
    assert (certificate.verdict, certificate.promised, certificate.passed) == ("vacuous", True, False)
    assert certificate.spread == 0
    assert "vacuous" in certificate.table()
    assert " ok" not in certificate.table()
    content = json.loads(certificate.to_json())
    assert (content["verdict"], content["vacuous"], content["passed"]) == ("vacuous", [""], False)
    assert Certificate.from_json(certificate.to_json()) == certificate
    assert certify(Pairs(cyclic(4)), alike[0], dtypes=dtypes).verdict == "kept"


def test_an_output_is_vacuous_by_itself():
    certificate = certify(Named(cyclic(4)), clouds(), continuity=False)
    assert certificate.vacuous == ("constant",)
    assert certificate.spread > 1e-3  # the largest one
    few = {"dtypes": [torch.float64], "elements": 1, "rotations": 0, "continuity": False}
    # Large tolerances do not make outputs constant.
    assert certify(Named(cyclic(4)), clouds(), tolerances={torch.float64: 1e3}, **few).vacuous == ("constant",)
    lines = certificate.table().splitlines()
    assert all(line.endswith("vacuous") for line in lines if "(constant)" in line and "outside" not in line)
    assert all(line.endswith("ok") for line in lines if "(seen)" in line and "outside" not in line)
    assert certify(Leaking(cyclic(4)), clouds(), continuity=False).verdict == "failed"
    network = Named()
    network.symmetry = None
    assert certify(network, clouds(), continuity=False).verdict == "not promised"


def test_clouds_are_moved_by_hand():
    cloud = clouds()[0]
    other = moved(cloud, cyclic(4).elements[1], torch.tensor([1.0, 2.0], dtype=torch.float64))
    expected = cloud.pos.double() @ cyclic(4).elements[1].T + torch.tensor([1.0, 2.0])
    torch.testing.assert_close(other.pos, expected)
    assert cloud.pos.dtype == torch.float32
    assert other.x is cloud.x


def test_certificates_are_reproducible_and_depend_on_the_seed():
    network = Squares(cyclic(4))
    first, again, other = (certify(network, clouds(), seed=seed, dtypes=[torch.float64]) for seed in (1, 1, 2))
    assert first == again
    assert first.rows != other.rows


def test_images_keep_the_order_of_their_points():
    image = [Data(x=torch.rand(6, 1), pos=torch.randn(6, 2), grid=torch.tensor([[2, 3]])) for _ in range(2)]
    network = FirstPoint(cyclic(4))
    assert certify(network, image).passed
    assert failed(certify(network, image, permute=True)) == {"permutation"}


def test_table_and_json_hold_everything():
    certificate = certify(Pairs(cyclic(3)), clouds(), dtypes=[torch.float64], rotations=1, continuity=False)
    lines = certificate.table().splitlines()
    assert len(lines) == 2 + len(certificate.rows) == 2 + 3 + 1 + 1 + (1 + 4) + 5 * 3
    assert len({line.index("float64") for line in lines[2:]}) == 1
    assert sum(line.endswith("ok") for line in lines) == 5 + 5 * 3
    assert sum(line.endswith("not promised") for line in lines) == 1 + 4
    assert sum(line.startswith("element of ") for line in lines) == 4  # such as element of C6, outside of C3
    content = json.loads(certificate.to_json())
    assert content["guarantee"] == Pairs.guarantee
    assert content["points"] == 4 + 5 + 6
    assert len(content["rows"]) == len(certificate.rows)


# --- models of the library -------------------------------------------------------------------------------------


class Renamed(nn.Module):
    """Calls the dipole by another name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.vector_inputs = model, model.vector_inputs

    def forward(self, data: Batch) -> dict[str, torch.Tensor]:
        return {"mu": self.model(data)["dipole"]}


def test_dipoles_of_crystals_depend_on_the_images_and_nothing_else_does():
    options = FramewiseOptions(attention="neighborhood")
    group = cyclic_about(4)
    network = framewise(group, neighborhood=Radius(2.5), options=options, vector_inputs=("vel",))
    quick = {"continuity": False, "elements": 1, "rotations": 0, "dtypes": [torch.float64]}
    heads = {"energy": InvariantHead(4, 1, pool="sum"), "dipole": DipoleHead(4)}
    model = randomize(FieldModel(network, Heads(heads)))
    alone = randomize(FieldModel(network, DipoleHead(4)))
    wrapped = EnergyForces(model), Rescaled(model, {"energy": 2.0, "dipole": 3.0})
    for one in (randomize(FieldModel(network, VectorHead(4))), alone, model, *wrapped):
        certificate = certify(one, crystals()[:2], **quick)
        assert certificate.passed, str(certificate)
        passed = {row.output: row.passed for row in certificate.rows if row.check == "image"}
        assert passed
        assert all(value is (None if one is alone or name == "dipole" else True) for name, value in passed.items())
    assert certify(alone, crystals()[:2], **quick).worst("image")["float64"] > 1e-3
    # The output of a module that gives it another name is not known to be that of another head.
    renamed = certify(Renamed(model), crystals()[:2], group, outputs={"mu": "vector"}, **quick)
    assert {row.passed for row in renamed.rows if row.check == "image"} == {None}


def test_poses_of_symmetric_clouds_are_not_promised():
    network = FieldModel(
        FramewiseTransformer(tetrahedral(), 2, 4, channels=8, layers=1, heads=1, length=1.5), RotationHead(8)
    )
    data = [Data(x=torch.rand(6, 2), pos=torch.randn(6, 3)) for _ in range(2)]
    certificate = certify(randomize(network), data, continuity=False, dtypes=[torch.float64])
    assert certificate.verdict == "kept", str(certificate)
    degenerate = [row.passed for row in certificate.rows if row.check == "degenerate"]
    assert degenerate
    assert set(degenerate) == {None}
    assert {row.passed for row in certificate.rows if row.check in ("element", "permutation")} == {True}


def test_sampled_frames_are_reported_and_not_judged():
    """Rotations change the outputs by far more than rounding, and so does the order of the points."""
    few = {"continuity": False, "elements": 2, "rotations": 2, "dtypes": [torch.float64]}
    certificate = certify(randomize(lie(Euclidean(SE(3)), SampledFrames(2)), spread=0.4), molecules(), **few)
    unpromised = [row for row in certificate.rows if row.passed is None]
    assert {row.check for row in unpromised} == {"outside", "permutation"}
    assert all(row.max_error > 1e-6 and row.allowed is None for row in unpromised)
    assert certificate.worst("outside")["float64"] > 1e-4
    assert certificate.passed
    shared = randomize(lie(Euclidean(SE(3)), SampledFrames(2, per="cloud")), spread=0.4)
    assert "permutation" in {row.check for row in certify(shared, molecules(), **few).rows if row.passed}
    nothing = certify(randomize(lie(Sphere(), SampledFrames(2)), spread=0.4), molecules(unit=True), **few)
    assert (nothing.group, nothing.order, nothing.promised, nothing.passed) == (None, None, False, True)
    assert {row.check for row in nothing.rows} == {"outside", "permutation", "alone"}
    sphere = randomize(lie(Sphere(), SampledFrames(2)), spread=0.4)
    assert not certify(sphere, molecules(unit=True), SO(3), **few).passed


# --- Lie groups ------------------------------------------------------------------------------------------------


class Moments(nn.Module):
    """Every kind of output, with different masses; outputs transform with the positions."""

    def forward(self, data: Batch) -> dict[str, torch.Tensor]:
        center = global_mean_pool(data.x[:, :1] * data.pos, data.batch) / global_mean_pool(data.x[:, :1], data.batch)
        arrow = data.pos - center[data.batch]
        outer = arrow[:, :, None] * arrow[:, None]
        vector = global_add_pool(data.x[:, 1:] * arrow, data.batch)
        second = global_add_pool(outer.flatten(1), data.batch).unflatten(1, (3, 3))
        spin = global_add_pool(torch.linalg.cross(arrow, data.vel), data.batch)
        return {
            "energy": arrow.norm(dim=1),
            "center": center,
            "vector": vector,
            "spin": spin,
            "tensor": second,
            "components": SymmetricTensor(3).from_tensor(second),
            "helicity": (vector * spin).sum(dim=1),
            "state": torch.cat([data.pos, data.vel, data.x[:, :1]], dim=1),
        }


KINDS = {
    "center": "position",
    "vector": Vector(3),
    "spin": "pseudovector",
    "tensor": "tensor",
    "components": SymmetricTensor(3),
    "helicity": "pseudoscalar",
    "state": ("position", "vector", "invariant"),
}


def test_a_lie_group_is_tried_where_it_matters():
    torch.manual_seed(0)
    certificate = certify(Pairs(), clouds(3), E(3), elements=2, continuity=False)
    assert certificate.passed
    assert (certificate.group, certificate.order) == ("E(3)", None)
    labels = [row.label for row in certificate.rows if row.check == "element" and row.dtype == "float64"]
    assert labels == ["random 0", "random 1", "near identity", "half turn", "reflection", "inversion"]
    assert not [row for row in certificate.rows if row.check == "outside"]
    rows = certify(Pairs(), clouds(3), SE(3), elements=2, continuity=False).rows
    assert {row.label for row in rows if row.check == "outside"} == {"random reflection, outside of SE(3)"}


def test_groups_without_translations_keep_the_origin():
    torch.manual_seed(0)
    few = {"continuity": False, "dtypes": [torch.float64]}
    assert certify(Absolute(), clouds(), SO(2), **few).passed
    assert failed(certify(Absolute(), clouds(), SE(2), **few)) == {"element", "degenerate"}
    assert failed(certify(Absolute(), clouds(), Translations(2), **few)) == {"element", "degenerate"}
    assert failed(certify(Pairs(), clouds(), RotationDilations(2), **few)) == {"element", "degenerate"}


# --- inputs and outputs ----------------------------------------------------------------------------------------


def test_every_kind_of_output_turns_as_it_should():
    options = {"inputs": {"vel": "vector"}, "continuity": False, "elements": 2}
    certificate = certify(Moments(), molecules(), E(3), outputs=KINDS, **options)
    assert certificate.passed, certificate.table()
    assert {row.output for row in certificate.rows} == {"energy", *KINDS}
    assert "(spin)" in certificate.table()


WRONG = {
    "center": ["vector"],
    "vector": ["position", "pseudovector", "invariant"],
    "spin": ["vector"],
    "tensor": ["invariant"],
    "components": ["invariant", Irreps("1x1o + 1x1e")],
    "helicity": ["invariant"],
    "energy": ["pseudoscalar"],
    "state": [
        ("vector", "vector", "invariant"),
        ("position",) * 2 + ("invariant",),
        ("position", "vector", "pseudoscalar"),
    ],
}


@pytest.mark.parametrize("number", range(3))
def test_the_wrong_kind_fails(number):
    options = {"inputs": {"vel": "vector"}, "continuity": False, "dtypes": [torch.float64]}
    wrong = {name: kinds[number] for name, kinds in WRONG.items() if number < len(kinds)}
    certificate = certify(Moments(), molecules(), E(3), outputs={**KINDS, **wrong}, **options)
    assert {row.output for row in certificate.rows if row.passed is False} == set(wrong)


def peeking(network):
    """Add positions to vectors: the sums rotate correctly, but change under translations."""
    return lambda data: network(data) + global_mean_pool(data.pos, data.batch)


def fixed(network):
    """Add a constant vector, like a bias after the frames."""
    return lambda data: network(data) + torch.tensor([0.0, 0.0, 1.0])


def counting(network):
    """Outputs of a point depend on the points before it."""
    return lambda data: network(data).cumsum(dim=0)


@pytest.mark.parametrize(
    ("around", "options", "checks"),
    [
        (peeking, {"kind": "vector"}, {"element", "degenerate"}),
        (fixed, {"kind": "vector"}, {"element", "degenerate"}),
        (counting, {"pool": "none"}, {"permutation", "alone"}),
    ],
)
def test_vectors_and_outputs_of_points_can_fail(around, options, checks):
    group = cyclic_about(3, (1, 0, 0))
    network = randomize(FramewiseTransformer(group, 2, 1, channels=4, layers=1, **options), spread=0.4).double()
    few = {"outputs": network.kind, "rotations": 0, "continuity": False, "dtypes": [torch.float64]}
    assert certify(network, molecules(), **few).passed
    assert failed(certify(around(network), molecules(), group, **few)) == checks


# --- images ----------------------------------------------------------------------------------------------------


class Rows(nn.Module):
    """Uses the places of pixels in the raster and no coordinates; quarter turns change its outputs."""

    def __init__(self, group: FiniteGroup) -> None:
        super().__init__()
        self.symmetry = group

    def forward(self, data: Batch | torch.Tensor) -> torch.Tensor:
        image = data[:, 0] if isinstance(data, torch.Tensor) else data.x.view(-1, *data.grid[0].tolist())
        across, down = (image.diff(dim=dim).square().sum(dim=(1, 2)) for dim in (2, 1))
        return (across + 2 * down)[:, None]


def test_a_network_that_reads_the_raster_sees_the_image_turn():
    """If only the coordinates were rotated, this network would look invariant to everything."""
    assert failed(certify(Rows(cyclic(4)), pixels(4))) == {"raster"}
    assert certify(Rows(cyclic(2)), pixels(4)).passed
    verdicts = {r.label: r.passed for r in certify(Rows(cyclic(8)), pixels(4)).rows if r.check == "raster"}
    assert verdicts == {"2": False, "4": True, "6": False}
    assert failed(certify(Rows(dihedral(4)), images(5))) == {"element"}
    assert certify(Rows(cyclic(2)), images(5)).passed


def test_images_of_unlike_sides_turn_too():
    tall = torch.rand(2, 1, 3, 5, generator=torch.Generator().manual_seed(0))
    assert certify(Rows(dihedral(2)), tall).passed
    assert failed(certify(Rows(cyclic(4)), tall)) == {"element"}
    assert failed(certify(Rows(cyclic(4)), tall[..., :1])) == {"element"}
    assert failed(certify(Rows(cyclic(4)), tall[:, :, :1])) == {"element"}


def test_refusals_are_no_failures_where_nothing_is_promised():
    certificate = certify(randomize(AffineSelfConvNet(cyclic(4), 1, 2, **AFFINE)), pixels(8), rotations=1)
    row = next(row for row in certificate.rows if row.check == "outside")
    assert row.label.endswith("refused")
    assert math.isnan(row.max_error)
    assert certificate.passed
    with pytest.raises(ValueError, match="upright lattice"):
        certify(randomize(AffineSelfConvNet(cyclic(4), 1, 2, **AFFINE)), pixels(8), cyclic(8))


# --- bad input -------------------------------------------------------------------------------------------------


class Misnamed(nn.Module):
    vector_inputs = "vel"


PLAIN = {"network": Pairs(cyclic(4)), "data": clouds(), "group": None}
OF_IMAGES = {"data": images(4), "group": cyclic(4)}


@pytest.mark.parametrize(
    ("arguments", "error", "named", "found"),
    [
        ({**PLAIN, "data": []}, ValueError, "data", "none"),
        ({**PLAIN, "data": [Data(x=torch.ones(2, 1))]}, ValueError, "data", "none"),
        ({**PLAIN, "data": Data(pos=torch.ones(2, dtype=torch.int64))}, ValueError, "data", "(2,) of torch.int64"),
        ({**PLAIN, "data": clouds(3)}, ValueError, "group", "the clouds have 3"),
        ({**PLAIN, "network": Pairs()}, ValueError, "group", "None"),
        ({**PLAIN, "network": Twice(cyclic(4))}, ValueError, "network", "(30, 1)"),
        ({"dtypes": [torch.float16]}, TypeError, "dtypes", "torch.float16"),
        ({"dtypes": [torch.int64]}, TypeError, "dtypes", "torch.int64"),
        ({"group": "E(3)"}, TypeError, "group", "'E(3)'"),
        ({"outputs": "arrow"}, ValueError, "outputs", "'arrow'"),
        ({"outputs": {"forces": "vector"}}, ValueError, "outputs", "'forces'"),
        ({"outputs": {"spin": 3}}, TypeError, "outputs['spin']", "3"),
        ({"outputs": ()}, ValueError, "outputs", "none"),
        ({"outputs": ("tensor", "vector")}, ValueError, "outputs", "a tensor"),
        ({"outputs": {"energy": "vector"}}, ValueError, "outputs energy", "(15,)"),
        ({"outputs": {"vector": "tensor"}}, ValueError, "outputs vector", "(3, 3)"),
        ({"outputs": {"state": ("vector", "vector")}}, ValueError, "outputs state", "(15, 7)"),
        ({"outputs": {"state": SymmetricTensor(3)}}, ValueError, "outputs state", "(15, 7)"),
        ({"inputs": {"vel": "arrow"}}, ValueError, "inputs['vel']", "'arrow'"),
        ({"inputs": {"z": "vector"}}, ValueError, "data.z", "vector"),
        ({"inputs": {"velocity": "vector"}}, ValueError, "inputs", "'velocity'"),
        ({"elements": 0}, ValueError, "elements", "0"),
        ({"rotations": -1}, ValueError, "rotations", "-1"),
        ({"tolerances": {torch.float32: -1.0}}, ValueError, "tolerances[torch.float32]", "-1.0"),
        ({"tolerances": {torch.float64: math.nan}}, ValueError, "tolerances[torch.float64]", "nan"),
        ({"network": Misnamed()}, TypeError, "network", "'vel'"),
        ({"network": nn.Identity()}, TypeError, "network", "DataBatch"),
        ({"network": lambda h, x: h}, ValueError, "network", "(h, x)"),
        ({"network": lambda pos: pos.sum(), "group": "search"}, ValueError, "network", "()"),
        ({"data": directed()}, ValueError, "group", "the clouds have 6"),
        ({"network": lambda pos, batch, charge: pos}, ValueError, "data", "'charge'"),
        ({**OF_IMAGES, "group": SE(2)}, ValueError, "group", "SE(2)"),
        ({**OF_IMAGES, "group": cyclic(8)}, ValueError, "group", "element 1 of C8"),
        ({**OF_IMAGES, "data": images(4).long()}, ValueError, "data", "torch.int64 (2, 1, 4, 4)"),
        ({**OF_IMAGES, "network": lambda pos, batch: pos}, ValueError, "network", "(pos, batch)"),
    ],
)
def test_bad_arguments(arguments, error, named, found):
    with pytest.raises(error, match=rf"^{re.escape(named)}: .*{re.escape(found)}"):
        certify(**{"network": Moments(), "data": molecules(), "group": E(3), **arguments})


def test_bad_json():
    for text, message in (("{}", "text: "), ("[]", "text: "), ("certificate", "Expecting value")):
        with pytest.raises(ValueError, match=message):
            Certificate.from_json(text)


# --- the command -----------------------------------------------------------------------------------------------


def test_command_says_when_nothing_is_promised(tmp_path, capsys):
    """Also says what the outputs of a regressor are worth in the units of its targets."""
    frames = {"class_path": "lieattn.geometry.SampledFrames", "init_args": {"count": 2}}
    spec = {"class_path": f"{__name__}.Sampled", "init_args": {"frames": frames}}
    network = randomize(Sampled(SampledFrames(2)), spread=0.4)
    entry = {
        "format": 1,
        "config": {"model": {"init_args": {"network": spec}}},
        "group": describe_group(network),
        "input": describe_input(Batch.from_data_list(molecules())),
        "random": None,
    }
    weights = {f"network.{name}": value for name, value in network.state_dict().items()}
    weights |= {"scale_force": torch.tensor(5.0), "scale_y": torch.tensor(3.0), "gain": torch.tensor(0.5)}
    torch.save({KEY: entry, "state_dict": weights}, path := str(tmp_path / "c"))
    assert main(["certify", path, "--trust", "tests", "--dtype", "float32", "--outside", "1", "--clouds", "2"]) == 0
    printed = capsys.readouterr().out
    units = [f"1 in the outputs is {number} in the units of {name}" for name, number in (("force", 2.5), ("y", 3))]
    for told in ("2 random clouds of 5 points", *units, "group: none"):
        assert told in printed
    assert "no exact guarantee" in printed


class Sampled(nn.Module):
    """Contains a network with sampled frames, and states so."""

    symmetry = None

    def __init__(self, frames: SampledFrames) -> None:
        super().__init__()
        self.network = lie(Euclidean(SE(3)), frames)

    def forward(self, data: Batch) -> torch.Tensor:
        return self.network(data) + global_mean_pool(data.z[:, None].to(data.x), data.batch)


class Told(nn.Module):
    """Reads vectors and a number of the cloud, and states so."""

    vector_inputs, cloud_inputs = ("vel",), ("charge",)

    def forward(self, data: Batch) -> torch.Tensor:
        speeds = global_mean_pool(data.vel.square().sum(dim=1), data.batch)
        return data.charge * speeds


def test_random_clouds_have_the_inputs_that_a_network_states(tmp_path, capsys):
    told = ["certify", f"{__name__}:Told", "--dtype", "float64", "--elements", "1", "--outside", "1"]
    told += ["--group", "lieattn.groups.E", "--group.dim", "3"]
    assert main([*told, "--json", str(tmp_path / "c.json")]) == 0
    assert "group: E(3), random and special elements" in (printed := capsys.readouterr().out)
    assert "guarantee kept" in printed
    assert Certificate.from_json((tmp_path / "c.json").read_text()).passed
    assert main([*told, "--output", "pseudoscalar"]) == 1
    assert "NOT kept" in capsys.readouterr().out
    assert main([*told, "--output", "forces=vector"]) == 2
    assert "forces" in capsys.readouterr().err
    assert main([*told, "--input", "pos=position+vector"]) == 2
    assert "data.pos: expected 6 components" in capsys.readouterr().err


def test_random_clouds_are_like_those_of_the_training():
    """Also in directions that are periodic, which neighborhoods refuse as integers."""
    clouds = molecules()
    for cloud in clouds:
        cloud.pbc, cloud.mask = torch.tensor([[True, False, True]]), torch.ones(len(cloud.pos)).bool()
    kind = describe_input(Batch.from_data_list(clouds))
    found = random_clouds(json.loads(json.dumps(kind)), 3, 0, ("vel",))
    assert [cloud.num_nodes for cloud in found] == [5, 5, 5]
    for cloud in found:
        assert set(cloud.keys()) == {"x", "z", "pos", "vel", "time", "pbc", "mask"}
        assert torch.equal(cloud.pbc, clouds[0].pbc)
        assert torch.equal(cloud.mask, torch.ones(5, dtype=torch.bool))
        assert cloud.z.dtype == torch.int64
        assert set(cloud.z.tolist()) <= {6, 7, 8}
        torch.testing.assert_close(cloud.time, clouds[0].time)
    assert not torch.equal(found[0].vel, found[1].vel)
    assert torch.equal(random_clouds(kind, 3, 0, ("vel",))[2].vel, found[2].vel)
    assert torch.equal(random_clouds(kind, 1, 0)[0].z, random_clouds(kind, 1, 0)[0].z)
