"""Input and output fields for every representation and group, and Fourier maps to irreps of O(3)."""

import io

import pytest
import torch
from torch import nn

from lieattn.geometry import AllPairs, PrincipalFrames, lift
from lieattn.groups import FiniteGroup, Sim, cyclic, cyclic_about, icosahedral, octahedral, tetrahedral
from lieattn.nn import FiberToIrreps, GroupLinear, IrrepsToFiber, lift_field, project_field
from lieattn.reps import Irreps, Pseudovector, Scalar, SymmetricTensor, Vector
from lieattn.spaces import Euclidean
from lieattn.testing import randomize, relative_error
from tests.cases import GROUPS, each, normal, refuses, turns
from tests.test_reps import PLANAR, SPATIAL, rotations

REPS = {2: PLANAR, 3: SPATIAL}
FIBERED = {name: group for name, group in GROUPS.items() if group.dim in (2, 3)}
SPACE_GROUPS = {name: group for name, group in GROUPS.items() if group.dim == 3}
every_spatial = each("group", SPACE_GROUPS)


# --- equivariance ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", FIBERED.values(), ids=FIBERED)
def test_lifted_fields_are_translated(group):
    """F_{g v}(g x, h) = F_v(x, g⁻¹ h), the left regular representation."""
    rep = REPS[group.dim]["sum"]
    values = normal(5, rep.dim)
    lifted = lift_field(values, group, rep)
    for g in range(group.order):
        moved = lift_field(rep.act(group.elements[g], values), group, rep)
        torch.testing.assert_close(moved, group.translate(g, lifted), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", SPATIAL)
def test_frames_that_turn_with_the_points(name):
    """With separate frames at every point: exact for all rotations and reflections, whatever acts on the fiber."""
    rep = SPATIAL[name]
    frames = rotations(6 * 4).reshape(6, 4, 3, 3)
    frames[:, ::2] *= -1
    values, weight = normal(6, rep.dim), normal(rep.dim, rep.dim, seed=3)

    def call(values, frames):
        return project_field(torch.tanh(lift_field(values, frames, rep) @ weight), frames, rep)

    for R in (rotations(1)[0], -rotations(1, seed=5)[0]):
        moved = call(rep.act(R, values), R @ frames)
        torch.testing.assert_close(moved, rep.act(R, call(values, frames)), atol=1e-12, rtol=0)
    still = call(rep.act(rotations(1)[0], values), frames)
    if name != "scalar" and name != "pseudoscalar":
        assert relative_error(still, rep.act(rotations(1)[0], call(values, frames))) > 1e-2  # control


# --- exactness ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPATIAL)
@pytest.mark.parametrize("per_point", [False, True])
def test_project_inverts_lift_for_any_frames(name, per_point):
    rep = SPATIAL[name]
    frames = rotations(7 * 3)
    frames[::2] *= -1
    frames = frames.reshape(7, 3, 3, 3) if per_point else frames[:5]
    values = normal(7, rep.dim)
    found = project_field(lift_field(values, frames, rep), frames, rep)
    torch.testing.assert_close(found, values, atol=1e-14, rtol=1e-14)


def test_frames_that_scale():
    """Vectors and tensors support frames of the similarity group, pseudovectors do not."""
    frames = 2.5 * rotations(4)
    rep = Vector(3) + SymmetricTensor(3) + Scalar()
    values = normal(3, rep.dim)
    lifted = lift_field(values, frames, rep)
    torch.testing.assert_close(lifted[:, :, :3], torch.einsum("fji,pj->pfi", frames, values[:, :3]) / 2.5**2)
    torch.testing.assert_close(project_field(lifted, frames, rep), values)
    with pytest.raises(ValueError, match="frames: expected orthogonal matrices"):
        lift_field(values[:, :3], frames, Pseudovector())


@pytest.mark.parametrize("way", ["compiled", "mapped"])
def test_frames_that_scale_where_their_values_cannot_be_read(way):
    """Such code cannot see that frames are not orthogonal, and must not use their transposes as inverses."""
    graph = lift(torch.randn(6, 3), PrincipalFrames(), AllPairs(), Euclidean(Sim(3)))
    v = torch.randn(6, 3)
    expected = lift_field(v, graph, Vector(3))
    if way == "compiled":
        found = torch.compile(lambda v: lift_field(v, graph, Vector(3)), backend="eager")(v)
    else:
        each = torch.func.vmap(lambda frames, v: lift_field(v[None], frames, Vector(3))[0])
        found = each(graph.frames, v)
    torch.testing.assert_close(found, expected)


def test_gradients():
    frames = rotations(3)
    rep = Vector(3) + Irreps("2e")
    values = normal(2, rep.dim).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: project_field(lift_field(v, frames, rep).tanh(), frames, rep), values)
    assert torch.autograd.gradgradcheck(lambda v: project_field(lift_field(v, frames, rep).tanh(), frames, rep), values)


def test_empty_clouds_half_precision_and_autocast():
    group = cyclic(4)
    assert lift_field(torch.zeros(0, 2), group, Vector(2)).shape == (0, 4, 2)
    assert project_field(torch.zeros(0, 4, 2), group, Vector(2)).shape == (0, 2)
    values = torch.tensor([[1.0, 1 / 3]])
    with torch.autocast("cpu", torch.bfloat16):
        lifted = lift_field(values, group, Vector(2))
        assert lifted.dtype == torch.float32
        torch.testing.assert_close(project_field(lifted, group, Vector(2)), values)
        assert project_field(lifted.bfloat16(), group, Vector(2)).dtype == torch.float32


test_errors = refuses(
    (lambda: lift_field(torch.ones(3, 3), cyclic(4), Vector(2)), r"values: expected \[points, 2\]"),
    (lambda: lift_field(torch.ones(3, 3), cyclic(4), Vector(3)), r"expected matrices of 3 dimensions"),
    (lambda: lift_field(torch.ones(3, 3), torch.ones(4, 3), Vector(3)), r"frames: expected \[fiber"),
    (lambda: lift_field(torch.ones(3, 3), torch.ones(0, 3, 3), Vector(3)), "at least one frame"),
    (lambda: lift_field(torch.ones(3, 3), torch.ones(2, 4, 3, 3), Vector(3)), "frames of 3 points"),
    (lambda: lift_field(torch.ones(1, 3), torch.zeros(1, 3, 3), Vector(3)), "frames: .* singular"),
    (
        lambda: project_field(torch.ones(3, 3, 2), cyclic(4), Vector(2)),
        r"values: expected \[points, 4, 2\], got \(3, 3, 2\)",
    ),
)


def test_compiled_without_breaks():
    group, rep = octahedral(), Irreps("0e + 1o + 2e") + Pseudovector() + SymmetricTensor(3)
    frames, values = group.elements, normal(3, rep.dim)
    to_irreps, to_fiber = FiberToIrreps(group, rep.dim), IrrepsToFiber(group, rep.dim)

    def call(values, frames):
        hidden = torch.tanh(lift_field(values, frames, rep))
        return project_field(to_fiber(torch.relu(to_irreps(hidden))), frames, rep)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(values, frames), call(values, frames))


# --- the bridge to irreps -------------------------------------------------------------------------------------


@every_spatial
def test_fourier_transform_loses_nothing(group):
    to_irreps, to_fiber = FiberToIrreps(group, 3), IrrepsToFiber(group, 3)
    assert to_irreps.complete
    field = normal(4, group.order, 3)
    features = to_irreps(field)
    assert features.shape == (4, to_irreps.irreps.dim)
    torch.testing.assert_close(to_fiber(features), field, atol=1e-12, rtol=0)
    # Converting there and back is a projection: what a field cannot represent is lost the first time.
    features = normal(4, to_irreps.irreps.dim)
    once = to_irreps(to_fiber(features))
    torch.testing.assert_close(to_irreps(to_fiber(once)), once, atol=1e-11, rtol=0)


@every_spatial
def test_fourier_transform_is_equivariant(group):
    to_irreps, to_fiber = FiberToIrreps(group, 2), IrrepsToFiber(group, 2)
    field, features = normal(3, group.order, 2), normal(3, to_irreps.irreps.dim, seed=1)
    back = to_fiber(features)
    for g in turns(group):
        R = group.elements[g]
        moved = to_irreps(group.translate(g, field))
        torch.testing.assert_close(moved, to_irreps.irreps.act(R, to_irreps(field)), atol=1e-12, rtol=0)
        moved = to_fiber(to_fiber.irreps.act(R, features))
        torch.testing.assert_close(moved, group.translate(g, back), atol=1e-12, rtol=0)


PYRAMID = FiniteGroup.generate([[[0, -1, 0], [1, 0, 0], [0, 0, 1]], [[1, 0, 0], [0, -1, 0], [0, 0, 1]]], "C4v")


@pytest.mark.parametrize(
    ("group", "band"),
    [
        (tetrahedral(), "1x0e+1x1o+1x2e"),
        (octahedral(), "1x0e+1x1o+1x2e+1x3o"),
        (icosahedral(), "1x0e+1x1o+1x2e+1x3o"),
        (GROUPS["Oh"], "1x0e+1x0o+1x1o+1x1e+1x2e+1x2o+1x3o+1x3e"),
        (cyclic_about(7), "1x0e+1x1o+1x2e+1x3o"),
        # The functions of degree 1 and even parity are those of lower irreps.
        (PYRAMID, "1x0e+1x0o+1x1o+1x2e"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_band_limits(group, band):
    assert FiberToIrreps(group, 1).band.spec == band
    # Control: one degree less is not enough.
    *fewer, _ = band.split("+")
    assert not FiberToIrreps(group, 1, "+".join(fewer)).complete


@pytest.mark.parametrize(
    ("group", "band"),
    [(tetrahedral(), "0e+1o"), (octahedral(), "0e+1o"), (icosahedral(), "0e+1o+2e"), (GROUPS["Ih"], "0e+1o+2e+1e+2o")],
    ids=lambda value: getattr(value, "name", value),
)
def test_low_degrees_survive_the_fiber(group, band):
    """Within this band the transform is orthogonal: features are recovered, and norms are preserved."""
    to_irreps, to_fiber = FiberToIrreps(group, 2, band), IrrepsToFiber(group, 2, band)
    assert to_irreps.independent
    assert not FiberToIrreps(group, 1).independent  # the band of all functions has more components than elements
    features = normal(5, to_irreps.irreps.dim)
    torch.testing.assert_close(to_irreps(to_fiber(features)), features, atol=1e-12, rtol=0)
    torch.testing.assert_close(to_fiber(features).norm(), features.norm())


def test_layout_is_that_of_e3nn_and_of_projected_fields():
    """Copy (c, n) of degree 1 is the projection of channel c times the unit vector n, up to the normalization."""
    group, channels = octahedral(), 3
    to_irreps = FiberToIrreps(group, channels)
    field = normal(4, 24, channels)
    features = to_irreps(field)
    assert str(to_irreps.irreps.to_e3nn()) == "3x0e+9x1o+15x2e+21x3o"
    degree_one = features[:, 3:30].unflatten(1, (channels, 3, 3))
    for c in range(channels):
        for n in range(3):
            channel = torch.zeros(4, 24, 3, dtype=torch.float64)
            channel[:, :, n] = field[:, :, c]
            expected = project_field(channel, group, Vector(3)) * (3 * 24) ** 0.5
            torch.testing.assert_close(degree_one[:, c, n], expected, atol=1e-12, rtol=0)


def test_component_normalization():
    """Features with independent unit variances have unit variances on average, as the layers of e3nn expect."""
    for group in (octahedral(), icosahedral(), tetrahedral()):
        to_irreps = FiberToIrreps(group, 1)
        impulses = torch.eye(group.order, dtype=torch.float64)[:, :, None]
        variance = to_irreps(impulses).square().sum(dim=0)
        first = 0
        for count, degree, _ in to_irreps.irreps.parts:
            last = first + count * (2 * degree + 1)
            assert float(variance[first:last].mean()) == pytest.approx(1)
            first = last


@pytest.mark.parametrize("bias", [True, False])
@every_spatial
def test_warm_start_of_an_e3nn_layer(group, bias):
    layer = randomize(GroupLinear(group, 2, 3, bias=bias).double())
    linear = layer.to_irreps()
    source, target = FiberToIrreps(group, 2), IrrepsToFiber(group, 3)
    assert (linear.irreps_in, linear.irreps_out) == (source.irreps.to_e3nn(), target.irreps.to_e3nn())
    field = normal(4, group.order, 2)
    torch.testing.assert_close(target(linear(source(field))), layer(field), atol=1e-11, rtol=0)
    back = GroupLinear.from_irreps(linear, source, target)
    torch.testing.assert_close(back.weight, layer.weight, atol=1e-11, rtol=0)
    torch.testing.assert_close(back.bias, layer.bias if bias else torch.zeros_like(back.bias), atol=1e-11, rtol=0)


@pytest.mark.parametrize("band", ["0e+1o", "0e+1o+2e+3o"])
def test_every_e3nn_layer_becomes_a_group_linear(band):
    """This includes layers not initialized from a field layer, and an incomplete band."""
    from e3nn import o3

    group = octahedral()
    source, target = FiberToIrreps(group, 2, band), IrrepsToFiber(group, 3, band)
    linear = randomize(o3.Linear(source.irreps.to_e3nn(), target.irreps.to_e3nn(), biases=True).double())
    layer = GroupLinear.from_irreps(linear, source, target)
    field = normal(4, 24, 2)
    torch.testing.assert_close(layer(field), target(linear(source(field))), atol=1e-12, rtol=0)


def test_casts_do_not_round_the_transform():
    to_irreps, to_fiber = FiberToIrreps(icosahedral(), 2), IrrepsToFiber(icosahedral(), 2)
    field = normal(3, 60, 2)
    back = to_fiber.float().double()(to_irreps.float().double()(field))
    torch.testing.assert_close(back, field, atol=1e-12, rtol=0)
    assert to_irreps(field.float()).dtype == torch.float32
    assert not list(to_irreps.parameters())
    assert not to_irreps.state_dict()


test_errors_of_the_bridge = refuses(
    (lambda: FiberToIrreps(cyclic(4), 2), r"group: expected a group of orthogonal 3 x 3 matrices"),
    (lambda: FiberToIrreps(octahedral(), 2, "2x0e"), "irreps: expected each irrep once"),
    (lambda: FiberToIrreps(octahedral(), 2)(torch.ones(3, 24, 1)), r"x: expected \[\*, 24, 2\]"),
    (lambda: IrrepsToFiber(octahedral(), 2, "0e")(torch.ones(3, 3)), r"x: expected \[\*, 2\]"),
    (lambda: FiberToIrreps(cyclic_about(24), 1), "group: irreps up to degree 11 do not separate the 24 elements"),
    (
        lambda: GroupLinear(octahedral(), 1, 1).to_irreps("1o"),
        "irreps: expected 0e among them, since the layer has a bias",
    ),
    (
        lambda: GroupLinear.from_irreps(
            nn.Linear(1, 1), FiberToIrreps(octahedral(), 1), IrrepsToFiber(tetrahedral(), 1)
        ),
        "source, target: expected the same group, got O and T",
    ),
)


def test_exported_lifts_of_fields_can_be_loaded():
    class Lifted(torch.nn.Module):
        def forward(self, vectors):
            return lift_field(vectors, graph, Vector(2))

    graph, values, file = lift(torch.randn(5, 2), cyclic(4), AllPairs()), torch.randn(5, 2), io.BytesIO()
    torch.export.save(torch.export.export(Lifted(), (values,), strict=False), file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(values), Lifted()(values))
