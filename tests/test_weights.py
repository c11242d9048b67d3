"""Checkpoints of version 0.1 load into the current networks and give the same outputs.

Each file ``goldens/weights_0_1/NAME.npz`` was written by version 0.1: all entries of a state dict as ``state/<key>``,
inputs as ``in/<name>``, outputs as ``out/<number>``, all in float64, and ``meta``, a JSON string with the expressions
by which the network was made and called. ``WEIGHTS`` says how the same network is made today, and ``CALLS`` how it is
called. Builders follow the names of the library; the keys of the state dicts and the numbers never change.
"""

import json
from collections.abc import Callable
from dataclasses import replace
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
from lieattn.groups import (
    SE,
    SO,
    FiniteGroup,
    RotationDilations,
    Translations,
    cyclic,
    dihedral,
    octahedral,
    tetrahedral,
)
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
    FramewiseOptions,
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


def springs(dynamics: nn.Module, inputs: Inputs) -> Outputs:
    state = inputs["pos"], inputs["momentum"], inputs["x"][:, 0], inputs["x"]
    velocity, force = dynamics.field(*state, batch=inputs["batch"])
    return dynamics.hamiltonian(*state, batch=inputs["batch"]), velocity, force


def gsa(group, *, heads=2, blocks=(1,), readout=None, **options):
    """Return a small GSA-Net for images."""
    options = GSAOptions(values=False, pattern="query_sum", **options)
    sizes = {"channels": 6, "heads": heads, "neighborhood": PixelSquare(3)}
    return GSANet(group, 1, 3, blocks=blocks, readout=readout, options=options, **sizes)


def lie(space, frames=None, *, inputs=3, outputs=2, readout=(), **options):
    """Return a small LieTransformer, whose lifting, attention and readout take the options that have their names."""

    def group_of(kind, **given):
        return kind(**given, **{name: options.pop(name) for name in list(options) if hasattr(kind, name)})

    parts = {
        "lifting": group_of(Lifting, **({} if "local" in options else {"local": 0})),
        "attention": group_of(AttentionOptions, hidden=4),
        "readout": group_of(Readout, **dict(readout)),
    }
    frames = FiniteFrames(frames) if isinstance(frames, FiniteGroup) else frames
    settings = {"neighborhood": AllPairs(), "channels": 8, "layers": 1, "heads": 2, **parts}
    return LieTransformer(inputs, outputs, space=space, frames=frames, **{**settings, **options})


def convolutions(*args, lifting=None, layers=1, **options):
    """Return a small LieConv network with nothing before its blocks."""
    return LieConvNet(*args, channels=8, layers=layers, lifting=lifting or Lifting(local=0), **options)


def affine_network(group, **options):
    return AffineSelfConvNet(group, 1, 3, blocks=1, channels=2, **options)


def coordinate_attention(group):
    encoding = CoordinateEncoding(2, 3, group)
    return GroupSelfAttention(group, 2, 4, heads=2, head_channels=3, encoding=encoding)


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


SQUARE, SPACE = RelativePositionTable.square(3, border="zero"), Euclidean(SE(3))

WEIGHTS: dict[str, Callable[[], nn.Module]] = {
    # --- GSA-Nets
    "gsa_c4_crops_pooling": lambda: gsa(
        cyclic(4), blocks=Stages((1, 1), expansions=(1, 2), crops=(1, 0), norm_between=True)
    ),
    "gsa_d4_mean": lambda: gsa(dihedral(4), heads=3, readout=GSAReadout("mean"), activation="relu"),
    "gsa_tetrahedral": lambda: GSANet(
        *(tetrahedral(), 3, 2),
        channels=8,
        blocks=(1,),
        heads=2,
        neighborhood=Radius(2.0),
        readout=GSAReadout("max"),
        options=GSAOptions(length=1.5, values=False, pattern="query_sum", activation="gelu"),
    ),
    "gsa_c4_published_table": lambda: gsa(cyclic(4), frame_table=published_table(cyclic(4))),
    "gsa_encodings_c4": lambda: attention(
        cyclic(4),
        [
            ("query_sum", CoordinateEncoding(2, 4, cyclic(4))),
            ("joint", CoordinateEncoding(2, 4, cyclic(4))),
            ("query_sum", TableEncoding(cyclic(4), window(3), 4)),
            ("joint", MLPEncoding(cyclic(4), 2, hidden=4, value_channels=4)),
            ("framewise", RotaryEncoding(2, 2, 4)),
        ],
    ),
    "gsa_encodings_tetrahedral": lambda: attention(
        tetrahedral(),
        [
            ("joint", CoordinateEncoding(3, 4, tetrahedral())),
            ("framewise", MLPEncoding(tetrahedral(), 2, hidden=4, between_frames=False)),
            ("framewise", RotaryEncoding(3, 2, 4)),
        ],
    ),
    "gsa_block": lambda: nn.ModuleDict({"block": PreNormBlock(coordinate_attention(dihedral(3)), 2, 4)}),
    # --- LieTransformer
    "lie_se2_sum": lambda: lie(Euclidean(SE(2)), cyclic(4), layers=2, readout={"norm": True}),
    "lie_se2_grid": lambda: lie(
        Euclidean(SE(2)), cyclic(3), coordinates=PublishedCoordinates("grid"), normalize="mean", norm="layer_post"
    ),
    "lie_se2_published": lambda: lie(
        *(Euclidean(SE(2)), cyclic(4)),
        coordinates=PublishedCoordinates(),
        bound=True,
        kernel="combined",
        features="product",
        location="network",
    ),
    "lie_se3_content": lambda: lie(SPACE, PrincipalFrames(), kernel="content", pool="max", order="point_first"),
    "lie_se3_local_axes": lambda: lie(
        *(SPACE, PrincipalFrames("neighborhood", cutoff=6.0)),
        neighborhood=Radius(6.0),
        norm="none",
        activation="gelu",
        readout={"activation": "gelu"},
    ),
    "lie_se3_relative_position": lambda: lie(
        SPACE, tetrahedral(), neighborhood=Nearest(4), kernel="relative_position", pool="sum"
    ),
    "lie_se3_log": lambda: lie(
        *(SPACE, PrincipalFrames()),
        coordinates="log",
        length=1.5,
        kernel="combined",
        features="linear",
        location="network",
    ),
    "lie_se3_quaternion": lambda: lie(
        *(SPACE, PrincipalFrames()),
        layers=2,
        coordinates=PublishedCoordinates("quaternion"),
        bound=True,
        kernel="combined",
        feature_channels=3,
        normalize="mean",
        order="point_first",
    ),
    "lie_se3_sampled": lambda: lie(
        *(SPACE, SampledFrames(4)),
        norm="batch_pre",
        normalize="exp-mean",
        activation="relu",
        readout={"activation": "relu"},
    ),
    "lie_se3_given": lambda: lie(SPACE, given_frames(), kernel="combined", features="linear", norm="batch_post"),
    "lie_se3_species": lambda: lie(SPACE, PrincipalFrames(), inputs=Species((1, 6, 8))),
    "lie_se3_vectors": lambda: lie(
        SPACE, tetrahedral(), neighborhood=Radius(2.5), vector_inputs=("vel",), radial=4, local=4, kind="vector"
    ),
    "lie_se3_vectors_of_points": lambda: lie(
        SPACE, PrincipalFrames(), vector_inputs=("vel",), local=4, cutoff=3.0, kind="vector", pool="none"
    ),
    "lie_t3_location": lambda: lie(Euclidean(Translations(3)), bound=True, kernel="location", pool="none"),
    "lie_t2_distances": lambda: lie(Euclidean(Translations(2)), inputs=SortedDistances(3), normalize="mean"),
    "lie_so2_orbits": lambda: lie(Orbits(SO(2)), coordinates=PublishedCoordinates()),
    "lie_so3_orbits": lambda: lie(Orbits(SO(3)), cyclic(3)),
    "lie_so3_orbits_log": lambda: lie(Orbits(SO(3)), cyclic(2), coordinates=PublishedCoordinates()),
    "lie_rotations_and_dilations": lambda: lie(Orbits(RotationDilations(2)), coordinates=PublishedCoordinates()),
    "lie_sphere": lambda: lie(Sphere(), cyclic(4), neighborhood=Radius(1.2), length=0.7),
    "lie_block": lambda: nn.ModuleDict(
        {
            norm: LieBlock(LieSelfAttention(6, 12, heads=2, hidden=4), 6, norm=norm)
            for norm in ("layer_pre", "layer_post", "batch_pre")
        }
    ),
    # --- LieConv
    "lieconv_downsampling": lambda: convolutions(
        *(3, 2),
        space=Euclidean(SE(2)),
        frames=FiniteFrames(cyclic(4)),
        neighborhood=Radius(1.5),
        layers=2,
        convolution=ConvolutionOptions(3, 4, downsampling=0.4),
    ),
    "lieconv_molecules": lambda: convolutions(
        *(Species((1, 6, 8)), 2),
        frames=PrincipalFrames(),
        neighborhood=AllPairs(),
        lifting=Lifting("log", bound=True, local=0),
        convolution=ConvolutionOptions(3, 4, norm="layer", activation="relu"),
        readout=Readout(pool="sum", activation="relu"),
    ),
    "lieconv_points": lambda: convolutions(
        *(3, 2),
        neighborhood=Nearest(4),
        convolution=ConvolutionOptions(3, 4, norm="none"),
        readout=Readout(pool="none"),
    ),
    # --- finite SE(2), framewise
    "finite_se2_mean": lambda: FiniteSE2Transformer(4, 6, channels=4, layers=2, heads=2, moments=3),
    "finite_se2_seeds": lambda: FiniteSE2Transformer(
        *(3, 3), channels=8, layers=2, heads=2, content="centroidal", layer_norm=True, seeds=2, neighborhood=Radius(2.0)
    ),
    "finite_se2_constant": lambda: FiniteSE2Transformer(
        4, 2, channels=4, layers=1, content="constant", normalize="mean"
    ),
    "framewise_c4": lambda: framewise(cyclic(4), length=1.5),
    "framewise_tetrahedral": lambda: framewise(
        FiniteFrames(tetrahedral(), PrincipalFrames()),
        vector_inputs=("vel",),
        kind="vector",
        pool="none",
        neighborhood=Radius(2.0),
        basis=4,
        hidden=4,
        positions=False,
    ),
    "framewise_octahedral": lambda: framewise(
        octahedral(), layers=1, neighborhood=Nearest(4), cutoff=3.0, basis=4, hidden=4, pool="sum"
    ),
    "framewise_block": lambda: nn.ModuleDict(
        {
            "phases": RotaryPhases(3, 2, 4),
            "edges": EdgeNetwork(3, 3, cutoff=2.0, in_vectors=1, basis=4, hidden=4),
            "block": FramewiseBlock(tetrahedral(), 8, heads=2, mlp_ratio=2, messages=4),
        }
    ),
    # --- Affine Self Convolution
    "affine_network_affine": lambda: affine_network(cyclic(4), window=SQUARE, heads=2, squeeze_excite=True),
    "affine_network_simple": lambda: affine_network(
        dihedral(4), layer="simple", window=RelativePositionTable.square(3), heads=2, scale=0.5
    ),
    "affine_network_alone": lambda: affine_network(cyclic(4), layer="stand-alone", window=SQUARE, heads=1),
    "affine_network_convolution": lambda: affine_network(cyclic(2), layer="convolution", downsampling="strided"),
    "affine_table": lambda: affine(dihedral(4), RelativePositionTable.square(3)),
    "affine_table_zero_border": lambda: affine(cyclic(4), SQUARE),
    "affine_smooth": lambda: affine(tetrahedral(), FourierFeatures(hidden=4)),
    # --- attentive group convolution
    **{
        f"attentive_cnn_{kind}": lambda kind=kind: AttentiveCNN(cyclic(4), 1, 3, channels=2, attention=kind)
        for kind in ("none", "full", "channel", "spatial", "input", "pose")
    },
    "attentive_all_cnn": lambda: AttentiveAllCNN(dihedral(4), 1, 3, channels=2, attention="input", reduction=2),
    "attentive_resnet": lambda: AttentiveResNet(
        cyclic(4), 1, 3, blocks=1, channels=(2, 2, 2), attention="full", hidden=1
    ),
    "attentive_densenet": lambda: AttentiveDenseNet(cyclic(4), 1, 2, growth=1, attention="full", hidden=1),
    # --- group convolution
    "convolution_table": lambda: nn.ModuleDict(
        {
            "lifting": GroupConvolution(TableKernel(dihedral(4), 3, 2, window(3), lifting=True)),
            "group": GroupConvolution(TableKernel(dihedral(4), 2, 3, window(3)), reduction="mean"),
        }
    ),
    "convolution_network": lambda: nn.ModuleDict(
        {
            f"{name}_{form}": GroupConvolution(
                NetworkKernel(tetrahedral(), channels, 2, lifting=lifting, form=form, hidden=4, window=not lifting),
                measure=0.5,
            )
            for name, lifting, channels in (("lifting", True, 3), ("group", False, 2))
            for form in ("full", "separable")
        }
    ),
    # --- models of irreps
    "irreps_tensor_field": lambda: steerable(TensorFieldNetwork, degree=1),
    "irreps_se3": lambda: steerable(SE3Transformer, degree=1, heads=2, kind="vector"),
    "irreps_distances": lambda: steerable(DistanceTransformer, heads=2, kind="vector", pool="none"),
    # --- fields, forces, dynamics
    "field_vector": lambda: FieldModel(
        framewise(tetrahedral(), vector_inputs=("vel",)),
        VectorHead(8, hidden=5),
        start={"pos": 1.0, "vel": 0.5},
        units={"vel": 2.0},
        unit=3.0,
    ),
    "field_dipole": lambda: FieldModel(lie(SPACE, PrincipalFrames()), DipoleHead(8)),
    "field_polarizability": lambda: FieldModel(lie(SPACE, tetrahedral()), PolarizabilityHead(8)),
    "energy_forces": lambda: EnergyForces(
        lie(SPACE, PrincipalFrames(), outputs=1, local=4, radial=4, cutoff=4.0, pool="sum"), jumps="allow"
    ),
    "hamiltonian": lambda: HamiltonianDynamics(
        lie(Euclidean(Translations(2)), inputs=2, outputs=1, layers=2, normalize="mean", pool="sum")
    ),
}
# How networks and layers are called that do not take Data.
CALLS: dict[str, Callable[[nn.Module, Inputs], Outputs]] = {
    "gsa_encodings_c4": on_graph(cyclic(4), PixelSquare(3)),
    "gsa_encodings_tetrahedral": on_graph(tetrahedral(), Radius(2.0)),
    "gsa_block": on_graph(dihedral(3), Radius(1.5)),
    "lie_block": lie_block,
    "finite_se2_mean": lambda network, inputs: on_data(network, inputs).unflatten(1, (-1, 3)),
    "finite_se2_constant": lambda network, inputs: on_data(network, inputs)[:, None],
    "framewise_block": framewise_block,
    "affine_table": on_graph(dihedral(4), PixelSquare(3)),
    "affine_table_zero_border": on_graph(cyclic(4), PixelSquare(3)),
    "affine_smooth": on_graph(tetrahedral(), Radius(2.0)),
    **{name: on_images for name in WEIGHTS if name.startswith("attentive")},
    "convolution_table": on_graph(dihedral(4), PixelSquare(3)),
    "convolution_network": on_graph(tetrahedral(), Radius(2.0)),
    "hamiltonian": springs,
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


pytestmark = pytest.mark.usefixtures("double")


def outputs_of(name, network, inputs):
    """Return the outputs of a network of a file as a list."""
    outputs = CALLS.get(name, on_data)(network, inputs)
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def test_every_file_has_a_network():
    assert {path.stem for path in GOLDENS.glob("*.npz")} == set(WEIGHTS)


class Adapter(nn.Module):
    """A layer around a linear one, which has its weight, like those of PEFT for low-rank updates."""

    def __init__(self, base):
        super().__init__()
        self.base, self.in_features, self.out_features = base, base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x):
        return self.base(x)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_0_1(name):
    """Fused layers read weights without a call, so layers around linear ones are called or refused."""
    state, inputs, expected, meta = read(name)
    assert meta["version"] == "0.1"
    network = WEIGHTS[name]().double().eval()
    network.load_state_dict(state, strict=True)
    linear = {module: key for key, module in network.named_modules() if type(module) is nn.Linear}
    called = set()
    hooks = [module.register_forward_hook(lambda layer, *_: called.add(layer)) for module in linear]
    found = outputs_of(name, network, inputs)
    assert len(found) == len(expected) > 0
    for output, known in zip(found, expected, strict=True):
        assert output.shape == known.shape
        assert known.abs().max() > 1e-4
        assert relative_error(output / known.abs().max(), known / known.abs().max()) < TOLERANCE
    for hook in hooks:
        hook.remove()
    for layer in linear.keys() - called:
        network.set_submodule(linear[layer], Adapter(layer))
        with pytest.raises(TypeError, match=r"expected a torch.nn.Linear, .*parametrize, got Adapter"):
            outputs_of(name, network, inputs)
        network.set_submodule(linear[layer], layer)


@pytest.mark.parametrize("name", ["lie_se2_sum", "framewise_c4"])
def test_every_weight_counts(name):
    """Control: changing any entry changes the outputs, except the key bias, which cancels in the softmax."""
    state, inputs, expected, _ = read(name)
    network = WEIGHTS[name]().double().eval()
    for key, value in state.items():
        network.load_state_dict({**state, key: value + 0.3 * torch.randn(value.shape)})
        pairs = zip(outputs_of(name, network, inputs), expected, strict=True)
        assert key.endswith("key.bias") or max(relative_error(*pair) for pair in pairs) > TOLERANCE, key
