"""Short descriptions of modules."""

from __future__ import annotations

from torch import nn

from lieattn._core.reports import titled_table


class Shown(nn.Module):
    """A module with a short description for ``print`` and notebooks; ``repr`` has the whole tree of modules."""

    guarantee: str

    def __str__(self) -> str:
        """Return class, number of parameters and guarantee, and a line for each part."""
        rows = self._parts()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)] or [0] * 3
        lines = [f"  {a:{widths[0]}}  {b:{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
        return "\n".join([self._heading(), *lines])

    def _repr_html_(self) -> str:
        return titled_table(self._heading(), self._parts(), ("part", "class", "parameters"))

    def _heading(self) -> str:
        total = sum(weight.numel() for weight in self.parameters())
        return f"{type(self).__name__}: {total:,} parameters; {self.guarantee}"

    def _parts(self) -> list[tuple[str, str, str]]:
        """Return name, class and number of parameters of each part."""
        rows = []
        for name, part in self.named_children():
            kinds = {type(inner).__name__ for inner in part.children()}
            several = isinstance(part, nn.ModuleList) and len(kinds) == 1
            kind = f"{len(list(part.children()))} x {kinds.pop()}" if several else type(part).__name__
            rows.append((name, kind, f"{sum(weight.numel() for weight in part.parameters()):,}"))
        return rows
