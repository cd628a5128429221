"""Entries with sizes of their own beside a budget: the total is within it, or the manifest is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from manifests.errors import InputError
from manifests.records import Curve
from manifests.schema import Manifest
from manifests.sweep import parse_sweep
from pipeline.families.geometry import Geometry
from pipeline.inputs.job_inputs import fit_methods
from pipeline.job.plan_report import RateSource, plan_report
from pipeline.methods.base import Method
from pipeline.methods.by_loss import curve_of
from pipeline.methods.method import Scores
from pipeline.methods.registry import allocate_ranks, build_methods
from pipeline.methods.rounded_size import RoundedSizes
from tests import factories
from tests.families.geometries import llama, manifest
from tests.methods.test_registry import stored

pytestmark = pytest.mark.sample(8)

BY_LOSS = {"allocation": "loss"}
LATENT = {"method": "lorc", "cache_keep": 0.25}
OWN: dict[str, list[dict[str, Any]]] = {
    "flat keep": [{"method": "flat_llm", "keep": 0.9}],
    "flat keep by loss": [{"method": "flat_llm", "keep": 0.9, **BY_LOSS}],
    "flat keep uniform": [{"method": "flat_llm", "keep": 0.9, "uniform": True}],
    "flat ranks": [{"method": "flat_llm", "ranks": {"value": 32, "mlp": 160}}],
    "flat ranks of one part": [{"method": "flat_llm", "ranks": {"mlp": 96}}],
    "joint keep": [{"method": "joint_rank_k", "keep": 0.7}],
    "joint ranks": [{"method": "joint_rank_k", "ranks": {"query_key": 32, "mlp": 32}}],
    "lorc keep": [{"method": "lorc", "keep": 0.8}],
    "lorc cache": [LATENT],
    "lorc cache progressive": [{**LATENT, "allocation": "progressive"}],
    "lorc cache by loss": [{**LATENT, **BY_LOSS}],
    "lorc all of the cache": [{"method": "lorc", "cache_keep": 1.0}],
    "lestd keep": [{"method": "lestd", "keep": 0.6}],
    "lestd ranks": [{"method": "lestd", "ranks": [64, 24, 2], "prune": False}],
    "lestd ranks, pruned": [{"method": "lestd", "ranks": [64, 24, 2], "keep": 0.4}],
    "loss_aware keep": [{"method": "loss_aware", "keep": 0.9}],
    **{name: [{"method": name, "keep": 0.7}] for name in ("svd", "asvd", "svd_llm", "magnitude")},
    "two of their own": [
        {"method": "flat_llm", "keep": 0.9, "layers": [0, 1]},
        {"method": "joint_rank_k", "ranks": {"query_key": 32, "mlp": 32}, "layers": [2]},
    ],
    "nothing": [],
}
GEOMETRY = llama("mha", hidden_size=128, head_dim=64, intermediate_size=192, num_hidden_layers=4)
TARGETS = (0.1, 0.5, 0.9, 1.0)
BUDGETS: dict[str, dict[str, Any]] = {
    "keep": {"budget": "keep"},
    "keep of the model": {"budget": "keep", "scope": "model"},
    "keep, rounded": {"budget": "keep", "quantize": {"bits": 4}},
    "bytes": {"budget": "bytes"},
    "bytes of the model": {"budget": "bytes", "scope": "model"},
    "bytes, rounded": {"budget": "bytes", "quantize": {"bits": 8}},
    "bytes of the model, rounded": {"budget": "bytes", "scope": "model", "quantize": {"bits": 4, "what": "all"}},
}
REFUSED = re.compile(
    r"(?P<field>budget\.\w+): (?P<asked>[\d.]+) is out of reach: the stored tensors take (?P<takes>[\d.]+)"
)


def sized(methods: list[dict[str, Any]], budget: dict[str, Any] | None, **fields: Any) -> Manifest:
    return manifest(methods=methods, budget=budget, calibration={"text": {"files": ["t"]}}, **fields)


def asked(methods: list[dict[str, Any]], kind: str, share: float) -> Manifest:
    """With a budget of this kind in BUDGETS."""
    block = BUDGETS[kind]
    budget = {block["budget"]: share, "scope": block.get("scope", "decoder")}
    return sized(methods, budget, quantize=block.get("quantize"))


def scores_of(job: Manifest, geometry: Geometry) -> Scores:
    """As after every pass: importance and condition numbers that differ by layer, and made-up curves."""
    importance = {layer: 0.1 + 0.13 * layer for layer in range(geometry.num_layers)}
    measured: dict[str, Any] = {}
    curves: dict[str, Curve] = {}
    for position, method in enumerate(build_methods(job)):
        for group in method.measures(geometry):
            measured[group.task(position).key] = {"log_condition": [1.0 + 0.9 * group.layer, 2.0]}
        curves |= _curves(position, method, GEOMETRY)
    return Scores(importance, measured, curves)


def _curves(position: int, method: Method[Any], geometry: Geometry) -> Mapping[str, Curve]:
    """Of groups with one rank each: deeper layers lose more."""
    found = {}
    for group in method.predicts(geometry):
        (variable,) = (v for v in method.rank_variables(geometry) if (v.layer, v.group) == (group.layer, group.name))
        lost = [(1.0 + group.layer) * (variable.cap - rank) for rank in range(variable.cap + 1)]
        found[group.task(position).key] = curve_of(variable, lost.__getitem__, lambda rank: rank)
    return found


def share_stored(job: Manifest, geometry: Geometry, ranks: dict[str, dict[str, int]]) -> float:
    """In the budget's terms."""
    assert job.budget is not None
    numbers = stored(job, geometry, {**ranks})
    if job.budget.bytes is None:
        return numbers / geometry.scope_numbers(job.budget.scope)
    sizes = RoundedSizes(job, GEOMETRY)
    whole, taken = sizes.whole, sizes.reserved()
    return (numbers + taken) / whole


def refused_shares(methods: list[dict[str, Any]], kind: str) -> set[float]:
    """The shares of TARGETS that are refused; at the others, what is stored is within the budget."""
    refused = set()
    for share in TARGETS:
        try:
            job = asked(methods, kind, share)
            fit_methods(job, GEOMETRY)
        except InputError as error:
            refused.add(share)
            if found := REFUSED.search(str(error)):
                assert float(found["asked"]) == pytest.approx(share)
                assert float(found["takes"]) >= share
            continue
        if any(entry["method"] == "loss_aware" for entry in methods):
            continue  # its curves have two ranks; what it may store at most was counted
        ranks = allocate_ranks(job, build_methods(job), GEOMETRY, scores_of(job, GEOMETRY))
        assert share_stored(job, GEOMETRY, ranks) <= share * (1 + 1e-9)
    return refused


@pytest.mark.parametrize("kind", list(BUDGETS))
@pytest.mark.parametrize("name", list(OWN))
def test_the_total_is_within_the_budget_or_the_manifest_is_refused(name: str, kind: str) -> None:
    """Before anything is measured; if it is not refused then, afterwards too."""
    refused = refused_shares(OWN[name], kind)
    left_out = "nothing" in name or ("lestd" in name and "quantize" in BUDGETS[kind])  # refused for other reasons
    assert 0.1 in refused
    assert 1.0 not in refused or left_out


@pytest.mark.parametrize("kind", ["keep", "bytes, rounded"])
@pytest.mark.parametrize("name", list(OWN))
def test_beside_an_entry_that_follows_the_budget(name: str, kind: str) -> None:
    others = [{"layers": [0, 1, 2], **entry} for entry in OWN[name]]
    assert 0.1 in refused_shares([*others, {"method": "flat_llm", "layers": [3]}], kind)


@pytest.mark.parametrize(
    ("methods", "takes"),
    [
        ([{"method": "flat_llm", "keep": 0.9}], 0.9),
        ([{"method": "flat_llm", "ranks": {"value": 62, "mlp": 180}}], 0.8),
        ([{"method": "lorc", "cache_keep": 0.25}], 0.8),
    ],
)
def test_both_numbers_are_said_and_the_second_is_enough(methods: list[dict[str, Any]], takes: float) -> None:
    with pytest.raises(InputError) as raised:
        fit_methods(sized(methods, {"keep": 0.5}), GEOMETRY)
    found = REFUSED.search(str(raised.value))
    assert found, str(raised.value)
    said = float(found["takes"])
    assert takes < said < 1.0
    fit_methods(sized(methods, {"keep": said}), GEOMETRY)
    with pytest.raises(InputError):
        fit_methods(sized(methods, {"keep": said - 0.002}), GEOMETRY)


@pytest.mark.parametrize("entry", [{"method": "loss_aware", "keep": 0.8}, {**LATENT, **BY_LOSS}])
def test_a_limit_of_the_loss_needs_a_size_to_choose(entry: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"budget\.max_loss: 0\.1 has no size to choose.*\(methods\.0\)"):
        fit_methods(sized([entry], {"max_loss": 0.1}), GEOMETRY)


def test_ranks_that_are_not_known_yet_count_as_the_most_that_they_may_store() -> None:
    """Progressive ranks and those by loss are refused before they are measured, wherever they might pass the budget."""
    for allocation in ("progressive", "loss"):
        entry = {**LATENT, "allocation": allocation}
        with pytest.raises(InputError) as raised:
            fit_methods(sized([entry], {"keep": 0.1}), GEOMETRY)
        found = REFUSED.search(str(raised.value))
        assert found, str(raised.value)
        job = sized([entry], {"keep": min(1.0, float(found["takes"]))})
        ranks = allocate_ranks(job, build_methods(job), GEOMETRY, scores_of(job, GEOMETRY))
        assert stored(job, GEOMETRY, ranks) <= float(found["takes"]) * GEOMETRY.decoder_numbers()


def test_chosen_bits_beside_a_cache_of_its_own() -> None:
    """The entry may take the most bits: that is what is counted before curves are taken."""
    entry = {**LATENT, **BY_LOSS, "weighting": "loss"}
    quantize, skip = {"bits": "auto"}, ["q", "gate", "up", "down"]
    fits = sized([entry], {"bytes": 0.99}, quantize={**quantize, "skip": skip})
    fit_methods(fits, GEOMETRY)
    with pytest.raises(InputError, match=r"budget\.bytes: 0\.6 is out of reach"):
        fit_methods(sized([entry], {"bytes": 0.6}, quantize={**quantize, "skip": skip}), GEOMETRY)


def test_every_point_of_a_sweep() -> None:
    """Sizes of the sweep that its methods' own sizes exceed; an empty list takes them as they are."""
    document = {
        "version": 1,
        "model": {"source": "m"},
        "output": "o",
        "run_dir": "r",
        "keep": [0.9, 0.5],
        "points": [{"methods": [{"method": "lestd", "keep": 0.6}]}],
    }
    for sizes, refused in ((None, [False, True]), ([], [False])):
        points = [{**document["points"][0], "keep": sizes}]  # type: ignore[index]
        _, found = parse_sweep({**document, "points": points})
        for point, is_refused in zip(found, refused, strict=True):
            fits = (
                pytest.raises(InputError, match="in a sweep: an empty list of sizes") if is_refused else nullcontext()
            )
            with fits:
                fit_methods(point.manifest, GEOMETRY)


def test_a_plan_of_a_config_refuses_too(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(factories.make_config("llama").to_dict()))
    job = sized([{"method": "flat_llm", "keep": 0.9}], {"keep": 0.5})
    with pytest.raises(InputError, match=r"is out of reach: the stored tensors take 0\.9"):
        plan_report(job, config, RateSource(gpu="H200"))
