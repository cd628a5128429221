"""Rounds the matrices of a solution, each with the moment of its input. docs/methods.md#rounding.

Legend: O outputs, I inputs, r latents; C the moment of the inputs, A a first factor, B a second one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manifests.quantize import Quantize, is_skipped
from manifests.records import LevelKind, Scheme
from pipeline.kernels.gptq import Feedback, Rounded, error_feedback, round_with_feedback, rounding_error
from pipeline.kernels.packing import scaled
from pipeline.kernels.pivoted import PivotedFactors, expand
from pipeline.kernels.two_sided import OutputFeedback, round_both_sides
from pipeline.methods.method import Moment, Solution, Weights, stored_dtype
from pipeline.rounding.outputs import feedback_of_outputs
from pipeline.rounding.schemes import WEIGHT, packed_tensors

FIRST, SECOND, ROWS, COEFFICIENTS = (
    "first.weight",
    "second.weight",
    "pivoted.rows.weight",
    "pivoted.coefficients.weight",
)
PARTS = (FIRST, SECOND, ROWS, COEFFICIENTS, "weight")  # ends of keys, the longest first
LEAST_GROUP = 16  # smaller groups would store more in scales than they save
ERROR_ROWS = 512
Reads = Mapping[str, str]  # role -> the point that its dense matrix reads: `LayerGeometry.reads`
RIDGE = 1e-6  # of the latents' mean moment, towards the previous second factor
WRITER_INPUTS = ("o.in", "down.in")  # ends of the points that matrices which write to the residual stream read


class SolutionMatrix(NamedTuple):
    """A matrix to be rounded: its key, the roles that it serves, and the key of the factor whose output it reads."""

    key: str
    roles: tuple[str, ...]
    behind: str | None = None


class RoundedSolution(NamedTuple):
    """A solution with packed tensors in place of its matrices.

    Attributes:
        schemes: module path -> scheme.
        rounded: key of a matrix -> its codes and scales.
    """

    solution: Solution
    schemes: dict[str, Scheme]
    rounded: dict[str, Rounded]


class Feedbacks:
    """Caches error feedback by the moment of the matrices' input.

    Moments of what the residual stream holds are shrunk: behind rounded layers it has the noise of all of them. Inputs
    of matrices that write to the stream have the noise of their own block alone.
    """

    def __init__(self, quantize: Quantize) -> None:
        self.quantize = quantize
        self.cached: dict[str, Feedback | None] = {}

    def of(self, point: str, moment_II: Tensor | None, cached: bool) -> Feedback | None:
        """Return the feedback of a moment; None without a moment, or if it is zero.

        `point`: where the dense matrix reads. `cached`: the moment is that of the values at this point.
        """
        if moment_II is None:
            return None
        if cached and point in self.cached:
            return self.cached[point]
        quantize = self.quantize
        shrinkage = 0.0 if point.endswith(WRITER_INPUTS) else quantize.shrinkage
        found = error_feedback(moment_II, quantize.damping, quantize.least_clip, quantize.polish, shrinkage)
        if cached:
            self.cached[point] = found
        return found


def input_moments(roles: Sequence[str], reads: Reads) -> tuple[Moment, ...]:
    """Return the distinct moments that a group of these roles needs for rounding with error feedback."""
    return tuple(dict.fromkeys(Moment(reads[role]) for role in roles if role in reads))


def at_correction(
    pair: Moment, pairs: Sequence[Moment], moments: Mapping[Moment, Tensor], quantize: Quantize, reads: Reads
) -> tuple[dict[Moment, Tensor], Quantize]:
    """Return the moments and settings that round the result of one correction.

    At the pair's point, the moment is that of the compressed layer's values. Roles that read at another of the group's
    `pairs` are skipped, because that pair's correction returns them.
    """
    whole_1PF, read = moments[pair], Moment(pair.point)
    others = {other.point for other in pairs} - {pair.point}
    skip = (*quantize.skip, *(role for role, point in reads.items() if point in others))
    moments = {**moments, read: whole_1PF[:, : whole_1PF.shape[2]]}
    return moments, quantize.model_copy(update={"skip": skip})


def round_solution(
    solution: Solution,
    quantize: Quantize,
    bits: int,
    moments: Mapping[Moment, Tensor],
    weights: Weights,
    reads: Reads,
    feedbacks: Feedbacks | None = None,
    outputs: Mapping[str, Moment] | None = None,
) -> RoundedSolution:
    """Round every matrix of a solution.

    Dense matrices and first factors are rounded with the moment of the role's input: the solution's own, from `inputs`,
    or else the dense one's. Second factors and pivoted coefficients are then refitted to the outputs of the rounded
    first factors, B' = B A C Âᵀ (Â C Âᵀ)⁻¹, and rounded with the moment Â C Âᵀ of these latents. Without a moment, or
    with `feedback: false`, numbers are rounded to the nearest code. Tensors outside of linear modules and tables
    (biases, norms, factors per head, Tucker cores) are not rounded. `weights`: dense, in the dtype of the scales.
    `feedbacks`: a cache of error feedback. `outputs`: role -> `outputs_moment`, for `feedback: both`: whole matrices
    and second factors with such a moment are rounded with feedback on both sides.

    Raises ValueError with the matrix's name if no group fits its columns, or on NaN or infinity.
    """
    tensors, worst = dict(solution.tensors), 0.0
    schemes: dict[str, Scheme] = {}
    by_key: dict[str, Rounded] = {}
    nearest: list[str] = []
    one_sided: list[str] = []
    feedbacks, fed = Feedbacks(quantize) if feedbacks is None else feedbacks, quantize.feedback is not False
    for together in _reading_the_same(rounded_matrices(solution, quantize.skip), solution, weights, reads):
        first = together[0]
        dtype = stored_dtype(first.key, solution.tensors[first.key], weights, solution.forms)
        read = [
            _as_read(matrix, solution, moments, by_key, reads) if fed else (solution.tensors[matrix.key], None)
            for matrix in together
        ]
        moment_II = read[0][1]
        try:
            group = fitting_group(read[0][0].shape[1], quantize.group)
            summed = _read_by(first, solution, reads) is not None
            feedback = feedbacks.of(reads.get(first.roles[0], ""), moment_II, cached=summed)
            sections = [_sections(matrix, solution, moments, outputs or {}) for matrix in together]
            rounded = _round(read, feedback, sections, quantize.kinds_of_levels, bits, group, dtype)
        except ValueError as error:
            raise ValueError(f"{', '.join(matrix.key for matrix in together)}: {error}") from error
        for matrix, part, section in zip(together, rounded, sections, strict=True):
            path, scheme = matrix.key.removesuffix(WEIGHT), Scheme(bits=bits, group=group, levels=part.levels)
            del tensors[matrix.key]
            tensors |= packed_tensors(path, part.rounded.codes, part.rounded.scales, scheme, part.rounded.levels)
            schemes[path], by_key[matrix.key] = scheme, part.rounded
            worst = max(worst, part.error)
            nearest += [path] if moment_II is None else []
            one_sided += [path] if section is None and moment_II is not None else []
    report: dict[str, Any] = {"rounding_error": worst} if schemes else {}
    if kinds := sorted({scheme.levels for scheme in schemes.values()} - {"uniform"}):
        report["levels"] = kinds
    if nearest and moments and fed:
        report["nearest"] = sorted(nearest)
    if one_sided and quantize.feedback == "both":
        report["one_sided"] = sorted(one_sided)
    return RoundedSolution(replace(solution, tensors=tensors, report={**solution.report, **report}), schemes, by_key)


class _Candidate(NamedTuple):
    """A rounded matrix: the kind of its levels, its codes, and its relative error."""

    levels: LevelKind
    rounded: Rounded
    error: float


def _round(
    read: Sequence[tuple[Tensor, Tensor | None]],
    feedback: Feedback | None,
    sections: Sequence[Sequence[OutputFeedback] | None],
    kinds: Sequence[LevelKind],
    bits: int,
    group: int | None,
    dtype: torch.dtype,
) -> list[_Candidate]:
    """Round matrices with a common input, each to the kind of levels with the least error; the first of equal ones.

    `sections`: the feedback of each matrix's outputs, if it is rounded with feedback on both sides.
    """
    weights = [weight_oI for weight_oI, _ in read]
    candidates = []
    for kind in kinds:
        if kind == "uniform" and not any(sections):
            rounded = _round_together(weights, feedback, bits, group, dtype)
        else:  # each has its own table, or its own outputs
            rounded = [
                round_both_sides(weight_oI, feedback, each, bits, group, dtype, kind)
                if each and feedback is not None
                else round_with_feedback(weight_oI, feedback, bits, group, dtype, kind)
                for weight_oI, each in zip(weights, sections, strict=True)
            ]
        errors = [_error(weight_oI, each, moment) for (weight_oI, moment), each in zip(read, rounded, strict=True)]
        candidates.append([_Candidate(kind, *pair) for pair in zip(rounded, errors, strict=True)])
    return [min(each, key=lambda candidate: candidate.error) for each in zip(*candidates, strict=True)]


def _round_together(
    weights: Sequence[Tensor], feedback: Feedback | None, bits: int, group: int | None, dtype: torch.dtype
) -> list[Rounded]:
    """Round matrices to uniform levels at once."""
    rows = [len(weight_oI) for weight_oI in weights]
    rounded = round_with_feedback(torch.cat(list(weights)), feedback, bits, group, dtype)
    parts = zip(rounded.codes.split(rows), rounded.scales.split(rows), strict=True)
    return [Rounded(codes_oI, scales_oS, rounded.damping) for codes_oI, scales_oS in parts]


def multiplied(solution: Solution, rounded: Mapping[str, Rounded]) -> dict[tuple[str, ...], Tensor]:
    """Multiply out a solution's factors. Map the roles that share a matrix to it: (O, I), float64.

    `rounded`: the stored values of rounded tensors.
    """

    def stored(key: str) -> Tensor:
        return rounded[key].values if key in rounded else solution.tensors[key].to(torch.float64)

    products = {}
    for matrix in rounded_matrices(solution, ()):
        path, _, part = matrix.key.rpartition(".pivoted.")
        if path and f"pivoted.{part}" == COEFFICIENTS:
            rows, indices = stored(f"{path}.{ROWS}"), solution.tensors[f"{path}.pivoted.indices"].to(torch.int64)
            products[matrix.roles] = expand(PivotedFactors(rows, stored(matrix.key), indices))
        elif matrix.behind is not None:
            products[matrix.roles] = stored(matrix.key) @ stored(matrix.behind)
        elif not path and not matrix.key.endswith(FIRST):
            products[matrix.roles] = stored(matrix.key)
    return products


def readers_of_firsts(solution: Solution) -> dict[str, tuple[str, ...]]:
    """Map the key of each first factor or pivot rows to the roles whose second factors read it, in order."""
    readers: dict[str, set[str]] = {}
    for matrix in rounded_matrices(solution, ()):
        if matrix.behind is not None:
            readers.setdefault(matrix.behind, set()).update(matrix.roles)
    return {key: tuple(role for role in solution.forms if role in roles) for key, roles in readers.items()}


def roles_of_odd_groups(solution: Solution, quantize: Quantize) -> set[str]:
    """Return the roles with a matrix whose columns the group does not divide, so that it has smaller groups."""
    return {
        role
        for matrix in rounded_matrices(solution, quantize.skip)
        if fitting_group(solution.tensors[matrix.key].shape[1], quantize.group) != quantize.group
        for role in matrix.roles
    }


def fitting_group(columns: int, group: int | None) -> int | None:
    """Return how many of a matrix's columns share a scale: the greatest common divisor with `group`.

    Raises ValueError if it is less than LEAST_GROUP.
    """
    common = group and math.gcd(columns, group)
    if common and common < LEAST_GROUP:
        raise ValueError(f"groups of {group} have only {common} in common with {columns} columns")
    return common


def rounded_matrices(solution: Solution, skip: Sequence[str]) -> list[SolutionMatrix]:
    """Return the matrices of a solution to round, with first factors before the matrices that read their outputs."""
    matrices = []
    for key in sorted(key for key, tensor in solution.tensors.items() if tensor.ndim > 1):
        part = next((part for part in PARTS if key.endswith(f".{part}")), "")
        owner = key.removesuffix(f".{part}")
        shared = tuple(role for role, form in solution.forms.items() if form.group == owner)
        roles = shared if part in (ROWS, COEFFICIENTS) else (owner,)
        if not roles or any(is_skipped(role, skip) for role in roles):
            continue
        if part in ("weight", FIRST, ROWS):
            matrices.append(SolutionMatrix(key, roles))
        elif part == COEFFICIENTS:
            matrices.append(SolutionMatrix(key, roles, f"{owner}.{ROWS}"))
        elif part == SECOND:
            matrices.append(SolutionMatrix(key, roles, f"{_owner_of_first(owner, solution)}.{FIRST}"))
    return sorted(matrices, key=lambda matrix: matrix.behind is not None)


def _owner_of_first(role: str, solution: Solution) -> str:
    """Return the role that names the first factor read by this role's second one."""
    group = solution.forms[role].group
    sharing = [other for other, form in solution.forms.items() if group and form.group == group]
    return next(other for other in (role, *sharing) if f"{other}.{FIRST}" in solution.tensors)


def _as_read(
    matrix: SolutionMatrix,
    solution: Solution,
    moments: Mapping[Moment, Tensor],
    by_key: Mapping[str, Rounded],
    reads: Reads,
) -> tuple[Tensor, Tensor | None]:
    """Return the weight to round, and the moment of its input, float64, or None."""
    weight_OI = solution.tensors[matrix.key]
    input_II = _input(matrix.roles[0], solution, moments, reads)
    before_rI = None if matrix.behind is None else solution.tensors[matrix.behind].to(torch.float64)
    columns = (weight_OI if before_rI is None else before_rI).shape[1]
    if input_II is None or input_II.shape != (columns, columns):
        return weight_OI, None
    if before_rI is None:
        return weight_OI, input_II
    rounded_rI = by_key[matrix.behind].values if matrix.behind and matrix.behind in by_key else before_rI
    read_Ir = input_II @ rounded_rI.T
    latents_rr = rounded_rI @ read_Ir
    return _refit(weight_OI.to(torch.float64), before_rI @ read_Ir, latents_rr), latents_rr


def _sections(
    matrix: SolutionMatrix, solution: Solution, moments: Mapping[Moment, Tensor], outputs: Mapping[str, Moment]
) -> tuple[OutputFeedback, ...] | None:
    """Return the feedback of a matrix's outputs. None if its moment is unknown, or its rows are no dense outputs."""
    role = matrix.roles[0]
    gradient_nss = moments.get(outputs[role]) if role in outputs else None
    # A dense matrix of a form has other inputs, fewer of its outputs, or (value heads in a basis) other outputs.
    known = role not in solution.forms or role in solution.inputs or role in solution.outputs
    if gradient_nss is None or not (matrix.key == f"{role}.{SECOND}" or (known and matrix.key == f"{role}{WEIGHT}")):
        return None
    return feedback_of_outputs(role, len(solution.tensors[matrix.key]), solution, gradient_nss)


def _error(weight_OI: Tensor, rounded: Rounded, moment_II: Tensor | None) -> float:
    """Estimate `rounding_error` on evenly spread rows, because products with the moment are more work than rounding."""
    rows = slice(None, None, max(1, len(weight_OI) // ERROR_ROWS))
    stored_oI = scaled(rounded.codes[rows], rounded.scales[rows].to(torch.float64), rounded.levels)
    return rounding_error(weight_OI[rows], stored_oI, moment_II)


def _reading_the_same(
    matrices: Sequence[SolutionMatrix], solution: Solution, weights: Weights, reads: Reads
) -> list[list[SolutionMatrix]]:
    """Group matrices that can be rounded together: of the same dtype, with the same moment of their inputs."""
    groups: dict[Any, list[SolutionMatrix]] = {}
    for matrix in matrices:
        tensor, point = solution.tensors[matrix.key], _read_by(matrix, solution, reads)
        dtypes = tensor.dtype, stored_dtype(matrix.key, tensor, weights, solution.forms)
        groups.setdefault((point, tensor.shape[1], *dtypes) if point else matrix.key, []).append(matrix)
    return list(groups.values())


def _read_by(matrix: SolutionMatrix, solution: Solution, reads: Reads) -> Moment | None:
    """Return the moment of a matrix's input, if it was summed on calibration text."""
    role = matrix.roles[0]
    own = matrix.behind is not None or role in solution.inputs
    return Moment(reads[role]) if role in reads and not own else None


def _input(role: str, solution: Solution, moments: Mapping[Moment, Tensor], reads: Reads) -> Tensor | None:
    """Return the moment of the input of a role's stored matrix, float64, or None."""
    if role in solution.inputs:
        return solution.inputs[role]().to(torch.float64)
    dense = moments.get(Moment(reads[role])) if role in reads else None
    return None if dense is None else dense[0].to(torch.float64)


def _refit(second_Or: Tensor, cross_rr: Tensor, latents_rr: Tensor) -> Tensor:
    """Return B' that minimises Σ‖B z − B' ẑ‖², with the latents z before and ẑ after rounding of the first factor."""
    mean = latents_rr.diagonal().mean()
    if not mean > 0.0:
        return second_Or
    ridge_rr = RIDGE * mean * torch.eye(len(latents_rr), dtype=latents_rr.dtype, device=latents_rr.device)
    lower_rr, failed = torch.linalg.cholesky_ex(latents_rr + ridge_rr)
    if int(failed):
        return second_Or
    return torch.cholesky_solve((second_Or @ (cross_rr + ridge_rr)).T, lower_rr).T
