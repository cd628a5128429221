"""The texts of a job: how they are read and scored, and scores on text that is held out."""

from __future__ import annotations

import gzip
import json
import math
import shutil
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

import pipeline.evaluate
import workers.pools
from manifests.calibration import Text
from pipeline.driver.ledger_keys import HELD_OUT, HELD_OUT_SCORE, TEXTS
from stores.activations import ActivationStore
from stores.corpus import cut_windows, draw_samples, evaluation_windows, read_documents
from stores.ledger import Ledger
from stores.special_tokens import text_prefix
from tests import factories
from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import Ended, Job, MakeJob, command, file_digests
from tests.end_to_end.sources import make_source
from tests.failing_disk import flip
from workers.in_process_pool import InProcessPool

pytestmark = pytest.mark.usefixtures("inline")

TRAINED = {"model.accept_loss": False, "calibration.sequence_length": 128, "calibration.samples": 96}


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


def test_both_texts_pass_the_model_in_its_own_dtype(tmp_path: Path, job: MakeJob) -> None:
    """That is enough to judge a text, and twice as fast as float32. Held-out text is scored in float32."""
    source = make_source(tmp_path / "source", "llama", dtype=torch.bfloat16)
    ended = job(source).run()
    tokenizer, documents = AutoTokenizer.from_pretrained(source), read_documents(Text(files=(str(job(source).text),)))
    drawn = draw_samples([documents], tokenizer, 12, 2, 24, 3, text_prefix(tokenizer))
    exact = []
    for ids_BT in (drawn.samples, drawn.held_out):
        with torch.no_grad():
            logits_BTV = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()(ids_BT).logits
        exact.append(functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()).item())
    loss = ended.json["texts"]["calibration"]["loss"]
    assert loss != pytest.approx(exact[0], rel=1e-6)
    assert loss == pytest.approx(exact[0], rel=1e-2)
    assert ended.json["held_out"]["dense_perplexity"] == pytest.approx(math.exp(exact[1]), rel=1e-4)


def test_damaged_text_is_remarked_on_before_the_passes(tmp_path: Path, shared_dir: Path, job: MakeJob) -> None:
    """Stories without their line ends and spaces, on a model that was trained on whole ones. It is no warning."""
    stories = json.loads((shared_dir / "text" / "tinystories_1000_clean.json").read_text())
    whole, joined = tmp_path / "whole.txt", tmp_path / "joined.txt"
    whole.write_text("\n\n".join(stories[850:870]))
    joined.write_text("".join("".join(stories[:30]).split()))
    source = shared_dir / "models" / "babyllama-361"
    fields = {"evaluation": {"perplexity": {"text": {"files": [str(whole)]}, "window": 64}}, **TRAINED}
    made = job(source, **{"calibration.text": {"files": [str(joined)]}, **fields})
    ended = made.run()
    assert ended.code == 0, ended.err
    said = "of the common words of the evaluation text, such as 'the'"
    assert ended.err.count(said) == 1
    assert ended.err.index(said) < ended.err.index("phase importance")
    assert said in ended.json["texts"]["remark"]
    assert ended.json["warnings"] == []
    assert said in command("status", str(made.run_dir)).out
    assert command("report", str(made.run_dir)).code == 0
    assert "<p>remark: " in (made.run_dir / "report.html").read_text()
    alike = job(source, **{"calibration.text": {"files": [str(whole)]}, **fields})
    assert "remark" not in alike.run().json["texts"]


@pytest.mark.parametrize("kind", ["calibrated", "data-free", "sweep"])
def test_a_dense_loss_above_that_of_guessing_stops_before_anything_is_solved(kind: str, job: MakeJob) -> None:
    """The random model's loss is 1.10 ln(vocabulary). The same directory goes on when the manifest accepts it."""
    first = job()
    evaluation = {"perplexity": {"text": {"files": [str(first.text)]}, "window": 24, "dense": True}}
    places = {"output": str(first.output), "run_dir": str(first.run_dir)}
    changes: dict[str, Any] = {**places, "evaluation": evaluation, "calibration.propagate": "dense"}
    if kind == "data-free":
        changes |= {"calibration": None, "methods": [{"method": "svd"}]}
        del changes["calibration.propagate"]
    refusing, accepting = job(**changes, **{"model.accept_loss": False}), job(**changes)

    def run(made: Job) -> Ended:
        if kind != "sweep":
            return made.run()
        fields = {name: value for name, value in made.document().items() if name not in ("budget", "methods")}
        points = [{"keep": [0.8], "methods": [{"method": "svd"}]}]
        made.root.mkdir(exist_ok=True)
        made.manifest.write_text(json.dumps({**fields, "points": points}))
        return command("sweep", str(made.manifest))

    for _ in range(2):
        ended = run(refusing)
        assert ended.code == 2
        where = "the evaluation text" if kind == "data-free" else "the calibration samples"
        assert f"the dense model's loss on {where} is 6." in ended.err
        assert "if its weights are random, set model.accept_loss: true" in ended.err
    entered = {path.name.split(".")[0] for path in (first.run_dir / "ledger").iterdir()}
    assert entered & {"texts", "score"}
    assert not entered & {"dense", "curves", "ranks", "layer", "statistics"}
    assert not (first.output / "model.safetensors.index.json").exists()
    assert run(accepting).code == 0


@pytest.mark.parametrize("accepted", [False, True])
def test_evaluate_stops_for_such_a_loss(accepted: bool, llama: Path, text: Path) -> None:
    options = [str(llama), "--text", str(text), "--window", "24", "--in-process"]
    assert pipeline.evaluate.main([*options, *["--accept-loss"] * accepted]) == (0 if accepted else 2)


def test_rows_without_text_are_counted(tmp_path: Path, text: Path, job: MakeJob) -> None:
    """In the log and in the summary; the other rows give the tokens that they gave."""
    rows = [{"body": line} for line in text.read_text().splitlines()]
    files = [tmp_path / "whole.jsonl", tmp_path / "some.jsonl"]
    for path, more in zip(files, ([], [{"body": None}, {}]), strict=True):
        path.write_text("\n".join(map(json.dumps, [*rows[:40], *more, *rows[40:]])))
    whole, some = (job(**{"calibration.text": {"files": [str(path)], "field": "body"}}) for path in files)
    summary, ended = whole.run().json, some.run()
    assert summary["skipped_rows"] == {}
    assert ended.json["skipped_rows"] == {f"text file {files[1]}": 2}
    line = f"text file {files[1]}: 2 rows without text are left out"
    assert ended.err.count(line) == 1
    assert command("run", str(some.manifest)).out.count(line) == 1
    assert file_digests(whole.output) == file_digests(some.output)
    options = ["--text", str(files[1]), "--field", "body", "--window", "24"]
    scored = command("evaluate", str(whole.source), *options)
    assert scored.err.count(line) == 1
    assert command("evaluate", str(whole.source), *options, "--json").json["skipped_rows"] == {
        f"text file {files[1]}": 2
    }


def test_init_names_the_field_and_counts_rows_without_text(tmp_path: Path, text: Path, llama: Path) -> None:
    path, written = tmp_path / "rows.jsonl", tmp_path / "job.yaml"
    rows = [{"body": line} for line in text.read_text().splitlines()]
    path.write_text("\n".join(map(json.dumps, [{"body": None}, *rows])))
    options = [str(llama), "--text", str(path), "-o", str(written)]
    refused = command("init", *options)
    assert refused.code == 2
    assert "no field 'text'; none of its fields is text: 'body'" in refused.err
    ended = command("init", *options, "--field", "body")
    assert ended.code == 0, ended.err
    assert f"text file {path}: 1 rows without text are left out" in ended.out
    assert written.read_text().count(", field: body, ") == 2
    assert command("plan", str(written)).code == 0


TEMPLATE = "{% for message in messages %}{{ message.role + ' ' + message.content }}\n{% endfor %}{{ sign }}"


def test_conversations_from_the_file_to_the_summary(tmp_path: Path, text: Path, llama: Path) -> None:
    """`init`, the job and `evaluate` read the same tokens by the model's template; counts are in the summary."""
    source, written = tmp_path / "source", tmp_path / "job.yaml"
    shutil.copytree(llama, source)
    (source / "chat_template.jinja").write_text(TEMPLATE)
    lines = text.read_text().splitlines()
    talks: list[Any] = [
        [{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairwise(lines)
    ]
    talks[3] = [{"role": "user", "content": None}]
    path = tmp_path / "chat.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps({"talk": talk}) for talk in talks).encode()))
    raw = command("init", str(source), "--text", str(text), "-o", str(written))
    assert "plain, and the tokenizer has a chat template: give conversations (--messages) where it will chat" in raw.out
    options = ["--text", str(path), "--messages", "talk", "--template", "sign=yes"]
    ended = command("init", str(source), *options, "-o", str(written), "--force")
    assert "plain, and" not in ended.out
    assert written.read_text().count("messages: talk, template: {sign: true}") == 2
    overrides = ["model.accept_loss=true", "calibration.samples=8", "calibration.shards=2", "methods=[]", "budget=null"]
    sets = [word for override in (*overrides, "quantize={bits: 8, feedback: true}") for word in ("--set", override)]
    summary = command("run", str(written), "--in-process", "--set", "workers.max=1", *sets, "--json").json
    (reading,) = summary["texts_read"]["calibration"]["readings"]
    assert (reading["refused"], reading["conversations"], reading["empty"]) == (1, reading["documents"], 0)
    assert summary["texts_read"]["evaluation"]["tokens"] > 0
    tokenizer = AutoTokenizer.from_pretrained(source)
    documents = [*read_documents(Text(files=(str(path),), messages="talk", template={"sign": True}), tokenizer)]
    assert documents[0].endswith("True")
    ids = evaluation_windows(documents, tokenizer, 24, text_prefix(tokenizer))
    scored = command(
        "evaluate", str(source), *options, "--window", "24", "--in-process", "--accept-loss", "--json"
    ).json
    assert scored["windows"] == len(ids)
    assert scored["text_read"]["readings"][0]["refused"] == 1


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
