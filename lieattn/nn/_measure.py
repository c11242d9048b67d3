"""The Haar measure in sums over elements: what a key weighs besides its score."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lieattn.geometry import ScaledGraph
from lieattn.ops import Normalization, RelativeTerms


def haar_weights(graph: object) -> Tensor | None:
    """Measure of the source of each edge as the target sees it, ``[edges]``; None where all weigh the same."""
    return graph.log_haar.exp() if isinstance(graph, ScaledGraph) else None


def measured(terms: RelativeTerms, graph: object, normalize: Normalization) -> RelativeTerms:
    """Terms whose sums over the keys are integrals over the group (GSA-Nets, Eqs. 20 and 21).

    Weights that are exponentials of scores take the logarithm of the measure into the score, so that what they are
    divided by has it too; others are multiplied with it.
    """
    if not isinstance(graph, ScaledGraph):
        return terms
    if normalize in ("softmax", "exp-mean"):
        bias = graph.log_haar[:, None, None, None]
        if terms.displacement_bias is not None:
            bias = terms.displacement_bias + bias.to(terms.displacement_bias.dtype)
        return replace(terms, displacement_bias=bias)
    psi = graph.log_haar.exp()[:, None, None, None, None]
    return replace(terms, psi=psi if terms.psi is None else terms.psi * psi.to(terms.psi.dtype))
