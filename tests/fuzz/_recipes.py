"""All public entry points of the library with valid arguments, which are shared by name or specific to one of them."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import translate
from typing import Any

import numpy as np
import torch
from ase import Atoms
from torch import nn
from torch_geometric.data import Batch, Data

import lieattn_datasets
from lieattn import geometry, groups, models, ops, reps, spaces, train
from lieattn.geometry import AllPairs, PixelSquare, Radius, lift, pixel_positions, point_clouds
from lieattn.groups import SE, SO, cyclic, octahedral
from lieattn.models import AttentionOptions
from lieattn.nn import (
    FiberToIrreps,
    GridGroupConvolution,
    GroupLinear,
    GroupSelfAttention,
    InvariantHead,
    IrrepsToFiber,
    LieSelfAttention,
    VectorHead,
)
from lieattn.nn.relative import (
    FourierFeatures,
    MLPEncoding,
    NetworkKernel,
    PerHeadMLP,
)
from lieattn.ops import RelativeTerms
from lieattn.train._checkpoint import describe_input

PARTS = ("groups", "spaces", "reps", "geometry", "ops", "nn", "nn.relative", "models", "train", "certify", "viz")
PARTS = (*PARTS, "compare", "bench")
ALIASES = {
    "points": ("pos", "data"),
    "data": ("points", "images", "pos", "x", "batch", "features", "momentum"),
    "pos": ("points",),
    "batch": ("data", "pos", "points", "x"),
    "images": ("data",),
    "graph": ("x", "values", "frames", "terms", "neighbors"),
    "parts": ("terms",),
    "grid": ("x", "margin"),
    "x": ("graph", "values"),
    "group": ("encoding", "graph", "points"),
    "encoding": ("terms", "channels"),
    "input": ("x",),
    "volumes": ("weights",),
    "elements": ("matrices",),
    "matrices": ("elements",),
    "translation": ("linear",),
    "generators": ("matrices",),
    "permutations": ("matrices",),
    "first": ("second",),
    "allowed": ("group",),
    "distance": ("start",),
    "start": ("distance",),
    "padded": ("mask",),
    "flat": ("mask",),
    "frames": ("points",),
    "dim": ("space",),
    "smiles": ("SMILES",),
    "start_time": ("times",),
    "end_time": ("times",),
}
"""Other names of arguments that messages may use, such as those of their tensors."""

torch.manual_seed(0)
C4 = cyclic(4)
POS = torch.randn(6, 2)
POS3 = torch.randn(6, 3)
CLOUDS = point_clouds(POS)
GRAPH = lift(POS, C4, Radius(1.5))
NEIGHBORS = GRAPH.neighbors
EDGES = NEIGHBORS.num_edges
COORDINATES = GRAPH.relative.num_coordinates
FIELD = torch.randn(6, 4, 4)
SIGNAL = torch.randn(6, 4, 2, 3)
GRID = torch.tensor([[4, 4]])
PIXELS = point_clouds(pixel_positions(4, 4), grid=GRID)
ON_PIXELS = lift(PIXELS, C4, PixelSquare(3))
IMAGE_DATA = lieattn_datasets.image_to_data(np.random.rand(4, 4))
MOVING = Data(
    x=torch.randn(6, 4), pos=POS, vel=POS, z=torch.tensor([1, 6, 7, 8, 9, 1]), batch=torch.zeros(6, dtype=torch.int64)
)
CHARGED = Data(**MOVING.to_dict(), charge=torch.ones(1))
ON_GRID = torch.randn(2, 4, 4, 6, 6)  # [images, channels, order, rows, columns]
DATA = Data(x=torch.randn(6, 4), pos=POS, batch=torch.zeros(6, dtype=torch.int64))
BATCH = Batch.from_data_list([Data(x=DATA.x, pos=POS, y=torch.tensor([0]))])
DATA3 = Data(x=torch.randn(6, 4), pos=POS3, batch=torch.zeros(6, dtype=torch.int64))
ROTATION = SO(3).sample(5, generator=torch.Generator().manual_seed(0)).float()
EDGE_INDEX = torch.tensor([[0, 1, 2], [1, 2, 0]])
IMAGES = torch.rand(2, 1, 28, 28)


IMAGE_MODELS = ("AffineSelfConvNet", "AttentiveCNN", "AttentiveAllCNN", "AttentiveResNet", "AttentiveDenseNet")
ATTENTIVE = models.AttentiveCNN(C4, channels=2, attention="pose", spatial_size=3).eval()


LARGE = torch.rand(1, 3, 96, 96)


def gsa(**options: Any) -> nn.Module:
    """Return a small network on points with four features."""
    small = {"neighborhood": AllPairs(), "channels": 8, "blocks": (1,), "heads": 2, "in_channels": 4, "out_channels": 3}
    return models.GSANet(**{"frames": C4, **small, **options}).eval()


def edge_terms() -> RelativeTerms:
    """Return the output of an edge network."""
    return RelativeTerms(psi=torch.randn(EDGES, 4, 1, 1, 4))


COMMON: dict[str, Any] = {
    "group": C4,
    "in_channels": 4,
    "out_channels": 4,
    "channels": 4,
    "heads": 2,
    "dim": 2,
    "hidden": 4,
    "coordinates": COORDINATES,
    "x": FIELD,
    "graph": GRAPH,
    "data": DATA,
    "pos": POS,
    "batch": torch.zeros(6, dtype=torch.int64),
    "dtype": torch.float32,
    "points": POS,
    "size": 3,
    "count": 2,
    "generator": None,
    "frames": C4,
    "clouds": CLOUDS,
    "neighborhood": Radius(1.5),
    "rep": reps.Vector(2),
    "positions": FourierFeatures(4),
    "space": spaces.Euclidean(groups.SemidirectProduct(C4)),
    "neighbors": NEIGHBORS,
    "mask": torch.ones(1, 6, dtype=torch.bool),
    "grid": GRID,
    "like": torch.zeros(1),
    "argument": "group",
    "first": C4,
    "factor": 2.0,
    "offsets": torch.cartesian_prod(torch.arange(-1.0, 2), torch.arange(-1.0, 2)),
    "query": SIGNAL,
    "key": SIGNAL,
    "value": SIGNAL,
    "kernel": torch.randn(4, 5, 3),
    "relative": C4.relative_index,
    "vectors": torch.randn(6, 2),
    "n": 4,
    "g": torch.eye(2).expand(5, 2, 2).clone(),
    "padded": POS[None],
    "flat": POS,
    "name": "silu",
    "kept": torch.tensor([0, 2]),
    "cell": torch.tensor([0, 0, 1, 1, 2, 2]),
    "num_cells": 3,
    "images": IMAGES,
    "root": "nowhere",
    "path": "nowhere",
    "checkpoint_path": "nowhere",
    "seed": 0,
    "angle": 0.5,
    "mean": 0.5,
    "std": 2.0,
}


OF_CLASS: dict[str, dict[str, Any]] = {
    "groups.O": {"dim": 3, "count": 24},
    "groups.SO": {"dim": 3, "count": 24, "g": ROTATION},
    "groups.Dilations": {"points": torch.randn(5, 2), "vectors": torch.randn(5, 2), "a": torch.randn(5, 1)},
    "groups.RotationDilations": {"a": torch.randn(5, 2)},
    "groups.FiniteGroup": {"f": FIELD, "by": torch.eye(2), "count": 4},
    "groups.SemidirectProduct": {"linear": 1, "translation": torch.randn(2), "g": torch.eye(3)},
    "groups.Translations": {"translation": torch.randn(2)},
    "spaces.Euclidean": {"x": POS, "h": torch.eye(2).expand(6, 1, 2, 2).clone()},
    "spaces.Orbits": {"group": SO(3)},
    "reps": {"rotation": ROTATION, "features": torch.randn(5, 3)},
}

_LIE = {"neighborhood": Radius(1.5), "channels": 4, "layers": 1, "in_channels": 4, "space": spaces.Euclidean(SE(2))}
_LIE |= {"frames": geometry.PrincipalFrames()}
_SITES = geometry.Sites(CLOUDS, NEIGHBORS, spaces.Euclidean(SE(2)))
_TO_IRREPS, _TO_FIBER = FiberToIrreps(octahedral(), 4), IrrepsToFiber(octahedral(), 4)
_TO_FIBER_LINEAR = GroupLinear(octahedral(), 4, 4).to_irreps()
_PHASE = {"position": POS, "momentum": torch.randn(6, 2), "mass": torch.rand(6) + 1, "times": torch.tensor([0.0, 0.1])}
_KERNELS = {"x": torch.randn(2, 4, 1, 6, 6), "kernels": torch.randn(3, 4, 4, 1, 3, 3)}
_MLP = PerHeadMLP(2, 4, 5)
_IRREPS = groups.real_irreps(C4)
_EDGE_NETWORK = {
    "seen": torch.randn(6, 2, 3),
    "shared": torch.randn(6, 4),
    "weight": torch.randn(6),
    "first": torch.randn(4, 3),
    "second": (torch.randn(4, 4), torch.randn(4)),
}
_STATE = {
    "data": Data(
        pos=POS,
        x=torch.rand(6, 1) + 1,
        vel=torch.randn(6, 2),
        mass=torch.rand(6) + 1,
        time=torch.tensor([[0.0, 0.1]]),
        batch=torch.zeros(6, dtype=torch.int64),
    )
}
_PAIR = {"charge": np.ones((2, 3)), "pos": np.random.rand(2, 3, 3), "vel": np.random.rand(2, 3, 3)}
_SPRINGS = {
    "mass": np.ones(3),
    "stiffness": np.ones(3),
    "position": np.random.rand(3, 2),
    "momentum": np.random.rand(3, 2),
    "times": np.linspace(0, 1, 3),
    "pos": np.random.rand(3, 2),
}

OWN: dict[str, dict[str, Any]] = {
    "groups.FiniteGroup": {"name": "G", "elements": C4.elements},
    "groups.FiniteGroup.from_matrices": {"matrices": C4.elements},
    "groups.FiniteGroup.from_permutations": {"permutations": [[0, 1, 2], [1, 2, 0], [2, 0, 1]]},
    "groups.FiniteGroup.generate": {"generators": C4.elements[1:2]},
    "groups.FiniteGroup.index": {"matrices": C4.elements},
    **{
        f"groups.FiniteGroup.{name}": {"g": 1} for name in ("act", "act_vectors", "translate", "permutation", "element")
    },
    "groups.SemidirectProduct": {"stabilizer": C4},
    "groups.commuting_product": {"first": groups.cyclic_about(4), "second": groups.inversion(3)},
    "groups.direct_product": {"first": C4, "second": groups.reflection(1)},
    "groups.quaternion_from_rotation": {"rotation": ROTATION},
    "groups.rotation_from_quaternion": {"q": torch.nn.functional.normalize(torch.randn(5, 4), dim=1)},
    "groups.affine": {"linear": torch.eye(2), "translation": torch.zeros(2)},
    "reps.DirectSum": {"parts": (reps.Scalar(), reps.Vector(3))},
    "reps.DirectSum.act": {"features": torch.randn(5, 4)},
    "reps.Irreps": {"spec": "2x0e + 1o"},
    "reps.Multiple": {"part": reps.Vector(3)},
    "reps.Permutation": {"group": groups.cyclic(2), "permutations": [[0, 1], [1, 0]]},
    "reps.SymmetricTensor.to_tensor": {"features": torch.randn(5, 6)},
    "reps.SymmetricTensor.from_tensor": {"tensor": torch.eye(3).expand(5, 3, 3).clone()},
    "reps.check_orthogonal": {"matrices": ROTATION, "argument": "matrices"},
    "reps.is_orthogonal": {"matrices": ROTATION},
    "reps.to_irreps": {"rep": reps.Vector(3)},
    "geometry.Given": {"edge_index": EDGE_INDEX},
    "geometry.GivenFrames": {"frames": torch.eye(2).expand(6, 1, 2, 2).clone()},
    "geometry.Nearest": {"k": 2},
    "geometry.Radius": {"radius": 1.5},
    "geometry.FiniteFrames.__call__": {"sites": _SITES},
    "geometry.GivenFrames.__call__": {"sites": _SITES},
    "geometry.PrincipalFrames.__call__": {"sites": _SITES},
    "geometry.PrincipalFrames.degenerate": {"sites": _SITES},
    "geometry.SampledFrames.__call__": {"sites": _SITES},
    "geometry.ScaleFrames.__call__": {"length": 1.5},
    "geometry.LiftedGraph.seen_in_frames": {"vectors": POS[:, None]},
    "geometry.pieces": {"parts": 4},
    "geometry.Piece": {"points": torch.arange(6), "own": torch.arange(6)},
    "geometry.Piece.rows": {"x": torch.randn(6, 4), "found": geometry.pieces(GRAPH, 4)},
    "geometry.LiftedGraph.at": {"pos": POS, "deformation": torch.eye(2)[None]},
    "geometry.LiftedGraph.keeping": {"points": torch.tensor([0, 2]), "clouds": point_clouds(POS[[0, 2]])},
    "geometry.LiftedGraph.select_edges": {"kept": torch.arange(0, EDGES, 2)},
    "geometry.LiftedGraph.to": {"device": "cpu"},
    "geometry.coarsen": {"points": POS, "fraction": 0.5},
    "geometry.Coarse": {
        "clouds": point_clouds(POS),
        "points": torch.arange(6),
        "cells": torch.arange(6),
        "num_points": 6,
    },
    "geometry.Coarse.pool": {"x": torch.randn(6, 4)},
    "geometry.Coarse.spread": {"x": torch.randn(6, 4)},
    "geometry.crop": {"margin": 1},
    "geometry.farthest_by_distance": {"distance": torch.cdist(POS, POS)[None], "start": torch.tensor([0])},
    "geometry.farthest_points": {"count": 2},
    "ops.fused_kernel": {"device": torch.device("cpu")},
    "ops.activation": {"argument": "activation", "name": "silu"},
    "ops.attentive_convolution": {**_KERNELS, "channel": (torch.randn(3, 4, 1, 2, 4), torch.randn(3, 4, 1, 4, 2))},
    "ops.attentive_sums": {
        "terms": RelativeTerms(psi=torch.randn(EDGES, 4, 4, 3, 4)),
        "channel": (torch.randn(3, 4, 4, 2, 4), torch.randn(3, 4, 4, 4, 2)),
        "spatial": RelativeTerms(psi=torch.randn(EDGES, 4, 4, 3, 2)),
    },
    "ops.convolution_responses": _KERNELS,
    "ops.residual_branch": {
        "responses": torch.randn(2, 3, 4, 4, 1, 4, 4),
        "maps": ops.AttentionMaps(torch.rand(2, 3, 4, 4, 1, 1, 1)),
    },
    "ops.tied_linear": {"x": torch.randn(6, 4, 3)},
    "ops.fourier_linear": {
        "x": torch.randn(6, 4, 3),
        "fourier": torch.eye(4),
        "irreps": [irrep.matrices.float() for irrep in _IRREPS],
        "copies": [irrep.copies for irrep in _IRREPS],
    },
    "ops.fourier_pays": {"order": 12, "degrees": [1, 2, 3]},
    "ops.head_networks": {"rows": torch.randn(6, 4), "weights": list(_MLP.weights), "biases": list(_MLP.biases)},
    "ops.edge_units": _EDGE_NETWORK,
    "ops.edge_kernels": {**_EDGE_NETWORK, "maps": [torch.randn(3, 4)]},
    "ops.edge_messages": {
        "units": torch.randn(EDGES, 4, 5),
        "weight": torch.randn(3, 5),
        "x": torch.randn(NEIGHBORS.num_points, 4, 3),
        "neighbors": NEIGHBORS,
    },
    "ops.edge_moments": {"arrows": torch.randn(EDGES, 3), "functions": torch.randn(EDGES, 4), "neighbors": NEIGHBORS},
    "ops.RelativeTerms": {"psi": SIGNAL},
    "ops.RelativeTerms.plus": {"other": RelativeTerms(beta=SIGNAL)},
    "nn.AttentiveConvolution": {"attention": LieSelfAttention(4, COORDINATES, heads=2)},
    "nn.DipoleHead": {"dim": 2},
    "nn.PolarizabilityHead": {"dim": 3},
    "nn.PolarizabilityHead.forward": {"graph": lift(POS3, groups.cyclic_about(4), AllPairs())},
    "nn.RotationHead.forward": {"graph": lift(POS3, groups.cyclic_about(4), AllPairs())},
    "nn.FieldBatchNorm.forward": {"input": FIELD},
    "nn.Heads": {"heads": {"numbers": InvariantHead(4, 2)}},
    "nn.InvariantHead": {"outputs": 3},
    "nn.FrameMessages.forward": {"graph": replace(GRAPH, terms=edge_terms())},
    "nn.LiftingConvolution.forward": {"x": edge_terms().psi},
    "nn.GridPool.forward": {"x": torch.randn(16, 4, 4), "graph": PIXELS},
    **{
        f"nn.{name}.forward": {"x": ON_GRID}
        for name in ("GridAttentiveConvolution", "GridGroupConvolution", "GridInputAttention", "GridPoseAttention")
    },
    **{
        f"nn.{name}.{method}": {"x": ON_GRID}
        for name in ("GridAttentiveConvolution", "GridInputAttention", "GridPoseAttention")
        for method in ("attend", "responses", "checked")
    },
    **{f"nn.{name}.forward": {"x": ON_GRID[:, :, 0]} for name in ("GridAttentiveLifting", "GridLiftingConvolution")},
    **{f"nn.{name}GroupConvolution": {"kernel": NetworkKernel(C4, 4, 3)} for name in ("", "Attentive")},
    "nn.GroupSelfAttention": {"encoding": MLPEncoding(C4, 2), "pattern": "joint", "heads": 2},
    "nn.LieBlock": {"attention": LieSelfAttention(4, COORDINATES, heads=2)},
    "nn.PreNormBlock": {"attention": GroupSelfAttention(C4, 4, 4)},
    "nn.LiftingSelfAttention.forward": {"x": torch.randn(6, 4)},
    "nn.LiftingAffineSelfConvolution.forward": {"x": torch.randn(6, 4)},
    "nn.act_on_grid": {"h": 1, "x": ON_GRID},
    "nn.from_grid": {"x": ON_GRID},
    "nn.to_grid": {"x": torch.randn(16, 4, 4)},
    "nn.grid_images": {"data": Data(x=torch.randn(16, 4), pos=pixel_positions(4, 4), grid=GRID)},
    "nn.GroupLinear.from_irreps": {"linear": _TO_FIBER_LINEAR, "source": _TO_IRREPS, "target": _TO_FIBER},
    "nn.ZonalLinear": {"directions": torch.eye(3), "x": torch.randn(6, 3, 4)},
    "nn.FiberToIrreps": {"group": octahedral(), "x": torch.randn(6, 24, 4)},
    "nn.IrrepsToFiber": {"group": octahedral(), "x": torch.randn(6, _TO_FIBER.irreps.dim)},
    "nn.VectorHead": {"dim": 2},
    "nn.LieSelfAttention": {"heads": 2},
    "nn.lift_field": {"values": torch.randn(6, 2)},
    "nn.project_field": {"values": torch.randn(6, 4, 2)},
    "nn.relative.CoordinateNetwork.forward": {"coordinate": torch.randn(6, 1)},
    "nn.relative.EdgeNetwork.kernels": {"maps": [nn.Linear(16, 3, bias=False)]},
    "nn.relative.EdgeNetwork": {"cutoff": 1.5, "x": torch.randn(6, 4)},
    "nn.relative.AngleFeatures": {"dim": 2, "count": 2, "cutoff": 1.5, "x": torch.randn(6, 4)},
    "nn.relative.CombinedScore": {"x": FIELD},
    "nn.relative.TableEncoding": {"graph": ON_PIXELS},
    "nn.relative.TableKernel": {"graph": ON_PIXELS, "x": torch.randn(16, 4, 4)},
    "nn.relative.RotaryPhases.forward": {"positions": torch.randn(EDGES, 4, 2)},
    "nn.relative.RelativePositionTable": {"offsets": tuple(map(tuple, COMMON["offsets"].tolist()))},
    "nn.relative.RelativePositionTable.edges": {"graph": ON_PIXELS},
    "nn.relative.RelativePositionTable.of": {"offsets": COMMON["offsets"]},
    "nn.relative.PerHeadMLP.numbers": {"x": torch.randn(EDGES, COORDINATES)},
    "nn.relative.PerHeadMLP": {"in_channels": COORDINATES},
    "models.GSANet": {"channels": 8, "blocks": (1,), "heads": 2, "in_channels": 4, "data": DATA},
    "models.ImageTransformer": {
        "in_channels": 4,
        "neighborhood": Radius(1.5),
        "channels": 4,
        "blocks": (1, 1),
        "data": DATA,
    },
    "geometry.Coarse.of_rasters": {"clouds": PIXELS},
    "geometry.lift_rasters": {"clouds": PIXELS, "neighborhood": Radius(1.5)},
    "models.GSANet.features": {"x": torch.randn(6, 4), "geometry": gsa().geometry(DATA)},
    **{f"models.{name}": {"data": IMAGES, "images": IMAGES, "in_channels": 1} for name in IMAGE_MODELS},
    "models.LieConvNet": _LIE,
    "models.LieTransformer": {**_LIE, "heads": 2, "attention": AttentionOptions(hidden=4)},
    "models.DirectionConvNet": {"frames": octahedral(), "neighborhood": Radius(1.5), "channels": 4, "data": DATA3},
    "models.FiniteSE2Transformer": {"channels": 4, "layers": 1, "heads": 2},
    "models.AffineNet": {"in_channels": 4, "channels": 4, "blocks": 1, "hidden": 4, "head": VectorHead(16, 2)},
    **{f"models.{name}.with_head": {"head": VectorHead(4, 2)} for name in IMAGE_MODELS},
    **{f"models.{name}.last_field": {"images": IMAGES, "vectors": None} for name in IMAGE_MODELS},
    "models.AttentiveDenseNet": {"growth": 2, "data": LARGE, "images": LARGE},
    "models.AttentiveResidualBlock": {"x": ON_GRID},
    "models.AttentiveDenseBlock": {"layer": GridGroupConvolution(C4, 4, 2, 3), "x": ON_GRID},
    "models.AttentiveTransition": {"layer": GridGroupConvolution(C4, 4, 2, 1), "x": ON_GRID},
    "models.EnergyForces": {"model": gsa(out_channels=1), "data": DATA},
    "models.transfer_weights": {"network": gsa(), "source": gsa()},
    "models.Rescaled.sum_over_atoms": {
        "table": torch.tensor([[1.0, -0.5]]),
        "data": Data(z=torch.ones(6, dtype=torch.int64)),
        "clouds": 1,
    },
    "models.Rescaled": {
        "network": gsa(),
        "scale": {"y": 2.0},
        "data": DATA,
        "name": "y",
        "names": ["y"],
        "output": torch.randn(1),
    },
    "models.Ensemble": {"networks": [gsa(), gsa()], "data": DATA},
    "models.Preprocessed": {"network": gsa(), "transform": lieattn_datasets.Standardize(0.5, 2.0), "data": DATA},
    "models.Captured": {"network": gsa(), "data": DATA},
    "models.FieldModel": {"network": gsa(), "head": VectorHead(8, 2)},
    "models.HamiltonianDynamics": {
        "potential": gsa(in_channels=1, out_channels=1),
        **_PHASE,
        "features": torch.randn(6, 1),
    },
    "models.HamiltonianDynamics.drift": {
        "trajectory": models.Trajectory(torch.tensor([0.0, 0.1]), POS.expand(2, 6, 2), POS.expand(2, 6, 2))
    },
    "models.HamiltonianDynamics.forward": _STATE,
    "models.VectorEmbedding": {"names": ("vel",), "data": MOVING},
    "models.Species.__call__": {"data": MOVING},
    "models.CloudInputs": {"names": ("charge",), "points": 4},
    "models.CloudInputs.__call__": {"data": CHARGED},
    "models.CloudInputs.of_clouds": {"data": CHARGED, "clouds": 1},
    "models.SortedDistances": {"channels": 6},
    "models.Readout.head": {"order": "pool_first"},
    "models.published_accuracy": {"network": ATTENTIVE, "labels": torch.tensor([0, 1]), "images": IMAGES[:, 0]},
    "models.published_inputs": {"images": IMAGES[:, 0]},
    "models.published_attentive_cnn": {"weights": "nowhere.npz"},
    "models.energy_drift": {"energy": torch.rand(4, 2)},
    "train.PointSetClassifier": {"network": gsa(), "classes": 3},
    "train.PointSetRegressor": {"network": gsa()},
    "train.WarmupCosine.factor": {"step": 1, "steps": 100.0, "steps_per_epoch": 5},
    "train.MultiStep": {"milestones": [1, 2.5]},
    "train.Muon": {"params": [torch.nn.Parameter(torch.randn(8, 8))]},
    "train.Muon.add_param_group": {"param_group": {"params": [torch.nn.Parameter(torch.randn(8, 8))]}},
    "train.Muon.load_state_dict": {"state_dict": train.Muon([torch.nn.Parameter(torch.randn(8, 8))]).state_dict()},
    "train.MultiStep.factor": {"step": 1, "steps": 100.0, "steps_per_epoch": 5},
    "train.Plateau.factor": {"step": 1, "steps": 100.0, "steps_per_epoch": 5},
    "train.Constant.factor": {"step": 1, "steps": 100.0, "steps_per_epoch": 5},
    "train.EpochSampler.set_epoch": {"epoch": 1},
    "train.EpochSampler.start": {"epoch": 1, "skip": 0},
    "train.PointSetData.setup": {"stage": "fit"},
    "train.PointSetClassifier.forward": {"batch": BATCH},
    "train.PointSetRegressor.forward": {"batch": BATCH},
    "train.random_clouds": {"kind": describe_input(BATCH), "number": 2, "seed": 0},
    "train.build": {"base": nn.Module, "spec": {"class_path": "torch.nn.Identity"}, "what": "network"},
    "train.read_yaml": {"expected": "settings"},
    "train.parse_yaml": {"what": "settings", "text": "a: 1"},
    "train.named_outputs": {"outputs": torch.zeros(2), "name": "y"},
    "models.Symmetry.stated_by": {"network": gsa()},
    "certify.certify": {"network": gsa(), "data": [DATA, DATA]},
    "certify.moved": {"cloud": DATA, "linear": torch.eye(2, dtype=torch.float64)},
    "certify.where_outside": {"matrix": torch.eye(2, dtype=torch.float64), "group": groups.cyclic(4)},
    "viz.accuracy_by_angle": {"curves": {"a": ([0.0, 1.0], [0.5, 0.6])}},
    "viz.error_curves": {"curves": {"a": ([0.0, 1.0], [0.5, 0.6])}, "xlabel": "time", "ylabel": "error"},
    "viz.training_curves": {"histories": {"a": [1.0, 0.5]}, "ylabel": "loss"},
    "viz": {"network": gsa(), "data": DATA},
    "viz.attention_picture": {"network": ATTENTIVE},
    "viz.attention_under_group": {"network": ATTENTIVE, "image": IMAGES[0]},
    "compare.read_settings": {"paths": ["nowhere.yaml"]},
    "compare.Cell": {"model": "a", "fraction": 1.0},
    "compare.ModelSettings": {"class_path": "torch.nn.Identity"},
    "lieattn_datasets.charge_energy": _PAIR,
    "lieattn_datasets.simulate_charges": {**_PAIR, "times": np.linspace(0, 1, 3)},
    "lieattn_datasets.spring_energy": _SPRINGS,
    "lieattn_datasets.simulate_springs": _SPRINGS,
    "lieattn_datasets.MoleculeFeatures.__call__": {"data": MOVING},
    "lieattn_datasets.RandomRotateFields.__call__": {"data": DATA3},
    "lieattn_datasets.RandomCrop.__call__": {"data": IMAGE_DATA},
    "lieattn_datasets.AveragePixels.__call__": {"data": IMAGE_DATA},
    "lieattn_datasets.DropBackground.__call__": {"data": IMAGE_DATA},
    "lieattn_datasets.RandomWarpImage.__call__": {"data": IMAGE_DATA},
    "lieattn_datasets.DropPoints.__call__": {"data": IMAGE_DATA},
    "lieattn_datasets.RotateImage.__call__": {"data": IMAGE_DATA},
    "lieattn_datasets.data_to_image": {"data": IMAGE_DATA},
    "lieattn_datasets.TransformPoints": {"matrix": np.eye(2)},
    "lieattn_datasets.TransformFields": {"matrix": np.eye(2)},
    "lieattn_datasets.GFN2Molecules": {"smiles": ["O", "O", "O", "O"], "conformers": 1},
    "lieattn_datasets.NBodySimulated": {"size": 2, "start_time": 0.01, "end_time": 0.02},
    "lieattn_datasets.embed_molecule": {"smiles": "CO"},
    "lieattn_datasets.label_gfn2": {"z": [8, 1, 1], "pos": np.random.rand(3, 3)},
    "lieattn_datasets.fibonacci_sphere": {"points": 10},
    "lieattn_datasets.areas_on_sphere": {"latitude": [0.0, 0.0, 60.0, 60.0], "longitude": [90.0, 0.0, 90.0, 0.0]},
    "lieattn_datasets.on_sphere": {"latitude": [0.0, 90.0], "longitude": [90.0, 0.0]},
    "lieattn_datasets.image_to_data": {"image": np.random.rand(4, 4)},
    "lieattn_datasets.project_image": {
        "image": np.random.rand(4, 4),
        "directions": torch.nn.functional.normalize(POS3, dim=1).double().numpy(),
    },
    "lieattn_datasets.ImagePoints": {"images": np.random.rand(2, 4, 4), "labels": [0, 1]},
    "lieattn_datasets.QM9.from_ase": {"frames": [Atoms("H2", POS3[:2].numpy(), info={"energy": 1.0})] * 2},
    "lieattn_datasets.Molecules": {
        "z": [8, 1, 1],
        "pos": np.random.rand(3, 3),
        "offsets": [0, 3],
        "y": [[0.5]],
        "target_names": ["e"],
        "target_units": ["eV"],
    },
    "lieattn_datasets.sample_surface": {
        "vertices": np.random.rand(3, 3),
        "faces": [[0, 1, 2]],
        "points": 4,
        "stream": np.random.RandomState(0),
    },
    "lieattn_datasets.wind_vectors": {
        "u": np.ones((2, 4, 3)),
        "v": np.ones((2, 4, 3)),
        "latitude": np.linspace(np.pi / 2, -np.pi / 2, 4),
        "longitude": 2 * np.arange(3.0),
    },
}
"""Arguments of one entry point, or of a class and all its methods."""

EXEMPT = {
    "the second half of a network, called by its layer": "nn.relative.PerHeadMLP.finish",
    "cached, so Python refuses what has no hash": "groups.real_irreps geometry.sign_group "
    "lieattn_datasets.grid_positions",
    "algebra inside of every lift; lift and Group.check look at what comes from outside": [
        f"groups.*.{name}"
        for name in "product inverse relative hat vee exp log exp_integral inverse_exp_integral split distance "
        "coordinates linear translation faults identity draw matrices".split()
    ],
    "likewise, of spaces": "spaces.*.act spaces.*.embed spaces.*.faults spaces.*.invariants spaces.*.representative "
    "spaces.*.section spaces.*.check_tangent",
    "inside of every layer, which looks at its graph": "geometry.Neighbors geometry.Padding geometry.RelativeElements "
    "geometry.Raster geometry.padding",
    "calls a function of the user": "bench ops.count_operations geometry.LiftedGraph.map",
    "made by a function, or a record of one": "certify.Certificate certify.Diagnosis certify.Row geometry.GroupFrames "
    "geometry.Coarse geometry.Stencil lieattn_datasets.GFN2Labels models.EnergyDrift models.GSAGeometry "
    "models.LieConvGeometry models.Trajectory ops.Choice",
    "takes settings that read_settings has checked; damaged ones are a target of their own": "compare.CellRunner "
    "compare.CellStore compare.Sets compare.Settings compare.build_task compare.in_words compare.match_models "
    "compare.page compare.report compare.tables compare.write_json train.check_trusted train.load_weights",
    "takes sides by their places; test_errors has bad ones": "geometry.pixel_positions",
    "part of a function that looks at its arguments": "geometry.LiftedGraph.over geometry.LiftedGraph.restricted "
    "geometry.Radius.between models.*.rounded_positions viz.Microscope.attention_layer viz.Microscope.field_layer "
    "viz.Microscope.class_name "
    "viz.Microscope.query nn.*.operate nn.*.project nn.*.terms nn.*.check_head nn.*.decide models.*.operate "
    "models.*.project models.*.terms models.*.check_head models.*.decide",
    "refuses all arguments": "geometry.Given.scaled groups.Dilations.design groups.Dilations.finite_subgroup "
    "groups.Dilations.sample_design",
    "takes or needs a data set, or a field or a raster of its network": "lieattn_datasets.SphericalImages "
    "lieattn_datasets.ShapePoints lieattn_datasets.ChargedParticles lieattn_datasets.CIFAR10.* "
    "lieattn_datasets.QM9.statistics lieattn_datasets.QM9.subset lieattn_datasets.QM9.with_transform "
    ""
    "models.*.logits models.BottleneckBlock",
    "called by Lightning": "train.AveragedWeights train.*.schedulers train.PointSetData.items_of "
    "train.EquivarianceMonitor train.LastCheckpoint train.*.evaluate train.*.on_* train.*.lr_scheduler_step "
    "train.*.*_step train.PointSet*.load_state_dict train.*.measure train.PointSetRegressor.setup",
    "takes an error": "train.short_message",
    "passes options on to torch": "models.EnergyForces.compile",
    "takes a report or a figure, or writes files": "viz.comparison viz.save viz.run_pictures viz.Microscope.save",
}
"""Patterns of entry points, or classes with all their methods, that are not called with bad arguments, by reason."""
BASES = {"Group", "LieGroup", "HomogeneousSpace", "Representation", "ConvolutionKernel", "Wrapper", "AttentiveNetwork"}
RECORDS = {"PointClouds", "LiftedGraph", "Neighbors", "Padding", "RelativeElements", "RealIrrep", "Sites"}


@dataclass(frozen=True)
class Entrance:
    """A public callable with valid arguments.

    Constructed modules are also called: ``later`` are the names of the arguments of this forward call.
    """

    call: Callable[[dict[str, Any]], Any]
    arguments: dict[str, Any]
    later: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Names of the arguments that may be replaced."""
        return sorted(self.arguments)


def public() -> Iterator[tuple[str, type | None, str]]:
    """Yield name, class (for methods) and attribute of all public callables. A method is listed only once."""
    seen: set[Any] = set()
    for module, part in [
        *((importlib.import_module(f"lieattn.{part}"), part) for part in PARTS),
        (lieattn_datasets, "lieattn_datasets"),
    ]:
        for name in module.__all__:
            value = getattr(module, name)
            if not callable(value) or not getattr(value, "__module__", "").startswith("lieattn") or id(value) in seen:
                continue
            seen.add(id(value))
            if not isinstance(value, type):
                yield f"{part}.{name}", None, name
            elif not (
                inspect.isabstract(value) or getattr(value, "_is_protocol", False) or name in BASES
            ) and not issubclass(value, Exception | tuple):
                if name not in RECORDS:
                    yield f"{part}.{name}", None, name
                for attribute in dir(value):
                    static = inspect.getattr_static(value, attribute)
                    function = getattr(static, "__func__", static)
                    mine = inspect.isfunction(function) and function.__module__.startswith("lieattn")
                    if mine and (attribute == "__call__" or attribute[0] != "_") and function not in seen:
                        seen.add(function)
                        yield f"{part}.{name}.{attribute}", value, attribute


PLACES = {name: (owner, attribute) for name, owner, attribute in public()}
"""Class (for methods) and attribute of the callable of each name."""


def _place(name: str) -> tuple[type | None, str]:
    """Return class and attribute of a callable, also of one that :func:`public` lists under another class."""
    if name in PLACES:
        return PLACES[name]
    owner, _, attribute = name.rpartition(".")
    return getattr(_module(name), owner.rpartition(".")[2]), attribute


def _given(name: str, argument: str, default: Any) -> Any:
    """Return the valid value of an argument."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        for table in (OWN, OF_CLASS):
            if argument in table.get(prefix, {}):
                return table[prefix][argument]
    if default is not inspect.Parameter.empty:
        return default
    return COMMON[argument]


@functools.cache
def _exempt() -> re.Pattern[str]:
    patterns = [one for part in EXEMPT.values() for one in (part.split() if isinstance(part, str) else part)]
    return re.compile("|".join(translate(form) for one in patterns for form in (one, f"{one}.*")))


def is_exempt(name: str) -> bool:
    """Return whether an entry point is not called with bad arguments, or has no arguments."""
    owner, attribute = PLACES[name]
    parameters = inspect.signature(getattr(owner or _module(name), attribute)).parameters.values()
    takes = any(p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    return not takes or _exempt().match(name) is not None


def _valid(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    wanted = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "self"]
    return {p.name: _given(name, p.name, p.default) for p in wanted}


def _called(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function with arguments by name, except for positional-only ones."""
    parameters = inspect.signature(function).parameters.values()
    places = [arguments[p.name] for p in parameters if p.kind is p.POSITIONAL_ONLY and p.name in arguments]
    by_name = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    return function(*places, **{name: value for name, value in arguments.items() if name in by_name})


@functools.cache
def instance(name: str) -> Any:
    """Return the object of a method, which is constructed from valid arguments."""
    made = INSTANCES.get(name)
    if made is not None:
        return made
    owner = getattr(_module(name), name.rpartition(".")[2])
    found = _called(owner, _valid(name, owner))
    return found.eval() if isinstance(found, nn.Module) else found


def _module(name: str) -> Any:
    part = next(part for part in (*reversed(PARTS), "lieattn_datasets") if name.startswith(part + "."))
    return lieattn_datasets if part == "lieattn_datasets" else importlib.import_module(f"lieattn.{part}")


@functools.cache
def entrance(name: str) -> Entrance:
    """Return the entry point of a name, with its valid arguments."""
    owner, attribute = _place(name)
    if owner is not None:
        return _method(name, attribute)
    function = getattr(_module(name), attribute)
    behind = f"{name}.forward"
    if isinstance(function, type) and issubclass(function, nn.Module) and hasattr(function, "forward"):
        later = _valid(behind, function.forward)
        return Entrance(lambda given: _used(_called(function, given), later), _valid(name, function), tuple(later))
    return Entrance(lambda given: _called(function, given), _valid(name, function))


def _used(product: nn.Module, arguments: dict[str, Any]) -> Any:
    return _called(product.eval().forward, arguments)


def _method(name: str, attribute: str) -> Entrance:
    owner = _place(name)[0]
    static = isinstance(inspect.getattr_static(owner, attribute), staticmethod | classmethod)
    on = owner if static else instance(name.rpartition(".")[0])

    def call(given: dict[str, Any]) -> Any:
        fresh = copy.deepcopy(on) if isinstance(on, nn.Module) else on  # calls could change statistics
        return _called(getattr(fresh, attribute), given)

    return Entrance(call, _valid(name, getattr(on, attribute)))


INSTANCES: dict[str, Any] = {
    "geometry.PointClouds": CLOUDS,
    "geometry.LiftedGraph": GRAPH,
    "geometry.Neighbors": NEIGHBORS,
    "geometry.RelativeElements": GRAPH.relative,
    "geometry.Padding": geometry.padding(torch.zeros(6, dtype=torch.int64), 1),
}
