"""A checkpoint to a hub on loopback, by the real client, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from pipeline.checkpoint.publishing import _results
from tests.end_to_end.hub_server import COMMIT, HubServer, client_of
from tests.end_to_end.jobs import Ended, Job, MakeJob, command, load, logits_of, some_tokens, without_ray
from tests.end_to_end.sources import make_source

pytestmark = [
    pytest.mark.usefixtures("inline"),
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # of the hub's client to its own
]

TABLE = Path(__file__).resolve().parents[2] / "docs" / "running-jobs.md"
REPOSITORY = "someone/small-llama-07"
DONE, WRONG_INPUT, FAILED = 0, 2, 1


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    server = HubServer(REPOSITORY, {".gitattributes": b"*.safetensors filter=lfs\n"})
    with server, client_of(server, tmp_path / "cache"):
        yield server


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, llama: Path, text: Path, scored: Path) -> Job:
    """A finished job, its model in several files, with scores."""
    perplexity = {"text": {"files": [str(scored)]}, "window": 16, "dense": True}
    job = Job(tmp_path_factory.mktemp("pushed") / "job", llama, text, {"evaluation": {"perplexity": perplexity}})
    with without_ray():
        assert job.run().code == DONE
    job.keep()
    return job


@pytest.fixture
def made(finished: Job) -> Job:
    """It as it was, whatever tests have done to it."""
    return finished.put_back()


def push(made: Job, *options: str) -> Ended:
    """As the table of commands has it."""
    assert "| `python -m pipeline.push OUTPUT ORGANISATION/NAME` |" in TABLE.read_text()
    return command("push", str(made.output), REPOSITORY, *options)


def files_of(made: Job) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in made.output.iterdir()}


def test_all_of_it_arrives_in_one_commit_with_scores_on_the_card(hub: HubServer, made: Job) -> None:
    ended = push(made, "--json", "--run-dir", str(made.run_dir), "--base-model", "someone/small-llama")
    assert ended.code == DONE, ended.err
    assert ended.json["commit"].endswith(COMMIT)
    assert hub.commits == 1
    local, sent = files_of(made), dict(hub.files)
    card, own_card = sent.pop("README.md").decode(), local.pop("README.md").decode()
    del sent[".gitattributes"]
    record, own_record = (json.loads(files.pop("compression.json")) for files in (sent, local))
    assert sent == local
    assert record["files"].pop("README.md")["sha256"] == hashlib.sha256(card.encode()).hexdigest()
    del own_record["files"]["README.md"], record["sha256"], own_record["sha256"]
    assert record == own_record
    assert card.partition("---\n#")[2] == own_card.partition("---\n#")[2]
    data = ModelCard(card).data
    summary = command("status", str(made.run_dir), "--json").json["summary"]["evaluation"]
    assert (data.base_model, data.library_name) == ("someone/small-llama", "transformers")
    assert {"lamina", "compressed", "flat_llm"} == set(data.tags)
    numbers = made.compression()["counts"]["parameters"]
    assert data["lamina"] == {"methods": ["flat_llm"], "keep": round(numbers["compressed"] / numbers["dense"], 4)}
    assert {(found.metric_name, found.metric_value) for found in data.eval_results} == {
        ("perplexity", summary["perplexity"]["perplexity"]),
        ("perplexity, dense model", summary["dense"]["perplexity"]),
    }


def test_settings_of_tasks_are_in_the_names_of_their_scores() -> None:
    scored = {"arc": {"documents": 5, "metrics": {"acc": {"value": 0.5, "stderr": None}}}}
    evaluation = {"tasks": {"compressed": scored, "dense": scored}, "task_settings": {"limit": 5}}
    assert [name for _, _, name, _ in _results(evaluation, "")] == [
        "acc (the first 5 documents of each task)",
        "acc, dense model (the first 5 documents of each task)",
    ]


def test_what_arrives_is_a_whole_checkpoint(hub: HubServer, made: Job, tmp_path: Path) -> None:
    assert push(made, "--run-dir", str(made.run_dir)).code == DONE
    arrived = tmp_path / "arrived"
    arrived.mkdir()
    for name in hub.files.keys() - {".gitattributes"}:
        (arrived / name).write_bytes(hub.files[name])
    verified = command("verify", str(arrived), "--source", str(made.source))
    assert verified.code == DONE, verified.out + verified.err


@pytest.mark.usefixtures("small_steps")
def test_a_healed_checkpoint_arrives_with_its_own_scores(hub: HubServer, made: Job) -> None:
    def perplexity() -> float:
        summary = command("status", str(made.run_dir), "--json").json["summary"]
        return float(summary["evaluation"]["perplexity"]["perplexity"])

    before = perplexity()
    settings = ("--set", "heal.epochs=8", "--set", "heal.learning_rate=0.003")
    assert command("heal", str(made.run_dir), *settings).code == DONE
    assert push(made, "--run-dir", str(made.run_dir)).code == DONE
    card = hub.files["README.md"].decode()
    assert "Healed: trained as a whole against the dense model, 8 times on 192 tokens of\ntext.txt." in card
    scores = {found.metric_name: found.metric_value for found in ModelCard(card).data.eval_results or ()}
    assert scores["perplexity"] == perplexity() != before


@pytest.mark.sample(1)
@pytest.mark.parametrize("shapes", ["layer", "free", "stock"])
def test_a_mixture_arrives(shapes: str, hub: HubServer, job: MakeJob, tmp_path: Path) -> None:
    """With fewer experts, as the hub's copy loads and verifies, and with the engines of its shape on the card."""
    source = make_source(tmp_path / "source", "mixtral", layers=2)
    calibration = {"calibration.propagate": "dense"}
    budget = {"keep": 0.6, "scope": "experts"}
    made = job(source, methods=[{"method": "loss_aware", "shapes": shapes}], budget=budget, **calibration)
    assert made.run().code == DONE
    assert push(made, "--run-dir", str(made.run_dir)).code == DONE
    arrived = tmp_path / "arrived"
    arrived.mkdir()
    for name in hub.files.keys() - {".gitattributes"}:
        (arrived / name).write_bytes(hub.files[name])
    verified = command("verify", str(arrived), "--source", str(source), "--bound", "10")
    assert verified.code == DONE, verified.out + verified.err
    ids_BT = some_tokens(300)
    assert torch.equal(logits_of(load(arrived), ids_BT), logits_of(load(made.output), ids_BT))
    card = hub.files["README.md"].decode()
    assert {"lamina", "compressed", "loss_aware"} == set(ModelCard(card).data.tags)
    assert ("--to stock" in card) == (shapes == "stock")


def test_an_interrupted_push_goes_on_where_it_was(hub: HubServer, made: Job) -> None:
    weights = [name for name in files_of(made) if name.endswith(".safetensors")]
    assert len(weights) >= 3
    hub.full_after = 2
    ended = push(made)
    assert ended.code == WRONG_INPUT, ended.err
    assert "The same command resumes" in ended.err
    assert (hub.commits, set(hub.files)) == (0, {".gitattributes"}), "half a model is never seen"
    hub.full_after = None
    assert push(made).code == DONE
    assert len(hub.puts) == len(set(hub.puts)) == len(weights)
    before = list(hub.puts)
    assert push(made).code == DONE
    assert hub.puts == before


def test_a_push_whose_hub_goes_away_goes_on(hub: HubServer, made: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Amid the weights, before the commit, and after it was done and its answer lost: old files or new ones, never a
    mixture. (Every request takes a minute; these are the kinds of them.)"""
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    empty = dict(hub.files)
    assert push(made).code == DONE
    whole, count = dict(hub.files), hub.requests
    assert count > 8
    for gone_at, does_last in ((count // 2, False), (count - 1, False), (count - 1, True)):
        hub.files, hub.stored, hub.requests = dict(empty), {}, 0
        hub.gone_at, hub.does_last = gone_at, does_last
        ended = push(made)
        assert (ended.code, "The same command resumes" in ended.err) == (WRONG_INPUT, True), ended.err
        assert hub.files == (whole if does_last else empty)
        hub.gone_at = None
        assert push(made).code == DONE
        assert hub.files == whole


def test_an_earlier_checkpoint_is_replaced_and_weights_of_others_are_not(hub: HubServer, made: Job) -> None:
    template = "additional_chat_templates/of_another.jinja"
    old = {"shards": {"model-00009-of-00009.safetensors": {}}, "files": {template: {}}}
    hub.files |= {"compression.json": json.dumps(old).encode(), "notes.txt": b"mine", template: b"would be used"}
    hub.files |= {"model-00009-of-00009.safetensors": b"old", "adapter.bin": b"of somebody"}
    before = dict(hub.files)
    ended = push(made)
    assert ended.code == WRONG_INPUT
    assert "adapter.bin" in ended.err
    assert hub.files == before
    del hub.files["adapter.bin"]
    assert push(made).code == DONE
    assert set(hub.files) == {*files_of(made), "notes.txt", ".gitattributes"}


def test_what_is_wrong_is_said_before_anything_is_sent(hub: HubServer, made: Job, job: MakeJob) -> None:
    other = job(seed=4)
    assert other.run().code == DONE
    ended = push(made, "--run-dir", str(other.run_dir))
    assert (ended.code, "not the run directory of the job" in ended.err) == (WRONG_INPUT, True), ended.err
    (made.output / "config.json").write_text("{}")
    ended = push(made)
    assert (ended.code, "config.json" in ended.err) == (FAILED, True), ended.err
    ended = command("push", str(made.root), REPOSITORY)
    assert (ended.code, "is it a Lamina checkpoint?" in ended.err) == (WRONG_INPUT, True), ended.err
    hub.read_only = True
    ended = push(other)
    assert (ended.code, "may write" in ended.err) == (WRONG_INPUT, True), ended.err
    assert hub.puts == []


def test_weights_that_differ_from_their_digest_are_never_committed(hub: HubServer, made: Job) -> None:
    shard = next(path for path in made.output.iterdir() if path.suffix == ".safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    ended = push(made)
    assert (ended.code, f"{shard.name}: damaged" in ended.err) == (FAILED, True), ended.err
    assert hub.commits == 0
