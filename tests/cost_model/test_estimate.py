"""The plan's figures: by hand for a small model, and by sanity for a 70B."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manifests.schema import Manifest
from pipeline.console.amounts import duration
from pipeline.cost_model.estimate import DRIVER_BYTES, Plan, make_plan
from pipeline.cost_model.memory import KEPT_BYTES, PROCESS_BYTES, moment_bytes, solve_bytes
from pipeline.cost_model.passes import PlannedPasses
from pipeline.cost_model.phases import phase_seconds
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.prices import WORKERS_SECONDS, Prices
from pipeline.cost_model.rates import NOMINAL_CPU, rates_of
from pipeline.cost_model.remarks import rank_remarks
from pipeline.cost_model.solve_work import eigen_flops, solve_flops, solve_seconds, solve_work
from pipeline.cost_model.vocabulary import TOKENIZER_BYTES
from pipeline.cost_model.work import layer_work
from pipeline.families.geometry import Geometry
from pipeline.families.registry import geometry_of, standard_config
from pipeline.job import plan_report as planning
from pipeline.methods.method import Moment, read_task_key
from pipeline.methods.registry import build_methods, claim_tasks
from pipeline.methods.work import Work
from pipeline.plan import main
from pipeline.rounding.tasks import rounded_tasks
from pipeline.units.sharding import held_out_windows
from tests.families.geometries import LLAMA_70B, llama, manifest, other
from tests.published import CONFIGS
from workers import cluster

TEXT = {"files": ["text.txt"]}
GIB = 2**30
# D 48, N 80, L 6, H 4, G 2, d 16, V 320; untied.
LAYER = 64 * 48 + 32 * 48 * 2 + 48 * 64 + 3 * 80 * 48 + 2 * 48
MODEL = 6 * LAYER + 2 * 320 * 48 + 48


def calibration(**changes: Any) -> dict[str, Any]:
    cut = {"samples": 10, "sequence_length": 32, "shards": 4, "micro_batch": 2}
    return {"text": TEXT, **cut, "propagate": "compressed", **changes}


def plan_of(job: Manifest, geometry: Geometry, source_bytes: int = 1000) -> Plan:
    return make_plan(PlannedJob.of(job, geometry), source_bytes)


def rounded_job(job: Manifest, geometry: Geometry) -> PlannedJob:
    return PlannedJob.of(job, geometry, rounded_tasks(claim_tasks(build_methods(job), geometry), job, geometry))


def test_a_small_job_by_hand() -> None:
    job = manifest(keep=0.8, calibration=calibration(), workers={"max": 3})
    plan = plan_of(job, llama())
    assert LAYER == 20832
    assert (plan.layers, plan.claimed_layers, plan.workers, plan.calibration_tokens) == (6, 6, 3, 320)
    assert plan.layer_bytes == 2 * LAYER
    assert plan.source_bytes == 1000
    assert plan.dense_numbers == MODEL
    assert plan.expected_numbers == MODEL - round(0.2 * 6 * LAYER)
    assert plan.output_bytes == 2 * plan.expected_numbers
    assert plan.statistics_bytes_per_layer == 8 * (2 * 16 * 16 + 80 * 80)
    assert plan.activation_bytes == 320 * 48 * 2
    assert plan.read_bytes == sum(plan.read_phases.values())
    assert plan.forward_flops == 3 * 6 * 320 * (2 * LAYER + 2 * 32 * 64)
    assert plan.moment_flops == 6 * 320 * (2 * 4 * 16 * 16 + 2 * 80 * 80)
    # Heads by their eigenvectors; of the MLP's 80 channels a quarter goes, one after another.
    eliminated = 80**3 + (80**3 - 60**3) + 48 * 80**2 + 48 * (80**2 - 60**2)
    assert plan.solve_flops == 6 * (10 * 2 * 16**3 + eliminated)
    statistics = plan.statistics_bytes_per_layer
    assert plan.run_dir_bytes == 2 * plan.activation_bytes + statistics + 320 * 4 + plan.output_bytes
    # A layer as it is read, and as it is placed: a CPU may multiply in float32. The embedding is beside the first.
    batch = 2 * 32 * (6 * 48 + 3 * 80 + 4 * 64) * 4
    streaming = LAYER * (2 + 4) + 320 * 48 * 2 + statistics + batch
    streaming += (3 - 2) * 32 * (48 + 80) * 2 + 3 * 32 * 80 * 4  # what waits for the third sample; a product's rows
    solving = 3 * 8 * 80 * 80 + 8 * 2 * 16 * 16 + 3 * 80 * 48 * (8 + 2)  # the values' moments may be there, too
    comparing = LAYER * (2 + 4) + 128 * 320 * (4 + 8 + 8 + 2) + batch  # logits of 128 tokens, and random signs
    assert comparing > streaming > solving
    texts = 320 * 48 * 4 // 2  # more than samples and a held-out window; two of three workers take them
    shared = 3 * statistics // 2 + 2 * LAYER
    assert plan.worker_peak_bytes == PROCESS_BYTES + KEPT_BYTES + shared + texts + comparing
    assert plan.driver_peak_bytes == DRIVER_BYTES + TOKENIZER_BYTES * 320 + 320 * 8


def test_the_plan_says_how_often_layers_are_gone_through() -> None:
    geometry = llama()
    once = 6 * 320 * (2 * LAYER + 2 * 32 * 64)

    def passes(*methods: dict[str, Any], **changes: Any) -> float:
        return plan_of(manifest(*methods, keep=0.8, calibration=calibration(**changes)), geometry).forward_flops / once

    assert passes() == 3
    assert passes({"allocation": "uniform"}) == 2
    assert passes({"ranks": {"value": 3}}) == 2
    assert passes(propagate="dense") == 1
    assert passes({"allocation": "uniform"}, propagate="dense") == 1
    # A pass for importance alone takes 262,144 tokens: here 16 of 64 samples.
    long = {"samples": 64, "sequence_length": 16_384, "shards": 64}
    assert passes(**long) * once == pytest.approx(2.25 * 6 * 64 * 16_384 * (2 * LAYER + 2 * 64 * 16_384))


def test_the_inputs_of_the_backward_pass_take_room() -> None:
    """Of its samples, in all layers, before a compressed model is stored: the larger one counts."""

    def run_dir(samples: int) -> int:
        text = calibration(samples=2048, shards=64, propagate="dense", gradient={"samples": samples})
        return plan_of(manifest({"method": "loss_aware"}, keep=0.8, calibration=text), llama()).run_dir_bytes

    sample = 32 * 48 * 2 * 6
    assert run_dir(2048) - run_dir(1024) == 1024 * sample
    assert run_dir(2) == run_dir(1)


def test_kept_statistics_take_room() -> None:
    def run_dir(keep: bool | None, propagate: str, allocation: str = "importance") -> int:
        methods = [{"method": "flat_llm", "allocation": allocation}]
        given = {"calibration": calibration(propagate=propagate), "statistics": {"keep": keep}, "methods": methods}
        job = manifest(keep=0.8, **given)
        return plan_of(job, llama()).run_dir_bytes

    one = 8 * (2 * 16 * 16 + 80 * 80)
    assert run_dir(True, "compressed") - run_dir(None, "compressed") == 5 * one
    assert run_dir(None, "dense") == run_dir(True, "compressed")
    assert run_dir(False, "dense") == run_dir(None, "dense")  # until the first ranks are known
    assert run_dir(False, "dense", "uniform") == run_dir(None, "compressed")
    assert run_dir(None, "dense", "uniform") == run_dir(None, "dense")


def test_what_following_the_loss_takes() -> None:
    """By hand, of an MLP whose sample has 65,536 tokens at most: as many times 48 numbers of two bytes."""
    dense = calibration(propagate="dense")
    job = manifest({"method": "loss_aware"}, keep=0.8, calibration=dense)
    planned = PlannedJob.of(job, llama())
    (mlp,) = (task for task in planned.tasks if (task.layer, task.name) == (0, "mlp"))
    square = 8 * (80 * 80 + 2 * 48 * 48 + 2 * 80)  # of what down reads; of what gate and up read, and the metric
    assert solve_bytes(mlp, llama().layers[0]) == 4 * square + 2 * 65_536 * 48 + 3 * 80 * 48 * (8 + 2)
    one = layer_work(planned)
    forward = 2 * LAYER + 2 * 32 * 64
    through = 2 * 48 * (64 + 32)
    assert one.gradient_flops == 320 * (3 * forward + through)
    # Three moments of ten samples in four shards, 32 tokens each: a band of 48 columns, and the rows' own product.
    assert one.gradient_moment_flops == 3 * 10 * 2 * 32 * (48 * 48 + 32 * 48)
    squares = 40 * 320 * 2 * 80  # of what leaves gate and up the squares alone
    assert one.gradient_moved_bytes == 3 * (32 * 4 * 48 * 48 + 2 * 3 * 4 * 320 * 48 + 40 * 10 * 32 * 32) + squares
    assert one.gradient_grid_flops == 32 * 3 * forward
    assert one.grid_flops == 32 * forward
    assert one.held_out_flops == (32 * forward, 32 * forward)
    kept = layer_work(planned, 0.75)
    assert kept.held_out_flops == pytest.approx((32 * forward, 32 * (forward - 0.5 * LAYER)))
    assert len(one.curves) == len(one.solves) == 3
    assert one.correction_flops == 0
    rest, seen = zip(*((solve_flops(curve), curve.sampled) for curve in one.curves), strict=True)
    cube, square, ordered = 48**3, 48**2, 48**3 / 3 + 2 * 48**2 * 80 + 80**3 / 3 + 48 * 80**2
    shared = 80**3 + 80**3 - 10**3 + 48 * 80**2 + ordered
    grown = cube / 3 + (4 * 2 + 2) * 80 * square + (2 * 8 * 4 + 3 * 6) * cube
    looked, tokens = 0.0, 0.0
    for width in (10, 40, 80):
        ranks = [share * min(2 * width, 48) for share in (0.125, 0.375, 0.75)]
        refit = width**3 / 3 + 2 * 48 * width * 80 if width < 80 else 0
        looked += 3 * cube + refit + 2 * 2 * max(ranks) * 48 * width + 3 * (width**3 / 3 + 2 * 48 * width**2)
        tokens += 2 * 2 * 48 * 80 + 4 * 48 * 80
        tokens += sum(2 * rank * (48 + 2 * width) + width**2 + 8 * 48 * width for rank in ranks)
    fits = (cube + 64**3) / 3 + 4 * cube + 4 * 48 * 64 * (48 + 64) + 4 * cube
    for reduced in range(4, 64, 4):  # of 64 features; four refits, three encoders, and what ranks of o are told by
        refit, steps = reduced**3 / 3 + 48 * reduced**2, 14 * 2 * 16 * reduced * (reduced + 64)
        fits += 4 * refit + 3 * (2 * 48 * reduced**2 + steps) + 4 * 48 * reduced**2
        fits += 2 * 48 * reduced * min(reduced, 48) + 4 * min(reduced, 48) ** 3
    pulled = 25 / 3 * cube
    assert sorted(rest) == pytest.approx(sorted([fits, shared + grown + looked, pulled]))
    assert max(curve.steps for curve in one.curves) == 15 * 3 * 14 * 2
    assert seen == pytest.approx([0, 320 * tokens, 0])
    assert one.curves[1].shared is not None
    assert (one.curves[1].pieces, solve_flops(one.curves[1].shared)) == (8, pytest.approx(shared))
    again = manifest({"method": "loss_aware", "correct": "output"}, keep=0.8, calibration=dense)
    two = layer_work(PlannedJob.of(again, llama()))
    pairs = sum(f * (f + 4 * 48) for f in (48, 64, 48, 80))
    attention = forward - 2 * 3 * 48 * 80
    assert two.correction_flops == 320 * (3 * forward + attention + pairs)
    trained = manifest({"method": "loss_aware", "correct": "output", "refine": True}, keep=0.8, calibration=dense)
    three = layer_work(PlannedJob.of(trained, llama()))
    assert three.correction_flops == 320 * (4 * forward + 4 * attention + pairs)
    rates = rates_of("H200")
    phases = phase_seconds(Prices(two, rates, PlannedPasses(6, 4, 2)))
    assert {"gradient", "curves", "correct", "held-out"} < set(phases)
    assert sum(two.pair_bytes) == 8 * sum(f * (f + 1) // 2 + f * 48 for f in (48, 64, 48, 80))
    assert two.pair_added_bytes > 40 * 320 / 32 * 48 * (48 + 64 + 48 + 80)
    through = two.correction_flops / rates.products + two.pair_added_bytes / rates.memory
    # Sums leave each worker, are added, half by each, whole sums from both and one back, and go to who solves.
    crossing = sum(two.pair_bytes) * ((1 + 3 / 2 + 1) / rates.link + 3 / 2 / rates.memory)
    grids = 4 * 2 * two.grid_flops / rates.products
    assert phases["correct"] == pytest.approx(6 * (through / 2 + crossing + grids))


def test_what_low_rank_behind_a_moment_takes() -> None:
    """By hand: gate and up (160 × 48) and down (48 × 80), at 0.65 of their full ranks."""
    job = manifest({"method": "svd_llm"}, keep=0.8, calibration=calibration(propagate="dense"))
    planned = PlannedJob.of(job, llama())
    names = [task.name for task in planned.tasks if task.layer == 0]
    solves = dict(zip(names, layer_work(planned).solves, strict=True))
    both, down = solves["gate_up"], solves["down"]
    assert (eigen_flops(both), eigen_flops(down)) == (2 * 10 * 48**3, 10 * 80**3 + 10 * 48**3)
    rank = 0.65 * 48
    products = 4 * 48**3 + 2 * 160 * 48 * (48 + 48 + rank) + 2 * 48**2 * rank
    assert solve_flops(both) - eigen_flops(both) == pytest.approx(products)
    products = 4 * 80**3 + 2 * 48 * 80 * (80 + 48 + rank) + 2 * 80**2 * rank
    assert solve_flops(down) - eigen_flops(down) == pytest.approx(products)
    assert down.steps == 0


def test_what_rounding_takes() -> None:
    """By hand: factors of what is read, products, columns; embeddings and head once; nothing of it in the solves."""
    dense = calibration(propagate="dense")
    plain = manifest({"method": "flat_llm"}, keep=0.8, calibration=dense)
    job = manifest(
        {"method": "flat_llm"}, keep=0.8, calibration=dense, quantize={"bits": 4, "group": 32, "what": "all"}
    )
    where = llama(hidden_size=64, intermediate_size=128)
    planned = rounded_job(job, where)
    work = layer_work(planned)
    assert work.solves[:2] == layer_work(PlannedJob.of(plain, where)).solves
    assert solve_flops(work.solves[2]) == 0  # q and k, which are rounded alone
    found = {read_task_key(key).group: each for key, each in work.rounding.items()}
    kept = 96  # three quarters of 128
    assert found["mlp"].products == pytest.approx((64**3 + kept**3) / 3)
    passes = 2  # of error feedback, and of polishing
    assert found["mlp"].single == passes * (2 * kept * 64**2 + 64 * kept**2)
    assert found["query_key_value"].columns == passes * 64
    assert found["head"].single == passes * where.vocab * 64**2
    assert (found["embed"].products, found["embed"].columns) == (0.0, 0)
    assert len(work.rounding) == 3 * where.num_layers + 2
    rates = rates_of("H200")
    seconds = phase_seconds(Prices(work, rates, PlannedPasses(6, 4, 1)))
    assert seconds["round"] == pytest.approx(sum(solve_seconds(each, rates) for each in work.rounding.values()))
    (head,) = (task for task in planned.tasks if task.roles == ("head",))
    assert head.moments
    assert solve_flops(solve_work(head, planned.groups[head.key], 100)) == 0


def test_the_size_of_a_rounded_checkpoint() -> None:
    """Of layers of nothing but matrices and norms, as `budget.bytes` counts it: of each role two shapes at the most."""
    where = llama(hidden_size=64, intermediate_size=128, vocab_size=64)
    rounded = {"bits": 4, "group": 32, "what": "all"}
    job = manifest(calibration=calibration(), quantize=rounded, keep=1.0)
    norms = 2 * 64 * where.num_layers + 64
    matrices = where.model_numbers() - norms
    found = make_plan(PlannedJob.of(job, where), 1)
    shapes = 2 * 16 * (7 * where.num_layers + 2)
    assert found.output_bytes == 2 * (norms + round(matrices * (4 / 16 + 1 / 32))) + shapes
    assert found.output_bound == "budget.keep"


@pytest.mark.parametrize("method", ["flat_llm", "loss_aware"])
def test_rounding_takes_a_fifth_of_a_large_solve_at_most(method: str) -> None:
    where = llama(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8)
    rounded = {"bits": 4, "group": 32}
    job = manifest({"method": method}, keep=0.8, calibration=calibration(propagate="dense"), quantize=rounded)
    work = layer_work(rounded_job(job, where))
    seconds = phase_seconds(Prices(work, NOMINAL_CPU, PlannedPasses(6, 4, 1)))
    assert 0.0 < seconds["round"] < 0.2 * seconds["solve"]


def plan_of_70b(*methods: dict[str, Any], **changes: Any) -> Plan:
    """Return the plan of a Llama-2-70B, whose source has more bytes than its model, on eight GPUs."""
    text = calibration(samples=256, sequence_length=4096, shards=16, micro_batch=1, **changes)
    job = manifest(*methods, keep=0.8, calibration=text, workers={"max": 8, "gpus": 1})
    return plan_of(job, llama(**LLAMA_70B), 137_953_316_864)


def test_a_70b_that_follows_the_loss_fits_on_a_gpu() -> None:
    """It holds four times what down reads (6.1 GiB), the sample (7), weights and their float64 copies."""
    assert 38 * GIB < plan_of_70b({"method": "loss_aware"}, propagate="dense").worker_device_bytes < 48 * GIB


def test_no_more_workers_than_shards() -> None:
    job = manifest(keep=0.8, calibration=calibration(shards=2), workers={"max": 50})
    assert plan_of(job, llama()).workers == 2


def test_activations_in_memory_are_bounded() -> None:
    big = calibration(samples=100_000, sequence_length=64)

    def peak(gb: float) -> int:
        job = manifest(keep=0.8, calibration=big, workers={"activation_memory_gb": gb})
        return plan_of(job, llama()).worker_peak_bytes

    assert peak(0.5) - peak(0.25) == GIB // 4
    held_out = 32_768 * 48 * 4  # in float32
    assert peak(100) - peak(0.25) == 100_000 * 64 * 48 * 2 + held_out - GIB // 4


def test_growing_the_number_of_layers_grows_nobody_s_peak_memory() -> None:
    job = manifest(keep=0.8, calibration=calibration())
    few, many = (plan_of(job, llama(num_hidden_layers=layers)) for layers in (2, 100))
    assert few.worker_peak_bytes == many.worker_peak_bytes
    assert few.driver_peak_bytes == many.driver_peak_bytes


def test_features_of_points() -> None:
    geometry = llama().layers[0]
    features = {point: geometry.features(point) for point in (
        "attention.in", "mlp.in", "q.in", "q.out", "k.out", "v.out", "o.in", "o.out", "up.out", "down.in", "down.out",
    )}  # fmt: skip
    assert features == {
        "attention.in": 48, "mlp.in": 48, "q.in": 48, "q.out": 64, "k.out": 32, "v.out": 32, "o.in": 64, "o.out": 48,
        "up.out": 80, "down.in": 80, "down.out": 48,
    }  # fmt: skip
    assert moment_bytes(Moment("o.in", heads=4, groups=2), geometry) == 2 * 16 * 16 * 8
    assert moment_bytes(Moment("attention.in"), other("opt").layers[0]) == 48 * 48 * 8


def test_llama_2_70b() -> None:
    plan = plan_of_70b()
    assert plan.dense_numbers == 68_976_648_192  # as published
    assert plan.layer_bytes == 2 * 855_654_400
    assert plan.source_bytes == 2 * plan.dense_numbers + 20_480  # rotary buffers of the original files
    assert plan.statistics_bytes_per_layer == 8 * (28672**2 + 8 * 128**2)
    assert plan.calibration_tokens == 2**20
    assert plan.activation_bytes == 2**20 * 8192 * 2
    assert plan.output_bytes == pytest.approx(0.8 * 2 * plan.dense_numbers, rel=0.01)
    # A layer, its statistics three times over for the solver, an eighth of the activations: not a model.
    assert 24 * GIB < plan.worker_device_bytes < 32 * GIB
    assert 10 * GIB < plan.worker_host_bytes < 16 * GIB
    assert plan.worker_peak_bytes == plan.worker_host_bytes + plan.worker_device_bytes
    assert plan.driver_peak_bytes < GIB
    assert plan.run_dir_bytes < 1.4 * plan.output_bytes
    assert plan.forward_flops == pytest.approx(3 * 2 * 2**20 * 80 * 855_654_400, rel=0.2)
    kept = manifest(keep=0.8, calibration=calibration(samples=256, sequence_length=4096, propagate="dense"))
    assert plan_of(kept, llama(**LLAMA_70B)).run_dir_bytes > 80 * plan.statistics_bytes_per_layer


def test_jobs_without_a_budget_expect_what_their_ranks_take() -> None:
    job = manifest({"ranks": {"value": 4}}, calibration=calibration())
    assert plan_of(job, llama()).expected_numbers == MODEL - 6 * (16 - 4) * 48 * (4 + 2)


def test_the_report_is_json() -> None:
    plan = plan_of(manifest(keep=0.8, calibration=calibration()), llama())
    assert json.loads(json.dumps(plan.report()))["layer_bytes"] == plan.layer_bytes


@pytest.mark.slow
def test_the_command(
    tmp_path: Path, tiny_model: Any, planned: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    text = {"files": [str(tmp_path / "text.txt")]}
    (tmp_path / "text.txt").write_text("not read by a plan", encoding="utf-8")
    job = {"model": {"source": str(tiny_model())}, "calibration": calibration(text=text)}
    found = planned("--tflops", "0.5", **job)
    assert found["rates"]["products"] == found["rates"]["double"] == 0.5e12
    assert list(found["phases"]) == [
        "digests", "start", "texts", "importance", "statistics", "reduce", "solve", "propagate", "compare", "verify",
        "held-out", "assemble",
    ]  # fmt: skip
    assert found["estimated_seconds"] == pytest.approx(sum(found["phases"].values()))
    assert found["layers"] == 3
    scored = {"perplexity": {"text": text, "window": 4, "dense": True}}
    assert planned("--tflops", "0.5", **job, evaluation=scored)["phases"]["evaluate"] > 2 * WORKERS_SECONDS
    assert main([str(tmp_path / "job.yaml"), "--tflops", "1"]) == 0
    assert "worker peak bytes" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "out").exists()
    assert "reachable is" in planned("--set", "budget.keep=0.01", **job)


@pytest.mark.slow
def test_from_a_config_alone(tmp_path: Path, planned: Callable[..., Any]) -> None:
    """No source is there; a GPU's rates come from the table, and what is too large is said."""
    cut = calibration(samples=256, sequence_length=4096, shards=16, micro_batch=1, propagate="dense")
    job = {"config": LLAMA_70B, "calibration": cut, "workers": {"max": 8, "gpus": 1}}

    def changed(*fields: str, **blocks: Any) -> Any:
        return planned("--gpu", "H200", *(part for field in fields for part in ("--set", field)), **job, **blocks)

    found = changed()
    assert found["dense_numbers"] == 68_976_648_192
    assert found["rates"]["products"] == 500e12
    assert 60 < found["estimated_seconds"] < 600
    assert found["layers_per_commit"] == 1
    assert found["committed_bytes"] == 79 * found["activation_bytes"]
    seldom = changed("resume.every=auto")
    assert seldom["committed_bytes"] == 79 // seldom["layers_per_commit"] * found["activation_bytes"]
    assert seldom["layers_per_commit"] > 1
    assert any("does not fit: run_dir takes" in remark for remark in found["remarks"]) == (
        found["run_dir_bytes"] > shutil.disk_usage(tmp_path).free
    )
    assert not any("evaluation" in remark for remark in found["remarks"])
    scored = {"perplexity": {"text": {"files": ["text.txt"]}, "window": 8}, "tasks": ["arc_easy"]}
    assert [remark for remark in changed(evaluation=scored)["remarks"] if "evaluation" in remark] == [
        "evaluation.perplexity is not among the seconds: with --config its text is not read",
        "evaluation.tasks is not among the seconds: with --config no tokenizer is read",
    ]
    large, few = changed("calibration.micro_batch=64"), changed("calibration.samples=6", "calibration.shards=1")
    assert any("does not fit: a worker needs" in remark for remark in large["remarks"])
    assert "fewer than the 28672 columns of down.in" in few["remarks"][0]
    (tmp_path / "list.json").write_text("[]")
    wrong = planned("--config", str(tmp_path / "list.json"), calibration=cut)
    assert "holds no mapping of fields; give the config.json of a model" in wrong
    assert "--config: " in planned("--config", str(tmp_path / "none.json"), calibration=cut)
    assert "--gpu: 'RTX' does not name exactly one" in planned("--gpu", "RTX", **job)


@pytest.mark.slow
def test_what_this_machine_s_memory_does_not_hold(planned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said of it where workers are elsewhere."""
    monkeypatch.setattr(cluster, "get_system_memory", lambda: 4 * GIB)
    monkeypatch.setattr(planning, "machine_cores", lambda: 3)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    wide = {**LLAMA_70B, "hidden_size": 256, "intermediate_size": 16384, "num_hidden_layers": 2}
    job = {"config": wide, "calibration": calibration(shards=4, propagate="dense"), "workers": {"max": 2}}
    found = planned("--tflops", "1", **job)
    assert found["object_store_bytes"] == pytest.approx(2 * 3 * 4 * 16384**2, rel=0.01)
    memory, store = (remark for remark in found["remarks"] if "this machine" in remark)
    assert memory.startswith("does not fit: 2 workers of ")
    assert memory.endswith("this machine has 4.3; lower workers.max, or give --address of a cluster")
    assert found["limits"] == [memory]
    assert not found["fits"]
    assert store.startswith("spills to disk: workers exchange 6.4 GB through Ray's object store, which holds 1.3 of it")
    assert planned("--tflops", "1", "--set", "workers.cpus=64", **job)["limits"][1] == (
        "does not fit: workers.cpus: 64 threads for each worker are more than the cores of this machine, 3; set "
        "workers.cpus: 3 or fewer, or use nodes with more cores"
    )
    for elsewhere in (("--tflops", "1", "--address", "head:6379"), ("--gpu", "H200")):
        assert not any("this machine" in remark for remark in planned(*elsewhere, **job)["remarks"])


@pytest.mark.parametrize(
    ("method", "samples", "said"),
    [("flat_llm", 10, ""), ("flat_llm", 9, "80 columns of down.in"), ("loss_aware", 4, "80 columns of down.in"),
     ("lorc", 4, ""), ("magnitude", 4, "")],
)  # fmt: skip
def test_fewer_tokens_than_a_moment_has_columns(method: str, samples: int, said: str) -> None:
    cut = calibration(samples=samples, sequence_length=8, propagate="dense")
    asked = manifest(methods=[{"method": method}], calibration=cut)
    remarks = rank_remarks(PlannedJob.of(asked, llama()))
    assert len(remarks) == bool(said)
    for remark in remarks:
        assert f"calibration: {samples} samples of 8 are {8 * samples} tokens, fewer than the {said}" in remark
        assert "raise calibration.samples or calibration.sequence_length" in remark


@pytest.mark.parametrize(
    ("count", "samples", "length", "windows"),
    [(64, 64, 256, 7), (32, 64, 256, 4), (1, 64, 256, 1), (256, 256, 4096, 8), (64, 256, 4096, 2), (1, 256, 4096, 1)],
)
def test_a_tenth_is_held_out_up_to_so_many_tokens(count: int, samples: int, length: int, windows: int) -> None:
    assert held_out_windows(count, samples, length) == windows


def test_times_are_said_in_a_unit_in_which_they_are_small() -> None:
    seconds = (0.0, 0.034, 9.96, 99.0, 100.0, 5999.0, 6000.0, 72 * 3600.0, 2_342_858.903)
    shown = ["0 s", "0.034 s", "10 s", "99 s", "2 min", "100 min", "1.7 hours", "3.0 days", "27.1 days"]
    assert [duration(each) for each in seconds] == shown


@pytest.mark.parametrize("entry", [{"method": "loss_aware", "shapes": "stock"}, {"method": "merge_experts"}])
def test_a_worker_needs_no_more_memory_for_more_experts(entry: dict[str, Any]) -> None:
    config = {**CONFIGS["Qwen/Qwen3-235B-A22B"], "num_hidden_layers": 2}
    peaks = []
    for experts in (16, 64):  # for both, 65,536 sampled tokens are enough
        geometry = geometry_of(standard_config({**config, "num_experts": experts}))
        cut = calibration(samples=32, sequence_length=1024, propagate="dense")
        job = manifest(entry, keep=0.8, calibration=cut)
        peaks.append(plan_of(job, geometry).worker_host_bytes)
    assert peaks[0] < peaks[1] < 1.05 * peaks[0]


def test_what_feedback_on_both_sides_takes() -> None:
    """Factors, products and columns of outputs, more than one side's."""
    both, one = (
        manifest(calibration=calibration(propagate="dense"), quantize={"bits": 4, "feedback": feedback}, methods=[])
        for feedback in ("both", True)
    )
    where = llama(hidden_size=64, intermediate_size=128)
    found = []
    for job in (both, one):
        found.append(layer_work(rounded_job(job, where)).rounding)
    assert found[0].keys() == found[1].keys() != set()
    for name, work in found[0].items():
        assert work.products > found[1][name].products
        assert work.single > found[1][name].single
        assert work.columns > found[1][name].columns


def test_eigenproblems_have_a_rate_of_their_own() -> None:
    solve = Work(10.0, 10.0, vectors=2.0, moved=7.0)
    rates = replace(NOMINAL_CPU, double=10.0, eigen=2.0, factors=5.0, memory=3.5)
    assert solve_seconds(solve, rates) == 1.0 + 10.0 + 2.0 + 2.0
