"""Input features of pairs of points."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lieattn._core.checks import check_size, may_look
from lieattn.geometry import LiftedGraph
from lieattn.models._base.inputs import attribute


def with_pair_features(edges: Tensor | None, data: Any, channels: int, graph: LiftedGraph) -> Tensor | None:
    """Append the features of pairs to features ``[edges, *]`` of the edges of a graph; None if there are neither.

    They are those of ``data.edge_attr`` ``[pairs, channels]`` for the same source and target in ``data.edge_index``
    ``[2, pairs]``, and 0 for all other edges. ValueError is raised for other shapes, for points that do not exist, if a
    pair occurs twice, and for periodic clouds, where a pair has several images.
    """
    if not channels:
        return edges
    own = _features(data, channels, graph)
    return own if edges is None else torch.cat([edges, own.to(edges)], dim=1)


def _features(data: Any, channels: int, graph: LiftedGraph) -> Tensor:
    index, value = attribute(data, "edge_index"), attribute(data, "edge_attr")
    neighbors, points = graph.neighbors, graph.num_points
    if index.ndim != 2 or len(index) != 2 or index.dtype != torch.int64:
        raise ValueError(f"data.edge_index: expected int64 [2, pairs], got {index.dtype} {tuple(index.shape)}")
    shapes = [(index.shape[1], channels), *([(index.shape[1],)] if channels == 1 else [])]
    if value.shape not in shapes or value.is_complex():
        got = f"{value.dtype} {tuple(value.shape)}"
        raise ValueError(f"data.edge_attr: expected features [pairs={index.shape[1]}, {channels}], got {got}")
    if neighbors.shift is not None:
        raise ValueError("data.edge_attr: expected clouds that are not periodic, where each pair has several images")
    value = value.to(graph.pos).reshape(-1, channels)
    given, order = (index[1] * points + index[0]).sort()
    if may_look(value):
        check_size("data.edge_attr", value)
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < points:
            found = f"{int(index.min())} .. {int(index.max())}"
            raise ValueError(f"data.edge_index: expected points from 0 to {points - 1}, got {found}")
        if (twice := (given[1:] == given[:-1]).nonzero()).numel():
            source, target = index[:, order[int(twice[0])]].tolist()
            raise ValueError(f"data.edge_index: expected different pairs, got ({source}, {target}) twice")
    if len(value) == 0:
        return value.new_zeros(neighbors.num_edges, channels)
    wanted = neighbors.target * points + neighbors.source
    if torch.compiler.is_exporting():  # ONNX has no binary search
        return (wanted[:, None] == given).to(value) @ value[order]
    place = torch.searchsorted(given, wanted).clamp(max=len(given) - 1)
    return torch.where((given[place] == wanted)[:, None], value[order[place]], 0)
