"""A network on disk."""

from lieattn.io._checkpoint import (
    FORMAT,
    KEY,
    add_digests,
    check_content,
    check_finite,
    check_group,
    describe_group,
    load_weights,
    read_checkpoint,
)
from lieattn.io._files import (
    CheckpointError,
    UsageError,
    check_trusted,
    digest,
    digest_of_json,
    replace_text,
    replacing,
)
from lieattn.io._record import Record, Recorded, TiedWeights, describe, is_pretrained, settle, tied_to_group, uncompiled
from lieattn.io._saved import load, save, trained_cards

__all__ = [
    "FORMAT",
    "KEY",
    "CheckpointError",
    "Record",
    "Recorded",
    "TiedWeights",
    "UsageError",
    "add_digests",
    "check_content",
    "check_finite",
    "check_group",
    "check_trusted",
    "describe",
    "describe_group",
    "digest",
    "digest_of_json",
    "is_pretrained",
    "load",
    "load_weights",
    "read_checkpoint",
    "replace_text",
    "replacing",
    "save",
    "settle",
    "tied_to_group",
    "trained_cards",
    "uncompiled",
]
