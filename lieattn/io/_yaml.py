"""Reading YAML texts, without sections that nobody means but that YAML accepts."""

from __future__ import annotations

from typing import Any

_MOST_LEVELS = 100  # readers of deeper sections would need more of Python's stack than there is


def loaded(what: str, text: str) -> Any:
    """Return the content of a YAML text; ValueError, which names ``what`` it is, is raised if it cannot be read."""
    import yaml

    try:
        check_sections(text)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{what} cannot be read: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def check_sections(text: str) -> None:
    """Raise ValueError if sections of a YAML text are too deep, or have an alias of themselves or a key twice.

    Of keys that occur twice, one would be lost. Texts that YAML cannot read pass, since their reader reports them.
    """
    import yaml

    too_deep = f"expected at most {_MOST_LEVELS} sections inside each other, got more"
    try:
        top: Any = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError:
        return
    except RecursionError:
        raise ValueError(too_deep) from None
    levels: dict[int, int] = {}  # several sections may be aliases of one
    around: set[int] = set()
    nodes = [(top, False)]
    while nodes:
        node, is_done = nodes.pop()
        if is_done:
            around.discard(id(node))
            levels[id(node)] = 1 + max((levels.get(id(part), 0) for part in _parts(node)), default=0)
            if levels[id(node)] > _MOST_LEVELS:
                raise ValueError(too_deep)
            continue
        if id(node) in around:
            line = node.start_mark.line + 1
            raise ValueError(f"expected sections that end, got one in line {line} with an alias of itself")
        if id(node) in levels or not isinstance(getattr(node, "value", None), list):
            continue
        around.add(id(node))
        nodes.append((node, True))
        _check_keys(node)
        nodes += [(part, False) for part in _parts(node)]


def _parts(section: Any) -> list[Any]:
    return [part[1] if isinstance(part, tuple) else part for part in section.value]


def _check_keys(section: Any) -> None:
    lines: dict[str, int] = {}
    for key in [part[0] for part in section.value if isinstance(part, tuple)]:
        if not isinstance(key.value, str) or key.value == "<<":
            continue
        line = key.start_mark.line + 1
        if key.value in lines:
            found = f"{key.value!r} in lines {lines[key.value]} and {line}"
            raise ValueError(f"expected each key of a section once, got {found}")
        lines[key.value] = line
