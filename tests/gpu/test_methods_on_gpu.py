"""Curves, solutions and rounded solutions of methods on a CUDA device, or the emulated one, against the CPU's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from manifests.methods import LossAware
from manifests.quantize import Quantize
from pipeline.methods.base import Group
from pipeline.methods.method import Statistics
from pipeline.methods.registry import build_methods
from pipeline.ranks.curves import from_columns
from pipeline.rounding.choices import gradient_moments
from pipeline.rounding.solutions import input_moments
from pipeline.units.curves import Predict
from tests.emulated_device import EmulatedDevice
from tests.families.geometries import llama
from tests.methods.loss_aware_weights import make_statistics
from tests.methods.test_by_loss import by_loss, problem
from workers.curves import curve_result
from workers.solving import GroupProblem, solve_group

pytestmark = pytest.mark.gpu
LOSS = {"allocation": "loss"}
ENTRIES: dict[str, dict[str, Any]] = {
    "flat_llm": {"method": "flat_llm", "weighting": "loss", "selection": "eliminate", **LOSS},
    "lorc": {"method": "lorc", "weighting": "loss", **LOSS},
    "joint_rank_k": {"method": "joint_rank_k", "weighting": "loss", **LOSS},
    "lestd": {"method": "lestd", "target": "attention", "sweeps": 1, "refine_sweeps": 1, **LOSS},
    "loss_aware": {"method": "loss_aware", "rank_multiple": 32},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_what_methods_make_of_a_group(name: str, emulated: EmulatedDevice | None) -> None:
    entry, where = ENTRIES[name], llama("gqa", hidden_size=64, intermediate_size=96)
    (method,) = build_methods(by_loss(entry))
    for group in method.claims(where):
        if group.layer != 0:
            continue
        _, _, weights, statistics = problem(entry, where, group.name)
        rounding = replace(
            group,
            moments=(
                *input_moments(group.roles, where.layers[0].reads),
                *gradient_moments(group.roles, where.layers[0]),
            ),
        )
        moments = {**make_statistics(where, rounding).moments, **statistics.moments}
        statistics = replace(statistics, moments=moments)
        given = group.with_data(weights, statistics)
        expected, found = made_of(given), made_of(on_device(given))
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if isinstance(value, Tensor):
                assert found[key].is_cuda != key.endswith("weight_shape"), key
                torch.testing.assert_close(found[key].cpu(), value, rtol=1e-6, atol=1e-8)
            else:
                assert found[key] == pytest.approx(value, rel=1e-6, abs=1e-9), (group.name, key)


def on_device(group: Group[Any]) -> Group[Any]:
    moments = {moment: values.to("cuda") for moment, values in group.statistics.moments.items()}
    weights = {key: tensor.to("cuda") for key, tensor in group.weights.items()}
    return group.with_data(weights, Statistics(moments, group.statistics.tokens))


def made_of(group: Group[Any]) -> dict[str, Any]:
    """The losses of the curve, and of a point in the middle what it is solved to: as it is, and rounded."""
    made, task, problem = dict[str, Any](), group.task(0), GroupProblem(group)
    curve = curve_result(Predict(task, {}), problem, lambda _: group.statistics)
    points = from_columns(curve)
    made |= {f"loss {number}": point.loss for number, point in enumerate(points)}
    if isinstance(group.entry, LossAware) and task.name != "mlp":
        auto = Quantize(bits="auto", group=32)
        rounded = curve_result(Predict(task, {}), replace(problem, quantize=auto), lambda _: group.statistics)
        made |= {f"loss rounded {number}": point.loss for number, point in enumerate(from_columns(rounded))}
    for quantize in (None, Quantize(bits=4, group=None)):
        rounding = replace(problem, quantize=quantize)
        factors, solution, _ = solve_group(rounding, points[len(points) // 2].ranks)
        made |= {f"{quantize} {name}": tensor for name, tensor in factors.items()}
        made |= {f"{quantize} {name}": value for name, value in solution.report.items() if isinstance(value, float)}
    return made
