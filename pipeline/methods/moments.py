"""The moments of single matrices: of their inputs, and of the loss's gradient at their outputs."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.families.blocks import Matrix, roles_of
from pipeline.kernels.sensitivity import Factored, factored
from pipeline.methods.method import Moment, Statistics


def input_moment(matrix: Matrix) -> Moment:
    """Return the moment of the values that a matrix reads."""
    return Moment(matrix.reads)


def output_gradient(matrix: Matrix) -> Moment:
    """Return the moment of the gradient at a matrix's outputs.

    A matrix that writes to the residual stream gets the whole moment of the gradient there; others the diagonal.
    """
    if matrix.writes_stream:
        return Moment(matrix.feeds, kind="gradient")
    return Moment(f"{matrix.role}.out", kind="gradient", diagonal=True)


def pull(matrices: Iterable[Matrix]) -> Moment:
    """Return the moment of the gradient at the shared input of these matrices; only the part through them counts."""
    return Moment(f"pull:{'+'.join(roles_of(matrices))}", kind="gradient")


def pair(point: str) -> Moment:
    """Return the joint moment of the dense and the compressed model at a point. docs/methods.md#corrections."""
    return Moment(point, kind="pair")


def factored_mean(statistics: Statistics, moment: Moment) -> Factored:
    """Return the factor of a moment's mean. It is computed once, because the experts of a layer share moments of its
    stream."""
    total = statistics.moments[moment]
    kept = statistics.factors.get(moment)
    if kept is None or kept[0] is not total:  # other statistics may have been made of these
        kept = total, factored(statistics.mean(moment)[0])
        statistics.factors[moment] = kept
    return kept[1]
