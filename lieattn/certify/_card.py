"""A certificate as one page of HTML without references to other files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from lieattn._core.reports import page, table
from lieattn.certify._certificate import Certificate, Row, size_in_words

_VERDICTS = {  # color and sentence; for failures, the sentence is that of the certificate
    "kept": ("#1a7f37", "Every promise was kept, up to rounding."),
    "failed": ("#b42318", ""),
    "vacuous": ("#9a6700", "An output does not depend on its input."),
    "not promised": ("#57606a", "No exact guarantee: errors are for information only."),
}
_CHECKS = {
    "finite": "outputs that are not finite",
    "element": "elements of the group",
    "raster": "elements, pixels in raster order",
    "degenerate": "degenerate clouds",
    "permutation": "order of points",
    "image": "other periodic images of points",
    "alone": "cloud without its batch",
    "continuity": "jumps",
    "first derivative": "jumps of derivatives",
    "gradient": "forces against the energy",
    "curl": "curl of the forces",
    "outside": "outside of the group",
}
_LOWEST, _WIDTH, _LINE = -18, 640, 22  # exponent of the smallest error drawn, width of the page, height of a line


def card(certificate: Certificate) -> str:
    """Return the page."""
    color, sentence = _VERDICTS[certificate.verdict]
    tried = (
        "" if certificate.group is None else ", all elements" if certificate.order else ", random and special elements"
    )
    facts = {
        "Guarantee": certificate.guarantee,
        "Group": f"{certificate.group or 'none'}{tried}",
        "Measured on": f"{size_in_words(certificate)}, {certificate.device}",
        "Outputs differ between clouds by": f"{certificate.spread:.2g}",
        "Seed": str(certificate.seed),
    }
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    searched = [row for row in certificate.rows if row.check == "searched"]
    measured = [row for row in certificate.rows if row.check != "searched"]
    sentence = sentence or f"{certificate.failure.capitalize()}."
    verdict = f"<b>{escape(certificate.verdict)}</b> &middot; {sentence}"
    parts = [
        f'<div class="verdict" style="background:{color}">{verdict}</div>',
        f"<dl>{listed}</dl>",
        _diagnoses(certificate),
        f"<h2>Symmetries found</h2>{_table(searched)}" if searched else "",
        f"<h2>Errors, worst of each check</h2>{_chart(measured)}" if measured else "",
        f"<details><summary>All {len(measured)} measurements</summary>{_table(measured)}</details>",
    ]
    title, body = f"Certificate: {certificate.verdict}", "\n".join(filter(None, parts))
    return page(title, f"<h1>Equivariance certificate</h1>\n{body}")


def _diagnoses(certificate: Certificate) -> str:
    if not certificate.diagnoses:
        return ""
    heads = ("broken under", "first layer", "likely cause", "evidence")
    rows = []
    for one in certificate.diagnoses:
        layer = "none by itself" if one.module is None else f"{one.module or 'the network itself'} ({one.type})"
        rows.append((one.check, layer, one.cause, one.evidence))
    return f"<h2>Where it breaks</h2>{table(rows, heads)}"


def _table(rows: Iterable[Row]) -> str:
    heads = ("check", "output", "dtype", "max error", "relative", "allowed", "")
    lines = ["<tr>" + "".join(f"<th>{name}</th>" for name in heads) + "</tr>"]
    for row in rows:
        allowed = "" if row.allowed is None else f"{row.allowed:.1e}"
        words = ("yes", "no") if row.check == "searched" else ("ok", "FAILED")
        word, style = ("not promised", "idle") if row.passed is None else (words[0], "good")
        if row.passed is False:
            word, style = words[1], "idle" if row.check == "searched" else "bad"
        name = row.label if row.check == "searched" else f"{row.check} {row.label}"
        cells = (name, row.output, row.dtype, f"{row.max_error:.1e}", f"{row.relative:.1e}", allowed)
        body = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr>{body}<td class="{style}">{word}</td></tr>')
    return f"<table>{''.join(lines)}</table>"


def _chart(rows: Sequence[Row]) -> str:
    """Draw the largest errors on a logarithmic axis, and the allowed errors as lines."""
    worst = []
    for (check, output, dtype), several in groupby(
        sorted(rows, key=lambda row: (list(_CHECKS).index(row.check), row.output, row.dtype)),
        key=lambda row: (row.check, row.output, row.dtype),
    ):
        one = max(several, key=lambda row: (row.passed is False, math.isnan(row.max_error), row.max_error))
        worst.append((" ".join(filter(None, (_CHECKS[check], output and f"({output})", dtype))), one))
    highest = max([0, *(math.ceil(math.log10(row.max_error)) for _, row in worst if 0 < row.max_error < math.inf)])
    left, top = 270, 18
    height = top + _LINE * len(worst) + 6

    def place(value: float) -> float:
        exponent = _LOWEST if value <= 0 else highest if not math.isfinite(value) else math.log10(value)
        return left + (_WIDTH - left - 20) * (max(exponent, _LOWEST) - _LOWEST) / (highest - _LOWEST)

    shapes = []
    for exponent in range(_LOWEST, highest + 1, 3):
        x = place(10.0**exponent)
        label = "0" if exponent == _LOWEST else f"1e{exponent}"
        shapes.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{height}" stroke="#d0d7de"/>')
        shapes.append(f'<text x="{x:.1f}" y="12" text-anchor="middle" fill="#57606a">{label}</text>')
    for number, (label, row) in enumerate(worst):
        y = top + _LINE * (number + 0.5)
        color = "#57606a" if row.passed is None else "#1a7f37" if row.passed else "#b42318"
        shapes.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
        if row.allowed is not None:
            x = place(row.allowed)
            shapes.append(f'<line x1="{x:.1f}" y1="{y - 8:.1f}" x2="{x:.1f}" y2="{y + 8:.1f}" stroke="#1f2328"/>')
        tooltip = f"{row.label or row.check}: {row.max_error:.2e}"
        dot = f'<circle cx="{place(row.max_error):.1f}" cy="{y:.1f}" r="5" fill="{color}">'
        shapes.append(f"{dot}<title>{escape(tooltip)}</title></circle>")
    legend = "Dots: largest errors, green if allowed, red if not, gray if nothing is promised. Bars: allowed errors."
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img" font-size="12" '
        f'font-family="system-ui,sans-serif">{"".join(shapes)}</svg><p class="idle">{legend}</p>'
    )
