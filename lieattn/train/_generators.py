"""States of the random generators as tensors and plain values, which load with ``weights_only``."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """States of the generators of Python, NumPy and torch (CPU and every CUDA device in use)."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Return to a state of :func:`random_state`; CUDA devices that it does not know are left alone."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"].cpu())
    if len(state["cuda"]) <= torch.cuda.device_count():
        for device, cuda in enumerate(state["cuda"]):
            torch.cuda.set_rng_state(cuda.cpu(), device)


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch's CPU, from one number below 2^64."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
