"""Rules about the code: imports between its parts, light imports, and complete documentation."""

import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
from functools import cache
from importlib import resources
from pathlib import Path

import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor, nn

import lieattn
from lieattn.groups import SO
from lieattn.nn import relative
from lieattn.spaces._space import polar
from tests import shapes

ROOT = Path(__file__).parent.parent
LIBRARY = ROOT / "lieattn"
DATASETS = ROOT / "datasets" / "lieattn_datasets"
FILES = sorted(LIBRARY.rglob("*.py"))
DATASET_FILES = sorted(DATASETS.rglob("*.py"))

# What each part may import, besides itself. No part imports from a higher layer.
BELOW = {
    "groups": set(),
    "spaces": {"groups"},
    "reps": {"groups"},
    "geometry": {"groups", "spaces"},
    "ops": {"groups", "spaces", "geometry"},
    "nn": {"groups", "spaces", "reps", "geometry", "ops"},
    "models": {"groups", "spaces", "reps", "geometry", "ops", "nn"},
    "testing": {"groups", "spaces", "reps", "geometry", "ops", "certify"},  # imported only where it is used
}
CORE = frozenset(BELOW)
# Packages that all parts may import. "_core" holds what has no public name: arguments, numerics, support of torch.
FOUNDATION = frozenset({"_core", "io"})
TOOLS = frozenset({"ase", "torchsim", "certify", "viz", "bench", "train", "transforms", "compare", "cli"})
BELOW |= {
    "ase": CORE,
    "torchsim": CORE | {"ase"},
    "certify": CORE - {"testing"},
    "viz": CORE | {"certify"},
    "bench": CORE,
    "train": CORE | {"certify", "transforms"},
    "transforms": {"geometry"},
    "compare": CORE | {"certify", "viz", "bench", "train"},
    "cli": CORE | TOOLS,
}
BELOW |= {"_core": set(), "io": {"_core"}} | {"__init__": CORE | TOOLS, "__main__": CORE | TOOLS}

HEAVY = (
    "lightning matplotlib e3nn scipy torch_geometric sklearn trimesh h5py jsonargparse ase torch_sim triton numba"
).split()
MOST_LINES = 500

# What each part may cost: lines, files and public names. A change that needs more raises a number here, in the same
# diff, where a reviewer sees it; a change that takes something out lowers it.
BUDGETS = {
    "_core": (1439, 8, 0),
    "ase": (351, 1, 0),
    "bench": (1175, 5, 3),
    "certify": (2906, 10, 8),
    "cli": (2544, 9, 3),
    "compare": (1683, 6, 16),
    "geometry": (4646, 14, 43),
    "groups": (2048, 8, 35),
    "io": (1051, 5, 27),
    "models": (8552, 36, 69),
    "nn": (6228, 20, 75),
    "ops": (10834, 44, 32),
    "reps": (787, 4, 15),
    "spaces": (397, 2, 5),
    "testing": (655, 3, 10),
    "torchsim": (95, 1, 0),
    "train": (3130, 11, 32),
    "transforms": (435, 1, 0),
    "viz": (2620, 10, 11),
    "datasets": (8363, 28, 77),
    "tests": (53102, 148, 0),
    "examples": (3334, 32, 0),
}
ROOMS = frozenset({"__init__.py", "__main__.py", "ase.py", "torchsim.py", "transforms.py"})  # beside the packages


def part(path):
    """Return the part of the library to which a file belongs: ``groups``, ``testing``, ``__init__``, ..."""
    return path.relative_to(LIBRARY).parts[0].removesuffix(".py")


@cache
def parsed(path):
    return ast.parse(path.read_text())


def imported(tree, package):
    """Return all names that a file of a package imports, also within functions; ``from a import b`` gives ``a.b``."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")
            above = above[: len(above) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


@cache
def imports_of(path, root=ROOT):
    return imported(parsed(path), ".".join(path.relative_to(root).parent.parts))


def parts_imported(names):
    """Return parts of the library among imported names."""
    return {name.split(".")[1] for name in names if name.startswith("lieattn.")}


# --- arrows ---------------------------------------------------------------------------------------------------


def test_every_part_of_the_library_has_its_place():
    assert {part(path) for path in FILES} <= set(BELOW)


def test_imports_point_downwards():
    for path in FILES:
        mine = part(path)
        assert "lieattn" not in imports_of(path), f"{path}: import what is used from the subpackages"
        below = BELOW[mine] if mine in FOUNDATION else BELOW[mine] | FOUNDATION
        assert parts_imported(imports_of(path)) - {mine} <= below, path


def test_private_modules_of_other_parts_are_not_imported():
    for path in FILES:
        own = {part(path), "_core"}
        foreign = {name for name in imports_of(path) if name.startswith("lieattn.") and name.split(".")[1] not in own}
        assert not {name for name in foreign if any(piece.startswith("_") for piece in name.split(".")[1:])}, path


def test_models_do_not_import_each_other():
    """A family of models is a file or a folder. Code that families share is in private files beside these.

    Modules of published weights may import the network to which these belong.
    """
    for path in FILES:
        family = path.relative_to(LIBRARY).parts[1].removesuffix(".py") if part(path) == "models" else "_"
        if family != "published" and not family.startswith("_"):
            others = {name.split(".")[2] for name in imports_of(path) if name.startswith("lieattn.models.")}
            assert all(other.startswith("_") for other in others - {family}), f"{path.name} imports {others}"


def test_data_sets_stand_on_the_foundation_alone_and_the_library_does_not_know_them():
    assert DATASET_FILES
    for path in FILES:
        assert not {name for name in imports_of(path) if name.split(".")[0] == "lieattn_datasets"}, path.name
    for path in DATASET_FILES:
        assert parts_imported(imports_of(path, DATASETS.parent)) <= FOUNDATION, path.name


def modules(home, root):
    """Return the files of a source tree by the names of their modules, without packages themselves."""
    found = (path for path in sorted(home.rglob("*.py")) if path.name != "__init__.py")
    return {".".join(path.relative_to(root).with_suffix("").parts): path for path in found}


def circles_of(arrows):
    """Return the sets of modules that import each other, directly or through others."""
    ends = {name: set(reached) for name, reached in arrows.items()}
    for middle in ends:
        for reached in ends.values():
            if middle in reached:
                reached |= ends[middle]
    return {frozenset(m for m in ends if m in ends[n] and n in ends[m]) for n in ends if n in ends[n]}


@pytest.mark.parametrize(("home", "root"), [(LIBRARY, ROOT), (DATASETS, DATASETS.parent)], ids=["lieattn", "datasets"])
def test_modules_do_not_import_each_other_in_a_circle(home, root):
    """Imports within functions and for annotations count as well."""
    arrows = {}
    for name, path in (found := modules(home, root)).items():
        names = imports_of(path, root)
        arrows[name] = {m for one in names for m in (one, one.rpartition(".")[0]) if m in found and m != name}
    assert not circles_of(arrows)


def test_circles_are_found():
    """Control: the test above would find two modules, or three, that import each other."""
    assert circles_of({"a": {"b"}, "b": {"a", "c"}, "c": set()}) == {frozenset("ab")}
    assert circles_of({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == {frozenset("abc")}
    assert not circles_of({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_the_reader_of_imports_sees_all_of_them():
    """Control: the tests above would detect a forbidden import."""
    source = """
import lieattn.nn as nn
from lieattn import models
from lieattn.models import gsa_net, other
from . import _sibling
from ..cli import main
def late():
    from lieattn.viz import plot
"""
    found = imported(ast.parse(source), "lieattn.geometry")
    assert parts_imported(found) == {"nn", "models", "geometry", "cli", "viz"}
    assert {"lieattn.models.other", "lieattn.geometry._sibling", "lieattn.cli.main"} <= found


# Private attributes by which libraries are extended: named tuples, torch, Lightning, Numba, PyTorch Geometric.
OF_LIBRARIES = frozenset(
    "_asdict _fields _replace _C _getframe _current_level _version _modules _buffers _non_persistent_buffers_set "
    "_metadata _apply _compiled_call_impl _dynamo _foreach_copy_ _foreach_lerp_ _are_functorch_transforms_active "
    "_NormBase _will_engine_execute_node _trainer _can_stop_early _should_check_val_fx _data_fetcher _ddp_kwargs "
    "_forward_hooks _cache _slice_dict _inc_dict _store _num_nodes".split()
)


def private_reads(tree):
    """Return private attributes that a file reads from objects other than ``self``, and does not define itself."""
    nodes, read = list(ast.walk(tree)), {}
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            base = node.value.func if isinstance(node.value, ast.Call) else node.value
            if getattr(base, "id", None) in ("self", "cls", "super"):
                own.add(node.attr)
            else:
                read[node.attr] = ast.unparse(node)
    return {text for name, text in read.items() if name not in own | OF_LIBRARIES}


SCRIPTS = sorted((DATASETS.parent / "scripts").glob("*.py"))


def test_private_attributes_of_other_files_are_not_read():
    for path in FILES + DATASET_FILES + SCRIPTS:
        assert not private_reads(parsed(path)), path


def test_private_reads_are_found():
    """Control: attributes of this file, of ``super()`` and of libraries are no private reads."""
    allowed = "class A:\n def f(self, a): return self._x, a._x, super()._y(), a._replace(), a.__dict__\n"
    assert not private_reads(ast.parse(allowed))
    assert private_reads(ast.parse(allowed + "def g(a): return B()._other, a.b._z")) == {"B()._other", "a.b._z"}


# --- files ----------------------------------------------------------------------------------------------------


def test_no_assert_statements():
    """Checks must not be removed by ``python -O``."""
    assert not [path for path in FILES if any(isinstance(node, ast.Assert) for node in ast.walk(parsed(path)))]


def test_files_are_short():
    assert not [path for path in FILES + DATASET_FILES if len(path.read_text().splitlines()) >= MOST_LINES]


def cost(name):
    """Return lines, files and public names of a part of the library, of the data sets, or of the tests."""
    home = {"datasets": DATASETS, "tests": ROOT / "tests", "examples": ROOT / "examples"}.get(name, LIBRARY / name)
    files = [path for path in (home.rglob("*.py") if home.is_dir() else [home.with_suffix(".py")]) if path.is_file()]
    lists = [path for path in files if path.name == "__init__.py" and not path.parent.name.startswith("_")]
    names = set().union(*map(listed_names, lists)) if name not in ("tests", "examples") else set()
    return sum(len(path.read_text().splitlines()) for path in files), len(files), len(names)


@pytest.mark.parametrize("name", BUDGETS)
def test_parts_stay_within_their_budgets(name):
    found, allowed = cost(name), BUDGETS[name]
    assert all(one <= most for one, most in zip(found, allowed, strict=True)), f"{name} has {found}, not {allowed}"


def test_every_part_has_a_budget_and_the_root_has_no_modules_of_its_own():
    parts = {part(path) for path in FILES} - {"__init__", "__main__"}
    assert parts | {"datasets", "tests", "examples"} == set(BUDGETS)
    assert {path.name for path in LIBRARY.glob("*.py")} == ROOMS


def test_annotations_are_for_users_too():
    assert resources.files("lieattn").joinpath("py.typed").is_file()
    assert DATASETS.joinpath("py.typed").is_file()


# --- the public names -----------------------------------------------------------------------------------------


def public_names():
    for name in sorted(CORE):
        module = importlib.import_module(f"lieattn.{name}")
        if hasattr(module, "__all__"):
            yield from ((module, public) for public in module.__all__)
        else:
            # A file instead of a package: public names are those without an underscore.
            own = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
            yield from ((module, public) for public in own if not public.startswith("_"))


PUBLIC = list(public_names())


def test_public_names_exist_and_are_documented():
    for module, name in PUBLIC:
        value = getattr(module, name)
        if inspect.ismodule(value) or not callable(value) or not hasattr(value, "__module__"):
            continue
        if value.__module__.split(".")[0] != "lieattn":  # an alias of typing, which cannot carry a docstring
            continue
        text = inspect.cleandoc(value.__doc__ or "")
        assert text, name
        assert not text.startswith(f"{name}("), "the signature that a dataclass writes is no docstring"
        if inspect.isclass(value):
            own = {n: member for n, member in vars(value).items() if not n.startswith("_")}
            documented = {n: inspect.getdoc(getattr(value, n)) for n, member in own.items() if is_documentable(member)}
            assert all(documented.values()), f"without docstring: {[n for n, doc in documented.items() if not doc]}"


@cache
def listed_names(path):
    """Return the public names that a file lists."""
    found = [node.value for node in parsed(path).body if assigned_name(node) == "__all__"]
    return {name for value in found for name in ast.literal_eval(value)}


def assigned_name(node):
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return getattr(target, "id", None)


def test_public_constants_and_names_of_types_are_documented():
    """Their pages of the API show the string that follows the assignment."""
    undocumented = []
    for path in (path for path in FILES + DATASET_FILES if "cli" not in path.parts):
        public, body = listed_names(path.parent / "__init__.py"), parsed(path).body
        for node, following in zip(body, [*body[1:], None], strict=True):
            text = following.value if isinstance(following, ast.Expr) else None
            if assigned_name(node) in public and not isinstance(text, ast.Constant):
                undocumented.append(f"{path.name}: {assigned_name(node)}")
    assert not undocumented


def is_documentable(member):
    return inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod)


def test_public_names_are_listed_once_and_in_order():
    for name in sorted(CORE):
        listed = getattr(importlib.import_module(f"lieattn.{name}"), "__all__", [])
        assert list(listed) == sorted(set(listed))


def layers_of_graphs():
    """Return the modules of ``nn`` and the parameters of their ``forward``, if a graph is among them."""
    classes = [nn.Module]
    for one in classes:
        classes += one.__subclasses__()
    own = {one for one in classes if one.__module__.startswith("lieattn.nn.")}
    found = {one: list(inspect.signature(one.forward).parameters)[1:] for one in own}
    return {one: names for one, names in found.items() if "graph" in names}


def test_layers_take_a_field_and_a_graph():
    """All that a layer needs besides the field travels in the graph. Functions of relative elements return terms."""
    found = layers_of_graphs()
    assert {one.__name__ for one in found} >= {"GroupAttention", "PreNormBlock", "FrameMessages", "EdgeNetwork"}
    orders = {one: ["graph", "x"] if issubclass(one, relative.RelativeFunction) else ["x", "graph"] for one in found}
    assert found == orders


# --- lightness ------------------------------------------------------------------------------------------------

LIGHT = """
import json, sys, time
import torch, numpy
before = set(sys.modules)
start = time.process_time()
import lieattn
[getattr(lieattn, name) for name in sys.argv[1:]]
seconds = time.process_time() - start
asked = lieattn.ops._backend._State.asked
print(json.dumps({"seconds": seconds, "modules": sorted(set(sys.modules) - before), "asked": asked}))
"""


def test_importing_the_library_is_light_and_the_variable_chooses():
    """Besides torch, importing takes under two seconds of processor time and imports none of the heavy packages."""
    command, environment = [sys.executable, "-c", LIGHT, *sorted(CORE)], os.environ | {"LIEATTN_BACKEND": "plain"}
    options = {"capture_output": True, "text": True, "check": True, "cwd": ROOT, "env": environment}
    found = json.loads(subprocess.run(command, **options).stdout)
    assert found["asked"] == "plain"
    assert {name.split(".")[0] for name in found["modules"]}.isdisjoint(HEAVY)
    assert parts_imported(found["modules"]) >= CORE
    assert parts_imported(found["modules"]).isdisjoint(TOOLS)
    assert found["seconds"] < 2.0


def test_data_sets_import_heavy_packages_where_they_use_them():
    """Packages of extras, and trimesh and scipy, which take long."""
    late = {*HEAVY, "PIL", "pooch", "manifold3d", "rdkit", "tblite"} - {"torch_geometric"}
    for path in DATASET_FILES:
        body = [node for node in parsed(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
        found = {name.split(".")[0] for name in imported(ast.Module(body, []), "lieattn_datasets")}
        assert found.isdisjoint(late), path


def test_names_of_the_library_are_its_parts():
    assert set(lieattn.__all__) <= CORE | TOOLS | {"load", "save"}
    assert set(lieattn.__all__) >= CORE
    assert all(inspect.ismodule(getattr(lieattn, name)) for name in CORE)
    with pytest.raises(AttributeError, match="'lieattn' has no attribute 'nothing'"):
        lieattn.nothing  # noqa: B018


def test_shapes_in_annotations_are_texts():
    """Without quotes, ``points * rest`` is a product of names that do not exist, and nothing is compared."""
    kinds = {"Float", "Float32", "Float64", "Int", "Int64", "Bool", "Shaped"}
    for path in FILES + DATASET_FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Subscript) and getattr(node.value, "id", None) in kinds:
                assert isinstance(node.slice.elts[1], ast.Constant), f"{path.name}:{node.lineno}"


def test_the_first_line_of_a_module_names_one_idea():
    firsts = {path: path.read_text().split("\n", 1)[0] for path in FILES if path.parent != LIBRARY}
    assert [str(path) for path, first in firsts.items() if " and " in first and path.name != "_training.py"] == []


# --- shapes ---------------------------------------------------------------------------------------------------


def summed(x: Float[Tensor, "rows columns"]) -> Float[Tensor, " rows"]:
    """Sum over the wrong axis, which shows unless there are as many rows as columns."""
    if x.ndim == 1:
        raise ValueError("x: expected rows")
    return x.sum(dim=0)


def test_calls_that_do_not_fit_their_signature_are_found():
    sums = shapes.compared(summed)
    assert sums(torch.zeros(3, 3)).shape == (3,)
    with pytest.raises(TypeCheckError, match="return value"):
        sums(torch.zeros(3, 4))
    for other in (torch.zeros(3, 3, 3), torch.zeros(3, 3, dtype=torch.int64)):
        with pytest.raises(TypeCheckError, match="'x'"):
            sums(other)
    with pytest.raises(ValueError, match="x: expected rows"):  # the function's own error comes first
        sums(torch.zeros(3))


def test_functions_of_the_library_are_compared():
    with pytest.raises(TypeCheckError, match="polar"):
        polar(torch.ones(2, 3, dtype=torch.complex64))
    assert hasattr(SO(3).exp, "__wrapped__"), "methods keep the promise of the method that they override"
