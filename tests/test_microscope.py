"""The microscope: every model of the catalog, equivariant rollouts, invariant stabilized fields, files."""

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Batch, Data

from lieattn_datasets import Digits, Standardize

pytest.importorskip("matplotlib")

import numpy as np
from PIL import Image

from lieattn import models, viz
from lieattn.cli import CATALOG, main
from lieattn.cli._catalog import listed
from lieattn.geometry import (
    AllPairs,
    Nearest,
    PrincipalFrames,
    Radius,
    ScaleFrames,
    pixel_positions,
    point_clouds,
)
from lieattn.groups import SO, cyclic, dihedral, tetrahedral
from lieattn.models import Stages
from lieattn.nn.relative import RelativePositionTable
from lieattn.spaces import Sphere
from lieattn.testing import randomize
from lieattn.viz import _draw as draw
from lieattn.viz import _page, _recording
from lieattn.viz._draw import bonds_of, camera_of, symbols_of
from lieattn.viz._recording import Places, Recorder, _moved_to, _partners, rolled_out
from lieattn.viz._views import _in_input
from tests.test_networks import made


def cloud(dim=3, points=7, features=2, seed=0, **more):
    generator = torch.Generator().manual_seed(seed)
    x, pos = torch.rand(points, features, generator=generator), torch.randn(points, dim, generator=generator)
    return Data(x=x.double(), pos=pos.double(), **more)


def image(side, seed=0):
    x = torch.rand(side * side, 1, generator=torch.Generator().manual_seed(seed)).double()
    return Data(x=x, pos=pixel_positions(side, side).double(), grid=torch.tensor([[side, side]]))


def framewise(**options):
    return models.FramewiseTransformer(PrincipalFrames(), 2, 1, **{"channels": 8, "layers": 2, "heads": 2, **options})


def molecules(network, **options):
    return network(2, 1, frames=tetrahedral(), neighborhood=Radius(9.0), channels=8, layers=2, **options)


# Name in the catalog -> row of tests/test_networks.py, number of attention layers, whether a rollout is defined.
MODELS = {
    "AffineSelfConvNet": ("affine", 3, True),
    "AffineNet": ("affine_points", 2, True),
    "AttentiveAllCNN": ("attentive_all_cnn", 0, False),
    "AttentiveCNN": ("attentive_cnn", 0, False),
    "AttentiveDenseNet": ("attentive_densenet", 0, False),
    "AttentiveNet": ("attentive_points", 0, False),
    "AttentiveResNet": ("attentive_resnet", 0, False),
    "DirectionConvNet": ("directions", 0, False),
    "EnergyForces": ("forces_principal", 1, True),
    "Ensemble": ("ensemble", 1, True),
    "FieldModel": ("field_vector", 1, True),
    "FiniteSE2Transformer": ("finite_se2", 1, True),
    "FramewiseTransformer": ("framewise", 1, True),
    "GSANet": ("gsa_coordinates", 3, True),
    "HamiltonianDynamics": ("hamiltonian", 1, True),
    "ImageTransformer": ("image_squares", 1, True),
    "LieConvNet": ("lie_conv_attentive", 1, True),
    "LieTransformer": ("lie_principal", 1, True),
    "Preprocessed": (lambda: models.Preprocessed(framewise(), Standardize(0.5, 2.0)), 2, True),
    "Captured": (lambda: models.Captured(framewise()), 2, True),
    "Rescaled": ("rescaled", 1, True),
    "DistanceTransformer": ("distances", 1, True),
    "SE3Transformer": ("se3_transformer", 1, True),
    "TensorFieldNetwork": ("tfn", 0, False),
}


def of_model(name):
    """Return the network and the cloud of a row of ``MODELS``."""
    row = MODELS[name][0]
    if callable(row):
        return randomize(row(), spread=0.2), cloud()
    network, data = made(row)
    given = image(len(data[0, 0])) if isinstance(data, torch.Tensor) else data[0].clone()
    return copy.deepcopy(network), given.apply(lambda value: value.double() if value.is_floating_point() else value)


def gsa(group, **options):
    return models.GSANet(
        group, 1, 10, **{"channels": 8, "blocks": (1,), "heads": 2, "neighborhood": Radius(1.5), **options}
    )


def test_the_table_has_the_models_of_the_catalog():
    assert {name for package in CATALOG["models"] for name in listed(package)} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_what_of_each_model_can_be_seen(name):
    """Each model has its attention layers, or none, and stabilized fields that its group does not change."""
    (network, data), (_, layers, rolls) = of_model(name), MODELS[name]
    microscope = viz.Microscope(network.double(), data, turns=3)
    assert len(microscope.attention_layers) == layers
    assert len(microscope.field_layers) >= 1
    stable = microscope.stabilized()
    assert stable.shape[0] == len(microscope.turns)
    assert stable.shape[-1] == (
        network.irreps.dim if name in ("SE3Transformer", "TensorFieldNetwork") else stable.shape[-1]
    )
    assert float(stable.abs().max()) > 0
    if all(turn.inside for turn in microscope.turns):
        assert microscope.deviation() < 1e-9 * max(1.0, float(stable.abs().max()))
    if layers == 0:
        with pytest.raises(
            ValueError, match=r"network: expected attention between points, got \w+ without it; .* view 'field'"
        ):
            microscope.attention()
        return
    if not rolls:
        with pytest.raises(ValueError, match="got 'rollout', which multiplies probabilities; weights of blocks"):
            microscope.rollout()
        return
    borders = name == "AffineSelfConvNet"  # attention to zeros beyond the border is lost
    for found in (microscope.attention(), microscope.rollout()):
        assert (found >= 0).all()
        assert 0.3 < float(found.sum()) <= 1 + 1e-9 if borders else float(found.sum()) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("kind", ["full", "input", "pose", "channel"])
def test_gates_on_points_are_fields(kind):
    network = models.AttentiveNet(cyclic(8), 2, 3, neighborhood=Radius(1.5), channels=2, layers=2, attention=kind)
    seen = viz.Microscope(randomize(network).double(), cloud(2), turns=8)
    gates = [name for name in seen.field_layers if name.endswith("gate")]
    assert gates == ([] if kind == "channel" else ["lifting gate", "blocks.0 gate"])
    for name in gates:
        layer = seen.field_layers.index(name)
        gate = seen.fields(layer)
        assert gate.shape[-1] == 1
        assert 0 < float(gate.min()) < float(gate.max()) < 1
        assert seen.deviation(layer) < 1e-10


# --- roll-out ---------------------------------------------------------------------------------------------------

ROLLED = {
    "query sum, crop and pooling": (lambda: gsa(dihedral(4), blocks=Stages((1, 1), crops=(1, 0))), lambda: image(8)),
    "joint": (lambda: molecules(models.LieTransformer, heads=2), cloud),
    "framewise": (lambda: framewise(), cloud),
    "pooled": (lambda: models.AffineSelfConvNet(cyclic(4), 1, 2, blocks=1, channels=4), lambda: image(8)),
    "scales": (lambda: gsa(ScaleFrames(cyclic(4), levels=2), neighborhood=Nearest(4)), lambda: cloud(2, features=1)),
    "directions": (
        lambda: models.LieTransformer(
            2,
            1,
            frames=PrincipalFrames(of="neighborhood", gap=1e-9),
            neighborhood=Nearest(5),
            channels=8,
            layers=2,
            heads=2,
        ),
        lambda: cloud(points=9),
    ),
}


def all_rollouts(recording):
    """Return the rollout R ``[points, fiber, points, keys]`` from the last layer to the first."""
    last = recording.attention[-1].places
    flow = torch.eye(len(last.pos) * last.fiber, dtype=torch.float64).view(-1, len(last.pos), last.fiber)
    return rolled_out(recording.attention, flow).unflatten(0, (len(last.pos), last.fiber))


def matched(places, moved, turn):
    """Return the index of each element (point, frame) among those of the transformed cloud."""
    point = torch.cdist(places.pos @ turn.mT, moved.pos).argmin(dim=1)
    if places.frames is None:
        return point, torch.zeros(len(point), 1, dtype=torch.int64)
    here, there = (frames.frames.expand(len(point), -1, -1, -1) for frames in (places, moved))
    apart = ((turn @ here)[:, :, None] - there[point][:, None]).abs().amax(dim=(-2, -1))
    assert float(apart.min(dim=2).values.max()) < 1e-6
    return point, apart.argmin(dim=2)


@pytest.mark.parametrize("name", ROLLED)
def test_rollouts_move_with_the_group(name):
    """R(u g, u g') of the transformed cloud equals R(g, g'), element by element."""
    make, data = ROLLED[name]
    network, data = randomize(make(), spread=0.3).double().eval(), data()
    seen = viz.Microscope(network, data, turns=4, seed=1)
    before = all_rollouts(seen.recording)
    assert float(before.std()) > 1e-3
    for turn, recording in zip(seen.turns[1:], seen._turned, strict=True):
        assert turn.inside
        after = all_rollouts(recording)
        queries = matched(seen.recording.attention[-1].places, recording.attention[-1].places, turn.matrix)
        first, other = seen.recording.attention[0], recording.attention[0]
        keys = matched(first.places, other.places, turn.matrix)
        lifts = first.keys != first.places.fiber  # keys are then features, on each scale if there are scales
        column = torch.arange(first.keys).expand(len(keys[0]), -1) if lifts else keys[1]
        brought = after[queries[0][:, None], queries[1]][:, :, keys[0][:, None], column]
        torch.testing.assert_close(brought, before, rtol=1e-8, atol=1e-9)


def test_rollouts_see_turns_outside_of_the_group():
    """Control: rollouts change under a rotation outside of the group."""
    network = randomize(molecules(models.LieTransformer, heads=2), spread=1.5).double()
    data = cloud()
    turn = SO(3).sample(generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    recorder = Recorder(network)
    before, after = (
        all_rollouts(recorder(Data(x=data.x, pos=pos))).sum(dim=3).mean(dim=1) for pos in (data.pos, data.pos @ turn.mT)
    )
    assert float((before - after).abs().max()) > 1e-3


def test_rollouts_are_products_of_dense_matrices():
    """The definition: products of (A + I) / 2 with means A over heads; a lifting layer has no residual."""
    network = randomize(gsa(cyclic(4), blocks=(2,), neighborhood=Nearest(4))).double()
    microscope = viz.Microscope(network, cloud(2, features=1))
    points, fiber, dense = 7, 4, []
    for number, _ in enumerate(microscope.attention_layers):
        rows = [
            torch.stack([microscope.attention(i, frame=h, head=e, layer=number) for e in range(2)])
            .mean(dim=0)
            .flatten()
            for i in range(points)
            for h in range(fiber)
        ]
        dense.append(torch.stack(rows))
    lifted, first, second = dense
    assert lifted.shape == (points * fiber, points)
    eye = torch.eye(points * fiber, dtype=torch.float64)
    wanted = (second + eye) / 2 @ (first + eye) / 2 @ lifted
    for point, frame in ((0, 0), (3, 2), (6, 1)):
        torch.testing.assert_close(microscope.rollout(point, frame=frame).flatten(), wanted[point * fiber + frame])
    torch.testing.assert_close(microscope.rollout(2).flatten(), wanted[2 * fiber : 3 * fiber].mean(dim=0))
    torch.testing.assert_close(microscope.rollout(2, frame=1, layer=0).flatten(), lifted[2 * fiber + 1])


# --- attention and fields -----------------------------------------------------------------------------------------


def test_weights_are_those_of_the_layers():
    network = randomize(molecules(models.LieTransformer, heads=2)).double().eval()
    data, seen = cloud(), []
    network.blocks[1].attention.register_forward_pre_hook(lambda _, given: seen.append(given))
    microscope = viz.Microscope(network, data)
    network(Batch.from_data_list([data]))
    weights = network.blocks[1].attention.weights(*seen[-1]).detach()  # [edges, fiber, fiber, heads]
    graph = seen[-1][1]
    mine = (graph.neighbors.target == 3).nonzero()[:, 0]
    found = microscope.attention(3, frame=5, head=1)
    assert found.shape == (7, 12)
    torch.testing.assert_close(found[graph.neighbors.source[mine]], weights[mine, 5, :, 1])
    torch.testing.assert_close(microscope.attention(3)[graph.neighbors.source[mine]], weights[mine].mean(dim=(1, 3)))


@pytest.mark.parametrize("border", ["mask", "zero"])
def test_attention_of_a_window_is_at_its_points(border):
    window = RelativePositionTable.square(3, border=border)
    network = randomize(models.AffineSelfConvNet(cyclic(4), 1, 2, blocks=1, channels=4, window=window)).double().eval()
    data, seen, layer = image(4), [], network.blocks[1].layer
    layer.register_forward_pre_hook(lambda _, given: seen.append(given))
    found = viz.Microscope(network, data).attention(15, layer=1).sum(dim=1)
    network(data)
    x, graph = seen[-1]
    edges, weights = layer.positions.edges(graph).neighbors, layer.weights(x, graph).detach()
    mine = (edges.target == 15) & (edges.source < 16)
    assert found.nonzero()[:, 0].tolist() == [10, 11, 14, 15]
    torch.testing.assert_close(found[edges.source[mine]], weights[mine].mean(dim=(1, 2)))
    assert (float(found.sum()) < 0.99) == (border == "zero")


def test_attention_to_periodic_images_is_that_to_their_points():
    options = models.FramewiseOptions(attention="neighborhood")
    network = models.FramewiseTransformer(
        tetrahedral(), 1, 1, channels=8, layers=2, heads=2, neighborhood=Radius(1.5), options=options
    )
    cell, pbc = torch.eye(3, dtype=torch.float64)[None], torch.ones(1, 3, dtype=torch.bool)
    data = cloud(points=3, features=1, cell=cell, pbc=pbc)
    microscope = viz.Microscope(randomize(network).double(), data)
    for layer in (0, 1):
        found = torch.stack([microscope.attention(point, frame=7, layer=layer) for point in range(3)])
        assert (found[..., 7] > 0).all()
        torch.testing.assert_close(found.sum(dim=(1, 2)), torch.ones(3, dtype=torch.float64))
    assert float(microscope.rollout(1).sum()) == pytest.approx(1)


def test_fields_are_pulled_back_by_the_action():
    """(u⁻¹ f)(x, h) = f(u x, u h): the fiber is permuted by the table of the group."""
    network, data = randomize(gsa(cyclic(8))).double(), image(5)
    microscope = viz.Microscope(network, data)
    raw, stable = microscope.fields(), microscope.stabilized()
    assert [turn.label for turn in microscope.turns[:3]] == ["unchanged", "rotated by 45°", "rotated by 90°"]
    for number, turn in enumerate(microscope.turns):
        element = int((cyclic(8).elements - turn.matrix).abs().amax(dim=(1, 2)).argmin())
        back = int(cyclic(8).inverse_index[element])
        torch.testing.assert_close(cyclic(8).translate(back, raw[number]), stable[number])
    assert float((raw - raw[0]).abs().max()) > 0.1
    assert microscope.deviation() < 1e-12


@pytest.mark.parametrize("turns", [[np.pi / 2, np.pi / 6], (0.0, np.pi / 2, np.pi / 6)])
def test_rotations_by_given_angles(turns):
    """Fields agree for the angle in the group only, and titles say so."""
    microscope = viz.Microscope(randomize(gsa(cyclic(4))).double(), image(5), turns=turns)
    assert [(turn.label, turn.outside) for turn in microscope.turns] == [
        ("unchanged", ""),
        ("rotated by 90°", ""),
        ("rotated by 30°", "element of C12, outside of C4"),
    ]
    first, inside, outside = microscope.stabilized()
    assert float((inside - first).abs().max()) < 1e-12
    assert float((outside - first).abs().max()) > 1e-3
    told = microscope.picture("field").texts[-1].get_text()
    measured = re.search(r"differ by ([\d.e+-]+) .*; those of maps in the group of the network by ([\d.e+-]+)$", told)
    assert float(measured[2]) < 1e-12 < 1e-3 < float(measured[1])
    flat = viz.Microscope(framewise(), cloud(), turns=[0.5])  # in space, about an axis
    assert flat.turns[1].inside
    with pytest.raises(ValueError, match=r"turns: expected finite angles in radians, got \[nan\]"):
        viz.Microscope(framewise(), cloud(), turns=[float("nan")])


def test_panels_show_fields_at_turned_points():
    """Panels have squares of side 1 around the rotated points, colored by the field, with a shared color scale."""
    network, data = randomize(gsa(cyclic(4))).double(), image(5)
    figure = viz.Microscope(network, data, turns=[np.pi / 2]).picture("field", layer=1, channel=3)
    moved = data.clone()
    moved.pos = data.pos @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    with torch.no_grad():
        field = network.features(moved.x, network.geometry(moved))[1]
    panels = [axes for axes in figure.axes if axes.get_aspect() == 1 and axes.collections]
    drawn = panels[9 + 1 :]  # of the second row, without its input
    for h in range(4):
        for axes, frame, pos in ((drawn[h], h, moved.pos), (drawn[4 + h], (h + 1) % 4, data.pos)):
            squares = np.array([path.vertices[:-1] for path in axes.collections[0].get_paths()])
            np.testing.assert_allclose(axes.collections[0].get_array(), field[:, frame, 3], atol=1e-9)
            np.testing.assert_allclose(squares.mean(axis=1), pos, atol=1e-9)
            np.testing.assert_allclose(np.ptp(squares, axis=1), 1.0, atol=1e-9)
    assert len({axes.collections[0].norm for axes in drawn}) == 1


def test_points_at_one_place_keep_their_fields():
    """Points were matched by their places alone, so that fields of equivariant networks seemed to change."""
    data = cloud(points=6)
    data.pos[1] = data.pos[3] = data.pos[0]
    microscope = viz.Microscope(randomize(framewise()).double(), data, turns=4)
    for layer in range(len(microscope.field_layers)):
        assert microscope.deviation(layer) < 1e-9
    assert (microscope.fields()[0, 1] - microscope.fields()[0, 0]).abs().max() > 1e-3


def test_a_microscope_leaves_no_trace():
    network = gsa(cyclic(4)).train()
    network.blocks[0].eval()
    modes = [module.training for module in network.modules()]
    viz.Microscope(network, image(4)).deviation()
    assert [module.training for module in network.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


# --- pictures -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flat():
    return viz.Microscope(randomize(gsa(cyclic(4), blocks=(2,))), Digits("test")[0])


@pytest.fixture(scope="module")
def spatial():
    return viz.Microscope(randomize(framewise()), water(5), turns=3)


def water(points):
    """Return a water molecule and distant atoms."""
    pos = torch.tensor([[0.0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0], *[[5.0 + 3 * k, k, 0] for k in range(points - 3)]])
    x = torch.rand(points, 2, generator=torch.Generator().manual_seed(0))
    return Data(x=x, pos=pos, z=torch.tensor([8, 1, 1, *[8] * (points - 3)]))


def test_titles_state_what_was_measured(flat):
    figure = flat.picture("field", layer=1, channel=2)
    lines = [text.get_text() for text in figure.texts]
    assert lines[-2] == "Field of layer blocks.0, channel 2: GSANet"
    apart = float(re.search(r"differ by ([\d.e+-]+)", lines[-1])[1])
    assert apart == pytest.approx(flat.deviation(1), rel=0.06)
    title = flat.picture().get_suptitle()
    assert title.startswith("GSANet: fields of transformed clouds, pulled back, differ by ")
    board = flat.picture("attention", layer=2, frame=1)
    assert [axes.get_title() for axes in board.axes[2:6]] == [f"frame {h} ({90 * h}°)" for h in range(4)]


UNUSED = {
    "overview": "frame head layer channel",
    "attention": "channel",
    "rollout": "head channel",
    "field": "point head",
}


@pytest.mark.parametrize("view", UNUSED)
def test_arguments_that_a_view_does_not_depend_on_are_refused(flat, tmp_path, view):
    for name in UNUSED[view].split():
        with pytest.raises(
            ValueError, match=f"{name}: expected None, since view '{view}' does not depend on it, got 0"
        ):
            flat.picture(view, **{name: 0})
    with pytest.raises(ValueError, match="point: expected None for an animation"):
        flat.save(tmp_path / "a.gif", "attention", point=0)


@pytest.mark.parametrize("view", ["overview", "attention", "rollout", "field"])
def test_views_of_clouds_in_space(spatial, view):
    figure = spatial.picture(view)
    assert len(figure.axes) > 4
    figure.canvas.draw()
    texts = [*figure.texts, *(text for axes in figure.axes for text in (axes.title, *axes.texts))]
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    assert boxes
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)


def test_rotations_that_are_not_in_the_group_are_named(tmp_path, monkeypatch):
    """The figures of one field are narrow, so that letters of long titles are smaller."""
    network = models.HamiltonianDynamics(models.LieTransformer.springs(channels=8, layers=1, heads=2))
    phase = {"momentum": torch.zeros(7, 2).double(), "time": torch.tensor([[0.0, 0.1]]).double()}
    figures, seen = [], viz.Microscope(network, cloud(2, **phase), turns=2)
    assert [turn.inside for turn in seen.turns] == [True, False]
    assert [axes.get_title() for axes in seen.picture().axes][2] == "the same, rotated by 180°\n(outside of R^2)"
    monkeypatch.setattr("lieattn.viz._draw.save_animation", lambda moments, path: figures.extend(moments))
    seen.save(tmp_path / "a.gif", "field")
    for figure in figures:
        figure.set_dpi(90)  # of animations
        figure.canvas.draw()
        boxes = [text.get_window_extent() for text in figure.texts if text.get_text()]
        assert boxes
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
    assert len(figures) == 2


def test_panels_show_the_weights(flat):
    figure = flat.picture("attention", point=9, layer=2)
    panels = [axes for axes in figure.axes if axes.get_aspect() == 1 and axes.collections]
    values = [axes.collections[0].get_array() for axes in panels[1:]]
    np.testing.assert_allclose(values[0], flat.attention(9, layer=2).sum(dim=1))
    for h in range(4):
        np.testing.assert_allclose(values[1 + h], flat.attention(9, frame=h, layer=2).sum(dim=1))


def test_bonds():
    """Bonds are edges of the data, if these are few, or pairs of near atoms, also of large molecules."""
    pytest.importorskip("ase")
    assert bonds_of(water(5)).tolist() == [[0, 1], [0, 2]]
    given = Data(pos=torch.zeros(3, 3), edge_index=torch.tensor([[0, 1, 2, 2], [1, 0, 2, 1]]))
    assert bonds_of(given).tolist() == [[0, 1], [1, 2]]
    assert len(bonds_of(Data(pos=torch.zeros(3, 3)))) == 0
    for distance, count in ((1.85, 1), (1.95, 0)):  # 1.25 times the sum of the covalent radii is 1.9
        pos = torch.tensor([[0.0, 0.0, 0.0], [distance, 0.0, 0.0]])
        assert len(bonds_of(Data(pos=pos, z=torch.full((2,), 6)))) == count
    every = torch.cartesian_prod(torch.arange(10), torch.arange(10)).T
    assert len(bonds_of(Data(pos=torch.randn(10, 3), edge_index=every))) == 0
    assert len(bonds_of(Data(pos=torch.randn(10, 3), edge_index=every[:, :80]))) == 9 + 8 + 7 + 6 + 5 + 4 + 3 + 2
    chain = 1.4 * torch.arange(100_000)[:, None] * torch.tensor([1.0, 0.0, 0.0])  # all pairs would take gigabytes
    bonds = bonds_of(Data(pos=chain, z=torch.full((100_000,), 6)))
    assert torch.equal(bonds, torch.stack([torch.arange(99_999), torch.arange(1, 100_000)], dim=1))
    for z in ([0.5, 1, 2], [200, 1, 2], [-1, 1, 2]):  # no nuclear charges
        data = Data(pos=torch.zeros(3, 3), z=torch.tensor(z))
        assert (symbols_of(data), len(bonds_of(data))) == ([], 0)


def test_the_camera_sees_the_broadest_side():
    """Slightly tilted: the longest axis of the cloud is to the right, and the second upwards."""
    c, s = np.cos(0.3), np.sin(0.3)
    tilted = torch.tensor([[c, 0, s], [s * s, c, -s * c], [-s * c, s, c * c]])
    for sizes, order, sign in (([1.0, 5.0, 2.0], [1, 2, 0], 1), ([5.0, 1.0, 2.0], [0, 2, 1], -1)):  # right-handed
        ends = torch.diag(torch.tensor(sizes))
        camera = camera_of(torch.cat([ends, -ends]) + 7.0)
        torch.testing.assert_close(camera[:, order] * torch.tensor([1, 1, sign]), tilted)
    torch.testing.assert_close(camera_of(torch.ones(1, 3)), tilted)


def test_animations_have_a_picture_for_each_query_or_turn(flat, tmp_path):
    path = flat.save(tmp_path / "made/field.GIF", "field", layer=0, frame=0)
    with Image.open(path) as picture:
        assert picture.n_frames == 4
        first = np.asarray(picture.convert("RGB"), dtype=float)
        picture.seek(1)
        assert np.abs(np.asarray(picture.convert("RGB"), dtype=float) - first).max() > 50
    with Image.open(
        viz.Microscope(randomize(framewise()), cloud(points=3).apply(torch.Tensor.float)).save(tmp_path / "q.gif")
    ) as found:
        assert found.n_frames == 3


# --- the page -------------------------------------------------------------------------------------------------------


def content(path):
    text = path.read_text()
    return text, json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def unpacked(packed):
    data = np.frombuffer(__import__("base64").b64decode(packed["data"]), "<u2").astype(float)
    return (packed["low"] + data / 65535 * (packed["high"] - packed["low"])).reshape(packed["shape"])


def test_the_query_is_found_in_the_input():
    """The query is found also if a network shifts and scales positions, or drops points."""
    pos = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [4.0, 4.0]])
    assert [_in_input(pos, 0.5 * pos - 1.0, point) for point in range(4)] == [0, 1, 2, 3]
    corners = torch.cat([pos, torch.tensor([[2.0, 2.0]])])
    assert [_in_input(corners, 0.5 * pos - 1.0, point) for point in range(4)] == [0, 1, 2, 3]
    assert _in_input(pos, torch.zeros(1, 2), 0) in range(4)


def test_a_page_refuses_what_it_cannot_show(tmp_path):
    network = models.GSANet(cyclic(4), 1, 2, channels=6, blocks=(1,), heads=2, neighborhood=Radius(1.5))
    torch.nn.init.constant_(next(weight for name, weight in network.named_parameters() if "query" in name), torch.nan)
    cloud = Data(x=torch.rand(5, 1), pos=torch.rand(5, 2))
    with pytest.raises(ValueError, match="network: expected finite attention and fields for this cloud"):
        viz.Microscope(network, cloud).save(tmp_path / "page.html", "attention")
    assert not list(tmp_path.iterdir())


def test_pages_of_large_clouds_have_means_and_sums(monkeypatch, tmp_path):
    data = Data(x=torch.rand(5, 1), pos=torch.rand(5, 2))
    microscope = viz.Microscope(randomize(gsa(cyclic(2), blocks=(2,))), data, turns=2)
    layer = microscope.recording.attention[1]
    weights = layer.weights
    assert min(weights.shape[1:]) > 1
    norms, sizes, most = microscope.fields(0).norm(dim=-1), [], 10**9
    for small in (False, True):
        monkeypatch.setattr(_page, "_MOST_NUMBERS", most)
        text, page = content(microscope.save(tmp_path / "page.html"))
        numbers = [one["weights"] for one in page["attention"]] + [one["values"] for one in page["rollout"]]
        numbers += [one[kind] for one in page["fields"] for kind in ("raw", "stable")]
        numbers += [one["source"] for one in page["edges"]]
        sizes.append(sum(unpacked(one).size for one in numbers))
        assert ("To keep this file small" in text) == small
        found = page["attention"][1]
        expected = weights.mean(dim=3, keepdim=True).sum(dim=2, keepdim=True) if small else weights
        np.testing.assert_allclose(unpacked(found["weights"]), expected, atol=1e-4)
        assert (found["heads"], len(found["key_frames"])) == tuple(expected.shape[:1:-1])
        assert bool(page["rollout"]) != small
        field = page["fields"][0]
        assert len(field["channels"]) == (1 if small else 9)
        np.testing.assert_allclose(unpacked(field["raw"])[..., 0], norms, atol=1e-4)
        assert field["deviation"] == pytest.approx([0.0, microscope.deviation(0)])
        most = sizes[-1] - 1
    monkeypatch.setattr(_page, "_MOST_NUMBERS", sizes[0])
    text, _ = content(microscope.save(tmp_path / "page.html"))
    assert "keep this file small" not in text  # the count is that of the page
    monkeypatch.setattr(_page, "_MOST_NUMBERS", sizes[-1])
    for view, index in (("attention", "head"), ("rollout", "view"), ("field", "channel")):
        with pytest.raises(ValueError, match=rf"{index}: a page (of this size )?has"):
            microscope.save(tmp_path / "page.html", view, **({} if index == "view" else {index: 0}))
    monkeypatch.setattr(_page, "_MOST_NUMBERS", most)
    with pytest.raises(ValueError, match=rf"data: expected at most {most:,} numbers for a page, got at least"):
        microscope.save(tmp_path / "page.html")


@pytest.mark.parametrize("named", [False, True])
def test_a_page_names_classes(named, tmp_path):
    network, cloud = gsa(cyclic(2)), Data(x=torch.rand(5, 1), pos=torch.rand(5, 2), y=torch.tensor([1]))
    classes = [f"kind {number}" for number in range(10)] if named else []
    text, _ = content(viz.Microscope(network, cloud, turns=2, classes=classes).save(tmp_path / "page.html"))
    names = classes or [f"class {number}" for number in range(10)]
    predicted = names[int(network.eval()(cloud).argmax())]
    assert re.search(rf"prediction: {predicted} \(\d+ %\), target: {names[1]}", text)


def test_a_page_holds_the_numbers_and_nothing_from_elsewhere(flat, tmp_path):
    text, page = content(flat.save(tmp_path / "page.HTML", "attention", point=9, layer=2, head=1))
    assert not re.search(r"https?://|src=|<link|@import|fetch\(|XMLHttp", text)
    assert page["start"] == {**page["start"], "view": "attention", "layer": 2, "point": 9, "head": 1}
    layer = page["attention"][2]
    weights = unpacked(layer["weights"])
    dense = np.zeros((64, 4))
    edges = page["edges"][layer["edges"]]
    low, high = unpacked(edges["source"]).round().astype(int)
    for edge in range(edges["rows"][9], edges["rows"][10]):
        dense[low[edge] + 65536 * high[edge]] += weights[edge, 3, :, 1]
    np.testing.assert_allclose(dense, flat.attention(9, frame=3, head=1, layer=2), atol=2e-5)
    rolled = unpacked(page["rollout"][2]["values"])
    np.testing.assert_allclose(rolled[9, 3], flat.rollout(9, frame=3, layer=2).sum(dim=1), atol=2e-5)
    field = page["fields"][1]
    np.testing.assert_allclose(unpacked(field["stable"])[..., 1], flat.stabilized(1)[..., 0], atol=1e-3)
    np.testing.assert_allclose(unpacked(field["raw"])[..., 0], flat.fields(1).norm(dim=-1), atol=1e-3)
    assert field["deviation"] == pytest.approx([0.0, *field["deviation"][1:]])
    assert max(field["deviation"]) == pytest.approx(flat.deviation(1))


PROBE = """
const elements = {};
const made = () => ({ style: {}, parentElement: {}, clientWidth: 300, addEventListener() {}, replaceChildren() {},
  get children() { return [made(), made(), made()]; }, get nextElementSibling() { return made(); },
  getContext: () => new Proxy({}, { get: () => () => {}, set: () => true }) });
globalThis.document = { getElementById: (id) => elements[id] ??= made(), createElement: made, body: {} };
globalThis.getComputedStyle = () => ({ getPropertyValue: () => "#000" });
globalThis.window = { devicePixelRatio: 1 };
globalThis.matchMedia = () => ({ addEventListener() {} });
globalThis.ResizeObserver = class { observe() {} };
elements.data = { textContent: require("fs").readFileSync(0, "utf8") };
"""
ASKED = """
const found = [], ranges = [];
for (const chosen of asked) {
  Object.assign(state, chosen);
  controls();
  found.push(scene().panels.map((p) => p.values));
  ranges.push(scene().range);
}
console.log(JSON.stringify([found, ranges]));
"""


class OfPoints(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(2, 2))])

    def forward(self, data):
        return self.layers[0](data.x)


def run_script(page, tail=""):
    """Run the script of a page with node, and return what it prints."""
    script = (Path(viz.__file__).parent / "microscope.js").read_text()
    command, given = ["node", "-e", f"{PROBE}\n{script}\n{tail}"], json.dumps(content(page)[1])
    run = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_shows_large_clouds(tmp_path):
    """JavaScript accepts about 120,000 arguments of a function."""
    large = cloud(dim=2, points=130_000).apply(torch.Tensor.float)
    run_script(viz.Microscope(OfPoints(), large, turns=2).save(tmp_path / "page.html"))


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_shows_what_python_computes(flat, tmp_path):
    asked = [
        {"view": "attention", "layer": 2, "point": 9, "frame": None, "keys": None, "head": None},
        {"view": "attention", "layer": 1, "point": 3, "frame": 2, "keys": 1, "head": 1},
        {"view": "rollout", "layer": 2, "point": 9, "frame": 1},
        {"view": "field", "layer": 1, "turn": 1, "frame": 2, "channel": 1},
    ]
    told = run_script(flat.save(tmp_path / "page.html"), f"const asked = {json.dumps(asked)};{ASKED}")
    found, ranges = json.loads(told)
    shown = flat.fields(1)[..., 0]
    np.testing.assert_allclose(ranges[3], [shown.min(), shown.max()])
    np.testing.assert_allclose(found[0][0], flat.attention(9).sum(dim=1), atol=1e-4)
    np.testing.assert_allclose(found[1][0], flat.attention(3, frame=2, head=1, layer=1)[:, 1], atol=1e-4)
    np.testing.assert_allclose(found[2][0], flat.rollout(9, frame=1).sum(dim=1), atol=1e-4)
    np.testing.assert_allclose(found[3], [flat.fields(1)[1, :, 2, 0], flat.stabilized(1)[1, :, 2, 0]], atol=1e-3)


def test_rounding_does_not_fill_the_color_scale(tmp_path):
    """The field of a single point is the same for all transformed clouds, up to rounding in float32."""
    network = randomize(models.FramewiseTransformer(cyclic(8), 1, 1, channels=4, layers=1))
    microscope = viz.Microscope(network, Data(x=torch.ones(1, 1), pos=torch.tensor([[0.3, 0.7]])))
    field = microscope.fields()
    assert 0 < float(field[..., 0].max() - field[..., 0].min()) < 1e-5
    for channel in (None, 0):
        bars = [axes for axes in microscope.picture("field", channel=channel).axes if axes.get_ylabel()]
        assert bars
        for axes in bars:
            bottom, top = axes.get_ylim()
            assert top - bottom == pytest.approx(1)
    _, page = content(microscope.save(tmp_path / "page.html", "field"))
    assert all(top - bottom == pytest.approx(1) for layer in page["fields"] for bottom, top in layer["ranges"])


def test_color_scales_of_values_that_differ_by_rounding():
    values = torch.tensor([2.0, 2.0 + 1e-6], dtype=torch.float64)
    scale = draw.color_scale(values)
    assert (scale.vmin, scale.vmax) == (2.0, 3.0)
    assert draw.color_scale(values - 2).vmax == pytest.approx(1e-6)
    assert draw.color_scale(values - 2, size=2.0).vmax == 1.0
    assert draw.color_scale(torch.tensor([2.0, 2.1])).vmax == pytest.approx(2.1)


def test_pages_of_molecules_and_spheres(spatial, tmp_path):
    pytest.importorskip("ase")
    _, page = content(spatial.save(tmp_path / "a.html", "rollout"))
    assert page["bonds"] == [[0, 1], [0, 2]]
    assert page["symbols"] == ["O", "H", "H", "O", "O"]
    assert page["camera"] is not None
    assert not page["sphere"]
    frames = PrincipalFrames(of="neighborhood")
    ball = models.LieTransformer(
        2,
        1,
        frames=None if Sphere().stabilizer is None else frames,
        space=Sphere(),
        neighborhood=AllPairs(),
        channels=8,
        layers=1,
        heads=2,
    )
    data = cloud()
    data.pos = data.pos / data.pos.norm(dim=1, keepdim=True)
    microscope = viz.Microscope(ball.double(), data, turns=3)
    _, page = content(microscope.save(tmp_path / "b.html", "field"))
    assert page["sphere"]
    assert len(microscope.picture("attention").axes) > 2


# --- errors and the command -----------------------------------------------------------------------------------------


def test_errors_name_what_is_allowed(flat, tmp_path):
    network, data = randomize(gsa(cyclic(4))), image(4)
    for changed, told in (
        ({"layer": 3}, r"layer: expected one of 0 \(lifting\), 1 \(blocks.0\), 2 \(blocks.1\), or -3 to -1, got 3"),
        ({"point": 64}, r"point: expected one of 0\.\.63, got 64"),
        ({"frame": 4}, r"frame: expected one of 0\.\.3, got 4"),
        ({"head": 2}, r"head: expected one of 0\.\.1, got 2"),
    ):
        for path in ("a.png", "a.html"):
            with pytest.raises(ValueError, match=told):
                flat.save(tmp_path / path, "attention", **changed)
    with pytest.raises(ValueError, match=r"channel: expected one of 0\.\.7, got 8"):
        flat.picture("field", channel=8)
    wide = viz.Microscope(framewise(channels=16), cloud(), turns=2)
    with pytest.raises(ValueError, match="channel: a page has the first 8 channels of this field, got 8"):
        wide.save(tmp_path / "a.html", "field", channel=8)
    with pytest.raises(ValueError, match=r"view: a \.gif file shows 'attention', 'rollout' or 'field', got 'overview'"):
        flat.save(tmp_path / "a.gif", "overview")
    with pytest.raises(ValueError, match=r"path: expected a name that ends in one of .* gif, html, .* got 'page\.htm'"):
        flat.save(tmp_path / "page.htm")
    with pytest.raises(ValueError, match="data: expected one cloud with points, got PointClouds"):
        viz.Microscope(network, Batch.from_data_list([data, data]))
    with pytest.raises(ValueError, match="network: expected a layer with values at the 16 points, got none in Pooled"):
        viz.Microscope(Pooled(), data)
    assert not list(tmp_path.iterdir())


class Pooled(torch.nn.Module):
    def forward(self, data):
        return data.x.sum(dim=0, keepdim=True)


def test_the_command_draws_trained_networks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments, drawn in (
        (["digits-c8"], "pictures/digits-c8_cloud_0.png"),
        (["digits-c8", "--view", "rollout", "--layer", "0", "--out", "new/roll.png"], "new/roll.png"),
        (["qm9-homo", "--out", "page.html"], "page.html"),
    ):
        assert main(["picture", *arguments]) == 0, capsys.readouterr().err
        assert f"picture: {drawn}" in capsys.readouterr().out
        assert Path(drawn).stat().st_size > 10_000
    for arguments, told in (
        (["--layer", "9", "--view", "field"], "layer: expected one of 0 (lifting)"),
        (["--view", "everything"], "argument --view: invalid choice: 'everything'"),
        (["--out", "p.xyz"], "argument --out: expected a file .png, .pdf, .svg, .gif, .html, or a folder, got 'p.xyz'"),
    ):
        assert main(["picture", "digits-c8", *arguments]) == 2
        assert told in capsys.readouterr().err
    assert not Path("p.xyz").exists()
    assert main(["picture", "rot-mnist-p4", "--view", "attention", "--out", "a.gif"]) == 2
    assert "got AttentiveCNN without it; it has fields: use view 'field'" in capsys.readouterr().err


def test_points_are_matched_without_the_distances_of_all_pairs(monkeypatch):
    torch.manual_seed(0)
    pos, flow = pixel_positions(8, 5, dtype=torch.float64), torch.rand(3, 40, 4, dtype=torch.float64)
    below = torch.cat([pos + torch.tensor([0.1, 0.0]), pos - torch.tensor([0.1, 0.0])])  # two are equally near
    sizes, measure = [], torch.cdist
    near = (measure(pos, below) < 0.2).double() / 2
    monkeypatch.setattr(_recording, "_PAIRS", 300)
    monkeypatch.setattr(torch, "cdist", lambda a, b: sizes.append(len(a) * len(b)) or measure(a, b))
    found = _moved_to(Places(point_clouds(below)), pos, flow)
    torch.testing.assert_close(found, torch.einsum("apf,pq->aqf", flow, near), rtol=1e-12, atol=0)
    assert (sum(sizes), max(sizes) <= 300) == (40 * 80, True)
    monkeypatch.setattr(torch, "cdist", None)
    order = torch.randperm(40)
    moved = pos[order] + 1e-5
    assert torch.equal(_partners(moved, pos), order)
    moved[7] += 0.3
    assert _partners(moved, pos) is None
