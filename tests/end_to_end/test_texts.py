"""The dense model's losses on the calibration samples and on the evaluation text."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from manifests.calibration import Text
from stores.corpus import cut_windows, draw_samples, evaluation_windows, read_documents
from stores.special_tokens import text_prefix
from tests import factories
from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import Job, command, file_digests

pytestmark = pytest.mark.usefixtures("inline")

MakeJob = Callable[..., Job]


@pytest.fixture
def job(job: MakeJob) -> MakeJob:
    """Make jobs of twelve samples, whose loss is near enough to the text's."""
    return lambda *source, **changes: job(*source, **{"calibration.samples": 12, **changes})


def test_both_texts_are_scored_in_windows_of_one_length(tmp_path: Path, llama: Path, job: MakeJob) -> None:
    """Against transformers. The evaluation's own windows are shorter, and are joined."""
    other = factories.write_text(tmp_path / "other.txt", 4_000, seed=9)
    evaluation = {"text": {"files": [str(other)]}, "window": 16}
    made = job(**{"evaluation": {"perplexity": evaluation}})
    ended = made.run()
    texts, tokenizer = ended.json["texts"], AutoTokenizer.from_pretrained(llama)
    prefix, documents = text_prefix(tokenizer), read_documents(Text(files=(str(made.text),)))
    assert len(prefix) == 1
    samples = draw_samples([documents], tokenizer, 12, 0, 24, 3, prefix).samples
    ids = evaluation_windows(read_documents(Text(files=(str(other),))), tokenizer, 16, prefix)[:, 1:].flatten()
    windows = {"calibration": samples, "evaluation": cut_windows(ids, 24, prefix)}
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    for kind, ids_BT in windows.items():
        with torch.no_grad():
            logits_BTV = model(ids_BT).logits
        expected = functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
        assert texts[kind]["loss"] == pytest.approx(expected.item(), rel=1e-5), kind
        assert texts[kind]["tokens"] == 23 * len(ids_BT)
    line = f"dense perplexity, in windows of 24 tokens behind token {prefix[0]}: calibration samples"
    assert line in ended.err
    assert line in command("run", str(made.manifest)).out
    assert command("report", str(made.run_dir)).code == 0
    assert "windows of 24 tokens" in (made.run_dir / "report.html").read_text()
    assert json.loads((made.run_dir / "ended.json").read_text())["texts"] == texts


def test_unlike_texts_are_warned_of_before_the_passes(tmp_path: Path, shared_dir: Path, job: MakeJob) -> None:
    """Stories without their line ends and spaces, on a model that was trained on whole ones."""
    stories = json.loads((shared_dir / "text" / "tinystories_1000_clean.json").read_text())
    whole, joined = tmp_path / "whole.txt", tmp_path / "joined.txt"
    whole.write_text("\n\n".join(stories[850:860]))
    joined.write_text("".join("".join(stories[:20]).split()))
    source = shared_dir / "models" / "babyllama-361"
    scored = {"evaluation": {"perplexity": {"text": {"files": [str(whole)]}, "window": 64}}}
    made = job(source, **{"calibration.text": {"files": [str(joined)]}, "calibration.sequence_length": 64, **scored})
    ended = made.run()
    said = "WARNING: the dense model's loss is"
    assert sum(said in warning for warning in ended.json["warnings"]) == 1
    assert ended.err.index(said) < ended.err.index("phase importance")
    assert said in command("status", str(made.run_dir)).out
    alike = job(source, **{"calibration.text": {"files": [str(whole)]}, "calibration.sequence_length": 64, **scored})
    assert not any(said in warning for warning in alike.run().json["warnings"])


def test_killed_while_texts_are_scored(job: MakeJob) -> None:
    """The losses are entered once. Another evaluation text is scored again, and the bytes do not depend on it."""
    made, clean = job(), job()
    expected = clean.run().json["texts"]
    child = Child("run", [str(made.manifest)], made.root / "log", Hook("commit", match="texts", after=False))
    assert child.end() == -signal.SIGKILL, child.said
    child = Child("run", [str(made.manifest)], made.root / "log", Hook("commit", match="texts", after=True))
    assert child.end() == -signal.SIGKILL, child.said
    evaluation = {"perplexity": {"text": {"files": [str(made.text)]}, "window": 24}}
    scored = job(**{"output": str(made.output), "run_dir": str(made.run_dir), "evaluation": evaluation})
    texts = scored.run().json["texts"]
    assert texts["calibration"] == expected["calibration"]
    assert ("evaluation" in expected, texts["evaluation"]["tokens"] > 0) == (False, True)
    assert file_digests(made.output) == file_digests(clean.output)


def test_data_free_jobs_score_no_texts(job: MakeJob) -> None:
    assert job(**{"calibration": None, "methods": [{"method": "svd"}]}).run().json["texts"] is None
