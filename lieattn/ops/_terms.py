"""The terms of the relative element."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from lieattn._core.checks import check_choice, check_dropout, check_is, check_tensor, kind
from lieattn.geometry import Neighbors

Pattern = Literal["joint", "framewise", "pooled", "query_sum"]
"""Fiber pattern: the frames of keys and outputs that belong to a query, see :func:`group_attention`."""
Normalization = Literal["softmax", "mean", "exp-mean", "none"]
"""Normalization of scores over the keys of a query, see :func:`group_attention`."""

_PATTERNS, _NORMALIZATIONS = get_args(Pattern), get_args(Normalization)
# The terms with their names in the kernels, and the terms that have a row for each type of displacement.
_TABLES = {
    "positional_key": "rho",
    "displacement_bias": "bias",
    **{name: name for name in ("fiber_key", "fiber_bias", "psi", "beta", "key_psi")},
}
ROW_TABLES = ("positional_key", "displacement_bias", "psi", "beta", "key_psi")


@dataclass(frozen=True, eq=False)
class RelativeTerms:
    """Terms of scores and values that depend on the relative element u = (h_a⁻¹(x_j - x_i), h_a⁻¹ h_b).

    Tables that depend on the displacement have a row for each *type* of displacement, and ``row`` contains the row of
    each edge. ``out`` is the fiber of the output, and ``query`` and ``key`` are those of queries and keys. An axis of
    size 1 stands for all values. Absent terms are None.

    Attributes
    ----------
    positional_key
        ``[types, out, heads, dim]``: a key ρ computed from the displacement, which adds ⟨q, ρ⟩ to the score (GSA-Nets,
        Eq. 14).
    displacement_bias
        ``[types, out, key, heads]``: added to the score (location kernels of LieTransformer).
    fiber_key
        ``[query, key, heads, dim]`` or ``[out, query, key, heads, dim]``: a key ρ of a pair of frames, which adds
        ⟨q, ρ⟩ to the score.
    fiber_bias
        ``[query, key, heads]``: added to the score of a pair of frames.
    psi
        ``[types, out, key, heads, value_dim]``: multiplies the values (Affine Self Convolution). With a further last
        axis of size heads * value_dim, it is a matrix that maps the channels of all heads. Such matrices are not
        supported with pattern ``"framewise"``.
    beta
        ``[types, out, key, heads, value_dim]``: added to the values. With pattern ``"pooled"`` it is added once for
        each neighbor, so its key axis has size 1.
    key_psi
        ``[types, out, key, heads, dim]``: multiplies the keys (Affine Self Convolution, where ``positional_key`` is
        added to the keys), or matrices as for ``psi``. It is not supported with pattern ``"query_sum"``.
    row
        ``[edges]`` int64, the row of each edge in the displacement tables. If None, row e belongs to edge e.
    rotary
        ``[points, fiber, heads, dim / 2, 2]``, cosines and sines of the angles by which channel pairs of queries and
        keys are rotated.
    rotary_values
        Whether values are rotated as well, and the output is rotated back by the angles of the target.
    """

    positional_key: Tensor | None = None
    displacement_bias: Tensor | None = None
    fiber_key: Tensor | None = None
    fiber_bias: Tensor | None = None
    psi: Tensor | None = None
    beta: Tensor | None = None
    key_psi: Tensor | None = None
    row: Tensor | None = None
    rotary: Tensor | None = None
    rotary_values: bool = False

    def tables(self) -> dict[str, Tensor]:
        """Return the terms that are not None, by their names."""
        return {name: table for name in _TABLES if (table := getattr(self, name)) is not None}

    @property
    def reads_rows(self) -> bool:
        """Whether a table has a row for each type of displacement."""
        return any(name in ROW_TABLES for name in self.tables())

    def plus(self, other: RelativeTerms) -> RelativeTerms:
        """Return the union of two sets of terms.

        ValueError is raised if both contain the same term, or if both have displacement tables, but not the same
        ``row``.
        """
        check_is("other", other, RelativeTerms)
        mine, theirs = self.tables(), other.tables()
        if both := mine.keys() & theirs.keys():
            raise ValueError(f"other: both sets of relative terms contain {min(both)!r}")
        owners = [terms for terms in (self, other) if terms.reads_rows]
        if len(owners) == 2 and self.row is not other.row:
            raise ValueError("row: the displacement tables of both sets of relative terms must share one row index")
        if self.rotary is not None and other.rotary is not None:
            raise ValueError("other: both sets of relative terms contain 'rotary'")
        turning = self if self.rotary is not None else other
        row = owners[0].row if owners else None
        return RelativeTerms(**mine, **theirs, row=row, rotary=turning.rotary, rotary_values=turning.rotary_values)


@dataclass(frozen=True, eq=False)
class Problem:
    """A call of the operator: operands with the scaled query, and options; see :func:`group_attention`."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    neighbors: Neighbors
    terms: RelativeTerms
    pattern: Pattern
    normalize: Normalization
    dropout: float = 0.0

    @property
    def queries(self) -> int:
        """Number of query frames."""
        if self.query is not None:
            return self.query.shape[1]
        if self.pattern == "framewise":
            return self.value.shape[1]
        # Without queries, only the tables distinguish frames.
        frames = 1 if self.terms.fiber_bias is None else self.terms.fiber_bias.shape[0]
        return frames if self.pattern == "query_sum" else max(frames, self._table_frames)

    @property
    def outs(self) -> int:
        """Number of output frames."""
        return self._table_frames if self.pattern == "query_sum" else max(self.queries, self._table_frames)

    @property
    def _table_frames(self) -> int:
        # torch.compile cannot trace max(..., default=1).
        return max([1, *(table.shape[1] for name, table in self.terms.tables().items() if name in ROW_TABLES)])

    def operands(self) -> dict[str, Tensor | None]:
        """Return signals and tables by their names in the kernels."""
        tables = {short: getattr(self.terms, name) for name, short in _TABLES.items()}
        return {"query": self.query, "key": self.key, "value": self.value, **tables}

    @property
    def common_dtype(self) -> torch.dtype:
        """Widest dtype of the operands, but at least float32, because half precision would round scores too much."""
        dtype = torch.float32
        for tensor in self.operands().values():
            dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
        return dtype

    def to(self, dtype: torch.dtype) -> Problem:
        """Return the same problem with all operands in a dtype."""
        query, key = (None if signal is None else signal.to(dtype) for signal in (self.query, self.key))
        tables: Any = {name: table.to(dtype) for name, table in self.terms.tables().items()}
        terms = replace(self.terms, **tables)
        return replace(self, query=query, key=key, value=self.value.to(dtype), terms=terms)


def check_operands(problem: Problem) -> None:
    """Raise TypeError or ValueError, naming the argument, unless the operator accepts these operands."""
    p = problem
    check_choice("pattern", p.pattern, _PATTERNS)
    check_choice("normalize", p.normalize, _NORMALIZATIONS)
    if not isinstance(p.dropout, Real):
        raise TypeError(f"dropout: expected a number, got {kind(p.dropout)}")
    check_dropout("dropout", p.dropout)
    _check_types(p)
    _check_signals(p.query, p.key, p.value, p.neighbors)
    fiber, edges = p.value.shape[1], p.neighbors.num_edges
    queries = fiber if p.query is None else p.query.shape[1]
    if p.pattern in ("joint", "framewise") and queries != fiber:
        raise ValueError(f"query: pattern {p.pattern!r} needs a fiber of {fiber} as in value, got {queries}")
    if p.terms.row is not None and p.terms.row.shape != (edges,):
        raise ValueError(
            f"terms.row: expected [{edges}], one row of the displacement tables for each edge, got "
            f"{tuple(p.terms.row.shape)}"
        )
    if p.terms.rotary is not None:
        turned = {"query": p.query, "key": p.key}
        _check_rotary(p.terms.rotary, turned | ({"value": p.value} if p.terms.rotary_values else {}))
    if tables := p.terms.tables():
        _check_tables(p, tables, queries)


def _check_types(problem: Problem) -> None:
    """Raise TypeError unless operands are floating tensors, and ValueError if they are on different devices."""
    p, terms = problem, problem.terms
    for argument, value, allowed in (("neighbors", p.neighbors, Neighbors), ("terms", terms, RelativeTerms)):
        if not isinstance(value, allowed):
            raise TypeError(f"{argument}: expected {allowed.__name__}, got {kind(value)}")
    given: dict[str, Any] = {
        "query": p.query,
        "key": p.key,
        "terms.row": terms.row,
        "terms.rotary": terms.rotary,
    }
    given |= {f"terms.{name}": table for name, table in terms.tables().items()}
    for argument, operand in {**given, "value": p.value}.items():
        if operand is None and argument != "value":
            continue
        index = argument == "terms.row"
        check_tensor(
            argument, operand, "an int64 tensor" if index else "a floating tensor", torch.int64 if index else None
        )
        if operand.layout != torch.strided:
            raise TypeError(f"{argument}: expected a dense tensor, got one of layout {operand.layout}")
        if operand.dtype.itemsize == 1:
            raise TypeError(f"{argument}: expected float64, float32, bfloat16 or float16, got {operand.dtype}")
        if operand.device != p.neighbors.device:
            raise ValueError(
                f"{argument}: expected a tensor on {p.neighbors.device} like neighbors, got one on {operand.device}"
            )


def _check_rotary(phases: Tensor, signals: dict[str, Tensor | None]) -> None:
    """Raise ValueError unless phases fit the channel pairs of these signals."""
    for argument, signal in signals.items():
        if signal is None:
            continue
        pairs = (*signal.shape[:-1], signal.shape[-1] // 2, 2)
        sizes_fit = phases.ndim == 5 and all(got in (1, want) for got, want in zip(phases.shape, pairs, strict=True))
        if not sizes_fit or signal.shape[-1] % 2 or phases.shape[-1] != 2:
            raise ValueError(
                f"terms.rotary: expected [points, fiber, heads, dim / 2, 2] for {argument} {tuple(signal.shape)}, got "
                f"{tuple(phases.shape)}"
            )


def _check_signals(query: Tensor | None, key: Tensor | None, value: Tensor, neighbors: Neighbors) -> None:
    if (query is None) != (key is None):
        raise ValueError("query, key: expected both, or neither for scores from the terms alone")
    for argument, signal in (("value", value), ("query", query), ("key", key)):
        if signal is not None:
            _check_signal(argument, signal, value, neighbors)
    if query is not None and key is not None:
        if query.shape[-1] != key.shape[-1]:
            raise ValueError(f"key: expected dim {query.shape[-1]} as in query, got {key.shape[-1]}")
        if query.shape[-1] == 0:
            raise ValueError(f"query: expected at least one channel, got {tuple(query.shape)}")
        if key.shape[1] != value.shape[1]:
            raise ValueError(f"key: expected a fiber of {value.shape[1]} as in value, got {key.shape[1]}")


def _check_signal(argument: str, signal: Tensor, value: Tensor, neighbors: Neighbors) -> None:
    if signal.ndim != 4 or signal.shape[0] != neighbors.num_points:
        raise ValueError(
            f"{argument}: expected [points={neighbors.num_points}, fiber, heads, dim] as in neighbors, got "
            f"{tuple(signal.shape)}"
        )
    if signal.shape[1] == 0:
        raise ValueError(f"{argument}: expected a fiber of at least one frame, got {tuple(signal.shape)}")
    if signal.shape[2] != value.shape[2]:
        raise ValueError(f"{argument}: expected {value.shape[2]} heads as in value, got {signal.shape[2]}")


def _check_tables(problem: Problem, tables: dict[str, Tensor], queries: int) -> None:
    terms, query, pattern = problem.terms, problem.query, problem.pattern
    keys, heads, value_dim = problem.value.shape[1:]
    dim = -1 if query is None else query.shape[-1]
    rows = problem.neighbors.num_edges if terms.row is None else -1
    out = -1 if pattern in ("query_sum", "pooled") else keys
    # -1 stands for any size. Axes other than the rows may also be 1.
    expected: dict[str, tuple[int, ...]] = {
        "positional_key": (rows, out, heads, dim),
        "displacement_bias": (rows, out, keys, heads),
        "fiber_key": (queries, keys, heads, dim),
        "fiber_bias": (queries, keys, heads),
        "psi": (rows, out, keys, heads, value_dim),
        "beta": (rows, out, keys, heads, value_dim),
        "key_psi": (rows, out, keys, heads, dim),
    }
    for name, table in tables.items():
        if name in ("positional_key", "fiber_key", "key_psi") and query is None:
            raise ValueError(f"terms.{name}: needs a query, which it is multiplied with, but query is None")
        shape = expected[name]
        if name == "fiber_key" and table.ndim == 5 and out == -1:
            shape = (-1, *shape)
        if maps_channels(name, table):
            shape = (*shape, shape[3] * shape[4])
        fits = table.ndim == len(shape) and all(
            want == got
            or (want == -1 and got > 0)
            or (axis == 0 and name in ROW_TABLES and want == -1)
            or (got == 1 and (axis > 0 or name not in ROW_TABLES) and not (maps_channels(name, table) and axis > 2))
            for axis, (want, got) in enumerate(zip(shape, table.shape, strict=True))
        )
        if not fits:
            raise ValueError(f"terms.{name}: expected shape {shape} (-1: any), got {tuple(table.shape)}")
        reason = _reason_against(name, pattern, table)
        if reason is not None:
            raise ValueError(f"terms.{name}: {reason}")
    if out == -1:
        _check_output_frames(query if pattern == "pooled" else None, terms)


def _reason_against(name: str, pattern: Pattern, table: Tensor) -> str | None:
    """Return the reason why a pattern does not support a term of the right shape, or None if it does."""
    if pattern == "framewise" and name in ("displacement_bias", "psi", "beta", "key_psi") and table.shape[2] > 1:
        return f"with pattern 'framewise' the key axis must be 1, got {table.shape[2]}"
    if pattern == "pooled" and name in ("displacement_bias", "beta") and table.shape[2] > 1:
        return f"pattern 'pooled' adds it once for each neighbor, so the key axis must be 1, got {table.shape[2]}"
    if pattern == "pooled" and name in ("fiber_key", "fiber_bias"):
        return "pattern 'pooled' has one score for all frames of a neighbor, so there are no pairs of frames"
    if pattern == "framewise" and maps_channels(name, table):
        return "a matrix that mixes channels does not work with pattern 'framewise'"
    if pattern == "query_sum" and name == "key_psi":
        return "pattern 'query_sum' does not support factors of keys"
    return None


def maps_channels(name: str, table: Tensor | None) -> bool:
    """Return whether a term is a matrix of the channels of all heads, instead of a factor for each channel."""
    return name in ("psi", "key_psi") and table is not None and table.ndim == 6


def _check_output_frames(query: Tensor | None, terms: RelativeTerms) -> None:
    """Raise ValueError unless queries and tables agree on the number of output frames."""
    sizes = {} if query is None else {"query": query.shape[1]}
    sizes |= {f"terms.{name}": table.shape[1] for name, table in terms.tables().items() if name in ROW_TABLES}
    if terms.fiber_key is not None and terms.fiber_key.ndim == 5:
        sizes["terms.fiber_key"] = terms.fiber_key.shape[0]
    several = {argument: size for argument, size in sizes.items() if size > 1}
    if len(set(several.values())) > 1:
        found = ", ".join(f"{argument} has {size}" for argument, size in several.items())
        raise ValueError(f"{next(iter(several))}: expected the same number of output frames everywhere, but {found}")


def turn_pairs(signal: Float[Tensor, "*batch channels"], phases: Tensor) -> Float[Tensor, "*batch channels"]:
    """Rotate the channel pairs (2c, 2c + 1) of a signal ``[*, channels]`` by phases ``[*, channels / 2, 2]``."""
    pairs, phases = signal.unflatten(-1, (-1, 2)), phases.to(signal.dtype)
    if signal.dtype in (torch.float32, torch.float64) and not torch.compiler.is_compiling():
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(phases))
    else:  # complex numbers are not supported in half precision and by torch.compile
        (first, second), (cosine, sine) = pairs.unbind(-1), phases.unbind(-1)
        turned = torch.stack([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
    return turned.flatten(-2)


def opposite(phases: Tensor) -> Tensor:
    """Return the phases of the opposite rotations."""
    cosine, sine = phases.unbind(-1)
    return torch.stack([cosine, -sine], dim=-1)
