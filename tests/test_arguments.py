"""Every argument of every layer, network and table of options: values of another type, and counts below one."""

import inspect
from functools import partial
from itertools import product

import pytest

from lieattn.geometry import Radius
from lieattn.models.irreps import DistanceTransformer, SE3Transformer, TensorFieldNetwork
from tests.cases import each
from tests.fuzz._recipes import PLACES, entrance, is_exempt
from tests.fuzz._target import Verdict
from tests.fuzz.calls import check

OTHERS = {  # integers that may be zero or below, or that other tests refuse
    *("nn.FieldBatchNorm axis", "nn.GridSpatialPool dim", "models.AttentiveTransition dim"),
    *("nn.GridGroupConvolution pad", "nn.GridLiftingConvolution pad", "models.FiniteSE2Transformer seeds"),
    *(f"nn.relative.EdgeNetwork in_{name}" for name in ("channels", "edges", "vectors")),
    *(f"nn.relative.Rotary{name} channels" for name in ("Encoding", "Phases")),
}
NAMES = [name for name, (owner, _) in PLACES.items() if owner is None and name.startswith(("nn.", "models."))]
MODULES = {name: entrance(name) for name in NAMES if not is_exempt(name) and entrance(name).later}
CASES = [
    (name, argument)
    for name, found in MODULES.items()
    for argument, value in found.arguments.items()
    if type(value) is int and f"{name} {argument}" not in OTHERS
]


@pytest.mark.filterwarnings("ignore")
@each("name", [name for name in NAMES if not is_exempt(name)])
def test_values_of_another_type_are_refused_by_name(name):
    for argument, value in product(entrance(name).arguments, ("an object", "a string")):
        if (name, argument) != ("models.Symmetry", "acting"):
            assert check((name, {argument: value})) is Verdict.NAMED, argument


def assert_refused(call, argument):
    for value in (0, -1, True, 2.5):
        with pytest.raises(
            (TypeError, ValueError), match=rf"^{argument}: expected .*(integer|at least).*, got {value}$"
        ):
            call(**{argument: value})


@each("name, argument", CASES)
def test_counts_are_positive_integers(name, argument):
    given = {**MODULES[name].arguments}
    if name.startswith("models.Attentive") and "attention" in given:
        given["attention"] = "full"  # without attention, its sizes are not used
    assert_refused(lambda **bad: MODULES[name].call({**given, **bad}), argument)


@pytest.mark.parametrize("network", [DistanceTransformer, SE3Transformer, TensorFieldNetwork])
@pytest.mark.parametrize("argument", ["in_channels", "out_channels", "channels", "layers", "heads", "degree"])
def test_counts_of_networks_on_irreps(network, argument):
    if argument in inspect.signature(network).parameters:
        assert_refused(partial(network, **{"in_channels": 4, "out_channels": 2, "neighborhood": Radius(1.5)}), argument)
