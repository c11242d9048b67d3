"""LieTransformer with distances, a lifting convolution and vector outputs: equivariance, controls, errors."""

import pytest
import torch
import yaml

from lieattn.geometry import AllPairs, FiniteFrames, Nearest, PrincipalFrames, Radius, SampledFrames
from lieattn.groups import SE, SO, E, Sim, Translations, cyclic, dihedral_about, octahedral
from lieattn.models import AttentionOptions, LieTransformer, Lifting, Readout, Species
from lieattn.models.published import PublishedCoordinates
from lieattn.nn import LieSelfAttention, VectorHead
from lieattn.spaces import Euclidean, Orbits
from lieattn.testing import assert_conforms, randomize, relative_error
from lieattn.train import build
from tests.cases import random_clouds

DOUBLE = torch.float64


def network(space, frames, lifting=(), neighborhood=None, **readout):
    model = LieTransformer(
        3,
        2,
        space=space,
        frames=frames,
        neighborhood=neighborhood or Radius(2.5),
        channels=8,
        layers=2,
        heads=2,
        vector_inputs=("vel",),
        lifting=Lifting(**{"radial": 3, "local": 5, **dict(lifting)}),
        attention=AttentionOptions(hidden=4),
        readout=Readout(**readout),
    )
    return randomize(model.double(), spread=0.7)


@pytest.mark.parametrize(("kind", "order"), [("invariant", "point_first"), ("vector", "pool_first")])
def test_outputs_of_points_sum_to_those_of_clouds(kind, order):
    """With ``pool="none"`` and the same weights, outputs linear in the pooled field sum to the output of the cloud."""
    options = {"kind": kind, "order": order, "lifting": {"radial": 0, "local": 0}, "neighborhood": AllPairs()}
    model, data = network(Euclidean(SE(3)), PrincipalFrames(), pool="none", **options), random_clouds(3, (6, 4, 5))
    expected = model(data)
    assert expected.shape == ((15, 2) if kind == "invariant" else (15, 2, 3))
    whole = network(Euclidean(SE(3)), PrincipalFrames(), pool="sum", **options)
    whole.load_state_dict(dict(model.state_dict()))  # without the check of the pooling
    torch.testing.assert_close(whole(data), torch.stack([part.sum(dim=0) for part in expected.split([6, 4, 5])]))


@pytest.mark.parametrize("part", ["distances", "lifting"])
def test_distances_and_lifting_are_seen(part):
    """Control: with weights of zero, the outputs differ."""
    model, data = network(Euclidean(SE(3)), PrincipalFrames()), random_clouds(3)
    expected = model(data)
    with torch.no_grad():
        if part == "lifting":
            model.local.convolution.output.weight.zero_()
        else:
            for layer in model.modules():
                if isinstance(layer, LieSelfAttention):
                    layer.score.location.weights[0][:, -3:].zero_()
    assert relative_error(model(data), expected) > 1e-4


def test_sums_of_vectors_count_points():
    model, data = network(Euclidean(SE(3)), PrincipalFrames(), kind="vector", pool="sum"), random_clouds(3, (4, 3))
    mean = network(Euclidean(SE(3)), PrincipalFrames(), kind="vector")
    torch.testing.assert_close(model(data), mean(data) * torch.tensor([4.0, 3.0], dtype=DOUBLE)[:, None, None])


def test_one_vector_has_no_axis():
    model = LieTransformer(
        3, 1, frames=PrincipalFrames(), neighborhood=AllPairs(), channels=8, readout=Readout(kind="vector")
    )
    assert model(random_clouds(3, (4, 3), torch.float32)).shape == (2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "tensor"}, "kind: expected one of"),
        ({"kind": "vector", "pool": "max"}, "pool: expected"),
        ({"neighborhood": Nearest(3)}, "lifting.cutoff: .* has no length of its own"),
        ({"neighborhood": Nearest(3), "lifting": {"local": 0}}, "lifting.cutoff: .* has no length of its own"),
        ({"lifting": {"radial": -1}}, "radial: expected an integer of at least 0"),
        ({"lifting": {"local": -1}}, "local: expected an integer of at least 0"),
        (
            {"space": Euclidean(Sim(3)), "neighborhood": AllPairs(), "lifting": {"cutoff": 1.0}},
            "radial: expected 0, since distances are not invariant",
        ),
        ({"space": Orbits(SO(3)), "lifting": {"cutoff": 1.0}}, "radial: expected 0, since distances are not invariant"),
    ],
    ids=str,
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        network(**{"space": Euclidean(SE(3)), "frames": PrincipalFrames(), **options})


@pytest.mark.parametrize("frames", [PrincipalFrames(), octahedral()], ids=["axes", "O"])
def test_without_distances_the_convolution_sees_coordinates(frames):
    """Without distances, the convolution uses coordinates: outputs are exact too, and depend on it."""
    model = network(None, frames, lifting={"radial": 0}, neighborhood=AllPairs(), kind="vector")
    data = random_clouds(3)
    assert not assert_conforms(model, data, ["equivariance"])
    expected = model(data)
    with torch.no_grad():
        model.local.convolution.weight.zero_()
    assert relative_error(model(data), expected) > 1e-4


# --- every network of the family --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "space"),
    [
        (PrincipalFrames(), Euclidean(SE(3))),
        (PrincipalFrames(improper=True), Euclidean(E(3))),
        (SampledFrames(2), Euclidean(SE(3))),
        (octahedral(), Euclidean(octahedral())),
        (FiniteFrames(cyclic(4)), Euclidean(cyclic(4))),
        (FiniteFrames(dihedral_about(2), PrincipalFrames()), Euclidean(SE(3))),
        (None, Euclidean(Translations(3))),
    ],
    ids=str,
)
def test_the_space_is_that_of_the_frames(frames, space):
    model = LieTransformer(3, frames=frames, neighborhood=AllPairs(), channels=8, layers=1, heads=2)
    assert model.space == space
    assert model(random_clouds(space.dim, dtype=torch.float32)).shape == (2, 1)


def from_file(text):
    return build(torch.nn.Module, yaml.safe_load(text), "network")


def test_options_in_configuration_files():
    """Groups of options are nested keys; features, frames and coordinates are given by class."""
    model = from_file("""
        class_path: lieattn.models.LieTransformer
        init_args:
          in_channels: {class_path: lieattn.models.Species, init_args: {species: [1, 6, 8]}}
          frames:
            class_path: lieattn.geometry.FiniteFrames
            init_args: {group: {class_path: lieattn.groups.cyclic, init_args: {n: 3}}}
          space:
            class_path: lieattn.spaces.Euclidean
            init_args: {group: {class_path: lieattn.groups.SE, init_args: {dim: 2}}}
          neighborhood: {class_path: lieattn.geometry.Radius, init_args: {radius: 2.5}}
          channels: 8
          heads: 2
          lifting:
            coordinates: {class_path: lieattn.models.published.PublishedCoordinates, init_args: {convention: grid}}
            bound: true
          attention: {kernel: combined, features: product, norm: batch_pre}
          readout: {kind: vector, pool: sum}
    """)
    assert model.inputs == Species([1, 6, 8])
    assert model.lifting == Lifting(PublishedCoordinates("grid"), bound=True)
    assert (model.space, model.frames) == (Euclidean(SE(2)), FiniteFrames(cyclic(3)))
    assert isinstance(model.head, VectorHead)
    assert model.blocks[0].attention.score.features == "product"
    model = from_file("""
        class_path: lieattn.models.LieConvNet
        init_args:
          in_channels: 2
          frames: {class_path: lieattn.groups.octahedral}
          neighborhood: {class_path: lieattn.geometry.AllPairs}
          channels: 8
          layers: 3
          lifting: {local: 0, neighbor_dropout: 0.5}
          convolution: {downsampling: 0.125, rank: 3}
          readout: {pool: max}
    """)
    assert model.share == 0.5
    assert (model.lifting, model.local) == (Lifting(local=0, neighbor_dropout=0.5), None)
