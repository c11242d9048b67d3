"""Sections of a YAML text that nobody means, but that YAML accepts."""

from __future__ import annotations

from typing import Any


def check_sections(text: str) -> None:
    """Raise ValueError if a section of a YAML text has an alias of itself, or a key twice, of which one would be lost.

    Texts that YAML cannot read pass, since their reader reports them.
    """
    import yaml

    try:
        top: Any = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError:
        return
    seen: set[int] = set()  # several sections may be aliases of one
    around: set[int] = set()
    nodes = [(top, False)]
    while nodes:
        node, is_done = nodes.pop()
        if is_done:
            around.discard(id(node))
            continue
        if id(node) in around:
            line = node.start_mark.line + 1
            raise ValueError(f"expected sections that end, got one in line {line} with an alias of itself")
        if id(node) in seen or not isinstance(getattr(node, "value", None), list):
            continue
        seen.add(id(node))
        around.add(id(node))
        nodes.append((node, True))
        _check_keys(node)
        nodes += [(part[1] if isinstance(part, tuple) else part, False) for part in node.value]


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
