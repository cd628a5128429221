"""What a job says of calibration text that it was not calibrated on, and of calibration by several texts."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

import workers.pools
from manifests.calibration import Text
from pipeline.driver.ledger_keys import HELD_OUT, HELD_OUT_SCORE, TEXTS
from stores.activations import ActivationStore
from stores.corpus import draw_samples, read_documents
from stores.ledger import Ledger
from stores.special_tokens import text_prefix
from tests import factories
from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import Job, command, file_digests
from tests.end_to_end.sources import make_source
from tests.failing_disk import flip
from workers.in_process_pool import InProcessPool

pytestmark = pytest.mark.usefixtures("inline")

MakeJob = Callable[..., Job]


@pytest.fixture
def job(job: MakeJob) -> MakeJob:
    """Make jobs of twelve samples, which hold two windows out."""
    return lambda *source, **changes: job(*source, **{"calibration.samples": 12, **changes})


def test_summary_tells_what_is_lost_beyond_the_samples(llama: Path, job: MakeJob) -> None:
    """Against transformers on both checkpoints: twelve samples, two windows held out."""
    made = job()
    found = made.run().json["held_out"]
    documents = read_documents(Text(files=(str(made.text),)))
    tokenizer = AutoTokenizer.from_pretrained(llama)
    ids_BT = draw_samples([documents], tokenizer, 12, 2, 24, 3, text_prefix(tokenizer)).held_out
    log_p = []
    for model in (llama, made.output):
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()(ids_BT).logits
        log_p.append(logits[:, :-1].flatten(0, 1).double().log_softmax(-1))
    target_T = ids_BT[:, 1:].flatten()
    assert found["tokens"] == len(target_T) == 46
    divergence = functional.kl_div(log_p[1], log_p[0], reduction="batchmean", log_target=True)
    assert found["divergence"] == pytest.approx(divergence.item(), rel=1e-3)
    assert found["divergence"] > 0.01
    for name, table in zip(("dense_perplexity", "perplexity"), log_p, strict=True):
        assert found[name] == pytest.approx(functional.nll_loss(table, target_T).exp().item(), rel=1e-4)
    assert "held-out calibration text: perplexity" in command("run", str(made.manifest)).out


def test_one_pool_computes_and_scores(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []

    class Counted(InProcessPool):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.append(self)

    monkeypatch.setattr(workers.pools, "InProcessPool", Counted)
    made = job(**{"methods": [{"method": "loss_aware"}], "budget": {"max_loss": 0.2}, "calibration.propagate": "dense"})
    assert len(made.run().json["tries"]) > 1
    assert len(started) == 1


def test_text_passes_streamed_experts_once_with_both_texts(tmp_path: Path, job: MakeJob) -> None:
    """The dense model's outputs and all scores are those of a worker that holds all experts, in passes of their own."""
    source, entries, phases = make_source(tmp_path / "source", "qwen3_moe", layers=2), [], []
    for experts in (100, 2):
        settings = {"calibration.propagate": "dense", "workers.experts": experts, "calibration.shards": 2}
        made = job(source, methods=[{"method": "flat_llm", "attention": False}], **settings)
        assert made.run().code == 0
        units = next((made.run_dir / "logs").glob("*.units.jsonl")).read_text().splitlines()
        phases.append({json.loads(line)["unit"].split("/")[1] for line in units if "windowforward" in line})
        ledger = Ledger(made.run_dir / "ledger")
        outputs = ledger.get(HELD_OUT).outputs
        store = ActivationStore(made.run_dir / "activations.zarr")
        hidden = torch.cat([store.open(record).read(0, record.shape[0]) for record in outputs])
        entries.append((hidden, ledger.get(TEXTS), ledger.get(HELD_OUT_SCORE)))
    assert torch.equal(entries[0][0], entries[1][0])
    assert entries[0][1:] == entries[1][1:]
    assert phases == [{"texts", "held-out-dense", "held-out"}, {"texts", "held-out"}]


def test_killed_in_the_midst_of_scoring_it_goes_on_there(job: MakeJob) -> None:
    made, clean = job(), job()
    expected = clean.run().json["held_out"]
    for match in ("scored/held-out-dense/00002", "scored/held-out/00001"):
        child = Child("run", [str(made.manifest)], made.root / "log", Hook("commit", match=match, after=True))
        assert child.end() == -signal.SIGKILL, child.said
    ended = made.run()
    assert ended.json["held_out"] == expected
    last = max((made.run_dir / "logs").glob("*.units.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    units = [json.loads(line)["unit"] for line in last.read_text().splitlines()]
    scored = [unit for unit in units if unit.startswith(("windowforward", "score"))]
    assert scored[0] == "windowforward/held-out/1/0"
    assert scored[-1] == "score/held-out/1"
    assert file_digests(made.output) == file_digests(clean.output)
    assert Ledger(made.run_dir / "ledger").keys("scored/") == []


@pytest.mark.nightly
def test_damaged_outputs_of_the_dense_model_are_made_again(job: MakeJob) -> None:
    """And so are the tokens beside them."""
    made, clean = (job(**{"calibration.propagate": "dense"}) for _ in range(2))
    made.run()
    for folder in ("windows-held-out-dense", "tokens"):
        for chunk in (made.run_dir / "activations.zarr" / folder).rglob("c.0*"):
            flip(chunk)
        again = made.run("--set", f"budget.keep={(keep := 0.9 if folder == 'tokens' else 0.8)}")
        assert again.code == 0, again.err
        assert again.json["held_out"] == clean.run("--set", f"budget.keep={keep}").json["held_out"]
        assert "repairing" in again.err


@pytest.mark.nightly
def test_tokens_of_another_text_are_not_scored_again(job: MakeJob) -> None:
    """What was entered of other held-out tokens: the samples, and so the fingerprint, are the same."""
    made, clean = (job(**{"calibration.propagate": "dense"}) for _ in range(2))
    found = made.run().json["held_out"]
    ledger, store = Ledger(made.run_dir / "ledger"), ActivationStore(made.run_dir / "activations.zarr")
    entered = ledger.get(HELD_OUT)
    assert entered is not None
    tokens = store.open(entered.tokens).read(0, 2)
    others = store.write_tokens(tokens.flip(1).contiguous())
    ledger.commit(HELD_OUT, entered.model_copy(update={"tokens": others}))
    again = made.run("--set", "budget.keep=0.9", "--set", f"output={made.root / 'second'}").json["held_out"]
    expected = clean.run("--set", "budget.keep=0.9").json["held_out"]
    assert again == expected != found


def test_text_without_more_tokens_says_nothing(tmp_path: Path, llama: Path, job: MakeJob) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    text = factories.write_text(tmp_path / "long.txt", 20_000).read_text()
    while (
        len(tokenizer(text)["input_ids"]) >= 13 * 23
    ):  # with an id before it, in place of the one that ends a document
        text = text[: -max(1, len(text) // 50)]
    few = tmp_path / "few.txt"
    few.write_text(text)
    assert len(tokenizer(text)["input_ids"]) >= 12 * 23
    made = job(**{"calibration.text": {"files": [str(few)]}})
    assert made.run().json["held_out"] is None
    by_loss = {"methods": [{"method": "loss_aware"}], "budget": {"max_loss": 0.1}, "calibration.propagate": "dense"}
    refused = job(**{"calibration.text": {"files": [str(few)]}, **by_loss}).run()
    assert (refused.code, "beyond the samples, and there is none" in refused.err) == (2, True), refused.err


def test_two_texts_give_their_shares(tmp_path: Path, llama: Path, job: MakeJob) -> None:
    """Bytes are those of the samples, whichever files they came from."""
    other = factories.write_text(tmp_path / "other.txt", 20_000, seed=9)
    made = job()
    both = [{"files": [str(made.text)], "share": 0.75}, {"files": [str(other)], "share": 0.25}]
    mixed = job(**{"calibration.text": both})
    assert mixed.run().json["held_out"]["tokens"] == 2 * 23
    assert made.run().code == 0
    again = job(**{"calibration.text": both})
    assert again.run().code == 0
    assert file_digests(again.output) == file_digests(mixed.output) != file_digests(made.output)
