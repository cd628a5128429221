"""LeSTD: what is stored is what is claimed, reported and budgeted; weights are rebuilt here by config.json's contract.

Legend: D hidden, H query heads, G key/value heads, d head_dim, N intermediate, R1 R2 R3 ranks, p projections.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from manifests.errors import InputError
from manifests.loading import parse_manifest
from pipeline.families.family import Geometry
from pipeline.methods.lestd import LeSTDMethod
from pipeline.methods.lestd_sizes import Part, Rule, choices, pack_bits, size_curve, sizes_at_common_threshold
from pipeline.methods.method import Group, Moment, Scores, Solution
from pipeline.methods.registry import (
    allocate_ranks,
    build_methods,
    claim_tasks,
    config_fields,
    measure_tasks,
    ranks_key,
)
from tests.pipeline.geometries import llama, other

GEOMETRIES: dict[str, Geometry] = {
    "mha": llama("mha"),
    "gqa": llama("gqa"),
    "mqa": llama("mqa"),
    "biased": llama("biased"),
    "wide-heads": llama("wide-heads"),
    "opt": other("opt"),
    "gptj": other("gptj"),
    "qwen3, float32": replace(other("qwen3"), bits=32),
}
Json = dict[str, Any]


def lestd(**entry: Any) -> LeSTDMethod:
    return LeSTDMethod(parse_manifest(document(entry)).methods[0])


def document(*entries: Mapping[str, Any], **fields: Any) -> Json:
    methods = [{"method": "lestd", **entry} for entry in entries]
    places = {"model": {"source": "m"}, "output": "o", "run_dir": "r"}
    return {"version": 1, **places, "methods": methods, **fields}


def group_of(method: LeSTDMethod, where: Geometry, name: str, layer: int = 0) -> Group:
    return next(group for group in method.claims(where) if (group.layer, group.name) == (layer, name))


def make_weights(where: Geometry, roles: Sequence[str], seed: int = 0, decay: float = 0.93) -> dict[str, Tensor]:
    """Random weights that share a falling spectrum along D; `decay` 1: none."""
    generator = torch.Generator().manual_seed(seed)
    D = where.hidden
    basis = torch.linalg.qr(torch.randn(D, D, generator=generator, dtype=torch.float64)).Q
    shape_DD = basis * decay ** torch.arange(D) @ basis.T
    weights = {}
    for role in roles:
        for part, shape in where.role_shapes(role).items():
            weight = torch.randn(shape, generator=generator, dtype=torch.float64)
            if part == "weight":
                weight = shape_DD @ weight if role in ("o", "down") else weight @ shape_DD
            weights[f"{role}.{part}"] = weight
    return weights


def read_core(tensors: Mapping[str, Tensor], form: Json, end: str, shape: tuple[int, ...]) -> Tensor:
    """A core (R1, R2, R3, h) from what is stored."""
    if not form["sparse"]:
        assert tensors[f"core{end}"].shape == shape
        return tensors[f"core{end}"]
    values, mask = tensors[f"core{end}.values"], tensors[f"core{end}.mask"]
    assert values.shape == (form[f"nnz{end}"],)
    assert mask.dtype == torch.uint8
    assert mask.shape == (math.ceil(math.prod(shape) / 8),)
    bits = np.unpackbits(mask.numpy(), bitorder="little").astype(bool)
    assert not bits[math.prod(shape) :].any()
    flat = np.zeros(math.prod(shape))
    flat[bits[: len(flat)]] = values.double().numpy()
    return torch.from_numpy(flat).reshape(shape)


def rebuild(solution: Solution, where: Geometry, group: Group) -> dict[str, Tensor]:
    """`role.weight` by the tensors and forms alone; every tensor is used."""
    (form,) = {str(form): form for form in solution.forms.values()}.values()
    assert tuple(solution.forms) == group.roles
    prefix = f"{group.name}.tucker."
    stored = {name.removeprefix(prefix): t for name, t in solution.tensors.items() if name.startswith(prefix)}
    R1, R2, R3 = form["ranks"]
    H, G = where.heads, where.kv_heads
    own = form.get("own_output", False)
    if group.name == "mlp":
        cores = [("", group.roles, 1)]
    elif H == G:
        cores = [("", group.roles[: 3 if own else 4], H)]
    else:
        cores = [("_q" if own else "_qo", ("q",) if own else ("q", "o"), H), ("_kv", ("k", "v"), G)]
    used, weights = {"first", "second"}, {}
    for end, roles, heads in cores:
        shape = (R1, R2, min(R3, len(roles)), heads)
        assert stored[f"third{end}"].shape == (len(roles), shape[2])
        core = read_core(stored, form, end, shape)
        full = torch.einsum("abch,xa,yb,tc->txyh", core, stored["first"], stored["second"], stored[f"third{end}"])
        weights |= {role: part for role, part in zip(roles, full, strict=True)}
        used |= {name for name in stored if name.startswith(f"core{end}") or name == f"third{end}"}
    if own:
        shape = (*form["ranks_o"], 1, H)
        core = read_core(stored, form, "_o", shape)
        weights["o"] = torch.einsum("abch,xa,yb->xyh", core, stored["first_o"], stored["second_o"])
        used |= {name for name in stored if name.endswith("_o") or name.startswith("core_o")}
    assert used == set(stored)
    turned = {  # (D, width, heads) -> (out, in)
        role: part.permute(0, 2, 1).flatten(1) if role in ("o", "down") else part.permute(2, 1, 0).flatten(0, 1)
        for role, part in weights.items()
    }
    return {f"{role}.weight": weight for role, weight in turned.items()}


def squared_error(weights: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> float:
    return sum(float((weights[name] - again[name]).square().sum()) for name in again)


def stored_numbers(solution: Solution, bits: int) -> int:
    """Biases left out; a bitmap counts by its bytes."""
    return sum(
        tensor.numel() if tensor.is_floating_point() else math.ceil(tensor.numel() * 8 / bits)
        for name, tensor in solution.tensors.items()
        if ".tucker." in name
    )


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("prune", [True, False])
@pytest.mark.parametrize("name", ["attention", "mlp"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_stored_tensors_make_the_reported_error(geometry: str, name: str, prune: bool, keep: float) -> None:
    where, method = GEOMETRIES[geometry], lestd(target="both", prune=prune, refine_sweeps=2)
    group = group_of(method, where, name)
    weights = make_weights(where, group.roles)
    before = {key: weight.clone() for key, weight in weights.items()}
    knob = next(knob for knob in method.knobs(where) if knob.key == (0, name, "size"))
    dense = sum(weight.numel() for key, weight in weights.items() if key.endswith(".weight"))
    biases = sum(weight.numel() for key, weight in weights.items() if key.endswith(".bias"))
    assert (knob.cap, knob.cost(knob.cap)) == (dense, where.layer_numbers(group.roles))
    size = int(keep * dense)
    solution = method.compress(group, where, weights, {}, {"size": size})
    total = sum(float(weight.square().sum()) for key, weight in weights.items() if key.endswith(".weight"))
    again = rebuild(solution, where, group)
    assert again.keys() == {key for key in weights if key.endswith(".weight")}
    assert squared_error(weights, again) / total == pytest.approx(solution.report["error"], rel=1e-9, abs=1e-13)
    numbers = stored_numbers(solution, where.bits)
    assert numbers == solution.report["numbers"] <= max(size, knob.cost(1) - biases)
    assert numbers <= knob.cost(size) - biases
    if solution.forms[group.roles[0]]["sparse"]:
        # Nothing is left lying about: only cores that are whole, or one entry kept back for an empty core.
        assert numbers >= size - 1
        assert solution.report["numbers_without_index"] < numbers
    else:
        assert solution.report["numbers_without_index"] == numbers
    assert all(torch.equal(weights[key], before[key]) for key in weights)
    kept = {key: tensor for key, tensor in solution.tensors.items() if key.endswith(".bias")}
    assert kept.keys() == {key for key in weights if key.endswith(".bias")}
    assert all(torch.equal(tensor, weights[key]) for key, tensor in kept.items())


@pytest.mark.parametrize("entry", [{"target": "both"}, {"target": "both", "prune": False}, {"weighting": "input"}])
@pytest.mark.parametrize("geometry", ["gqa", "opt"])
def test_full_size_stays_dense(geometry: str, entry: Json) -> None:
    where, method = GEOMETRIES[geometry], lestd(**entry)
    for group in method.claims(where)[:2]:
        weights = make_weights(where, group.roles)
        cap = next(knob.cap for knob in method.knobs(where) if knob.group == group.name)
        solution = method.compress(group, where, weights, make_moments(where), {"size": cap})
        assert solution.forms == {}
        assert solution.tensors.keys() == weights.keys()
        assert all(torch.equal(solution.tensors[key], weights[key]) for key in weights)


def test_weights_of_low_rank_come_back_exactly() -> None:
    where, method = GEOMETRIES["gqa"], lestd()
    group = group_of(method, where, "attention")
    weights = make_weights(where, group.roles, decay=0.0)  # 0 ** 0 is 1: rank 1 in D
    solution = method.compress(group, where, weights, {}, {"size": 4000})
    again = rebuild(solution, where, group)
    assert all(torch.allclose(again[key], weights[key], atol=1e-10) for key in again)


def test_zero_weights_and_the_smallest_size() -> None:
    for geometry in ("mha", "gqa"):
        where, method = GEOMETRIES[geometry], lestd()
        group = group_of(method, where, "attention")
        weights = {key: torch.zeros_like(weight) for key, weight in make_weights(where, group.roles).items()}
        for size in (1, 5000):
            solution = method.compress(group, where, weights, {}, {"size": size})
            assert solution.report["error"] == 0.0
            assert all(not weight.any() for weight in rebuild(solution, where, group).values())
        weights = make_weights(where, group.roles)
        solution = method.compress(group, where, weights, {}, {"size": 1})
        least = method.knobs(where)[0].cost(1)
        assert stored_numbers(solution, where.bits) == solution.report["numbers"] <= least
        assert rebuild(solution, where, group)


@pytest.mark.parametrize("keep", [0.15, 0.4, 0.8])
@pytest.mark.parametrize("geometry", ["mha", "gqa"])
def test_no_rank_given_does_better_than_those_searched(geometry: str, keep: float) -> None:
    """Whole-rank cores stand for smaller ones but for U₂ and U₃, which turn with R1: a tie may go either way."""
    where = GEOMETRIES[geometry]
    group = group_of(lestd(), where, "attention")
    weights = make_weights(where, group.roles)
    D, d = where.hidden, where.head_dim
    size = int(keep * sum(weights[f"{role}.weight"].numel() for role in group.roles))
    found = lestd(refine_sweeps=0).compress(group, where, weights, {}, {"size": size}).report
    errors = {}
    for rank in (D // 8, D // 4, 3 * D // 8, D // 2, 5 * D // 8, 3 * D // 4, 7 * D // 8, D):
        part_method = lestd(refine_sweeps=0, ranks=[rank, d, 4 if geometry == "mha" else 2])
        if size >= part_method.knobs(where)[0].cost(1):
            solution = part_method.compress(group, where, weights, {}, {"size": size})
            assert solution.report["tucker_ranks"][:2] == [rank, d]
            errors[rank] = solution.report["error"]
    assert len(errors) > 1
    assert found["error"] <= 1.001 * min(errors.values())
    assert max(errors.values()) > 1.1 * min(errors.values())
    refined = lestd(refine_sweeps=5).compress(group, where, weights, {}, {"size": size}).report
    assert refined["error"] <= found["error"]
    dense_core = lestd(prune=False).compress(group, where, weights, {}, {"size": size}).report
    assert found["error"] <= dense_core["error"]


def test_ranks_given_with_a_dense_core_are_the_size() -> None:
    where = GEOMETRIES["mha"]
    D, d, H = where.hidden, where.head_dim, where.heads
    method = lestd(ranks=[20, 10, 3], prune=False)
    assert method.fixed_ranks
    (knob, *_) = method.knobs(where)
    assert knob.cap == 20 * D + 10 * d + 3 * 4 + 20 * 10 * 3 * H
    assert set(method.wants(where, 0.3, Scores()).values()) == {float(knob.cap)}
    group = group_of(method, where, "attention")
    solution = method.compress(group, where, make_weights(where, group.roles), {}, {"size": knob.cap})
    assert solution.forms["q"] == {"form": "tucker", "ranks": [20, 10, 3], "sparse": False}
    assert solution.tensors["attention.tucker.core"].shape == (20, 10, 3, H)
    assert stored_numbers(solution, 16) == knob.cap


# -- weighting: input -------------------------------------------------------------------------------------------------


def make_moments(where: Geometry, seed: int = 1) -> dict[Moment, Tensor]:
    """Of inputs with a spectrum of their own, for attention and o."""
    generator = torch.Generator().manual_seed(seed)
    D, d, H = where.hidden, where.head_dim, where.heads
    inputs_TD = torch.randn(400, D, generator=generator, dtype=torch.float64) * torch.linspace(0.05, 3, D)
    context_Td = torch.randn(400, d, generator=generator, dtype=torch.float64) * torch.linspace(0.1, 2, d)
    scales_H = torch.linspace(0.2, 2, H, dtype=torch.float64)
    return {
        Moment("attention.in"): (inputs_TD.T @ inputs_TD)[None],
        Moment("o.in", heads=H, groups=H): scales_H[:, None, None] ** 2 * (context_Td.T @ context_Td),
    }


def output_errors(
    where: Geometry, weights: Mapping[str, Tensor], again: Mapping[str, Tensor], moments: Mapping[Moment, Tensor]
) -> tuple[float, float]:
    """Relative squared errors of the outputs of q, k, v together, and of o's heads."""
    moment_DD = moments[Moment("attention.in")][0]
    moment_Hdd = moments[Moment("o.in", heads=where.heads, groups=where.heads)]

    def inputs(weight: Tensor) -> float:
        return float(torch.einsum("oi,ij,oj->", weight, moment_DD, weight))

    def output(weight: Tensor) -> float:
        by_head = weight.unflatten(1, (where.heads, -1))
        return float(torch.einsum("ohi,hij,ohj->", by_head, moment_Hdd, by_head))

    names = [f"{role}.weight" for role in "qkv"]
    read = sum(inputs(weights[n] - again[n]) for n in names) / sum(inputs(weights[n]) for n in names)
    return read, output(weights["o.weight"] - again["o.weight"]) / output(weights["o.weight"])


@pytest.mark.parametrize("prune", [True, False])
@pytest.mark.parametrize("geometry", ["mha", "gqa", "mqa", "biased", "opt"])
def test_weighting_lowers_the_output_error(geometry: str, prune: bool) -> None:
    where, method = GEOMETRIES[geometry], lestd(weighting="input", prune=prune, refine_sweeps=2)
    group = group_of(method, where, "attention")
    moments = make_moments(where)
    assert set(group.moments) == moments.keys()
    weights = make_weights(where, group.roles)
    size = where.layer_numbers(group.roles) // 2
    solution = method.compress(group, where, weights, moments, {"size": size})
    again = rebuild(solution, where, group)
    numbers = stored_numbers(solution, where.bits)
    assert numbers <= solution.report["numbers"] + solution.report["numbers_o"] <= size
    even = {moment: torch.eye(total.shape[-1]).double().expand_as(total) for moment, total in moments.items()}
    plain = rebuild(method.compress(group, where, weights, even, {"size": size}), where, group)
    weighted_errors = output_errors(where, weights, again, moments)
    plain_errors = output_errors(where, weights, plain, moments)
    assert weighted_errors[0] == pytest.approx(solution.report["error"], rel=1e-6)
    assert weighted_errors[0] < 0.8 * plain_errors[0]
    # One root for all heads, scaled: exact, as these covariances differ in scale only.
    assert weighted_errors[1] == pytest.approx(solution.report["error_o"], rel=1e-6)
    assert weighted_errors[1] < 0.8 * plain_errors[1]


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("stacks", [((4, 3),), ((2, 4), (2, 2))])
def test_a_size_curve_is_the_best_choice_at_each_price(stacks: tuple[tuple[int, int], ...], bits: int) -> None:
    """Against every number of kept entries of every candidate, summed up one by one."""
    part, rule = Part(8, 4, stacks, bits), Rule(None, prune=True, whole=True, search_width=True)
    generator = torch.Generator().manual_seed(3)
    falling = 0.6 ** torch.arange(8.0)[:, None, None, None]
    squares = [(torch.randn(8, 4, t, h, generator=generator).double() * falling).square() for t, h in stacks]
    curve = size_curve(part, rule, squares)
    total = sum(float(square.sum()) for square in squares)
    offers = [(part.dense, 0.0)]
    for choice in {choice for size in range(20, part.dense) for choice in choices(part, rule, size)}:
        R1, R2, R3 = choice.ranks
        block = torch.cat([square[:R1, :R2, :R3].reshape(-1) for square in squares]).sort(descending=True).values
        if choice.count is None:
            offers.append((part.with_dense_core(choice.ranks), total - float(block.sum())))
        else:
            spare = len(stacks) - 1
            size = part.factors(choice.ranks) + part.index(choice.ranks) + choice.count + spare
            offers.append((size, total - float(block[: choice.count].sum())))
    assert curve["sizes"] == sorted(curve["sizes"], reverse=True)
    assert curve["sizes"][0] == part.dense
    for place, size in enumerate(curve["sizes"]):
        price = 2.0 ** ((curve["first"] + place) / 2)
        costs = [(error + price * numbers, numbers) for numbers, error in offers]
        found = min(cost for cost, numbers in costs if numbers == size)
        # Whole cores are offered here at every R1, by the curve at its candidates.
        assert found <= 1.05 * min(costs)[0]


def test_sizes_at_a_common_threshold_add_up() -> None:
    curves = [{"first": -4, "sizes": [90, 70, 40, 10]}, {"first": -3, "sizes": [50, 50, 20]}]
    for target in (35.0, 77.0, 100.0, 139.0):
        sizes = sizes_at_common_threshold(curves, [100, 60], target)
        assert sum(sizes) == pytest.approx(target, rel=1e-6)
    assert sizes_at_common_threshold(curves, [100, 60], 5.0) == [10.0, 20.0]
    assert sizes_at_common_threshold(curves, [100, 60], 160.0) == pytest.approx([100.0, 60.0])


def test_bitmap() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((1,), (8,), (3, 5, 7), (2, 4, 2)):
        mask = torch.rand(shape, generator=generator) < 0.5
        packed = np.packbits(mask.numpy().reshape(-1), bitorder="little")
        assert pack_bits(mask).tolist() == packed.tolist()


# -- threshold: model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", ["gqa", "opt"])
@pytest.mark.parametrize("keep", [0.3, 0.6])
def test_one_threshold_for_all_layers_errs_less_at_equal_size(geometry: str, keep: float) -> None:
    where = GEOMETRIES[geometry]
    weights_of = {
        (layer, name): {
            key: (0.3 + 0.4 * layer) * weight if key.endswith(".weight") else weight
            for key, weight in make_weights(where, roles, seed=layer, decay=0.80 + 0.03 * layer).items()
        }
        for layer in range(where.num_layers)
        for name, roles in (("attention", "qkvo"), ("mlp", [r for r in ("gate", "up", "down") if r in where.roles]))
    }
    errors, numbers = {}, {}
    for threshold in ("layer", "model"):
        job = parse_manifest(document({"target": "both", "keep": keep, "threshold": threshold, "refine_sweeps": 0}))
        (method,) = methods = build_methods(job)
        measured = {
            ranks_key(task): method.measure(task.group, where, weights_of[task.group.layer, task.group.name])
            for task in measure_tasks(methods, where)
        }
        assert bool(measured) == (threshold == "model")
        ranks = allocate_ranks(job, methods, where, Scores(measured=measured))
        errors[threshold] = numbers[threshold] = 0.0
        for task in claim_tasks(methods, where):
            weights = weights_of[task.group.layer, task.group.name]
            solution = method.compress(task.group, where, weights, {}, ranks[ranks_key(task)])
            errors[threshold] += squared_error(weights, rebuild(solution, where, task.group)) if solution.forms else 0.0
            numbers[threshold] += sum(t.numel() for n, t in solution.tensors.items() if n.endswith(".bias"))
            numbers[threshold] += stored_numbers(solution, where.bits) if solution.forms else sum(
                t.numel() for n, t in solution.tensors.items() if n.endswith(".weight")
            )
        dense = sum(where.layer_numbers(task.group.roles) for task in claim_tasks(methods, where))
        assert 0.97 * keep * dense < numbers[threshold] <= keep * dense
    assert errors["model"] < 0.95 * errors["layer"]


def test_what_is_measured_reaches_its_own_entry() -> None:
    """Two entries of one method: each follows what was measured for itself."""
    where = GEOMETRIES["mha"]
    job = parse_manifest(
        document(
            {"layers": [0, 1], "keep": 0.5, "threshold": "model"}, {"layers": [2, 3], "keep": 0.5, "threshold": "model"}
        )
    )
    steep, flat = {"first": 0, "sizes": [9000, 8000, 1000]}, {"first": 0, "sizes": [9000, 8500, 8000]}
    measured = {"0/0/attention": steep, "1/0/attention": flat, "2/1/attention": flat, "3/1/attention": steep}
    ranks = allocate_ranks(job, build_methods(job), where, Scores(measured=measured))
    sizes = {key: ranks[key]["size"] for key in measured}
    assert sizes["0/0/attention"] < sizes["1/0/attention"]
    assert sizes["2/1/attention"] > sizes["3/1/attention"]
    dense = where.layer_numbers(("q", "k", "v", "o"))
    assert sum(sizes.values()) == 2 * dense
    with pytest.raises(KeyError):
        allocate_ranks(job, build_methods(job), where, Scores(measured={}))


# -- names and refusals -----------------------------------------------------------------------------------------------


def test_shared_tensors_lie_in_the_module_that_holds_the_roles() -> None:
    names = {
        ("llama", "attention"): "model.layers.2.self_attn.tucker.first",
        ("llama", "mlp"): "model.layers.2.mlp.tucker.first",
        ("opt", "attention"): "model.decoder.layers.2.self_attn.tucker.first",
        ("opt", "mlp"): "model.decoder.layers.2.mlp_factors.tucker.first",
        ("gptj", "attention"): "transformer.h.2.attn.tucker.first",
        ("gptj", "mlp"): "transformer.h.2.mlp.tucker.first",
    }
    for (family, name), expected in names.items():
        where = llama() if family == "llama" else other(family)
        group = group_of(lestd(target="both"), where, name, layer=2)
        assert where.tensor_name(2, f"{name}.tucker.first", group.roles) == expected
    assert llama().tensor_name(1, "k.bias", ("q", "k", "v", "o")) == "model.layers.1.self_attn.k_proj.bias"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"target": "both", "ranks": [4, 4, 2]}, "two entries"),
        ({"target": "mlp", "weighting": "input"}, "target: attention"),
        ({"target": "both", "weighting": "input"}, "target: attention"),
        ({"threshold": "model", "weighting": "input"}, "threshold: layer"),
        ({"threshold": "model", "prune": False}, "no threshold"),
        ({"ranks": [4, 4, 2], "prune": False, "keep": 0.5}, "not both"),
        ({"ranks": [4, 4]}, "ranks"),
        ({"ranks": [0, 4, 2]}, "ranks"),
        ({"refine_sweeps": -1}, "refine_sweeps"),
        ({"sweeps": 0}, "sweeps"),
    ],
)
def test_entries_that_make_no_sense(entry: Json, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        parse_manifest(document(entry))


@pytest.mark.parametrize(
    ("geometry", "entry", "reason"),
    [
        ("mha", {"ranks": [49, 12, 4]}, r"allows up to \[48, 12, 4\]"),
        ("mha", {"ranks": [48, 13, 4]}, r"allows up to \[48, 12, 4\]"),
        ("mha", {"ranks": [48, 12, 4], "weighting": "input"}, r"allows up to \[48, 12, 3\]"),
        ("gqa", {"ranks": [48, 16, 3]}, r"allows up to \[48, 16, 2\]"),
        ("opt", {"ranks": [48, 80, 3], "target": "mlp"}, r"allows up to \[48, 80, 2\]"),
        ("mha", {"ranks": [48, 12, 4], "prune": False}, "no fewer than the weights' 9,216"),
        ("mha", {"ranks": [48, 80, 3], "target": "mlp", "prune": False}, "no fewer than the weights' 11,520"),
    ],
)
def test_ranks_that_do_not_fit_the_model(geometry: str, entry: Json, reason: str) -> None:
    job = parse_manifest(document(entry, budget={"keep": 0.5}))
    with pytest.raises(InputError, match=reason):
        claim_tasks(build_methods(job), GEOMETRIES[geometry])


def test_a_budget_below_the_smallest_size_is_refused() -> None:
    where = GEOMETRIES["mha"]
    job = parse_manifest(document({"keep": 0.02}))
    with pytest.raises(InputError, match=r"takes .* at the least"):
        allocate_ranks(job, build_methods(job), where, Scores())


def test_the_core_in_memory_is_one_for_the_checkpoint() -> None:
    entries = [{"target": "attention", "core": "csr"}, {"target": "mlp", "core": "csr"}]
    assert config_fields(build_methods(parse_manifest(document(*entries)))) == {"core_format": "csr"}
    entries[1]["core"] = "dense"
    with pytest.raises(InputError, match="core_format is 'dense', but an entry before it says 'csr'"):
        config_fields(build_methods(parse_manifest(document(*entries))))
