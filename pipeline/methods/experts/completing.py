"""Completes the moments of experts that fewer calibration tokens passed than they have channels.

Tokens of other experts stand for those that are lacking. docs/methods.md#few-tokens.

Legend: T sampled tokens of the mixture, m of them, D hidden, N channels of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.families.blocks import MLPBlock
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.refit import evenly_spread
from pipeline.kernels.routing import OTHERS
from pipeline.methods.experts.mixture import ROUTER, ROUTER_BIAS, Mixture, mixture_of, read_by
from pipeline.methods.method import Moment, OtherInputs, Statistics, Task, Weights
from pipeline.methods.moments import input_moment, output_gradient, pull

Read = Callable[[Sequence[str]], Weights]  # returns the dense weights of some roles of a layer


def sample_of_others(block: MLPBlock) -> Moment:
    """Return the sample of the mixture's inputs from which tokens of other experts are taken.

    It has one token more than are needed, so that it is never the same as a method's own sample.
    """
    return Moment(block.passing, kind="sample", tokens=OTHERS * block.width + 1)


def samples_of_others(layer: LayerGeometry) -> set[Moment]:
    """Return these samples of a layer, which only complete moments."""
    return {sample_of_others(block) for block in layer.unlike_experts}


def own_experts(task: Task, layer: LayerGeometry) -> list[MLPBlock]:
    """Return the experts of whose own tokens a task has moments, in the layer's order."""
    at = layer.expert_at
    of = {at[moment.point].name for moment in task.moments if moment.point in at and moment in _own(at[moment.point])}
    return [block for block in layer.experts if block.name in of] if of else []


def with_samples_of_others(tasks: Sequence[Task], geometry: Geometry) -> tuple[Task, ...]:
    """Add that sample to tasks with a moment of single experts, unless they have a larger one."""
    return tuple(_with_sample(task, geometry.layers[task.layer]) for task in tasks)


def _with_sample(task: Task, layer: LayerGeometry) -> Task:
    blocks = own_experts(task, layer)
    if not blocks or _sample(blocks[0], task.moments) is not None:
        return task
    return replace(task, moments=(*task.moments, sample_of_others(blocks[0])))


def needed_records(task: Task, layer: LayerGeometry, records: Mapping[Moment, Any]) -> Mapping[Moment, Any]:
    """Return the records of a task's moments without the sample of others, unless an expert has few tokens."""
    counts = {moment: record.tokens for moment, record in records.items() if hasattr(record, "tokens")}
    added = samples_of_others(layer)
    if added.isdisjoint(records) or experts_with_few(task, layer, counts, [*records]):
        return records
    return {moment: record for moment, record in records.items() if moment not in added}


def experts_with_few(
    task: Task, layer: LayerGeometry, passed: Mapping[Moment, int], available: Sequence[Moment]
) -> dict[str, int]:
    """Map the blocks of a task's experts with fewer tokens than channels to their tokens.

    `passed`: as in `Statistics`. `available`: all moments of the task. Without a sample of the mixture's inputs, no
    moment can be completed.
    """
    few = {}
    for block in layer.experts:
        counts = [passed[moment] for moment in _own(block) if moment in passed and moment in task.moments]
        if counts and counts[0] < block.width and _sample(block, available) is not None:
            few[block.name] = counts[0]
    return few


def completed(task: Task, layer: LayerGeometry, statistics: Statistics, read: Read) -> Statistics:
    """Return the statistics with the moments of experts with few tokens completed. Others are unchanged.

    `read` is called for each such expert.
    """
    few = experts_with_few(task, layer, statistics.passed, [*statistics.moments])
    for number, block in enumerate(layer.experts):
        if block.name in few:
            roles = [*block.roles, ROUTER, *((ROUTER_BIAS,) if ROUTER_BIAS in layer.roles else ())]
            mixture = mixture_of(layer, read(roles))
            statistics = _Few(block, number, few[block.name], mixture, statistics).completed()
    return statistics


@dataclass(frozen=True)
class _Few:
    """An expert, by its place in the layer, that fewer tokens `passed` than it has channels."""

    block: MLPBlock
    number: int
    passed: int
    mixture: Mixture
    statistics: Statistics

    def completed(self) -> Statistics:
        """Return the statistics with its moments completed."""
        others = self._others()
        if others is None:
            return self.statistics
        block, moments = self.block, {**self.statistics.moments, **self._gradients(others)}
        if (written := input_moment(block.writer)) in moments:
            lacking = _square(self.mixture.hidden(self.number, others.inputs).double() * others.factor)
            moments[written] = others.scale * (moments[written] + lacking)
        if block.weighed and (inputs := input_moment(block.readers[0])) in moments:
            moments[inputs] = others.scale * (moments[inputs] + _square(others.inputs.double() * others.factor))
        return replace(self.statistics, moments=moments, others={**self.statistics.others, block.name: others})

    def _others(self) -> OtherInputs | None:
        """Return the tokens of others that stand for those that it lacks."""
        block, moments = self.block, self.statistics.moments
        sample = _sample(block, [*moments])
        assert sample is not None
        inputs_TD = moments[sample][0]
        places_m = evenly_spread(0, len(inputs_TD), len(inputs_TD), OTHERS * block.width)
        inputs_mD = inputs_TD[places_m.to(inputs_TD.device)]
        others = self.mixture.route(inputs_mD).others(self.number, block.width, self.passed)
        if others is None:
            return None
        inputs_mD, factor = self.mixture.as_own(inputs_mD, others)
        if (written := input_moment(block.writer)) in moments:
            own = float(moments[written].diagonal(dim1=-2, dim2=-1).sum())
            factor *= others.matched(own, self.mixture.hidden(self.number, inputs_mD) * factor, self.passed)
        return OtherInputs(inputs_mD, factor, others.scale)

    def _gradients(self, others: OtherInputs) -> dict[Moment, Tensor]:
        """Return the completed moments of gradients at the readers' outputs, and of the part that readers pull to their
        input.

        E[g²] of channel j is taken as wᵀ G w, w the writer's column, times the mean square of the channel's derivative.
        """
        moments, metric = self.statistics.moments, output_gradient(self.block.writer)
        if metric not in moments:
            return {}
        squares, changed = self._squares(others, moments[metric][0].double()), {}
        expert = self.mixture.experts[self.number]
        readers = [*zip(self.block.readers, (weight.double() for weight in expert.readers), squares, strict=True)]
        for reader, _, squares_N in readers:
            if (moment := output_gradient(reader)) in moments:
                changed[moment] = others.scale * (moments[moment] + squares_N)
        for some in (readers, *([each] for each in readers)):
            if (moment := pull([reader for reader, _, _ in some])) in moments:
                pulled = sum((weight_ND.T * squares_N @ weight_ND for _, weight_ND, squares_N in some), moments[moment])
                changed[moment] = others.scale * pulled
        return changed

    def _squares(self, others: OtherInputs, metric_DD: Tensor) -> list[Tensor]:
        """Return the sums of squares (N,), per calibration token, that others add to the gradient at each reader's
        outputs, before the sums are scaled."""
        expert = self.mixture.experts[self.number]
        written_DN = expert.writer.double()
        felt_N = ((metric_DD @ written_DN) * written_DN).sum(dim=0)
        with torch.inference_mode(False), torch.enable_grad():
            inputs_mD = others.inputs.clone().to(torch.promote_types(others.inputs.dtype, torch.float32))
            with torch.no_grad():
                read = read_by(expert, inputs_mD)
            read = [each_mN.clone().requires_grad_() for each_mN in read]
            slopes = torch.autograd.grad(self.mixture.channels(*read).sum(), read)
        factor = others.factor**2 / self.statistics.tokens
        return [slope_mN.double().square().sum(dim=0) * felt_N * factor for slope_mN in slopes]


def _own(block: MLPBlock) -> tuple[Moment, ...]:
    """Return the moments of values that only tokens of an expert pass."""
    return (input_moment(block.writer), *((input_moment(block.readers[0]),) if block.weighed else ()))


def _sample(block: MLPBlock, moments: Sequence[Moment]) -> Moment | None:
    """Return the smallest sample of the mixture's inputs that is large enough."""
    samples = [moment for moment in moments if (moment.point, moment.kind) == (block.passing, "sample")]
    return min(
        (moment for moment in samples if moment.tokens >= OTHERS * block.width),
        key=lambda moment: moment.tokens,
        default=None,
    )


def _square(values_mN: Tensor) -> Tensor:
    square_NN: Tensor = values_mN.T @ values_mN
    return square_NN
