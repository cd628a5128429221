"""The moments of single matrices: of their inputs, and of the loss's gradient at their outputs."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.families.blocks import Matrix, roles_of
from pipeline.kernels.sensitivity import Factored, factored
from pipeline.methods.method import Moment, Statistics

OUTPUT_GRADIENT = Moment("out", kind="gradient")  # at the outputs of a layer


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
    """Return the moment of the gradient at the shared input of these matrices, of the part that passes through them."""
    return Moment(f"pull:{'+'.join(roles_of(matrices))}", kind="gradient")


def pair(point: str) -> Moment:
    """Return the pair of a point, `Moment.kind`. docs/methods.md#corrections."""
    return Moment(point, kind="pair")


def factored_mean(statistics: Statistics, moment: Moment) -> Factored:
    """Return the factor of a moment's mean, cached because the experts of a layer share moments."""
    total = statistics.moments[moment]
    cached = statistics.factors.get(moment)
    if cached is None or cached[0] is not total:  # `with_mean` shares the cache, but not the moment
        cached = total, factored(statistics.mean(moment)[0])
        statistics.factors[moment] = cached
    return cached[1]
