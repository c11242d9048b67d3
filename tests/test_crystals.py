"""Networks on periodic clouds: outputs do not depend on the choice of the cell, and equal those of explicit images."""

import itertools
from functools import partial

import pytest
import torch
from torch_geometric.data import Batch, Data

from lieattn.geometry import (
    FiniteFrames,
    Nearest,
    PrincipalFrames,
    Radius,
    SampledFrames,
    lift,
    pixel_positions,
    point_clouds,
)
from lieattn.groups import SE, SO, FiniteGroup, Translations, cyclic, octahedral, tetrahedral
from lieattn.models import (
    AffineNet,
    AttentionOptions,
    AttentiveNet,
    ConvolutionOptions,
    DirectionConvNet,
    FiniteSE2Transformer,
    FramewiseOptions,
    FramewiseTransformer,
    GSANet,
    LieConvNet,
    LieTransformer,
    Readout,
    SortedDistances,
    Stages,
)
from lieattn.models.irreps import DistanceTransformer, SE3Transformer, TensorFieldNetwork
from lieattn.spaces import Euclidean
from lieattn.testing import randomize, relative_error
from tests.cases import moved

NEAR = Radius(2.1, smooth=True)
SUM = Readout(pool="sum", order="point_first")  # no constant is added to the sum
LOCAL = FramewiseOptions(attention="neighborhood", basis=3, hidden=5)


def framewise(frames, **options):
    given = {"channels": 8, "layers": 2, "heads": 2, "neighborhood": NEAR, "pool": "sum", "options": LOCAL}
    return FramewiseTransformer(frames, 2, 1, vector_inputs=("vel",), **{**given, **options})


def lie(frames, space=None, **options):
    given = {"channels": 8, "layers": 1, "heads": 2, "attention": AttentionOptions(hidden=4), **options}
    return LieTransformer(2, 1, frames=frames, space=space, neighborhood=NEAR, readout=SUM, **given)


def steerable(model, **options):
    given = {"channels": 4, "layers": 1, "neighborhood": NEAR, "vector_inputs": ("vel",), "pool": "sum", **options}
    return model(2, 1, **given)


# Energies of crystals: sums over the points, from networks that support cells.
MODELS = {
    "FramewiseTransformer, O": lambda: framewise(octahedral()),
    "FramewiseTransformer, T in a sampled pose": lambda: framewise(
        FiniteFrames(tetrahedral(), SampledFrames(1, per="cloud"))
    ),
    "FramewiseTransformer, O, messages alone": lambda: framewise(
        octahedral(), options=FramewiseOptions(attention="none", basis=3, hidden=5, angles=2)
    ),
    "DirectionConvNet, O": lambda: steerable(partial(DirectionConvNet, octahedral())),
    "GSANet, T": lambda: GSANet(tetrahedral(), 2, 1, neighborhood=NEAR, channels=8, heads=2, blocks=(1,)),
    "AttentiveNet, T": lambda: AttentiveNet(
        tetrahedral(), 2, 1, neighborhood=NEAR, channels=4, layers=2, hidden=4, pool="sum"
    ),
    "AffineNet, T": lambda: AffineNet(
        tetrahedral(), 2, 1, neighborhood=NEAR, channels=4, blocks=1, squeeze_excite=True, pool="sum"
    ),
    "LieTransformer, T": lambda: lie(tetrahedral()),
    "LieTransformer, translations": lambda: lie(None, Euclidean(Translations(3))),
    "LieTransformer, axes of neighborhoods": lambda: lie(PrincipalFrames("neighborhood"), Euclidean(SE(3))),
    "LieConvNet, T": lambda: LieConvNet(
        2,
        1,
        frames=tetrahedral(),
        neighborhood=NEAR,
        channels=8,
        layers=1,
        convolution=ConvolutionOptions(norm="none", rank=2, hidden=4),
        readout=SUM,
    ),
    "DistanceTransformer": lambda: steerable(DistanceTransformer, heads=2),
    "TensorFieldNetwork": lambda: steerable(TensorFieldNetwork, degree=1),
    "SE3Transformer": lambda: steerable(SE3Transformer, degree=1, heads=2),
}


OTHER = [[1, 0, 0], [2, 1, 0], [0, -1, 1]]  # another basis of the same lattice


def crystal(points=4, seed=0, dtype=torch.float64):
    """Return points inside and outside of an oblique cell, with several images nearby."""
    generator = torch.Generator().manual_seed(seed)
    cell = torch.tensor([[1.9, 0, 0], [0.7, 1.8, 0], [-0.8, 0.6, 2.1]], dtype=torch.float64)
    pos = 1.5 * torch.randn(points, 3, generator=generator, dtype=torch.float64)
    x, vel = (torch.randn(points, width, generator=generator, dtype=torch.float64) for width in (2, 3))
    cloud = Data(x=x, pos=pos, vel=vel, cell=cell[None], pbc=torch.ones(1, 3, dtype=torch.bool))
    return cloud.apply(lambda value: value.to(dtype) if value.is_floating_point() else value)


def shifted(data, shift):
    return data.clone().update({"pos": data.pos + shift.to(data.pos)})


def supercell(data, steps):
    """Return the same crystal in another cell, whose vectors are combinations ``steps`` of the old ones."""
    steps = torch.tensor(steps, dtype=torch.float64)
    number = round(float(torch.linalg.det(steps).abs()))
    inverse, found = torch.linalg.inv(steps), []
    for step in itertools.product(range(-4, 5), repeat=3):
        inside = torch.tensor(step, dtype=torch.float64) @ inverse
        if ((inside > -1e-9) & (inside < 1 - 1e-9)).all():
            found.append(torch.tensor(step, dtype=data.pos.dtype))
    assert len(found) == number
    pos = torch.cat([data.pos + step @ data.cell[0] for step in found])
    repeated = {name: data[name].repeat(number, 1) for name in ("x", "vel")}
    return data.clone().update({"pos": pos, "cell": steps.to(data.cell) @ data.cell, **repeated})


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("name", MODELS)
def test_energies_do_not_depend_on_the_cell_that_is_chosen(name):
    network, data = randomize(MODELS[name]().double()).eval(), crystal()
    energy = network(data)
    assert energy.abs().max() > 1e-2
    steps = torch.randint(-3, 4, data.pos.shape, generator=torch.Generator().manual_seed(1)).double()
    same = {
        "shifted": shifted(data, torch.tensor([0.7, -1.3, 2.0])),
        "lattice vectors": shifted(data, steps @ data.cell[0]),
        "other vectors": data.clone().update({"cell": torch.tensor(OTHER).double() @ data.cell}),
    }
    for number, matrix in enumerate(rotations(network.symmetry.group)):
        same[f"rotation {number}"] = moved(data, matrix, 0.0, ("vel", "cell"))
    for what, other in same.items():
        assert relative_error(network(other), energy) < 1e-10, what
    for steps, number in (([[2, 0, 0], [0, 1, 0], [0, 1, 3]], 6), ([[1, 0, 0], [0, 1, 0], [0, 0, 2]], 2)):
        assert relative_error(network(supercell(data, steps)), number * energy) < 1e-10
    other = data.clone().update({"cell": 1.05 * data.cell})
    assert relative_error(network(other), energy) > 1e-4


def rotations(group):
    """Return rotations to which a network is exactly equivariant: all of a finite group, some of a Lie group."""
    if isinstance(group, Translations):
        return []
    if isinstance(group, FiniteGroup):
        return group.elements[1:]
    return SO(3).sample(3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("name", MODELS)
def test_a_wide_box_is_a_molecule(name):
    network, data = randomize(MODELS[name]().double()).eval(), crystal()
    box = data.clone().update({"cell": 30 * torch.eye(3, dtype=torch.float64)[None]})
    alone = Data(x=data.x, pos=data.pos, vel=data.vel)
    torch.testing.assert_close(network(box), network(alone), rtol=1e-10, atol=1e-10)
    together = Batch.from_data_list([data, crystal(3, seed=5), box])
    each = torch.cat([network(Batch.from_data_list([one])) for one in together.to_data_list()])
    torch.testing.assert_close(network(together), each, rtol=1e-10, atol=1e-10)


def test_images_are_points_of_their_own():
    data = crystal()
    neighbors = NEAR(data.pos, cell=data.cell, pbc=data.pbc)
    images = neighbors.images
    places = neighbors.at_images(data.pos)
    assert len(places) == len(images.point) == images.neighbors.num_points < neighbors.num_edges
    torch.testing.assert_close(images.neighbors.displacements(places), neighbors.displacements(data.pos))
    assert (torch.pdist(places) > 1e-6).all()
    assert neighbors.images is images
    assert NEAR(data.pos).images is None
    moved = lift(point_clouds(data), tetrahedral(), NEAR).to("cpu")
    assert moved.frame_positions().shape == (len(places), 12, 3)


@pytest.mark.usefixtures("plain")
def test_forces_of_crystals_do_not_jump():
    """When the image of a point enters the ball of another, energy and force change no more than the step."""
    network, data = randomize(framewise(octahedral()).double()).eval(), crystal(2)
    along = torch.nn.functional.normalize(torch.tensor([0.3, -0.5, 0.8], dtype=torch.float64), dim=0)
    found = []
    for gap in (-1e-8, 1e-8):
        place = data.pos[0] + (NEAR.radius + gap) * along - 2 * data.cell[0, 1]
        one = data.clone().update({"pos": torch.stack([data.pos[0], place]).requires_grad_()})
        energy = network(one).sum()
        found.append((energy.detach(), torch.autograd.grad(energy, one.pos)[0]))
    assert found[0][1].abs().max() > 1e-3
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)
    assert network.jumps == ()
    assert any("points enter and leave" in jump for jump in framewise(octahedral(), neighborhood=Radius(2.1)).jumps)


@pytest.mark.usefixtures("plain")
def test_prepared_geometry_serves_other_places_and_cells():
    network, data = randomize(framewise(octahedral()).double()).eval(), crystal()
    geometry = network.geometry(data)
    torch.testing.assert_close(network(data, geometry), network(data), rtol=0, atol=0)
    strain = torch.tensor([[1e-3, 2e-3, 0], [2e-3, -1e-3, 5e-4], [0, 5e-4, 1e-3]], dtype=torch.float64)
    deformation = (torch.eye(3).double() + strain)[None]
    pos, cell = data.pos @ deformation[0], data.cell @ deformation
    other = data.clone().update({"pos": pos, "cell": cell})
    expected = network(other)
    assert relative_error(expected, network(data)) > 1e-6
    torch.testing.assert_close(network(data, geometry.at(pos, deformation)), expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match=r"deformation: expected \[clouds, 3, 3\], got \(1, 2, 2\)"):
        geometry.at(pos, deformation[:, :2, :2])


def test_what_a_lattice_does_not_have():
    data = crystal(dtype=torch.float32)
    with pytest.raises(ValueError, match=r"data\.cell: attention over whole clouds .*attention='neighborhood'"):
        framewise(octahedral(), options=None)(data)
    with pytest.raises(ValueError, match=r"data\.cell: periodic clouds have no center, and so no principal axes"):
        framewise(PrincipalFrames())(data)
    with pytest.raises(ValueError, match=r"data\.cell: SortedDistances do not see periodic images"):
        FramewiseTransformer(octahedral(), SortedDistances(6), 1, neighborhood=NEAR, options=LOCAL)(data)
    with pytest.raises(ValueError, match=r"data\.cell: subsampling does not see .* use downsampling=1"):
        LieConvNet(2, frames=tetrahedral(), neighborhood=NEAR, convolution=ConvolutionOptions(downsampling=0.5))(data)
    with pytest.raises(ValueError, match=r"data\.cell: FiniteSE2Transformer does not see periodic images"):
        FiniteSE2Transformer(neighborhood=NEAR)(Data(pos=torch.rand(4, 2), cell=torch.eye(2)[None]))
    for stages in (Stages((1, 1)), Stages((1,), crops=(1,)), Stages((1, 1), share=0.5)):
        pixels = Data(pos=pixel_positions(4, 4), grid=torch.tensor([[4, 4]]), cell=4 * torch.eye(2)[None])
        with pytest.raises(ValueError, match=r"data\.cell: a GSANet with crops or poolings does not see periodic"):
            GSANet(cyclic(4), neighborhood=Radius(1.2), blocks=stages).geometry(pixels)
    with pytest.raises(ValueError, match="neighborhood: expected a Radius for periodic clouds"):
        framewise(
            octahedral(), neighborhood=Nearest(3), options=FramewiseOptions(attention="neighborhood", cutoff=1.0)
        )(data)
    with pytest.raises(ValueError, match="neighborhood: expected a neighborhood such as Radius"):
        FramewiseTransformer(octahedral(), 2, 1, options=LOCAL)
    with pytest.raises(ValueError, match="positions: expected False with attention="):
        FramewiseOptions(attention="neighborhood", positions=True)
    whole = framewise(octahedral(), options=FramewiseOptions(positions=False))
    local = framewise(octahedral(), options=FramewiseOptions(attention="neighborhood"))
    with pytest.raises(RuntimeError, match="attention: the weights are for neighborhood, the module has cloud"):
        whole.load_state_dict(local.state_dict())
