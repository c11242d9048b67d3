"""The table of groups that all tests share. Add a group here, and every test covers it."""

import inspect
import itertools
from collections.abc import Callable, Container, Iterable, Mapping
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Batch, Data

from lieattn.geometry import LiftedGraph
from lieattn.groups import (
    SO,
    FiniteGroup,
    commuting_product,
    cyclic,
    cyclic_about,
    dihedral,
    dihedral_about,
    direct_product,
    full_icosahedral,
    full_octahedral,
    full_tetrahedral,
    icosahedral,
    inversion,
    octahedral,
    pyritohedral,
    reflection,
    tetrahedral,
    trivial,
)

# What Lightning and jsonargparse say about a training of some steps.
short_training = pytest.mark.filterwarnings(
    "ignore:.*(does not have many workers|smaller than the logging interval|exists and is not empty).*",
    "ignore:.*JsonargparseDeprecationWarning.*",
)


def some(cases: Iterable, quick: Container) -> list:
    """Return the cases as parameters of a test, marked slow except for a few that together cover most branches."""
    return [pytest.param(case, marks=() if case in quick else pytest.mark.slow) for case in cases]


def each(names: str, cases: Iterable | Callable[..., Iterable]) -> Callable[..., Callable[..., None]]:
    """Return a decorator that runs a test for each case, as a single test. A note of the error names the case.

    It is for quick cases, since pytest spends some milliseconds on each test. Cases are values of an argument, tuples
    if there are several names, or the values of a mapping; a function of arguments of the test may return them.
    """
    several = "," in names

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature, own = inspect.signature(test), names.split(", ")
        given = list(inspect.signature(cases).parameters) if callable(cases) else []

        @wraps(test)
        def run(**fixtures: Any) -> None:
            found = cases(*map(fixtures.get, given)) if callable(cases) else cases
            for label in found:
                case = found[label] if isinstance(found, Mapping) else label
                torch.default_generator.manual_seed(0)
                try:
                    test(**fixtures, **dict(zip(own, case if several else (case,), strict=True)))
                except pytest.skip.Exception as error:
                    raise AssertionError(f"a test of each case cannot skip {label}") from error
                except Exception as error:
                    error.add_note(f"{names}: {label}")
                    raise

        left = [parameter for name, parameter in signature.parameters.items() if name not in own]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate


def refuses(*rows: tuple, error: Any = ValueError) -> Callable[..., None]:
    """Return a test that calls raise errors: rows ``(call, message)``, or with a class of their own at the end."""

    @each("row", rows)
    def test(row: tuple) -> None:
        call, message, cls = (*row, error)[:3]
        with pytest.raises(cls, match=message):
            call()

    return test


def quiet_trainer(**options: Any) -> Any:
    """Return a trainer on the CPU that writes and shows nothing but what the options ask for."""
    from lightning.pytorch import Trainer

    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return Trainer(**{"accelerator": "cpu", "max_epochs": 1, **off, **options})


def save_untrained(task: Any, path: Path) -> None:
    """Write the checkpoint of a task that was not trained."""
    task.trainer = quiet_trainer(default_root_dir=path.parent)
    task.trainer.strategy.connect(task)
    task.trainer.save_checkpoint(path)


def of_edges(graph: LiftedGraph) -> torch.Tensor:
    """Return coordinates of the relative elements of every edge, ``[edges, fiber, fiber, k]``."""
    coordinates, row = graph.relative.coordinates, graph.relative.row
    return coordinates if row is None else coordinates[row]


@cache
def turns(group: FiniteGroup) -> tuple[int, ...]:
    """Return the indices of a few elements that generate a group, and of the last element.

    A layer that commutes with generators, at random points, commutes with all elements. The last element is a product
    of several generators in most groups.
    """
    chosen, reached = [], {group.identity_index}
    while len(reached) < group.order:
        chosen.append(max(set(range(group.order)) - reached, key=lambda g: (element_order(group, g), -g)))
        fresh = reached = reached | {chosen[-1]}
        while fresh:
            products = {int(group.cayley[a, b]) for a in fresh for b in chosen}
            fresh, reached = products - reached, reached | products
    return tuple(dict.fromkeys([*chosen, group.order - 1]))


def element_order(group: FiniteGroup, g: int) -> int:
    """Return the smallest positive power of an element that is the identity."""
    power, order = g, 1
    while power != group.identity_index:
        power, order = int(group.cayley[power, g]), order + 1
    return order


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normally distributed numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_clouds(
    dim: int,
    sizes: Iterable[int] = (6, 5),
    dtype: torch.dtype = torch.float64,
    *,
    features: int = 3,
    vectors: tuple[str, ...] = ("vel",),
    seed: int = 0,
) -> Batch:
    """Return clouds with features ``x``, positions, and further vectors of the points, all normally distributed."""
    generator = torch.Generator().manual_seed(seed)
    widths = {"x": features, "pos": dim, **dict.fromkeys(vectors, dim)}

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return Batch.from_data_list([Data(**{name: drawn(n, width) for name, width in widths.items()}) for n in sizes])


def random_rotation(dim: int, seed: int = 0, *, improper: bool = False) -> torch.Tensor:
    """Return a rotation ``[dim, dim]`` float64, or its product with a reflection."""
    matrix = SO(dim).sample(generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return matrix @ reflection(dim).elements[1] if improper else matrix


def moved(
    data: Data, matrix: torch.Tensor, shift: float | torch.Tensor = 0.7, vectors: tuple[str, ...] = ("vel",)
) -> Data:
    """Return clouds whose points are moved by x ↦ A x + t, and whose vectors by v ↦ A v."""
    other, matrix = data.clone(), matrix.to(data.pos)
    for name in ("pos", *(name for name in vectors if name in data)):
        other[name] = data[name] @ matrix.mT
    other.pos = other.pos + torch.as_tensor(shift).to(data.pos)
    return other


# An axis and a rotation in general position, so that no matrix entry is 0, 1/2 or 1 by chance.
OBLIQUE = (1.0, -2.0, 0.5)


def oblique_rotation() -> torch.Tensor:
    """Return a rotation of R^3, ``[3, 3]`` float64, about an axis that is not a coordinate axis."""
    hat = torch.tensor([[0.0, -0.3, 0.8], [0.3, 0.0, -0.5], [-0.8, 0.5, 0.0]], dtype=torch.float64)
    return torch.matrix_exp(hat)


GROUPS: dict[str, FiniteGroup] = {
    **{f"trivial{dim}": trivial(dim) for dim in (1, 2, 3)},
    **{f"C{n}": cyclic(n) for n in (1, 2, 3, 4, 5, 6, 8, 12)},
    **{f"D{n}": dihedral(n) for n in (1, 3, 4, 8)},
    "mirror1": reflection(1),
    "mirror2": reflection(2),
    "mirror2_x": reflection(2, axis=0),
    "mirror2_oblique": reflection(2, axis=(1.0, 2.0)),
    "mirror3": reflection(3),
    "mirror3_oblique": reflection(3, axis=OBLIQUE),
    "inversion2": inversion(2),
    "inversion3": inversion(3),
    "C4_about_z": cyclic_about(4),
    "C3_about_oblique": cyclic_about(3, OBLIQUE),
    "C5_about_oblique": cyclic_about(5, OBLIQUE),
    "C2_about_x": cyclic_about(2, (1.0, 0.0, 0.0)),
    "D2_about_z": dihedral_about(2),
    "D3_about_oblique": dihedral_about(3, OBLIQUE),
    "T": tetrahedral(),
    "O": octahedral(),
    "I": icosahedral(),
    "Th": pyritohedral(),
    "Td": full_tetrahedral(),
    "Oh": full_octahedral(),
    "Ih": full_icosahedral(),
    "C4_x_mirror1": direct_product(cyclic(4), reflection(1)),
    "D3_x_C2": direct_product(dihedral(3), cyclic(2)),
    "C4_mirror_inside": commuting_product(cyclic_about(4), reflection(3)),
    "S3": FiniteGroup.from_permutations(list(itertools.permutations(range(3))), "S3"),
    "O_conjugated": octahedral().conjugate(oblique_rotation(), "O'"),
}
"""All groups of the catalog, by the name that tests show. All of them are orthogonal."""

SMALL_GROUPS: dict[str, FiniteGroup] = {
    name: GROUPS[name]
    for name in ("trivial2", "C3", "C4", "C8", "D1", "D3", "D4", "mirror3", "C3_about_oblique", "T", "O")
}
"""A selection for tests of layers: 2D and 3D, abelian and not, with and without mirrors."""
