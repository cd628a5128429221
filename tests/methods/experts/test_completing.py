"""The moments of experts with few tokens, completed by tokens of others, against loops and finite differences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.families.registry import geometry_of, standard_config
from pipeline.methods.experts.completing import completed, experts_with_few, sample_of_others, with_samples_of_others
from pipeline.methods.experts.mixture import mixture_of
from pipeline.methods.method import Moment, Statistics, Task
from pipeline.methods.moments import input_moment, output_gradient, pull
from pipeline.methods.registry import build_methods, claim_tasks
from tests import factories
from tests.families.geometries import llama, manifest

FAMILIES = ("mixtral", "deepseek_v3", "gpt_oss", "llama4_text")
TOKENS, EXPERT = 90, 2
TEXT = {"text": {"files": ["a.txt"]}, "samples": 2, "sequence_length": 8, "shards": 1}


class Layer:
    """The last layer of a family, and the statistics of one of its experts: sums that do not contain others."""

    def __init__(self, family: str, passed: int) -> None:
        config = standard_config(factories.make_config(family, num_hidden_layers=3).to_dict())
        self.layer, source = geometry_of(config).layers[-1], torch.Generator().manual_seed(4)
        self.block, self.passed, self.calls = self.layer.experts[EXPERT], passed, 0

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=source, dtype=torch.float64)

        roles = [role for role in self.layer.roles if role in ("router", "router_bias") or role.startswith("experts.")]
        self.weights = {key: draw(*shape) for key, (_, shape) in self.layer.tensors(roles).items()}
        self.inputs_TD, hidden = draw(TOKENS, self.layer.hidden), self.layer.hidden
        width, (gate, up), writer = self.block.width, self.block.readers, self.block.writer
        full: dict[Moment, int] = {
            input_moment(writer): width,
            output_gradient(writer): hidden,
            pull((gate, up)): hidden,
        }
        full |= {input_moment(gate): hidden} if self.block.weighed else {}
        self.moments = {moment: (root := draw(1, size, size)) @ root.mT for moment, size in full.items()}
        self.moments |= {output_gradient(reader): draw(1, width).square() for reader in (gate, up)}
        self.moments[sample_of_others(self.block)] = self.inputs_TD[None]
        counts = {moment: passed for moment in full if moment.kind == "value"}
        self.task = Task(self.layer.index, self.block.name, self.block.roles, tuple(self.moments), method=0)
        self.statistics = Statistics(self.moments, TOKENS, passed=counts)

    def read(self, roles: Any) -> dict[str, Tensor]:
        self.calls += 1
        return {
            key: value for key, value in self.weights.items() if key.startswith(tuple(f"{role}." for role in roles))
        }

    def completed(self) -> Statistics:
        return completed(self.task, self.layer, self.statistics, self.read)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("passed", [0, 1, 20])
def test_moments_are_means_over_own_tokens_and_those_of_others(family: str, passed: int) -> None:
    case = Layer(family, passed)
    before = {moment: value.clone() for moment, value in case.moments.items()}
    found, mixture, width = case.completed(), mixture_of(case.layer, case.weights), case.block.width
    routing = mixture.route(case.inputs_TD)
    rest_m = [token for token in range(TOKENS) if token not in routing.of(EXPERT)[0].tolist()]
    lacking, scale = (width - passed) / len(rest_m), max(1, passed) / width
    weight = float(routing.weights.square().mean().sqrt())
    inner, outer = (weight, 1.0) if mixture.rule.weighs_inputs else (1.0, weight)
    inputs_mD = inner * case.inputs_TD[rest_m]
    hidden_mN = outer * mixture.hidden(EXPERT, inputs_mD)
    written, energy = input_moment(case.block.writer), hidden_mN.square().sum(dim=1).mean()
    lacking *= float((case.moments[written][0].trace() + energy) / ((passed + 1) * energy))
    expected_NN = scale * (case.moments[written][0] + lacking * hidden_mN.T @ hidden_mN)
    torch.testing.assert_close(found.moments[written][0], expected_NN)
    if case.block.weighed:
        read = input_moment(case.block.readers[0])
        expected_DD = scale * (case.moments[read][0] + lacking * inputs_mD.T @ inputs_mD)
        torch.testing.assert_close(found.moments[read][0], expected_DD)
    assert all(torch.equal(case.moments[moment], value) for moment, value in before.items()), "nothing in place"
    assert found.unseen == ()
    assert case.calls == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_independent_gradients_at_the_output(family: str) -> None:
    """Channel j of a reader gets wᵀ G w, w the writer's column, times its mean squared derivative."""
    case, step = Layer(family, 3), 1e-5
    found, mixture, block = case.completed(), mixture_of(case.layer, case.weights), case.block
    others = found.others[block.name]
    written_DN = case.weights[block.writer.weight_key]
    felt_N = ((case.moments[output_gradient(block.writer)][0] @ written_DN) * written_DN).sum(dim=0)
    pulled_DD = case.moments[pull(block.readers)][0].clone()
    expert = mixture.experts[EXPERT]
    biases = expert.biases or (0.0, 0.0)
    read = [others.inputs @ weight.T + bias for weight, bias in zip(expert.readers, biases, strict=False)]
    for place, reader in enumerate(block.readers):
        up, down = list(read), list(read)
        up[place], down[place] = read[place] + step, read[place] - step
        slopes_mN = (mixture.channels(*up) - mixture.channels(*down)) / (2 * step)
        added_N = felt_N * slopes_mN.square().sum(dim=0) * others.factor**2 / TOKENS
        moment = output_gradient(reader)
        torch.testing.assert_close(
            found.moments[moment][0], others.scale * (case.moments[moment][0] + added_N), rtol=1e-3, atol=1e-9
        )
        pulled_DD += expert.readers[place].T * added_N @ expert.readers[place]
    torch.testing.assert_close(found.moments[pull(block.readers)][0], others.scale * pulled_DD, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("passed", [24, 25, TOKENS])
def test_an_expert_with_enough_tokens_keeps_its_statistics(passed: int) -> None:
    case = Layer("mixtral", passed)
    assert case.block.width == 24
    assert case.completed() is case.statistics
    assert case.calls == 0


def test_without_the_sample_no_expert_has_few() -> None:
    case = Layer("mixtral", 1)
    assert experts_with_few(case.task, case.layer, case.statistics.passed, [*case.moments]) == {"experts.2": 1}
    assert experts_with_few(case.task, case.layer, case.statistics.passed, []) == {}


def test_a_pair_without_tokens_stays_unseen() -> None:
    case = Layer("mixtral", 0)
    found = replace(case.completed(), passed={Moment("experts.2.down.in", kind="pair"): 0})
    assert found.unseen == ("experts.2.down.in",)


@pytest.mark.parametrize(
    ("entry", "added"),
    [
        ({"method": "flat_llm"}, True),
        ({"method": "heapr"}, True),
        ({"method": "svd_llm"}, True),
        ({"method": "loss_aware"}, False),  # has a larger sample
        ({"method": "reap"}, False),  # works on a sample alone
        ({"method": "magnitude"}, False),
    ],
)
def test_only_tasks_with_moments_of_single_experts_get_a_sample(entry: dict[str, Any], added: bool) -> None:
    geometry = geometry_of(standard_config(factories.make_config("mixtral", num_hidden_layers=2).to_dict()))
    tasks = claim_tasks(build_methods(manifest(entry, keep=0.9, calibration=TEXT)), geometry)
    sample = sample_of_others(geometry.layers[0].experts[0])
    assert sample.tokens == 4 * 24 + 1
    completed_tasks = with_samples_of_others(tasks, geometry)
    assert any(sample in task.moments for task in completed_tasks) == added
    for task, before in zip(completed_tasks, tasks, strict=True):
        assert replace(task, moments=before.moments) == before
        own = any(moment.kind == "value" and moment.point.startswith("experts.") for moment in task.moments)
        assert (sample in task.moments) == (added and own)
    dense = claim_tasks(build_methods(manifest(entry, keep=0.9, calibration=TEXT)), llama()) if added else ()
    assert with_samples_of_others(dense, llama()) == tuple[Task, ...](dense)
