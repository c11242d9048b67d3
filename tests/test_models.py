"""GSA-Nets: sizes of the paper, invariance under their groups, and controls that break it."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import Batch, Data

from lieattn.geometry import (
    AllPairs,
    FiniteFrames,
    Nearest,
    PixelSquare,
    PrincipalFrames,
    Radius,
    SampledFrames,
    ScaleFrames,
    pixel_positions,
)
from lieattn.groups import (
    SE,
    SO,
    FiniteGroup,
    Translations,
    cyclic,
    cyclic_about,
    dihedral,
    reflection,
    tetrahedral,
    trivial,
)
from lieattn.models import (
    Dropouts,
    FieldModel,
    FramewiseTransformer,
    GSANet,
    GSAOptions,
    GSAReadout,
    LieTransformer,
    Stages,
    Symmetry,
    Wrapper,
    published_table,
)
from lieattn.models._base.symmetry import of_squares
from lieattn.nn import (
    GridGroupConvolution,
    GridInputAttention,
    GridPoseAttention,
    GroupConvolution,
    GroupLinear,
    GroupSelfAttention,
    VectorHead,
)
from lieattn.nn.relative import CoordinateNetwork, MLPEncoding, NetworkKernel
from lieattn.spaces import Euclidean, Sphere
from lieattn.testing import randomize
from lieattn.train import build
from tests.cases import moved, random_clouds

SIZES = {
    "rot_mnist Z2": (GSANet.rot_mnist, trivial(2), 44_368),
    "rot_mnist R4": (GSANet.rot_mnist, cyclic(4), 44_428),
    "rot_mnist R8": (GSANet.rot_mnist, cyclic(8), 44_508),
    "rot_mnist R12": (GSANet.rot_mnist, cyclic(12), 44_588),
    "rot_mnist R16": (GSANet.rot_mnist, cyclic(16), 44_668),
    "cifar10 Z2": (GSANet.cifar10, trivial(2), 3_001_648),
    "cifar10 Z2M": (GSANet.cifar10, reflection(2), 3_001_808),
    "pcam Z2": (GSANet.pcam, trivial(2), 206_926),
    "pcam R4": (GSANet.pcam, cyclic(4), 207_034),
    "pcam R8": (GSANet.pcam, cyclic(8), 207_178),
    "pcam R4M": (GSANet.pcam, dihedral(4), 207_178),
}


@pytest.mark.parametrize("name", SIZES)
def test_parameter_counts_are_those_of_the_paper(name):
    preset, group, expected = SIZES[name]
    assert sum(p.numel() for p in preset(group).parameters()) == expected


@pytest.mark.parametrize(
    ("preset", "side", "sizes"),
    [
        (GSANet.rot_mnist, 28, [[24, 24], [8, 6, 4]]),
        (GSANet.cifar10, 32, [[32, 32], [16, 16], [8, 8]]),
        (GSANet.pcam, 88, [[], [44], [18, 16], [6]]),
    ],
)
def test_sizes_along_the_network(preset, side, sizes):
    network = preset(trivial(2), size=3)
    geometry = network.geometry(images(1, side, side, 1))
    assert [
        [int((step.kept.clouds if step.kept else step).grid[0, 0]) for step in stage] for stage in geometry.stages
    ] == sizes


def images(count, height, width, channels, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pos, grid = pixel_positions(height, width, dtype=dtype), torch.tensor([[height, width]])
    clouds = [
        Data(x=torch.randn(len(pos), channels, generator=generator).to(dtype), pos=pos, grid=grid) for _ in range(count)
    ]
    return Batch.from_data_list(clouds)


def turned_pixels(batch, group, h):
    """Return the images with pixels moved to other pixels, as in rotating an array."""
    batch = batch.clone()
    pos = batch.pos[: int(batch.ptr[1])]
    came_from = torch.cdist(pos, group.act(h, pos)).argmin(dim=1)
    batch.x = torch.cat([image[came_from] for image in batch.x.split(len(pos))])
    return batch


def network(group, dtype=torch.float32, **options):
    stages = {name: options.pop(name) for name in ("crops", "inexact") if name in options}
    stages = Stages((2, 1), (1, 2), **{"crops": (1, 0, 1), **stages})
    layout = {"channels": 8, "blocks": stages, "heads": 2, "options": GSAOptions(values=False), **options}
    return randomize(GSANet(group, 2, 3, **{"neighborhood": PixelSquare(3), **layout}).to(dtype), spread=0.7)


@torch.no_grad()
def change(model, batch, group, move):
    """Return the largest change of the logits over the group, relative to the largest logit or 1."""
    expected = model(batch)
    assert (expected.std(0) > 1e-3).any(), "logits that are constant would be invariant to anything"
    worst = max(float((model(move(batch, group, h)) - expected).abs().max()) for h in range(group.order))
    return worst / max(1.0, float(expected.abs().max()))


def published(group):
    return GSAOptions(values=False, pattern="query_sum", frame_table=published_table(group))


def test_the_published_table_is_not_equivariant():
    for group in (cyclic(4), dihedral(4)):
        batch = images(2, 12, 12, 2)
        model = network(group, options=published(group))
        assert change(model, batch, group, turned_pixels) > 1e-4
        assert model.symmetry.group == trivial(2)
        assert "breaks equivariance" in model.guarantee


def test_squares_keep_a_part_of_a_symmetry():
    """Squares of one pixel, and squares that contain all points with an influence, keep all of it."""
    eighths = Symmetry(cyclic(8))
    for square, window in ((PixelSquare(1), None), (PixelSquare(3), 1.0)):
        assert of_squares(eighths, square, window) == eighths
    for square, window in ((PixelSquare(3), None), (PixelSquare(3), 1.1), (PixelSquare(3, dilation=2), 2.0)):
        assert of_squares(eighths, square, window).group.order == 4
    stretched = FiniteGroup.from_matrices([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 2.0], [0.5, 0.0]]])
    assert of_squares(Symmetry(stretched), PixelSquare(3)).group.order == 1
    sampled = of_squares(Symmetry(Translations(2), on_average=SE(2)), PixelSquare(3))
    assert (sampled.group, sampled.on_average) == (Translations(2), None)


@pytest.mark.usefixtures("every_backend")
def test_images_need_not_be_square_nor_alike():
    """A batch of two sizes equals each image alone; reflecting a 10 x 14 image does not change its logits."""
    model = network(dihedral(1), torch.float64)
    wide, square = images(1, 10, 14, 2, torch.float64), images(1, 12, 12, 2, torch.float64, seed=1)
    both = Batch.from_data_list([wide[0], square[0]])
    alone = torch.cat([model(wide), model(square)])
    torch.testing.assert_close(model(both), alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(turned_pixels(wide, dihedral(1), 1)), model(wide), rtol=1e-10, atol=1e-10)


def test_inexact_pooling_is_warned_about():
    with pytest.warns(UserWarning, match="breaks equivariance"):
        network(cyclic(4), crops=(0, 0, 0), inexact="warn")(images(1, 7, 7, 2))
    model = network(cyclic(4), crops=(0, 0, 0), inexact="allow")
    model(images(1, 7, 7, 2))
    assert "sides of images must stay even at all crops and poolings" in model.guarantee


def test_the_length_is_by_default_that_of_the_neighborhood_in_every_stage():
    pair = [network(cyclic(4), options=GSAOptions(length=length)) for length in (None, 1.0)]
    pair[1].load_state_dict(pair[0].state_dict())
    batch = images(1, 12, 12, 2)
    torch.testing.assert_close(pair[1](batch), pair[0](batch))


def test_pcam_warns_at_96_and_is_exact_at_88():
    model = GSANet.pcam(trivial(2), size=1).eval()
    with pytest.warns(UserWarning, match="7 x 7"):
        model.geometry(images(1, 96, 96, 3))
    model.geometry(images(1, 88, 88, 3))


def test_published_table_is_the_authors():
    """Compared with the formulas of the authors' code, in which index k is the inverse of our element k."""
    for n in (4, 8):
        group = cyclic(n)
        h, g, m = np.ogrid[:n, :n, :n]
        theirs = torch.from_numpy((h + m - g) % n)
        inverse = group.inverse_index
        assert torch.equal(published_table(group)[inverse][:, inverse][:, :, inverse], inverse[theirs])


def test_start_does_not_depend_on_rounding():
    """With the zero biases of the paper, an untrained network amplifies 1e-7 in a coordinate to several percent."""
    group = cyclic(8)
    model = GSANet(group, 2, 3, channels=8, blocks=(1,), heads=2, neighborhood=Radius(2.1)).eval()
    assert change(model, images(2, 8, 8, 2), group, lambda batch, group, h: moved(batch, group.elements[h])) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize(("preset", "side"), [(GSANet.rot_mnist, 24), (GSANet.cifar10, 16), (GSANet.pcam, 56)])
def test_presets_start_as_if_guessing(preset, side):
    """With balanced weights; those for CIFAR-10 and PCam start as in the paper by default."""
    chosen = preset(trivial(2), size=3).options
    assert chosen.init == ("balanced" if preset == GSANet.rot_mnist else "paper")
    model, paper = (
        preset(trivial(2), size=3, options=replace(chosen, init=init)).eval() for init in ("balanced", "paper")
    )
    batch = images(2, side, side, model.in_channels)
    outputs = model(batch)
    assert (outputs.logsumexp(1) - outputs.mean(1)).max() < math.log(outputs.shape[1]) + 0.5
    assert paper(batch).abs().max() > 2 * outputs.abs().max()


@pytest.mark.parametrize("pool", ["sum", "mean"])
def test_weights_start_as_the_options_say(pool):
    def made(init):
        torch.manual_seed(0)
        options = GSAOptions(init=init, init_scale=0.5)
        layout = {"channels": 64, "heads": 16, "blocks": (1,), "readout": GSAReadout(pool), "options": options}
        return GSANet(cyclic(8), 64, 16, neighborhood=PixelSquare(3), **layout)

    def size(weight):
        return float(weight.detach().square().mean().sqrt())

    paper, balanced = made("paper"), made("balanced")
    block = paper.blocks[0].attention
    for linear in (paper.lifting.query, block.value, paper.head):
        assert size(linear.weight) == pytest.approx(0.5 / math.sqrt(linear.in_features), rel=0.1)
    assert (size(block.query.bias), size(paper.lifting.query.bias)) == (0, 0)
    assert size(balanced.head.weight) == pytest.approx(
        size(paper.head.weight) / (4096 if pool == "sum" else 10), rel=0.1
    )
    for part in (balanced.blocks[0].attention.value, balanced.head):
        assert float(part.weight.detach().mean(dim=1).abs().max()) < 1e-6
    for attention in (balanced.lifting, balanced.blocks[0].attention):
        assert size(attention.query.bias) == pytest.approx(2, rel=0.1)
    codes = [part for part in balanced.modules() if isinstance(part, CoordinateNetwork)]
    assert all(size(part.linear2.weight) == pytest.approx(2, rel=0.2) for part in codes)
    assert all(size(part.linear1.weight) > 0.1 for part in codes)


def test_geometry_may_be_given():
    model, batch = network(cyclic(4)), images(2, 12, 12, 2)
    torch.testing.assert_close(model(batch, model.geometry(batch)), model(batch), rtol=0, atol=0)
    geometry = network(cyclic(4), crops=(0, 0, 0)).geometry(batch)
    first, second = geometry.stages[0]
    assert geometry.lifting is first is second, "computed once where no points are lost"
    assert geometry.clouds[-1] is geometry.graph


def test_every_parameter_but_the_redundant_learns():
    """Key biases and last biases of coordinate networks shift all scores of a softmax, so their gradient is zero."""
    model, batch = network(cyclic(4), torch.float64), images(2, 12, 12, 2, torch.float64)
    model(batch).square().sum().backward()
    for name, parameter in model.named_parameters():
        redundant = name.endswith("key.bias") or (name.endswith("linear2.bias") and ".axes." in name)
        assert (parameter.grad.abs().max() < 1e-9) == redundant, name


@pytest.mark.parametrize(
    ("frames", "stages"),
    [
        ({"class_path": "lieattn.groups.cyclic", "init_args": {"n": 4}}, {"blocks": [1, 1], "crops": [1, 0]}),
        (
            {
                "class_path": "lieattn.geometry.FiniteFrames",
                "init_args": {
                    "group": {"class_path": "lieattn.groups.tetrahedral"},
                    "pose": {"class_path": "lieattn.geometry.PrincipalFrames"},
                },
            },
            [2],
        ),
    ],
    ids=["C4", "posed"],
)
def test_networks_from_configuration_files(frames, stages):
    options = {"frames": frames, "blocks": stages, "channels": 8, "heads": 2}
    options |= {"neighborhood": {"class_path": "lieattn.geometry.Radius", "init_args": {"radius": 2.0}}}
    options |= {"dropout": {"attention": 0.2}, "readout": {"pool": "mean"}, "options": {"values": False}}
    network = build(torch.nn.Module, {"class_path": "lieattn.models.GSANet", "init_args": options}, "network")
    assert isinstance(network, GSANet)
    assert network.head.pool == "mean"
    assert list(network.stages.blocks) == (stages["blocks"] if isinstance(stages, dict) else stages)


# --- frames ---------------------------------------------------------------------------------------------------

SPACES = {  # frames and options
    "T": (tetrahedral(), {}),
    "T, posed": (FiniteFrames(tetrahedral(), PrincipalFrames()), {}),
    "principal": (PrincipalFrames(), {}),
    "principal, improper": (PrincipalFrames(improper=True), {}),
    "principal of neighborhoods": (PrincipalFrames("neighborhood"), {"neighborhood": Radius(4.0)}),
    "principal, in the plane": (PrincipalFrames(), {"space": Euclidean(SE(2))}),
    "C4 on scales": (ScaleFrames(cyclic(4), levels=2), {}),
}


def of_frames(name, **more):
    frames, options = SPACES[name]
    options = {"neighborhood": Radius(2.0), "channels": 8, "blocks": (1,), "heads": 2, **options, **more}
    torch.manual_seed(0)
    return GSANet(frames, 2, 3, **options).double()


@pytest.mark.parametrize(
    ("frames", "space", "group"),
    [
        (cyclic(4), None, cyclic(4)),
        (PrincipalFrames(), Euclidean(SE(2)), SO(2)),
        (SampledFrames(3), Euclidean(SE(2)), None),
    ],
    ids=["finite", "principal", "sampled"],
)
def test_absolute_positions_leave_no_translations(frames, space, group):
    options = {"channels": 8, "heads": 2, "neighborhood": Radius(1.5), "space": space}
    found = GSANet(frames, options=GSAOptions(positions="absolute", values=False), **options).symmetry
    assert (found.group, found.translations, found.on_average) == (group, False, None)


@pytest.mark.parametrize("kind", ["invariant", "vector"])
def test_modules_around_a_network_state_the_kind_of_its_outputs(kind):
    assert Wrapper(FramewiseTransformer(cyclic(4), 1, 1, channels=4, layers=1, kind=kind)).kind == kind


@torch.no_grad()
def test_dropouts_and_activations_are_where_their_names_say():
    dropout = Dropouts(attention=0.1, value=0.2, input=0.3, pool=0.4)
    options = {"channels": 8, "heads": 2, "blocks": Stages((1, 1), expansions=(1, 2)), "dropout": dropout}
    options["options"] = GSAOptions(activation="gelu")
    network = GSANet(cyclic(4), 3, 5, neighborhood=PixelSquare(3), **options).eval()
    assert all(part.activation is F.gelu for part in (network, *network.blocks))
    seen = {}
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            add = seen.setdefault(module.p, []).append
            module.register_forward_hook(lambda _, inputs, __, add=add: add(tuple(inputs[0].shape)))
    network(images(1, 8, 8, 3))
    assert seen.pop(0.3) == [(64, 3)]
    assert seen.pop(0.4) == [(16, 4, 8)]
    assert seen == {0.2: [(64, 4, 8), (16, 4, 16)]}
    assert [layer.dropout for layer in (network.lifting, *(block.attention for block in network.blocks))] == [0.1] * 3


@pytest.mark.parametrize("preset", [GSANet.rot_mnist, GSANet.cifar10, GSANet.pcam])
def test_presets_have_the_options_of_the_authors(preset):
    network = preset(cyclic(1), channels=6, heads=2, size=3)
    others = (0.2, 0.3) if preset == GSANet.cifar10 else (0.0, 0.0)
    assert (network.input_dropout.p, network.pool_dropout.p) == others
    assert {layer.attention.dropout for layer in network.blocks} == {0.1}
    assert {block.attention.pattern for block in network.blocks} == {"query_sum"}
    assert network.options.init_scale == (1.0 if preset == GSANet.rot_mnist else math.sqrt(2))
    assert not network.options.values
    assert network.stages.inexact == ("warn" if preset == GSANet.pcam else "refuse")


def test_the_order_of_pooling_is_that_of_the_frames():
    options = {"neighborhood": AllPairs(), "channels": 6, "heads": 2}
    for frames in (cyclic(4), ScaleFrames(cyclic(4)), FiniteFrames(cyclic(4), PrincipalFrames())):
        assert GSANet(frames, **options).head.order == "points_first"
    assert GSANet(PrincipalFrames(), **options).head.order == "frames_first"
    assert GSANet(cyclic(4), readout=GSAReadout(order="frames_first"), **options).head.order == "frames_first"


def test_random_frames_break_rotations_as_their_guarantee_says():
    model = randomize(GSANet(SampledFrames(3), 2, 3, neighborhood=Radius(2.0), channels=8, heads=2).double())
    assert model.sees_order
    assert model.symmetry.group.name == "R^3"
    assert "SE(3) on average" in model.guarantee


@pytest.mark.parametrize("name", SPACES)
@torch.no_grad()
def test_geometry_is_seen_where_features_are_constant(name):
    """Networks use geometry by default; in the presets of the paper, a softmax averages equal values."""
    spread = {}
    for values in (True, False):
        model = of_frames(name, options=GSAOptions(values=values))
        drawn = [random_clouds(model.space.group.dim, (12,), features=2, seed=seed) for seed in range(6)]
        outputs = torch.cat([model.eval()(data.update({"x": torch.ones_like(data.x)})) for data in drawn])
        spread[values] = float(outputs.std(0).max() / outputs.abs().max())
    assert spread[True] > 1e-3
    assert spread[False] < 1e-5 or name == "principal of neighborhoods"


STARTS = {
    **SPACES,
    "R^2": (trivial(2), {}),
    "C8": (cyclic(8), {}),
    "sampled": (SampledFrames(2), {"space": Euclidean(SE(3))}),
    "sphere": (SampledFrames(2), {"space": Sphere(), "neighborhood": Nearest(8)}),
    "no positions in values": (tetrahedral(), {"options": GSAOptions(values=False)}),
}


@pytest.mark.filterwarnings("ignore::lieattn.geometry.DegenerateFramesWarning")
@pytest.mark.parametrize(
    ("name", "pool", "order"),
    [
        *((name, "sum", None) for name in STARTS),
        *((name, *given) for name in ("T", "sampled") for given in (("mean", "frames_first"), ("max", "points_first"))),
    ],
)
@torch.no_grad()
def test_first_loss_is_that_of_guessing(name, pool, order):
    frames, options = STARTS[name]
    options = {"neighborhood": Radius(1.5), "channels": 12, "heads": 2, "readout": GSAReadout(pool, order), **options}
    model, labels, points = GSANet(frames, 1, 10, **options).eval(), torch.arange(10), 12
    dim = model.space.group.dim
    pos = torch.randn(10, points, dim)
    pos = F.normalize(pos, dim=-1) if name == "sphere" else pos
    clouds = [Data(x=torch.randn(points, 1), pos=p) for p in pos]
    outputs = model(Batch.from_data_list(clouds))
    assert 0 < outputs.std() < 1.5
    assert abs(float(F.cross_entropy(outputs, labels)) - math.log(10)) < 0.5


@pytest.mark.parametrize("pool", ["sum", "mean", "max", "none"])
@pytest.mark.parametrize("order", ["points_first", "frames_first"])
@torch.no_grad()
def test_orders_of_the_readout(pool, order):
    model = network(cyclic(4), torch.float64, readout=GSAReadout(pool, order))
    batch = images(2, 12, 12, 2, torch.float64)
    field, graph = model.field(batch)
    assert field.shape == (2 * 9, 4, 16)
    values = (field @ model.head.weight.mT).unflatten(0, (2, 9))
    if pool == "none":
        expected = values.amax(dim=2).flatten(0, 1)
    elif order == "points_first":
        expected = getattr(values, {"max": "amax"}.get(pool, pool))(dim=1).amax(dim=1)
    else:
        expected = getattr(values.amax(dim=2), {"max": "amax"}.get(pool, pool))(dim=1)
    torch.testing.assert_close(model(batch), expected, rtol=1e-12, atol=1e-12)
    assert graph.num_points == len(field)
    if pool != "none":
        assert change(model, batch, cyclic(4), turned_pixels) < 1e-10


def test_pixels_need_the_frames_of_a_group():
    for frames in (PrincipalFrames(), ScaleFrames(cyclic(4)), FiniteFrames(cyclic(4), PrincipalFrames())):
        with pytest.raises(ValueError, match="blocks: crops and poolings need the frames of a finite group"):
            GSANet(frames, neighborhood=Radius(1.0), blocks=(1, 1))
    for blocks in ((1, 1), Stages((1,), crops=(1,))):  # voxels have no crops and poolings
        with pytest.raises(ValueError, match="blocks: crops and poolings are for pixels in the plane, got T in 3 dim"):
            GSANet(tetrahedral(), neighborhood=PixelSquare(3), blocks=blocks)


def test_presets_with_poolings_run_on_any_clouds():
    sizes = torch.tensor([40, 1, 0, 9])
    pos = torch.randn(50, 3, dtype=torch.float64)
    pos[41:44] = pos[44:47]  # coincident points
    pos[0] = 30.0  # an isolated point
    stages = Stages((2, 3), share=0.25)
    network = GSANet.rot_mnist(tetrahedral(), neighborhood=Radius(1.0), blocks=stages, channels=8, heads=2).double()
    randomize(network).eval()
    data = Data(x=torch.rand(50, 1).double(), pos=pos.requires_grad_(), ptr=F.pad(sizes.cumsum(0), (1, 0)))
    geometry = network.geometry(data)
    assert geometry.clouds[0].counts.tolist() == [10, 1, 0, 2]
    assert geometry.stages[1][0].length == pytest.approx(4 ** (1 / 3))
    outputs = network(data)
    assert outputs.shape == (4, 10)
    assert torch.isfinite(outputs).all()
    assert torch.isfinite(torch.autograd.grad(outputs.sum(), pos)[0]).all()
    moved = data.clone().update({"pos": (pos @ tetrahedral().elements[5].T + 7.0).detach()})
    torch.testing.assert_close(network(moved), outputs, rtol=1e-10, atol=1e-10)
    sheared = cyclic(3).conjugate(torch.tensor([[1.0, 0.5], [0.0, 1.0]]).double())
    with pytest.raises(ValueError, match="blocks: poolings of points need motions that preserve distances, got"):
        GSANet(sheared, neighborhood=AllPairs(), blocks=stages)


def seeing_vectors():
    """Return a network, and a cloud with a vector at each point."""
    options = {"neighborhood": AllPairs(), "channels": 8, "blocks": (1,), "vector_inputs": ("vel",)}
    cloud = Data(x=torch.randn(5, 1), pos=torch.randn(5, 3), vel=torch.randn(5, 3))
    return randomize(GSANet(tetrahedral(), 1, 2, **options)), cloud


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["x", "pos", "vel"])
def test_inputs_too_large_to_be_squared_are_named(name, dtype):
    network, data = seeing_vectors()
    network, data = network.to(dtype), data.apply(lambda value: value.to(dtype))
    for factor in (1e-40, 1e-30, 1e10, 1e14):
        assert torch.isfinite(network(data.clone().update({name: data[name] * factor}))).all()
    too_large = rf"{name}: expected at most 1e\+15 in size, so that products stay finite, got"
    with pytest.raises(ValueError, match=too_large):
        network(data.clone().update({name: data[name] * 1e20}))


@pytest.mark.parametrize("name", ["x", "vel"])
def test_missing_values_are_not_a_matter_of_units(name):
    network, data = seeing_vectors()
    data[name][3, 0] = torch.nan
    with pytest.raises(ValueError, match=f"data.{name}: expected finite numbers, got nan; fill in missing values"):
        network(data)


def networks_of(group, radius, pose=None):
    frames = FiniteFrames(group, pose)
    yield GSANet(frames, 1, 2, neighborhood=Radius(radius), channels=8, blocks=(1,))
    yield FramewiseTransformer(frames, 1, 2, channels=4, layers=1, neighborhood=Radius(radius))
    network = LieTransformer(1, 2, frames=frames, neighborhood=Radius(radius), channels=8, layers=1, heads=2)
    yield network
    yield FieldModel(network, VectorHead(8))


def layers_of(group):
    yield GroupLinear(group, 2, 4)
    yield GroupSelfAttention(group, 4, 4)
    yield MLPEncoding(group, 2)
    yield GroupConvolution(NetworkKernel(group, 2, 4))
    if group.order == 4:
        yield GridGroupConvolution(group, 2, 4, 3)
        yield GridInputAttention(group, 2)
        yield GridPoseAttention(group, 2)


@pytest.mark.parametrize(("group", "other"), [(cyclic(4), dihedral(2)), (tetrahedral(), cyclic_about(12))])
def test_weights_are_refused_by_layers_of_another_group(group, other):
    for layer, changed in zip(layers_of(group), layers_of(other), strict=True):
        state = layer.state_dict()
        layer.load_state_dict(state)
        with pytest.raises(
            RuntimeError, match=r"group: the weights are for .*; build the module with the group of"
        ) as caught:
            changed.load_state_dict(state)
        assert str(caught.value).count("group: the weights") == 1
        assert changed.load_state_dict(dict(state))


def test_weights_are_refused_by_networks_of_another_geometry(tmp_path):
    """Another group of order 12, another radius or another pose is refused, although weights have the same shapes."""
    of_order_12 = cyclic_about(12)
    for number, network in enumerate(networks_of(tetrahedral(), 2.0)):
        torch.save(network.state_dict(), tmp_path / "weights.pt")
        state = torch.load(tmp_path / "weights.pt", weights_only=True)
        network.load_state_dict(copy.deepcopy(state))
        for name, other in {
            "group": (of_order_12, 2.0),
            "neighborhood": (tetrahedral(), 2.5),
            "frames": (tetrahedral(), 2.0, PrincipalFrames()),
        }.items():
            changed = list(networks_of(*other))[number]
            with pytest.raises(
                RuntimeError, match=rf"{name}: the weights are for .*; build the module with the {name} of"
            ):
                changed.load_state_dict(state)
            assert changed.load_state_dict(dict(state))


def test_only_weights_that_fit_are_advised_to_be_loaded_without_the_check():
    """Weights of a GSA-Net with a table of frames do not load into one with more frames, as was advised."""
    for make, fits in (
        (lambda group: GSANet(group, 1, 2, neighborhood=Radius(1.5), blocks=(0, 1), heads=2), False),
        (lambda group: LieTransformer(1, 2, frames=group, neighborhood=Radius(1.5), channels=8, layers=1), True),
        (lambda group: GroupLinear(group, 2, 4), False),
    ):
        state, other = make(cyclic(4)).state_dict(), make(cyclic(8))
        with pytest.raises(RuntimeError, match=r"group: the weights are for .* with the group of the") as caught:
            other.load_state_dict(state)
        assert ("load dict(state_dict)" in str(caught.value)) == fits
        if fits:
            other.load_state_dict(dict(state))
    # As parts of a larger module, whose names have a prefix.
    state, other = torch.nn.Sequential(make(cyclic(4))).state_dict(), torch.nn.Sequential(make(dihedral(2)))
    with pytest.raises(RuntimeError, match=r"0\.group: the weights .*, or load dict\(state_dict\) to skip this check"):
        other.load_state_dict(state)
