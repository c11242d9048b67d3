"""The table of Lie groups that tests share, including those of the documentation page, run from its text."""

import doctest
import math
import re
from pathlib import Path

import torch

from lieattn.groups import SE, SO, Dilations, E, LieGroup, O, RotationDilations, SemidirectProduct, Sim, Translations

PAGE = Path(__file__).parent.parent / "docs" / "your_own_group.md"


def code_of_page():
    """Return code blocks of the page, in order."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def classes_of_page():
    namespace = {"__name__": "your_own_group"}
    for block in code_of_page():
        if ">>>" not in block:
            exec(block, namespace)
    return namespace


def failures_of_page():
    """Run the examples of the page from the first line to the last, and return failed and attempted counts."""
    namespace = {"__name__": "your_own_group"}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for number, block in enumerate(code_of_page()):
        if ">>>" in block:
            test = doctest.DocTestParser().get_doctest(block, namespace, f"{PAGE.name}[{number}]", str(PAGE), 0)
            runner.run(test, clear_globs=False)
            namespace = test.globs
        else:
            exec(block, namespace)
    return runner.failures, runner.tries


class Heisenberg(LieGroup):
    """The Heisenberg group on R^3 by left multiplication: (x, y, z) goes to (x + p, y + q, z + r + p y)."""

    def __init__(self):
        super().__init__("Heisenberg", dim=3, size=4, algebra_dim=3)

    def hat(self, a):
        matrix = torch.zeros(*a.shape[:-1], 4, 4, dtype=a.dtype)
        matrix[..., :3, 3] = a
        matrix[..., 2, 1] = a[..., 0]
        return matrix

    def vee(self, matrix):
        return matrix[..., :3, 3]

    def log(self, g):
        nilpotent = g - self.identity(g)
        return self.vee(nilpotent - nilpotent @ nilpotent / 2)

    def draw(self, shape, generator):
        return self.exp(torch.randn(*shape, 3, generator=generator, dtype=torch.float64))


OWN = classes_of_page()

LIE_GROUPS = {
    group.name: group
    for group in [
        *(SO(2), SO(3), O(2), O(3)),
        *(Dilations(1), Dilations(3), RotationDilations(2), RotationDilations(3)),
        *(Translations(2), Translations(3)),
        *(SE(2), SE(3), E(2), E(3), Sim(2), Sim(3)),
        SemidirectProduct(Dilations(2)),
        *(OWN["AboutVertical"](), SemidirectProduct(OWN["AboutVertical"]()), OWN["Squeeze"](), Heisenberg()),
    ]
}
"""All Lie groups, those of the catalog and those that a user would write, by name."""

OWN_NAMES = {"SO(2)_z", "R^3 x| SO(2)_z", "squeeze", "Heisenberg"}


def turning(group):
    """Return the coordinates of the Lie algebra that belong to a rotation, if any."""
    if isinstance(group, SemidirectProduct):
        return turning(group.stabilizer)
    if isinstance(group, RotationDilations):
        return slice(1, group.algebra_dim)
    return slice(0, group.algebra_dim if isinstance(group, SO | O) or group.name == "SO(2)_z" else 0)


def turns(group):
    part = turning(group)
    return part.stop > part.start


def with_angle(group, a, angle):
    """Return coordinates with the rotation part scaled to an angle; unchanged for groups without rotations."""
    part = turning(group)
    a = a.clone()
    if turns(group):
        a[..., part] *= angle / a[..., part].norm(dim=-1, keepdim=True)
    return a


ANGLES = (1e-12, 1e-8, 1e-5, 1e-3, 0.02, 0.4, 0.47, 0.99, 1.01, 1.5, 2.5, 3.0, 3.1)
NEAR_PI = tuple(math.pi - d for d in (1e-2, 1e-3, 1e-4, 1e-6, 1e-8))


def algebra_cases(group, angles=ANGLES + NEAR_PI, seed=0):
    """Return coordinates ``[cases, algebra_dim]`` float64: zero, small ones, and some of each angle."""
    generator = torch.Generator().manual_seed(seed)

    def normal(count):
        return torch.randn(count, group.algebra_dim, generator=generator, dtype=torch.float64)

    cases = [torch.zeros(1, group.algebra_dim, dtype=torch.float64)]
    cases += [scale * normal(2) for scale in (1e-300, 1e-12, 1e-8, 1e-4, 1e-2)]
    cases += [with_angle(group, normal(2), angle) for angle in angles]
    cases += [with_angle(group, 0.01 * normal(1), angle) for angle in angles]
    return torch.cat(cases)


def elements(group, count=40, seed=0, dtype=torch.float64):
    """Return random elements, some near the identity and some near half turns."""
    generator = torch.Generator().manual_seed(seed)
    near = group.exp(algebra_cases(group, seed=seed)[:: max(1, 60 // count)])
    return torch.cat([group.sample(count, generator=generator, dtype=torch.float64), near]).to(dtype)
