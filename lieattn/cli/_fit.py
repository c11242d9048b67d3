"""``lieattn fit``, ``validate``, ``test`` and ``predict``: LightningCLI with this library's classes."""

from __future__ import annotations

import argparse
import csv
import logging
import shlex
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lieattn import train
from lieattn._files import replacing

# Forces are gradients, which inference mode forbids.
_DEFAULTS = {"default_root_dir": "runs", "max_epochs": 100, "inference_mode": False}
# No workers for small data, one folder of checkpoints for a run and its continuation, evaluation without the callbacks
# of the training, no validation set; and Lightning's own use of other packages.
_EXPECTED = (
    ".*does not have many workers",
    ".*Checkpoint directory .* exists and is not empty",
    ".*callbacks used to create the checkpoint need to be provided",
    ".*have no `val_dataloader`",
    ".*LeafSpec.* is deprecated",
    r"\s*.*(JsonargparseDeprecationWarning|was deprecated in v4)",
)


def run(name: str, arguments: Sequence[str]) -> int:
    """Run ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.

    The exit status is 0, 1 if the training diverged, 2 for a checkpoint that cannot be used, 128 + n after signal n.
    """
    train.register_types()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_no_advertisement)
    try:
        with without_warnings(), tempfile.TemporaryDirectory(prefix="lieattn-") as folder:
            _PointSetCLI(
                train.PointSetTask,
                train.PointSetData,
                subclass_mode_model=True,
                trainer_defaults=_DEFAULTS,
                seed_everything_default=0,
                save_config_kwargs={"overwrite": True},
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
                parser_kwargs={"prog": "lieattn"},
                args=[name, *_with_config(arguments, Path(folder))],
            )
    except train.TrainingInterrupted as stop:
        again = shlex.join(["lieattn", name, *_checkpoint_of(arguments)[1], "--ckpt_path", "last"])
        _say(f"lieattn: {stop}\nTo continue: {again}")
        return 128 + stop.signum
    except (train.NonFiniteError, train.UsageError) as error:
        _say(f"lieattn: {error}")
        return 1 if isinstance(error, train.NonFiniteError) else 2
    return 0


@contextmanager
def without_warnings(*others: str) -> Iterator[None]:
    """Ignore the warnings that are expected of Lightning, and those whose message matches ``others``."""
    with warnings.catch_warnings():
        for message in (*_EXPECTED, *others):
            warnings.filterwarnings("ignore", message)
        yield


class _PointSetCLI(LightningCLI):
    """LightningCLI with loggers, checkpoints and continuation that need no configuration."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(train.LastCheckpoint, "last")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)

    def before_instantiate_classes(self) -> None:
        """Turn the checkpoint ``last`` or ``best`` into a file, and keep the resolved configuration."""
        settings = self.config[self.subcommand]
        if settings.ckpt_path in ("last", "best"):
            path = _folder(settings) / f"{settings.ckpt_path}.ckpt"
            if not path.is_file():
                hint = "start without --ckpt_path" if self.subcommand == "fit" else "train first, or name a file"
                raise train.CheckpointError(f"there is no checkpoint {path}: {hint}")
            settings.ckpt_path = str(path)
        elif settings.ckpt_path is None and self.subcommand != "fit":
            raise train.CheckpointError(f"{self.subcommand} needs trained weights: --ckpt_path best, last, or a file")
        if settings.ckpt_path is not None:
            train.read_checkpoint(settings.ckpt_path)
        dumped = yaml.safe_load(self._parser(self.subcommand).dump(settings))
        self._resolved = {key: dumped[key] for key in ("model", "data")}

    def after_instantiate_classes(self) -> None:
        if self.subcommand == "validate" and self.datamodule.sets["val"] is None:
            raise train.UsageError("data.val: no data set was given for it")
        self.model.config = self._resolved

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        settings = self.config_init[self.subcommand]
        root = settings.trainer.default_root_dir
        logger = settings.trainer.logger
        if logger is None or logger is True:
            # One version for both: TensorBoard's folder counts the runs.
            board = TensorBoardLogger(root, name="tensorboard", default_hp_metric=False)
            kwargs["logger"] = [CSVLogger(root, name="csv"), board]
        saves = settings.trainer.enable_checkpointing is not False and not settings.trainer.fast_dev_run
        if self.subcommand == "fit" and saves:
            given = settings.trainer.callbacks or []
            callbacks: list[Callback] = list(given) if isinstance(given, list) else [given]
            if settings.data.sets["val"] is not None and not any(isinstance(c, ModelCheckpoint) for c in callbacks):
                monitor, mode = self.model.monitor
                options = {"monitor": monitor, "mode": mode, "enable_version_counter": False}
                callbacks.append(ModelCheckpoint(_folder(settings), "best", **options))
            kwargs["callbacks"] = [*callbacks, settings.last]
        return super().instantiate_trainer(**kwargs)

    def predict(self, **kwargs: Any) -> None:
        """Write class scores to ``predictions.csv`` in the root folder, other targets to ``predictions_NAME.csv``."""
        if self.trainer.world_size > 1:
            raise train.UsageError("predict writes one table, from one process: set trainer.devices to 1")
        kwargs["return_predictions"] = True
        batches: list[Any] = self.trainer.predict(**kwargs) or []
        root = Path(self.trainer.default_root_dir)
        if batches and isinstance(batches[0], dict):
            for name in batches[0]:
                values = torch.cat([batch[name] for batch in batches])
                _write_table(root / f"predictions_{name}.csv", _columns(name, values))
        else:
            logits = torch.cat(batches)
            labels = {"cloud": torch.arange(len(logits)), "label": logits.argmax(dim=1)}
            _write_table(root / "predictions.csv", {**labels, **_columns("logit", logits)})


def _columns(name: str, values: Tensor) -> dict[str, Tensor]:
    return {f"{name}_{k}": column for k, column in enumerate(values.reshape(len(values), -1).unbind(dim=1))}


def _write_table(path: Path, columns: dict[str, Tensor]) -> None:
    rows = list(zip(*(column.tolist() for column in columns.values()), strict=True))
    with replacing(path) as part, part.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    _say(f"predictions, {len(rows)} rows: {path}")


def _folder(settings: Any) -> Path:
    """Folder of the checkpoints."""
    return Path(settings.last.dirpath or Path(settings.trainer.default_root_dir) / "checkpoints")


def _with_config(arguments: Sequence[str], folder: Path) -> list[str]:
    """Where no configuration is given, take that of the checkpoint."""
    arguments = list(arguments)
    if any(word in ("-c", "-h") or word.startswith(("--config", "--help", "--print_config")) for word in arguments):
        return arguments
    path, _ = _checkpoint_of(arguments)
    if path in ("last", "best", None):
        return arguments
    config = train.read_checkpoint(path)["lieattn"]["config"]
    if not config:
        raise train.CheckpointError(f"{path} has no configuration, because `lieattn fit` did not write it: --config")
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return ["--config", str(file), *arguments]


def _checkpoint_of(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of ``--ckpt_path``, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--ckpt_path", nargs="?")
    found, others = parser.parse_known_args(arguments)
    return found.ckpt_path, others


def _no_advertisement(record: logging.LogRecord) -> bool:
    return "Tip:" not in record.getMessage()


@rank_zero_only
def _say(message: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(message + "\n")
