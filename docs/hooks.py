"""Hooks of MkDocs: pages and files from other folders of the repository, pages of the API, and links between them."""

import ast
import functools
import posixpath
import re
from pathlib import Path

import nbformat
from mkdocs.structure.files import File
from nbclient import NotebookClient
from nbconvert import MarkdownExporter
from traitlets.config import Config

ROOT = Path(__file__).parent.parent
PAGES = {
    "index.md": "README.md",
    "examples.md": "examples/README.md",
    "papers.md": "examples/papers/README.md",
    "datasets.md": "datasets/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "conduct.md": "CODE_OF_CONDUCT.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
NOTEBOOKS = {
    f"notebooks/{name}.md": f"examples/notebooks/{name}.ipynb" for name in ("images", "molecules", "own_group")
}
SOURCES = PAGES | NOTEBOOKS
PACKAGES = (
    *(f"lieattn.{name}" for name in ("groups", "spaces", "reps", "geometry", "ops", "nn", "nn.relative", "models")),
    *(
        f"lieattn.{name}"
        for name in ("train", "certify", "testing", "transforms", "viz", "ase", "torchsim", "bench", "compare")
    ),
    "lieattn_datasets",
)
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
NAMED = re.compile(r"(?<![\[`])`([\w./-]+\.(?:json|py|sh|yaml))`(?![\]`])")  # files that are named, without a link


def public_names(package):
    """Return the public names of a package or module: ``__all__``, or what a module defines, in its order."""
    path = ROOT / ("datasets" if package == "lieattn_datasets" else "") / package.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(path.read_text()).body
    for node in body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    defined = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [name for name in defined if not name.startswith("_")]


def address(package):
    """Return the name of the page of a package."""
    return package.removeprefix("lieattn.")


def api_page(package):
    """Return Markdown of the page of a package: its docstring, then its public names."""
    lines = [f"# {package}", "", f"::: {package}", "    options:", "      members: false", ""]
    for name in (name for name in public_names(package) if f"{package}.{name}" not in PACKAGES):
        lines += [f"::: {package}.{name}", "    options:", "      show_root_heading: true"]
        if name.isupper():  # constants may be long tables
            lines.append("      show_attribute_values: false")
        lines.append("")
    return "\n".join(lines)


@functools.cache
def notebook_page(text):
    """Return Markdown of a notebook, which is run here, and its pictures as bytes by name, without text on stderr."""
    notebook = nbformat.reads(text, as_version=4)
    local = Config(KernelManager={"transport": "ipc"})  # a socket of this machine, not of the network
    NotebookClient(notebook, timeout=600, kernel_name="python3", config=local).execute()
    for cell in notebook.cells:
        cell.outputs = [output for output in cell.get("outputs", []) if output.get("name") != "stderr"]
    markdown, resources = MarkdownExporter().from_notebook_node(notebook)
    return markdown, resources["outputs"]


def badges(repository, source):
    """Return Markdown of badges that open a notebook of a repository on GitHub in Colab or Binder, else nothing."""
    owner = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?", repository or "")
    if owner is None:
        return ""
    colab, binder = "https://colab.research.google.com", "https://mybinder.org"
    return (
        f"[![Open in Colab]({colab}/assets/colab-badge.svg)]({colab}/github/{owner[1]}/blob/main/{source}) "
        f"[![Open in Binder]({binder}/badge_logo.svg)]({binder}/v2/gh/{owner[1]}/main?labpath={source})\n\n"
    )


def on_config(config):
    """Put a page for each package into the navigation."""
    pages = [{package: f"api/{address(package)}.md"} for package in PACKAGES]
    config.nav = [{"API": pages} if entry == {"API": "API"} else entry for entry in config.nav]
    return config


def on_files(files, config):
    """Add the pages that are not in the folder of the documentation."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for page, source in NOTEBOOKS.items():
        markdown, pictures = notebook_page((ROOT / source).read_text())
        name = posixpath.splitext(page)[0]
        for picture, content in pictures.items():
            markdown = markdown.replace(f"]({picture})", f"]({posixpath.basename(name)}_{picture})")
            files.append(File.generated(config, f"{name}_{picture}", content=content))
        files.append(File.generated(config, page, content=markdown))
    for package in PACKAGES:
        files.append(File.generated(config, f"api/{address(package)}.md", content=api_page(package)))
    return files


class Links:
    """Links of a page of the site: to other pages, and to the text of files of the repository that have no page."""

    def __init__(self, here, config, files):
        self.config, self.files, self.site = config, files, posixpath.dirname(here)
        self.folder = posixpath.dirname(SOURCES.get(here, f"docs/{here}"))
        self.pages = {source: uri for uri, source in SOURCES.items()}
        self.pages |= {f"docs/{file.src_uri}": file.src_uri for file in files if file.src_uri not in SOURCES}

    def way(self, path, folders):
        """Return the address of a file that is named relative to one of the folders, or None."""
        for folder in folders:
            source = posixpath.normpath(posixpath.join(folder, path))
            uri = self.pages.get(source)
            if uri is None and (ROOT / source).is_file():
                uri = f"files/{source}.txt"  # which browsers show
                if self.files.get_file_from_path(uri) is None:
                    self.files.append(File.generated(self.config, uri, content=(ROOT / source).read_text()))
            if uri is not None:
                return posixpath.relpath(uri, self.site)
        return None

    def lead(self, match):
        """Point a link to its page. A folder is named instead."""
        text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match.group()
        if (to := self.way(path, [self.folder])) is not None:
            return f"[{text}]({to}{'#' + anchor if anchor else ''})"
        source = posixpath.normpath(posixpath.join(self.folder, path))
        if not (ROOT / source).exists():
            return match.group()  # a strict build stops at it
        return f"{text}" if text.strip("`") == source else f"{text} (`{source}`)"

    def name(self, match):
        """Make a name of a file a link to its text."""
        to = self.way(match[1], [self.folder, "", "examples"])
        return match.group() if to is None else f"[{match.group()}]({to})"

    def show(self, match):
        """Make a picture a link to itself, in full size."""
        text, path = match.groups()
        path = self.way(path, [self.folder]) or path
        return f"[![{text}]({path})]({path})"


def on_page_markdown(markdown, page, config, files):
    """Point links to files of the repository to their pages or text, link pictures to themselves, and add badges."""
    links = Links(page.file.src_uri, config, files)
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    source = NOTEBOOKS.get(page.file.src_uri)
    return ("" if source is None else badges(config.repo_url, source)) + "".join(
        part if part.startswith("```") else PICTURE.sub(links.show, NAMED.sub(links.name, LINK.sub(links.lead, part)))
        for part in parts
    )
