"""Run the Triton kernels, with the same functions as in ``attention/_launch.py``, for tensors on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lieattn.ops._terms import Problem
from lieattn.ops.kernels.attention._bundle import SINGLE, Bundle, common_sizes, norm_shape, seeded_heads
from lieattn.ops.kernels.triton import _backward, _forward, _lanes, _lanes_backward, constants
from lieattn.ops.kernels.triton._forward import Lists, Operands, Shape, Strides

_EDGES_A_PROGRAM = 64  # number of edges of one type for each program, if a type has many
_MOST_SPLITS = 256
_MATRIX = 16  # smallest side of a product that matrix units support
_LANES = 32  # lanes of a warp
_PAIRS, _NUMBERS = 32, 64  # largest tiles of pairs of frames, and of channels of all frames, that a lane holds
_MOST_EDGES = 256  # number of edges of a source for each program
_FACTORS = 2048  # number of factors of pairs of frames that a program stores at a time, if frames are pooled
_TABLES = ("rho", "bias", "psi", "beta", "key_psi")
# For each tensor its version, and the results of _kept.
_KNOWN: Any = WeakTensorKeyDictionary()

_Result = TypeVar("_Result")


def run_forward(problem: Problem, seed: Tensor | int) -> tuple[Tensor, Tensor]:
    """Return the output ``[points, outs, heads, width]`` and the numbers of :func:`norm_shape`."""
    call, value = _Call(problem), problem.value
    out = value.new_empty(call.points, problem.outs, *value.shape[2:])
    norm = call.empty(*norm_shape(problem)).zero_()
    call.run("forward", call.points, out, norm if problem.normalize == "softmax" else None, *call.draw(seed))
    return out, norm


def run_backward(problem: Problem, seed: Tensor | int, grad_out: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
    """Return gradients in the order of :meth:`Problem.operands`, with empty tensors for absent operands."""
    call, operands, slopes = _Call(problem), problem.operands(), None
    grads: dict[str, Tensor | None] = dict.fromkeys(operands)
    grads["query"] = None if problem.query is None else torch.empty_like(problem.query)
    if problem.terms.fiber_key is not None or problem.terms.fiber_bias is not None:
        slopes = call.empty(call.points, problem.value.shape[2], problem.queries, call.columns)
    softmax = problem.normalize == "softmax"
    given = (grad_out.contiguous(), *((norm, torch.empty_like(norm)) if softmax else (None, None)))
    draw = call.draw(seed)
    if problem.query is not None or slopes is not None or softmax:
        call.run("backward_targets", call.points, *given, grads["query"], slopes, *draw)
    grads |= _source_gradients(call, given, draw)
    if slopes is not None:
        _add_shared_scores(call, slopes, grads)
    if any(operands[name] is not None for name in _TABLES):
        grads |= _table_gradients(call, given, draw)
    return tuple(problem.value.new_empty(0) if grad is None else grad for grad in grads.values())


def bundle(problem: Problem) -> Bundle:
    """Return a bundle of single clouds, since a program processes one head."""
    return SINGLE


class _Call:
    """The arguments of the kernels of one call."""

    def __init__(self, problem: Problem) -> None:
        a, neighbors = problem, problem.neighbors
        self.problem, self.points, self.edges = a, neighbors.num_points, neighbors.num_edges
        self.dtype = a.value.dtype if a.value.dtype == torch.float64 else torch.float32
        self.shape = _shape(a, self.dtype)
        self.lanes = _fits_lanes(self.shape)
        self.columns = self.shape.columns.value
        self.blocks = self.shape.K.value // self.shape.B.value
        lists = neighbors.row_ptr, neighbors.source, neighbors.target, a.terms.row
        self.lists = Lists(*(None if t is None else t.contiguous() for t in lists))
        base = _shared_scores(a, self.dtype)
        tables = _expanded_tables(a)
        query, key, value = (None if t is None else t.contiguous() for t in (a.query, a.key, a.value))
        self.operands = Operands(query, key, value, base, **tables)
        steps = {name: () if table is None else table.stride() for name, table in tables.items()}
        steps["base"] = (0, 0) if base is None else (base.stride(0) if len(base) > 1 else 0, base.stride(1))
        self.strides = constants(Strides, **steps)

    def draw(self, seed: Tensor | int) -> tuple[Tensor | None, int]:
        """Return the seed of the dropout, which programs read from the memory of the GPU, and the threshold."""
        dropout, device = self.problem.dropout, self.problem.value.device
        return (torch.as_tensor(seed, device=device) if dropout > 0 else None), int(dropout * 2**32)

    def empty(self, *shape: int) -> Tensor:
        """Return an empty tensor in the dtype of sums."""
        return self.problem.value.new_empty(shape, dtype=self.dtype)

    def run(self, name: str, rows: int, *arguments: Any, heads: int | None = None, blocks: int = 1) -> None:
        """Start a program of a kernel for each row, head (or group of heads), and block of frames."""
        heads = self.problem.value.shape[2] if heads is None else heads
        if rows == 0 or heads == 0:
            return
        told = (self.operands, self.strides, self.lists, self.shape)
        tiles, lanes = (_forward, _lanes) if name == "forward" else (_backward, _lanes_backward)
        kernel = getattr(lanes if self.lanes else tiles, name)
        warps = 1 if self.lanes else _warps(self.shape)
        with torch.cuda.device_of(self.problem.value):
            kernel[(rows * heads, blocks)](*told, *arguments, num_warps=warps, enable_fp_fusion=True)


def _shape(a: Problem, dtype: torch.dtype) -> Shape:
    common, heads = common_sizes(a), a.value.shape[2]
    tied_out, tied_key = common["tied_out"], common["tied_key"]
    key_frames, pooled = common["keys"] if a.key is None else a.key.shape[1], a.pattern == "pooled"
    names = {"O": "outs", "G": "queries", "M": "columns", "K": "keys"}
    frames = {letter: _padded(common[name]) for letter, name in names.items()}
    frames["K"] = max(frames["K"], _padded(key_frames))
    dot_keys = not tied_key and min(frames["G"], frames["M"]) >= _MATRIX
    dot_pairs = not tied_out and min(frames["O"], frames["G"]) >= _MATRIX
    least = _MATRIX if dot_keys or dot_pairs else 1
    sizes = {
        **common,
        "key_frames": key_frames,
        "pooled": pooled,
        "heads": heads,
        "seeded": seeded_heads(dtype),  # heads that share a seed of the dropout
        **frames,
        "P": 1 if tied_out else frames["O"],
        "D": (depth := max(_padded(common["depth"]), least)),
        "W": (width := max(_padded(common["width"]), least)),
        "B": min(frames["K"], max(1, _FACTORS // (frames["G"] * max(depth, width)))) if pooled else frames["K"],
        "softmax": a.normalize == "softmax",
        # Weights are exponentials: a factor for the key fiber times a factor for the neighbors.
        "product": a.normalize in ("softmax", "exp-mean"),
        "counted": a.normalize in ("mean", "exp-mean"),  # the normalization is the number of keys
        # The bias of the displacement depends on key frames.
        "full_bias": a.terms.displacement_bias is not None and a.terms.displacement_bias.shape[2] > 1,
        # Dropout. 0: none, 1: of pairs of query and key frame, 2: of pairs of output and query frame
        "dropout": 0 if a.dropout == 0 else 1 if tied_out and not tied_key else 2,
        "constant": float(common["constant"]),
        "lowest": torch.finfo(dtype).min,  # lowest score above minus infinity
        "dot_keys": dot_keys,  # matrix units for products over [G, M]
        "dot_pairs": dot_pairs,  # and for those over [O, G]
        # Half precisions are exact in TF32. Wider numbers are multiplied in their own precision.
        "precision": "tf32" if a.value.dtype.itemsize < 4 else "ieee",
        "dtype": tl.float64 if dtype == torch.float64 else tl.float32,
        "E": _LANES,
        # Channels that a lane loads together, a power of two that divides all channels, so that they are aligned.
        "VD": min(common["depth"] & -common["depth"], 4) or 1,
        "VW": min(common["width"] & -common["width"], 4) or 1,
    }
    return constants(Shape, **sizes)


def _fits_lanes(shape: Shape) -> bool:
    """Return whether the tiles of an edge fit the registers of a lane, so that each lane processes an edge."""
    s = Shape(*(size.value for size in shape))
    signals = max(s.G, s.O, s.K) * max(s.D, s.W)
    # Loads of single numbers are slow, and Triton 3.6 fails to compile backward kernels with five or more of them.
    together = all(number > 1 or size < 5 for number, size in ((s.VD, s.depth), (s.VW, s.width)))
    return not s.pooled and together and max(s.G * s.M, s.P * s.G) <= _PAIRS and signals <= _NUMBERS


def _warps(shape: Shape) -> int:
    """Return the number of warps of a program, which is one for small fibers, whose tiles fit its registers."""
    s = Shape(*(size.value for size in shape))
    frames = max(s.G * s.M, s.P * s.G)
    tile = max(s.G, s.O, s.K) * max(s.D, s.W)
    cube = frames if s.dot_keys or s.dot_pairs else frames * max(s.D, s.W) * (s.B if s.pooled else 1)
    largest = max(cube, tile)
    return 1 if largest <= 512 else 4 if largest <= 2048 else 8


def _padded(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _expanded_tables(a: Problem) -> dict[str, Tensor | None]:
    """Return the tables of displacements expanded to all frames, heads and channels, without copies."""
    outs, heads, width = a.outs, *a.value.shape[2:]
    rho, bias = a.terms.positional_key, a.terms.displacement_bias
    if rho is not None and a.query is not None:
        rho = rho.expand(-1, outs, heads, a.query.shape[-1])
    if bias is not None:
        bias = bias.expand(-1, outs, -1, heads).transpose(2, 3)
    pooled, key_psi = a.pattern == "pooled", a.terms.key_psi
    psi, beta = (None if t is None else t[:, :, 0].expand(-1, outs, heads, width) for t in (a.terms.psi, a.terms.beta))
    value_psi = a.terms.psi if pooled else None
    if key_psi is not None and a.query is not None:
        key_psi = key_psi.expand(-1, outs, -1, heads, a.query.shape[-1]).permute(0, 1, 3, 4, 2)
    if value_psi is not None:
        value_psi = value_psi.expand(-1, outs, -1, heads, width).permute(0, 1, 3, 4, 2)
    psi = None if pooled else psi
    return {"rho": rho, "bias": bias, "psi": psi, "beta": beta, "key_psi": key_psi, "value_psi": value_psi}


def _fiber_key(a: Problem, dtype: torch.dtype) -> Tensor | None:
    """Return the keys of pairs of frames, ``[queries, keys, heads, depth]``."""
    if a.terms.fiber_key is None or a.query is None:
        return None
    return a.terms.fiber_key.to(dtype).expand(a.queries, *a.value.shape[1:3], a.query.shape[-1])


def _shared_scores(a: Problem, dtype: torch.dtype) -> Tensor | None:
    """Return ⟨q, ρ(g, m)⟩ + b(g, m), ``[points or 1, heads, queries, columns]``; framewise, columns is 1."""
    key, bias, base, tied = _fiber_key(a, dtype), a.terms.fiber_bias, None, a.pattern == "framewise"
    if bias is not None:
        bias = bias.to(dtype).expand(a.queries, *a.value.shape[1:3]).permute(2, 0, 1)
        base = (bias.diagonal(dim1=1, dim2=2)[..., None] if tied else bias)[None]
    if key is not None and a.query is not None:
        content = torch.einsum("pghd,gghd->phg" if tied else "pghd,gmhd->phgm", a.query.to(dtype), key)
        content = content[..., None] if tied else content
        base = content if base is None else content + base
    return None if base is None else base.contiguous()


def _source_gradients(call: _Call, given: tuple[Any, ...], draw: tuple[Any, int]) -> dict[str, Tensor | None]:
    """Return the gradients of keys and values, which are sums over the edges of each source."""
    a, more = call.problem, call.edges // _MOST_EDGES
    first, last, edges, begin = _kept(a.neighbors.source, call.points, _source_programs)
    sums = {
        name: None if t is None else t.new_empty(len(first), *t.shape[1:], dtype=call.dtype if more else t.dtype)
        for name, t in (("key", a.key), ("value", a.value))
    }
    call.run("backward_sources", len(first), *given, first, last, edges, *sums.values(), *draw, blocks=call.blocks)
    if more:
        for name, total in sums.items():
            if total is not None:
                own, rest = total.flatten(1).split([call.points, more])
                rest = torch.segment_reduce(rest, "sum", offsets=begin, unsafe=True)
                sums[name] = (own + rest).to(a.value.dtype).view(-1, *total.shape[1:])
    return sums


def _source_programs(source: Tensor, points: int) -> tuple[Tensor, ...]:
    """Return the range of edges of each program of ``backward_sources``, and the edges sorted by source.

    The first programs are those of the points. Programs after them process what is left of points that are the source
    of many edges; there are as many as could be necessary, in the order of the points, and the last result is the first
    one of each point, and their number.
    """
    bounds, edges = _sorted(source, points)
    number = torch.arange(len(source) // _MOST_EDGES, device=source.device)
    begin = F.pad(((bounds.diff() - 1).clamp(min=0) // _MOST_EDGES).cumsum(0), (1, 0))
    owner = torch.searchsorted(begin, number, right=True).sub(1).clamp(max=points - 1)
    further = bounds[owner] + (number - begin[owner] + 1) * _MOST_EDGES
    first = torch.cat([bounds[:-1], further])
    ends = torch.cat([bounds[1:], torch.where(number < begin[-1], bounds[owner + 1], further)])
    return first, torch.minimum(first + _MOST_EDGES, ends), edges, begin


def _add_shared_scores(call: _Call, slopes: Tensor, grads: dict[str, Tensor | None]) -> None:
    """Add the gradients through the shared scores to those of the tables of frames and the query."""
    a, key = call.problem, _fiber_key(call.problem, call.dtype)
    pairs = slopes[..., 0].diag_embed() if a.pattern == "framewise" else slopes
    changes = {"fiber_bias": pairs.sum(0).permute(1, 2, 0)}
    if key is not None and a.query is not None:
        changes["fiber_key"] = torch.einsum("phgm,pghd->gmhd", pairs, a.query.to(call.dtype))
        of_query = torch.einsum("phgm,gmhd->pghd", pairs, key)
        grads["query"] = (cast(Tensor, grads["query"]) + of_query).to(a.query.dtype)
    for name, change in changes.items():
        grads[name] = _like(change, a.operands()[name])


def _like(grad: Tensor, table: Tensor | None) -> Tensor | None:
    """Return a gradient summed to the shape of its table, or None if there is no table."""
    return None if table is None else grad.sum_to_size(table.shape).to(table.dtype).contiguous()


def _kept(index: Tensor, size: int, compute: Callable[[Tensor, int], _Result]) -> _Result:
    """Return ``compute(index, size)``, which is kept as long as the tensor of the geometry, for all layers and steps.

    It is not kept while a CUDA graph is captured, which would reuse its memory.
    """
    version = 0 if index.is_inference() else index._version
    of, known = _KNOWN.get(index, (version, {}))
    known = known if of == version else {}  # nothing of earlier versions
    if (compute, size) not in known:
        found = compute(index, size)
        if index.is_cuda and torch.cuda.is_current_stream_capturing():
            return found
        _KNOWN[index] = version, {**known, (compute, size): found}
        return found
    return cast(_Result, known[compute, size])


def _sorted(group: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return the begin of each group, and the edges sorted by group, in their order."""
    ordered, edges = torch.sort(group, stable=True)
    return torch.searchsorted(ordered, torch.arange(groups + 1, device=group.device)), edges


def _table_gradients(call: _Call, given: tuple[Any, ...], draw: tuple[Any, int]) -> dict[str, Tensor | None]:
    """Return the gradients of the tables of displacements."""
    a, index = call.problem, call.lists.index
    tables = {name: a.operands()[name] for name in _TABLES}
    heads, width = a.value.shape[2:]
    depth, frames, pooled = call.shape.depth.value, call.shape.key_frames.value, call.shape.pooled.value
    types = max(len(table) for table in tables.values() if table is not None)
    splits = each = 1
    if index is None:
        bounds = torch.arange(types + 1, device=a.value.device)
        edges = (bounds, bounds)
        if a.terms.positional_key is not None and a.terms.positional_key.shape[2] == 1:
            each = heads  # otherwise there would be a row for each edge and head
    else:
        edges = _kept(index, types, _sorted)
        splits = max(1, min(_MOST_SPLITS, call.edges // (max(types, 1) * _EDGES_A_PROGRAM)))
    shapes = {
        "rho": (heads // each, depth),
        "bias": (heads, call.columns if call.shape.full_bias.value else 1),
        "psi": (*([a.value.shape[1]] if pooled else []), heads, width),
        "beta": (heads, width),
        "key_psi": (frames, heads, depth),
    }
    sums = {
        name: None if table is None else call.empty(types, splits, a.outs, *shapes[name])
        for name, table in tables.items()
    }
    rho, bias, psi, beta, key_psi = sums.values()
    own = (rho, bias, *((None, beta, key_psi, psi) if pooled else (psi, beta, None, None)))
    groups = {"heads": heads // each, "blocks": call.blocks}
    rows = -(-types // _LANES) if call.lanes and index is None else types * splits
    call.run("backward_types", rows, *given, *edges, types, splits, each, *own, *draw, **groups)
    grads: dict[str, Tensor | None] = {}
    for name, table in tables.items():
        if table is not None and (total := sums[name]) is not None:
            total = total[: len(table)].sum(1)
            total = total.transpose(2, 3) if name == "bias" else total
            grads[name] = _like(total if total.ndim == table.ndim else total[:, :, None], table)
    return grads
