"""The framewise transformer with neighborhoods and poses: equivariance to finite groups and to all rotations."""

import math
from dataclasses import replace

import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import Compose

from lieattn._core.values import agreeing
from lieattn.geometry import (
    AllPairs,
    FiniteFrames,
    Nearest,
    PixelSquare,
    PrincipalFrames,
    Radius,
    SampledFrames,
    Stencil,
    lift,
    pixel_positions,
)
from lieattn.groups import (
    SO,
    cyclic,
    dihedral,
    dihedral_about,
    octahedral,
    reflection,
    tetrahedral,
)
from lieattn.models import FramewiseOptions, FramewiseTransformer, ImageTransformer
from lieattn.nn import FrameMessages, FramewiseBlock, LiftingConvolution
from lieattn.nn.relative import EdgeNetwork
from lieattn.ops import RelativeTerms
from lieattn.testing import randomize, relative_error
from lieattn_datasets import DropPoints
from tests.cases import moved, random_clouds
from tests.test_framewise import network

KLEIN = dihedral_about(2)


# --- neighborhoods and poses ------------------------------------------------------------------------------------------

LOCAL = {"neighborhood": Radius(2.0), "options": FramewiseOptions(basis=3, hidden=5)}
# Without attention, and with the options for molecules.
SEPARABLE = FramewiseOptions(basis=3, hidden=5, attention="none", angles=2, head="frames", window=2)


@pytest.mark.parametrize("other", [{"cutoff": 1.5}, {"window": 2}], ids=str)
def test_weights_are_refused_where_neighbors_fade_otherwise(other):
    weights = network(octahedral(), **LOCAL).state_dict()
    changed = network(octahedral(), **{**LOCAL, "options": replace(LOCAL["options"], **other)})
    with pytest.raises(RuntimeError, match=f"{next(iter(other))}: the weights are for .*, the module has"):
        changed.load_state_dict(weights)


@pytest.mark.parametrize("change", [{}, {"angles": 0}, {"head": "pooled"}, {"attention": "cloud"}], ids=str)
def test_options_of_molecules_have_gradients_of_gradients(change):
    group = tetrahedral()
    model = network(group, **LOCAL | {"options": replace(SEPARABLE, window=4, **change)}).double()
    data = random_clouds(group.dim, (4, 3))

    def outputs(pos):
        return model(data.clone().update({"pos": pos}))

    assert torch.autograd.gradgradcheck(outputs, (data.pos.clone().requires_grad_(),), fast_mode=True)


def test_heads_that_see_the_frames_read_the_mean_of_their_units():
    """A maximum would have kinks, at which forces jump."""
    model = network(tetrahedral(), pool="sum", **LOCAL | {"options": SEPARABLE}).double()
    data = random_clouds(3, (5,))
    field, _ = model.field(data)
    hidden, act, last = model.head
    assert relative_error(model(data), last(act(hidden(field)).mean(dim=1)).sum(dim=0, keepdim=True)) < 1e-12


def test_blocks_without_attention_need_a_neighborhood():
    for options in ({"attention": "none"}, {"angles": 3}):
        with pytest.raises(ValueError, match=r"neighborhood: expected a neighborhood .*, which .* needs"):
            FramewiseTransformer(cyclic(2), 1, 1, options=FramewiseOptions(**options))
    with pytest.raises(ValueError, match="attention: a block without attention needs messages"):
        FramewiseBlock(cyclic(2), 4, attention=False)


@pytest.mark.parametrize("kind", ["invariant", "vector"])
@pytest.mark.parametrize("frames", [PrincipalFrames(), FiniteFrames(octahedral(), PrincipalFrames())], ids=str)
def test_random_poses_are_for_training_alone(frames, kind):
    options = {"options": replace(SEPARABLE, random_poses=True)}
    model = network(frames, kind=kind, **LOCAL | options).double()
    same = network(frames, kind=kind, **LOCAL | {"options": SEPARABLE}).double().eval()
    same.load_state_dict(model.state_dict())
    data = random_clouds(3, (7, 5))
    drawn = [model.train()(data) for _ in range(2)]
    assert relative_error(*drawn) > 1e-4
    expected = model.eval()(data)
    assert relative_error(drawn[0], expected) > 1e-4
    assert relative_error(same(data), expected) == 0
    # All points of a cloud share one pose. H permutes its fiber and leaves it unchanged otherwise.
    with torch.random.fork_rng():
        torch.manual_seed(1)
        geometry = model.train().geometry(data)
    assert geometry.graph.relative.tied
    rotation = SO(3).sample(generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned = data.clone().update({"pos": data.pos @ rotation.T, "vel": data.vel @ rotation.T})
    expected = expected @ rotation.T if kind == "vector" else expected
    assert relative_error(model.eval()(turned), expected) < 1e-10


def test_random_poses_need_principal_axes():
    for frames in (octahedral(), FiniteFrames(octahedral(), SampledFrames(1, per="cloud"))):
        with pytest.raises(ValueError, match="random_poses: needs principal axes"):
            FramewiseTransformer(frames, 1, 1, options=FramewiseOptions(random_poses=True))


def test_neighborhoods_without_a_length_need_a_cutoff():
    with pytest.raises(ValueError, match=r"options.cutoff: .* has no length of its own"):
        FramewiseTransformer(cyclic(2), 1, 1, neighborhood=Nearest(3))
    model = FramewiseTransformer(cyclic(2), 1, 1, neighborhood=Nearest(3), options=FramewiseOptions(cutoff=0.5))
    assert model.edges.cutoff == 0.5
    with pytest.raises(TypeError, match="neighborhood: expected a neighborhood such as Radius"):
        FramewiseTransformer(cyclic(2), 1, 1, neighborhood=3.0)


def principal(group):
    return FiniteFrames(group, PrincipalFrames())


def test_frames_of_the_lifted_field_turn_along():
    group = KLEIN
    model, data = network(principal(group), **LOCAL).double(), random_clouds(group.dim, (6,))
    matrix = SO(3).sample(generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before, after = model.field(data), model.field(moved(data, matrix))
    assert before.graph.frames.shape == (6, 4, 3, 3)
    wanted, found = matrix @ before.graph.frames[0], after.graph.frames[0]
    order = (found[:, None] - wanted).abs().amax(dim=(2, 3)).argmin(dim=1)
    assert sorted(order.tolist()) == [0, 1, 2, 3]
    torch.testing.assert_close(found, wanted[order], atol=1e-9, rtol=0)
    torch.testing.assert_close(after.x, before.x[:, order], atol=1e-9, rtol=0)


def test_sampled_poses_are_new_in_training_and_the_same_in_evaluation():
    frames = FiniteFrames(tetrahedral(), SampledFrames(1, per="cloud"))
    model, data = network(frames).double(), random_clouds(3, (6, 3))
    torch.testing.assert_close(model(data), model(data), atol=0, rtol=0)
    model.train()
    torch.manual_seed(0)
    first, second = model(data), model(data)
    assert relative_error(first, second) > 1e-4
    torch.manual_seed(0)
    torch.testing.assert_close(model(data), first, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("group", "pose", "message"),
    [
        (cyclic(3), PrincipalFrames(), "C3 does not contain all proper diagonal matrices of signs"),
        (reflection(3), PrincipalFrames(), "does not contain all diagonal"),
        (tetrahedral(), PrincipalFrames(of="neighborhood"), "principal axes of clouds"),
        (tetrahedral(), PrincipalFrames(improper=True), "principal axes of clouds"),
        (tetrahedral(), SampledFrames(4, per="cloud"), "one per cloud"),
        (tetrahedral(), SampledFrames(1), "one per cloud"),
    ],
    ids=str,
)
def test_poses_that_do_not_fit_are_named(group, pose, message):
    with pytest.raises(ValueError, match=f"pose: .*{message}"):
        FiniteFrames(group, pose)


def test_blocks_with_messages_need_a_local_graph():
    group = cyclic(2)
    block = FramewiseBlock(group, 4, messages=3)
    with pytest.raises(TypeError, match=r"graph\.local: expected a graph with terms"):
        block(torch.zeros(3, 2, 4), lift(torch.zeros(3, 2), group, AllPairs()))


@pytest.mark.parametrize("frames", [PrincipalFrames(), tetrahedral()], ids=["axes", "T"])
def test_one_product_for_all_blocks_is_what_each_block_computes(frames):
    """The network computes the kernels of all blocks at once; the layers compute the same from the terms."""
    made = randomize(FramewiseTransformer(frames, 2, 1, channels=6, layers=2, neighborhood=Radius(2.0)).double())
    data = Data(x=torch.randn(7, 2).double(), pos=torch.randn(7, 3).double(), batch=torch.tensor([0] * 4 + [1] * 3))
    graph, positions, local = made.geometry(data)
    terms = made.edges(local, data.x)
    x = made.embed_features(data.x)[:, None].expand(-1, graph.fiber, -1)
    x = x + made.embed_vectors(positions) + made.lifting(terms.psi, local)
    rotary = RelativeTerms(rotary=made.phases(positions), rotary_values=True)
    for block in made.blocks:
        x = block(x, replace(graph, terms=rotary, local=replace(local, terms=terms)))
    torch.testing.assert_close(made.field(data).x, made.norm(x), rtol=1e-10, atol=1e-12)


def test_kernels_that_do_not_fit_are_named():
    graph = lift(torch.randn(4, 3), tetrahedral(), Radius(9.0))
    kernel = torch.zeros(graph.neighbors.num_edges, 12, 5)
    with pytest.raises(ValueError, match=r"graph.terms: expected \[edges, fiber, channels\] = \(16, 12, 6\)"):
        FrameMessages(3, 6)(torch.randn(4, 12, 6), replace(graph, terms=kernel))
    with pytest.raises(ValueError, match=r"x: expected \[edges=16, fiber, 3\] of an EdgeNetwork, got \(15, 12, 3\)"):
        LiftingConvolution(3, 6)(kernel[1:, :, :3], graph)


def test_terms_that_do_not_fit_are_named():
    graph, fewer = (lift(torch.randn(points, 3), tetrahedral(), Radius(9.0)) for points in (4, 3))
    of_other = lift(torch.randn(4, 3), octahedral(), Radius(9.0))
    edges, messages, x = EdgeNetwork(3, 0, cutoff=9.0, hidden=3), FrameMessages(3, 6), torch.randn(4, 12, 6)
    with pytest.raises(ValueError, match=r"graph.terms: expected those of an EdgeNetwork, with psi \[edges=16, fiber"):
        messages(x, replace(graph, terms=edges(fewer)))
    with pytest.raises(ValueError, match=r"x: expected a field \[.*\] = \(4, 24, 6\), got \(4, 12, 6\)"):
        messages(x, replace(graph, terms=edges(of_other)))


def turned_images(sides: tuple[int, ...], turns: list[float]) -> Batch:
    """Return images or volumes whose coordinates are rotated by angles in the first plane."""
    found = []
    for seed, turn in enumerate(turns):
        pos, angle = pixel_positions(*sides, dtype=torch.float64), torch.tensor(turn, dtype=torch.float64)
        pos[:, :2] = pos[:, :2] @ torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()]).view(2, 2)
        x = torch.rand(len(pos), 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        found.append(Data(x=x, pos=pos, grid=torch.tensor([sides])))
    return Batch.from_data_list(found)


@pytest.mark.parametrize(
    ("group", "neighborhood", "sides", "turns"),
    [
        (cyclic(8), Radius(2.3), (6, 7), [0.0, 0.0]),
        (cyclic(8), Radius(2.3, smooth=True), (6, 6), [0.0, 0.7]),
        (dihedral(6), Radius(1.6), (4, 4), [0.2, 0.2]),
        (cyclic(4), PixelSquare(3), (5, 4), [0.0, 0.0]),
        (cyclic(4), PixelSquare(3), (4, 4), [0.0, 0.7]),
        (octahedral(), Radius(1.5), (2, 3, 4), [0.0, 0.4]),
    ],
    ids=str,
)
@pytest.mark.parametrize("pool", ["mean", "none"])
def test_convolutions_of_rasters_equal_those_over_lists(group, neighborhood, sides, turns, pool):
    options = {"channels": 4, "blocks": (1, 1), "heads": 1, "pool": pool, "neighborhood": neighborhood}
    network, images = randomize(ImageTransformer(group, 1, 2, **options)).double(), turned_images(sides, turns)
    holed = [Compose([DropPoints(number, 0.3), shuffled])(image) for number, image in enumerate(images.to_data_list())]
    smaller = turned_images(tuple(max(2, side - 1) for side in sides), turns[1:])
    ragged = [image for of_size in (images, smaller) for image in of_size.to_data_list()]
    for data in (images, Batch.from_data_list(holed), Batch.from_data_list(ragged)):
        dense = network.geometry(data)
        assert isinstance(dense.stages[0].terms, Stencil)
        data.pos.requires_grad_()  # stencils have no derivatives by positions
        lists = network.geometry(data)
        assert lists.stages[0].terms is None
        data.x.requires_grad_()
        outputs = [network(data, geometry) for geometry in (dense, lists)]
        torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
        slopes = [torch.autograd.grad(found.sin().sum(), data.x)[0] for found in outputs]
        assert relative_error(*slopes) < 1e-10


def test_images_off_their_lattice_have_lists_of_neighbors():
    network, image = ImageTransformer(cyclic(4), neighborhood=Radius(1.5), blocks=(1,)), turned_images((4, 5), [0.3])[0]
    few, twice = (DropPoints(0, share)(image) for share in (0.95, 0.0))
    twice.pixel[3], twice.pos[3] = twice.pixel[2], twice.pos[2]
    bent, empty = image.clone(), DropPoints(0, 0.0)(image).subgraph(torch.zeros(20, dtype=torch.bool))
    bent.pos[7] += 1e-4
    for data in (few, twice, bent, empty):
        assert network.geometry(data).stages[0].terms is None


def test_ragged_images_have_the_outputs_that_they_have_alone():
    network = randomize(ImageTransformer(cyclic(8), 1, 2, channels=4, blocks=(1, 1), neighborhood=Radius(2.3))).double()
    images = [turned_images(sides, [0.3])[0] for sides in ((6, 4), (5, 7), (6, 4))]
    alone = torch.cat([network.eval()(image) for image in images])
    torch.testing.assert_close(network(Batch.from_data_list(images)), alone, rtol=1e-12, atol=1e-12)


def test_images_of_nearly_one_lattice_have_the_outputs_that_they_have_alone():
    network = randomize(ImageTransformer(cyclic(8), 1, 2, channels=4, blocks=(1, 1), neighborhood=Radius(2.3))).double()
    images = turned_images((6, 6), [0.0, 0.0, 1e-8]).to_data_list()
    images[1].pos = images[1].pos * (1 + 1e-8)
    alone = torch.cat([network.eval()(image) for image in images])
    torch.testing.assert_close(network(Batch.from_data_list(images)), alone, rtol=1e-12, atol=1e-12)
    # A pixel that is moved by as little is no longer on a lattice.
    images[0].pos[7, 0] += 1e-8
    lists = images[0].clone()
    lists.pos.requires_grad_()
    torch.testing.assert_close(network(images[0]), network(lists), rtol=1e-12, atol=1e-12)


def test_images_without_some_pixels_turn_exactly():
    network = randomize(ImageTransformer(cyclic(8), 1, 2, channels=4, blocks=(1, 1), neighborhood=Radius(2.3))).double()
    upright, turned = turned_images((6, 6), [0.0]), turned_images((6, 6), [math.pi / 4])
    left = torch.rand(36, generator=torch.Generator().manual_seed(1)) < 0.8
    outputs = [network(Data(x=data.x[left], pos=data.pos[left])) for data in (upright, turned)]
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(network(turned), outputs[0], atol=1e-3)  # the pixels count


@pytest.mark.parametrize("sides", [(6, 6), (5, 8), (1, 5), (2, 5, 4)], ids=str)
def test_images_with_a_list_of_all_their_pixels_are_whole_images(sides):
    options = {"channels": 4, "blocks": (1, 1, 1), "neighborhood": Radius(1.8)}
    network = randomize(ImageTransformer(cyclic(8) if len(sides) == 2 else octahedral(), 1, 2, **options)).double()
    whole, dropped = turned_images(sides, [0.3, 0.0]), Compose([DropPoints(share=0.0), shuffled])
    listed = Batch.from_data_list([dropped(image) for image in whole.to_data_list()])
    assert "grid" not in listed
    torch.testing.assert_close(network(listed), network.eval()(whole), rtol=1e-12, atol=1e-12)
    mixed = Batch.from_data_list(agreeing([whole[0], listed[1]]))
    torch.testing.assert_close(network(mixed), network(whole), rtol=1e-12, atol=1e-12)


def shuffled(data: Data) -> Data:
    return data.subgraph(torch.randperm(len(data.pos), generator=torch.Generator().manual_seed(0)))
