"""The work of rounding, from the geometry and the tasks. docs/plan.md#work-of-a-layer.

Legend: O outputs, I inputs of a stored matrix; N intermediate.
"""

from __future__ import annotations

from collections.abc import Sequence

from manifests.schema import Manifest
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.gptq import TABLE_SWEEPS
from pipeline.kernels.two_sided import POLISHED_ROWS, SECTION
from pipeline.methods.work import REMOVED_SHARE, Work

TRIED_BYTES = 700  # moved per number to try twenty scales
FED_BYTES = 300  # moved per number for error feedback, mostly the earlier errors of its block
SIZES_TRIED = 8  # sizes of a group that are solved and rounded, if bits are chosen: four kinds at two sizes
SEARCHED_BYTES = {"normal": 1300, "iq4_nl": 1300, "learned": 2000}  # moved per number to search the scales of a table
SEARCHED_NEAREST = 1.5  # as much without feedback, where more scales are tried
BOTH_BYTES = 1000  # moved per number for feedback on both sides, mostly within a block


def rounding_work(job: PlannedJob) -> dict[str, Work]:
    """Map every rounded task of the job, by `Task.key`, to the work of its rounding; none without `quantize`.

    It is I³/3 for the factor of each input, whose readers are rounded together, and O I² for each matrix and each pass
    over it: one of error feedback, and the sweeps of polishing. Feedback on both sides takes s² O/3 and in each pass s
    O I more, with sections of s outputs, one matrix after another; its sweeps take O I² more, and polish POLISHED_ROWS
    of each section at a time. Matrices are counted as dense; their factors take less. A method removes
    `REMOVED_SHARE` of an MLP's channels.
    """
    manifest, quantize, fed = job.manifest, job.manifest.rounding, job.manifest.rounds_by_feedback
    if quantize is None:
        return {}
    tables = [kind for kind in quantize.kinds_of_levels if kind != "uniform"]
    searched = sum(SEARCHED_BYTES[kind] for kind in tables)
    kinds = len(quantize.kinds_of_levels)
    passes = kinds + TABLE_SWEEPS * len(tables) + quantize.polish * (kinds - len(tables))
    works: dict[str, Work] = {}
    for task in job.tasks:
        layer = job.geometry.layers[task.layer]
        kept = 1.0 - REMOVED_SHARE if task.method < len(manifest.methods) else 1.0
        sizes = [_stored_shape(role, layer, kept) for role in task.roles if job.rounds(layer, role)]
        points = {*layer.reads.values()}
        inputs = {moment.point for moment in task.moments if moment.point in points and moment.kind == "value"}
        numbers = sum(rows * columns for rows, columns in sizes)
        if fed and inputs and quantize.feedback == "both":
            works[task.key] = _both_sides(sizes, kinds, passes - kinds, searched)
        elif fed and inputs:
            widths = {columns for _, columns in sizes}
            works[task.key] = Work(
                sum(width**3 / 3 for width in widths),
                single=passes * float(sum(rows * columns**2 for rows, columns in sizes)),
                columns=passes * sum(widths),
                moved=numbers * float(TRIED_BYTES + passes * FED_BYTES + searched),
            )
        elif numbers:
            works[task.key] = Work(moved=numbers * (TRIED_BYTES + SEARCHED_NEAREST * searched))
    return works


def trials(manifest: Manifest) -> int:
    """Return how often a group is rounded to choose its bits; 0 if bits are given. The most bits are not tried."""
    quantize = manifest.quantize
    return SIZES_TRIED * (len(quantize.choices) - 1) if quantize is not None and quantize.bits == "auto" else 0


def _both_sides(sizes: Sequence[tuple[int, int]], kinds: int, sweeps: int, searched: int) -> Work:
    """Count the rounding of matrices of these shapes with feedback on both sides."""
    sections = [-(-rows // SECTION) for rows, _ in sizes]
    flops = sum(width**3 / 3 for width in {columns for _, columns in sizes})
    fed_flops, steps, moved = 0.0, 0, 0.0
    for (rows, columns), count in zip(sizes, sections, strict=True):
        flops += rows**3 / count**2 / 3
        fed_flops += rows * columns * ((kinds + 2 * sweeps) * columns + (kinds + sweeps) * rows / count)
        turns = -(-rows // (count * POLISHED_ROWS))
        steps += kinds * 2 * (rows + count * columns) + sweeps * turns * columns
        moved += rows * columns * float(TRIED_BYTES + searched + kinds * BOTH_BYTES + sweeps * FED_BYTES)
    return Work(flops, single=fed_flops, columns=steps, moved=moved)


def _stored_shape(role: str, layer: LayerGeometry, kept: float) -> tuple[int, int]:
    """Return rows and columns of a matrix if the share `kept` of an MLP's channels is kept."""
    rows, columns = layer.weight_shape(role)
    for block in layer.mlps:
        if role == block.writer.role:
            return rows, round(columns * kept)
        if role in block.roles:
            return round(rows * kept), columns
    return rows, columns
