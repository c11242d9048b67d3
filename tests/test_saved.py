"""Networks in files: a loaded network equals the saved one, bit by bit, and invalid files are refused by name."""

import hashlib
import http.server
import json
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch_geometric.data import Data

import lieattn
from lieattn.geometry import AllPairs, PrincipalFrames, Radius, ScaleFrames
from lieattn.groups import FiniteGroup, cyclic, cyclic_about, dihedral_about, tetrahedral
from lieattn.io import add_digests, digest
from lieattn.io._record import describe
from lieattn.models import (
    AffineSelfConvNet,
    AttentionOptions,
    AttentiveNet,
    CloudInputs,
    ConvolutionOptions,
    EnergyForces,
    Ensemble,
    EquivariantModule,
    FieldModel,
    FramewiseTransformer,
    GSANet,
    GSAOptions,
    GSAReadout,
    HamiltonianDynamics,
    ImageOptions,
    ImageTransformer,
    LieConvNet,
    LieTransformer,
    Lifting,
    Network,
    Preprocessed,
    Rescaled,
    SortedDistances,
    Species,
    Stages,
    published_table,
)
from lieattn.models.published import PublishedCoordinates
from lieattn.nn import DipoleHead, Heads, InvariantHead, VectorHead
from lieattn.nn.relative import RelativePositionTable
from lieattn.testing import randomize
from lieattn.train import PointSetClassifier, PointSetRegressor, load_network
from lieattn.transforms import Standardize
from tests.cases import save_untrained
from tests.test_weights import WEIGHTS


def test_every_option_comes_back(tmp_path):
    for name, make in WEIGHTS.items():
        network = make().double()
        if isinstance(network, EquivariantModule) and "irreps" not in name:
            lieattn.save(network, tmp_path / "network")
            again = lieattn.load(tmp_path / "network")
            assert repr(again) == repr(network), name
            assert next(again.parameters()).dtype == torch.float64
            assert [one.dtype for one in again.buffers()] == [one.dtype for one in network.buffers()], name


def small(group=None, **options):
    return FramewiseTransformer(group or tetrahedral(), 2, 1, channels=4, layers=1, **options)


class Unnamed:
    """A neighborhood of a user, without a representation as text."""

    def __init__(self, radius):
        self.radius, self.length = radius, radius

    def __call__(self, pos, batch=None, *, ptr=None):
        return Radius(self.radius)(pos, batch, ptr=ptr)


class Own(Network):
    """A user-defined network, with another network as argument."""

    def __init__(self, inner, *, table):
        super().__init__()
        self.inner, self.table, self.head = inner, table, nn.Identity()
        self.register_buffer("unit", torch.ones(1), persistent=False)

    @property
    def symmetry(self):
        return self.inner.symmetry

    def field(self, data, geometry=None):
        return self.inner.field(data, geometry)


def test_mixins_of_other_hubs_are_refused():
    """Their config.json cannot describe a group, and was written without an error."""
    hub = type("PyTorchModelHubMixin", (), {"__module__": "huggingface_hub.hub_mixin"})
    mixed = type("Mixed", (FramewiseTransformer, hub), {})
    with pytest.raises(TypeError, match=r"Mixed: PyTorchModelHubMixin writes a config\.json .* file of lieattn\.save"):
        mixed(cyclic(4), 1, 1)


def test_networks_of_ones_own(tmp_path):
    network = Own(small(), table={"a": torch.arange(3), 2: (1.5, [None, torch.relu])}).bfloat16()
    lieattn.save(network, tmp_path / "own")
    with pytest.raises(ValueError, match=r"names tests\.test_saved\.Own, which .* trust=\['tests'\]"):
        lieattn.load(tmp_path / "own")
    again = lieattn.load(tmp_path / "own", trust=["tests", "torch"])
    assert again.table[2] == network.table[2]
    assert torch.equal(again.table["a"], network.table["a"])
    assert next(again.parameters()).dtype == again.unit.dtype == torch.bfloat16


class Pair(NamedTuple):
    first: int
    second: str


class Kind(StrEnum):
    SHORT = "short"


@dataclass(frozen=True, slots=True)
class Slotted:
    count: int


@pytest.mark.parametrize("value", [Pair(1, "a"), Kind.SHORT, [Slotted(2)], np.bool_(True), np.str_("a")], ids=repr)
def test_arguments_keep_their_type(value, tmp_path):
    lieattn.save(Own(small(), table=value), tmp_path / "own")
    again = lieattn.load(tmp_path / "own", trust=["tests"]).table
    assert again == value
    assert isinstance(value, np.generic) or type(again) is type(value)


def with_numbers(name, whole, real):
    """Return a network whose options are numbers made by ``whole`` and ``real``."""
    near = Radius(real(1.25))
    return {
        "framewise": lambda: FramewiseTransformer(
            cyclic(4), Species((whole(1), whole(6))), 1, channels=4, layers=1, heads=whole(1), length=real(1.1)
        ),
        "gsa": lambda: GSANet(
            *(cyclic(4), 1, 2),
            channels=8,
            heads=whole(2),
            neighborhood=near,
            blocks=Stages((whole(1), whole(1)), crops=(whole(1), whole(0))),
            options=GSAOptions(length=real(1.3)),
        ),
        "lie": lambda: LieTransformer(
            *(1, 1),
            frames=cyclic(4),
            channels=8,
            layers=1,
            heads=whole(2),
            neighborhood=near,
            lifting=Lifting(length=real(1.1), cutoff=real(1.2), radial=whole(2)),
            attention=AttentionOptions(eps=real(1e-5)),
        ),
        "affine": lambda: AffineSelfConvNet(cyclic(4), 1, 2, blocks=1, channels=4, heads=whole(2), scale=real(0.3)),
    }[name]()


@pytest.mark.parametrize("real", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["framewise", "gsa", "lie", "affine"])
def test_numbers_of_numpy_are_those_of_python(name, real, tmp_path):
    network = with_numbers(name, np.int64, real)
    lieattn.save(network, tmp_path / "network")
    loaded = lieattn.load(tmp_path / "network")
    plain = with_numbers(name, int, lambda number: float(real(number)))
    for one, other in ((plain, network), (network, plain), (plain, loaded)):
        one.load_state_dict(other.state_dict())
    other = with_numbers(name, int, lambda number: 1.5 * number)
    with pytest.raises(RuntimeError, match="the weights are for"):
        other.load_state_dict(network.state_dict())


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (torch.float64, "torch.dtype"),
        (np.arange(3), "numpy.ndarray"),
        (b"ab", "bytes"),
        ({1, 2}, "set"),
        (1j, "complex"),
        (partial(torch.relu), "functools.partial"),
        (torch.ones(2).to_sparse(), "torch.Tensor"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_arguments_that_cannot_be_saved_are_named(value, found, tmp_path):
    network = Own(small(), table=[{"a": value}])
    with pytest.raises(ValueError, match=rf"Own\.table: \['a'\]: expected plain values, tensors, .* got {found}$"):
        lieattn.save(network, tmp_path / "own")
    assert found in PointSetRegressor(network)._made()  # the reason in checkpoints, which are still written


class Forgetful:
    """An object that does not keep its argument."""

    def __init__(self, size):
        self.half = size / 2


class Optional(Own):
    """A network that passes on arguments of any names."""

    def __init__(self, inner, **options):
        super().__init__(inner, **options)


class Several(Own):
    """A network with any number of arguments."""

    def __init__(self, *inner, table):
        super().__init__(inner[0], table=table)


def test_arguments_without_an_attribute_or_a_name(tmp_path):
    with pytest.raises(ValueError, match=r"Own\.table: Forgetful does not keep its argument 'size' as an attribute"):
        lieattn.save(Own(small(), table=Forgetful(2)), tmp_path / "own")
    with pytest.raises(ValueError, match=r"Several takes arguments without names, \*inner, which cannot be saved"):
        lieattn.save(Several(small(), table=3), tmp_path / "own")
    lieattn.save(Optional(small(), table=3), tmp_path / "own")
    assert lieattn.load(tmp_path / "own", trust=["tests"]).table == 3


class Doubled:
    """A transform without a representation of its own, so that its text contains an address."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, data: Data) -> Data:
        return Data(x=self.factor * data.x, pos=data.pos)


def test_arguments_without_a_representation_are_saved(tmp_path):
    network = Preprocessed(lifted(neighborhood=Unnamed(2.0)), Doubled(2.0))
    assert " at 0x" in network.extra_repr()
    lieattn.save(network, tmp_path / "network")
    again = lieattn.load(tmp_path / "network", trust=["tests"])
    assert (again.transform.factor, again.network.neighborhood.radius) == (2.0, 2.0)
    options = ImageOptions(window=Unnamed(2.0))
    image = ImageTransformer(cyclic(4), neighborhood=Radius(1.5), channels=4, blocks=(1,), options=options)
    lieattn.save(image, tmp_path / "image")
    assert lieattn.load(tmp_path / "image", trust=["tests"]).options.window.radius == 2.0
    lieattn.save(Preprocessed(small(), Standardize(torch.ones(1), torch.ones(1))), tmp_path / "standardized")
    assert lieattn.load(tmp_path / "standardized").transform.mean == 1  # no trust is needed for a transform of ours
    network.transform = repr
    with pytest.raises(ValueError, match="was changed after its construction"):
        lieattn.save(network, tmp_path / "network")


def test_arguments_that_are_changed_later(tmp_path):
    """What the caller does with a list or dictionary after the construction has no effect on the file."""
    units, networks = {"pos": 2.0}, [small(), small()]
    field = FieldModel(small(), VectorHead(4), units=units)
    ensemble = Ensemble(networks)
    units["pos"] = 3.0
    networks.append(small())
    lieattn.save(field, tmp_path / "field")
    assert lieattn.load(tmp_path / "field").units == {"pos": 2.0}
    lieattn.save(ensemble, tmp_path / "ensemble")
    assert len(lieattn.load(tmp_path / "ensemble").networks) == 2


class Tabulated(Own):
    """A network with buffers in precisions of their own."""

    def __init__(self, inner, *, table):
        super().__init__(inner, table=table)
        self.register_buffer("mean", torch.rand(3, dtype=torch.float64))
        self.register_buffer("part", self.mean[1:])
        self.register_buffer("coarse", torch.ones(3, dtype=torch.float8_e4m3fn))


def test_mixed_precision_heads_and_tensors_that_share_memory_are_saved(tmp_path):
    column = torch.arange(6.0).view(3, 2)[:, 1]
    network = Tabulated(small().with_head(VectorHead(4)), table=[column, column.expand(2, 3)])
    network.inner.blocks.double()
    lieattn.save(network, tmp_path / "network")
    again = lieattn.load(tmp_path / "network", trust=["tests"])
    assert isinstance(again.inner.head, VectorHead)
    assert not any(module.training for module in again.modules())
    precisions, wanted = ([weight.dtype for weight in one.parameters()] for one in (again, network))
    assert precisions == wanted
    assert torch.equal(again.mean, network.mean)
    assert torch.equal(again.part, network.part)
    assert (again.mean.dtype, again.coarse.dtype) == (torch.float64, torch.float8_e4m3fn)
    assert [table.tolist() for table in again.table] == [[1, 3, 5], [[1, 3, 5]] * 2]


def test_compiled_networks_are_saved_as_their_originals(tmp_path):
    net, other = randomize(small()), randomize(small(), 1)
    state = net.state_dict()
    for network in (
        Rescaled(torch.compile(net, backend="eager"), {"y": 2.0}),
        Ensemble([torch.compile(net, backend="eager"), other]),
        torch.compile(Rescaled(net, {"y": 2.0}), backend="eager"),
    ):
        lieattn.save(network, tmp_path / "network")
        again = lieattn.load(tmp_path / "network").state_dict()
        assert not any("_orig_mod" in name for name in again)
        prefix = next(name for name in again if name.endswith("norm.weight")).removesuffix("norm.weight")
        assert all(torch.equal(again[prefix + name], value) for name, value in state.items())


def test_groups_of_ones_own(tmp_path):
    rounded = FiniteGroup.from_matrices(cyclic_about(3, (1.0, 2.0, 3.0)).elements.float(), "rough")
    lieattn.save(small(rounded), tmp_path / "network")
    assert torch.equal(lieattn.load(tmp_path / "network").group.elements, rounded.elements)


def test_classes_are_named_by_their_public_modules(tmp_path, monkeypatch):
    """Files stay readable if private modules get other names."""
    lieattn.save(small(neighborhood=Radius(2.0)), tmp_path / "network")
    with safe_open(tmp_path / "network", "pt") as file:
        found = json.loads(file.metadata()["lieattn"])["network"]
    assert found["class_path"] == "lieattn.models.FramewiseTransformer"
    assert found["init_args"]["neighborhood"]["class_path"] == "lieattn.geometry.Radius"
    monkeypatch.setattr("lieattn.Radius", object(), raising=False)  # another object of this name
    assert describe(Radius(2.0))["class_path"] == "lieattn.geometry.Radius"


def rewritten(path, weights=(), digested=True, **changes):
    """Write a file of a network with changed header and weights, and a matching digest or none."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["lieattn"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    header.update(changes)
    tensors.update(weights)
    header.pop("digest")
    mark = {"digest": digest([header, sorted(tensors.items())])} if digested else {}
    save_file(tensors, path, {"lieattn": json.dumps({**header, **mark})})


def test_damage_is_told(tmp_path):
    path, whole = tmp_path / "network", tmp_path / "whole"
    lieattn.save(small(), whole)
    content = whole.read_bytes()
    for place in (3, 40, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"network(:| is damaged| was not written)"):
            lieattn.load(path)
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="damaged"):
        lieattn.load(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"not written by lieattn\.save"):
        lieattn.load(path)
    with pytest.raises(FileNotFoundError, match="nothing"):
        lieattn.load(tmp_path / "nothing")


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers like the Hugging Face Hub about one repository with two commits, whose file it keeps."""

    contents: ClassVar[dict[str, bytes]] = {}  # by revision

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        repository, _, file = self.path.partition("/resolve/")
        revision, _, name = file.partition("/")
        content = self.contents.get(revision, b"")
        unknown = {"RepoNotFound": repository != "/org/net", "RevisionNotFound": revision not in self.contents}
        unknown["EntryNotFound"] = name != "model.safetensors" or not content
        missing = next((code for code, applies in unknown.items() if applies), None)
        self.send_response(404 if missing else 200)
        if missing:
            self.send_header("X-Error-Code", missing)
        self.send_header("ETag", hashlib.sha256(content).hexdigest())
        self.send_header("X-Repo-Commit", hashlib.sha1(revision.encode()).hexdigest())
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments):
        pass


def test_networks_on_the_hub(tmp_path, monkeypatch):
    hub = pytest.importorskip(
        "huggingface_hub.constants", reason='huggingface_hub is not installed: pip install "lieattn[hub]"'
    )
    network = small()
    lieattn.save(network, tmp_path / "net", card=True)
    content = (tmp_path / "net" / "model.safetensors").read_bytes()
    damaged = bytes([*content[:-1], content[-1] ^ 1])
    monkeypatch.setattr(Hub, "contents", {"main": content, "v1.0": damaged, "empty": b""})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    monkeypatch.setattr(hub, "ENDPOINT", address := f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(hub, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "*")
    try:
        loaded = lieattn.load("hf:org/net")
        assert all(torch.equal(weight, network.state_dict()[name]) for name, weight in loaded.state_dict().items())
        with pytest.raises(ValueError, match=r"models--org--net.*model\.safetensors is damaged: its content differs"):
            lieattn.load("hf:org/net@v1.0")
        for name, reason in {
            "hf:org/other": "no such repository",
            "hf:org/net@v2": "no such branch",
            "hf:org/net@empty": r"no file model\.safetensors",
            "hf:a/b/c": "expected hf:ORGANIZATION/NAME",
            "hf:": "expected hf:ORGANIZATION/NAME",
        }.items():
            with pytest.raises(FileNotFoundError, match=f"{reason}.*'{name}'"):
                lieattn.load(name)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # before the Hub is asked again
    assert lieattn.load("hf:org/net").guarantee == network.guarantee  # of the cache
    with pytest.raises(ConnectionError, match="hf:org/net@v3 cannot be downloaded, and was not downloaded before"):
        lieattn.load("hf:org/net@v3")


def test_hub_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ImportError, match=r'hf:org/net needs the package huggingface_hub: pip install "lieattn\[hub\]"'
    ):
        lieattn.load("hf:org/net")


def test_folders_for_the_hub(tmp_path):
    folder, network = tmp_path / "net", small()
    lieattn.save(network, folder, card=True)
    assert lieattn.load(folder).guarantee == network.guarantee
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    _, front, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n")
    front = yaml.safe_load(front)
    assert front["library_name"] == "lieattn"
    assert type(network).__name__ in front["tags"]
    assert "license" not in front
    assert f"{network.guarantee}." in text
    assert f"{sum(weight.numel() for weight in network.parameters()):,} parameters" in text
    with safe_open(folder / "model.safetensors", "pt") as file:
        header = json.loads(file.metadata()["lieattn"])
    assert json.loads((folder / "config.json").read_text()) == {"library_name": "lieattn", **header}
    (folder / "README.md").write_text("written by the user")
    lieattn.save(randomize(network), folder, card=True)
    assert (folder / "README.md").read_text() == "written by the user"
    assert not torch.equal(lieattn.load(folder).norm.weight, small().norm.weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 3}, "has format 3, but this version reads formats up to 2"),
        ({"network": {"class_path": "os.system", "init_args": {"command": "false"}}}, "names os.system"),
        ({"network": {"class_path": "lieattn.models.Gone", "init_args": {}}}, "cannot import lieattn.models.Gone"),
        ({"network": {"class_path": "lieattn.models.energy_drift", "init_args": {}}}, "is not a class"),
        ({"network": {"class_path": "lieattn.models.Species", "init_args": {}}}, "does not describe a network"),
        ({"network": 3}, "does not describe a network"),
        (
            {"weights": {"norm.weight": torch.full((4,), torch.nan)}},
            r"network: the weights norm\.weight are not finite",
        ),
        ({"digested": False}, "network is damaged: its content differs"),
    ],
)
def test_foreign_headers_and_weights_are_refused(changes, message, tmp_path):
    lieattn.save(small(), tmp_path / "network")
    rewritten(tmp_path / "network", **changes)
    with pytest.raises(ValueError, match=message):
        lieattn.load(tmp_path / "network")


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    path = tmp_path / f"{'long' * 70}.safetensors"
    with pytest.raises(OSError, match=f"cannot write: .*{path.name}"):
        lieattn.save(FramewiseTransformer(tetrahedral(), 1, 1, channels=4, layers=1), path)
    with pytest.raises(ValueError, match="path: expected a path without null characters"):
        lieattn.save(small(), f"{tmp_path}/a\0b")
    for folder in (".", "/", tmp_path):
        with pytest.raises(IsADirectoryError, match=f"cannot write: Is a directory: '{folder}'"):
            lieattn.save(small(), folder)


def test_what_cannot_be_saved(tmp_path):
    def refused(network, message):
        with pytest.raises(ValueError, match=message):
            lieattn.save(network, tmp_path / "network")

    broken = small()
    broken.norm.weight.data[0] = torch.nan
    refused(broken, "network: the weights norm.weight are not finite")
    refused(nn.Linear(1, 1), "Linear does not record the arguments .* derive its class from lieattn.models.Network")
    refused(EnergyForces(nn.Linear(1, 1)), "Linear does not record")
    several = Heads({"energy": InvariantHead(8, 1), "mine": nn.Identity()})
    refused(headed(several), r"FieldModel.head: Heads.heads: \['mine'\]: Identity does not record the arguments")
    refused(HamiltonianDynamics(lambda data: data.pos.sum()), "is not defined at the top level of a module")
    refused(small().to("meta"), "network: expected tensors with values as weights, got none for embed_features.weight")
    with warnings.catch_warnings(action="ignore"):  # torch will remove these functions
        quantized = torch.ao.quantization.quantize_dynamic(small(), {nn.Linear})
        refused(quantized, r"network: expected tensors with values as weights, got quantized .* for embed_features\.")
    changed = small()
    changed.head = nn.Linear(4, 1)
    refused(changed, "was changed after its construction")
    wider = small(neighborhood=Radius(2.0))
    wider.neighborhood = Radius(3.0)
    refused(wider, "was changed after its construction")
    assert not list(tmp_path.iterdir())


class OwnHead(nn.Module):
    """A head of the user, which records nothing."""

    def __init__(self, channels):
        super().__init__()
        self.linear = nn.Linear(channels, 1)

    def forward(self, x, graph):
        return self.linear(x.mean(dim=1))


class WithOwnHead(FieldModel):
    """Follows the advice of the error about such heads."""

    def __init__(self, network, channels):
        super().__init__(network, OwnHead(channels))


def test_advice_about_heads_of_the_user_can_be_followed(tmp_path):
    network = FramewiseTransformer(tetrahedral(), 1, 1, channels=4, layers=1)
    with pytest.raises(ValueError, match="OwnHead does not record the arguments") as error:
        lieattn.save(FieldModel(network, OwnHead(4)), tmp_path / "network")
    advice = "a part of a network, such as a head, is constructed by a class of your own derived from FieldModel"
    assert advice in str(error.value)
    model, data = WithOwnHead(network, 4).eval(), Data(x=torch.randn(5, 1), pos=torch.randn(5, 3))
    lieattn.save(model, tmp_path / "network")
    assert torch.equal(lieattn.load(tmp_path / "network", trust=["tests"])(data), model(data))


@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.device("meta")])
def test_weights_do_not_depend_on_where_they_are_loaded(context, tmp_path):
    """They are on the CPU, and can be differentiated."""
    lieattn.save(network := randomize(small()), tmp_path / "network")
    with context():
        again = lieattn.load(tmp_path / "network")
    cloud = Data(x=torch.randn(5, 2), pos=torch.randn(5, 3))
    assert torch.equal(again(cloud), network.eval()(cloud))
    again(cloud).sum().backward()


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("group", lambda: small(tetrahedral()), lambda: small(dihedral_about(6))),
        ("axes", lambda: small(cyclic_about(4)), lambda: small(cyclic_about(4, (1.0, 0.0, 0.0)))),
        ("neighborhood", lambda: small(neighborhood=Radius(2.0)), lambda: small(neighborhood=Radius(3.0))),
        ("length", lambda: small(length=1.0), lambda: small(length=2.0)),
        ("pose", lambda: posed(PrincipalFrames()), lambda: posed(PrincipalFrames("neighborhood", cutoff=2.0))),
        ("scales", lambda: scaled(2.0), lambda: scaled(3.0)),
        ("length", lambda: lifted(), lambda: lifted(length=3.0)),
        ("cutoff", lambda: lifted(cutoff=1.0), lambda: lifted()),
        ("length", lambda: images(), lambda: images(length=3.0)),
        ("species", lambda: knowing(1, 8), lambda: knowing(1, 6)),
        ("species", lambda: charged(1, 8), lambda: charged(1, 6)),
        ("inputs", lambda: knowing(1, 8), lambda: posed(PrincipalFrames(), SortedDistances(6))),
        ("inputs", lambda: posed(PrincipalFrames(), 6), lambda: posed(PrincipalFrames(), SortedDistances(6))),
        ("vector_inputs", lambda: moving("vel", "force"), lambda: moving("force", "vel")),
        ("cloud_inputs", lambda: posed(None, CloudInputs(("a", "b"))), lambda: posed(None, CloudInputs(("b", "a")))),
        ("bound", lambda: lifted(bound=True), lambda: lifted()),
        ("crops", lambda: images(blocks=Stages((2,), (1,), (1, 0))), lambda: images(blocks=Stages((2,), (1,), (0, 1)))),
        ("start", lambda: from_field(start={"pos": 1, "vel": 2}), lambda: from_field(start={"pos": 1.0, "vel": 1.0})),
        ("units", lambda: from_field(units={"pos": 2.0}), lambda: from_field()),
        ("unit", lambda: from_field(unit=2.0), lambda: from_field()),
        ("extensive", lambda: Rescaled(small(), {"y": 2.0}, extensive=("y",)), lambda: Rescaled(small(), {"y": 2.0})),
        ("center", lambda: HamiltonianDynamics(small()), lambda: HamiltonianDynamics(small(), center=False)),
    ],
)
def test_weights_know_what_they_are_for(name, ours, theirs):
    with pytest.raises(RuntimeError, match=f"{name}: the weights are for .*, the module has"):
        theirs().load_state_dict(ours().state_dict())


@pytest.mark.parametrize(
    ("name", "make", "ours", "theirs"),
    [
        ("head.activation", lambda **o: headed(InvariantHead(8, 1, **o)), {"activation": "relu"}, {}),
        ("head.activation", lambda **o: headed(Heads({"y": VectorHead(8, **o)})), {"activation": "relu"}, {}),
        ("head.neutral", lambda **o: headed(DipoleHead(8, **o)), {"neutral": False}, {}),
        (
            "head.order",
            lambda order: images(readout=GSAReadout(order=order)),
            {"order": "frames_first"},
            {"order": None},
        ),
        ("activation", lambda **o: images(**o), {"activation": "relu"}, {}),
        ("positions", lambda **o: images(values=False, **o), {"positions": "absolute"}, {}),
        ("frame_table", lambda **o: summing(**o), {"frame_table": published_table(cyclic(4))}, {}),
        (
            "frame_table",
            lambda **o: summing(**o),
            {"frame_table": cyclic(4).relative_index[:, None].expand(4, 4, 4).contiguous()},  # h⁻¹ m, equivariant too
            {},
        ),
        ("pattern", lambda **o: images(**o), {"pattern": "joint"}, {"pattern": "query_sum"}),
        ("local", lambda **o: AttentiveNet(cyclic(4), 1, 2, neighborhood=AllPairs(), **o), {"local": Radius(1.0)}, {}),
        ("pools", lambda last: images(blocks=Stages((1, 1), pool_last=last)), {"last": True}, {"last": False}),
        ("share", lambda share: images(blocks=Stages((1, 1), share=share)), {"share": 0.5}, {"share": 0.25}),
        ("activation", lambda **o: attending(**o), {"activation": "relu"}, {}),
        ("normalize", lambda **o: attending(**o), {"normalize": "mean"}, {}),
        ("norm", lambda **o: attending(**o), {"norm": "layer_post"}, {}),
        ("eps", lambda **o: attending(**o), {"eps": 0.1}, {}),
        ("heads", lambda heads: attending(heads, kernel="content"), {"heads": 4}, {"heads": 2}),
        ("coordinates", lambda **o: charted(**o), {"coordinates": PublishedCoordinates()}, {"coordinates": "log"}),
        ("activation", lambda **o: convolving(**o), {"activation": "relu"}, {}),
        ("downsampling", lambda **o: convolving(widening=0, **o), {"downsampling": 0.5}, {}),
        ("downsampling", lambda **o: bottlenecks(**o), {"downsampling": "strided"}, {}),
        ("heads", lambda **o: bottlenecks(**o), {"heads": 1}, {}),
        ("scale", lambda **o: bottlenecks(**o), {"scale": 0.25}, {}),
        ("border", lambda **o: bottlenecks(**o), {"window": RelativePositionTable.square(5)}, {}),
    ],
)
def test_weights_know_the_options_of_layers_and_heads(name, make, ours, theirs):
    weights = randomize(make(**ours)).state_dict()
    make(**ours).load_state_dict(weights)
    with pytest.raises(RuntimeError, match=f"{name}: the weights are for .*, the module has"):
        make(**theirs).load_state_dict(weights)
    forget(weights, name)
    make(**theirs).load_state_dict(weights)


def forget(weights, name):
    """Remove an option from the metadata of weights, as in those of versions that did not have it."""
    for entry in weights._metadata.values():
        entry.get("geometry", {}).pop(name, None)


FORMS = [None, {}, {"values": True}, {"class_path": "lieattn.models.GSAOptions", "init_args": {"values": True}}]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kind", ["file", "recorded", "configured"])
def test_files_of_earlier_versions_have_the_pattern_of_the_paper(kind, form, tmp_path):
    """Their options are absent or have no pattern, and neither have their weights."""
    network, path = randomize(images(pattern="query_sum")).eval(), tmp_path / "network"
    data = Data(x=torch.randn(6, 1), pos=torch.randn(6, 2))
    if kind == "file":
        lieattn.save(network, path)
        with safe_open(path, "pt") as file:
            header = json.loads(file.metadata()["lieattn"])
        modules = header["modules"]
        header["network"]["init_args"]["options"] = form
        modules[""]["geometry"].pop("pattern")
        rewritten(path, **header | {"format": 1})
        again = lieattn.load(path)
    else:
        save_untrained(PointSetClassifier(network, 10), path)
        content = torch.load(path, weights_only=True)
        forget(content["state_dict"], "pattern")
        entry = content["lieattn"]
        entry["format"] = 2
        described = entry["made"]["init_args"]["network"]["init_args"]
        described["options"] = form
        if kind == "configured":
            described |= {"frames": {"class_path": "lieattn.groups.cyclic", "init_args": {"n": 4}}, "blocks": [2]}
            entry["config"] = {"model": entry["made"]}
        add_digests(content)
        torch.save(content, path)
        again = load_network(path)
    assert again.options.pattern == "query_sum"
    assert torch.equal(again(data), network(data))


def test_weights_of_earlier_versions_have_the_pattern_of_the_paper(tmp_path):
    forget(weights := images(pattern="query_sum").state_dict(), "pattern")
    images(pattern="query_sum").load_state_dict(weights)
    with pytest.raises(RuntimeError, match="pattern: the weights are for query_sum, the module has joint"):
        images().load_state_dict(weights)
    lieattn.save(GSANet(cyclic(4), neighborhood=Radius(1.5), heads=2), tmp_path / "network")
    assert lieattn.load(tmp_path / "network").options.pattern == "joint"


def headed(head):
    return FieldModel(FramewiseTransformer(cyclic(4), 1, 1, channels=8, layers=1), head)


def charted(**options):
    options = {"channels": 4, "layers": 1, "heads": 1, "lifting": Lifting(**options)}
    return LieTransformer(2, frames=PrincipalFrames(), neighborhood=Radius(2.0), **options)


def attending(heads=2, **options):
    options = {"channels": 8, "layers": 1, "heads": heads, "attention": AttentionOptions(**options)}
    return LieTransformer(1, 1, frames=tetrahedral(), neighborhood=Radius(2.0), **options)


def convolving(**options):
    options = {"channels": 8, "layers": 1, "convolution": ConvolutionOptions(**options)}
    return LieConvNet(1, 1, frames=tetrahedral(), neighborhood=Radius(2.0), **options)


def bottlenecks(**options):
    return AffineSelfConvNet(cyclic(4), 1, 2, blocks=1, channels=4, **options)


def charged(*species):
    return posed(PrincipalFrames(), CloudInputs(("charge",), Species(species)))


def lifted(neighborhood=None, **options):
    options = {"channels": 4, "layers": 1, "heads": 1, "lifting": Lifting(**options)}
    return LieTransformer(2, frames=tetrahedral(), neighborhood=neighborhood or Radius(2.0), **options)


def images(blocks=(2,), readout=None, **options):
    options = {"channels": 12, "heads": 2, "readout": readout, "options": GSAOptions(**options)}
    return GSANet(cyclic(4), neighborhood=Radius(1.5), blocks=blocks, **options)


def summing(**options):
    return images(pattern="query_sum", **options)


def moving(*names):
    return FramewiseTransformer(tetrahedral(), 1, 1, channels=4, layers=1, vector_inputs=names)


def from_field(**options):
    return FieldModel(moving("vel"), VectorHead(4), **options)


def posed(frames, inputs=2):
    frames = tetrahedral() if frames is None else frames
    return LieTransformer(inputs, frames=frames, neighborhood=Radius(2.0), channels=4, layers=1, heads=1)


def knowing(*species):
    return posed(PrincipalFrames(), Species(species))


def scaled(base):
    frames = ScaleFrames(cyclic(4), base)
    return LieTransformer(2, frames=frames, neighborhood=Radius(2.0), channels=4, layers=1, heads=1)


def test_networks_are_saved_when_parametrizations_are_removed(tmp_path):
    """Removed parametrizations leave the weights in another order, which was taken for another network."""
    network = lieattn.load("digits-c8")
    layers = [layer for layer in network.modules() if isinstance(layer, torch.nn.Linear)]
    for layer in layers:
        torch.nn.utils.parametrizations.weight_norm(layer)
        layer.parametrizations.weight.original0.data *= 1.5
    with pytest.raises(ValueError, match=r"network: expected weights without parametrizations, .*remove_param"):
        lieattn.save(network, tmp_path / "norm.safetensors")
    for layer in layers:
        torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    lieattn.save(network, tmp_path / "network.safetensors")
    weights = lieattn.load(tmp_path / "network.safetensors").state_dict()
    assert all(torch.equal(weights[name], value) for name, value in network.state_dict().items())
