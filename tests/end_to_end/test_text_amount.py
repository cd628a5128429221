"""The amount of text that is enough, jobs with few tokens, and messages about the loss of a model."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from manifests.calibration import Text
from manifests.records import INFINITY
from pipeline.checkpoint.publishing import card_metadata
from pipeline.job.text_amount import enough, parts_of
from pipeline.kernels.held_out import held_out_error
from stores.corpus import draw_samples, read_documents
from stores.special_tokens import text_prefix
from tests import factories
from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import (
    Job,
    MakeJob,
    Sweep,
    command,
    file_digests,
    load,
    logits_of,
    read_tensors,
    relative_error,
    some_tokens,
    weight_digests,
)
from tests.end_to_end.sources import make_source
from tests.end_to_end.test_mixtures import DENSE, EXPERTS_ALONE, one_sided

pytestmark = pytest.mark.usefixtures("inline")

AUTO: dict[str, Any] = {"calibration.samples": "auto", "calibration.max_samples": 40, "calibration.propagate": "dense"}


def test_the_number_is_chosen_once_and_kept(job: MakeJob) -> None:
    made = job(**AUTO)
    planned = command("plan", str(made.manifest), "--tflops", "1")
    assert "the plan is for all 40; the job chooses a quarter, a half or all of them" in planned.out
    assert "amount of text" in planned.out
    summary = made.run().json
    entry = made.ledger("samples")
    assert entry["counts"] == [10, 20, 40]
    assert entry["samples"] == enough(entry["counts"], entry["errors"])
    assert all(error > 0 for error in entry["errors"])
    assert summary["samples"] == entry
    assert yaml.safe_load((made.run_dir / "manifest.yaml").read_text())["calibration"]["samples"] == entry["samples"]
    assert f"{entry['samples']} are chosen" in command("plan", str(made.manifest), "--tflops", "1").out
    line = f"calibration.samples: auto: {entry['samples']} of 40; twice as much text"
    assert line in command("run", str(made.manifest)).out
    assert command("report", str(made.run_dir)).code == 0
    assert f"{entry['samples']} of 40" in (made.run_dir / "report.html").read_text()
    again = made.run("--set", "budget.keep=0.6")  # the statistics of the chosen samples serve again
    assert "phase statistics" not in again.err
    assert made.ledger("samples") == entry


def test_errors_are_those_of_fits_in_the_first_layer(llama: Path, job: MakeJob) -> None:
    """Against transformers and the kernel, on samples that are drawn by themselves."""
    made = job(**AUTO)
    assert made.run().code == 0
    tokenizer = AutoTokenizer.from_pretrained(llama)
    documents = read_documents(Text(files=(str(made.text),)))
    samples = draw_samples([documents], tokenizer, 40, 0, 24, 3, text_prefix(tokenizer)).samples
    model, caught = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval(), []
    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0].double()))
    with torch.no_grad():
        model(samples)
    (values_BSF,) = caught

    def moment(chosen: list[int]) -> torch.Tensor:
        rows_TF = values_BSF[chosen].flatten(0, 1)
        return rows_TF.T @ rows_TF

    others = [sample for sample in range(40) if sample % 8]
    parts = ([each for each in others if each % 4 == 1], [each for each in others if each % 2], others)
    expected = [held_out_error(moment(part), moment([*range(0, 40, 8)])) for part in parts]
    assert made.ledger("samples")["errors"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("limit", [1e-6, 1e6])
def test_a_limit_of_the_time_leaves_at_least_a_quarter(limit: float, job: MakeJob) -> None:
    made, free = job(**AUTO, **{"calibration.max_minutes": limit}), job(**AUTO)
    assert made.run().code == free.run().code == 0
    assert made.ledger("samples")["samples"] == (10 if limit < 1 else free.ledger("samples")["samples"])


@pytest.mark.nightly
def test_killed_before_and_after_the_choice(job: MakeJob) -> None:
    made, clean = job(**AUTO), job(**AUTO)
    assert clean.run().code == 0
    for match, after in (("samples", False), ("samples", True), ("tokens", True), ("dense/00001", True)):
        child = Child("run", [str(made.manifest)], made.root / "log", Hook("commit", match=match, after=after))
        assert child.end() in (-signal.SIGKILL, 0), child.said
    assert made.run().code == 0
    assert made.ledger("samples") == clean.ledger("samples")
    assert weight_digests(made.output) == weight_digests(clean.output)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"calibration.max_samples": None}, "give max_samples"),
        (
            {"calibration.samples": 8, "calibration.max_samples": None, "calibration.max_minutes": 2.0},
            "limits samples: auto",
        ),
        ({"calibration.max_samples": 7}, "leaves 2 shards without a sample each"),
        ({"calibration.samples": 50}, "is more than max_samples: 40"),
    ],
)
def test_what_cannot_be_chosen_is_refused(changes: dict[str, Any], said: str, job: MakeJob) -> None:
    ended = job(**{**AUTO, **changes}).run()
    assert (ended.code, said in ended.err) == (2, True), ended.err


def test_the_fewest_samples_within_a_hundredth() -> None:
    counts = parts_of(64)
    assert counts == (16, 32, 64)
    assert enough(counts, (1.02, 1.005, 1.0)) == 32
    assert enough(counts, (1.005, 1.02, 1.0)) == 16
    assert enough(counts, (1.1, 1.05, 1.0)) == 64
    assert enough(counts, (0.0, 0.0, 0.0)) == 16


FEW = {**DENSE, "calibration.samples": 2, "calibration.sequence_length": 12, "calibration.micro_batch": 1}
WIDTH = 28  # more channels than the 24 tokens of FEW


def tokens_of_experts(made: Job, layer: int) -> dict[str, int]:
    """Return the tokens of the experts that not all tokens passed."""
    groups = made.ledger(f"layer/{layer:05d}")["groups"]
    return {name: report["tokens"] for name, report in groups.items() if "tokens" in report}


def forms_of(made: Job) -> list[dict[str, dict[str, Any]]]:
    forms: list[dict[str, dict[str, Any]]] = json.loads((made.output / "config.json").read_text())["forms"]
    return forms


@pytest.mark.parametrize("entry", [EXPERTS_ALONE, {"method": "flat_llm", "allocation": "loss"}])
def test_nothing_is_cut_at_a_keep_of_one(entry: dict[str, Any], tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", "qwen3_moe", layers=2, moe_intermediate_size=WIDTH)
    made = job(source, methods=[entry], **FEW, **{"budget.keep": 1.0})
    made.run().json  # noqa: B018 - asserts the exit code
    assert max(tokens_of_experts(made, 0).values()) < WIDTH
    cut = [form for forms in forms_of(made) for role, form in forms.items() if role.startswith("experts.")]
    assert all(form == {"form": "pruned", "rank": WIDTH} for form in cut)
    ids_BT = some_tokens(300)
    assert relative_error(logits_of(load(made.output), ids_BT), logits_of(load(source), ids_BT)) < 1e-5


def test_an_expert_that_no_token_passed_is_cut_little_at_nearly_the_full_size(tmp_path: Path, job: MakeJob) -> None:
    """Each token passes the same two of six experts."""
    source = one_sided(tmp_path / "source", moe_intermediate_size=WIDTH)
    made = job(source, methods=[EXPERTS_ALONE], **DENSE, **{"budget.keep": 0.99})
    made.run().json  # noqa: B018 - asserts the exit code
    before, after = read_tensors(source), read_tensors(made.output)
    for layer in range(2):
        unseen = tokens_of_experts(made, layer)
        assert [*unseen.values()] == [0] * 4
        for name in unseen:
            prefix = f"model.layers.{layer}.mlp.{name}."
            kept, dense = (
                sum(tensor.numel() for key, tensor in tensors.items() if key.startswith(prefix))
                for tensors in (after, before)
            )
            assert kept >= 0.97 * dense, (prefix, kept, dense)
    assert sum(tensor.numel() for tensor in after.values()) < sum(tensor.numel() for tensor in before.values())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("entry", "changes"),
    [
        (EXPERTS_ALONE, {}),
        ({"method": "flat_llm"}, {"calibration.propagate": "compressed"}),
        ({"method": "heapr", "refit": True}, {"statistics.keep": False}),
        ({"method": "svd_llm"}, {"statistics.keep": False}),
        (EXPERTS_ALONE, {"quantize": {"bits": "auto", "group": 32}, "budget": {"bytes": 0.7, "scope": "experts"}}),
    ],
)
def test_slices_of_experts_change_no_byte(
    entry: dict[str, Any], changes: dict[str, Any], tmp_path: Path, job: MakeJob
) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32} if "quantize" in changes else {}
    source = make_source(tmp_path / "source", "qwen3_moe", layers=2, **sizes)
    settings = {**FEW, **changes}
    whole, sliced = (job(source, methods=[entry], **settings, **{"workers.experts": n}) for n in (100, 2))
    whole.run().json  # noqa: B018 - asserts the exit code
    sliced.run().json  # noqa: B018
    assert file_digests(whole.output) == file_digests(sliced.output)


@pytest.mark.nightly
def test_a_run_directory_of_the_former_rule_is_refused_by_name(tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", "qwen3_moe", layers=2)
    made = job(source, methods=[EXPERTS_ALONE], **FEW)
    made.run().json  # noqa: B018 - asserts the exit code
    path = made.run_dir / "fingerprint.json"
    content = json.loads(path.read_text())
    del content["fields"]["experts_with_few_tokens"]
    from stores.run_directory import _digest

    path.write_text(json.dumps({**content, "sha256": _digest(content)}))
    ended = command("run", str(made.manifest))
    assert ended.code == 2
    assert "experts_with_few_tokens: (none) ->" in ended.err


def strict(text: str) -> Any:
    """JSON as its standard has it."""

    def refuse(name: str) -> None:
        pytest.fail(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def loud(tmp_path: Path) -> Path:
    """A model whose logits are so large that it loses thousands of nats per token."""
    source = factories.make_model(tmp_path / "source", tie_word_embeddings=False)
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float32) * 1e5
            save_file(tensors, path, {"format": "pt"})
    return source


def scored_on(text: Path) -> dict[str, Any]:
    return {"perplexity": {"text": {"files": [str(text)]}, "window": 16, "dense": True}}


def test_an_infinite_perplexity_is_said_with_its_loss(loud: Path, scored: Path, job: MakeJob) -> None:
    made = job(loud, evaluation=scored_on(scored))
    ended = made.run()
    assert ended.code == 0, ended.err
    summary = strict(ended.out)
    for found in (summary["held_out"], summary["evaluation"]["perplexity"], summary["evaluation"]["dense"]):
        assert found["perplexity"] == INFINITY
        assert found["loss"] > 709.8
        assert float(found["perplexity"]) == float("inf")
    assert summary["held_out"]["dense_perplexity"] == INFINITY
    assert "perplexity infinite (loss " in ended.err
    again = command("run", str(made.manifest))
    assert again.code == 0, again.err
    assert again.out.count("infinite (loss ") == 4
    assert "times" not in again.out
    for path in (made.run_dir / "ledger").glob("*.json"):
        strict(path.read_text())
    strict(command("status", str(made.run_dir), "--json").out)
    strict(command("report", str(made.run_dir), "--json").out)
    page = (made.run_dir / "report.html").read_text()
    assert "infinite" in page
    assert "Infinity" not in page
    strict((made.output / "compression.json").read_text())
    metadata = card_metadata(made.compression(), "user/name", None, summary["evaluation"], "text")
    results = metadata["model-index"][0]["results"]
    assert {metric["type"] for result in results for metric in result["metrics"]} == {"loss"}
    assert all(metric["value"] > 709.8 for result in results for metric in result["metrics"])


def test_evaluate_says_infinity(loud: Path, scored: Path) -> None:
    asked = ["evaluate", str(loud), "--text", str(scored), "--window", "16"]
    found = strict(command(*asked, "--json").out)
    assert (found["perplexity"], found["loss"] > 709.8) == (INFINITY, True)
    assert "perplexity infinite (loss " in command(*asked).out


def test_a_sweep_of_infinite_points(loud: Path, text: Path, scored: Path, tmp_path: Path) -> None:
    sweep = Sweep(Job(tmp_path, loud, text), [{"methods": [{"method": "svd"}]}], evaluation=scored_on(scored))
    ended = command("sweep", str(sweep.write()), "--plots", str(tmp_path))
    assert ended.code == 0, ended.err
    found = strict((tmp_path / "run" / "sweep.json").read_text())
    assert [row["perplexity"] for row in found["points"]] == [INFINITY, INFINITY]
    assert found["dense"]["perplexity"] == INFINITY
    rows = list(csv.DictReader((tmp_path / "run" / "sweep.csv").read_text().splitlines()))
    assert [float(row["perplexity"]) for row in rows] == [float("inf")] * 2
    assert "inf" in ended.out
    assert not list(tmp_path.glob("perplexity-*.svg"))  # no axis holds them
    assert list(tmp_path.glob("loss_over_dense-*.svg"))


def test_a_damaged_model_is_said_to_be_so(shared_dir: Path, job: MakeJob, scored: Path) -> None:
    """By the summary, `status`, the log and the report, where a person reads and in JSON; not of a sound one."""
    source = shared_dir / "models" / "babyllama-361"
    methods = [{"method": "asvd"}]
    damaged, sound = (job(source, methods=methods, budget={"keep": keep}) for keep in (0.05, 1.0))
    for made, expected in ((damaged, 1), (sound, 0)):
        summary = strict(made.run().out)
        assert len(summary["warnings"]) == expected
        if expected:
            rise = summary["held_out"]["loss"] - summary["held_out"]["dense_loss"]
            assert f"{rise:.3g} more than the dense model's" in summary["warnings"][0]
        said = "WARNING: the compressed model is badly damaged: its loss on held-out calibration text is"
        assert command("run", str(made.manifest)).out.count(said) == expected
        assert command("status", str(made.run_dir)).out.count(said) >= expected
        assert strict(command("status", str(made.run_dir), "--json").out)["warnings"] == summary["warnings"]
        log = "".join(path.read_text() for path in (made.run_dir / "logs").glob("*.log"))
        assert log.count(said.replace("WARNING: ", "WARNING ")) == expected
        assert command("report", str(made.run_dir)).code == 0
        assert ("<b>WARNING" in (made.run_dir / "report.html").read_text()) == bool(expected)


def test_a_damaged_point_of_a_sweep_is_named(shared_dir: Path, text: Path, tmp_path: Path) -> None:
    source = shared_dir / "models" / "babyllama-361"
    sweep = Sweep(Job(tmp_path, source, text), [{"methods": [{"method": "svd"}]}], keep=[1.0, 0.05])
    ended = command("sweep", str(sweep.write()))
    assert ended.code == 0, ended.err
    assert "WARNING: 1 of 2 points are badly damaged" in ended.out
    assert "dense model's: svd-0.05" in ended.out
    found = strict((tmp_path / "run" / "sweep.json").read_text())
    assert [row["damaged"] for row in found["points"]] == [False, True]
    assert "1 of 2 points are badly damaged" in (tmp_path / "run" / "sweep.html").read_text()
