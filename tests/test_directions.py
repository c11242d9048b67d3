"""Convolutions on positions and directions, and their linear maps over the directions."""

from dataclasses import replace

import pytest
import torch
from torch_geometric.data import Data

from lieattn.certify import certify
from lieattn.geometry import Given, Nearest, PrincipalFrames, Radius, find_neighbors, point_clouds
from lieattn.groups import (
    cyclic,
    cyclic_about,
    dihedral_about,
    full_octahedral,
    icosahedral,
    octahedral,
    pyritohedral,
    tetrahedral,
    trivial,
)
from lieattn.models import DirectionConvNet, DirectionOptions, FieldModel
from lieattn.nn import Heads, RotationHead, ZonalLinear
from lieattn.testing import TOLERANCE, randomize, relative_error
from tests.cases import moved, random_clouds, refuses, turns

# H, and the number of directions for the axis that the network chooses.
GROUPS = {
    "T": (tetrahedral(), 4),
    "O": (octahedral(), 6),
    "I": (icosahedral(), 12),
    "D3": (dihedral_about(3), 2),
    "Th": (pyritohedral(), 6),
    "Oh": (full_octahedral(), 6),
}
every_group = pytest.mark.parametrize("name", GROUPS)
both_types = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
SMALL = DirectionOptions(basis=3, hidden=5, angles=2)


def network(frames, kind="invariant", options=SMALL, **changes):
    given = {"channels": 6, "layers": 2, "vector_inputs": ("vel",), "neighborhood": Radius(2.0), **changes}
    return randomize(DirectionConvNet(frames, 3, 2, kind=kind, options=options, **given)).eval()


def directions_of(group, axis=None):
    return network(group, options=replace(SMALL, axis=axis)).directions


# --- linear maps ------------------------------------------------------------------------------------------------------


@every_group
@both_types
def test_zonal_maps_commute_with_all_that_permutes_the_directions(name, dtype):
    group, count = GROUPS[name]
    directions = directions_of(group)
    layer = randomize(ZonalLinear(directions, 3, 5)).to(dtype)
    x = torch.randn(7, count, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    for matrix in group.matrices(directions):
        permutation = ((directions @ matrix.T)[:, None] - directions).norm(dim=2).argmin(dim=1)
        assert relative_error(layer(x[:, permutation]), layer(x)[:, permutation]) < TOLERANCE[dtype]


# The last ones have different angles with the others, so constant functions are not an invariant subspace.
SPREAD = torch.nn.functional.normalize(torch.tensor([[1.0, 0, 0], [1, 0.2, 0], [0, 0, 1]]).double(), dim=1)


@pytest.mark.parametrize("name", [*GROUPS, "spread"])
def test_zonal_maps_are_all_functions_of_the_angle(name):
    """Zonal maps have as many weights as there are angles, and equal the sum of the docstring."""
    directions = SPREAD if name == "spread" else directions_of(GROUPS[name][0])
    angles = (directions @ directions.T).mul(1e6).round().unique()
    layer = randomize(ZonalLinear(directions, 3, 5)).double()
    assert layer.begins_constant == (name != "spread")
    assert len(layer.weight) == (3 if name == "spread" else len(angles))
    x = torch.randn(2, 7, len(directions), 3, dtype=torch.float64)
    spaces = [part.T @ part for part in layer.basis.split(layer.sizes)]
    parts = [projection @ x @ weight for projection, weight in zip(spaces, layer.weight, strict=True)]
    found = layer(x)
    torch.testing.assert_close(found, sum(parts) + layer.bias)
    assert len(ZonalLinear(directions, 3, 5, bias=False).state_dict()) == 1
    # Casts keep the directions: after float32 and back they are as exact as before.
    layer.float().double()
    torch.testing.assert_close(layer(x), found, rtol=1e-5, atol=1e-5)


test_directions_that_are_none = refuses(
    (lambda: ZonalLinear(torch.zeros(3, 3), 3, 5), "directions: expected unit vectors"),
    (lambda: ZonalLinear(torch.zeros(0, 3), 3, 5), "directions: expected"),
    (
        lambda: ZonalLinear(torch.eye(3), 2, 2)(torch.zeros(5, 4, 2)),
        r"x: expected \[\*, 3, 2\] for fields over directions, got \(5, 4, 2\)",
    ),
)


def test_weights_of_other_directions_are_refused():
    four, three = (directions_of(group) for group in (tetrahedral(), octahedral()))
    with pytest.raises(RuntimeError, match=r"directions: the weights are for 1\+3, the module has 1\+3\+2"):
        ZonalLinear(three, 2, 2).load_state_dict(ZonalLinear(four, 2, 2).state_dict())


# --- networks ---------------------------------------------------------------------------------------------------------


@every_group
def test_outputs_and_fields_move_along(name):
    group, count = GROUPS[name]
    model, data = network(group, "vector").double(), random_clouds(group.dim, (4, 1, 3))
    assert len(model.directions) == count
    expected, field = model(data), model.field(data).x
    assert field.shape == (8, group.order, 6)
    assert expected.abs().max() > 1e-2
    for h in turns(group):
        other = moved(data, group.elements[h])
        assert relative_error(model(other), group.act(h, expected)) < 1e-10
        back = group.cayley[group.inverse_index[h]]  # (h f)(a) = f(h⁻¹ a)
        assert relative_error(model.field(other).x, field[:, back]) < 1e-10


@pytest.mark.parametrize(
    ("frames", "axis", "told"),
    [
        (tetrahedral(), None, False),
        (octahedral(), None, False),
        (icosahedral(), None, False),
        (tetrahedral(), (1.0, 2.0, 4.0), True),
        (PrincipalFrames(), None, True),
        (PrincipalFrames(improper=True), None, False),
    ],
    ids=["T", "O", "I", "T, another axis", "signs", "improper"],
)
def test_mirror_images_are_told_apart_only_if_no_reflection_maps_the_directions_to_themselves(frames, axis, told):
    model, data = network(frames, options=replace(SMALL, axis=axis)).double(), random_clouds(3, (7, 5))
    signs = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    mirrors = [torch.diag(signs), torch.eye(3, dtype=torch.float64)[[1, 0, 2]]]  # the second one maps those of T
    others = [data.clone().update({"pos": data.pos @ m.T, "vel": data.vel @ m.T}) for m in mirrors]
    least = min(float(relative_error(model(other), model(data))) for other in others)
    assert least > 1e-4 if told else least < 1e-10


def test_what_networks_see():
    """Control: distances, cosines, features of neighbors, angles and vectors all change the outputs."""
    model, data = network(tetrahedral()).double(), random_clouds(3, (6,))
    expected = model(data)
    weights = [model.edges.radial, model.edges.arrows, model.edges.other, model.edges.pairs]
    weights += [model.embed_angles, model.embed_vectors, model.lifting.output]
    weights += [block.messages.kernel for block in model.blocks]
    for linear in weights:
        kept = linear.weight.detach().clone()
        linear.weight.data.zero_()
        assert relative_error(model(data), expected) > 1e-5
        linear.weight.data.copy_(kept)
    torch.testing.assert_close(model(data), expected)


@pytest.mark.parametrize("neighborhood", [Radius(2.0), Radius(2.0, smooth=True), Nearest(3)], ids=repr)
def test_edges_from_points_to_themselves_have_no_effect(neighborhood):
    data, options = random_clouds(3, (7, 1, 5)), replace(SMALL, cutoff=2.0)
    data.edge_index = find_neighbors(point_clouds(data), neighborhood).edge_index
    found = network(tetrahedral(), neighborhood=neighborhood, options=options).double()
    given = network(tetrahedral(), neighborhood=Given("edge_index", include_self=True), options=options).double()
    given.load_state_dict(dict(found.state_dict()))
    assert given.geometry(data).neighbors.is_loop.sum() == data.num_nodes
    assert found.geometry(data).neighbors.is_loop.any() == (neighborhood == Radius(2.0, smooth=True))
    assert relative_error(found(data), given(data)) < TOLERANCE[data.pos.dtype]


def test_normalized_blocks():
    """They are f + B gelu(A LN(convolution + c)); points without neighbors have LN(c)."""
    model = network(tetrahedral(), options=replace(SMALL, norm="layer")).double()
    calls, block = [], model.blocks[1]
    block.register_forward_hook(lambda block, inputs, output: calls.append((*inputs, output)))
    model(random_clouds(3, (1, 6)))
    ((x, graph, found),) = calls
    seen = block.messages(x, graph) + block.bias
    assert torch.equal(seen[0], block.bias.expand(4, 6))
    centered = seen - seen.mean(dim=-1, keepdim=True)
    seen = centered / (centered.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * block.norm.weight + block.norm.bias
    torch.testing.assert_close(found, x + block.linear2(torch.nn.functional.gelu(block.linear1(seen))))


def test_gradients_of_gradients():
    model = network(tetrahedral(), options=replace(SMALL, window=4)).double()
    data = random_clouds(3, (4, 3))

    def outputs(pos):
        return model(data.clone().update({"pos": pos}))

    assert torch.autograd.gradgradcheck(outputs, (data.pos.clone().requires_grad_(),), fast_mode=True)


def test_fields_over_directions_are_fields_over_the_group():
    model = network(tetrahedral())
    x = torch.randn(5, 4, 3)
    field = model.on_frames(x)
    images = model.group.matrices(model.directions) @ model.axis
    for element, image in enumerate(images):
        direction = int((model.directions - image).norm(dim=1).argmin())
        assert torch.equal(field[:, element], x[:, direction])
    with pytest.raises(ValueError, match=r"x: expected \[points, 4, channels\], got \(5, 3, 3\)"):
        model.on_frames(torch.zeros(5, 3, 3))


def test_an_axis_may_be_given():
    assert len(directions_of(octahedral(), (1, 1, 1))) == 8
    assert len(directions_of(octahedral(), (0.0, 2.0, 2.0))) == 12
    assert len(directions_of(trivial(3), (0, 0, 3))) == 1
    weights = network(octahedral(), options=replace(SMALL, axis=(1, 1, 1))).state_dict()
    with pytest.raises(RuntimeError, match="axis: the weights are for"):
        network(octahedral()).load_state_dict(weights)
    upright, other = (network(octahedral(), options=replace(SMALL, axis=(zero, 0, 1))) for zero in (0.0, -1e-9))
    upright.load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("frames", "axis", "message"),
    [
        (cyclic(4), None, "frames: expected those of a group that acts on 3 coordinates, got .*C4"),
        (trivial(3), None, "axis: must be given in DirectionOptions, since .* has no rotation"),
        (octahedral(), (0, 0, 0), "axis: expected three numbers, not all 0"),
        (octahedral(), (0, 1, float("nan")), "axis: expected three numbers, not all 0"),
    ],
)
def test_directions_that_cannot_be_had(frames, axis, message):
    with pytest.raises(ValueError, match=message):
        network(frames, options=replace(SMALL, axis=axis))


@pytest.mark.parametrize(
    "frames",
    # Mirrors contain the axes of the first two; the directions of the others are on one line.
    [full_octahedral(), PrincipalFrames(improper=True), dihedral_about(3), cyclic_about(4)],
    ids=["Oh", "principal", "D3", "C4"],
)
def test_directions_that_determine_no_pose(frames):
    with pytest.raises(ValueError, match=r"head: a field over the directions of .* does not determine rotations"):
        FieldModel(network(frames), Heads({"pose": RotationHead(6)}))
    with pytest.raises(ValueError, match="does not determine rotations"):
        network(frames).with_head(RotationHead(6))


@pytest.mark.parametrize("frames", [PrincipalFrames(), dihedral_about(3)], ids=["principal", "D3"])
def test_poses_that_directions_determine_turn_along(frames):
    # The images of this axis are spread evenly in space. If they were near one line, so would be the two vectors of the
    # head, and the pose would amplify their rounding errors (1.3e-5 in float32 with (1, 2, 4)).
    options = replace(SMALL, axis=(2.0, 1.0, 1.6)) if frames == dihedral_about(3) else SMALL
    FieldModel(DirectionConvNet(frames, 3, 2, neighborhood=Radius(2.0), options=options), RotationHead(32))
    model = randomize(FieldModel(network(frames, options=options), RotationHead(6)), spread=0.4).eval()
    clouds = [Data(x=torch.randn(n, 3), pos=torch.randn(n, 3), vel=torch.randn(n, 3)) for n in (5, 6)]
    found = certify(model, clouds, elements=2, rotations=1, continuity=False)
    assert found.verdict == "kept", str(found)


def test_clouds_that_cannot_be_had():
    model = network(PrincipalFrames())
    with pytest.raises(ValueError, match=r"data.pos: expected \[points, 3\], got \(4, 2\)"):
        model(Data(x=torch.zeros(4, 3), pos=torch.zeros(4, 2), vel=torch.zeros(4, 2)))
    crystal = Data(x=torch.zeros(4, 3), pos=torch.randn(4, 3), vel=torch.zeros(4, 3), cell=5 * torch.eye(3)[None])
    with pytest.raises(ValueError, match=r"data\.cell: periodic clouds have no center"):
        model(crystal)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_axis_does_not_depend_on_the_end_that_is_found(sign, monkeypatch):
    original = torch.linalg.svd

    def turned(matrix):
        found = original(matrix)
        return type(found)((found.U, found.S, sign * found.Vh))

    networks = [DirectionConvNet(tetrahedral(), 3, 2, neighborhood=Radius(1.0))]
    monkeypatch.setattr(torch.linalg, "svd", turned)
    networks.append(DirectionConvNet(tetrahedral(), 3, 2, neighborhood=Radius(1.0)))
    for network in networks:
        torch.testing.assert_close(network.axis, torch.full((3,), 3**-0.5, dtype=torch.float64))


@pytest.mark.parametrize("layers", [4, 12])
def test_a_small_gain_keeps_outputs_bounded_in_dense_clouds_and_deep_networks(layers):
    pos = torch.randn(150, 3, generator=torch.Generator().manual_seed(0))  # about 70 neighbors, some very close

    def size(gain):
        options = {"channels": 8, "layers": layers, "neighborhood": Radius(1.7), "options": DirectionOptions(gain=gain)}
        networks = [DirectionConvNet(tetrahedral(), 1, 1, **options) for _ in range(3)]
        return torch.stack([one(Data(x=torch.ones(150, 1), pos=pos)).detach().abs() for one in networks]).median()

    assert size(1.0) > 1e3  # the weights suit molecules
    assert size(0.01) < 10
