"""What Lightning says about what is meant, which the commands keep to themselves."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def without_warnings(*others: str) -> Iterator[None]:
    """Ignore the warnings that are expected of Lightning, and those whose message matches ``others``."""
    with warnings.catch_warnings():
        for message in (*_EXPECTED, *others):
            warnings.filterwarnings("ignore", message)
        yield
