"""correct: output without any model: its least squares written out; where nothing is missing, nothing changes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.families.blocks import Matrix
from pipeline.families.geometry import Geometry
from pipeline.families.registry import geometry_of, standard_config
from pipeline.methods.base import Group
from pipeline.methods.loss_aware.attention import Values
from pipeline.methods.loss_aware.mlp import MLP
from pipeline.methods.loss_aware.mlp_solver import Solver
from pipeline.methods.method import Moment, Ranks, Solution, Statistics
from pipeline.methods.moments import pair
from pipeline.methods.pairs import carry, complete
from pipeline.methods.unchanged import WHOLE, Unchanged
from pipeline.ranks.curves import from_columns
from tests import factories
from tests.methods.loss_aware_weights import make_statistics, make_weights, rebuild
from tests.methods.test_loss_aware import GEOMETRIES, group_of, method_of
from tests.tensors import randn

TOKENS, RIDGE = 40, 0.3
UP = Matrix("up", 5, 8, True, "mlp.in", "down.in")
NAMES = ("query_key", "attention", "mlp")


def with_pair(values_TF: Tensor, errors_TE: Tensor, moment: Moment) -> Statistics:
    whole_PF = torch.cat((values_TF, errors_TE), dim=1).T @ values_TF
    return Statistics({moment: whole_PF[None]}, len(values_TF))


def ridged(values_TF: Tensor, targets_TE: Tensor, ridge: float) -> Tensor:
    """The ΔW (E, F) of least Σ‖e − ΔW x‖² + T·λ‖ΔW‖², by least squares on rows that stand for the ridge."""
    width = values_TF.shape[1]
    size = math.sqrt(ridge * float(values_TF.square().sum()) / width)
    rows_RF = torch.cat((values_TF, size * torch.eye(width, dtype=torch.float64)))
    targets_RE = torch.cat((targets_TE, torch.zeros(width, targets_TE.shape[1], dtype=torch.float64)))
    solution: Tensor = torch.linalg.lstsq(rows_RF, targets_RE).solution.T
    return solution


def test_readers_read_what_the_dense_input_gave() -> None:
    packed_TD, dense_TD, weight_mD = randn(TOKENS, 8), randn(TOKENS, 8) + 0.5 * randn(TOKENS, 8), randn(5, 8)
    found = with_pair(packed_TD, dense_TD - packed_TD, pair("mlp.in"))
    moved = carry(found, pair("mlp.in"), {"up.weight": weight_mD, "up.bias": randn(5)}, (UP,), RIDGE)
    # of least ‖W a_d − W' a_c‖² + λ‖W' − W‖²
    missing_Tm = (dense_TD - packed_TD) @ weight_mD.T
    torch.testing.assert_close(moved.weights["up.weight"], weight_mD + ridged(packed_TD, missing_Tm, RIDGE))
    torch.testing.assert_close(moved.weights["up.weight"], weight_mD @ moved.transfer)
    torch.testing.assert_close(moved.moment, packed_TD.T @ packed_TD / TOKENS)
    assert torch.equal(moved.weights["up.bias"], randn(5))


def test_writers_add_what_is_missing() -> None:
    values_TF, errors_TD, weight_DF = randn(TOKENS, 6), randn(TOKENS, 9), randn(9, 6)
    found = complete(with_pair(values_TF, errors_TD, pair("o.in")), pair("o.in"), weight_DF, RIDGE)
    torch.testing.assert_close(found.weight, weight_DF + ridged(values_TF, errors_TD, RIDGE))
    torch.testing.assert_close(found.moment, values_TF.T @ values_TF / TOKENS)


def test_nothing_missing_changes_no_bit() -> None:
    values_TF, weight_DF = randn(TOKENS, 6), randn(9, 6)
    nothing = with_pair(values_TF, torch.zeros(TOKENS, 9, dtype=torch.float64), pair("o.in"))
    assert torch.equal(complete(nothing, pair("o.in"), weight_DF, RIDGE).weight, weight_DF)
    same = with_pair(values_TF, torch.zeros(TOKENS, 6, dtype=torch.float64), pair("mlp.in"))
    assert torch.equal(
        carry(same, pair("mlp.in"), {"up.weight": weight_DF}, (UP,), RIDGE).weights["up.weight"], weight_DF
    )


def corrected(
    where: Geometry, group: Group[Any], weights: dict[str, Tensor], statistics: Statistics, ranks: Ranks, **entry: Any
) -> Solution:
    """All corrections of a group one after another, where nothing is missing: what a worker and the driver make."""
    tensors: dict[str, Tensor] = {}
    forms: dict[str, Any] = {}
    for moment in group.corrections:
        own_FF = read_at(moment.point, where, group, weights, statistics, ranks)
        zeros_DF = own_FF.new_zeros(where.hidden, len(own_FF))
        whole_PF = torch.cat((own_FF, zeros_DF)) * statistics.tokens
        known = replace(statistics, moments={**statistics.moments, moment: whole_PF[None]})
        before = {name: tensor for name, tensor in tensors.items() if name in weights}
        part = group.with_data(weights, known).correct(ranks, before)
        changed = {*part.forms, *(name.partition(".")[0] for name in part.tensors)}
        tensors = {name: tensor for name, tensor in tensors.items() if name.partition(".")[0] not in changed}
        tensors, forms = tensors | part.tensors, forms | part.forms
    return Solution(tensors, forms)


def read_at(
    point: str, where: Geometry, group: Group[Any], weights: dict[str, Tensor], statistics: Statistics, ranks: Ranks
) -> Tensor:
    """E[x xᵀ] at a point, as the dense statistics have it for what is left of the layer there."""
    if point.split(".")[0] in ("attention", "mlp"):
        known = [moment for moment in statistics.moments if moment.point == point and moment.kind == "value"]
        if known:
            return statistics.mean(known[0])[0]
        factor = randn(where.hidden, where.hidden)  # only q and k take the input's moment into account
        return factor @ factor.T
    if point == "down.in":
        assert isinstance(group, MLP)
        solver = Solver(group.with_data(weights, statistics), 1)
        return solver.moment(solver.kept(ranks["width"]))
    assert isinstance(group, Values)
    return group.with_data(weights, statistics).reduced(ranks["value"]).moment


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("geometry", ["gqa", "biased", "opt", "gptj", "wide-heads"])
@pytest.mark.parametrize("entry", [{}, pytest.param({"factors": "plain"}, marks=pytest.mark.slow)])
def test_behind_dense_layers_it_is_the_plain_solution(geometry: str, name: str, entry: dict[str, Any]) -> None:
    """Without a sample, which gives the moment of down's inputs a second value."""
    where, method = GEOMETRIES[geometry], method_of(correct="output", **entry)
    group = group_of(method, where, name)
    weights, statistics = make_weights(where, group.roles), make_statistics(where, group)
    short = {m: values[:, :1] if m.kind == "sample" else values for m, values in statistics.moments.items()}
    statistics = replace(statistics, moments=short)
    points = from_columns(group.with_data(weights, statistics).curve())
    for point in points[:: max(1, len(points) // 5)] + points[-1:]:
        plain = group.with_data(weights, statistics).solve(point.ranks)
        found = corrected(where, group, weights, statistics, point.ranks, **entry)
        assert found.forms == plain.forms, point
        assert found.tensors.keys() == plain.tensors.keys(), point
        ours, theirs = rebuild(found, where, weights), rebuild(plain, where, weights)
        for role in theirs:
            torch.testing.assert_close(ours[role], theirs[role].double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("geometry", ["gqa", "gptj"])
def test_down_is_fitted_on_the_sample_before_it_is_corrected(geometry: str) -> None:
    """A correction stays near what it begins with, which has to be as good as the plain solution."""
    where, method = GEOMETRIES[geometry], method_of(correct="output")
    group = group_of(method, where, "mlp")
    assert isinstance(group, MLP)
    weights, statistics = make_weights(where, group.roles), make_statistics(where, group)
    ranks = {"width": group.mlp.width, group.mlp.reader_group: 2}
    ranks[group.mlp.writer_group] = group.writer_stack(group.mlp.width).full
    read = group.corrections[0]
    own_DD = read_at(read.point, where, group, weights, statistics, ranks)
    whole_PD = torch.cat((own_DD, torch.zeros_like(own_DD))) * statistics.tokens
    known = replace(statistics, moments={**statistics.moments, read: whole_PD[None]})
    plain = group.with_data(weights, statistics).solve(ranks)
    found = group.with_data(weights, known).correct(ranks, {})
    assert found.report["refit_tokens"] == plain.report["refit_tokens"] > 0
    ours, theirs = rebuild(found, where, weights), rebuild(plain, where, weights)
    for role in theirs:
        torch.testing.assert_close(ours[role], theirs[role].double(), rtol=1e-6, atol=1e-6)


def test_pairs_are_asked_for_in_the_order_of_the_layer() -> None:
    where = GEOMETRIES["gqa"]
    found = {group.name: [m.point for m in group.corrections] for group in method_of(correct="output").claims(where)}
    assert found == {
        "query_key": ["attention.in"],
        "attention": ["attention.in", "o.in"],
        "mlp": ["mlp.in", "down.in"],
    }
    assert all(not group.corrections for group in method_of().claims(where))


RIDGES = (RIDGE, 10 * RIDGE)


@pytest.mark.parametrize("geometry", ["gqa", "biased", "opt", "gptj"])
def test_matrices_of_no_method_are_fitted_likewise(geometry: str) -> None:
    """Readers to the dense inputs, writers to what is missing behind them, each with its own ridge; biases stay."""
    where = GEOMETRIES[geometry]
    groups = [group for group in Unchanged(ridges=RIDGES).claims(where) if group.layer == 0]
    assert sorted(role for group in groups for role in group.roles) == sorted(where.layers[0].linear_roles)
    for group in groups:
        weights, (at_input,), matrix = make_weights(where, group.roles), group.corrections, group.matrices[0]
        assert at_input == pair(matrix.reads)
        values_TF = randn(TOKENS, matrix.inputs)
        writes = len(group.roles) == 1 and matrix.writes_stream
        errors_TE = 0.5 * randn(TOKENS, where.hidden if writes else matrix.inputs)
        statistics = with_pair(values_TF, errors_TE, at_input)
        found = group.with_data(weights, statistics).correct({WHOLE: 1}, {})
        assert found.forms == {}
        assert found.tensors.keys() == weights.keys()
        for each in group.matrices:
            weight_OI = weights[each.weight_key]
            missing_TO = errors_TE if writes else errors_TE @ weight_OI.T
            expected = weight_OI + ridged(values_TF, missing_TO, RIDGES[writes])
            torch.testing.assert_close(found.tensors[each.weight_key], expected)
        assert all(torch.equal(found.tensors[key], weights[key]) for key in weights if key.endswith(".bias"))
    assert not any(group.corrections for group in Unchanged().claims(where))


def test_routed_experts_and_readers_of_latents_are_not_fitted() -> None:
    where = geometry_of(standard_config(factories.make_config("deepseek_v3").to_dict()))
    corrected = {role for group in Unchanged(ridges=RIDGES).claims(where) for role in group.roles if group.corrections}
    layer = where.layers[-1]
    assert not corrected & layer.routed_roles
    assert {"q_a_proj", "kv_a_proj_with_mqa", "o_proj", "shared.down"} <= corrected
    assert not corrected & {"q_b_proj", "kv_b_proj"}
