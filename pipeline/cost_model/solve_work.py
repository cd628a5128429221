"""The work of solving a group, or of comparing its sizes. docs/plan.md#work-of-a-layer.

Groups count the operations of their own computations. What every group needs is added here: elementwise work, and the
completion of experts' moments.
"""

from __future__ import annotations

from typing import Any

from pipeline.cost_model.completion_work import completion_flops, moments_without_others
from pipeline.cost_model.rates import Rates
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.base import Group
from pipeline.methods.method import Moment, Task
from pipeline.methods.work import Work, moment_width

EIGEN_FLOPS, VALUES_FLOPS = 10.0, 4.0  # times n³, with and without vectors; equivalent to their time on a CPU
WEIGHT_MOVED, MOMENT_MOVED = 160, 64  # bytes per number of weights and moments: read, checked, float64, and back


def triangle_numbers(moment: Moment, geometry: LayerGeometry) -> int:
    """Count the numbers of one triangle of each group's moment, or of its diagonal."""
    width = moment_width(moment, geometry)
    return moment.groups * (width if moment.diagonal else width * (width + 1) // 2)


def curve_work(task: Task, group: Group[Any], tokens: int) -> Work:
    """Return the work of comparing a task's sizes. `tokens`: of the calibration text."""
    return group.curve_work(tokens) + _common_work(task, group.geometry, tokens)


def solve_work(task: Task, group: Group[Any], tokens: int, hinted: bool = False) -> Work:
    """Return the work of solving a task. `hinted`: a curve was computed from the same moments."""
    return group.solve_work(tokens, hinted) + _common_work(task, group.geometry, tokens)


def _common_work(task: Task, layer: LayerGeometry, tokens: int) -> Work:
    """Return the elementwise work on a task's weights and moments before and after solving, and the completion of
    moments."""
    moments = [moment for moment in moments_without_others(task, layer) if moment.kind != "sample"]
    read = MOMENT_MOVED * 2.0 * sum(triangle_numbers(moment, layer) for moment in moments)
    return Work(sampled=completion_flops(task, layer, tokens), moved=WEIGHT_MOVED * layer.numbers(task.roles) + read)


def eigen_flops(work: Work) -> float:
    """Return the float64 operations of eigenproblems."""
    return EIGEN_FLOPS * work.vectors + VALUES_FLOPS * work.values


def solve_flops(work: Work) -> float:
    """Return the float64 operations, including eigenproblems and factors."""
    return work.products + work.factors + eigen_flops(work)


def solve_seconds(work: Work, rates: Rates) -> float:
    """Return the time of one task's curve, solve or rounding on one worker."""
    computing = work.products / rates.double + work.single / rates.single
    computing = computing + eigen_flops(work) / rates.eigen + work.factors / rates.factors
    seconds = computing + work.moved / rates.memory + work.sampled / rates.products
    return seconds + work.steps * rates.step_s + work.columns * rates.column_s
