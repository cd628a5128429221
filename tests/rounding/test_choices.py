"""Bits chosen with ranks: what rounding is predicted to cost, against matrices rounded and multiplied out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from manifests.method_entry import MethodEntry
from manifests.methods import FlatLLM, LossAware
from manifests.quantize import Quantize
from manifests.records import FormSpec
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.packing import scaled, unpack
from pipeline.methods.base import Group
from pipeline.methods.flat_llm import FlatLLMMethod
from pipeline.methods.loss_aware.method import LossAwareMethod
from pipeline.methods.method import Moment, Ranks, Solution, Statistics
from pipeline.methods.unchanged import BITS, Whole
from pipeline.ranks.curves import Point, from_columns, to_columns
from pipeline.rounding.choices import UNDERSTATED, _Predictor, gradient_moments, with_bits
from pipeline.rounding.solutions import Feedbacks, input_moments, multiplied, round_solution
from tests.families.geometries import llama
from tests.methods.loss_aware_weights import features, make_statistics, make_weights
from tests.tensors import random

ROWS, COLUMNS, TOKENS = 96, 64, 500
RANKS = (16, 32, COLUMNS)
QUANTIZE = Quantize(bits="auto", group=32)
LAYER = llama("gqa", bits=32).layers[0]


WEIGHT = random(ROWS, COLUMNS, seed=1).float()
INPUTS = random(TOKENS, COLUMNS, seed=2) * torch.linspace(0.2, 2.0, COLUMNS, dtype=torch.float64)
FELT = random(ROWS, ROWS, seed=3) * 0.1


def with_rounding(group: Group[Any], layer: LayerGeometry) -> Group[Any]:
    """The group with the moments that rounding it needs besides."""
    needed = input_moments(group.roles, layer.reads) + gradient_moments(group.roles, layer)
    return replace(group, moments=tuple({*group.moments, *needed}))


def metric(role: str) -> Tensor:
    """G; of what reads the stream the same for all outputs, so that the dense errors carry over exactly."""
    return FELT @ FELT.T if LAYER.matrices[role].writes_stream else 0.3 * torch.eye(ROWS, dtype=torch.float64)


def statistics(role: str) -> Statistics:
    (read,), (felt,) = input_moments((role,), LAYER.reads), gradient_moments((role,), LAYER)
    gradients = metric(role).diagonal() if felt.diagonal else metric(role)
    return Statistics({read: (INPUTS.T @ INPUTS)[None], felt: gradients[None]}, TOKENS)


def solve(role: str, ranks: Ranks) -> Solution:
    rank = ranks["rank"]
    if rank >= COLUMNS:
        return Solution({f"{role}.weight": WEIGHT}, {})
    left, values, right = torch.linalg.svd(WEIGHT.double(), full_matrices=False)
    tensors = {f"{role}.first.weight": right[:rank], f"{role}.second.weight": left[:, :rank] * values[:rank]}
    return Solution(tensors, {role: FormSpec(form="low_rank", rank=rank)})


def solve_as_read(ranks: Ranks) -> Solution:
    """o, saying itself what it reads."""
    return replace(solve("o", ranks), inputs={"o": lambda: INPUTS.T @ INPUTS / TOKENS})


def change_by_rounding(role: str, ranks: Ranks, bits: int) -> Tensor:
    """Read back from the packed tensors, and multiplied out."""
    solution = solve(role, ranks)
    rounded = round_solution(
        solution, QUANTIZE, bits, statistics(role).moments, {f"{role}.weight": WEIGHT}, LAYER.reads
    )
    tensors = rounded.solution.tensors
    before = after = torch.eye(ROWS, dtype=torch.float64)
    for part in (role, f"{role}.second", f"{role}.first"):
        if f"{part}.weight" in solution.tensors:
            before = before @ solution.tensors[f"{part}.weight"].double()
            columns = int(tensors[f"{part}.weight_shape"][1])
            codes = unpack(tensors[f"{part}.weight_packed"], bits, columns)
            after = after @ scaled(codes, tensors[f"{part}.weight_scale"].double())
    return after - before


def loss(role: str, change: Tensor) -> float:
    """½ tr(G Δ C Δᵀ), C per token."""
    return 0.5 * float((metric(role) * (change @ (INPUTS.T @ INPUTS / TOKENS) @ change.T)).sum())


@dataclass(frozen=True)
class Given(Group[MethodEntry]):
    """A group with this solution."""

    solve_it: Callable[[Ranks], Solution] = field(kw_only=True)

    def solve(self, ranks: Ranks) -> Solution:
        return self.solve_it(ranks)


@pytest.mark.parametrize(
    ("role", "solve_it"), [("o", partial(solve, "o")), ("q", partial(solve, "q")), ("o", solve_as_read)]
)
def test_a_point_costs_what_its_ranks_and_its_codes_lose(role: str, solve_it: Callable[[Ranks], Solution]) -> None:
    sizes = {rank: rank * (ROWS + COLUMNS) if rank < COLUMNS else ROWS * COLUMNS for rank in RANKS}
    points = [Point({"rank": rank}, numbers, 1e-3 * (COLUMNS - rank)) for rank, numbers in sizes.items()]
    group = Given(MethodEntry(), LAYER, "matrix", (role,), solve_it=solve_it)
    group = group.with_data({f"{role}.weight": WEIGHT}, statistics(role))
    found = from_columns(with_bits(to_columns(points), group, QUANTIZE))
    assert {point.ranks[BITS] for point in found} == set(QUANTIZE.choices)
    assert {point.ranks["rank"] for point in found} >= {RANKS[0], COLUMNS}
    for point in found:
        bits = point.ranks[BITS]
        lost = loss(role, change_by_rounding(role, point.ranks, min(4, bits)))
        lost *= (15 / 255) ** 2 if bits == 8 else 1.0  # of the next fewer bits, with finer steps
        assert point.loss == pytest.approx(UNDERSTATED * 1e-3 * (COLUMNS - point.ranks["rank"]) + lost, rel=1e-6)


def test_a_part_of_the_sample_predicts_the_losses_of_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MLP whose tried sizes are fitted to a fourth of the sample, and to all of it."""
    where = llama("gqa", hidden_size=64, intermediate_size=96, bits=16)
    method = LossAwareMethod(LossAware(method="loss_aware", rank_multiple=16))
    group = next(group for group in method.claims(where) if group.name == "mlp")
    asked, tokens = with_rounding(group, where.layers[0]), 8000
    weights = make_weights(where, group.roles)
    inputs_TD = random(tokens, 64, seed=1) * torch.logspace(0, -1, 64, dtype=torch.float64)
    gate_TN, up_TN = (8.0 * inputs_TD @ weights[f"{role}.weight"].T for role in ("gate", "up"))
    hidden_TN = torch.nn.functional.silu(gate_TN / 8.0) * up_TN / 8.0
    found = {
        moment: value / 300.0 if moment.kind == "gradient" else value
        for moment, value in make_statistics(where, asked).moments.items()
    }
    for moment in found:
        if moment.kind == "sample":
            found[moment] = inputs_TD[None]
        elif moment.kind == "value":
            values = hidden_TN if moment.point.startswith("down") else inputs_TD
            found[moment] = (values.T @ values)[None]
    group = group.with_data(weights, Statistics(found, tokens))
    curve = group.curve()

    def losses(least: int) -> dict[str, float]:
        monkeypatch.setattr("pipeline.methods.work.LEAST_TRIED", least)
        return {str(point.ranks): point.loss for point in from_columns(with_bits(curve, group, QUANTIZE))}

    few, whole = losses(tokens // 4), losses(tokens)
    common = [(few[ranks], whole[ranks]) for ranks in few if ranks in whole]
    assert len(common) > 5
    assert any(loss != exact for loss, exact in common)
    for loss, exact in common:
        assert loss == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize(
    "method",
    [LossAwareMethod(LossAware(method="loss_aware")), FlatLLMMethod(FlatLLM(method="flat_llm", weighting="loss"))],
    ids=lambda method: method.name,
)
def test_what_cut_layers_read_is_said_per_token(method: LossAwareMethod | FlatLLMMethod) -> None:
    where = llama("gqa")
    ranks = {
        "value": where.layers[0].attention.head_dim // 2,
        "output": 8,
        "width": 16,
        "gate_up": 8,
        "down": 8,
        "mlp": 16,
    }
    for group in method.claims(where)[:3]:
        found, weights = make_statistics(where, group), make_weights(where, group.roles)
        writers = tuple(role for role in group.roles if LAYER.matrices[role].writes_stream)
        needed = input_moments(writers, LAYER.reads)
        for moment in needed:
            values = random(TOKENS, features(where, moment), seed=5)
            found = Statistics({moment: (values.T @ values)[None], **found.moments}, found.tokens)
        solution = group.with_data(weights, found).solve({**ranks, "query_key": 8})
        for role, read in solution.inputs.items():
            dense = found.mean(input_moments((role,), LAYER.reads)[0])[0]
            assert 0.1 < read().trace() / dense.trace() < 10.0  # half of it, in another basis; not TOKENS times that
        assert solution.inputs.keys() == {"attention": {"o"}, "mlp": {"down"}}.get(group.name, set())


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "width"), [("query_key", 96), ("attention", 96), ("mlp", 96), ("mlp", 112), ("flat", 112)]
)
def test_points_never_store_more_than_they_say(name: str, width: int) -> None:
    """Hardly less, either, but where some columns are odd: 112 channels, until they are fewer."""
    where = llama("gqa", hidden_size=64, intermediate_size=width, bits=16)
    method: LossAwareMethod | FlatLLMMethod = LossAwareMethod(LossAware(method="loss_aware", rank_multiple=32))
    if name == "flat":
        method = FlatLLMMethod(FlatLLM(method="flat_llm", allocation="loss", rank_multiple=32))
    group = next(group for group in method.claims(where) if group.name == name.replace("flat", "mlp"))
    asked = with_rounding(group, where.layers[0])
    found, weights = make_statistics(where, asked), make_weights(where, group.roles)
    ranked = group.with_data(weights, found).curve()
    dtype = {key: tensor.to(torch.bfloat16) for key, tensor in weights.items()}
    group = group.with_data(dtype, found)
    points = from_columns(with_bits(ranked, group, QUANTIZE))
    assert {point.ranks[BITS] for point in points} == set(QUANTIZE.choices)
    for point in points:
        rounded = round_solution(
            group.solve(point.ranks), QUANTIZE, point.ranks[BITS], found.moments, dtype, LAYER.reads
        ).solution
        stored = sum(tensor.nbytes for tensor in rounded.tensors.values()) / 2
        odd = any(point.ranks.get(rank) == 112 for rank in ("width", "mlp"))
        assert point.numbers - (500 if odd else 200) <= stored <= point.numbers, point


def test_errors_of_a_first_factor_count_together() -> None:
    """Where the loss feels outputs together, an error that many have is not the sum of what it is of each: beside the
    exact ½ tr(G Δ C Δᵀ), with G whole, of which a part is known."""
    rank, roles = 32, ("q", "k")
    dense = {f"{role}.weight": random(ROWS, COLUMNS, seed=seed) for role, seed in (("q", 1), ("k", 4))}
    stacked = torch.cat(list(dense.values()))
    _, _, right = torch.linalg.svd(stacked, full_matrices=False)
    shared = stacked @ right[:4].T  # the loss feels the outputs of a few directions of what is read
    felt = 0.01 * torch.eye(len(stacked), dtype=torch.float64) + shared @ shared.T
    moment = INPUTS.T @ INPUTS / TOKENS
    first = right[:rank].contiguous()
    second = stacked @ moment @ first.T @ torch.linalg.inv(first @ moment @ first.T)
    forms = dict.fromkeys(roles, FormSpec(form="joint_low_rank", rank=rank, group="query_key"))
    parts = dict(zip(("q.second.weight", "k.second.weight"), second.split(ROWS), strict=True))
    solution = Solution({"q.first.weight": first, **parts}, forms)
    gradients = {
        Moment(f"{role}.out", kind="gradient", diagonal=True): part[None]
        for role, part in zip(roles, felt.diagonal().split(ROWS), strict=True)
    }
    gradients[Moment("pull:q+k", kind="gradient")] = (stacked.T @ felt @ stacked)[None]
    found = Statistics({input_moments(roles, LAYER.reads)[0]: moment[None] * TOKENS, **gradients}, TOKENS)
    before = multiplied(solution, {})
    rounded = round_solution(solution, QUANTIZE, 3, found.moments, dense, LAYER.reads)
    group = Whole(MethodEntry(), LAYER, "query_key", roles).with_data(dense, found)
    predictor = _Predictor(group, QUANTIZE, 3, Feedbacks(QUANTIZE))
    firsts = predictor._first_errors(solution, rounded, predictor._output_gradients(solution, before))
    change = second @ first @ firsts["k"].turn
    exact = 0.5 * float((felt @ change * (change @ moment)).sum())
    apart = 0.5 * float(felt.diagonal() @ (change @ moment * change).sum(1))
    assert sum(error.loss for error in firsts.values()) == pytest.approx(exact, rel=1e-4)
    assert exact > 1.3 * apart
    after = multiplied(solution, rounded.rounded)
    whole = torch.cat([after[role,] - before[role,] for role in roles])
    true = 0.5 * float((felt @ whole * (whole @ moment)).sum())
    assert predictor.loss_of(solution, before, rounded) == pytest.approx(true, rel=0.25)


def test_channels_behind_a_refitted_down_are_felt_by_its_columns() -> None:
    where = llama("gqa", hidden_size=64, intermediate_size=96)
    method = LossAwareMethod(LossAware(method="loss_aware", rank_multiple=32))
    group = next(group for group in method.claims(where) if group.name == "mlp")
    asked = with_rounding(group, where.layers[0])
    found, weights = make_statistics(where, asked), make_weights(where, group.roles)
    solution = group.with_data(weights, found).solve({"width": 32, "gate_up": 64, "down": 64, "value": 1, "output": 1})
    kept = solution.outputs["up"]
    assert len(kept) == 32
    predictor = _Predictor(group.with_data(weights, found), QUANTIZE, 4, Feedbacks(QUANTIZE))
    felt = predictor._output_gradients(solution, multiplied(solution, {}))["up"]
    metric = found.mean(Moment("out", kind="gradient"))[0]
    column = int(kept[3])
    now, then = multiplied(solution, {})["down",][:, 3], weights["down.weight"][:, column].double()
    alone = found.mean(Moment("up.out", kind="gradient", diagonal=True))[0][column]
    assert float(felt[3]) == pytest.approx(float(alone * (now @ metric @ now) / (then @ metric @ then)))


def test_without_feedback_every_number_goes_to_the_nearest_code_whatever_is_known() -> None:
    weights, found = {"o.weight": WEIGHT}, statistics("o")
    whole = solve("o", {"rank": COLUMNS})
    tensors = [
        round_solution(whole, quantize, 4, moments, weights, LAYER.reads).solution.tensors["o.weight_packed"]
        for quantize, moments in (
            (Quantize(bits=4, feedback=False), found.moments),
            (Quantize(bits=4), {}),
            (Quantize(bits=4), found.moments),
        )
    ]
    assert torch.equal(tensors[0], tensors[1])
    assert not torch.equal(tensors[0], tensors[2])
