"""Comparison of neighbor searches with the distances of all pairs."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from lieattn.geometry import AllPairs, Nearest, Radius
from tests.fuzz._strategies import points
from tests.fuzz._target import Finding, Target, Verdict

_SLACK = 2e-5  # relative tolerance: points at the radius may or may not be neighbors


@st.composite
def _cases(draw: st.DrawFn):
    neighborhood = draw(
        st.one_of(
            st.builds(AllPairs, include_self=st.booleans()),
            st.builds(Radius, st.sampled_from([1e-6, 0.3, 1.0, 2.5, 1e6]), include_self=st.booleans()),
            st.builds(Nearest, st.integers(1, 5), include_self=st.booleans()),
        )
    )
    return neighborhood, *draw(points(draw(st.integers(1, 4))))


def _check(case) -> Finding | Verdict:
    neighborhood, pos, batch = case
    found = neighborhood(pos, batch)
    size = len(pos)
    got = torch.zeros(size, size, dtype=torch.int64)
    got.index_put_((found.target, found.source), torch.ones(found.num_edges, dtype=torch.int64), accumulate=True)
    allowed = batch[:, None] == batch
    if not neighborhood.include_self:
        allowed = allowed & ~torch.eye(size, dtype=torch.bool)
    if bool((got > 1).any()) or bool((got.bool() & ~allowed).any()):
        return Finding(Verdict.SILENT, f"an edge twice, or across clouds: {case}")
    distance = (pos.double()[:, None] - pos.double()).norm(dim=-1)
    if isinstance(neighborhood, AllPairs):
        right = bool((got.bool() == allowed).all())
    elif isinstance(neighborhood, Radius):
        surely = allowed & (distance <= neighborhood.radius)
        perhaps = allowed & (distance <= neighborhood.radius * (1 + _SLACK))
        right = bool((got.bool() | ~surely).all() and (perhaps | ~got.bool()).all())
    else:
        loops = torch.eye(size, dtype=torch.bool)
        right = bool((got.diagonal() == int(neighborhood.include_self)).all())
        right = right and _nearest_are_right(got.bool() & ~loops, allowed & ~loops, distance, neighborhood.k)
    return Verdict.CORRECT if right else Finding(Verdict.SILENT, f"wrong neighbors: {case}")


def _nearest_are_right(got, allowed, distance, k: int) -> bool:
    """Check that each point has min(k, available) neighbors, and that no other point is nearer than one of them."""
    if not bool((got.sum(1) == allowed.sum(1).clamp(max=k)).all()):
        return False
    farthest = torch.where(got, distance, 0).amax(1) if len(got) else distance.new_zeros(0)
    left_out = torch.where(allowed & ~got, distance, torch.inf)
    return bool((left_out >= farthest[:, None] * (1 - _SLACK)).all())


TARGETS = {"neighbors": Target("neighbor searches", _cases(), _check, long=10_000)}
