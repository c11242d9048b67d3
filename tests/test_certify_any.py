"""Certificates of networks from outside of the library: found symmetries, broken layers, forces, cards."""

from __future__ import annotations

import math
import re
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MessagePassing, global_add_pool, global_mean_pool
from torch_geometric.utils import to_dense_batch

import lieattn
from lieattn.certify import Certificate, certify, where_outside
from lieattn.certify._elements import elements_of, outside_of
from lieattn.certify._moves import Move, scrambled, transform
from lieattn.certify._probe import Probe
from lieattn.certify._rows import conservation
from lieattn.certify._trace import record
from lieattn.cli import main
from lieattn.geometry import Radius, lift, pixel_positions
from lieattn.groups import (
    SE,
    SO,
    E,
    FiniteGroup,
    SemidirectProduct,
    commuting_product,
    cyclic,
    cyclic_about,
    dihedral,
    dihedral_about,
    direct_product,
    full_icosahedral,
    full_octahedral,
    full_tetrahedral,
    icosahedral,
    inversion,
    octahedral,
    pyritohedral,
    reflection,
    tetrahedral,
    trivial,
)
from lieattn.models import (
    AttentiveCNN,
    CloudInputs,
    DirectionConvNet,
    EnergyForces,
    FramewiseTransformer,
    GSANet,
    Species,
)
from lieattn.models.irreps import DistanceTransformer
from lieattn.nn import GroupAttention, LiftingSelfAttention
from lieattn.nn.relative import RelativeFunction
from lieattn.ops import RelativeTerms
from lieattn.testing import assert_certified, randomize
from lieattn.transforms import periodic_radius_graph
from tests.cases import quiet_trainer, some

QUICK = {"continuity": False, "rotations": 0, "elements": 2, "dtypes": [torch.float64]}


def clouds(dim: int = 3, sizes: tuple[int, ...] = (5, 7, 6)) -> list[Data]:
    generator = torch.Generator().manual_seed(0)
    return [
        Data(
            x=torch.rand(size, 2, generator=generator),
            z=torch.randint(1, 9, (size,), generator=generator),
            pos=torch.randn(size, dim, generator=generator),
        )
        for size in sizes
    ]


def images(size: int = 8) -> torch.Tensor:
    return torch.rand(2, 1, size, size, generator=torch.Generator().manual_seed(1))


def pairs(batch: torch.Tensor) -> torch.Tensor:
    same = (batch[:, None] == batch[None]) & ~torch.eye(len(batch), dtype=torch.bool)
    return same.nonzero().T.contiguous()


class Convolution(MessagePassing):
    """A layer that sums a function of distances over the edges."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return self.propagate(edge_index, x=x, pos=pos)

    def message(self, x_j: torch.Tensor, pos_i: torch.Tensor, pos_j: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([x_j, self.of(pos_j - pos_i)], dim=1))

    def of(self, displacement: torch.Tensor) -> torch.Tensor:
        return displacement.norm(dim=1, keepdim=True)


class Good(nn.Module):
    """Invariant in all respects, unless what is between its layers, or other edges, break a property.

    ``between`` gets its part, the features, positions, displacements from the mean, and the batch.
    """

    def __init__(self, between=lambda part, x, *_: x, part: nn.Module | None = None, edges=pairs) -> None:
        super().__init__()
        self.first, self.second, self.out = Convolution(), Convolution(), nn.Linear(2, 1)
        self.between, self.part, self.edges = between, part, edges

    def forward(self, x: torch.Tensor, pos: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        edges, arrow = self.edges(batch), pos - global_mean_pool(pos, batch)[batch]
        x = self.between(self.part, self.first(x, edges, pos), pos, arrow, batch)
        return self.out(global_mean_pool(self.second(x, edges, pos), batch))


class Of(nn.Module):
    """A layer that is a function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.forward = function


def absolute() -> nn.Module:
    """Return a network that uses absolute positions in a layer in the middle."""
    return Good(lambda part, x, pos, *_: x + part(pos), nn.Linear(3, 2))


def components() -> nn.Module:
    """Return a network that passes coordinates of displacements to a layer, as PointNet++ does."""
    return Good(lambda part, x, pos, arrow, batch: x + part(arrow), nn.Linear(3, 2))


def halved(function) -> nn.Module:
    """Return a network in float64 with a part that computes in half precision."""
    return Good(lambda part, x, pos, arrow, batch: x + part(arrow), function)


def capped(batch: torch.Tensor) -> torch.Tensor:
    """Return the first three neighbors of each point, by index."""
    source, target = pairs(batch)
    rank = torch.stack([(target[:i] == target[i]).sum() for i in range(len(target))])
    return torch.stack([source, target])[:, rank < 3]


def paired(batch: torch.Tensor) -> torch.Tensor:
    """Return pairs by the sum of their indices, so that points have different numbers of neighbors."""
    return pairs(batch)[:, pairs(batch).sum(dim=0) % 3 == 0]


def passed(part: nn.Module, x: torch.Tensor, *_: object) -> torch.Tensor:
    return part(x)


def padded(part: nn.Module, x: torch.Tensor, pos: torch.Tensor, arrow: torch.Tensor, batch: torch.Tensor):
    """Pad clouds to the largest size without a mask."""
    return x + part(to_dense_batch(x, batch)[0])[batch]


class FilledUpAtOnce(nn.Module):
    """Pads clouds to the largest size in one module; besides it, only a layer on single points sees the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, pos: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(to_dense_batch(x, batch)[0]).tanh().mean(dim=1)


class Field(nn.Module):
    """A field over four frames per point: displacements expressed in frames rotated by quarter turns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.mlp = layer, nn.Linear(2, 3)

    def forward(self, pos: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        arrow = pos - global_mean_pool(pos, batch)[batch]
        seen = torch.tanh(self.mlp(torch.stack([arrow @ matrix for matrix in cyclic(4).elements.to(pos)], dim=1)))
        return global_add_pool(self.layer(seen.flatten(1)).view_as(seen).sum(dim=1), batch)


class FirstFrame(RelativeFunction):
    """A score of the position as it is seen from the first frame of the fiber, for all frames."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)

    def forward(self, graph, x=None):
        seen = graph.relative.positions[:, :1].expand(-1, graph.fiber, -1)
        return RelativeTerms(displacement_bias=self.net(seen)[:, :, None], row=graph.relative.row)


class Attended(nn.Module):
    """Two attention layers over C4, the second one with that score."""

    def __init__(self) -> None:
        super().__init__()
        self.lifting = LiftingSelfAttention(cyclic(4), 2, 4, heads=2)
        self.attention = GroupAttention(4, 4, heads=2, encoding=FirstFrame())

    def forward(self, x: torch.Tensor, pos: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        graph = lift(pos, cyclic(4), Radius(0.7), batch=batch)
        return global_mean_pool(self.attention(self.lifting(x, graph), graph).mean(dim=1), batch)


BATCH, ORDER, TURN = "rest of the batch", "order of points", "random 0"
BROKEN = {
    "absolute": (absolute, "translation", "part", "absolute positions"),
    "components": (components, TURN, "part", "components of vectors"),
    "half": (lambda: halved(Of(lambda x: x.half().norm(dim=1)[:, None].to(x))), TURN, "part", "half precision"),
    "capped": (lambda: Good(edges=capped), ORDER, "first", "capped neighbors"),
    "capped around": (lambda: Good(edges=lambda batch: capped(batch).flip(0)), ORDER, "first", "capped neighbors"),
    "paired": (lambda: Good(edges=paired), ORDER, "first", "neighbors chosen by order"),
    "numbered": (lambda: Good(lambda _, x, *rest: x * torch.arange(len(x))[:, None]), ORDER, "", ORDER),
    "statistics": (
        lambda: Good(passed, nn.BatchNorm1d(2, track_running_stats=False)),
        BATCH,
        "part",
        "batch statistics",
    ),
    "filled up": (lambda: Good(padded, Of(lambda x: torch.tanh(x + 0.3).mean(dim=1))), BATCH, "part", "padding"),
    "filled up at once": (FilledUpAtOnce, BATCH, "", "padding"),
    "drops": (lambda: Good(passed, Of(partial(nn.functional.dropout, p=0.5))), "same clouds", "part", "randomness"),
    "statistics of frames": (
        lambda: Field(nn.BatchNorm1d(12)),
        "element 1",
        "layer",
        "batch statistics over the fiber",
    ),
    "score": (Attended, "element 1", "attention", "weights that differ between frames"),
    "weights of frames": (lambda: Field(nn.Linear(12, 12)), "element 1", "layer", "weights that differ between frames"),
}
"""Networks with the change that breaks them, and the layer and cause to be found."""


def spoiled(make) -> nn.Module:
    network = randomize(make())
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d) and module.running_mean is not None:
            module.running_mean.copy_(torch.linspace(-1, 1, len(module.running_mean)))
    return network


@pytest.mark.parametrize("name", BROKEN)
def test_the_first_layer_that_breaks_is_named_with_its_cause(name):
    make, check, module, cause = BROKEN[name]
    group = cyclic(4) if check == "element 1" else E(3)
    certificate = certify(spoiled(make), clouds(group.dim), group, **QUICK)
    assert certificate.verdict == "failed"
    told = {one.check: one for one in certificate.diagnoses}
    assert (told[check].module, told[check].cause) == (module, cause), str(certificate)
    assert cause in str(certificate)
    assert Certificate.from_json(certificate.to_json()) == certificate


def test_a_good_network_is_not_accused():
    named = clouds()
    for cloud, container in zip(named, (list, tuple, np.array), strict=True):  # names of points are reordered
        cloud.names = container([str(number) for number in range(len(cloud.pos))])
    for cloud in named:
        certificate = certify(randomize(Good()), cloud, E(3), **QUICK)
        assert certificate.verdict == "kept", str(certificate)
        assert certificate.diagnoses == ()
        assert certificate.device == "cpu"


def in_boxes(**attributes: object) -> list[Data]:
    """Return the clouds in oblique periodic boxes, which the networks of this file ignore."""
    found = clouds()
    for cloud in found:
        cloud.cell = torch.tensor([[[4.0, 0.3, 0.0], [0.5, 5.0, 0.2], [0.0, -0.4, 4.5]]])
        cloud.update(attributes)
    return found


def judged(certificate: Certificate, check: str) -> set[bool | None]:
    return {row.passed for row in certificate.rows if row.check == check}


def test_networks_that_ignore_the_lattice_fail_with_other_periodic_images():
    network = randomize(Good())
    certificate = certify(network, in_boxes(), E(3), **QUICK)
    assert {row.check for row in certificate.rows if row.passed is False} == {"image"}, str(certificate)
    assert certificate.worst("image")["float64"] > 1e-2
    assert [(one.check, one.cause) for one in certificate.diagnoses] == [("periodic images", "images of points")]
    searched = certify(network, in_boxes(), "search", **QUICK)
    assert searched.passed, str(searched)
    assert (searched.group, judged(searched, "image")) == ("E(3)", {None})
    assert {row.passed for row in searched.rows if row.label == "periodic images"} == {False}


def test_points_move_to_other_images_along_periodic_axes_only():
    def along_the_last_axis(pos: torch.Tensor, cell: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        normal = torch.linalg.cross(cell[:, 0], cell[:, 1])[batch]
        return global_mean_pool((pos * normal).sum(dim=1, keepdim=True), batch)

    slabs = in_boxes(pbc=torch.tensor([[True, True, False]]))
    assert certify(along_the_last_axis, slabs, SO(3), **QUICK).passed
    assert not certify(along_the_last_axis, in_boxes(), SO(3), **QUICK).passed
    alone = certify(along_the_last_axis, in_boxes(pbc=torch.zeros(1, 3) > 0), SO(3), **QUICK)
    assert judged(alone, "image") == set()


def test_lattice_vectors_stay_in_their_order_when_as_many_points_are_reordered():
    def along_the_first_vector(pos: torch.Tensor, cell: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        first = cell[::3][batch]
        return global_mean_pool((pos * first).sum(dim=1, keepdim=True), batch)

    data = [Data(pos=cloud.pos[:3], cell=cloud.cell[0], pbc=torch.zeros(1, 3) > 0) for cloud in in_boxes()]
    assert judged(certify(along_the_first_vector, data, SO(3), **QUICK), "permutation") == {True}


@pytest.mark.parametrize("step", [1, -1])
def test_crystals_and_molecules_are_certified_together(step):
    crystal, molecule = (Data(pos=2 * torch.rand(points, 3), charge=1) for points in (5, 4))
    crystal.cell, data = in_boxes()[0].cell, [crystal, molecule][::step]
    certificate = certify(Springs().double(), data, E(3), **QUICK)
    assert certificate.verdict == "kept", str(certificate)
    assert judged(certificate, "image") == {True}
    stressed = certify(EnergyForces(Springs().double(), stress=True, jumps="allow"), data, E(3), **QUICK)
    assert stressed.verdict == "kept", str(stressed)
    del molecule.charge
    with pytest.raises(ValueError, match=rf"data\.charge: .*none in cloud {1 if step == 1 else 0}"):
        certify(Springs(), data, E(3), **QUICK)


def test_other_images_of_given_edges_and_of_positions():
    edges = in_boxes(edge_index=torch.tensor([[0, 1], [1, 0]]))
    assert judged(certify(randomize(Good()), edges, E(3), **QUICK), "image") == set()
    atoms = [Data(pos=torch.rand(1, 3), cell=2 * torch.eye(3)[None]) for _ in range(2)]
    for data in (in_boxes(), atoms):
        found = certify(lambda pos: 1.0 * pos, data, E(3), outputs="position", **QUICK)
        assert (found.verdict, judged(found, "image")) == ("kept", {True})


def test_rounding_of_positions_far_from_the_origin_is_seen_where_it_matters():
    far = clouds()
    for cloud in far:
        cloud.pos = cloud.pos.double() + 1e4
    options = {"continuity": False, "rotations": 0, "elements": 2}
    (one,) = certify(randomize(Good()), far, E(3), **options).diagnoses
    assert one.cause == "rounding of positions far from the origin"
    assert "in float32" in one.check
    assert "center the data" in one.evidence
    centers = [cloud.pos.mean(dim=0) for cloud in far]
    apart = [c.norm() / (cloud.pos - c).norm(dim=1).max() for cloud, c in zip(far, centers, strict=True)]
    assert f"float32 rounds them to {2**-23 * float(max(apart)):.0e} of the extent" in one.evidence
    broken = certify(spoiled(components), far, E(3), **options)
    assert one.cause not in {told.cause for told in broken.diagnoses}


def molecules(atoms: int) -> list[Data]:
    """Return a chain of atoms, 1.1 to 1.5 Å apart, as data sets have them: around the origin, in float32."""
    random = np.random.default_rng(atoms)
    pos = np.zeros((1, 3))
    while len(pos) < atoms:
        step = random.normal(size=3) + np.array([1, 0, 0])
        step *= random.uniform(1.1, 1.5) / np.linalg.norm(step)
        new = pos[random.integers(max(0, len(pos) - 3), len(pos))] + step
        pos = pos if np.linalg.norm(new - pos, axis=1).min() < 1 else np.vstack([pos, new])
    z = torch.from_numpy(random.choice([1, 6, 7, 8], atoms))
    return [Data(z=z, pos=torch.from_numpy(pos - pos.mean(axis=0)).float())]


class Push(nn.Module):
    """Adds a force that does not rotate, relative to the largest force, in some precisions."""

    kind = {"energy": "invariant", "force": "vector"}  # noqa: RUF012

    def __init__(self, network: nn.Module, size: float, only: torch.dtype | None = None) -> None:
        super().__init__()
        self.network, self.size, self.only, self.symmetry = network, size, only, network.symmetry

    def forward(self, data: Batch) -> dict[str, torch.Tensor]:
        energy, force = self.network(data)
        if self.only in (None, force.dtype):
            force = force + self.size * force.abs().max() * torch.tensor([1.0, 0.0, 0.0]).to(force)
        return {"energy": energy, "force": force}


def of_forces(name: str, layers: int = 2) -> EnergyForces:
    torch.manual_seed(0)
    species = Species((1, 6, 7, 8))
    wide, turns = {"neighborhood": Radius(5.0), "pool": "sum"}, cyclic_about(3)
    network = {
        "distances": lambda: DistanceTransformer(species, 1, channels=8 * layers, layers=layers, **wide),
        "directions": lambda: DirectionConvNet(turns, species, 1, channels=16, layers=2, **wide),
        "framewise": lambda: FramewiseTransformer(turns, species, 1, channels=8, layers=1, **wide),
    }[name]()
    return EnergyForces(randomize(network))


FEW = {"continuity": False, "rotations": 0, "elements": 1}


@pytest.mark.parametrize("atoms", some([5, 10, 20, 40, 100], quick=[5]))
@pytest.mark.parametrize("name", some(["distances", "directions", "framewise"], quick=["directions"]))
def test_rounding_is_told_from_broken_networks_of_any_size(name, atoms):
    """Right networks failed in float32: moved positions are rounded, and forces of large molecules amplify it."""
    network, data = of_forces(name), molecules(atoms)
    found = certify(network, data, **FEW)
    assert found.verdict == "kept", str(found)
    for dtypes in ([torch.float32], [torch.float32, torch.float64])[: 1 + (name == "distances")]:
        assert certify(Push(network, 1e-4), data, dtypes=dtypes, **FEW).verdict == "failed"


def test_rounding_is_explained_by_the_network_in_float64():
    network, data = of_forces("distances", layers=1), molecules(20)
    largest = float(network.eval()(data[0]).force.abs().max())
    found = certify(network, data, **FEW)
    errors = [row.max_error / largest for row in found.rows if row.output == "force" and row.dtype == "float32"]
    assert max(errors) > 1e-5  # it failed
    assert found.verdict == "kept"
    assert certify(network, data, dtypes=[torch.float32], **FEW).verdict == "kept"
    strict = certify(network, data, tolerances={torch.float32: 1e-5}, **FEW)
    assert strict.verdict == "failed"
    (told,) = strict.diagnoses
    assert (told.module, told.cause) == (None, "only in float32")
    once = certify(Push(of_forces("framewise"), 1e-4, torch.float32), data, **FEW)
    assert [one.cause for one in once.diagnoses] == ["only in float32"]
    assert re.search(r"float64 passes, and rounding explains \de-0[56] of the error", once.diagnoses[0].evidence)


def test_a_function_that_needs_float32_is_judged_without_its_twin():
    """Its errors in float64 are not known, so none of those in float32 is rounding."""
    weights = torch.rand(3, 1)

    def wrong(pos: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return global_add_pool(pos @ weights, batch)

    (row, *_) = certify(wrong, clouds(), SO(3), dtypes=[torch.float32], continuity=False).rows
    assert row.passed is False
    batch = Batch.from_data_list(clouds())
    assert row.allowed == pytest.approx(1e-5 * max(1.0, float(wrong(batch.pos, batch.batch).abs().max())))


class Trace(nn.Module):
    """Passes tensors to a layer within a layer, which follow no known law, so that the outer one is named."""

    def __init__(self) -> None:
        super().__init__()
        self.exact = nn.Identity()
        self.inner = Of(lambda tensor: tensor.half().diagonal(dim1=1, dim2=2).sum(dim=1, keepdim=True).to(tensor))

    def forward(self, arrow: torch.Tensor) -> torch.Tensor:
        return self.exact(self.inner(arrow[:, :, None] * arrow[:, None]))


def test_half_precision_within_a_layer_is_seen():
    certificate = certify(spoiled(lambda: halved(Trace())), clouds(), E(3), **QUICK)
    assert {(one.module, one.cause) for one in certificate.diagnoses} == {("part", "half precision")}, str(certificate)
    calls = record(Probe(halved(Trace()), torch.float64, as_images=False), clouds())
    found = {call.name: call.coarsest for call in calls if call.name.startswith("part")}
    assert found == {"part.inner": torch.float16, "part.exact": torch.float64, "part": torch.float16}


class Symmetric(nn.Conv2d):
    """A convolution whose kernel is invariant to quarter turns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = sum(self.weight.rot90(turns, dims=(2, 3)) for turns in range(4))
        return self._conv_forward(x, weight, self.bias)


def network_of_images(*layers: nn.Module) -> nn.Module:
    return randomize(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()))


class Shortcut(Symmetric):
    """A part that has a result with its own stride only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh() + nn.functional.avg_pool2d(x, 2)


class Method(Symmetric):
    """A part whose stride is a method."""

    def __init__(self) -> None:
        super().__init__(1, 4, 3, padding=1)
        del self.stride

    def stride(self) -> int:
        return 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = sum(self.weight.rot90(turns, dims=(2, 3)) for turns in range(4))
        return nn.functional.conv2d(x, weight, self.bias, self.stride(), 1).tanh()


STRIDE = "strided pooling on the wrong residue"
PLANAR = {
    "even sides": (8, (Symmetric(1, 4, 3), nn.Tanh(), nn.MaxPool2d(2)), None, None),
    "odd sides": (9, (Symmetric(1, 4, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)), "2", STRIDE),
    "list": (9, (Symmetric(1, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d([2, 2])), "2", STRIDE),
    "strided": (8, (Symmetric(1, 4, 3, stride=2, padding=1), nn.Tanh()), "0", STRIDE),
    "one side": (
        8,
        (Symmetric(1, 4, 3), nn.Tanh(), nn.ZeroPad2d((0, 1, 0, 1)), Symmetric(4, 4, 3), nn.Tanh()),
        "2",
        "padding",
    ),
    "kernel": (8, (nn.Conv2d(1, 4, 3), nn.Tanh()), "0", "unknown"),
    "shortcut": (8, (Shortcut(1, 4, 3, stride=2, padding=1),), "0", "unknown"),
    "method": (8, (Method(),), "0", "unknown"),
}


@pytest.mark.parametrize("name", PLANAR)
def test_images_break_at_strides_paddings_and_kernels(name):
    size, layers, module, cause = PLANAR[name]
    certificate = certify(network_of_images(*layers), images(size), cyclic(4), **QUICK)
    if module is None:
        assert certificate.verdict == "kept"
        return
    assert certificate.verdict == "failed"
    found = certificate.diagnoses[0]
    assert (found.module, found.cause) == (module, cause), str(certificate)
    assert ("with stride 2 on" in found.evidence) == (cause == STRIDE)


class MirroredVolumes(nn.Conv3d):
    """A convolution of voxels whose kernel is invariant to the exchange of left and right."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(x, self.weight + self.weight.flip(4), self.bias)


VOLUMES = {
    "strided": (8, MirroredVolumes(1, 4, 3, stride=(1, 3, 2), padding=1), STRIDE),
    "one side": (12, nn.ReplicationPad3d((0, 1, 0, 0, 0, 0)), "padding"),
    "kernel": (8, nn.Conv3d(1, 4, 3), "unknown"),
}


@pytest.mark.parametrize("name", VOLUMES)
def test_volumes_break_at_strides_paddings_and_kernels(name):
    side, layer, cause = VOLUMES[name]
    last = nn.Tanh(), nn.AdaptiveAvgPool3d(1), nn.Flatten()
    network = nn.Sequential(MirroredVolumes(1, 1, 3), nn.Tanh(), layer, *last)
    volumes = torch.rand(2, 1, 10, 9, side + 2, generator=torch.Generator().manual_seed(1))
    certificate = certify(randomize(network), volumes, reflection(3, axis=0), **QUICK)
    found = certificate.diagnoses[0]
    assert (found.module, found.cause) == ("2", cause), str(certificate)
    if name == "strided":
        text = "with stride 1 x 3 x 2 on 8 x 7 x 8 voxels samples other ones if the image is reflected"
        assert text in found.evidence


def pixels_in_a_row(data: Batch) -> torch.Tensor:
    return (data.x.view(data.num_graphs, -1) @ torch.linspace(-1, 1, 16)[:, None].to(data.x)).tanh()


def test_a_search_of_an_ordinary_network_of_images_asks_for_no_order_of_pixels():
    network = network_of_images(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh())
    certificate = certify(network, images(), "search", **QUICK)
    assert (certificate.group, certificate.verdict) == (None, "not promised")
    assert {one.module for one in certificate.diagnoses} == {"0"}
    assert "order of points" not in {one.check for one in certificate.diagnoses}
    of_points = [Data(x=image.flatten()[:, None], **planar(4)) for image in images(4)]
    certificate = certify(pixels_in_a_row, of_points, "search", **QUICK)
    assert "order of points" not in {one.check for one in certificate.diagnoses}


def planar(size: int) -> dict[str, torch.Tensor]:
    return {"pos": pixel_positions(size, size), "grid": torch.tensor([[size, size]])}


# --- any function ---------------------------------------------------------------------------------------------


def spring(data: Batch) -> dict[str, torch.Tensor]:
    i, j = pairs(data.batch)
    apart = data.pos[i] - data.pos[j]
    energy = 0.25 * global_add_pool((apart.norm(dim=1) - 1).square(), data.batch[i])
    return {"energy": energy, "forces": -global_add_pool((1 - 1 / apart.norm(dim=1))[:, None] * apart, i)}


def wrong_spring(data: Batch) -> dict[str, torch.Tensor]:
    found = spring(data)
    return {**found, "forces": 1.01 * found["forces"]}


def whirl(data: Batch) -> dict[str, torch.Tensor]:
    return {"forces": torch.linalg.cross(spring(data)["forces"], data.pos - global_mean_pool(data.pos, data.batch)[0])}


KINDS = {"forces": "vector"}


@pytest.mark.parametrize("seed", range(2))
def test_forces_are_judged_between_the_kinks_of_an_energy(seed):
    """Steps across a kink say nothing about the slope beside it, so only the last and shortest ones count."""

    def bent(data: Batch, factor: float = 1.0) -> dict[str, torch.Tensor]:
        i, j = pairs(data.batch)
        pos = data.pos.detach().requires_grad_()
        steps = (pos[i] - pos[j]).norm(dim=1, keepdim=True) - torch.linspace(0.2, 4.0, 400, dtype=pos.dtype)
        signs = torch.tensor([1.0, -1.0]).repeat(200).to(pos)
        energy = 0.25 * global_add_pool((steps.relu() * signs).sum(dim=1).square(), data.batch[i])
        (slope,) = torch.autograd.grad(energy.sum(), pos)
        return {"energy": energy.detach(), "forces": -factor * slope}

    for factor in (1.0, 1.01):
        found = certify(partial(bent, factor=factor), clouds(), trivial(3), outputs=KINDS, seed=seed, **QUICK)
        (row,) = [row for row in found.rows if row.check == "gradient"]
        assert row.passed == (factor == 1), str(found)


@pytest.mark.parametrize("sizes", [(1, 6), (6, 1)], ids=str)
def test_clouds_without_forces_say_nothing_about_forces(sizes):
    def trap(data: Batch) -> dict[str, torch.Tensor]:
        away = data.pos - global_mean_pool(data.pos, data.batch)[data.batch]
        energy = 0.5 * global_add_pool(away.square().sum(dim=1), data.batch)
        return {"energy": energy, "forces": -1.01 * away}  # zero for a single point

    rows = certify(trap, clouds(3, sizes), E(3), outputs=KINDS, **QUICK).rows
    (row,) = [row for row in rows if row.check == "gradient"]
    assert row.passed is False
    assert row.relative == pytest.approx(0.01, rel=0.02)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6, 0.0])
def test_forces_are_judged_at_their_own_scale(scale):
    def scaled(wrong: float, constant: float = 0.0):
        def network(data: Batch) -> dict[str, torch.Tensor]:
            found = spring(data)
            return {"energy": constant + scale * found["energy"], "forces": wrong * scale * found["forces"]}

        return network

    def passed(network) -> bool:
        rows = certify(network, clouds(sizes=(5,)), trivial(3), outputs=KINDS, **QUICK).rows
        (judged,) = (row.passed for row in rows if row.check == "gradient")
        return judged

    assert passed(scaled(1.0))
    assert passed(scaled(1.0, 1e6))
    if scale:
        assert not passed(scaled(-1.0))
        assert not passed(scaled(1.0001))


def test_forces_are_not_judged_without_a_promise():
    network = Springs()
    network.symmetry, network.kind = None, KINDS
    network.forward = wrong_spring
    for group, judged in ((None, None), (E(3), False)):
        found = certify(network, clouds(), group, **QUICK)
        assert [row.passed for row in found.rows if row.check == "gradient"] == [judged]


def test_a_search_judges_every_output_in_its_own_size():
    def network(pos, batch):
        size = global_add_pool((pos - global_mean_pool(pos, batch)[batch]).norm(dim=1), batch)
        odd = 100 + global_add_pool((pos @ pos.new_tensor([1.0, 2.0])).pow(3), batch)
        return {"odd": odd, "size": size}

    found = certify(network, clouds(2), "search", **QUICK)
    assert found.group is None  # although distances have all symmetries
    sizes = {row.max_error / row.relative for row in found.rows if (row.check, row.output) == ("searched", "odd")}
    assert min(sizes) == pytest.approx(max(sizes))
    assert min(sizes) > 100


def test_gradients_are_those_of_one_energy_for_each_cloud():
    def measured(function, kinds=None, dtype=torch.float64, points=3):
        cloud = Data(pos=torch.randn(points, 3))
        rows = conservation(Probe(function, dtype, False), [cloud], kinds or {}, True, torch.Generator())
        return [(row.check, row.passed) for row in rows]

    def well(pos, batch):
        return {"energy": global_add_pool(pos.square().sum(1), batch) / 2, "forces": -pos}

    assert measured(well) == measured(well, points=1) == [("gradient", True)]
    assert measured(lambda pos, batch: {**well(pos, batch), "forces": pos}) == [("gradient", False)]
    assert measured(lambda pos, batch: {**well(pos, batch), "energy": pos.square().sum(1)}) == [("curl", None)]
    assert measured(lambda pos, batch: {**well(pos, batch), "forces": torch.nan * pos}) == [("gradient", False)]
    assert measured(well, {"forces": "invariant"}) == measured(well, dtype=torch.float32) == []


def test_forces_alone_have_a_curl_or_none():
    def forces_of(function):
        return lambda data: {"forces": function(data)["forces"]}

    found = []
    for function in (forces_of(spring), whirl):
        (row,) = [r for r in certify(function, clouds()[:1], SE(3), outputs=KINDS, **QUICK).rows if r.check == "curl"]
        assert row.passed is None
        found.append(row.relative)
    assert found[0] < 1e-7
    assert found[1] > 1e-2


class Waves(nn.Module):
    """Sums of complex waves of distances, or of a coordinate in the imaginary part only."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken, self.factor = broken, nn.Parameter(torch.tensor(1 + 0.5j))

    def forward(self, pos: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        arrow = pos - global_mean_pool(pos, batch)[batch]
        real = (self.factor * arrow.norm(dim=1, keepdim=True)).exp()
        phase = arrow[:, :1].square() if self.broken else real.imag
        return global_add_pool(torch.complex(real.real, phase), batch)


def test_both_parts_of_complex_outputs_are_compared():
    assert certify(Waves(broken=False), clouds(), E(3), **QUICK).verdict == "kept"
    certificate = certify(Waves(broken=True), clouds(), E(3), **QUICK)
    assert "element" in {row.check for row in certificate.rows if row.passed is False}
    found = certify(lambda pos, batch: torch.complex(pos, 2 * pos), clouds(), E(3), outputs="position", **QUICK)
    assert "translation" in {one.check for one in found.diagnoses}  # the imaginary part moves twice as far
    assert certify(lambda pos, batch: torch.polar(pos * 0 + 2, pos * 0 + 1), clouds(), E(3), **QUICK).vacuous


def test_networks_that_keep_results_with_their_graph():
    def keep(part, x, *_):
        part.saved, part.several = x, {"sums": [x.sum()]}
        return x

    network = randomize(Good(keep, nn.Identity())).train()
    data = Batch.from_data_list(clouds())
    network(data.x, data.pos, data.batch)
    saved = network.part.saved
    assert certify(network, clouds(), E(3), **QUICK).verdict == "kept"
    assert network.part.saved is saved
    assert saved.requires_grad


def test_boolean_outputs_have_no_derivatives():
    certificate = certify(lambda pos, batch: distances(pos, batch) > 2, clouds(), E(3), rotations=0, elements=2)
    assert {row.check for row in certificate.rows} >= {"element", "continuity"}
    assert "first derivative" not in {row.check for row in certificate.rows}


def test_calculators_of_ase():
    lj = pytest.importorskip("ase.calculators.lj")
    spread = [Data(pos=2 * cloud.pos, z=cloud.z) for cloud in clouds(sizes=(4, 3))]
    certificate = certify(lj.LennardJones(rc=20.0), spread, E(3), continuity=False, elements=1, rotations=0)
    assert certificate.verdict == "kept", str(certificate)
    assert {row.dtype for row in certificate.rows} == {"float64"}
    assert [row.passed for row in certificate.rows if row.check == "gradient"] == [True]
    assert "continuity" in {row.check for row in certify(lj.LennardJones(rc=20.0), spread[:1], E(3), elements=1).rows}


def test_calculators_have_stresses_only_of_clouds_that_are_periodic_along_three_vectors():
    pytest.importorskip("ase")
    from lieattn.ase import Calculator

    calculator = Calculator(Springs().double(), jumps="allow")
    cell = 4.0 * torch.eye(3)[None]
    whole, slab = (
        Data(pos=4 * torch.rand(3, 3), z=torch.ones(3).long(), cell=cell, pbc=torch.tensor([[True, True, third]]))
        for third in (True, False)
    )
    for given, stresses in (([whole], True), ([slab], False), ([slab, whole], True)):
        certificate = certify(calculator, given, SE(3), continuity=False, elements=1, rotations=0)
        assert certificate.verdict == "kept", str(certificate)
        assert ("stress" in {row.output for row in certificate.rows}) == stresses


class Springs(nn.Module):
    """An energy of pairs of points, and of their periodic images."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, data: Data) -> torch.Tensor:
        batch = torch.zeros(len(data.pos)).long() if data.get("batch") is None else data.batch
        cell = 100 * torch.eye(3).to(data.pos) if data.get("cell") is None else data.cell
        (source, target), shift = periodic_radius_graph(data.pos, 2.5, cell, data.get("pbc"), batch)
        distance = (data.pos[source] + shift - data.pos[target]).norm(dim=1, keepdim=True)
        return global_add_pool(self.weight * (2.5 - distance).clamp(min=0) ** 3, batch[target], int(batch[-1]) + 1)


def of_place(pos: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return distances(pos, batch) * (1 + torch.arange(int(batch[-1]) + 1)[:, None])  # the first cloud is unchanged


def test_clouds_after_the_first_may_depend_on_their_batch():
    certificate = certify(of_place, clouds(), E(3), **QUICK)
    assert [found.check for found in certificate.diagnoses] == ["rest of the batch"]


# --- code of other people -------------------------------------------------------------------------------------


def in_place(data):
    data.pos -= global_mean_pool(data.pos, data.batch)[data.batch]
    return global_mean_pool(data.pos.square().sum(dim=1, keepdim=True), data.batch)


def by_numpy(data):
    arrow = data.pos - global_mean_pool(data.pos, data.batch)[data.batch]
    return global_mean_pool(torch.from_numpy((arrow.numpy() ** 2).sum(axis=1, keepdims=True)), data.batch)


def with_an_assertion(data):
    assert int(torch.bincount(data.batch).min()) >= 3, "expected three points"
    arrow = data.pos - global_mean_pool(data.pos, data.batch)[data.batch]
    return global_mean_pool(arrow.square().sum(dim=1, keepdim=True), data.batch)


def of_few_clouds(data):
    arrow = data.pos - global_mean_pool(data.pos, data.batch)[data.batch]
    if data.num_graphs > 10:
        raise RuntimeError("expected a small batch")
    return global_mean_pool(arrow.square().sum(dim=1, keepdim=True), data.batch)


@pytest.mark.parametrize("network", [in_place, by_numpy, with_an_assertion, of_few_clouds])
def test_networks_may_change_their_input_have_no_derivatives_and_refuse_clouds(network):
    certificate = certify(network, clouds(sizes=(4, 5)), E(3), elements=2, rotations=1)
    assert certificate.verdict == "kept", str(certificate)
    checks = {row.check for row in certificate.rows}
    assert ("continuity" in checks) == (network is not of_few_clouds)
    assert ("first derivative" in checks) == (network in (in_place, with_an_assertion))


def test_derivatives_are_measured_in_inference_mode():
    with torch.inference_mode():
        forces = certify(EnergyForces(Springs(), jumps="allow"), clouds(), SE(3), **QUICK)
        energies = certify(with_an_assertion, clouds(2, sizes=(4,)), SE(2), **{**QUICK, "continuity": True})
    assert forces.verdict == energies.verdict == "kept"
    assert "gradient" in {row.check for row in forces.rows}
    assert "first derivative" in {row.check for row in energies.rows}


# --- a search -------------------------------------------------------------------------------------------------


def distances(pos: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    i, j = pairs(batch)
    return global_mean_pool((pos[i] - pos[j]).norm(dim=1, keepdim=True).tanh(), batch[i])


def squares(pos: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    i, j = pairs(batch)
    return global_mean_pool((pos[i] - pos[j]).abs().sum(dim=1, keepdim=True).tanh(), batch[i])


def from_origin(pos: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return global_mean_pool(pos.norm(dim=1, keepdim=True).tanh(), batch)


def quartic(pos: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return global_add_pool(pos.pow(4).sum(dim=1), batch)


def angles(pos: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    total = (pos - global_mean_pool(pos, batch)[batch]).square().sum(dim=1, keepdim=True)
    return global_mean_pool(total.square(), batch) / global_mean_pool(total, batch).clamp(min=1e-6).square()


def triple(pos: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    arrow = pos - global_mean_pool(pos, batch)[batch]
    moments = [global_mean_pool(arrow * arrow.norm(dim=1, keepdim=True) ** k, batch) for k in (1, 2, 3)]
    return torch.linalg.det(torch.stack(moments, dim=1))[:, None]


def centers(pos: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return global_mean_pool(pos, batch)


def along_an_axis(pos: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    arrow = pos - global_mean_pool(pos, batch)[batch]
    return global_mean_pool((arrow @ arrow.new_tensor([[0.3], [0.5], [0.7]])).exp(), batch)


def first_of_all(pos: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return pos[torch.searchsorted(batch, torch.arange(int(batch.max()) + 1)), :1].exp()


SEARCHED = {
    "distances": (distances, 3, "E(3)", {"permutations"}, {"scales"}),
    "plane": (distances, 2, "E(2)", {"translations", "permutations"}, {"scales"}),
    "squares": (squares, 2, "D4", {"C4", "C2"}, {"C8", "SO(2)", "C3"}),
    "cubes": (squares, 3, "Oh", {"O", "T"}, {"I", "SO(3)"}),
    "origin": (from_origin, 3, "O(3)", {"SO(3)"}, {"translations"}),
    "cubes about the origin": (quartic, 3, "Oh", {"O"}, {"translations", "SO(3)"}),
    "scales": (angles, 3, "E(3)", {"scales"}, set()),
    "chiral": (triple, 3, "E(3)", {"permutations"}, {"scales"}),
    "centers": (centers, 3, "E(3)", {"translations"}, set()),
    "shifts": (along_an_axis, 3, "R^3", {"translations"}, {"C2", "SO(3)"}),
    "nothing": (first_of_all, 3, None, set(), {"translations", "C2", "SO(3)"}),
}


@pytest.mark.parametrize("name", SEARCHED)
def test_a_search_finds_the_group(name):
    network, dim, group, yes, no = SEARCHED[name]
    certificate = certify(network, clouds(dim), "search", **QUICK)
    held = {row.label for row in certificate.rows if row.check == "searched" and row.passed}
    assert certificate.group == group, certificate.table()
    assert yes <= held
    assert not no & held
    assert certificate.guarantee == "found by a search"
    assert certificate.verdict in ("kept", "not promised")


def test_a_search_says_what_outputs_are():
    """The search finds that the outputs are vectors; taken as invariants, they would have no group."""
    assert certify(lambda pos, batch: spring(Data(pos=pos, batch=batch)), clouds(), "search", **QUICK).group == "E(3)"
    found = certify(lambda pos, batch: distances(pos, batch) * 0 + 1, clouds(2), "search", **QUICK)
    assert (found.group, found.verdict) == ("E(2)", "vacuous")
    with pytest.raises(ValueError, match=r"group: .*4"):
        certify(distances, clouds(4), "search", **QUICK)
    certificate = certify(network_of_images(Symmetric(1, 4, 3), nn.Tanh()), images(), "search", **QUICK)
    assert certificate.group in ("C4", dihedral(4).name)
    assert not math.isnan(certificate.spread)


def rooted() -> nn.Module:
    """Return a network with roots of numbers below 0."""
    return Good(lambda part, x, pos, *_: x + part(pos.norm(dim=1, keepdim=True)), Of(lambda x: (-x - 1).sqrt()))


def not_finite(pos: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return distances(pos, batch) * float("nan")


@pytest.mark.parametrize("group", [E(3), "search"], ids=str)
def test_outputs_that_are_not_finite_fail_for_that_alone(group):
    for network, module in ((randomize(rooted()), "part"), (not_finite, None)):
        certificate = certify(network, clouds(), group, **QUICK)
        assert (certificate.verdict, certificate.group) == ("failed", None if group == "search" else "E(3)")
        (told,) = certificate.diagnoses
        assert (told.check, told.module, told.cause) == ("any clouds", module, "not finite")
        assert "3 of 3 numbers are not finite" in str(told)
        assert certificate.failure == "outputs are not finite"
        assert "Outputs are not finite." in certificate.to_html()


def test_elements_that_were_never_promised_have_no_cause():
    """No layer is blamed if an exact network lacks reflections, or other rotations."""
    data = [Data(x=torch.rand(len(cloud.pos), 2), pos=cloud.pos) for cloud in clouds()]
    network = randomize(FramewiseTransformer(tetrahedral(), 2, 1, channels=4, layers=1, heads=1))
    certificate = certify(network, data, "search", **QUICK)
    assert (certificate.group, certificate.verdict) == ("T", "kept")
    told, lacking = "not promised: the network promises T, which does not contain it", ("a reflection", "a rotation")
    assert {str(one).partition(", ")[2] for one in certificate.diagnoses} == {f"{one}: {told}" for one in lacking}
    certificate = certify(network, data, E(3), **QUICK)
    assert certificate.verdict == "failed"
    assert all(one.cause == "not promised" for one in certificate.diagnoses)

    def handed(pos: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return triple(pos, batch) + distances(pos, batch)

    (one,) = certify(handed, clouds(), "search", **QUICK).diagnoses
    assert str(one).endswith("a reflection: not promised: the search found SE(3), which does not contain it")


# --- the card -------------------------------------------------------------------------------------------------


def test_the_card_is_one_page_that_says_it_all():
    certificate = certify(spoiled(absolute), clouds(), E(3), continuity=False, elements=1)
    text = certificate.to_html()
    for words in ("failed", "part (Linear)", "absolute positions", "Errors, worst of each check", "FAILED"):
        assert words in text
    assert certificate._repr_html_() == text
    assert not any(words in text for words in ("<script", "src=", "href="))
    found = certify(lambda pos, batch: {"<b>": distances(pos, batch)}, clouds(2), "search", **QUICK)
    assert "searched SO(2) (&lt;b&gt;)" in found.to_html()


# --- the command, tests and training --------------------------------------------------------------------------


def test_the_command_takes_networks_by_name(tmp_path, capsys):
    quick = ["--elements", "1", "--outside", "0", "--clouds", "2", "--dtype", "float64"]
    few = [*quick, "--points", "5", "--dim", "2"]
    page, written = tmp_path / "card.html", tmp_path / "card.json"
    saved = ["--html", str(page), "--json", str(written)]
    assert main(["certify", f"{__name__}:distances", *few, *saved]) == 0
    printed = capsys.readouterr().out
    assert "group: E(2), random and special elements" in printed
    assert "2 random clouds of 5 points in 2 dimensions" in printed
    assert "guarantee kept" in printed
    assert Certificate.from_json(written.read_text()).group == "E(2)"
    assert page.read_text().startswith("<!DOCTYPE html>")
    group = ["--group", "lieattn.groups.E", "--group.dim", "3", "--data", f"{__name__}:clouds"]
    assert main(["certify", f"{__name__}:not_finite", *quick, *group]) == 1
    told = capsys.readouterr().out
    assert "guarantee NOT kept: outputs are not finite\n" in told
    assert main(["certify", f"{__name__}:absolute", *quick, *group]) == 1
    assert "first broken by part (Linear)" in capsys.readouterr().out
    assert main(["certify", f"{__name__}:Scaled", "--model.by", "0", *few]) == 1
    assert "guarantee vacuous" in capsys.readouterr().out


def test_names_lead_to_objects_of_modules(tmp_path, monkeypatch):
    from lieattn.cli._target import drawn_images, given_clouds, is_named, made
    from lieattn.train import UsageError

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    content = ("import torch", "images = torch.zeros(5, 1, 4, 4)", "clouds = [1, 2, 3]", "def build(*parts): return 3")
    (tmp_path / "things_by_name.py").write_text("\n".join((*content, "def network(data): return data")))
    (tmp_path / "needy_things.py").write_text("import no_such_package")
    assert len(given_clouds("things_by_name:images", 2, {})) == 2
    assert given_clouds("things_by_name:clouds", 2, {}) == [1, 2]
    assert made("TARGET", "things_by_name:build", {}) == 3
    assert made("TARGET", "things_by_name:network", {})("data") == "data"
    with pytest.raises(UsageError, match=r"things_by_name:clouds .*\['size'\]"):
        given_clouds("things_by_name:clouds", 2, {"size": 3})
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):  # and not that there is no module needy_things
        made("TARGET", "needy_things:network", {})
    (tmp_path / "file:name").touch()
    assert is_named("file:other")
    assert not any(map(is_named, ("file:name", "file", "a/file:name")))
    assert not torch.equal(drawn_images(None, 1, [1, 2, 2], 0), drawn_images(None, 1, [1, 2, 2], 1))


def test_the_command_takes_saved_networks(tmp_path, capsys):
    path = tmp_path / "network.safetensors"
    network = FramewiseTransformer(tetrahedral(), 2, 1, channels=4, layers=1, heads=1)
    lieattn.save(randomize(network), path)
    quick = ["--features", "2", "--outside", "1", "--clouds", "2", "--points", "5", "--dtype", "float64"]
    assert main(["certify", str(path), *quick]) == 0
    printed = capsys.readouterr().out
    assert "group: T, 12 elements" in printed
    assert "2 random clouds of 5 points in 3 dimensions" in printed
    assert main(["test", "--ckpt_path", str(path)]) == 2
    assert "is a network of lieattn.save, which has neither task nor data" in capsys.readouterr().err


def test_options_for_other_data_are_named_if_a_network_refuses_random_ones(tmp_path, capsys):
    path = tmp_path / "network.safetensors"
    lieattn.save(randomize(AttentiveCNN(cyclic(4), 1, 2, channels=4, attention="none")), path)
    for given, found in (
        ([], "clouds of 12 points in 2 dimensions"),
        (["--images", "1", "8", "8"], "images of 1 x 8 x 8"),
    ):
        assert main(["certify", str(path), *given]) == 2
        told = rf"the network was called with 4 random {found}; for others: --data CLASS, --images CHANNELS ROWS"
        assert re.search(told, capsys.readouterr().err)
    assert main(["certify", str(path), "--images", "28", "28"]) == 2
    assert capsys.readouterr().err.endswith(
        "--images: expected CHANNELS ROWS COLUMNS, or CHANNELS LAYERS ROWS COLUMNS, got 28 28\n"
    )


@pytest.mark.parametrize("name", ["rot-mnist-p4", "rot-mnist-r4"])
def test_networks_of_the_library_get_random_images_as_points(name, capsys):
    """These were refused, because data expected a Batch, and there was no other way to draw their data."""
    quick = ["--clouds", "2", "--outside", "1", "--dtype", "float64"]
    assert main(["certify", name, "--images", "1", "28", "28", *quick]) == 0
    printed = capsys.readouterr().out
    assert "measured on: 2 random images of 1 x 28 x 28" in printed
    assert "raster 1 " in printed


def test_random_clouds_have_the_features_and_the_dimension_of_a_network_of_the_library():
    # Without --features and --dim, its files were refused: data.x got None, or the group acts on 2 coordinates.
    from lieattn.cli._target import drawn_clouds

    inputs = CloudInputs(("charge",), points=2)
    network = EnergyForces(FramewiseTransformer(tetrahedral(), inputs, 1, channels=4, layers=1, heads=1))
    assert drawn_clouds(network, 1, 5, None, None, 0)[0].x.shape == (5, 2)
    assert drawn_clouds(network, 1, 5, None, 3, 0)[0].x.shape == (5, 3)
    planar = GSANet(cyclic(4), 2, 1, neighborhood=Radius(1.0), channels=8, heads=1)
    cloud = drawn_clouds(planar, 1, 5, None, None, 0)[0]
    assert (cloud.x.shape, cloud.pos.shape) == ((5, 2), (5, 2))
    cloud = drawn_clouds(nn.Linear(2, 1), 1, 5, None, None, 0)[0]
    assert cloud.x is None
    assert cloud.pos.shape == (5, 3)


class Scaled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, data: Batch) -> torch.Tensor:
        return self.by * distances(data.pos, data.batch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_module:network"], "TARGET: there is no module 'no_such_module'"),
        ([f"{__name__}:no_such_name"], f"TARGET: {__name__} has no 'no_such_name'"),
        ([f"{__name__}:spring", "--data", f"{__name__}:QUICK"], "--data: expected clouds"),
        ([f"{__name__}:spring", "--device", "nothing"], "cannot use 'nothing'"),
        (
            [f"{__name__}:FilledUpAtOnce", "--model.z", "5"],
            "FilledUpAtOnce: got an unexpected keyword argument 'z', it takes ()",
        ),
        ([f"{__name__}:Scaled"], "Scaled: missing a required argument: 'by', it takes (by:"),
    ],
    ids=["module", "name", "data", "device", "unknown argument", "missing argument"],
)
def test_the_command_says_what_is_wrong(arguments, message, capsys):
    assert main(["certify", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_assertion_shows_the_layer():
    assert assert_certified(randomize(Good()), clouds(), E(3), **QUICK).verdict == "kept"
    with pytest.raises(AssertionError, match=r"part \(Linear\).*absolute positions"):
        assert_certified(randomize(absolute()), clouds(), E(3), **QUICK)
    with pytest.raises(AssertionError, match="verdict: vacuous"):
        assert_certified(lambda pos, batch: 0 * distances(pos, batch), clouds(), E(3), **QUICK)
    with pytest.raises(TypeError, match=r"network: .*3"):
        assert_certified(3, clouds(), E(3))


def monitored(network: nn.Module, epochs: int = 1, every: int = 1, **options) -> list[tuple[int, int, float]]:
    """Train a network, validated in some epochs, and return what is logged: epoch, number of clouds, and error."""
    lightning = pytest.importorskip("lightning.pytorch")
    from lieattn.train import EquivarianceMonitor

    found = []

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def step(self, batch: Batch, index: int) -> torch.Tensor:
            return self.network(batch.x, batch.pos, batch.batch).square().mean()

        training_step = validation_step = step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

        def log(self, name: str, value: float, *, batch_size: int, **options) -> None:
            super().log(name, value, batch_size=batch_size, **options)
            found.append((self.current_epoch, batch_size, float(value)))
            assert name == "equivariance_error"

    monitor = EquivarianceMonitor(elements=1, **options)
    trainer = quiet_trainer(max_epochs=epochs, check_val_every_n_epoch=every, callbacks=[monitor])
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(Task(), *(DataLoader(clouds(sizes=(0, 5, 7, 6)), batch_size=3) for _ in range(2)))
    return found


class AboutTheAxis(nn.Module):
    """A number for each cloud that changes under rotations, except for those about the z axis."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.tensor(size))

    def forward(self, x: torch.Tensor, pos: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        centered = pos - global_mean_pool(pos, batch)[batch]
        return self.size * (1 + global_add_pool(centered[:, 2:].square(), batch))


def test_the_largest_error_is_logged_relative_to_the_outputs_while_a_network_is_trained():
    networks = randomize(Good()), AboutTheAxis(10.0), AboutTheAxis(1e4)
    good, small, large = (error for network in networks for *_, error in monitored(network, group=E(3)))
    assert 1e-10 < good < 1e-5  # in float32
    assert small == pytest.approx(large, rel=1e-3)
    assert small > 1e-3
    with pytest.raises(ValueError, match=r"clouds: .*0"):
        monitored(Good(), clouds=0)


def test_errors_of_the_first_clouds_are_logged_in_every_second_epoch():
    found = monitored(AboutTheAxis(1.0), group=octahedral(), epochs=5, every_n_epochs=2, clouds=1)
    assert [(epoch, count) for epoch, count, _ in found] == [(0, 1), (2, 1), (4, 1)]
    found = monitored(AboutTheAxis(1.0), group=octahedral(), epochs=6, every=2, every_n_epochs=3)
    assert [epoch for epoch, _, _ in found] == [1, 3]  # of the validations in epochs 1, 3 and 5


def test_outputs_of_an_undeclared_kind_are_named():
    def network(data: Batch) -> dict[str, torch.Tensor]:
        energy, forces = spring(data).values()
        return {"energy": energy, "push": forces, "place": data.pos + forces}

    found = certify(network, clouds(), SE(3), **QUICK)
    assert found.verdict == "failed"
    shifted, turned = found.diagnoses
    assert (shifted.cause, turned.cause) == ("kind of the output",) * 2
    assert shifted.evidence == "'place' moves as a position; if this is meant, declare outputs={'place': 'position'}"
    assert turned.evidence == "'push' moves as a vector; if this is meant, declare outputs={'push': 'vector'}"
    assert certify(network, clouds(), SE(3), outputs={"push": "vector", "place": "position"}, **QUICK).verdict == "kept"


def generator_of(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_rotations_as_outputs_stay_rotations_under_mirrors():
    mirror, turn = reflection(3).elements[1], SO(3).sample(4, generator=generator_of(), dtype=torch.float64)
    moved = transform("outputs", "rotation", turn, mirror, torch.zeros(4, 3, dtype=torch.float64))
    assert torch.allclose(moved, -mirror @ turn)
    assert torch.allclose(torch.linalg.det(moved), torch.ones(4, dtype=torch.float64))


def test_all_elements_of_a_finite_group_with_translations_are_measured():
    group = SemidirectProduct(cyclic(4))
    elements = list(elements_of(group, 2, generator_of()))
    assert [element.label for element in elements] == ["0", "1", "2", "3"]
    assert all(element.translation is None for element in elements)
    assert torch.equal(torch.stack([element.linear for element in elements]), cyclic(4).elements)


@pytest.mark.parametrize(
    ("group", "labels"),
    [
        (cyclic(2), ["C4", "C6", "D2", "D4"]),
        (cyclic(8), ["C16", "C24", "D8", "D16"]),
        (dihedral(3), ["D6"]),
        (tetrahedral(), ["O", "Th", "Td", "I", "Ih"]),
        (octahedral(), ["Oh"]),
        (icosahedral(), ["Ih"]),
        (pyritohedral(), ["Oh", "Ih"]),
        (
            commuting_product(cyclic_about(4), inversion(3), "C4h"),
            ["D4zxinversion3", "Oh", "C4h with C8 about its axis", "C4h with SO(2) about its axis"],
        ),
        (direct_product(cyclic(3), trivial(2)), ["C3xtrivial2xinversion4"]),
        (
            cyclic_about(4),
            [
                *("D4z", "C4zxinversion3", "D8z", "D4zxinversion3", "O", "Oh"),
                *("C8 about its axis", "SO(2) about its axis"),
            ],
        ),
    ],
)
def test_larger_groups_are_tried_by_an_element_each(group, labels):
    found = list(outside_of(group, group.dim, 2, generator_of()))
    assert [one.label for one in found[2:]] == [f"element of {label}, outside of {group.name}" for label in labels]
    proper = bool((torch.linalg.det(group.elements) > 0).all())
    assert found[1].label.startswith("random reflection") is proper
    # None is in the group, or is another one after an element of the group.
    cosets = torch.cat([group.elements, *(group.elements @ one.linear for one in found)]).flatten(1)
    assert (torch.cdist(cosets, cosets) < 1e-6).sum() == len(cosets)


def named_group(name):
    """Return the matrices of a group by its name in a label."""
    mirrored = name.endswith("xinversion3")
    name = name.removesuffix("xinversion3")
    if name.endswith("about its axis"):
        made = cyclic_about(int(name.split()[0][1:]))
    elif name[1:2].isdigit():
        about = {"C": cyclic_about, "D": dihedral_about} if name.endswith("z") else {"C": cyclic, "D": dihedral}
        made = about[name[0]](int(name[1:].removesuffix("z")))
    else:
        catalog = {"Th": pyritohedral, "Td": full_tetrahedral, "Oh": full_octahedral, "Ih": full_icosahedral}
        made = catalog.get(name, {"T": tetrahedral, "O": octahedral, "I": icosahedral}.get(name))()
    return torch.cat([made.elements, -made.elements]) if mirrored else made.elements


def within(matrices, others):
    return bool(((matrices[:, None] - others).abs().amax(dim=(2, 3)) < 1e-9).any(dim=1).all())


@pytest.mark.parametrize(
    "group",
    [cyclic(8), dihedral(4), dihedral_about(3), tetrahedral(), octahedral(), icosahedral(), cyclic_about(4)],
    ids=lambda group: group.name,
)
def test_labels_of_motions_outside_are_true(group):
    labeled = [one for one in outside_of(group, group.dim, 4, generator_of()) if one.label.startswith("element of ")]
    assert labeled
    for one in labeled:
        larger, small = one.label.removeprefix("element of ").split(", outside of ")
        assert small == group.name
        assert not within(one.linear[None], group.elements)
        if "SO(2)" in larger:
            assert torch.linalg.det(one.linear) > 0
            assert within(one.linear[None] @ group.elements, group.elements @ one.linear)  # about the same axis
            continue
        elements = named_group(larger)
        assert within(group.elements, elements)
        assert within(one.linear[None], elements)


def test_a_rotation_names_the_smallest_larger_group():
    turns = {angle: SO(2).exp(torch.tensor([math.radians(angle)], dtype=torch.float64)) for angle in (45, 22.5, 15, 5)}
    assert [where_outside(matrix, cyclic(8)) for matrix in turns.values()] == [
        *("", "element of C16, outside of C8", "element of C24, outside of C8", "outside of C8"),
    ]
    assert where_outside(turns[15], SE(2).stabilizer) == "outside of SO(2)"
    assert where_outside(octahedral().elements[5], tetrahedral()) == "element of O, outside of T"
    assert where_outside(turns[15], None) == "in no group that is stated"
    with pytest.raises(ValueError, match=r"matrix: expected finite \[dim, dim\] .* got a tensor.* \(2, 2\)"):
        where_outside(turns[15], tetrahedral())


def test_larger_groups_of_a_rounded_group_are_those_of_the_exact_one():
    rounded = FiniteGroup.from_matrices(cyclic(6).elements.round(decimals=4), "C6", tolerance=1e-3)
    found, expected = ([one.label for one in outside_of(group, 2, 2, generator_of())] for group in (rounded, cyclic(6)))
    assert found == expected


def test_elements_of_the_octahedral_group_make_it_with_quarter_turns():
    """Control: a half turn about another axis is in O too, but makes D4 only."""
    found = {one.label: one.linear for one in outside_of(cyclic_about(4), 3, 2, generator_of())}
    matrix = found["element of O, outside of C4z"]
    assert FiniteGroup.generate(torch.stack([*cyclic_about(4).elements, matrix])).order == 24


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_scrambled_points_keep_their_distances_unless_scaled(centered, scaled):
    cloud = clouds(sizes=(9,))[0]
    cloud.pos += 2
    other = scrambled(cloud, "position", 3, centered=centered, scaled=scaled, generator=generator_of())
    center = cloud.pos.double().mean(dim=0) if centered else torch.zeros(3, dtype=torch.float64)
    before, after = ((one.pos.double() - center).norm(dim=1) for one in (cloud, other))
    assert torch.allclose(before, after) is not scaled
    assert ((after / before > 0.5 - 1e-6) & (after / before < 1.5 + 1e-6)).all()


def test_indices_of_points_follow_them_into_another_order():
    cloud = clouds(sizes=(5,))[0]
    cloud.edge_index = torch.tensor([[0, 1, 2, 3, -1], [1, 4, 0, 2, 3]])
    zero, still = torch.zeros(1, 3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    move = Move("permutation", "", True, still, zero, orders=(torch.tensor([3, 0, 4, 1, 2]),))
    (other,) = move.apply([cloud], {})
    assert torch.equal(other.edge_index < 0, cloud.edge_index < 0)
    known = cloud.edge_index >= 0
    assert torch.equal(other.pos[other.edge_index[known]], cloud.pos[cloud.edge_index[known]])


def test_scrambled_images_keep_their_raster():
    side = torch.arange(3.0)
    image = Data(x=torch.rand(9, 1), pos=torch.cartesian_prod(side, side), grid=torch.tensor([[3, 3]]))
    other = scrambled(image, "position", 2, centered=True, scaled=True, generator=generator_of())
    assert torch.equal(other.pos, image.pos)
    assert not torch.equal(other.x, image.x)
    assert torch.equal(other.x.sort(dim=0)[0], image.x.sort(dim=0)[0])
