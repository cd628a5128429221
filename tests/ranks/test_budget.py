"""Exact budgets: on Llama-2's geometry, and on random sets of variables."""

import math
import random
from collections.abc import Callable

import pytest

from pipeline.ranks.budget import RankKey, RankVariable, fit_ranks, solve_ratio
from pipeline.ranks.importance import preserve_importance

D, H, HEAD, N, L = 4096, 32, 128, 11008, 32
NORMS = 2 * D
TOTAL = L * (4 * D * D + 3 * D * N + NORMS)
UNTOUCHED = L * (2 * D * D + NORMS)


def linear(slope: float) -> Callable[[float], float]:
    return lambda rank: slope * rank


def saturating(slope: float, dense: float) -> Callable[[float], float]:
    """As for two factors: beyond the break-even rank the dense matrix is stored."""
    return lambda rank: min(slope * rank, dense)


def llama(multiple: int = 1) -> list[RankVariable]:
    value = [RankVariable(layer, "attention", "value", HEAD, multiple, linear(2 * H * D)) for layer in range(L)]
    return value + [RankVariable(layer, "mlp", "mlp", N, multiple, linear(3 * D)) for layer in range(L)]


def total_cost(variables: list[RankVariable], ranks: dict[RankKey, int]) -> float:
    return sum(variable.cost(ranks[variable.key]) for variable in variables)


@pytest.mark.parametrize(("keep", "ratio"), [(0.9, 0.88), (0.8, 0.76), (0.7, 0.64), (0.6, 0.52), (0.5, 0.40)])
def test_llama_2_7b_mean_ratios(keep: float, ratio: float) -> None:
    variables = llama()
    limit = keep * TOTAL - UNTOUCHED
    solved = solve_ratio(lambda share: sum(variable.cost(share * variable.cap) for variable in variables), limit)
    assert solved == pytest.approx(limit / (TOTAL - UNTOUCHED), rel=1e-12)
    assert solved == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize("keep", [0.9, 0.8, 0.7, 0.6, 0.5])
@pytest.mark.parametrize("multiple", [1, 16])
def test_llama_2_7b_by_importance_meets_the_budget(keep: float, multiple: int) -> None:
    variables, dice = llama(multiple), random.Random(1)
    limit = int(keep * TOTAL) - UNTOUCHED
    ratios = preserve_importance([dice.uniform(0.05, 0.3) for _ in range(L)], limit / (TOTAL - UNTOUCHED))
    targets = {variable.key: ratios[variable.layer] * variable.cap for variable in variables}
    ranks = fit_ranks(variables, targets, limit)
    spent = total_cost(variables, ranks) + UNTOUCHED
    assert keep * TOTAL * 0.999 <= spent <= keep * TOTAL
    # Better than asked: within one step of one MLP width.
    assert keep * TOTAL - spent < 3 * D * multiple + 1
    for variable in variables:
        rank = ranks[variable.key]
        assert rank % multiple == 0 or rank == variable.cap
        slip = abs(rank - targets[variable.key]) / variable.cap
        assert slip <= (0.5 * multiple / HEAD if variable.name == "value" else 0.05) + 1e-9


def test_the_whole_budget_gives_the_caps() -> None:
    variables = llama(16)
    targets = {variable.key: 1.0 for variable in variables}
    for limit in (TOTAL - UNTOUCHED, TOTAL, math.inf):
        assert fit_ranks(variables, targets, limit) == {variable.key: variable.cap for variable in variables}


def test_too_small_a_budget_names_what_can_be_reached() -> None:
    variables = [
        RankVariable(0, "mlp", "mlp", 100, 8, linear(10)),
        RankVariable(0, "attention", "value", 4, 8, linear(100)),
    ]
    targets = {variable.key: 4.0 for variable in variables}
    assert total_cost(variables, fit_ranks(variables, targets, 480)) == 480
    with pytest.raises(ValueError, match="limit 479 is out of reach: least 480, most 1,400"):
        fit_ranks(variables, targets, 479)
    with pytest.raises(ValueError, match="limit nan"):
        fit_ranks(variables, targets, math.nan)


def random_knobs(dice: random.Random) -> list[RankVariable]:
    variables = []
    for layer in range(dice.randint(1, 6)):
        for name in dice.sample(["value", "mlp", "query", "key"], dice.randint(1, 3)):
            cap, slope = dice.randint(1, 200), dice.choice([1, 3, 40, 700])
            dense = slope * cap * dice.choice([1.0, 0.6])
            variables.append(
                RankVariable(layer, "any", name, cap, dice.choice([1, 1, 4, 16]), saturating(slope, dense))
            )
    return variables


@pytest.mark.slow
def test_random_knobs() -> None:
    dice = random.Random(2)
    for _ in range(400):
        variables = random_knobs(dice)
        least = sum(variable.cost(variable.least) for variable in variables)
        most = sum(variable.cost(variable.cap) for variable in variables)
        limit = dice.uniform(least, most)
        targets = {
            variable.key: dice.choice([0.0, dice.random(), dice.random(), 2.0]) * variable.cap for variable in variables
        }
        ranks = fit_ranks(variables, targets, limit)
        assert ranks == fit_ranks(list(reversed(variables)), targets, limit)
        spent = total_cost(variables, ranks)
        assert spent <= limit * (1 + 1e-12)
        for variable in variables:
            rank = ranks[variable.key]
            assert variable.least <= rank <= variable.cap
            assert rank % variable.multiple == 0 or rank == variable.cap
            above = variable.above(rank)
            assert above is None or spent + variable.cost(above) - variable.cost(rank) > limit * (1 - 1e-12)


def test_consistent_wants_are_only_rounded() -> None:
    variables = [RankVariable(layer, "mlp", "mlp", 1000, 1, linear(3)) for layer in range(9)]
    dice = random.Random(3)
    targets = {variable.key: dice.uniform(100, 900) for variable in variables}
    limit = total_cost(variables, {key: math.floor(want) for key, want in targets.items()}) + 3 * 5
    ranks = fit_ranks(variables, targets, limit)
    assert total_cost(variables, ranks) == limit
    assert max(abs(ranks[key] - targets[key]) for key in targets) < 2
    whole = {variable.key: 100.0 + variable.layer for variable in variables}
    assert fit_ranks(variables, whole, total_cost(variables, {k: int(v) for k, v in whole.items()})) == whole


def test_coarse_knobs_move_only_when_fine_ones_are_at_their_ends() -> None:
    coarse = RankVariable(0, "attention", "value", 10, 1, linear(1000))
    fine = RankVariable(0, "mlp", "mlp", 20, 1, linear(1))
    targets = {coarse.key: 5.0, fine.key: 10.0}
    assert fit_ranks([coarse, fine], targets, 5012) == {coarse.key: 5, fine.key: 12}
    assert fit_ranks([coarse, fine], targets, 5900) == {coarse.key: 5, fine.key: 20}
    assert fit_ranks([coarse, fine], targets, 4999) == {coarse.key: 4, fine.key: 20}


def test_solve_ratio() -> None:
    assert solve_ratio(lambda ratio: 10 * ratio, 100.0) == 1.0
    assert solve_ratio(lambda ratio: 10 * ratio, 2.5) == pytest.approx(0.25, rel=1e-14)
    assert solve_ratio(lambda ratio: math.floor(8 * ratio), 3) == pytest.approx(0.5)
    assert math.floor(8 * solve_ratio(lambda ratio: math.floor(8 * ratio), 3)) == 3
    with pytest.raises(ValueError, match="limit 4 is out of reach: least 5, most 15"):
        solve_ratio(lambda ratio: 5 + 10 * ratio, 4.0)
    with pytest.raises(ValueError, match="NaN"):
        solve_ratio(lambda ratio: ratio, math.nan)


def test_bad_knobs_and_wants() -> None:
    variable = RankVariable(1, "mlp", "mlp", 5, 1, linear(1))
    with pytest.raises(ValueError, match=r"two variables are called \(1, 'mlp', 'mlp'\)"):
        fit_ranks([variable, variable], {variable.key: 1.0}, 3)
    for targets in ({}, {variable.key: math.nan}, {variable.key: -1.0}):
        with pytest.raises(ValueError, match=r"\(1, 'mlp', 'mlp'\): the target rank must be finite"):
            fit_ranks([variable], targets, 3)
    for cap, multiple in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            RankVariable(1, "mlp", "mlp", cap, multiple, linear(1))


def test_neighbours_of_a_rank() -> None:
    variable = RankVariable(0, "mlp", "mlp", 10, 4, linear(1))
    assert [variable.nearest(want) for want in (0.0, 5.9, 6.0, 6.1, 9.0, 9.5, 99.0)] == [4, 4, 4, 8, 8, 10, 10]
    assert [variable.above(rank) for rank in (4, 5, 8, 10)] == [8, 8, 10, None]
    assert [variable.below(rank) for rank in (4, 5, 8, 10)] == [None, 4, 4, 8]


def test_the_ratio_stays_within_its_range_and_gets_as_small_as_needed() -> None:
    asked: list[float] = []

    def cost_at(ratio: float) -> float:
        asked.append(ratio)
        return 0.0 if ratio < 1e-30 else 10.0

    assert 0.0 < solve_ratio(cost_at, 5.0) < 1e-30
    assert 0.0 < min(asked) <= max(asked) <= 1.0
    assert solve_ratio(lambda ratio: 10 * ratio, 10.0) == 1.0


def test_only_proportions_of_the_targets_count() -> None:
    variables = [RankVariable(layer, "mlp", "mlp", 50, 1, linear(3 + layer)) for layer in range(4)]
    targets = {variable.key: 10.0 + 7 * variable.layer for variable in variables}
    expected = fit_ranks(variables, targets, 400)
    for scale in (1e-6, 1e-3, 30.0):
        assert fit_ranks(variables, {key: scale * want for key, want in targets.items()}, 400) == expected
    with pytest.raises(ValueError, match="the target rank must be finite"):
        fit_ranks(variables, {key: math.inf for key in targets}, 400)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_steps_are_compared_by_what_one_costs(offset: float) -> None:
    """A rank of few, wide steps is the coarser one, though its whole range is the cheaper."""
    wide = RankVariable(0, "attention", "value", 64, 16, linear(30))
    fine = RankVariable(0, "mlp", "mlp", 1000, 1, lambda rank: offset + 100 * rank)
    targets = {wide.key: 32.0, fine.key: 500.0}
    assert fit_ranks([wide, fine], targets, offset + 30 * 32 + 100 * 505) == {wide.key: 32, fine.key: 505}


@pytest.mark.slow
def test_steps_are_taken_as_the_docstring_says() -> None:
    """Alike variables: up goes the one furthest below its target relative to its cap, down the one furthest above."""
    dice = random.Random(4)
    for _ in range(200):
        variables = [RankVariable(layer, "mlp", "mlp", dice.choice([7, 20, 90]), 1, linear(1)) for layer in range(5)]
        targets = {variable.key: dice.uniform(1, variable.cap) for variable in variables}
        limit = dice.randint(5, sum(variable.cap for variable in variables) - 1)
        assert fit_ranks(variables, targets, limit) == _step_by_step(variables, targets, limit)


def _step_by_step(variables: list[RankVariable], targets: dict[RankKey, float], limit: int) -> dict[RankKey, int]:
    def scaled_by(factor: float) -> dict[RankKey, float]:
        return {v.key: min(max(factor * targets[v.key], 1.0), v.cap) for v in variables}

    low, high = 0.0, 1e6
    for _ in range(300):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if sum(scaled_by(middle).values()) <= limit else (low, middle)
    scaled = scaled_by(low)
    ranks = {v.key: v.nearest(scaled[v.key]) for v in variables}
    while sum(ranks.values()) > limit:
        movable = [v for v in variables if ranks[v.key] > 1]
        chosen = max(movable, key=lambda v: ((ranks[v.key] - scaled[v.key]) / v.cap, [-part for part in v.key[:1]]))
        ranks[chosen.key] -= 1
    while sum(ranks.values()) < limit:
        movable = [v for v in variables if ranks[v.key] < v.cap]
        chosen = max(movable, key=lambda v: ((scaled[v.key] - ranks[v.key]) / v.cap, [-part for part in v.key[:1]]))
        ranks[chosen.key] += 1
    return ranks


def test_a_floor_is_the_least_rank() -> None:
    variables = [RankVariable(layer, "experts", "experts", 18, 2, linear(5), floor=8) for layer in range(3)]
    targets = {variable.key: 4.0 for variable in variables}
    assert set(fit_ranks(variables, targets, 3 * 8 * 5).values()) == {8}
    assert [variables[0].nearest(1.0), variables[0].below(8), variables[0].below(10)] == [8, None, 8]
    with pytest.raises(ValueError, match="least 120"):
        fit_ranks(variables, targets, 3 * 8 * 5 - 1)
