"""Invalid counts of heads, channels and layers are refused: zero, negative numbers, booleans and fractions."""

import inspect

import pytest

from lieattn import models
from lieattn.geometry import PrincipalFrames, Radius
from lieattn.groups import SE, cyclic, tetrahedral
from lieattn.models import irreps
from lieattn.spaces import Euclidean

NEAR = {"neighborhood": Radius(1.5)}
ON_SE3 = {**NEAR, "space": Euclidean(SE(3)), "frames": PrincipalFrames()}
NETWORKS = {
    models.GSANet: {**NEAR, "frames": cyclic(4)},
    models.FramewiseTransformer: {**NEAR, "frames": tetrahedral()},
    models.LieTransformer: ON_SE3,
    models.LieConvNet: ON_SE3,
    models.FiniteSE2Transformer: {},
    irreps.TensorFieldNetwork: NEAR,
    irreps.SE3Transformer: NEAR,
    irreps.DistanceTransformer: NEAR,
    models.AffineSelfConvNet: {"group": cyclic(4)},
    models.AttentiveCNN: {"group": cyclic(4)},
    models.AttentiveAllCNN: {"group": cyclic(4)},
    models.AttentiveResNet: {"group": cyclic(4)},
    models.AttentiveDenseNet: {"group": cyclic(4)},
}
COUNTS = ("in_channels", "out_channels", "channels", "layers", "heads", "rotations", "degree", "moments", "reduction")
CASES = [(n, c) for n in NETWORKS for c in COUNTS if c in inspect.signature(n).parameters]


@pytest.mark.parametrize(("network", "count"), CASES, ids=[f"{n.__name__}, {c}" for n, c in CASES])
@pytest.mark.parametrize("value", [0, -1, True, 2.5])
def test_counts_are_positive_integers(network, count, value):
    given = {"in_channels": 4, "out_channels": 2, **NETWORKS[network], count: value}
    known = inspect.signature(network).parameters
    fitting = {name: given[name] for name in given if name in known or (name in NEAR and "options" in known)}
    with pytest.raises((TypeError, ValueError), match=rf"^{count}: expected .*integer.*, got {value}$"):
        network(**fitting)
