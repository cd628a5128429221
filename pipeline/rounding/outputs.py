"""Feedback of a matrix's outputs, for rounding with feedback on both sides. docs/methods.md#feedback-on-both-sides.

Legend: n sections of s outputs each.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from pipeline.families.blocks import Matrix
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.two_sided import SECTION, OutputFeedback, output_feedback
from pipeline.methods.method import Moment, Solution


def outputs_moment(matrix: Matrix) -> Moment:
    """Return the moment of the gradients at a matrix's outputs, in equal sections of at most SECTION outputs."""
    least = -(-matrix.outputs // SECTION)
    sections = next(count for count in range(least, matrix.outputs + 1) if matrix.outputs % count == 0)
    point = matrix.feeds if matrix.writes_stream else f"{matrix.role}.out"
    return Moment(point, heads=sections, groups=sections, kind="gradient")


def output_moments(roles: Iterable[str], geometry: LayerGeometry) -> dict[str, Moment]:
    """Map the roles that can be rounded with feedback on both sides to `outputs_moment`. Routed experts are not among
    them: each would need gradients of its own tokens."""
    known = (role for role in roles if role in geometry.matrices and role not in geometry.routed_roles)
    return {role: outputs_moment(geometry.matrices[role]) for role in known}


def feedback_of_outputs(
    role: str, rows: int, solution: Solution, gradient_nss: Tensor
) -> tuple[OutputFeedback, ...] | None:
    """Return the feedback of each section of the outputs of a role's stored matrix.

    None if its rows are no outputs of the dense matrix, in their order. `gradient_nss`: of the dense outputs.
    """
    kept_k, size = solution.outputs.get(role), gradient_nss.shape[1]
    sections = list(gradient_nss)
    if kept_k is not None:
        if bool((kept_k.diff() <= 0).any()):
            return None
        inside = [kept_k[kept_k // size == number] % size for number in range(len(sections))]
        sections = [
            whole_ss[kept_s][:, kept_s] for whole_ss, kept_s in zip(sections, inside, strict=True) if len(kept_s)
        ]
    if sum(map(len, sections)) != rows:
        return None
    return tuple(map(output_feedback, sections))
