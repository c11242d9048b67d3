"""Labels of points: losses, accuracy and intersection over union, masks, the command, and certificates."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch.nn import functional as F
from torch_geometric.data import Batch, Data

from lieattn.cli import main
from lieattn.cli._predictions import prediction_tables, write_tables
from lieattn.geometry import PrincipalFrames
from lieattn.models import FramewiseTransformer
from lieattn.testing import randomize
from lieattn.train import PointSetClassifier, load_task
from lieattn_datasets import ProceduralScenes
from tests.cases import short_training

pytestmark = short_training


def network(classes=3, labels=1, pool="none"):
    made = FramewiseTransformer(
        PrincipalFrames(), 1, classes * labels, channels=8, layers=1, heads=1, length=1.0, pool=pool
    )
    return randomize(made, 0).eval()


def clouds(labels=1, sizes=(5, 1, 0, 7)):
    generator = torch.Generator().manual_seed(1)
    found = []
    for points in sizes:
        shape = (points,) if labels == 1 else (points, labels)
        y = torch.randint(3, shape, generator=generator)
        found.append(Data(x=torch.ones(points, 1), pos=torch.randn(points, 3, generator=generator), y=y))
    return found


def evaluated(task, batch, monkeypatch, stage="test"):
    """Return what the task logs for one batch, by name, and its loss."""
    told = {}

    def log(name, value, **options):
        # Numbers of validations and tests are those of all batches, not of the last one.
        if options:  # those of a whole epoch have none
            assert (options["on_step"], options["on_epoch"]) == (stage == "train" and name == "train/loss", True)
        told[name] = value

    monkeypatch.setattr(task, "log", log)
    monkeypatch.setattr(task, "log_dict", told.update)
    loss = task.evaluate(batch, stage)
    if stage == "test":
        task.on_test_epoch_end()
    return {name: float(getattr(value, "compute", lambda value=value: value)()) for name, value in told.items()}, loss


@pytest.mark.parametrize("labels", [1, 2])
def test_loss_accuracy_and_iou_are_those_of_all_points(labels, monkeypatch):
    batch = Batch.from_data_list(clouds(labels))
    task = PointSetClassifier(network(labels=labels), 3, labels=labels, per="point")
    logits = task(batch)
    assert logits.shape == ((13, 3) if labels == 1 else (13, 2, 3))
    told, loss = evaluated(task, batch, monkeypatch)
    each = task.predict_step(batch, 0)
    if labels == 2:
        assert torch.equal(logits, torch.stack(task.network(batch).split(3, dim=1), dim=1))
        assert list(each) == ["label_0", "label_1"]
        assert all(torch.equal(found, logits[:, number]) for number, found in enumerate(each.values()))
    flat, y = logits.reshape(-1, 3), batch.y.flatten()
    torch.testing.assert_close(loss, F.cross_entropy(flat, y))
    guess = flat.argmax(dim=1)
    ratios = [((guess == k) & (y == k)).sum() / ((guess == k) | (y == k)).sum() for k in range(3)]
    recalls = [(guess[y == k] == k).float().mean() for k in range(3) if (y == k).any()]
    assert told["test/accuracy"] == pytest.approx(float((guess == y).float().mean()))
    assert told["test/balanced_accuracy"] == pytest.approx(float(torch.stack(recalls).mean()))
    assert [told[f"test/iou_{k}"] for k in range(3)] == pytest.approx([float(ratio) for ratio in ratios])
    assert told["test/iou"] == pytest.approx(float(torch.stack(ratios).mean()))


def test_weights_of_classes_are_in_the_loss_alone(monkeypatch):
    """The weights are those of torch, and balanced ones make every class count the same."""
    items, given = clouds(), [0.5, 2.0, 0.0]
    batch = Batch.from_data_list(items)
    plain, _ = evaluated(PointSetClassifier(network(), 3, per="point"), batch, monkeypatch)
    task = PointSetClassifier(network(), 3, per="point", class_weights=given)
    told, loss = evaluated(task, batch, monkeypatch)
    torch.testing.assert_close(loss, F.cross_entropy(task(batch), batch.y, torch.tensor(given)))
    assert told["test/accuracy"] == plain["test/accuracy"]
    assert task.monitor == ("val/accuracy", "max")
    task = PointSetClassifier(network(), 3, per="point", class_weights="balanced")
    assert task.monitor == ("val/balanced_accuracy", "max")  # accuracy keeps weights that give the frequent class
    task.measure(items)
    torch.testing.assert_close(task.weight_of_class * torch.bincount(batch.y), torch.full((3,), len(batch.y) / 3))
    restored = PointSetClassifier(network(), 3, per="point", class_weights="balanced")
    restored.load_state_dict(task.state_dict())
    assert torch.equal(restored.weight_of_class, task.weight_of_class)
    items[0].mask = torch.arange(len(items[0].y)) > 0  # what is masked is not counted, and may be no label
    items[0].y[~items[0].mask] = -1
    task.measure(items)
    kept = torch.cat([item.y[item.mask] if "mask" in item else item.y for item in items])
    torch.testing.assert_close(task.weight_of_class * torch.bincount(kept), torch.full((3,), len(kept) / 3))


def test_classes_that_do_not_occur_are_left_out(monkeypatch):
    batch = Batch.from_data_list(clouds())
    task = PointSetClassifier(network(classes=4), 4, per="point")
    batch.y = task(batch).argmax(dim=1)
    assert len(batch.y.unique()) < 4
    assert evaluated(task, batch, monkeypatch)[0]["test/iou"] == 1


def test_points_without_labels_do_not_count(monkeypatch):
    """A mask leaves points out of loss, accuracy and IoU, even if their labels are invalid."""
    batch = Batch.from_data_list(clouds())
    kept = torch.arange(13) % 3 != 0
    logits = PointSetClassifier(network(), 3, per="point")(batch)
    y = batch.y.clone()
    batch.y[~kept], batch.mask = -1, kept
    task = PointSetClassifier(network(), 3, per="point")
    told, loss = evaluated(task, batch, monkeypatch)
    torch.testing.assert_close(loss, F.cross_entropy(logits[kept], y[kept]))
    assert told["test/accuracy"] == pytest.approx(float((logits[kept].argmax(1) == y[kept]).float().mean()))
    assert 0 <= told["test/iou"] <= 1
    batch.mask = torch.zeros(13, dtype=torch.bool)
    _, loss = evaluated(PointSetClassifier(network(), 3, per="point"), batch, monkeypatch)
    assert float(loss.detach()) == 0


@pytest.mark.parametrize("name", ["mask", "weight"])
def test_weights_of_clouds_do_not_weight_points(name):
    """They were ignored without a message, as were weights of points if clouds have labels."""
    batch = Batch.from_data_list(clouds())
    batch[name] = torch.ones(4, dtype=torch.bool if name == "mask" else torch.float32)
    with pytest.raises(
        ValueError, match=rf"data.{name}: expected the first axes of a target \(y \(13,\)\).*got \(4,\)"
    ):
        PointSetClassifier(network(), 3, per="point").evaluate(batch, "test")
    batch[name], batch.y = torch.ones(13), torch.zeros(4, dtype=torch.long)
    with pytest.raises(
        ValueError, match=rf"data.{name}: expected the first axes of a target \(y \(4,\)\).*got \(13,\)"
    ):
        PointSetClassifier(network(pool="mean"), 3).evaluate(batch, "test")


def test_several_labels_of_points_have_a_column_each():
    task = PointSetClassifier(network(), 3, labels=2, per="point")
    with pytest.raises(ValueError, match=r"data: expected 2 labels y per point, \[13, 2\], got \[13\]"):
        task.training_step(Batch.from_data_list(clouds()), 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of a short training with the configuration of the examples, on few and small scenes."""
    root = tmp_path_factory.mktemp("scenes")
    content = yaml.safe_load((Path(__file__).parent.parent / "examples/configs/scenes.yaml").read_text())
    for split, size in (("train", 6), ("val", 3), ("test", 3)):
        content["data"][split]["init_args"].update(size=size, points=48)
    content["data"].update(batch_size=2, eval_batch_size=2)
    content["model"]["init_args"]["network"]["init_args"].update(channels=4, layers=1)
    content["trainer"].update(default_root_dir=str(root), accelerator="cpu", max_epochs=2, logger=False)
    (root / "run.yaml").write_text(yaml.safe_dump(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_GLOBAL_SEED", "0")
        assert main(["fit", "--config", str(root / "run.yaml")]) == 0
    return root


@pytest.mark.slow
def test_command_tests_and_predicts_points(trained, tmp_path, capsys):
    checkpoint = str(trained / "checkpoints" / "best.ckpt")
    quiet = ["--trainer.accelerator", "cpu", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false"]
    assert main(["test", "--ckpt_path", checkpoint, *quiet]) == 0
    assert "test/iou" in capsys.readouterr().out
    assert main(["predict", "--ckpt_path", checkpoint, *quiet, "--trainer.default_root_dir", str(tmp_path)]) == 0
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        *("cloud", "point", "true", "true_class", "predicted", "predicted_class"),
        *(f"{kind}_{k}" for kind in ("probability", "logit") for k in range(6)),
    ]
    assert [(int(row["cloud"]), int(row["point"])) for row in rows] == [(c, p) for c in range(3) for p in range(48)]
    task = load_task(checkpoint).eval()
    scenes = ProceduralScenes("test", 3, points=48, rotate="SO3")
    scene = scenes[2]
    scene.x = torch.ones(48, 1)
    with torch.no_grad():
        wanted = task(Batch.from_data_list([scene])).argmax(dim=1)
    assert [int(row["predicted"]) for row in rows[96:]] == wanted.tolist()
    assert [int(row["true"]) for row in rows[96:]] == scene.y.tolist()
    assert [row["predicted_class"] for row in rows[96:]] == [scenes.classes[label] for label in wanted]


EMPTY = [torch.tensor([0, 2]), torch.tensor([1])]  # three clouds with three points, in two batches
COUNTS = {
    "empty clouds, points": (EMPTY, "point", {"cloud": [1, 1, 2], "point": [0, 1, 0]}),
    "empty clouds, clouds": (EMPTY, "cloud", {"cloud": [0, 1, 2], "file": ["a", "b", "c"]}),
    "empty clouds, unknown": (EMPTY, None, {}),
    "one point each, points": ([torch.ones(2, dtype=torch.int64)], "point", {"cloud": [0, 1], "point": [0, 0]}),
    "one point each, unknown": ([torch.ones(2, dtype=torch.int64)], None, {"cloud": [0, 1], "file": ["a", "b"]}),
    "unequal batches, unknown": (
        [torch.tensor([0]), torch.tensor([2, 1])],
        None,
        {"cloud": [0, 1, 2], "file": ["a", "b", "c"]},
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_rows_belong_to_points_even_if_there_are_as_many_as_clouds(name):
    """Three points of three clouds, the first without any, were taken for one row per cloud."""
    points, per, expected = COUNTS[name]
    data = SimpleNamespace(files=["a", "b", "c"])
    means = [torch.zeros(len(batch), 2) for batch in points]
    table = prediction_tables(means, [], points, data, per)["predictions"]
    assert {key: table[key] for key in ("cloud", "file", "point") if key in table} == expected
    named = prediction_tables([{"y": mean} for mean in means], [], points, data, per)["predictions_y"]
    assert {key: named[key] for key in ("cloud", "file", "point") if key in named} == expected


def test_names_of_files_and_classes_are_in_tables_if_they_fit():
    """Predictions may be of the first clouds only; names of other data would be wrong."""
    logits, points = [torch.eye(2)], [torch.tensor([3, 1])]
    fitting = SimpleNamespace(files=["a", "b", "c"], classes=["cat", "dog"], names=("C", "CO"))
    table = prediction_tables(logits, [], points, fitting)["predictions"]
    assert (table["cloud"], table["file"], table["predicted_class"]) == ([0, 1], ["a", "b"], ["cat", "dog"])
    assert table["name"] == ["C", "CO"]
    other = SimpleNamespace(files=["a"], classes=["cat", "dog", "bird"])
    table = prediction_tables(logits, [], points, other)["predictions"]
    assert list(table) == ["cloud", "predicted", "probability_0", "probability_1", "logit_0", "logit_1"]
    assert table["probability_0"] == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))])


def test_true_values_stand_beside_predictions_if_the_data_have_them():
    """One label of several has a table of its own, and energies [clouds] belong to outputs [clouds, 1]."""
    points, pair = [torch.tensor([3, 1])], {"label_0": torch.eye(2), "label_1": torch.eye(2)}
    truth = {"y": [torch.tensor([[0, 1], [-1, 0]])]}
    tables = prediction_tables([pair], [], points, SimpleNamespace(classes=["a", "b"]), "cloud", truth, True)
    assert tables["predictions_label_0"]["true"] == [0, -1]
    assert tables["predictions_label_0"]["true_class"] == ["a", ""]
    assert tables["predictions_label_1"]["true_class"] == ["b", "a"]
    energy = {"energy": torch.tensor([[1.0], [2.0]])}
    for given, columns in (
        ([torch.tensor([3.0, 4.0])], ["cloud", "true_energy_0", "energy_0"]),
        ([None], ["cloud", "energy_0"]),
    ):
        table = prediction_tables([energy], [], points, None, "cloud", {"energy": given})["predictions_energy"]
        assert list(table) == columns
    assert table["energy_0"] == [1, 2]


def test_tables_of_files_are_numbered_together(tmp_path):
    (tmp_path / "predictions_a.csv").write_text("kept")
    tables = {f"predictions_{name}": {"cloud": [0]} for name in "ab"}
    assert [path.name for path, _ in write_tables(tmp_path, tables)] == ["predictions_a-v1.csv", "predictions_b-v1.csv"]
    assert (tmp_path / "predictions_a.csv").read_text() == "kept"


def test_numbers_of_tables_have_the_digits_of_their_dtype(tmp_path):
    found = [{"y": torch.tensor([-1.4], dtype=dtype)} for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    texts = []
    for number, values in enumerate(found):
        (tmp_path / str(number)).mkdir()
        ((path, _),) = write_tables(tmp_path / str(number), prediction_tables([values], [], [torch.ones(1)], None))
        texts.append(path.read_text(encoding="utf-8").split(",")[-1].strip())
    assert texts == ["-1.4", "-1.4", "-1.3984375"]


def test_tables_of_points_of_empty_clouds_have_no_rows(tmp_path):
    found = [{"energy": torch.zeros(2), "force": torch.zeros(0, 3)}]
    tables = prediction_tables(found, found, [torch.zeros(2, dtype=torch.int64)], None)
    assert [rows for _, rows in write_tables(tmp_path, tables)] == [2, 0]
    header = "cloud,point,force_0,force_1,force_2,force_std_0,force_std_1,force_std_2\n"
    assert (tmp_path / "predictions_force.csv").read_text() == header
