"""Checkpoints of version 0.1 load into the current networks and give the same outputs.

Each file ``goldens/weights_0_1/NAME.npz`` was written by version 0.1: all entries of a state dict as ``state/<key>``,
inputs as ``in/<name>``, outputs as ``out/<number>``, all in float64, and ``meta``, a JSON string with the expressions
by which the network was made and called. ``WEIGHTS`` says how the same network is made and called today. Builders
follow the names of the library; the keys of the state dicts and the numbers never change.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from lieattn.geometry import (
    AllPairs,
    FiniteFrames,
    GivenFrames,
    Nearest,
    PixelSquare,
    PrincipalFrames,
    Radius,
    SampledFrames,
    lift,
    point_clouds,
)
from lieattn.groups import SE, SO, RotationDilations, Translations, cyclic, dihedral, octahedral, tetrahedral
from lieattn.models import (
    AffineSelfConvNet,
    AttentionOptions,
    AttentiveAllCNN,
    AttentiveCNN,
    AttentiveDenseNet,
    AttentiveResNet,
    ConvolutionOptions,
    EnergyForces,
    FieldModel,
    FiniteSE2Transformer,
    FramewiseTransformer,
    GSANet,
    GSAOptions,
    GSAReadout,
    HamiltonianDynamics,
    LieConvNet,
    LieTransformer,
    Lifting,
    Readout,
    SortedDistances,
    Species,
    Stages,
    published_table,
)
from lieattn.models.frames import FramewiseOptions
from lieattn.models.irreps import DistanceTransformer, RadialOptions, SE3Transformer, TensorFieldNetwork
from lieattn.models.published import PublishedCoordinates
from lieattn.nn import (
    AffineSelfConvolution,
    DipoleHead,
    FramewiseBlock,
    GroupConvolution,
    GroupSelfAttention,
    LieBlock,
    LieSelfAttention,
    LiftingAffineSelfConvolution,
    LiftingSelfAttention,
    PolarizabilityHead,
    PreNormBlock,
    SimpleAffineSelfConvolution,
    StandAloneSelfAttention,
    VectorHead,
)
from lieattn.nn.relative import (
    CoordinateEncoding,
    EdgeNetwork,
    FourierFeatures,
    MLPEncoding,
    NetworkKernel,
    RelativePositionTable,
    RotaryEncoding,
    RotaryPhases,
    TableEncoding,
    TableKernel,
)
from lieattn.spaces import Euclidean, Orbits, Sphere
from lieattn.testing import relative_error
from tests.cases import oblique_rotation

GOLDENS = Path(__file__).parent / "goldens" / "weights_0_1"
TOLERANCE = 1e-9

Inputs = dict[str, Tensor]
Outputs = Tensor | tuple[Tensor, ...]


def on_data(network: nn.Module, inputs: Inputs) -> Outputs:
    return network(Data(**inputs))


def on_images(network: nn.Module, inputs: Inputs) -> Outputs:
    return network(inputs["images"])


def lifted(inputs, group, neighborhood):
    return lift(inputs["pos"], group, neighborhood, batch=inputs["batch"], length=1.0)


def on_graph(group, neighborhood):
    """Call of layers in an ``nn.ModuleDict``: those named ``lifting...`` get features, others a field."""

    def call(layers: nn.Module, inputs: Inputs) -> Outputs:
        graph = lifted(inputs, group, neighborhood)
        return tuple(
            layer(inputs["x" if name.startswith("lifting") else "field"], graph) for name, layer in layers.items()
        )

    return call


def lie_block(layers: nn.Module, inputs: Inputs) -> Outputs:
    graph = lift(inputs["pos"], tetrahedral(), AllPairs(), Euclidean(SE(3)), batch=inputs["batch"], length=1.0)
    return tuple(layer(inputs["field"], graph) for layer in layers.values())


def framewise_block(layers: nn.Module, inputs: Inputs) -> Outputs:
    group, clouds = tetrahedral(), point_clouds(inputs["pos"], batch=inputs["batch"])
    graph = lift(clouds, group, AllPairs())
    local = lift(clouds, group, Radius(2.0), length=1.0)
    terms = layers["edges"](replace(local, vectors=inputs["vel"][:, None]), inputs["x"])
    rotary = layers["phases"].terms(graph, values=True)
    return layers["block"](inputs["field"], replace(graph, terms=rotary, local=replace(local, terms=terms)))


def rows_of_three(network: nn.Module, inputs: Inputs) -> Outputs:
    return on_data(network, inputs).unflatten(1, (-1, 3))


def springs(dynamics: nn.Module, inputs: Inputs) -> Outputs:
    state = inputs["pos"], inputs["momentum"], inputs["x"][:, 0], inputs["x"]
    velocity, force = dynamics.field(*state, batch=inputs["batch"])
    return dynamics.hamiltonian(*state, batch=inputs["batch"]), velocity, force


def lie(space, frames=None, *, features=3, outputs=2, lifting=(), attention=(), readout=(), **options):
    """Return a small LieTransformer."""
    groups = {
        "lifting": Lifting(**{"local": 0, **dict(lifting)}),
        "attention": AttentionOptions(**{"hidden": 4, **dict(attention)}),
        "readout": Readout(**dict(readout)),
    }
    settings = {"neighborhood": AllPairs(), "channels": 8, "layers": 1, "heads": 2, **groups}
    return LieTransformer(features, outputs, space=space, frames=frames, **{**settings, **options})


def convolutions(*args, lifting=None, **options):
    """Return a small LieConv network with nothing before its blocks."""
    return LieConvNet(*args, channels=8, lifting=lifting or Lifting(local=0), **options)


def framewise(frames, *, cutoff=None, basis=8, hidden=16, positions=True, **options):
    own = FramewiseOptions(mlp_ratio=2, cutoff=cutoff, basis=basis, hidden=hidden, positions=positions)
    return FramewiseTransformer(frames, 3, 2, options=own, **{"channels": 8, "layers": 2, "heads": 2, **options})


def steerable(model, **options):
    radial = RadialOptions(basis=4, hidden=4)
    settings = {"channels": 4, "layers": 1, "vector_inputs": ("vel",), "radial": radial}
    return model(3, 2, neighborhood=Radius(2.0), **settings, **options)


def affine(group, positions):
    """Return every layer of Affine Self Convolution with six channels in two heads."""
    options = {"channels": 6, "heads": 2, "scale": 0.5}
    return nn.ModuleDict(
        {
            "affine": AffineSelfConvolution(group, 2, 3, positions, **options),
            "lifting": LiftingAffineSelfConvolution(group, 3, 2, positions, **options),
            "simple": SimpleAffineSelfConvolution(group, 2, 3, positions, **options),
            "alone": StandAloneSelfAttention(group, 2, 3, positions, **options),
        }
    )


def attention(group, encodings):
    """Return lifting attention, and group attention with each of the encodings in its pattern."""
    layers = {"lifting": LiftingSelfAttention(group, 3, 2, heads=2, head_channels=4)}
    for pattern, encoding in encodings:
        name = f"group_{len(layers)}_{pattern}"
        layers[name] = GroupSelfAttention(group, 2, 3, heads=2, head_channels=4, pattern=pattern, encoding=encoding)
    return nn.ModuleDict(layers)


def window(size):
    """Return displacements ``[offsets, 2]`` in a window of size x size pixels."""
    return torch.tensor(RelativePositionTable.square(size).offsets)


def given_frames():
    """Return frames of two clouds, ``[2, 24, 3, 3]``: the rotations of a cube, which is rotated in the first cloud."""
    cube = octahedral().elements
    return GivenFrames(torch.stack([oblique_rotation() @ cube, cube]), per="cloud")


SQUARE = RelativePositionTable.square(3, border="zero")


@dataclass(frozen=True)
class Weights:
    """How to build the network of a file, and how to call it with the stored inputs."""

    make: Callable[[], nn.Module]
    call: Callable[[nn.Module, Inputs], Outputs] = on_data


WEIGHTS = {
    # --- GSA-Nets
    "gsa_c4_crops_pooling": Weights(
        lambda: GSANet(
            cyclic(4),
            1,
            3,
            channels=6,
            blocks=Stages((1, 1), expansions=(1, 2), crops=(1, 0), norm_between=True),
            heads=2,
            neighborhood=PixelSquare(3),
            options=GSAOptions(values=False),
        )
    ),
    "gsa_d4_mean": Weights(
        lambda: GSANet(
            dihedral(4),
            1,
            3,
            channels=6,
            blocks=(1,),
            heads=3,
            neighborhood=PixelSquare(3),
            readout=GSAReadout("mean"),
            options=GSAOptions(values=False, activation="relu"),
        )
    ),
    "gsa_tetrahedral": Weights(
        lambda: GSANet(
            tetrahedral(),
            3,
            2,
            channels=8,
            blocks=(1,),
            heads=2,
            neighborhood=Radius(2.0),
            readout=GSAReadout("max"),
            options=GSAOptions(length=1.5, values=False, activation="gelu"),
        )
    ),
    "gsa_c4_published_table": Weights(
        lambda: GSANet(
            cyclic(4),
            1,
            3,
            channels=6,
            blocks=(1,),
            heads=2,
            neighborhood=PixelSquare(3),
            options=GSAOptions(values=False, frame_table=published_table(cyclic(4))),
        )
    ),
    "gsa_encodings_c4": Weights(
        lambda: attention(
            cyclic(4),
            [
                ("query_sum", CoordinateEncoding(2, 4, cyclic(4))),
                ("joint", CoordinateEncoding(2, 4, cyclic(4))),
                ("query_sum", TableEncoding(cyclic(4), window(3), 4)),
                ("joint", MLPEncoding(cyclic(4), 2, hidden=4, value_channels=4)),
                ("framewise", RotaryEncoding(2, 2, 4)),
            ],
        ),
        on_graph(cyclic(4), PixelSquare(3)),
    ),
    "gsa_encodings_tetrahedral": Weights(
        lambda: attention(
            tetrahedral(),
            [
                ("joint", CoordinateEncoding(3, 4, tetrahedral())),
                ("framewise", MLPEncoding(tetrahedral(), 2, hidden=4, between_frames=False)),
                ("framewise", RotaryEncoding(3, 2, 4)),
            ],
        ),
        on_graph(tetrahedral(), Radius(2.0)),
    ),
    "gsa_block": Weights(
        lambda: nn.ModuleDict(
            {
                "block": PreNormBlock(
                    GroupSelfAttention(
                        dihedral(3), 2, 4, heads=2, head_channels=3, encoding=CoordinateEncoding(2, 3, dihedral(3))
                    ),
                    2,
                    4,
                )
            }
        ),
        on_graph(dihedral(3), Radius(1.5)),
    ),
    # --- LieTransformer
    "lie_se2_sum": Weights(lambda: lie(Euclidean(SE(2)), FiniteFrames(cyclic(4)), layers=2, readout={"norm": True})),
    "lie_se2_grid": Weights(
        lambda: lie(
            Euclidean(SE(2)),
            FiniteFrames(cyclic(3)),
            lifting={"coordinates": PublishedCoordinates("grid")},
            attention={"normalize": "mean", "norm": "layer_post"},
        )
    ),
    "lie_se2_published": Weights(
        lambda: lie(
            Euclidean(SE(2)),
            FiniteFrames(cyclic(4)),
            lifting={"coordinates": PublishedCoordinates(), "bound": True},
            attention={"kernel": "combined", "features": "product", "location": "network"},
        )
    ),
    "lie_se3_content": Weights(
        lambda: lie(
            Euclidean(SE(3)),
            PrincipalFrames(),
            attention={"kernel": "content"},
            readout={"pool": "max", "order": "point_first"},
        )
    ),
    "lie_se3_local_axes": Weights(
        lambda: lie(
            Euclidean(SE(3)),
            PrincipalFrames("neighborhood", cutoff=6.0),
            neighborhood=Radius(6.0),
            attention={"norm": "none", "activation": "gelu"},
            readout={"activation": "gelu"},
        )
    ),
    "lie_se3_relative_position": Weights(
        lambda: lie(
            Euclidean(SE(3)),
            FiniteFrames(tetrahedral()),
            neighborhood=Nearest(4),
            attention={"kernel": "relative_position"},
            readout={"pool": "sum"},
        )
    ),
    "lie_se3_log": Weights(
        lambda: lie(
            Euclidean(SE(3)),
            PrincipalFrames(),
            lifting={"coordinates": "log", "length": 1.5},
            attention={"kernel": "combined", "features": "linear", "location": "network"},
        )
    ),
    "lie_se3_quaternion": Weights(
        lambda: lie(
            Euclidean(SE(3)),
            PrincipalFrames(),
            layers=2,
            lifting={"coordinates": PublishedCoordinates("quaternion"), "bound": True},
            attention={"kernel": "combined", "feature_channels": 3, "normalize": "mean"},
            readout={"order": "point_first"},
        )
    ),
    "lie_se3_sampled": Weights(
        lambda: lie(
            Euclidean(SE(3)),
            SampledFrames(4),
            attention={"norm": "batch_pre", "normalize": "exp-mean", "activation": "relu"},
            readout={"activation": "relu"},
        )
    ),
    "lie_se3_given": Weights(
        lambda: lie(
            Euclidean(SE(3)),
            given_frames(),
            attention={"kernel": "combined", "features": "linear", "norm": "batch_post"},
        )
    ),
    "lie_se3_species": Weights(lambda: lie(Euclidean(SE(3)), PrincipalFrames(), features=Species((1, 6, 8)))),
    "lie_se3_vectors": Weights(
        lambda: lie(
            Euclidean(SE(3)),
            FiniteFrames(tetrahedral()),
            neighborhood=Radius(2.5),
            vector_inputs=("vel",),
            lifting={"radial": 4, "local": 4},
            readout={"kind": "vector"},
        )
    ),
    "lie_se3_vectors_of_points": Weights(
        lambda: lie(
            Euclidean(SE(3)),
            PrincipalFrames(),
            vector_inputs=("vel",),
            lifting={"local": 4, "cutoff": 3.0},
            readout={"kind": "vector", "pool": "none"},
        )
    ),
    "lie_t3_location": Weights(
        lambda: lie(
            Euclidean(Translations(3)),
            lifting={"bound": True},
            attention={"kernel": "location"},
            readout={"pool": "none"},
        )
    ),
    "lie_t2_distances": Weights(
        lambda: lie(Euclidean(Translations(2)), features=SortedDistances(3), attention={"normalize": "mean"})
    ),
    "lie_so2_orbits": Weights(lambda: lie(Orbits(SO(2)), lifting={"coordinates": PublishedCoordinates()})),
    "lie_so3_orbits": Weights(lambda: lie(Orbits(SO(3)), FiniteFrames(cyclic(3)))),
    "lie_so3_orbits_log": Weights(
        lambda: lie(Orbits(SO(3)), FiniteFrames(cyclic(2)), lifting={"coordinates": PublishedCoordinates()})
    ),
    "lie_rotations_and_dilations": Weights(
        lambda: lie(Orbits(RotationDilations(2)), lifting={"coordinates": PublishedCoordinates()})
    ),
    "lie_sphere": Weights(
        lambda: lie(Sphere(), FiniteFrames(cyclic(4)), neighborhood=Radius(1.2), lifting={"length": 0.7})
    ),
    "lie_block": Weights(
        lambda: nn.ModuleDict(
            {
                norm: LieBlock(LieSelfAttention(6, 12, heads=2, hidden=4), 6, norm=norm)
                for norm in ("layer_pre", "layer_post", "batch_pre")
            }
        ),
        lie_block,
    ),
    # --- LieConv
    "lieconv_downsampling": Weights(
        lambda: convolutions(
            3,
            2,
            space=Euclidean(SE(2)),
            frames=FiniteFrames(cyclic(4)),
            neighborhood=Radius(1.5),
            layers=2,
            convolution=ConvolutionOptions(3, 4, downsampling=0.4),
        )
    ),
    "lieconv_molecules": Weights(
        lambda: convolutions(
            Species((1, 6, 8)),
            2,
            frames=PrincipalFrames(),
            neighborhood=AllPairs(),
            layers=1,
            lifting=Lifting("log", bound=True, local=0),
            convolution=ConvolutionOptions(3, 4, norm="layer", activation="relu"),
            readout=Readout(pool="sum", activation="relu"),
        )
    ),
    "lieconv_points": Weights(
        lambda: convolutions(
            3,
            2,
            neighborhood=Nearest(4),
            layers=1,
            convolution=ConvolutionOptions(3, 4, norm="none"),
            readout=Readout(pool="none"),
        )
    ),
    # --- finite SE(2), framewise
    "finite_se2_mean": Weights(
        lambda: FiniteSE2Transformer(4, 6, channels=4, layers=2, heads=2, moments=3), rows_of_three
    ),
    "finite_se2_seeds": Weights(
        lambda: FiniteSE2Transformer(
            3,
            3,
            channels=8,
            layers=2,
            heads=2,
            content="centroidal",
            layer_norm=True,
            seeds=2,
            neighborhood=Radius(2.0),
        )
    ),
    "finite_se2_constant": Weights(
        lambda: FiniteSE2Transformer(4, 2, channels=4, layers=1, content="constant", normalize="mean"),
        lambda network, inputs: on_data(network, inputs)[:, None],
    ),
    "framewise_c4": Weights(lambda: framewise(cyclic(4), length=1.5)),
    "framewise_tetrahedral": Weights(
        lambda: framewise(
            FiniteFrames(tetrahedral(), PrincipalFrames()),
            vector_inputs=("vel",),
            kind="vector",
            pool="none",
            neighborhood=Radius(2.0),
            basis=4,
            hidden=4,
            positions=False,
        )
    ),
    "framewise_octahedral": Weights(
        lambda: framewise(octahedral(), layers=1, neighborhood=Nearest(4), cutoff=3.0, basis=4, hidden=4, pool="sum")
    ),
    "framewise_block": Weights(
        lambda: nn.ModuleDict(
            {
                "phases": RotaryPhases(3, 2, 4),
                "edges": EdgeNetwork(3, 3, cutoff=2.0, in_vectors=1, basis=4, hidden=4),
                "block": FramewiseBlock(tetrahedral(), 8, heads=2, mlp_ratio=2, messages=4),
            }
        ),
        framewise_block,
    ),
    # --- Affine Self Convolution
    **{
        f"affine_network_{name}": Weights(make)
        for name, make in {
            "affine": lambda: AffineSelfConvNet(
                cyclic(4), 1, 3, blocks=1, channels=2, window=SQUARE, heads=2, squeeze_excite=True
            ),
            "simple": lambda: AffineSelfConvNet(
                dihedral(4),
                1,
                3,
                layer="simple",
                blocks=1,
                channels=2,
                window=RelativePositionTable.square(3),
                heads=2,
                scale=0.5,
            ),
            "alone": lambda: AffineSelfConvNet(
                cyclic(4), 1, 3, layer="stand-alone", blocks=1, channels=2, window=SQUARE, heads=1
            ),
            "convolution": lambda: AffineSelfConvNet(
                cyclic(2), 1, 3, layer="convolution", blocks=1, channels=2, downsampling="strided"
            ),
        }.items()
    },
    "affine_table": Weights(
        lambda: affine(dihedral(4), RelativePositionTable.square(3)), on_graph(dihedral(4), PixelSquare(3))
    ),
    "affine_table_zero_border": Weights(
        lambda: affine(cyclic(4), RelativePositionTable.square(3, border="zero")), on_graph(cyclic(4), PixelSquare(3))
    ),
    "affine_smooth": Weights(
        lambda: affine(tetrahedral(), FourierFeatures(hidden=4)), on_graph(tetrahedral(), Radius(2.0))
    ),
    # --- attentive group convolution
    **{
        f"attentive_cnn_{kind}": Weights(
            lambda kind=kind: AttentiveCNN(cyclic(4), 1, 3, channels=2, attention=kind), on_images
        )
        for kind in ("none", "full", "channel", "spatial", "input", "pose")
    },
    "attentive_all_cnn": Weights(
        lambda: AttentiveAllCNN(dihedral(4), 1, 3, channels=2, attention="input", reduction=2), on_images
    ),
    "attentive_resnet": Weights(
        lambda: AttentiveResNet(cyclic(4), 1, 3, blocks=1, channels=(2, 2, 2), attention="full", hidden=1), on_images
    ),
    "attentive_densenet": Weights(
        lambda: AttentiveDenseNet(cyclic(4), 1, 2, growth=1, attention="full", hidden=1), on_images
    ),
    # --- group convolution
    "convolution_table": Weights(
        lambda: nn.ModuleDict(
            {
                "lifting": GroupConvolution(TableKernel(dihedral(4), 3, 2, window(3), lifting=True)),
                "group": GroupConvolution(TableKernel(dihedral(4), 2, 3, window(3)), reduction="mean"),
            }
        ),
        on_graph(dihedral(4), PixelSquare(3)),
    ),
    "convolution_network": Weights(
        lambda: nn.ModuleDict(
            {
                f"{'lifting' if lifting else 'group'}_{form}": GroupConvolution(
                    NetworkKernel(
                        tetrahedral(), 3 if lifting else 2, 2, lifting=lifting, form=form, hidden=4, window=not lifting
                    ),
                    measure=0.5,
                )
                for lifting in (True, False)
                for form in ("full", "separable")
            }
        ),
        on_graph(tetrahedral(), Radius(2.0)),
    ),
    # --- models of irreps
    "irreps_tensor_field": Weights(lambda: steerable(TensorFieldNetwork, degree=1)),
    "irreps_se3": Weights(lambda: steerable(SE3Transformer, degree=1, heads=2, kind="vector")),
    "irreps_distances": Weights(lambda: steerable(DistanceTransformer, heads=2, kind="vector", pool="none")),
    # --- fields, forces, dynamics
    "field_vector": Weights(
        lambda: FieldModel(
            framewise(tetrahedral(), vector_inputs=("vel",)),
            VectorHead(8, hidden=5),
            start={"pos": 1.0, "vel": 0.5},
            units={"vel": 2.0},
            unit=3.0,
        )
    ),
    "field_dipole": Weights(lambda: FieldModel(lie(Euclidean(SE(3)), PrincipalFrames()), DipoleHead(8))),
    "field_polarizability": Weights(
        lambda: FieldModel(lie(Euclidean(SE(3)), FiniteFrames(tetrahedral())), PolarizabilityHead(8))
    ),
    "energy_forces": Weights(
        lambda: EnergyForces(
            lie(
                Euclidean(SE(3)),
                PrincipalFrames(),
                outputs=1,
                lifting={"local": 4, "radial": 4, "cutoff": 4.0},
                readout={"pool": "sum"},
            ),
            jumps="allow",
        )
    ),
    "hamiltonian": Weights(
        lambda: HamiltonianDynamics(
            lie(
                Euclidean(Translations(2)),
                features=2,
                outputs=1,
                layers=2,
                attention={"normalize": "mean"},
                readout={"pool": "sum"},
            )
        ),
        springs,
    ),
}


def read(name):
    """Return state dict, inputs, outputs and meta of a file."""
    state, inputs, outputs = {}, {}, []
    with np.load(GOLDENS / f"{name}.npz", allow_pickle=False) as arrays:
        for entry in arrays.files:
            part, _, key = entry.partition("/")
            if part == "state":
                state[key] = torch.from_numpy(arrays[entry])
            elif part == "in":
                inputs[key] = torch.from_numpy(arrays[entry])
        while f"out/{len(outputs)}" in arrays.files:
            outputs.append(torch.from_numpy(arrays[f"out/{len(outputs)}"]))
        return state, inputs, outputs, json.loads(str(arrays["meta"]))


def run(name, state, inputs):
    """Return outputs of the current network with the stored state, as a list."""
    torch.set_default_dtype(torch.float64)  # e3nn rounds its coupling coefficients to the default dtype
    try:
        network = WEIGHTS[name].make().double().eval()
        network.load_state_dict(state, strict=True)
        outputs = WEIGHTS[name].call(network, inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def test_every_file_has_a_network():
    assert {path.stem for path in GOLDENS.glob("*.npz")} == set(WEIGHTS)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_0_1(name):
    state, inputs, expected, meta = read(name)
    assert meta["version"] == "0.1"
    found = run(name, state, inputs)
    assert len(found) == len(expected) > 0
    for output, known in zip(found, expected, strict=True):
        assert output.shape == known.shape
        assert known.abs().max() > 1e-4
        assert relative_error(output / known.abs().max(), known / known.abs().max()) < TOLERANCE


@pytest.mark.parametrize("name", ["lieconv_downsampling", "lie_se2_sum", "framewise_c4", "affine_table"])
def test_every_weight_counts(name):
    """Control: changing any entry changes the outputs, except the key bias, which cancels in the softmax."""
    state, inputs, expected, _ = read(name)
    for key, value in state.items():
        other = {**state, key: value + 0.3 * torch.randn(value.shape, dtype=value.dtype)}
        found = run(name, other, inputs)
        changed = max(relative_error(*pair) for pair in zip(found, expected, strict=True)) > TOLERANCE
        assert changed or key.endswith("key.bias"), key


class Adapter(nn.Module):
    """A layer around a linear one, which has its weight, like those of PEFT for low-rank updates."""

    def __init__(self, base):
        super().__init__()
        self.base, self.in_features, self.out_features = base, base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x):
        return self.base(x)


@pytest.mark.parametrize("name", WEIGHTS)
def test_layers_around_linear_ones_are_called_or_refused(name):
    """Fused layers read weights without a call, so they would ignore what another layer adds to the outputs."""
    state, inputs, _, _ = read(name)
    torch.set_default_dtype(torch.float64)
    try:
        network = WEIGHTS[name].make().double().eval()
        network.load_state_dict(state, strict=True)
        linear = {module: key for key, module in network.named_modules() if type(module) is nn.Linear}
        called = set()
        for module in linear:
            module.register_forward_hook(lambda layer, *_: called.add(layer))
        WEIGHTS[name].call(network, inputs)
        for layer in linear.keys() - called:
            network.set_submodule(linear[layer], Adapter(layer))
            with pytest.raises(TypeError, match=r"expected a torch.nn.Linear, .*parametrize, got Adapter"):
                WEIGHTS[name].call(network, inputs)
            network.set_submodule(linear[layer], layer)
    finally:
        torch.set_default_dtype(torch.float32)
