"""Compare golden files of groups, lifts and subsampling with ``lieattn.groups``, ``.spaces`` and ``.geometry``."""

import math

import numpy as np
import torch

from lieattn.geometry import AllPairs, GivenFrames, farthest_by_distance, lift
from lieattn.groups import SE, SO, RotationDilations, SemidirectProduct, Translations, cyclic, rotation_from_quaternion
from lieattn.models.published import PublishedCoordinates
from lieattn.spaces import Euclidean, Orbits
from tests.parity.lietransformer_files import Padded, compare, tensor

COORDINATES = {"SE2grid": "grid", "SE3quat": "quaternion", "SO3quat": "quaternion"}
ANGLES = {"SO2": 0, "RxSO2": 1}  # index of the angle, for groups where it is a separate coordinate
_AT_CUT = 1e-6
_NEXT_TO_ORIGIN = 1e-150


def group_of(name):
    bare = name.removesuffix("grid").removesuffix("quat").removesuffix("shared")
    families = {"RxSO": RotationDilations, "SE": SE, "SO": SO, "T": Translations}
    for family, make in families.items():
        if bare.startswith(family) and bare.removeprefix(family).isdigit():
            return make(int(bare.removeprefix(family)))
    raise AssertionError(f"unknown group {name!r}; known are {sorted(families)} with a dimension")


def space_of(name):
    group = group_of(name)
    return Euclidean(group) if group.is_affine else Orbits(group)


def same_turn(found, expected, place):
    """Shift the angle of coordinates by full turns to that of the file. ``place`` is None if there is no angle."""
    if place is None:
        return found
    turns = torch.zeros_like(found)
    turns[..., place] = ((expected - found)[..., place] / (2 * math.pi)).round()
    return found + 2 * math.pi * turns


def check_explog(arrays, meta):
    name = meta["group"]
    group = group_of(name)
    exact = tensor(arrays.get("exp_exact", arrays.get("matrix")))
    compare("exp_exact", group.exp(tensor(arrays["coords"])), exact, meta, meta["tol_exp"])
    log = group.log(tensor(arrays.get("matrix", exact)))
    expected = tensor(arrays.get("log_exact", arrays["coords"]))
    place = ANGLES.get(name)
    log = same_turn(log, expected, place)
    turn, known = (x[:, : x.shape[1] - group.dim] if group.is_affine else x for x in (log, expected))
    flat = group.dim == 2 and turn.shape[1] > 0
    angles = [x[:, place or 0] if flat else x.norm(dim=1) for x in (turn, known)]
    # At the cut several logarithms represent the same element.
    cut = (angles[1].abs() > math.pi - _AT_CUT) & ((log - expected).abs().amax(1) > meta["tol_log"])
    compare("log_exact", log[~cut], expected[~cut], meta, meta["tol_log"])
    compare("log_exact at the cut", group.exp(log[cut]), group.exp(expected[cut]), meta, meta["tol_log"])
    if "angle" in arrays:
        stored = tensor(arrays["angle"])
        found = same_turn(angles[0][:, None], stored[:, None], 0 if flat else None)
        compare("angle", found[:, 0], stored, meta, meta["tol_log"])


def frames_of(arrays, meta, padded):
    """Return the stabilizer part of each element, ``[points, fiber, k, k]``, or None if the stabilizer is trivial."""
    name, samples = meta["group"], meta["lift_samples"]

    def draws(array):
        """Return the draws of each point; a file may have one for all points of a cloud."""
        return padded.points(np.broadcast_to(arrays[array], (*padded.mask.shape, *arrays[array].shape[2:])))

    if name == "SE2grid":
        return cyclic(samples).elements.expand(len(padded.cloud), -1, -1, -1)
    if "frame_quaternion" in arrays:
        return rotation_from_quaternion(draws("frame_quaternion"))
    if "grid_offset_fraction" in arrays:
        step = torch.arange(1, samples + 1, dtype=torch.float64) / samples
        return SO(2).exp((2 * math.pi * (step + draws("grid_offset_fraction")) - math.pi)[..., None])
    if "stabiliser_angle" in arrays:
        return SO(2).exp(draws("stabiliser_angle")[..., None])
    if "stabiliser_half_angle" in arrays:
        return SO(2).exp(2 * draws("stabiliser_half_angle")[..., None])
    return None


def positions(arrays, meta):
    """Return the positions of the file. Those at the origin get the direction of the first axis for rotations."""
    x = tensor(arrays["positions"])
    if isinstance(group_of(meta["group"]), SO):
        x[..., 0] = torch.where((x == 0).all(-1), _NEXT_TO_ORIGIN, x[..., 0])
    return x


def lifted(arrays, meta):
    """Return padded clouds, their graph, and pairs ``[edges, fiber, fiber, k]`` in the convention of the file."""
    padded = Padded(arrays["mask"])
    x, frames = positions(arrays, meta)[padded.mask], frames_of(arrays, meta, padded)
    frames = None if frames is None else GivenFrames(frames)
    graph = lift(x, frames, AllPairs(), space_of(meta["group"]), batch=padded.cloud)
    return padded, graph, pairs_of(graph, COORDINATES.get(meta["group"], "log"))


def pairs_of(graph, convention):
    """Return the coordinates of the authors for every edge."""
    pairs, row = PublishedCoordinates(convention)(graph), graph.relative.row
    return pairs if row is None else pairs[row]


def stored_pairs(arrays, padded, neighbors, samples):
    """Convert [b, N, N, g] of the file to ``[edges, fiber, fiber, g]``."""
    pair = tensor(arrays["pair"])
    clouds, size = arrays["mask"].shape
    pair = pair.reshape(clouds, size, samples, size, samples, pair.shape[-1]).transpose(2, 3)
    target, source = neighbors.target, neighbors.source
    return pair[padded.cloud[target], padded.slot[target], padded.slot[source]]


def as_stored(pairs, stored, name):
    """Convert pairs to the choice of the file.

    The signs of its quaternions are those of the absolute frames, while the library has w >= 0.
    """
    if name in ("SE3quat", "SO3quat"):
        agree = (pairs[..., :4] * stored[..., :4]).sum(-1, keepdim=True).sign()
        return torch.cat([agree * pairs[..., :4], pairs[..., 4:]], dim=-1)
    return same_turn(pairs, stored, ANGLES.get(name))


def check_pairs(arrays, meta):
    """Compute pairs from the positions and draws of the file, in its choice of signs and turns, and compare them."""
    padded, graph, pairs = lifted(arrays, meta)
    if "pair" in arrays:
        stored = stored_pairs(arrays, padded, graph.neighbors, meta["lift_samples"])
        pairs = as_stored(pairs, stored, meta["group"])
        compare("pair", pairs, stored, meta)
    return padded, graph, pairs


def check_lift(arrays, meta):
    padded, graph, _ = check_pairs(arrays, meta)
    samples, name = meta["lift_samples"], meta["group"]
    space, elements, x = graph.space, graph.elements, graph.pos
    group = space.group

    def stored(array):
        return tensor(arrays[array]).unflatten(1, (-1, samples))[padded.mask]

    if "element" in arrays:
        element = stored("element")
        if name.endswith("quat"):
            compare("rotation", group.linear(elements), rotation_from_quaternion(element[..., :4]), meta)
            if name == "SE3quat":
                twice = 2 * quaternion_product(element[..., 4:], element[..., :4] * _CONJUGATE)
                compare("translation", group.translation(elements), twice[..., 1:], meta)
        else:
            compare("element", same_turn(group.log(elements), element, ANGLES.get(name)), element, meta)
    if "orbit" in arrays and space.num_invariants:
        orbit = stored("orbit")
        compare("orbit", space.invariants(x)[:, None].expand_as(orbit), orbit, meta)
    if "distance" in arrays:
        found = published_distance(space, pairs_of(graph, "log"), meta["alpha"])
        distance = stored_pairs({**arrays, "pair": arrays["distance"][..., None]}, padded, graph.neighbors, samples)
        compare("distance", found, distance[..., 0], meta)
    if "features_lifted" in arrays:
        features = stored("features_lifted")
        compare("features_lifted", padded.points(arrays["features"])[:, None].expand_as(features), features, meta)
    if "mask_lifted" in arrays:
        mask = tensor(arrays["mask_lifted"]).unflatten(1, (-1, samples))
        assert torch.equal(padded.mask[:, :, None].expand_as(mask), mask), "mask_lifted"


def published_distance(space, pairs, alpha):
    """Return the distance ``[*]`` by which the authors choose neighbors, from logarithms.

    It is alpha times the rotation plus 1 - alpha times the translation of the logarithm or the difference of the
    orbits. For the group of translations the distance is only alpha times the length.
    """
    group = space.group
    log = pairs[..., : group.algebra_dim]
    invariants = pairs[..., group.algebra_dim :]
    if isinstance(group, SemidirectProduct):
        turn, shift = log[..., : -group.dim], log[..., -group.dim :].norm(dim=-1)
        return alpha * turn.norm(dim=-1) + (1 - alpha) * shift
    if isinstance(group, RotationDilations):
        return alpha * log[..., 1:].norm(dim=-1) + (1 - alpha) * log[..., 0].abs()
    if isinstance(group, SO):
        mine, theirs = invariants.chunk(2, dim=-1)
        apart = (mine - theirs).norm(dim=-1)
        if group.dim == 2:
            apart = apart / ((mine + theirs).sum(dim=-1) + 1e-3)
        return alpha * log.norm(dim=-1) + (1 - alpha) * apart
    return alpha * log.norm(dim=-1)


_CONJUGATE = torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=torch.float64)


def quaternion_product(p, q):
    pw, qw, pv, qv = p[..., :1], q[..., :1], p[..., 1:], q[..., 1:]
    real = pw * qw - (pv * qv).sum(-1, keepdim=True)
    return torch.cat([real, pw * qv + qw * pv + torch.linalg.cross(pv, qv)], dim=-1)


def check_subsampling(arrays, meta):
    distance, mask = tensor(arrays["distance"]), tensor(arrays["mask"])
    count = round(meta["fraction"] * distance.shape[1]) if "fraction" in meta else arrays["chosen"].shape[1]
    chosen = farthest_by_distance(distance, count, tensor(arrays["start"]), mask)
    # The files choose points again once the others coincide with chosen ones: of equal distances the first wins.
    chosen = torch.where(_coincident(distance, chosen), mask.long().argmax(1, keepdim=True), chosen)
    assert torch.equal(chosen, tensor(arrays["chosen"])), "chosen"


def _coincident(distance, chosen):
    """Which of the chosen points ``[clouds, count]`` are at distance 0 of one chosen before."""
    clouds = torch.arange(len(chosen))[:, None, None]
    pairs = distance[clouds, chosen[:, None], chosen[:, :, None]] == 0
    return pairs.tril(-1).any(2)
