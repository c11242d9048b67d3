"""The command line for new users: help, class paths of the working directory, messages, predictions."""

from __future__ import annotations

import csv
import importlib
import inspect
import os
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path
from pydoc import locate

import lightning.pytorch
import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import Dataset

import lieattn
import lieattn_datasets
from lieattn import train
from lieattn._core import names
from lieattn._core.machine import usable_accelerator, usable_cores
from lieattn.cli import COMMANDS, main, report, short_warnings
from lieattn.cli._target import built
from lieattn.groups import Group, cyclic
from lieattn.models import Lifting
from lieattn.train import UsageError, build
from tests.cases import short_training

pytestmark = short_training

MYDATA = """
import torch
from torch.utils.data import Dataset
from torch_geometric.data import Data


class Clouds(Dataset):
    def __init__(self, fault: str = ""):
        self.fault = fault
        if fault == "built":
            {}["energy"]

    def __len__(self):
        return 0 if self.fault == "empty" else 4

    def __getitem__(self, index):
        if self.fault == "read":
            {}["energy"]
        if self.fault == "pair":
            return torch.ones(5, 1), 1
        return Data(x=torch.ones(5, 1), pos=torch.rand(5, 2) + index, y=torch.tensor([index % 2]))

    classes = ("even", "odd")
    files = ["a.txt", "b.txt", "c, d.txt", "e.txt"]


class Plain(Clouds):
    def __init__(self):
        super().__init__()
"""


def folder_of_user(place: Path) -> None:
    """Write ``mydata.py``, and a configuration of a tiny network on its data set."""
    (place / "mydata.py").write_text(MYDATA)
    network = {
        "class_path": "GSANet",  # named without its package
        "init_args": {
            "frames": {"class_path": "lieattn.groups.cyclic", "init_args": {"n": 2}},
            "out_channels": 2,
            "channels": 6,
            "heads": 1,
            "blocks": [1],
            "neighborhood": {"class_path": "lieattn.geometry.AllPairs"},
        },
    }
    content = {
        "model": {"class_path": "PointSetClassifier", "init_args": {"classes": 2, "network": network}},
        "data": {"train": "mydata.Clouds", "val": "mydata.Clouds", "test": "mydata.Plain"},
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": False,
        },
    }
    (place / "run.yaml").write_text(yaml.safe_dump(content))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Yield the working directory of a user, which is not on the Python path."""
    folder_of_user(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    yield tmp_path
    sys.modules.pop("mydata", None)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_a_screen_without_markup(name, capsys):
    assert main([name, "--help"]) == 0
    told = capsys.readouterr().out
    assert len(told.splitlines()) <= 40
    assert told.startswith(f"usage: lieattn {name} ")
    assert not re.search(r"``|:\w+:`", told)
    if name == "fit":
        for word in ("--model.network", "--data.train", "lieattn models", "lieattn datasets", "--model.help"):
            assert word in told
    if name in ("certify", "picture"):
        assert told.startswith(f"usage: lieattn {name} TARGET [options]")
        assert re.search(r"^  TARGET ", told, re.MULTILINE)


@pytest.mark.parametrize("words", [["fit", "--help"], ["models"], ["datasets"]])
def test_help_of_training_and_lists_need_no_import_of_torch(words):
    script = f"import sys, lieattn.cli; lieattn.cli.main({words}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0


def test_files_from_the_command_to_the_first_step_are_few(home):
    """Those of command and training whose functions are called, other than by networks and groups.

    Not counted are ``_core``, such as checks of values, ``io/_record.py``, the base of networks and tasks, and names of
    packages that are imported lazily.
    """
    package, found = os.path.dirname(lieattn.__file__) + os.sep, {}

    def profile(frame, event, argument):
        code, rooms, outer = frame.f_code, [], frame
        if event != "call" or not code.co_filename.startswith(package) or not code.co_flags & inspect.CO_OPTIMIZED:
            return  # a function of others, or the body of a class
        while outer is not None:
            if (file := outer.f_code.co_filename).startswith(package):
                rooms.append(file.removeprefix(package).partition(os.sep)[0])
            outer = outer.f_back
        passes = {*rooms} <= {"cli", "train", "io", "_core"} and rooms[0] != "_core" and code.co_name != "__getattr__"
        if passes and not code.co_filename.endswith("_record.py"):
            found.setdefault(code.co_filename.removeprefix(package), code.co_qualname)
        if code.co_name == "outputs_of" and "training_step" in [caller.function for caller in inspect.stack(0)]:
            sys.setprofile(None)
            raise SystemExit(77)

    sys.setprofile(profile)
    try:
        assert main(["fit", "--config", "run.yaml"]) == 77
    finally:
        sys.setprofile(None)
    assert {"cli/_training.py", "train/_classifier.py"} <= found.keys()
    assert len(found) <= 8, found


def test_help_of_a_class_lists_its_arguments_and_no_others(capsys):
    assert main(["fit", "--model.help", "PointSetClassifier"]) == 0
    told = capsys.readouterr().out
    assert "--model.label_smoothing" in told
    assert "known subclasses" not in told
    assert "__main__" not in told
    assert len(told.splitlines()) < 70


def test_commands_of_the_help_print_arguments_of_classes(capsys):
    assert main(["fit", "--help"]) == 0
    commands = re.findall(r"^  lieattn (fit --.*\.help .*)", capsys.readouterr().out, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        assert main(command.split()) == 0
        assert f"={command.split()[-1]}\n" in capsys.readouterr().out


def test_arguments_of_classes_in_the_arguments_of_data(tmp_path):
    given = ["in_channels=2", "channels=8", "layers=1", "frames=lieattn.geometry.PrincipalFrames"]
    given += ["neighborhood=lieattn.geometry.Radius", "neighborhood.radius=2.0", "lifting=lieattn.models.Lifting"]
    settings = [f"model.{setting}" for setting in (*given, "lifting.radial=3")]
    network = built(nn.Module, "model", "lieattn.models.LieTransformer", [*settings, "data.path=a.xyz"])
    assert network.lifting == Lifting(radial=3)
    file = tmp_path / "group.yaml"
    file.write_text(yaml.safe_dump({"class_path": "lieattn.groups.cyclic", "init_args": {"n": 3}}))
    assert built(Group, "group", str(file), []) == cyclic(3)
    assert built(Group, "group", str(file), ["group.n=5"]) == cyclic(5)
    with pytest.raises(UsageError, match="wrong"):
        built(Group, "group", str(file), ["group.wrong=5"])


@pytest.mark.slow
def test_classes_of_the_working_directory_from_fit_to_predictions(home, capsys):
    before = list(sys.path)
    assert main(["fit", "--config", "run.yaml"]) == 0, capsys.readouterr().err
    trained = ["--ckpt_path", "runs/checkpoints/last.ckpt", "--trust", "mydata"]
    for _ in range(3):
        assert main(["predict", *trained]) == 0
    assert sorted(path.name for path in Path("runs").glob("*.csv")) == [
        "predictions-v1.csv",
        "predictions-v2.csv",
        "predictions.csv",
    ]
    with Path("runs/predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        *("cloud", "file", "true", "true_class", "predicted", "predicted_class"),
        *("probability_0", "probability_1", "logit_0", "logit_1"),
    ]
    assert [row["file"] for row in rows] == ["a.txt", "b.txt", "c, d.txt", "e.txt"]
    assert all(row["predicted_class"] == ("even", "odd")[int(row["predicted"])] for row in rows)
    empty = ["--data.predict", "mydata.Clouds", "--data.predict.fault", "empty", "--trainer.default_root_dir", "empty"]
    assert main(["predict", *trained, *empty]) == 2
    assert "data.predict: expected at least one item, got an empty data set" in capsys.readouterr().err
    assert not Path("empty").exists()
    quick = ["--clouds", "2", "--dtype", "float64"]
    certified = ["certify", "runs/checkpoints/last.ckpt", "--trust", "mydata", *quick]
    assert main([*certified, "--data", "mydata.Clouds", "--data.fault", "none"]) == 0
    assert "the first 2 clouds of mydata.Clouds(fault=none)" in capsys.readouterr().out
    assert main([*certified, "--group", "lieattn.groups.cyclic", "--group.n", "4", "--outside", "2"]) == 1
    told = capsys.readouterr().out
    assert "group: C4, 4 elements" in told
    assert len(re.findall("^element . .* FAILED$", told, re.MULTILINE)) == 2
    assert len(re.findall("outside of C4", told, re.MULTILINE)) == 2 + 4  # random ones, and those of C8, C12, D4 and D8
    assert "unique: all motions" in told
    assert main(["picture", *certified[1:4], "--data", "mydata.Clouds"]) == 0
    assert "clouds: the first cloud of mydata.Clouds()" in capsys.readouterr().out
    assert main(["picture", *certified[1:4]]) == 0
    assert [path.name for path in Path("pictures").iterdir()] == ["last_cloud_0.png"]
    assert "picture: pictures/last_cloud_0.png" in capsys.readouterr().out
    assert main([*certified, "--data.fault", "none"]) == 2
    assert "--data.fault: cannot be used here, since it needs --data CLASS" in capsys.readouterr().err
    assert sys.path == before


UNION = {
    "frames": {"class_path": "lieattn.groups.tetrahedral"},
    "in_channels": {"class_path": "lieattn.models.Species", "init_args": {"species": [1, 6]}},
    "out_channels": 1,
}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("in_channels", {"class_path": "lieattn.models.Species", "init_args": {"species": "abc"}}, ("species", "abc")),
        ("in_channels", {"class_path": "lieattn.models.Species", "init_args": {"wrong": 3}}, ("Species", "'wrong'")),
        ("in_channels", 1.5, ("int", "Species", "1.5")),
        ("in_channels", "lieattn.models.GSANet", ("lieattn.models.GSANet",)),
        ("in_channels", "lieattn.models.Specie", ("'Specie'",)),
        ("frames", "lieattn.groups.cyclic", ("lieattn.groups.cyclic", "are required: n")),
        ("frames", {"class_path": "lieattn.groups.octahedral", "init_args": {"n": 3}}, ("octahedral", "'n'")),
        ("frames", {"class_path": "lieattn.geometry.FiniteFrames"}, ("FiniteFrames", "are required: group")),
        ("frames", "lieattn.models.Species", ("lieattn.models.Species",)),
    ],
)
def test_faults_in_a_member_of_a_union_are_named(name, value, words):
    spec = {"class_path": "lieattn.models.FramewiseTransformer", "init_args": UNION | {name: value}}
    with pytest.raises(UsageError, match=f"^the network cannot be built: .*{name}: ") as caught:
        build(nn.Module, spec, "the network")
    assert all(word in str(caught.value) for word in words)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--data.train.fault", "built"], ("KeyError: 'energy', in ", "mydata.py, line 11")),
        (["--data.train.fault=empty"], ("data.train: the data set is empty",)),
        (["--data.train.fault", "pair"], ("of Clouds is a tuple, expected torch_geometric Data",)),
        (["--data.train", "mydata.Cluods"], ("data.train", "module 'mydata' has no attribute 'Cluods'")),
        (["--data.train=ImageFolder", "--data.train.root=none"], ("there is no folder 'none' of images",)),
        (["--last", "7"], ("last", "'7'")),
        (["--seed=3"], ("--seed=3",)),  # options have their full names
        (["--model.network.frames.n=0"], ("n: expected an integer of at least 1, got 0",)),
        (
            ["--model.network=LieTransformer", "--model.network.lifting.coordinates=lgo"],
            ("coordinates", "smooth", "lgo"),
        ),
        (["--config=union.yaml", "--model.network.in_channels.wrong=3"], ("in_channels", "Species", "'wrong'")),
    ],
)
def test_faults_of_users_are_one_message(home, capsys, options, words):
    config = yaml.safe_load(Path("run.yaml").read_text())
    network = {"class_path": "lieattn.models.FramewiseTransformer", "init_args": UNION}
    Path("union.yaml").write_text(yaml.safe_dump({"model": {**config["model"], "init_args": {"network": network}}}))
    assert main(["fit", "--config", "run.yaml", *options]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("lieattn fit: ")
    assert not re.search("<class 'list'>|Import path", told)
    assert all(word in told for word in words)
    assert len(told) < 700


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_one_that_is_asked_for_can_be_replaced(home, capsys):
    assert main(["fit", "--config=run.yaml", "--trainer.accelerator=gpu"]) == 2
    assert "\nfor a run of another machine: --trainer.accelerator auto " in capsys.readouterr().err


def test_faults_in_the_code_of_users_name_its_line(home, capsys):
    assert main(["fit", "--config=run.yaml", "--data.train.fault=read"]) == 1
    told = capsys.readouterr().err.partition("lieattn fit: ")[2]
    assert re.search(r"^KeyError: 'energy'\n  in .*mydata.py, line 18: ", told)
    assert "Traceback" not in told
    written = Path(told.rpartition("traceback: ")[2].strip())
    assert "Traceback (most recent call last)" in written.read_text()
    written.unlink()


@pytest.mark.parametrize(
    ("options", "dropped"),
    [
        (
            ["--model=PointSetRegressor", "--model.targets=y"],
            ("PointSetClassifier", "PointSetRegressor", "'classes': 2"),
        ),
        (["--model.network.frames=lieattn.groups.octahedral"], ("cyclic", "octahedral", "'n': 2")),
        (["--config=other.yaml"], ("mydata.Clouds", "Digits", "'fault': 'none'")),
        (["--data.train=mydata.Clouds", "--model.network.channels=12"], ()),
    ],
)
def test_arguments_that_are_dropped_with_their_class_are_named(home, capsys, options, dropped):
    Path("other.yaml").write_text("data: {train: Digits}\n")
    config = yaml.safe_load(Path("run.yaml").read_text())
    config["data"]["train"] = {"class_path": "mydata.Clouds", "init_args": {"fault": "none"}}
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config=run.yaml", *options, "--print_config"]) == 0
    told = capsys.readouterr().err
    assert told.count("discarding") == bool(dropped)
    assert all(word in told for word in dropped)


@pytest.mark.parametrize("option", ["--model.network.channels=3", "--model.optimizer=torch.optim.Adam"])
def test_options_of_the_model_before_its_class(home, capsys, option):
    assert main(["fit", option, "--config=run.yaml"]) == 2
    expected = "expected after --config FILE or --model CLASS, whose settings it changes"
    assert capsys.readouterr().err == f"lieattn fit: {option.partition('=')[0]}: {expected}\n"


@pytest.mark.parametrize("given", [["-crun.yaml"], ["--model.class_path=PointSetClassifier", "-c", "run.yaml"]])
def test_options_of_the_model_after_its_class(home, capsys, given):
    assert main(["fit", *given, "--model.network.channels=3", "--print_config"]) == 0
    assert "        channels: 3\n" in capsys.readouterr().out


def test_warnings_are_short_unless_they_name_a_line_of_the_user():
    ours = [sys.argv[0], train.__file__, lightning.pytorch.__file__]
    with short_warnings():
        assert {warnings.formatwarning("text", UserWarning, file, 3) for file in ours} == {"lieattn: warning: text\n"}
        assert warnings.formatwarning("text", UserWarning, "mydata.py", 3).startswith("mydata.py:3: UserWarning: text")
    assert warnings.formatwarning("text", UserWarning, train.__file__, 3) != "lieattn: warning: text\n"


def test_a_warning_is_told_once():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with short_warnings():
            for text in ("axes", "axes", "other", "axes"):
                warnings.warn_explicit(text, UserWarning, train.__file__, 3)
    assert [str(one.message) for one in told] == ["axes", "other"]


@pytest.mark.parametrize(
    ("asked", "apple", "used"), [("auto", True, "cpu"), ("auto", False, "auto"), ("gpu", True, "gpu")]
)
def test_the_gpu_of_apple_is_used_only_if_asked_for(monkeypatch, asked, apple, used):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: apple)
    assert usable_accelerator(asked) == used


def test_cores_are_those_of_this_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 7}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == 64


@pytest.mark.parametrize(
    ("name", "words"),
    [("fit", "use --config FILE"), ("certify", "the name of a trained one"), ("picture", "or the folder of a run")],
)
def test_commands_that_need_arguments_answer_before_the_imports(monkeypatch, capsys, name, words):
    monkeypatch.setattr(importlib, "import_module", None)
    assert main([name]) == 2
    assert words in capsys.readouterr().err


def test_the_best_validation_is_told_and_replaces_a_damaged_checkpoint(home, capsys):
    assert main(["fit", "--config=run.yaml"]) == 0
    told = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"best validation: val/accuracy [\d.]+, kept in runs/checkpoints/best\.ckpt", told)
    last = Path("runs/checkpoints/last.ckpt")  # cut off, as by a full disk
    last.write_bytes(last.read_bytes()[:1000])
    assert main(["fit", "--config=run.yaml", "--ckpt_path=last"]) == 2
    assert "last.ckpt is damaged" in (told := capsys.readouterr().err)
    assert told.endswith("to continue from runs/checkpoints/best.ckpt, the best validation before: --ckpt_path best\n")
    assert main(["fit", "--config=run.yaml", "--ckpt_path=best", "--trainer.max_epochs=2"]) == 0
    Path("runs").rename("moved")
    capsys.readouterr()
    again = ["--trainer.default_root_dir=moved", "--ckpt_path=last", "--trainer.max_epochs=3"]
    assert main(["fit", "--config=run.yaml", *again]) == 0
    assert "dirpath has changed" not in capsys.readouterr().err


def test_a_run_without_a_validation_has_a_last_checkpoint_only(home, capsys):
    more = ["--model.classes=3", "--model.network.out_channels=3"]
    assert main(["fit", "--config=run.yaml", "--data.val=null", *more]) == 0
    assert "best" not in (told := capsys.readouterr().err)
    assert "classes: the training set has 2 classes, even to odd, and the task 3\n" in told
    assert main(["test", "--config=run.yaml", "--ckpt_path=best"]) == 2
    assert "best.ckpt; its folder has last.ckpt\n" in capsys.readouterr().err


def test_options_have_their_full_names(home, capsys):
    for command in (["compare", "--config=x", "--plann"], ["certify", "x", "--rand"]):
        assert main(command) == 2
        assert f"unrecognized arguments: {command[-1]}" in capsys.readouterr().err


WRONG = [
    ("--model=PointSetClasifier", "model: there is no PointSetClasifier; is it lieattn.train.PointSetClassifier?"),
    ("--model.clases=4", "model: lieattn.train.PointSetClassifier has no argument 'clases'; is it classes or labels?"),
    (
        "--model.network.neighborhood=Radiuss",
        "model.network.neighborhood: there is no Radiuss; is it lieattn.geometry.",
    ),
    ("--model.network.neighborhood=lieattn.geometry.Radiuss", "lieattn.geometry has no Radiuss; is it Radius?"),
    ("--model.network.frames.m=3", "model.network.frames: lieattn.groups.cyclic has no argument 'm'; it has n\n"),
    ("--model.optimizer=torch.optim.AdamW --model.optimizer.lrs=1", "AdamW has no argument 'lrs'; is it lr?"),
    ("--data.train Digit", "data.train: there is no Digit; is it lieattn_datasets.Digits?"),
    ("--data.train.falt=1", "data.train: mydata.Clouds has no argument 'falt'; is it fault?"),
    ("--data.batchsize 4", "data: lieattn.train.PointSetData has no argument 'batchsize'; is it batch_size or"),
    ("--trainer.max_epoch 4", "Trainer has no argument 'max_epoch'; is it max_epochs or"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_misspelled_names_are_told_with_near_ones(home, capsys, words, message):
    assert main(["fit", "--config=run.yaml", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_misspelled_name_is_told_before_torch_is_imported(home):
    script = "import sys, lieattn.cli; lieattn.cli.main(['fit', '--config=run.yaml']); sys.exit('torch' in sys.modules)"
    text = (home / "run.yaml").read_text()
    (home / "run.yaml").write_text(text.replace("heads:", "head:"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr.partition(" has ")[2]) == (0, "no argument 'head'; is it heads?\n")


def test_short_names_of_classes_and_functions_are_enough(home, capsys):
    text = (home / "run.yaml").read_text()
    (home / "run.yaml").write_text(text.replace("lieattn.groups.", "").replace("lieattn.geometry.", ""))
    options = ["--data.test=Digits", "--data.test.split", "test", "--model.optimizer=AdamW"]
    assert main(["fit", "--config=run.yaml", *options, "--print_config"]) == 0
    told = capsys.readouterr().out
    for path in ("groups.cyclic", "geometry.AllPairs", "models.GSANet", "train.PointSetClassifier"):
        assert f"class_path: lieattn.{path}\n" in told
    assert "class_path: lieattn_datasets.Digits\n" in told
    assert "class_path: torch.optim.AdamW\n" in told
    settings = ["--model.network.frames=octahedral", "--data.val=Digits"]
    assert main(["fit", "--model=PointSetClassifier", "--model.network=GSANet", *settings, "--print_config"]) == 0
    assert "class_path: lieattn.groups.octahedral\n" in capsys.readouterr().out


def test_sources_tell_the_arguments_of_all_public_classes():
    for name, path in names._public().items():
        known, found = names.arguments(path), locate(path)
        if known is None or isinstance(found, types.ModuleType):
            continue
        kinds = inspect.signature(found).parameters.items()
        assert {key for key, one in kinds if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)} <= {*known}, name
    assert names.arguments("lieattn.models.GSANet")["frames"].startswith("FiniteGroup | ")


def test_one_batch_is_not_all_of_them(home, capsys):
    for value in ("1", "1.0", "3", "null"):
        assert main(["fit", "--config=run.yaml", f"--trainer.limit_train_batches={value}", "--print_config"]) == 0
        assert f"  limit_train_batches: {value}\n" in capsys.readouterr().out


def test_models_and_data_sets_are_listed_by_their_classes(capsys):
    assert main(["models"]) == 0
    told = capsys.readouterr().out
    for name in ("GSANet", "LieTransformer", "FramewiseTransformer", "AffineSelfConvNet", "SE3Transformer"):
        assert re.search(rf"^  {name} +\S.*(\n .*)*\n +Equivariance: ", told, re.MULTILINE), name
    assert not re.search(r"Wrapper|^  (Network|EquivariantModule) ", told, re.MULTILINE)
    assert main(["datasets"]) == 0
    listed = capsys.readouterr().out
    for name in (name for name in lieattn_datasets.__all__ if name in ("Digits", "QM9", "Springs", "ModelNet")):
        assert re.search(rf"^  {name} +\S", listed, re.MULTILINE), name
    assert re.search(r"10 classes\.\s+No\s+file\s+is\s+needed\.\s+[A-Z]", listed)
    assert re.search(r"the\s+official\s+idx\s+files\. (Reads\s+files\s+in\s+`root`|Can)", listed)
    assert not re.search(r":\w+:`|``|\*\*|\\[a-z]+", told + listed)
    words = " ".join(listed.split())
    for card in cards().values():
        assert f"Source: {card.source}. Terms: {card.terms}. Size: {card.size}." in words


def cards():
    public = (getattr(lieattn_datasets, name) for name in lieattn_datasets.__all__)
    return {kind.__name__: kind.card for kind in public if isinstance(kind, type) and "card" in vars(kind)}


def test_cards_are_those_of_the_readme():
    text = (Path(__file__).parent.parent / "datasets" / "README.md").read_text()
    found = {}
    for part in text.partition("\n## Cards\n")[2].split("\n### ")[1:]:
        heading, _, body = part.partition("\n")
        found |= dict.fromkeys(re.findall(r"`(\w+)", heading), " ".join(body.split()))
    assert found.keys() == cards().keys() | {"Molecules"}
    for name, card in cards().items():
        assert card.source in found[name], name
        assert re.search(rf"\*\*Terms\*\* {re.escape(card.terms)}(\.|$)", found[name]), name
        assert re.search(rf"\*\*Size( and splits)?\*\* [^*]*{re.escape(card.size)}", found[name]), name
    # Every data set has a card; the other classes are their building blocks.
    listed = {name for name in lieattn_datasets.__all__ if isinstance(getattr(lieattn_datasets, name), type)}
    sets = {name for name in listed if issubclass(getattr(lieattn_datasets, name), Dataset)}
    made_of = {"Clouds", "ImagePoints", "Molecules", "ShapePoints", "ChargedParticles"}
    assert sets - made_of == cards().keys()


def test_notes_are_printed_once(capsys):
    """Such as the cell of a comparison in which an error was raised."""
    for error, status in ((UsageError("wrong"), 2), (KeyError("energy"), 1)):
        error.add_note("in the cell: a, seed 0")
        with pytest.raises(type(error)) as caught:
            raise error
        assert report("compare", caught.value) == status
        told = capsys.readouterr().err
        assert told.count("in the cell: a, seed 0") == 1
        for file in re.findall("traceback: (.*)", told):
            Path(file).unlink()
