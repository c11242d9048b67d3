"""The state of an optimizer in a training that continues from a checkpoint."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from lieattn.train._configuration import UsageError

_ADVICE = "continue with the optimizer and no_decay of the run, or start from its weights: --weights FILE"


def refuse_other_states(optimizer: Optimizer) -> Optimizer:
    """Let an optimizer raise UsageError for the state of another one, and return it.

    Torch raises errors about groups of parameters, or about a missing entry.
    """
    optimizer.register_load_state_dict_pre_hook(_check_state)
    return optimizer


def _check_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    found = [len(group["params"]) for group in state["param_groups"]]
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    if found != wanted:
        raise UsageError(
            f"optimizer: expected a checkpoint with groups of {wanted} parameters, got one with {found}; {_ADVICE}"
        )
    for saved, present in zip(state["param_groups"], optimizer.param_groups, strict=True):
        # Schedules add settings, and new versions of torch do; another optimizer has others.
        added, missing = saved.keys() - present.keys(), optimizer.defaults.keys() - saved.keys()
        if added and missing:
            name = type(optimizer).__name__
            raise UsageError(
                f"optimizer: expected a checkpoint of {name}, got one of another optimizer, with {sorted(added)} and "
                f"without {sorted(missing)}; {_ADVICE}"
            )
