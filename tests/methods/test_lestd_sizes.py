"""LeSTD: which sizes are chosen, one threshold for all layers, names, and what is refused.

Legend: R1 R2 R3 ranks, t projections, h heads of a tensor.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from manifests.errors import InputError
from manifests.loading import parse_manifest
from pipeline.methods.lestd_sizes import ProblemShape, Rule, choices, pack_bits, size_curve, sizes_at_common_threshold
from pipeline.methods.method import Scores, Statistics
from pipeline.methods.registry import (
    allocate_ranks,
    build_methods,
    claim_tasks,
    config_fields,
    measure_tasks,
)
from tests.families.geometries import llama, other
from tests.methods.tucker_weights import (
    GEOMETRIES,
    Json,
    document,
    group_of,
    lestd,
    make_weights,
    rebuild,
    squared_error,
    stored_numbers,
)

# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("stacks", [((4, 3),), ((2, 4), (2, 2))])
def test_a_size_curve_is_the_best_choice_at_each_price(stacks: tuple[tuple[int, int], ...], bits: int) -> None:
    """Against every number of kept entries of every candidate, summed up one by one."""
    shape, rule = ProblemShape(8, 4, stacks, bits), Rule(None, prune=True, whole=True, search_width=True)
    generator = torch.Generator().manual_seed(3)
    falling = 0.6 ** torch.arange(8.0)[:, None, None, None]
    squares = [(torch.randn(8, 4, t, h, generator=generator).double() * falling).square() for t, h in stacks]
    curve = size_curve(shape, rule, squares)
    total = sum(float(square.sum()) for square in squares)
    offers = [(shape.dense, 0.0)]
    for choice in {choice for size in range(20, shape.dense) for choice in choices(shape, rule, size)}:
        R1, R2, R3 = choice.ranks
        block = torch.cat([square[:R1, :R2, :R3].reshape(-1) for square in squares]).sort(descending=True).values
        if choice.count is None:
            offers.append((shape.with_dense_core(choice.ranks), total - float(block.sum())))
        else:
            spare = len(stacks) - 1
            size = shape.factors(choice.ranks) + shape.index(choice.ranks) + choice.count + spare
            offers.append((size, total - float(block[: choice.count].sum())))
    assert curve["sizes"] == sorted(curve["sizes"], reverse=True)
    assert curve["sizes"][0] == shape.dense
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


@pytest.mark.slow
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
        for name, roles in (
            ("attention", "qkvo"),
            ("mlp", [r for r in ("gate", "up", "down") if r in where.layers[0].roles]),
        )
    }
    errors, numbers = {}, {}
    for threshold in ("layer", "model"):
        job = parse_manifest(document({"target": "both", "keep": keep, "threshold": threshold, "refine_sweeps": 0}))
        (method,) = methods = build_methods(job)
        measured = {
            task.key: method.group(task, where.layers[task.layer])
            .with_data(weights_of[task.layer, task.name])
            .measure()
            for task in measure_tasks(methods, where)
        }
        assert bool(measured) == (threshold == "model")
        ranks = allocate_ranks(job, methods, where, Scores(measured=measured))
        errors[threshold] = numbers[threshold] = 0.0
        for task in claim_tasks(methods, where):
            weights = weights_of[task.layer, task.name]
            solution = (
                method.group(task, where.layers[task.layer]).with_data(weights, Statistics()).solve(ranks[task.key])
            )
            errors[threshold] += squared_error(weights, rebuild(solution, where, task)) if solution.forms else 0.0
            numbers[threshold] += sum(t.numel() for n, t in solution.tensors.items() if n.endswith(".bias"))
            numbers[threshold] += (
                stored_numbers(solution, where.bits)
                if solution.forms
                else sum(t.numel() for n, t in solution.tensors.items() if n.endswith(".weight"))
            )
        dense = sum(where.layers[0].numbers(task.roles) for task in claim_tasks(methods, where))
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
    dense = where.layers[0].numbers(("q", "k", "v", "o"))
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
        assert where.layers[2].tensor_name(f"{name}.tucker.first", group.roles) == expected
    assert llama().layers[1].tensor_name("k.bias", ("q", "k", "v", "o")) == "model.layers.1.self_attn.k_proj.bias"


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
    with pytest.raises(InputError, match=r"take at least"):
        allocate_ranks(job, build_methods(job), where, Scores())


def test_the_core_in_memory_is_one_for_the_checkpoint() -> None:
    entries = [{"target": "attention", "core": "csr"}, {"target": "mlp", "core": "csr"}]
    assert config_fields(build_methods(parse_manifest(document(*entries)))) == {"core_format": "csr"}
    entries[1]["core"] = "dense"
    with pytest.raises(InputError, match="core_format is 'dense', but an earlier entry sets 'csr'"):
        config_fields(build_methods(parse_manifest(document(*entries))))
