"""A callback that measures equivariance while a network is trained."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch_geometric.data import Batch, Data

from lieattn._core.checks import check_arguments, check_counts
from lieattn.certify import TOLERANCES, certify
from lieattn.groups import Group


class EquivarianceMonitor(Callback):
    """Logs ``equivariance_error`` at the end of each validation, measured on clouds of its first batch.

    It is the largest error in float32 under elements of the group, relative to max(1, largest output): about 1e-6 for
    an exactly equivariant network. Each element comes with a translation if the group has translations. The batches
    must be batches of PyTorch Geometric. A copy of the network in eval mode is evaluated about ten times.

    Parameters
    ----------
    group
        Group to measure; by default the group for which the network guarantees equivariance.
    clouds, elements
        Number of clouds, and number of random elements of a Lie group.
    every_n_epochs
        Measure in every n-th epoch only.
    network
        Name of the attribute of the LightningModule that holds the network; ``""`` for the module itself.
    """

    def __init__(
        self,
        group: Group | None = None,
        *,
        clouds: int = 2,
        elements: int = 2,
        every_n_epochs: int = 1,
        network: str = "network",
    ) -> None:
        check_arguments(EquivarianceMonitor.__init__, locals())
        check_counts(clouds=clouds, elements=elements, every_n_epochs=every_n_epochs)
        self.group, self.clouds, self.elements = group, clouds, elements
        self.every_n_epochs, self.network = every_n_epochs, network
        self._seen: list[Data] = []

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep clouds of the first batch."""
        if batch_idx == 0 and dataloader_idx == 0:
            if not isinstance(batch, Batch):
                raise TypeError(f"batch: expected a torch_geometric Batch to measure on, got {type(batch).__name__}")
            self._seen = batch.to_data_list()[: self.clouds]

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the error and log it."""
        if trainer.sanity_checking or trainer.current_epoch % self.every_n_epochs or not self._seen:
            return
        network = getattr(pl_module, self.network) if self.network else pl_module
        quick: dict[str, Any] = {"rotations": 0, "permute": False, "continuity": False, "elements": self.elements}
        (dtype,) = quick["dtypes"] = [min(TOLERANCES, key=lambda dtype: dtype.itemsize)]
        rows = certify(network, self._seen, self.group, tolerances=TOLERANCES, **quick).rows
        errors = [
            TOLERANCES[dtype] * row.max_error / row.allowed for row in rows if row.check == "element" and row.allowed
        ]
        if not errors:
            raise ValueError("group: expected a group, since the network has no exact guarantee, got None")
        pl_module.log("equivariance_error", max(errors), batch_size=len(self._seen), rank_zero_only=True)
