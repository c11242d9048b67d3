"""Models of steerable features: equivariance to E(3), vectors in and out, independent clouds, finite gradients."""

import math
from copy import deepcopy
from functools import cache

import pytest
import torch
from e3nn import o3
from torch_geometric.data import Data

from lieattn.geometry import AllPairs, Nearest, Radius
from lieattn.models.irreps import DistanceTransformer, SE3Transformer, TensorFieldNetwork
from lieattn.ops import bessel_functions, smooth_window
from lieattn.testing import randomize, relative_error
from tests.cases import moved, random_clouds, random_rotation, refuses

MODELS = {"tfn": TensorFieldNetwork, "se3": SE3Transformer, "distance": DistanceTransformer}


pytestmark = pytest.mark.usefixtures("double")


@cache
def model(name, *, dtype=torch.float64, **options):
    """Return a network that the tests share without changing it, because e3nn takes half a second to create one."""
    torch.set_default_dtype(dtype)
    settings = {"neighborhood": Radius(2.5), "channels": 4, "layers": 2, "heads": 2, "vector_inputs": ("vel",)}
    if name == "tfn":
        settings.pop("heads")
    made = MODELS[name](3, 2, **{**settings, **options})
    torch.set_default_dtype(torch.float64)
    return randomize(made, spread=0.6)


def test_coupling_coefficients_are_those_of_the_precision():
    network, data = (
        deepcopy(model("tfn", dtype=torch.float32, kind="vector", pool="mean")).double(),
        random_clouds(3, (5,)),
    )
    rotation = random_rotation(3)
    other = moved(data, rotation)
    assert relative_error(network(other), network(data) @ rotation.T) < 1e-13


@pytest.mark.parametrize("name", ["tfn", "se3"])
def test_tensor_products_keep_their_precision_under_autocast(name):
    network, data = (
        model(name, dtype=torch.float32, kind="invariant", pool="mean"),
        random_clouds(3, (5,), torch.float32),
    )
    with torch.autocast("cpu", torch.bfloat16):
        found = network(data)
    torch.testing.assert_close(found, network(data))


@pytest.mark.parametrize("name", ["tfn", "se3"])
def test_points_closer_than_a_millionth_of_the_cutoff_have_no_direction(name):
    network, data = model(name), random_clouds(3, (5,))

    def at(distance):
        data.pos[1] = data.pos[0] + distance * torch.tensor([0.0, 0.6, 0.8])
        return network(data)

    assert relative_error(at(1e-7), at(0.0)) < 1e-9
    assert relative_error(at(2.4e-6), at(0.0)) < 1e-7
    assert relative_error(at(2.6e-6), at(0.0)) > 1e-4
    assert relative_error(network(moved(data, random_rotation(3))), network(data)) < 1e-10  # at one place


@pytest.mark.parametrize("name", ["tfn", "se3"])
def test_only_neighbors_have_influence(name):
    """The last point is no neighbor of others, but has the first as its neighbor."""
    network, data = model(name, neighborhood=Nearest(1), cutoff=2.5, layers=1, pool="none"), random_clouds(3, (3,))
    found = []
    for far in (1.5, 3.0):
        data.pos = torch.tensor([[0.0, 0, 0], [0.5, 0, 0], [-far, 0, 0]])
        found.append(network(data))
    assert found[1].isfinite().all(), "without neighbors within the cutoff"
    torch.testing.assert_close(found[0][:2], found[1][:2])


def pairs(data, basis):
    """Return x_j - x_i, the windows and the Bessel functions of all pairs ``[targets, sources, *]``, 0 for loops."""
    apart = data.pos - data.pos[:, None]
    square = apart.square().sum(dim=-1) / 2.5**2
    others = ~torch.eye(len(square), dtype=torch.bool)
    window = smooth_window(square, squared=True) * others
    return apart, window, bessel_functions(square, basis, squared=True) * window[..., None], others


def test_distance_transformers_are_the_sums_they_say():
    network, data = model("distance", kind="vector", pool="none", layers=1), random_clouds(3, (6,))
    apart, window, radial, others = pairs(data, 16)
    assert 0 < int((window > 0).sum()) < int(others.sum()), "pairs within the cutoff and beyond"
    (block,) = network.layers
    x = network.embed(torch.cat([data.x, data.vel.square().sum(dim=1, keepdim=True)], dim=1))
    q, k, v = block.projection(block.norm1(x)).unflatten(1, (3, 2, -1)).unbind(dim=1)
    bias, psi = block.radial(radial).split([2, 4], dim=-1)
    score = torch.einsum("ihc,jhc->ijh", q, k) / math.sqrt(2) + bias + torch.where(others, window.log(), 0)[..., None]
    seen = torch.einsum("ijh,ijhc->ihc", score.softmax(dim=1), v * (1 + psi.unflatten(-1, (2, -1))))
    x = x + block.output(seen.flatten(1))
    x = network.norm(x + block.network(block.norm2(x)))
    both = torch.cat([x[:, None].expand(-1, len(x), -1), x.expand(len(x), -1, -1), radial], dim=-1)
    found = torch.einsum("ijo,ij,ijd->iod", network.pair(both), window, apart)
    found = found / (1 + window.sum(dim=1)).sqrt()[:, None, None]
    found = found + network.head(x)[..., None] * data.vel[:, None]
    torch.testing.assert_close(network(data), found, rtol=1e-10, atol=1e-12)


def normalized(norm, x):
    """Divide scalars, vectors and tensors by their sizes over four copies, after centering the scalars."""
    scalars, vectors, tensors = (part.unflatten(1, (4, -1)) for part in x.split([4, 12, 20], dim=1))
    parts = [scalars - scalars.mean(dim=1, keepdim=True), vectors, tensors]
    for number, weight in enumerate(norm.weight.split(4)):
        size = (parts[number].square().mean(dim=(1, 2), keepdim=True) + 1e-6).sqrt()
        parts[number] = parts[number] / size * weight[:, None]
    parts[0] = parts[0] + norm.bias[:, None]
    return torch.cat([part.flatten(1) for part in parts], dim=1)


@pytest.mark.parametrize("name", ["tfn", "se3"])
def test_layers_of_steerable_networks_are_the_sums_they_say(name):
    network, data = model(name), random_clouds(3, (6,))
    (layer, *_), x = network.layers, torch.randn(6, 36)
    apart, window, radial, others = pairs(data, 8)
    harmonics = o3.spherical_harmonics([0, 1, 2], apart, normalize=True, normalization="component")

    def messages(part, y):
        rows = [part.linear(part.product(y, harmonics[i], part.radial(radial[i]))) for i in range(6)]
        return torch.stack(rows)  # [targets, sources, 36]

    if name == "tfn":
        y = normalized(layer.norm, x)
        total = (messages(layer.message, y) * others[..., None]).sum(dim=1)
        found = x + layer.gate(layer.own(y) + total / (1 + window.sum(dim=1)).sqrt()[:, None])
    else:
        attention, y = layer.attention, normalized(layer.norm1, x)

        def of_head(z, head):
            return torch.cat([part.unflatten(-1, (2, -1))[..., head, :] for part in z.split([4, 12, 20], -1)], -1)

        seen = []
        for head in (0, 1):
            query, key = of_head(attention.query(y), head), of_head(messages(attention.key, y), head)
            score = (query[:, None] * key).sum(dim=-1) / math.sqrt(18) + window.log()
            seen.append((score.softmax(dim=1)[..., None] * of_head(messages(attention.value, y), head)).sum(dim=1))
        both = zip(*(part.split([2, 6, 10], -1) for part in seen), strict=True)
        seen = x + attention.output(torch.cat([part for one in both for part in one], dim=-1))
        found = seen + layer.linear(layer.gate(normalized(layer.norm2, seen)))
    torch.testing.assert_close(layer(x, network.geometry(data).edges), found, rtol=1e-10, atol=1e-12)


def test_initial_weights_have_the_tuned_sizes():
    def size(linear):
        return float(linear.weight.detach().std() * math.sqrt(linear.in_features / 2))

    torch.manual_seed(0)
    network = DistanceTransformer(1, 1, neighborhood=Radius(2.5))
    block = network.layers[0]
    assert (len(network.layers), block.radial[0].in_features, block.radial[0].out_features) == (4, 16, 32)
    found = [size(linear) for linear in (block.radial[0], block.radial[2], block.output)]
    assert found == pytest.approx([1.5, 2.0, 1.0], rel=0.1)
    (layer,) = TensorFieldNetwork(1, 1, neighborhood=Radius(2.5), layers=1).layers
    assert layer.message.radial[0].in_features == 8
    assert [size(layer.message.radial[k]) for k in (0, 2)] == pytest.approx([1.0, 1.4], rel=0.1)


def test_vectors_of_scalars_alone_need_no_factors_of_vector_inputs():
    """Parameters without a gradient would stop training on several devices."""
    network = DistanceTransformer(3, 2, neighborhood=Radius(2.5), kind="vector", layers=1)
    network(random_clouds(3, (5,))).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


test_bad_options_are_named = refuses(
    (lambda: TensorFieldNetwork(3, 1, neighborhood=AllPairs()), "cutoff: .* has no length"),
    (lambda: SE3Transformer(3, 1, neighborhood=Radius(1.0), channels=5), "heads: 4 heads"),
    (lambda: DistanceTransformer(3, 1, neighborhood=Radius(1.0), channels=5), "heads: 4 heads"),
    (
        lambda: TensorFieldNetwork(3, 1, neighborhood=Radius(1.0))(Data(x=torch.zeros(2, 3), pos=torch.zeros(2, 2))),
        "irreps of O",
    ),
)
