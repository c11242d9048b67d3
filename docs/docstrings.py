"""Docstrings on the pages of the API: formulas become MathML, and roles such as ``:class:`` become links.

An extension of Griffe converts the formulas before the text is read as Markdown, which would change them. A hook of
MkDocs replaces the roles in the finished pages, when the anchors of all names are known.
"""

import logging
import posixpath
import re
import textwrap

import griffe
from latex2mathml.converter import convert

LOG = logging.getLogger("mkdocs.docstrings")
OTHERS = ("torch", "torch_geometric", "lightning", "ase", "numpy")  # packages without pages
BLOCK = re.compile(r"^( *)\.\. math::(.*)\n((?:\1 +.*(?:\n|$)|\n)*)", re.MULTILINE)
SHARED = re.compile(r"^(\w+(?:, \w+)+)\n((?:    .*(?:\n|$)|\n(?=    ))+)", re.MULTILINE)  # arguments with one text
INLINE = re.compile(r":math:`([^`]*)`")
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>~?([\w.]+)</code>")
ANCHOR = re.compile(r'<(?:a|h\d) id="(lieattn[\w.]*)"')


def with_mathml(text):
    """Replace the formulas of a docstring by MathML, which browsers display without scripts."""

    def block(match):
        indent, first, rest = match.groups()
        formula = f"{first}\n{textwrap.dedent(rest)}".strip()
        mathml = convert(formula, display="block")
        return f'\n{indent}<div style="overflow-x: auto">{mathml}</div>\n\n'

    return INLINE.sub(lambda match: convert(match.group(1)), BLOCK.sub(block, text))


def separated(text):
    """Give each of several arguments that share a text an entry of its own, since Griffe gives them one type.

    If the text has as many parts, separated by semicolons, as there are arguments, each gets its part.
    """

    def entries(match):
        names = match.group(1).split(", ")
        parts = re.split(r";\s+", match.group(2).strip())
        if len(parts) != len(names):
            return "".join(f"{name}\n{match.group(2)}" for name in names)
        parts = [part.removeprefix("and ").removesuffix(".") for part in parts]
        return "".join(
            f"{name}\n    {part[:1].upper()}{part[1:]}.\n\n" for name, part in zip(names, parts, strict=True)
        )

    return SHARED.sub(entries, text)


class Docstrings(griffe.Extension):
    """Changes all docstrings of a package before they are read."""

    def on_object(self, *, obj, **_):
        """Change one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = with_mathml(separated(obj.docstring.value))


def on_env(env, config, files):
    """Replace roles by links, or by code if the name has no anchor, such as a name of torch.

    Names without their module are looked up on the same page, then on all pages. An attribute without an anchor leads
    to its class.
    """
    pages = [file.page for file in files.documentation_pages() if file.page is not None]
    anchors = {anchor: page.url for page in pages for anchor in ANCHOR.findall(page.content)}
    for page in pages:

        def link(match, page=page):
            name = match.group(1)
            anchor = _anchor(name, anchors, page.url) or _anchor(name.rpartition(".")[0], anchors, page.url)
            code = f"<code>{name.removeprefix('lieattn.')}</code>"
            if anchor is None:
                if name.partition(".")[0] not in OTHERS:
                    LOG.warning("%s: there is no anchor for %s", page.url, name)
                return code
            address = posixpath.relpath(anchors[anchor] or ".", page.url or ".")
            return f'<a href="{"" if address == "." else address + "/"}#{anchor}">{code}</a>'

        page.content = ROLE.sub(link, page.content)
    return env


def _anchor(name, anchors, url):
    """Return the anchor of a name, or None."""
    if name in anchors or not name:
        return name or None
    found = [anchor for anchor in anchors if anchor.endswith(f".{name}")]
    return min(found, key=lambda anchor: (anchors[anchor] != url, anchor.count("."), anchor), default=None)
