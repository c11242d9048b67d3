"""YAML without keys that occur twice."""

from __future__ import annotations

from typing import Any

from lieattn.io._files import UsageError


def loaded(what: str, text: str) -> Any:
    """Return the content of a YAML text; UsageError, which names ``what`` it is, is raised if it cannot be read."""
    import yaml

    try:
        _check_keys(yaml.compose(text, yaml.SafeLoader), set())
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{what} cannot be read: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise UsageError(f"{what}: {error}") from error


def _check_keys(node: Any, seen: set[int]) -> None:
    """Raise ValueError if a key occurs twice in a section; ``seen`` are sections that others may be aliases of."""
    if id(node) in seen or not isinstance(getattr(node, "value", None), list):
        return
    seen.add(id(node))
    lines: dict[str, int] = {}
    for part in node.value:
        key, inner = part if isinstance(part, tuple) else (None, part)
        _check_keys(inner, seen)
        if key is None or not isinstance(key.value, str) or key.value == "<<":
            continue
        line = key.start_mark.line + 1
        if key.value in lines:
            found = f"{key.value!r} in lines {lines[key.value]} and {line}"
            raise ValueError(f"expected each key of a section once, got {found}")
        lines[key.value] = line
