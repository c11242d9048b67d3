"""Golden files of groups, lifts and subsampling against ``lieattn.groups``, ``.spaces`` and ``.geometry``."""

import math

import numpy as np
import torch

from lieattn.geometry import AllPairs, farthest_by_distance
from lieattn.groups import SE, SO, RotationDilations, Translations, cyclic, rotation_from_quaternion
from lieattn.models import published_distance, published_pairs
from lieattn.spaces import Euclidean, Orbits
from tests.parity.lietransformer_files import Padded, compare, tensor

COORDINATES = {"SE2grid": "grid", "SE3quat": "quaternion", "SO3quat": "quaternion"}


def group_of(name):
    if name.startswith("T"):
        return Translations(int(name[1:]))
    return {
        "SO2": SO(2),
        "SO3": SO(3),
        "SE2": SE(2),
        "SE3": SE(3),
        "RxSO2": RotationDilations(2),
        "SE2grid": SE(2),
        "SE3shared": SE(3),
        "SE3quat": SE(3),
        "SO3quat": SO(3),
    }[name]


def space_of(name):
    group = group_of(name)
    return Euclidean(group) if group.is_affine else Orbits(group)


def check_explog(arrays, meta):
    group = group_of(meta["group"])
    coords = tensor(arrays["coords"])
    compare("exp_exact", group.exp(coords), arrays["exp_exact"], meta, meta["tol_exp"])
    log = group.log(tensor(arrays["matrix"]))
    compare("log_exact", log, arrays["log_exact"], meta, meta["tol_log"])
    turn = log[:, : log.shape[1] - group.dim] if group.is_affine else log
    angle = turn[:, 0] if group.dim == 2 else turn.norm(dim=1)
    compare("angle", angle, arrays["angle"], meta, meta["tol_log"])


def frames_of(arrays, meta, padded):
    """What the stabilizer contributes to each element, ``[points, fiber, k, k]``, or None where it is trivial."""
    name, samples = meta["group"], meta["lift_samples"]
    if name.startswith("SE3"):
        quaternions = np.broadcast_to(
            arrays["frame_quaternion"], (*arrays["positions"].shape[:2], *arrays["frame_quaternion"].shape[2:])
        )
        return rotation_from_quaternion(padded.points(quaternions))
    if name == "SE2":
        step = torch.arange(1, samples + 1, dtype=torch.float64) / samples
        offset = padded.points(arrays["grid_offset_fraction"])
        return SO(2).exp((2 * math.pi * (step + offset) - math.pi)[..., None])
    if name == "SE2grid":
        frames = cyclic(samples).elements
        return frames.expand(len(padded.cloud), -1, -1, -1)
    if name == "SO3":
        return SO(2).exp(padded.points(arrays["stabiliser_angle"])[..., None])
    if name == "SO3quat":
        return SO(2).exp(2 * padded.points(arrays["stabiliser_half_angle"]).double()[..., None])
    return None


def lifted(arrays, meta, positions=None):
    """Padded clouds, their elements ``[points, fiber, m, m]``, neighbors and our pairs in the file's convention."""
    padded = Padded(arrays["mask"])
    space = space_of(meta["group"])
    x = padded.points(arrays["positions"]) if positions is None else positions
    elements = space.lift(x, frames_of(arrays, meta, padded))
    neighbors = AllPairs()(x.detach(), padded.cloud)
    coordinates = COORDINATES.get(meta["group"], "published")
    pairs = published_pairs(space, elements, space.invariants(x), neighbors, coordinates)
    return padded, elements, neighbors, pairs


def stored_pairs(arrays, padded, neighbors, samples):
    """The file's [b, N, N, g] as ``[edges, fiber, fiber, g]``."""
    pair = tensor(arrays["pair"])
    clouds, size = arrays["mask"].shape
    pair = pair.reshape(clouds, size, samples, size, samples, -1).transpose(2, 3)
    target, source = neighbors.target, neighbors.source
    return pair[padded.cloud[target], padded.slot[target], padded.slot[source]]


def with_signs(pairs, stored, name):
    """Our quaternions with the file's signs: it has those of the absolute frames, ours have w >= 0."""
    if name not in ("SE3quat", "SO3quat"):
        return pairs
    agree = (pairs[..., :4] * stored[..., :4]).sum(-1, keepdim=True).sign()
    return torch.cat([agree * pairs[..., :4], pairs[..., 4:]], dim=-1)


def check_pairs(arrays, meta, positions=None):
    """Our pairs of the file's positions and draws, compared with the file's."""
    padded, elements, neighbors, pairs = lifted(arrays, meta, positions)
    stored = stored_pairs(arrays, padded, neighbors, meta["lift_samples"])
    pairs = with_signs(pairs, stored, meta["group"])
    compare("pair", pairs, stored, meta)
    return padded, elements, neighbors, pairs


def check_lift(arrays, meta):
    padded, elements, neighbors, _ = check_pairs(arrays, meta)
    samples, name = meta["lift_samples"], meta["group"]
    space = space_of(name)
    group, x = space.group, padded.points(arrays["positions"])
    if "element" in arrays:
        element = tensor(arrays["element"]).unflatten(1, (-1, samples))[padded.mask]
        if name.endswith("quat"):
            compare("rotation", group.linear(elements), rotation_from_quaternion(element[..., :4]), meta)
            if name == "SE3quat":
                twice = 2 * quaternion_product(element[..., 4:], element[..., :4] * _CONJUGATE)
                compare("translation", group.translation(elements), twice[..., 1:], meta)
        else:
            compare("element", group.log(elements), element, meta)
    if "orbit" in arrays:
        orbit = tensor(arrays["orbit"]).unflatten(1, (-1, samples))[padded.mask]
        compare("orbit", space.invariants(x)[:, None].expand_as(orbit), orbit, meta)
    if "distance" in arrays:
        pairs = published_pairs(space, elements, space.invariants(x), neighbors, "published")
        found = published_distance(space, pairs, meta["alpha"])
        stored = stored_pairs({**arrays, "pair": arrays["distance"][..., None]}, padded, neighbors, samples)
        compare("distance", found, stored[..., 0], meta)
    features = tensor(arrays["features_lifted"]).unflatten(1, (-1, samples))[padded.mask]
    compare("features_lifted", padded.points(arrays["features"])[:, None].expand_as(features), features, meta)
    mask = tensor(arrays["mask_lifted"]).unflatten(1, (-1, samples))
    assert torch.equal(padded.mask[:, :, None].expand_as(mask), mask), "mask_lifted"


_CONJUGATE = torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=torch.float64)


def quaternion_product(p, q):
    pw, qw, pv, qv = p[..., :1], q[..., :1], p[..., 1:], q[..., 1:]
    real = pw * qw - (pv * qv).sum(-1, keepdim=True)
    return torch.cat([real, pw * qv + qw * pv + torch.linalg.cross(pv, qv)], dim=-1)


def check_subsampling(arrays, meta):
    distance = tensor(arrays["distance"])
    count = round(meta["fraction"] * distance.shape[1])
    chosen = farthest_by_distance(distance, count, tensor(arrays["start"]), tensor(arrays["mask"]))
    assert torch.equal(chosen, tensor(arrays["chosen"])), "chosen"
