"""What the fuzzer (`tools/soak/fuzz.py`) found: input that lies, entries that make no sense, files without end."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pipeline.checkpoint.compression_record import encode_json, sealed
from stores.source import INDEX_FILE
from tests.end_to_end.jobs import Job, command, file_digests
from tools.soak.stored_cases import sign

pytestmark = pytest.mark.usefixtures("inline")

LAYERS = 3  # of the fixture `llama`
MakeJob = Callable[..., Job]


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def refused(job: Job, *words: str) -> None:
    ended = job.run()
    assert ended.code == 2, ended.err
    assert [word for word in words if word not in ended.err] == [], ended.err
    assert not (job.output / INDEX_FILE).exists()


LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": "x", "long_factor": [1.0]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_parameters": LONG_ROPE}, ["config.json: rope_parameters.short_factor: 'x'"]),
        ({"tie_word_embeddings": "no"}, ["config.json", "tie_word_embeddings"]),
        ({"hidden_act": ["silu"]}, ["config.json", "hidden_act"]),
        ({"rms_norm_eps": float("nan")}, ["config.json", "NaN is not a JSON number"]),
    ],
)
def test_config(fields: dict[str, Any], words: list[str], model: Path, job: MakeJob) -> None:
    edit(model / "config.json", **fields)
    refused(job(model), *words)


def test_an_index_that_names_what_cannot_be_a_file(model: Path, job: MakeJob) -> None:
    index = json.loads((model / INDEX_FILE).read_text())
    index["weight_map"]["lm_head.weight"] = "x" * 300 + ".safetensors"
    (model / INDEX_FILE).write_text(json.dumps(index))
    refused(job(model), ".safetensors: missing, though the index names it")


def test_a_config_without_end(model: Path, job: MakeJob) -> None:
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    refused(job(model), "config.json: missing")
    (model / "config.json").unlink()
    with (model / "config.json").open("wb") as file:
        file.truncate(2**40)
    refused(job(model), "config.json", "bytes, more than")


def test_a_tokenizer_that_fails_on_text(model: Path, job: MakeJob) -> None:
    edit(model / "tokenizer_config.json", model_max_length="x")
    refused(job(model), "tokenizer: fails on the text")


def test_text(tmp_path: Path, job: MakeJob) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n{"text": "\\ud800"}\n')
    refused(job(**{"calibration.text": {"files": [str(rows)]}}), "rows.jsonl, line 2", "surrogate")
    table = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["word " * 9] * 900}), table, compression="snappy")
    content = table.read_bytes()
    table.write_bytes(content[:4] + bytes(60) + content[64:])
    refused(job(**{"calibration.text": {"files": [str(table)]}}), "rows.parquet: not Parquet, or damaged")


@pytest.mark.parametrize(
    ("options", "word"),
    [(("--gpus", "nan"), "gpus"), (("--gpus", "-1"), "gpus"), (("--cpus", "99999999999999999999"), "cpus")],
)
def test_options_of_evaluate(options: tuple[str, str], word: str, llama: Path, text: Path) -> None:
    ended = command("evaluate", str(llama), "--text", str(text), "--window", "16", *options)
    assert ended.code == 2
    assert "wrong input: --workers, --cpus, --gpus" in ended.err
    assert word in ended.err


def test_a_path_that_can_be_none() -> None:
    for arguments in (("status", "x" * 5000), ("verify", "x" * 5000), ("run", "x" * 5000)):
        ended = command(*arguments)
        assert (ended.code, "wrong input" in ended.err, "name too long" in ended.err) == (2, True, True), ended.err


# -- OUTPUT ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def output(finished_once: Job, tmp_path: Path) -> Path:
    """A copy of OUTPUT, to be damaged."""
    return Path(shutil.copytree(finished_once.output, tmp_path / "output"))


def test_compression_json_that_lies(output: Path) -> None:
    """Edited, and with a digest of its own that fits the edit."""
    path = output / "compression.json"
    lies = {"shards": {"../x.safetensors": {"size": 1, "sha256": ""}}, "tensors": {"a": {}}}
    path.write_bytes(encode_json(sealed(json.loads(path.read_text()) | lies)))
    ended = command("verify", str(output))
    assert (ended.code, "tensors.a.dtype: Field required" in ended.out) == (1, True), ended.out
    edit(path, version=2)
    ended = command("verify", str(output))
    assert (ended.code, "differs from its own sha256" in ended.out) == (1, True), ended.out


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"block": 0.5}, ["no layer can be built"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers"]),
        ({"dtype": 3}, ["dtype: 3"]),
        ({"forms": [{"q": {"form": "nothing"}}, {}, {}]}, ["no layer can be built"]),
        ({"vocab_size": 100}, ["config.json and weights do not fit together"]),
    ],
)
def test_config_of_a_checkpoint(fields: dict[str, Any], words: list[str], output: Path, text: Path) -> None:
    edit(output / "config.json", **fields)
    ended = command("evaluate", str(output), "--text", str(text), "--window", "16")
    assert ended.code == 2, ended.err
    assert [word for word in words if word not in ended.err] == [], ended.err
    verified = command("verify", str(output))
    assert (verified.code, "internal error" in verified.err) == (1, False), verified.err


# -- the ledger --------------------------------------------------------------------------------------------------------


LIES: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "forms of another shape": ("layer.00001", lambda record: record["forms"]["up"].update(rank=3)),
    "a form that there is not": ("layer.00002", lambda record: record["forms"].update(up={"form": "x"})),
    "a path that leads out": ("layer.00000", lambda record: record["staged"].update(path="../../source/x.safetensors")),
    "a tensor of another shape": (
        "layer.00001",
        lambda record: record["staged"]["tensors"]["model.layers.1.input_layernorm.weight"].update(shape=[3]),
    ),
    "a tensor with more to say": (
        "layer.00001",
        lambda record: record["staged"]["tensors"]["model.layers.1.input_layernorm.weight"].update(form="x"),
    ),
    "no cosine": ("dense.00001", lambda record: record.update(cosine=[[1.0, 0]] * 3)),
    "ranks of nobody": ("ranks", lambda record: record["ranks"].update(x={"v": 3})),
    "ranks of words": ("ranks", lambda record: record.update(importance={"zero": "much"})),
    "tokens nowhere": ("tokens", lambda record: record["tokens"].update(shape=[2**40, 2**40])),
    "tokens of more axes": ("tokens", lambda record: record["tokens"].update(shape=[4, 16, 1])),
    "a summary of nothing": ("complete", lambda record: record.update(summary={})),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("lie", LIES)
def test_an_entry_that_makes_no_sense_is_taken_back(lie: str, job: MakeJob) -> None:
    """Though its digest is right; the job ends with the bytes it had."""
    made = job()
    assert made.run().code == 0
    before = file_digests(made.output)
    key, change = LIES[lie]
    path = next((made.run_dir / "ledger").glob(f"{key}.0*.json"))
    entry = json.loads(path.read_text())
    del entry["sha256"]
    change(entry["record"])
    path.write_bytes(sign(entry))
    if key != "complete":
        next((made.run_dir / "ledger").glob("complete.0*.json")).unlink()
    ended = made.run()
    assert ended.code == 0, ended.err
    assert file_digests(made.output) == before


def test_an_entry_without_end(finished_once: Job, tmp_path: Path) -> None:
    """A pipe or a device in place of an entry is no entry, and nothing waits for it."""
    run_dir = Path(shutil.copytree(finished_once.run_dir, tmp_path / "run"))
    path = next((run_dir / "ledger").glob("complete.0*.json"))
    path.unlink()
    path.symlink_to("/dev/zero")
    ended = command("status", str(run_dir))
    assert (ended.code, "run: stopped" in ended.out) == (0, True), ended
