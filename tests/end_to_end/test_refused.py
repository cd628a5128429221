"""Refusals: hostile checkpoints and entries, places in use, machines that are too small; nothing is undone by them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from safetensors.torch import load_file, save_file

import pipeline.job.context
import pipeline.job.sizing
import pipeline.job.stages
import workers.pools
from manifests.errors import InputError, Interrupted, WorkerError
from pipeline.checkpoint.compression_record import encode_json, sealed
from stores.disk import Disk
from tests.end_to_end.jobs import Job, MakeJob, Sweep, command, edit_json, file_digests
from tools.soak.stored_cases import sign

pytestmark = pytest.mark.usefixtures("inline")

LAYERS = 3  # of the fixture `llama`


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


@pytest.fixture
def output_copy(finished_once: Job, tmp_path: Path) -> Path:
    """A copy of OUTPUT, to be damaged."""
    return Path(shutil.copytree(finished_once.output, tmp_path / "output"))


def test_compression_json_that_lies(output_copy: Path) -> None:
    """Edited, and with a digest of its own that fits the edit."""
    path = output_copy / "compression.json"
    lies = {"shards": {"../x.safetensors": {"size": 1, "sha256": ""}}, "tensors": {"a": {}}}
    path.write_bytes(encode_json(sealed(json.loads(path.read_text()) | lies)))
    ended = command("verify", str(output_copy))
    assert (ended.code, "tensors.a.dtype: Field required" in ended.out) == (1, True), ended.out
    edit_json(path, version=2)
    ended = command("verify", str(output_copy))
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
def test_config_of_a_checkpoint(fields: dict[str, Any], words: list[str], output_copy: Path, text: Path) -> None:
    edit_json(output_copy / "config.json", **fields)
    ended = command("evaluate", str(output_copy), "--text", str(text), "--window", "16")
    assert ended.code == 2, ended.err
    assert [word for word in words if word not in ended.err] == [], ended.err
    verified = command("verify", str(output_copy))
    assert (verified.code, "internal error" in verified.err) == (1, False), verified.err


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
    """Its digest is right, and it is retracted all the same. The job ends with the same bytes."""
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


Fault: TypeAlias = Callable[[Job, pytest.MonkeyPatch], None]


def refuse_to_connect(_: Job, patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise InputError("workers.gpus: 1 for each of 1 workers, but this machine has 0 GPUs")

    patch.setattr(pipeline.job.stages, "check_device", refuse)


def refuse_workers(error: Exception) -> Fault:
    def make(_: Job, patch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any) -> None:
            raise error

        patch.setattr(workers.pools, "_pool_class", lambda _: refuse)

    return make


def in_the_way(made: Job, _: pytest.MonkeyPatch) -> None:
    made.output.mkdir()
    (made.output / "notes.txt").write_text("of somebody")


def full_disk(name: str) -> Fault:
    def fill(made: Job, patch: pytest.MonkeyPatch) -> None:
        there = made.output if name == "output" else made.run_dir
        free = Disk.free_bytes
        patch.setattr(Disk, "free_bytes", lambda disk: 9 if disk.folder == str(there) else free(disk))

    return fill


def unreadable_numbers(name: str) -> Fault:
    def spoil(made: Job, _: pytest.MonkeyPatch) -> None:
        for path in made.source.glob("*.safetensors"):
            tensors = load_file(path)
            if name in tensors:
                tensors[name].view(-1)[0] = float("nan")
                save_file(tensors, path, {"format": "pt"})

    return spoil


def no_text(made: Job, _: pytest.MonkeyPatch) -> None:
    made.text.unlink()


REFUSALS: dict[str, tuple[Fault, str]] = {
    "no GPU": (refuse_to_connect, "this machine has 0 GPUs"),
    "no place for workers": (refuse_workers(WorkerError("a worker asks for 64 CPUs")), "64 CPUs"),
    "workers of another kind": (refuse_workers(InputError("the node has torch 2.9.1")), "torch 2.9.1"),
    "files in the output": (in_the_way, "files that Lamina did not write"),
    "a full disk for the output": (full_disk("output"), "free some room there, or set output to a larger disk"),
    "a full disk for the run directory": (full_disk("run_dir"), "free some room, or set run_dir to a larger disk"),
    "no text": (no_text, "missing"),
    "NaN outside the layers": (unreadable_numbers("model.norm.weight"), "model.norm.weight holds NaN"),
    "NaN in the first layer": (unreadable_numbers("model.layers.0.mlp.up_proj.weight"), "NaN"),
}


@pytest.fixture
def own_inputs(tmp_path: Path, job: MakeJob, llama: Path, text: Path) -> Callable[..., Job]:
    """A job whose model and text are its own."""

    def make(**changes: Any) -> Job:
        made = job(Path(shutil.copytree(llama, tmp_path / "model")), **changes)
        made.text = Path(shutil.copy(text, tmp_path / "text.txt"))
        return made.write()

    return make


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", REFUSALS)
def test_the_corrected_manifest_is_taken(
    case: str, own_inputs: MakeJob, llama: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Corrected are the fault and, as if it were its cause, a field that decides bytes: the seed, the worker's threads
    and the budget."""
    fault, said = REFUSALS[case]
    made = own_inputs()
    with monkeypatch.context() as patch:
        fault(made, patch)
        ended = made.run()
    assert ended.code in (1, 2), ended
    assert said in ended.err
    assert "Traceback" not in ended.err
    shutil.rmtree(made.output, ignore_errors=True)
    shutil.copytree(llama, made.source, dirs_exist_ok=True)
    shutil.copy(text, made.text)
    corrected = ("--set", "seed=9", "--set", "workers.cpus=2", "--set", "budget.keep=0.8")
    with monkeypatch.context() as patch:
        if case != "workers of another kind":  # one that is gone through to its end
            patch.setattr(pipeline.job.sizing, "compress_to_budget", begin_work)
        ended = made.run(*corrected)
    assert ended.code == (0 if case == "workers of another kind" else 75), ended.err


def begin_work(*_: Any) -> None:
    raise Interrupted("work begins")


def test_a_refused_start_is_reported(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    made = job()
    with monkeypatch.context() as patch:
        refuse_to_connect(made, patch)
        assert made.run().code == 2
    assert not (made.run_dir / "fingerprint.json").exists()
    shown = command("status", str(made.run_dir))
    assert shown.code == 0
    assert "failed; run the same command again when the cause is fixed" in shown.out
    assert "exit code 2" in shown.out
    assert "this machine has 0 GPUs" in shown.out


@pytest.mark.parametrize("options", [("--fresh",), ("--set", "budget.keep=0.5"), ("--fresh", "--set", "seed=4")])
def test_a_refused_start_undoes_nothing(
    options: tuple[str, ...], job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused start keeps all work, also with `--fresh` or another size."""
    made = job(**{"calibration.propagate": "dense"})
    assert made.run().code == 0
    before, ledger = file_digests(made.output), sorted((made.run_dir / "ledger").iterdir())
    for fault in (refuse_to_connect, full_disk("output")):
        with monkeypatch.context() as patch:
            fault(made, patch)
            assert made.run(*options).code == 2
        assert sorted((made.run_dir / "ledger").iterdir()) == ledger
    assert file_digests(made.output) == before
    again = made.run()
    assert again.json["already_finished"]
    assert made.run(*options).code == 0
    assert file_digests(made.output) != before or options == ("--fresh",)


def test_a_sweep_s_refused_start(job: MakeJob, scored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = job()
    points = [{"methods": [{"method": "svd"}], "save": "all"}]
    path = Sweep(made, points, scored, keep=[0.8]).write()
    with monkeypatch.context() as patch:
        refuse_to_connect(made, patch)
        assert command("sweep", str(path)).code == 2
    done = command("sweep", str(path), "--json", "--set", "seed=9").json
    assert not done["missing"]
    with monkeypatch.context() as patch:
        refuse_to_connect(made, patch)
        assert command("sweep", str(path), "--fresh").code == 2
    again = command("sweep", str(path), "--json", "--set", "seed=9").json
    assert again["points"] == done["points"], "nothing was forgotten"
    assert "seed: 9 -> 3" in command("sweep", str(path)).err
