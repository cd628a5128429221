"""The work of completing the moments of experts with few tokens. docs/methods.md#few-tokens.

Legend: N channels of an expert, D hidden, m sampled tokens of others.
"""

from __future__ import annotations

from pipeline.families.blocks import MLPBlock
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.routing import OTHERS
from pipeline.methods.experts.completing import own_experts, samples_of_others
from pipeline.methods.method import Moment, Task
from pipeline.methods.moments import input_moment

VALUES = 6  # float64 arrays (m, N) at a time: the outputs of both readers, channels, derivatives, products
ROUTED = 3  # float32 arrays (m, E): logits, scores, their order


def moments_without_others(task: Task, layer: LayerGeometry) -> list[Moment]:
    """Return a task's moments without the sample from which tokens of others are taken, which only completes them."""
    added = samples_of_others(layer)
    return [moment for moment in task.moments if moment not in added]


def completed_experts(task: Task, layer: LayerGeometry) -> list[MLPBlock]:
    """Return the experts of a task whose moments are completed if they have few tokens."""
    return [block for block in own_experts(task, layer) if input_moment(block.writer) in task.moments]


def completion_flops(task: Task, layer: LayerGeometry, tokens: int) -> float:
    """Return the operations on tokens of others, if even routing leaves experts fewer tokens than channels."""
    flops = 0.0
    for block in completed_experts(task, layer):
        if tokens * block.share < block.width:
            others = min(tokens, OTHERS * block.width)
            per_token = 2.0 * layer.hidden * (2 * block.width * len(block.readers) + len(layer.experts))
            flops += others * (per_token + 2.0 * block.width**2)
    return flops


def completion_bytes(task: Task, layer: LayerGeometry) -> int:
    """Return the memory of completing one expert's moments, besides the sample: inputs, values and the router's."""
    return max(
        (
            OTHERS * block.width * (8 * VALUES * block.width + 8 * layer.hidden + 4 * ROUTED * len(layer.experts))
            for block in completed_experts(task, layer)
        ),
        default=0,
    )
