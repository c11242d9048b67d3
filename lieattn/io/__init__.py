"""A network on disk."""

from lieattn.io._digest import DIGESTS, KEY, add_digests, damaged_entries, digest
from lieattn.io._files import replace_text, replacing
from lieattn.io._record import Recorded, describe, make, uncompiled, uncompiled_names
from lieattn.io._saved import load, save, trained_cards
from lieattn.io._tied import TiedWeights, first_fault, settle, tied_to_group
from lieattn.io._trust import untrusted_names
from lieattn.io._yaml import loaded

__all__ = [
    "DIGESTS",
    "KEY",
    "Recorded",
    "TiedWeights",
    "add_digests",
    "damaged_entries",
    "describe",
    "digest",
    "first_fault",
    "load",
    "loaded",
    "make",
    "replace_text",
    "replacing",
    "save",
    "settle",
    "tied_to_group",
    "trained_cards",
    "uncompiled",
    "uncompiled_names",
    "untrusted_names",
]
