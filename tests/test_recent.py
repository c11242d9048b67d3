"""Values that are computed again only for other tensors."""

import copy
import pickle

import torch
from torch_geometric.data import Batch

from lieattn.geometry import Given, Radius
from lieattn.groups import cyclic
from lieattn.models import ImageTransformer
from lieattn.models.frames._images import Recent
from lieattn_datasets import image_to_data


def test_values_are_those_of_equal_inputs():
    calls = []

    def doubled(inputs):
        calls.append(inputs)
        return 2 * inputs[0]

    recent, x = Recent(most=2), torch.arange(3.0)
    first = recent.get([x], doubled)
    assert recent.get([x.clone()], doubled) is first
    assert recent.get([x.double()], doubled).dtype == torch.float64  # another dtype is another input
    x += 1
    assert recent.get([x], doubled).tolist() == [2, 4, 6]
    assert first.tolist() == [0, 2, 4]
    assert len(calls) == 3
    recent.get([torch.arange(3.0)], doubled)  # no longer known, as two others came after it
    assert len(calls) == 4


def test_values_of_inference_are_kept_apart():
    recent, x = Recent(), torch.ones(2)
    with torch.inference_mode():
        found = recent.get([x], lambda inputs: inputs[0] + 1)
    assert found.is_inference()
    assert not recent.get([x], lambda inputs: inputs[0] + 1).is_inference()


def test_copies_are_empty():
    recent = Recent(most=3)
    recent.get([torch.ones(1)], lambda inputs: inputs[0])
    for other in (copy.deepcopy(recent), pickle.loads(pickle.dumps(recent))):
        assert (other.most, other._known) == (3, ())


def test_networks_of_images_keep_geometries_of_equal_rasters_only():
    network = ImageTransformer(cyclic(4), 1, 2, neighborhood=Radius(1.5), channels=4, blocks=(1, 1), heads=1).eval()
    images = Batch.from_data_list([image_to_data(torch.rand(4, 4)) for _ in range(2)])
    kept = network.geometry(images)
    assert network.geometry(images.clone()) is kept
    before = network(images)
    stretched = images.clone()
    stretched.pos = 1.25 * stretched.pos
    assert not torch.allclose(network(stretched), before, atol=1e-4)
    ragged = Batch.from_data_list([image_to_data(torch.rand(4, 4)), image_to_data(torch.rand(3, 5))])
    assert network.geometry(ragged) is not network.geometry(ragged)
    with torch.inference_mode():
        network(images)
    network.train()(images).sum().backward()  # does not meet tensors of inference
    torch.testing.assert_close(copy.deepcopy(network).eval()(images), network.eval()(images))


def test_networks_of_images_see_new_edges_and_radii_that_become_smooth():
    image = image_to_data(torch.rand(4, 4))
    edges = [Radius(radius)(image.pos).edge_index for radius in (1.1, 2.1)]
    given = ImageTransformer(cyclic(4), 1, 2, neighborhood=Given("edge_index"), channels=4, blocks=(1,)).eval()
    few, more = (given(Batch.from_data_list([image.clone().update({"edge_index": edge})])) for edge in edges)
    assert not torch.allclose(few, more, atol=1e-4)
    images = Batch.from_data_list([image])
    sizes = {"channels": 4, "blocks": (1,)}
    smooth = ImageTransformer(cyclic(4), 1, 2, neighborhood=Radius(1.5, smooth=True), **sizes).eval()
    network = ImageTransformer(cyclic(4), 1, 2, neighborhood=Radius(1.5), **sizes).eval()
    network(images)
    network.load_state_dict(smooth.state_dict())
    torch.testing.assert_close(network(images), smooth(images))
