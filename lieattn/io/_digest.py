"""Digests of the entries of a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

KEY = "lieattn"
"""Entry of a checkpoint that this library writes."""
DIGESTS = "digests"
"""Entry of :data:`KEY` with the digests of all entries."""
_VERSION = "pytorch-lightning_version"
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


def add_digests(checkpoint: dict[str, Any]) -> None:
    """Write the digests of all entries into the entry ``KEY``.

    They include the keys: a file stores equal strings once, so damage to a string changes keys and values alike.
    """
    checkpoint[KEY][DIGESTS] = {key: digest([key, value]) for key, value in _entries(checkpoint).items()}


def damaged_entries(checkpoint: dict[str, Any], apart: Container[str] = ()) -> list[str]:
    """Return the names of entries that are missing or have changed since they were saved.

    If there are no digests, these are all entries. Entries named in ``apart`` are not checked.
    """
    known, entries = checkpoint[KEY].get(DIGESTS), _entries(checkpoint)
    if not isinstance(known, dict) or KEY not in known:
        return list(entries)
    checked = {key: value for key, value in known.items() if key not in apart}
    return [key for key, value in checked.items() if key not in entries or digest([key, entries[key]]) != value]


def digest(value: Any) -> str:
    """Return the SHA-256 of nested mappings, sequences, tensors and plain values.

    Of any other object, only the type is included. Of a tensor whose elements share memory, only dtype and shape are
    included, unless it was created by ``expand``.
    """
    found = hashlib.sha256()
    _feed(value, found.update)
    return found.hexdigest()


def _entries(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the entries as they were saved. Lightning overwrites its version in the checkpoint while it loads."""
    legacy = f"legacy_{_VERSION}"
    entries = {key: value for key, value in checkpoint.items() if key != legacy}
    if legacy in checkpoint:
        entries[_VERSION] = checkpoint[legacy]
    return {**entries, KEY: {key: value for key, value in checkpoint[KEY].items() if key != DIGESTS}}


def _feed(value: Any, add: Callable[[Any], None]) -> None:
    """Add bytes that differ for different values, because each part begins with its kind and its length."""
    if type(value) in _PLAIN:
        text = repr(value)
        add(f"{type(value).__name__} {len(text)}:{text}".encode())
    elif type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        add(f"{value.dtype} {list(value.shape)}:".encode())
        for axis, stride in enumerate(value.stride()):  # an expanded axis may have billions of equal entries
            value = value.narrow(axis, 0, min(1, value.shape[axis])) if stride == 0 else value
        if value.nbytes <= value.untyped_storage().nbytes():
            plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            add(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        add(f"mapping {len(value)}:".encode())
        for pair in value.items():
            _feed(pair, add)
    elif isinstance(value, list | tuple):
        add(f"sequence {len(value)}:".encode())
        for item in value:
            _feed(item, add)
    else:
        add(f"{type(value).__name__} 0:".encode())
