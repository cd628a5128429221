"""`calibration.samples: auto`: chosen once, kept, planned; kills; the bytes of the chosen samples."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from manifests.calibration import Text
from pipeline.job.text_amount import enough, parts_of
from pipeline.kernels.held_out import held_out_error
from stores.corpus import draw_samples, read_documents
from stores.special_tokens import text_prefix
from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import Job, command, weight_digests

pytestmark = pytest.mark.usefixtures("inline")

MakeJob = Callable[..., Job]
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
