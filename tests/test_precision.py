"""Weights and inputs of different precisions: networks convert their inputs, layers say what they expect."""

import copy
from functools import partial

import pytest
import torch
from torch_geometric.data import Data

import lieattn
from lieattn.geometry import AllPairs, PrincipalFrames, Radius, lift, point_clouds
from lieattn.groups import Translations, cyclic, tetrahedral
from lieattn.models import (
    AffineSelfConvNet,
    AttentiveCNN,
    DirectionConvNet,
    EnergyForces,
    FieldModel,
    FiniteSE2Transformer,
    FramewiseOptions,
    FramewiseTransformer,
    GSANet,
    GSAOptions,
    GSAReadout,
    LieTransformer,
    Readout,
    Rescaled,
)
from lieattn.models.irreps import DistanceTransformer
from lieattn.nn import CloudNorm, GroupAttention, PointBatchNorm, VectorHead
from lieattn.nn.relative import BumpKernel, MLPEncoding, NetworkKernel, RelativeFunction, TableEncoding, TableKernel
from lieattn.nn.relative._base import measured
from lieattn.ops import RelativeTerms
from lieattn.spaces import Euclidean
from lieattn.testing import randomize, relative_error
from tests.cases import each
from tests.fuzz.models import MODELS
from tests.lifted_cases import LIFTED
from tests.test_equivariance import LAYERS, call, fits, prepared

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
# Relative to the largest output. Weights and signals of several layers are rounded to 11 or 8 bits.
TOLERANCE = {F64: 1e-5, F32: 1e-5, F16: 2e-2, BF16: 0.1}
# Weights, positions, features.
MIXED = {
    "half": (F16, F16, F16),
    "bfloat16 weights, float64 positions": (BF16, F64, BF16),
    "float64 inputs": (F32, F64, F64),
    "float64 weights": (F64, F32, F32),
    "half features": (F32, F32, F16),
}
IMAGES = {
    "AttentiveCNN": lambda: AttentiveCNN(cyclic(4), channels=2, attention="pose", spatial_size=3),
    "AffineSelfConvNet": lambda: AffineSelfConvNet(cyclic(4), 1, 2, blocks=1, channels=4, heads=2),
}
SEVERAL = ["gsa_points", "framewise_principal_vector", "lie_conv", "se3_transformer"]


def network(name):
    torch.manual_seed(0)
    return randomize(IMAGES[name]() if name in IMAGES else MODELS[name][2](), spread=0.4)


def inputs(name, positions=F32, features=F32):
    """Return two clouds, or images, with values that are exact in bfloat16, so that conversions lose nothing."""
    generator = torch.Generator().manual_seed(1)

    def drawn(dtype, *shape):
        return torch.randn(*shape, generator=generator).bfloat16().to(dtype)

    if name in IMAGES:
        return drawn(features, 2, 1, *([28, 28] if name == "AttentiveCNN" else [8, 8]))
    dim, batch = MODELS[name][0], torch.tensor([0, 0, 0, 0, 1, 1, 1])
    given = {"x": drawn(features, 7, MODELS[name][1]), "vel": drawn(features, 7, dim)}
    return Data(pos=drawn(positions, 7, dim), batch=batch, z=torch.tensor([1, 6, 7, 8, 1, 1, 1]), **given)


def outputs(model, data):
    found = model(data)
    return found if isinstance(found, torch.Tensor) else found.energy


@pytest.mark.parametrize("name", [*MODELS, *IMAGES])
def test_networks_take_inputs_of_any_precision(name):
    model = network(name)
    expected = outputs(model, inputs(name)).detach()
    models = {dtype: copy.deepcopy(model).to(dtype) for dtype in TOLERANCE}
    for case, (weights, positions, features) in MIXED.items():
        data = inputs(name, positions, features)
        found = outputs(models[weights], data).detach()
        error = relative_error(found.double(), expected.double(), floor=0.0)
        assert found.dtype == weights, case
        assert error < TOLERANCE[weights], f"{case}: {error:.1e}"
        if name not in IMAGES:
            assert (data.pos.dtype, data.x.dtype) == (positions, features), "the data of the caller are changed"


def placed(name, shifts):
    """Return the clouds of :func:`inputs` in float64, each moved by a number along all axes."""
    data = inputs(name, F64, F64)
    data.pos = data.pos / 2.3 + torch.tensor(shifts, dtype=F64)[data.batch, None]  # float32 does not hold the quotients
    return data


@pytest.mark.parametrize("name", MODELS)
def test_clouds_far_from_the_origin_keep_their_digits(name):
    """In float32, coordinates of 100,000 are rounded to 0.008."""
    model = network(name)
    assert model.symmetry.all_translations
    expected = outputs(model, placed(name, [0.0, 0.0])).detach()
    far = placed(name, [1e5 / 3, -1e5])
    rounded = far.clone().update({"pos": far.pos.float(), "x": far.x.float(), "vel": far.vel.float()})
    found, lost = (relative_error(outputs(model, data).detach(), expected, floor=0.0) for data in (far, rounded))
    assert (found < 1e-6, lost > 5e-6) == (True, True), f"{found:.1e} {lost:.1e}"


def test_clouds_as_inputs_keep_their_digits_far_from_the_origin():
    model = FramewiseTransformer(PrincipalFrames(), 1, 2, channels=4, layers=1)
    near, far = (point_clouds(placed("gsa_principal", shifts)) for shifts in ([0.0, 0.0], [1e5 / 3, -1e5]))
    assert relative_error(model(far), model(near), floor=0.0) < 1e-6
    assert relative_error(model(far.astype(F32)), model(near), floor=0.0) > 5e-6


def absolute(table=None):
    options = GSAOptions(positions="absolute", values=False, frame_table=table)
    return GSANet(cyclic(4), 2, 2, neighborhood=AllPairs(), channels=8, blocks=(1,), heads=2, options=options)


def moving():
    inner = FramewiseTransformer(cyclic(4), 2, 1, channels=4, layers=1)
    return FieldModel(inner, VectorHead(4, 2), start={"pos": 1.0})


def padded():
    return FiniteSE2Transformer(3, channels=8, layers=1, heads=2, content="centroidal")


SEEING_PLACES = {
    "absolute": absolute,
    "absolute, another table": lambda: absolute(torch.arange(16).view(4, 4) % 4),
    "positions as outputs": moving,
    "padded points": lambda: partial(randomize(padded()), slots=9),
}


@pytest.mark.parametrize("case", SEEING_PLACES)
def test_networks_that_see_places_keep_them(case):
    made = SEEING_PLACES[case]()
    model = randomize(made) if isinstance(made, torch.nn.Module) else made
    assert case in ("positions as outputs", "padded points") or not made.symmetry.all_translations
    near, away = (placed("lie_plane", [shift, shift]) for shift in (0.0, 3.0))
    single = away.clone().update({"pos": away.pos.float(), "x": away.x.float()})
    torch.testing.assert_close(model(away), model(single), rtol=0, atol=0)
    assert relative_error(model(near), model(away)) > 1e-3


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_read_in_the_dtype_of_the_weights_unless_they_are_too_large(name):
    model, images = network(name), inputs(name, features=F64)
    assert model.images(images).dtype == F32
    with pytest.raises(ValueError, match=r"data: expected at most 1e\+15 in size"):
        model(1e20 * images)


def lie(readout):
    options = {"channels": 8, "layers": 1, "heads": 2, "readout": readout}
    return LieTransformer(1, 1, space=Euclidean(Translations(3)), neighborhood=Radius(1.0, smooth=True), **options)


def framewise(**options):
    return FramewiseTransformer(
        tetrahedral(), 1, 1, channels=8, layers=1, pool="sum", neighborhood=Radius(1.0), **options
    )


ENERGIES = {
    "pool first": lambda: lie(Readout(pool="sum")),
    "point first": lambda: lie(Readout(pool="sum", order="point_first")),
    "framewise": lambda: framewise(options=FramewiseOptions(attention="neighborhood")),
    "framewise, head of frames": lambda: framewise(options=FramewiseOptions(attention="neighborhood", head="frames")),
    "directions": lambda: DirectionConvNet(
        tetrahedral(), 1, 1, channels=8, layers=1, pool="sum", neighborhood=Radius(1.0)
    ),
    "distances": lambda: DistanceTransformer(1, 1, channels=8, layers=1, heads=2, pool="sum", neighborhood=Radius(1.0)),
    "GSANet": lambda: GSANet(
        tetrahedral(), 1, 1, channels=8, blocks=(1,), heads=2, neighborhood=Radius(1.0), readout=GSAReadout(pool="sum")
    ),
}


@pytest.mark.parametrize("name", ENERGIES)
def test_energies_of_many_atoms_under_autocast_are_those_of_the_last_layer_in_single_precision(name):
    """In bfloat16, 5.3 is 5.3125, and the sum over 600 atoms would be a multiple of 16."""
    torch.manual_seed(0)
    model = randomize(ENERGIES[name](), spread=0.1).eval()
    for bias in (weight for weight in model.head.parameters() if weight.shape == (1,)):
        bias.data.fill_(5.3)
    data = Data(pos=8 * torch.rand(600, 3), x=torch.ones(600, 1))
    exact = model(data)
    with torch.autocast("cpu", BF16):
        found = model(data)
    assert found.dtype == F32
    assert (found - exact).abs() < 0.2


@pytest.mark.parametrize("sizes", [[100_000], [50_000, 50_000], [99_997, 3]])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_sums_over_many_atoms_are_rounded_a_few_times(sizes, reduction):
    x = torch.randn(sum(sizes), 2, generator=torch.Generator().manual_seed(0)) - 5
    clouds = point_clouds(torch.zeros(len(x), 3), batch=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)))
    assert (clouds.each is None) == (len(set(sizes)) > 1)
    found, exact = (getattr(clouds, reduction)(numbers) for numbers in (x, x.double()))
    assert found.dtype == F32
    assert ((found - exact) / exact).abs().max() < 4e-7


@pytest.mark.parametrize("name", SEVERAL)
def test_weights_in_bfloat16_have_gradients(name):
    wide, narrow = network(name).train(), network(name).train().bfloat16()
    for model in (wide, narrow):
        outputs(model, inputs(name)).float().square().sum().backward()
    for expected, found in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert (expected.grad is None) == (found.grad is None)
        assert found.grad is None or (found.grad.dtype == BF16 and bool(found.grad.isfinite().all()))
    both = [
        torch.cat([p.grad.flatten().double() for p in m.parameters() if p.grad is not None]) for m in (wide, narrow)
    ]
    assert torch.cosine_similarity(*both, dim=0) > 0.99


def test_weights_in_bfloat16_keep_their_statistics():
    wide, narrow = network("lie_conv").train(), network("lie_conv").train().bfloat16()
    before = {name: value.clone() for name, value in narrow.named_buffers() if value.is_floating_point()}
    for model in (wide, narrow):
        model(inputs("lie_conv"))
    expected = dict(wide.named_buffers())
    assert any(not torch.equal(value, before[name]) for name, value in narrow.named_buffers() if name in before)
    for name, value in narrow.named_buffers():
        assert relative_error(value.double(), expected[name].double()) < TOLERANCE[BF16], name


@pytest.mark.parametrize("name", ["gsa_points", "framewise", "lie_finite", "lie_conv", "finite_se2"])
@pytest.mark.parametrize("weights", [F64, BF16])
def test_geometry_and_field_in_bfloat16(name, weights):
    model, data = network(name).to(weights), inputs(name)
    geometry = model.geometry(data)
    assert torch.equal(model(data, geometry), model(data))
    field = model.field(data, geometry)
    assert field.x.dtype == weights
    assert field.graph.pos.dtype == (F32 if weights == BF16 else weights)


@each("name", LAYERS.keys())
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_layers_in_half_precision(name, dtype):
    case = next(case for case in (LIFTED["D3"], LIFTED["SE(3), principal"]) if fits(name, case))
    layer, x, _, _, graph = prepared(name, case, F32)
    x = x.to(dtype)
    with torch.no_grad():
        expected = call(name, layer, x.float(), graph)
        found = call(name, copy.deepcopy(layer).to(dtype), x, graph)
        assert found.dtype == dtype
        assert relative_error(found.double(), expected.double(), floor=0.0) < TOLERANCE[dtype]
        wide = call(name, layer, x.float(), graph.astype(F64))
        assert wide.dtype == F32
        assert relative_error(wide, expected) < TOLERANCE[F32]
        if not name.startswith("pool"):
            with pytest.raises(ValueError, match=rf"^x: expected torch\.float32 on cpu like the weights, got {dtype}"):
                call(name, layer, x, graph)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_statistics_in_half_precision_are_those_in_single_precision(dtype):
    x, clouds = (30 + torch.randn(50, 4, 6)).to(dtype), point_clouds(torch.zeros(50, 2), batch=torch.arange(50) % 3)
    for norm, arguments in ((CloudNorm(6), (clouds,)), (PointBatchNorm(6), ())):
        expected = norm(x.float(), *arguments).to(dtype)
        assert torch.equal(copy.deepcopy(norm).to(dtype)(x, *arguments), expected)


OF_GEOMETRY = (
    *("lifting", "lifting, mlp values", "joint", "joint, mlp values", "framewise, rotary", "tied joint"),
    *("lie, location", "affine", "lifting, affine", "affine, simple", "affine, stand-alone", "affine, full"),
)


@pytest.mark.usefixtures("plain")  # autocast does not reach into kernels
@pytest.mark.parametrize("name", OF_GEOMETRY)
def test_terms_of_layers_are_not_rounded_under_autocast(name):
    layer, x, _, _, graph = prepared(name, LIFTED["D3"], F32)
    x = x[:, None] if layer.lifting else x
    expected = layer.terms(x, graph).tables()
    with torch.autocast("cpu", BF16):
        found = layer.terms(x, graph).tables()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[term], table) for term, table in expected.items())


STEPS = 2.31 * torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]])  # bfloat16 rounds them by 6e-3
OF_GROUP = {
    "TableKernel": lambda: TableKernel(cyclic(8), 2, 3, STEPS),
    "NetworkKernel": lambda: NetworkKernel(cyclic(8), 2, 3),
    "BumpKernel": lambda: BumpKernel(cyclic(8), 2, 3),
    "TableEncoding": lambda: TableEncoding(cyclic(8), STEPS, 6),
    "MLPEncoding": lambda: MLPEncoding(cyclic(8), 2),
}


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("name", OF_GROUP)
def test_tables_of_layers_keep_their_values_in_half_precision(name, dtype):
    layer, graph = OF_GROUP[name](), lift(STEPS, cyclic(8), AllPairs())
    narrow = copy.deepcopy(layer).to(dtype)
    for one, other in zip(narrow.float().buffers(), layer.buffers(), strict=True):
        assert torch.equal(one, other)
    rounded = copy.deepcopy(layer).to(dtype)(graph).tables()
    for term, table in layer(graph).tables().items():
        assert relative_error(rounded[term].double(), table.double()) < TOLERANCE[dtype]


WEIGHTED = ("C3 on scales", "C3, smooth")


@each("name, case", [(n, c) for n in LAYERS for c in WEIGHTED if fits(n, LIFTED[c])])
def test_weights_of_the_keys_in_double_precision_do_not_widen_layers(name, case):
    layer, x, _, _, graph = prepared(name, LIFTED[case], F64)
    expected = call(name, layer, x, graph)
    found = call(name, copy.deepcopy(layer).float(), x.float(), graph)
    assert found.dtype == F32
    assert relative_error(found.double(), expected) < 1e-4


def test_logarithms_of_weights_of_keys_are_not_rounded():
    graph = lift(torch.randn(6, 2), cyclic(4), Radius(2.0, smooth=True))
    assert measured(RelativeTerms(), graph, "softmax", BF16).displacement_bias.dtype == F32
    assert measured(RelativeTerms(), graph, "mean", BF16).psi.dtype == F32


class Bias(RelativeFunction):
    """A bias for each edge, of which it is said what it returns."""

    def __init__(self, returned):
        super().__init__()
        self.returned = returned

    def forward(self, graph, x=None):
        return self.returned(graph)


def test_terms_of_an_own_encoding_may_be_wider_than_the_layer():
    graph = lift(torch.randn(6, 2, dtype=F64), cyclic(4), AllPairs())
    encoding = Bias(lambda graph: RelativeTerms(displacement_bias=graph.relative.positions[..., :1, None]))
    layer, x = GroupAttention(8, 8, heads=2, encoding=encoding), torch.randn(6, 4, 8)
    found = layer(x, graph)
    assert found.dtype == F32
    assert relative_error(found.double(), layer.double()(x.double(), graph)) < TOLERANCE[F32]


@pytest.mark.parametrize("parts", [lambda wrong: wrong, lambda wrong: [wrong, Bias(lambda graph: RelativeTerms())]])
@pytest.mark.parametrize(("returned", "found"), [(None, "NoneType"), (torch.ones(3), "a tensor of torch.float32")])
def test_encodings_that_return_no_terms_are_named(parts, returned, found):
    graph, encoding = lift(torch.randn(6, 2), cyclic(4), AllPairs()), parts(Bias(lambda graph: returned))
    with pytest.raises(TypeError, match=f"encoding: Bias: expected a RelativeTerms, got {found}"):
        GroupAttention(8, 8, heads=2, encoding=encoding)(torch.randn(6, 4, 8), graph)


@pytest.mark.parametrize("half", [F16, BF16], ids=str)
def test_shifts_of_outputs_are_not_rounded_under_autocast(half):
    """In bfloat16, -40,000 is -39,936, and float16 has no numbers beyond 65,504."""
    torch.manual_seed(0)
    inner = FramewiseTransformer(tetrahedral(), 1, 1, channels=4, layers=1)
    data = Data(x=torch.ones(4, 1), pos=torch.randn(4, 3))
    model = Rescaled(EnergyForces(inner), {"energy": 1.0, "force": 1.0}, {"energy": -40_000.0}, ["energy"])
    exact = model(data)
    with torch.autocast("cpu", half):
        found, single = model(data), Rescaled(inner, {"y": 1.0}, {"y": -40_000.0})(data)
    assert (found.energy.dtype, found.force.dtype, single.dtype) == (F32, F32, F32)
    assert (found.energy - exact.energy).abs() < 0.1
    assert (single + 40_000.0).abs() < 10


@pytest.mark.parametrize("half", [F16, BF16], ids=str)
def test_shifts_of_outputs_are_not_rounded_with_weights_in_half_precision(half, tmp_path):
    inner = FramewiseTransformer(tetrahedral(), 1, 1, channels=4, layers=1)
    model = Rescaled(inner, {"y": 1.5}, {"y": -40_000.3}).to(half)
    data = Data(x=torch.ones(4, 1), pos=torch.randn(4, 3))
    assert next(model.parameters()).dtype == half
    assert (model.shift_y.dtype, float(model.shift_y)) == (F32, pytest.approx(-40_000.3, abs=1e-2))
    expected = 1.5 * inner(data).double() - 40_000.3
    torch.testing.assert_close(model(data), expected.float(), rtol=0, atol=0.01)
    lieattn.save(model, tmp_path / "half.safetensors")
    again = lieattn.load(tmp_path / "half.safetensors")
    assert {name: value.dtype for name, value in again.state_dict().items()} == {
        name: value.dtype for name, value in model.state_dict().items()
    }
    assert torch.equal(again(data), model(data))
    model.double().half().to("meta")
    assert model.shift_y.dtype == F32
