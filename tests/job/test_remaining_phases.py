"""The phases ahead of a job that begins or resumes: the plan's seconds, without the work that is committed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manifests.entries import (
    BlockEntry,
    CurvesEntry,
    DenseEntry,
    GradientEntry,
    HealedEntry,
    HeldOutEntry,
    HeldOutScoreEntry,
    LayerEntry,
    LossRatiosEntry,
    ScoreEntry,
    TeacherEntry,
    TextLoss,
    TextsEntry,
    TryEntry,
)
from manifests.records import SourceFile, StagedRecord
from manifests.schema import Manifest
from pipeline.console.eta import PlannedPhase
from pipeline.cost_model.phases import phase_seconds
from pipeline.cost_model.prices import START_SECONDS, WORKERS_SECONDS, prices_of
from pipeline.cost_model.rates import NOMINAL_CPU
from pipeline.cost_model.work import scoring_flops
from pipeline.driver.ledger_keys import (
    HEALED,
    HELD_OUT,
    HELD_OUT_SCORE,
    LOSS_RATIOS,
    TEACHER,
    TEXTS,
    block_key,
    curves_key,
    dense_key,
    gradient_key,
    layer_key,
    try_key,
)
from pipeline.families.registry import geometry_of, standard_config
from pipeline.inputs.calibration import EvaluationTokens
from pipeline.inputs.job_inputs import Inputs, fit_methods
from pipeline.job.output_scores import dense_score_key
from pipeline.job.remaining_phases import job_eta
from pipeline.ranks.calibration import OTHER_SIZES
from stores.ledger import Ledger
from tests import factories
from tests.families.geometries import manifest as flat
from tests.memory_storage import Memory
from tools.simulator.estimates import RECORD

SHA, LAYERS = "0" * 64, 6
UNIFORM: dict[str, Any] = {"method": "flat_llm", "uniform": True}
RANKED: dict[str, Any] = {"method": "flat_llm"}
BY_LOSS: dict[str, Any] = {"method": "flat_llm", "allocation": "loss", "layers": [2, 4]}
COMPRESSED = {"propagate": "compressed"}
DENSE = DenseEntry(cosine=(), statistics={})
LAYER = LayerEntry(
    staged=StagedRecord(path=f"staged/layer-00000.{0:032}.safetensors", size=1, sha256=SHA, tensors={}),
    forms={}, groups={},
)  # fmt: skip
SCORES: dict[str, Any] = {"divergence": 0.1, "dense_perplexity": 2.0, "perplexity": 3.0, "tokens": 9}
SCORE = HeldOutScoreEntry(**SCORES)
TRY = TryEntry(predicted=0.1, **SCORES)
BLOCK = BlockEntry(stop=1, measured=0.1, predicted=0.1)
TEXT = TextsEntry(of=SHA, window=8, calibration=TextLoss(loss=1.0, tokens=9))


def job_of(
    entry: dict[str, Any], family: str = "llama", *, held_out: bool = True, evaluated: bool = False, **fields: Any
) -> Any:
    """Return the context of a job on a small model of six layers, with two workers and an empty ledger."""
    text = {"text": {"files": ["t"]}, "samples": 16, "sequence_length": 32, "shards": 4, "propagate": "dense"}
    calibration = {**text, **fields.pop("calibration", {})}
    document = {"calibration": calibration, "budget": {"keep": 0.8}, "workers": {"max": 2}, "methods": [entry]}
    manifest = Manifest.model_validate({**flat().model_dump(exclude_unset=True), **document, **fields})
    config = standard_config(factories.make_config(family, num_hidden_layers=LAYERS).to_dict())
    geometry = geometry_of(config)
    source: Any = None
    inputs = Inputs(manifest, source, config, geometry, *fit_methods(manifest, geometry), torch.bfloat16)
    ids = torch.zeros(4, 16, dtype=torch.int64)
    return SimpleNamespace(
        inputs=inputs, manifest=manifest, points=(), tokens=ids, held_out=ids if held_out else None,
        evaluation=EvaluationTokens(ids) if evaluated else None, ledger=Ledger(Memory()), healing_text=None, prefix=(),
        plan=SimpleNamespace(kept=0.8),
        source_files={"model.safetensors": SourceFile(size=1, sha256=SHA)},
    )  # fmt: skip


def plan_of(job: Any) -> dict[str, float]:
    """Return the plan's seconds by phase."""
    return phase_seconds(prices_of(job.inputs.planned, NOMINAL_CPU, keep=0.8))


def ahead(job: Any) -> list[PlannedPhase]:
    return [*job_eta(job, NOMINAL_CPU).planned]


def names(phases: list[PlannedPhase]) -> list[str]:
    return [each.phase for each in phases]


def of(job: Any, name: str) -> PlannedPhase:
    (found,) = (each for each in ahead(job) if each.phase == name)
    return found


def commit(job: Any, key_of: Any, layers: Any, entry: Any) -> None:
    for layer in layers:
        job.ledger.commit(key_of(layer), entry)


def test_a_new_job_that_solves_in_its_pass() -> None:
    """Four of six layers are solved after the pass: those of two workers, and two more."""
    job, plan = job_of(UNIFORM), plan_of(job_of(UNIFORM))
    phases = ahead(job)
    assert names(phases) == [
        "start", "score texts", "statistics", "compress", "score held-out-dense", "score held-out", "assemble",
    ]  # fmt: skip
    seconds = {each.phase: each.seconds for each in phases}
    assert seconds["start"] == START_SECONDS
    assert seconds["score texts"] > 0.0
    assert seconds["compress"] == pytest.approx(plan["solve"] * 4 / 6)
    assert seconds["statistics"] == pytest.approx(plan["statistics"] + plan["solve"] * 2 / 6)
    assert seconds["score held-out"] == seconds["score held-out-dense"] == plan["held-out"] / 2
    assert seconds["assemble"] == plan["assemble"]
    assert job_eta(job, NOMINAL_CPU).layers == LAYERS


@pytest.mark.parametrize("done", [1, 3, 5])
def test_committed_layers_of_the_pass_are_left_out(done: int) -> None:
    job = job_of(RANKED)
    whole = of(job, "statistics")
    assert whole == ("statistics", plan_of(job)["statistics"], "", LAYERS)
    commit(job, dense_key, range(done), DENSE)
    left = of(job, "statistics")
    assert left.layers == LAYERS - done
    assert left.seconds == pytest.approx(whole.seconds * (LAYERS - done) / LAYERS)
    commit(job, dense_key, range(LAYERS), DENSE)
    assert "statistics" not in names(ahead(job))


def test_solves_are_counted_by_their_layers_once_the_pass_is_over() -> None:
    job = job_of(UNIFORM)
    solving = plan_of(job)["solve"]
    commit(job, layer_key, range(2), LAYER)
    assert of(job, "compress") == ("compress", pytest.approx(solving * 4 / 6), "", None)
    commit(job, dense_key, range(LAYERS), DENSE)
    assert of(job, "compress") == ("compress", pytest.approx(solving * 4 / 6), "", 4)
    commit(job, layer_key, range(5), LAYER)
    assert of(job, "compress") == ("compress", pytest.approx(solving / 6), "", 1)
    commit(job, layer_key, range(LAYERS), LAYER)
    assert names(ahead(job)) == ["start", "score texts", "score held-out-dense", "score held-out", "assemble"]


def test_a_walk_behind_compressed_layers_is_one_phase() -> None:
    job = job_of(RANKED, calibration=COMPRESSED)
    plan = plan_of(job)
    assert names(ahead(job))[2:4] == ["importance", "walk"]
    assert of(job, "importance").seconds == plan["importance"]
    whole = sum(plan[name] for name in ("statistics", "reduce", "solve", "propagate"))
    assert of(job, "walk").seconds == pytest.approx(whole)
    commit(job, layer_key, range(3), LAYER)
    assert of(job, "walk") == ("walk", pytest.approx(whole / 2), "", 3)
    uniform = job_of(UNIFORM, calibration=COMPRESSED)
    assert names(ahead(uniform))[2] == "walk", "importance is not measured"


def test_codes_are_part_of_the_solves() -> None:
    entry, rounding = {**RANKED, "attention": False}, {"bits": 4, "feedback": False}
    job = job_of(entry, quantize=rounding)
    plan = plan_of(job)
    assert plan["round"] > 0.0
    assert of(job, "compress").seconds == pytest.approx(plan["solve"] + plan["round"])
    walk = job_of(entry, quantize=rounding, calibration=COMPRESSED)
    plan = plan_of(walk)
    whole = sum(plan[name] for name in ("statistics", "reduce", "solve", "round", "propagate"))
    assert of(walk, "walk").seconds == pytest.approx(whole)


def test_the_backward_pass_ends_at_the_first_layer_that_asks() -> None:
    """Layers 2 to 5 are passed; curves are those of the two claimed layers."""
    job, plan = job_of(BY_LOSS), plan_of(job_of(BY_LOSS))
    assert names(ahead(job))[2:6] == ["statistics", "gradient", "curves", "compress"]
    assert of(job, "gradient") == ("gradient", plan["gradient"], "", 4)
    assert of(job, "curves") == ("curves", plan["curves"], "", 2)
    commit(job, gradient_key, [5, 4, 3], GradientEntry(statistics={}))
    commit(job, curves_key, [4], CurvesEntry(curves={}))
    assert of(job, "gradient") == ("gradient", pytest.approx(plan["gradient"] / 4), "", 1)
    assert of(job, "curves") == ("curves", pytest.approx(plan["curves"] / 2), "", 1)
    commit(job, curves_key, [2], CurvesEntry(curves={}))
    assert "curves" not in names(ahead(job))


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        ({"method": "loss_aware", "correct": "output"}, ("solve", "correct")),
        ({**UNIFORM, "refine": True}, ("solve", "refine")),
    ],
)
def test_corrections_and_training_are_a_phase_of_their_own(entry: dict[str, Any], parts: tuple[str, ...]) -> None:
    job = job_of(entry)
    plan = plan_of(job)
    assert all(plan[part] > 0.0 for part in parts)
    found = of(job, "correct")
    assert found == ("correct", pytest.approx(sum(plan[part] for part in parts)), "", LAYERS)
    assert "compress" not in names(ahead(job))


@pytest.mark.parametrize(("tried", "more"), [(0, 4), (1, 3), (3, 1), (4, 1), (9, 1)])
def test_a_search_for_a_size_solves_and_scores_about_four(tried: int, more: int) -> None:
    """The dense model is scored once; layers of the size that is being tried may be committed."""
    job = job_of({"method": "flat_llm", "allocation": "loss"}, budget={"max_loss": 0.1})
    for size in range(tried):
        job.ledger.commit(try_key(500 + size), TRY)
    commit(job, layer_key, range(4), LAYER)
    phases = ahead(job)
    assert names(phases).count("compress") == more
    assert names(phases).count("score held-out") == more
    assert names(phases).count("score held-out-dense") == 1
    first, *others = (each for each in phases if each.phase == "compress")
    assert first.layers == 2
    assert [each.seconds for each in others] == [pytest.approx(3 * first.seconds)] * (more - 1)


@pytest.mark.parametrize("tried", [0, 1, OTHER_SIZES, OTHER_SIZES + 2])
def test_calibrated_predictions_solve_other_sizes(tried: int) -> None:
    evaluation = {"calibrate_prediction": True}
    job = job_of({"method": "flat_llm", "allocation": "loss"}, evaluation=evaluation)
    for size in range(tried):
        job.ledger.commit(try_key(500 + size), TRY)
    assert names(ahead(job)).count("compress") == 1 + max(0, OTHER_SIZES - tried)


@pytest.mark.parametrize(("entry", "second"), [({}, "compress"), ({"correct": "output"}, "correct")])
def test_measured_layers_stand_between_two_solves(entry: dict[str, Any], second: str) -> None:
    """The first solve has no corrections."""
    job = job_of({"method": "loss_aware", **entry}, budget={"keep": 0.8, "measure_layers": True})
    job.ledger.commit(HELD_OUT, HeldOutEntry(tokens=RECORD, outputs=(RECORD,)))
    phases = names(ahead(job))
    parts = [f"score block-{layer:05d}" for layer in range(LAYERS)]
    expected = ["compress", "score held-out", *parts, second, "score held-out"]
    assert phases[phases.index("compress") : phases.index("assemble")] == expected
    commit(job, block_key, [0, 3], BLOCK)
    assert [name for name in names(ahead(job)) if name in parts] == [*parts[1:3], *parts[4:]]
    job.ledger.commit(LOSS_RATIOS, LossRatiosEntry(ratios={}))
    assert [name for name in names(ahead(job)) if name in ("compress", "correct")] == [second]
    assert not set(parts) & set(names(ahead(job)))


def test_scores_on_held_out_text() -> None:
    """The dense model's outputs are stored once; a score that is entered is not planned."""
    job = job_of(RANKED)
    job.ledger.commit(HELD_OUT, HeldOutEntry(tokens=RECORD))
    assert "score held-out-dense" in names(ahead(job))
    job.ledger.commit(HELD_OUT, HeldOutEntry(tokens=RECORD, outputs=(RECORD,)))
    assert names(ahead(job))[-2:] == ["score held-out", "assemble"]
    assert "score held-out-dense" not in names(ahead(job))
    job.ledger.commit(HELD_OUT_SCORE, SCORE)
    assert not [name for name in names(ahead(job)) if name.startswith("score held-out")]
    assert not [name for name in names(ahead(job_of(RANKED, held_out=False))) if name.startswith("score held-out")]


def test_where_experts_are_streamed_held_out_text_passes_the_dense_model_with_the_texts() -> None:
    """Once they are scored, its outputs are stored; if they are lost, it passes alone."""
    entry = {**UNIFORM, "attention": False}
    job = job_of(entry, "mixtral", workers={"max": 2, "experts": 2})
    plan = plan_of(job)
    assert names(ahead(job))[-2:] == ["score held-out", "assemble"]
    assert of(job, "score held-out").seconds == plan["held-out"]
    assert "score held-out-dense" not in names(ahead(job))
    job.ledger.commit(TEXTS, TEXT)
    assert "score held-out-dense" in names(ahead(job))
    job.ledger.commit(HELD_OUT, HeldOutEntry(tokens=RECORD, outputs=(RECORD,)))
    assert "score held-out-dense" not in names(ahead(job))


def test_texts_are_scored_once() -> None:
    job = job_of(RANKED)
    assert names(ahead(job))[1] == "score texts"
    job.ledger.commit(TEXTS, TEXT)
    assert "score texts" not in names(ahead(job))
    job.tokens = None
    assert "score texts" not in names(ahead(job))


@pytest.mark.parametrize("dense", [False, True])
def test_each_evaluated_model_starts_workers(dense: bool) -> None:
    """Until the dense model's score on this text is entered, for this job or another with the run directory."""
    perplexity = {"perplexity": {"text": {"files": ["t"]}, "window": 16, "dense": dense}}
    job = job_of(RANKED, evaluated=True, evaluation=perplexity)
    flops = 4 * 16 * scoring_flops(job.inputs.geometry, 16)
    each = [("start", WORKERS_SECONDS), ("evaluate", flops / NOMINAL_CPU.single / 2)]
    last = [(phase.phase, phase.seconds) for phase in ahead(job)[-4:]]
    assert last[2:] == each
    assert (last == 2 * each) == dense
    (key,) = dense_score_key(job)
    score = ScoreEntry(model="dense", seal=SHA, perplexity=2.0, tokens=9, window=16)
    job.ledger.commit(key, score)
    assert names(ahead(job))[-3:] == ["assemble", "start", "evaluate"]
    job.evaluation = None
    assert names(ahead(job))[-1] == "assemble"


def test_a_job_without_statistics_passes_no_text() -> None:
    job = job_of({"method": "svd", "keep": 0.8}, budget=None)
    job.tokens = job.held_out = None
    assert names(ahead(job)) == ["start", "compress", "assemble"]


def test_a_healing_passes_the_teacher_trains_and_scores_again() -> None:
    """As many tokens as were read, whatever the manifest says; nothing of it once it is entered."""
    job, more = job_of(RANKED, heal={}), job_of(RANKED, heal={}, calibration={"samples": 32})
    assert names(ahead(job))[-5:] == ["score held-out", "score teacher", "heal", "score held-out", "assemble"]
    assert names(ahead(job_of(RANKED, heal={}, held_out=False)))[-3:] == ["score teacher", "heal", "assemble"]
    more.tokens = torch.zeros(32, 32, dtype=torch.int64)
    assert of(more, "heal").seconds > of(job, "heal").seconds > WORKERS_SECONDS
    job.ledger.commit(TEACHER, TeacherEntry(of=SHA, tokens=RECORD, rows=(RECORD,), outputs=(RECORD,)))
    assert names(ahead(job))[-4:] == ["score held-out", "heal", "score held-out", "assemble"]
    job.ledger.commit(HEALED, HealedEntry(of=SHA, base=(), layers={}, trained=(), figures={}))
    assert names(ahead(job))[-2:] == ["score held-out", "assemble"]
    assert "heal" not in names(ahead(job))
