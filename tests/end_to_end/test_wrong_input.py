"""Wrong input ends in seconds with exit code 2, says what is wrong, and leaves no OUTPUT; Ray is not even started."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.end_to_end.jobs import FLAT_LLM, Ended, Job, MakeJob, command, edit_json, file_digests, read_tensors
from tests.end_to_end.sources import make_source

LAYERS = 3  # of the fixture `llama`
INDEX = "model.safetensors.index.json"
SECONDS = 10.0


def refused(job: Job, *words: str) -> str:
    """Runs and plans the job; the message of `run`."""
    planned = command("plan", str(job.write().manifest))
    started = time.monotonic()
    message = check(job.run(), job, *words)
    assert time.monotonic() - started < SECONDS
    assert planned.code in (0, 2)
    return message


def check(ended: Ended, job: Job, *words: str) -> str:
    assert ended.code == 2, ended
    assert ended.out == ""
    assert "wrong input: " in ended.err
    assert "Traceback" not in ended.err
    assert [word for word in words if word not in ended.err] == [], ended.err
    assert not job.output.exists()
    return ended.err


# -- the manifest ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_ray")
def test_every_fault_of_a_manifest_at_once(job: MakeJob) -> None:
    wrong = {
        "budgit": {"keep": 0.5},
        "budget.keep": 1.5,
        "seed": "zero",
        "calibration.samples": 0,
        "calibration.propagate": "sideways",
        "methods": [{"method": "flat_llm", "rigde": 2.0}],
        "workers.min": 3,
        "version": 2,
    }
    message = refused(
        job(**wrong), "budgit", "budget.keep", "1.5", "seed", "'zero'", "calibration.samples", "'sideways'"
    )
    assert all(word in message for word in ("rigde", "allowed here", "ridge", "version", "min: 3 is above max: 1"))


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version: [1", ["not YAML", "line"]),
        (b"- version", ["expected a mapping"]),
        (b"version: 1\nversion: 1\n", ["'version'", "twice"]),
        (b"\xff\xfe\x00", ["cannot be read"]),
        (b"", ["expected a mapping"]),
        (None, ["cannot be read", "No such file"]),
    ],
)
def test_no_manifest(content: bytes | None, words: list[str], job: MakeJob) -> None:
    made = job()
    made.manifest.unlink() if content is None else made.manifest.write_bytes(content)
    check(command("run", str(made.manifest)), made, str(made.manifest), *words)


@pytest.mark.usefixtures("no_ray")
def test_options(job: MakeJob) -> None:
    made = job()
    check(made.run("--set", "budget.keep"), made, "--set budget.keep", "FIELD=VALUE")
    check(made.run("--set", "methods.4.ridge=1"), made, "'4'")
    check(made.run("--set", "calibration=null"), made, "calibration: missing")
    check(made.run("--set", "budget=null"), made, "budget: missing")
    check(made.run("--set", "calibration.sequence_length=300"), made, "300", "max_position_embeddings 256")
    check(made.run("--set", "methods.0.layers=[7]"), made, "layers: [7]", "0 to 2")
    assert command("run").code == 2


@pytest.mark.usefixtures("no_ray")
def test_a_tensor_is_claimed_once(job: MakeJob) -> None:
    refused(job(methods=[FLAT_LLM, {**FLAT_LLM, "layers": [1]}]), "layer 1: v is claimed by", "methods.0", "methods.1")


# -- the model ---------------------------------------------------------------------------------------------------------


def edit_index(model: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((model / INDEX).read_text())
    change(index["weight_map"])
    (model / INDEX).write_text(json.dumps(index))


def edit_config(model: Path, **fields: Any) -> None:
    edit_json(model / "config.json", **fields)


def some_shard(model: Path) -> Path:
    return sorted(model.glob("*.safetensors"))[2]


def edit_tensor(model: Path, **fields: Any) -> None:
    """Changes what the header of a shard says of its first tensor."""
    content = some_shard(model).read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:end])
    next(entry for name, entry in header.items() if name != "__metadata__").update(fields)
    encoded = json.dumps(header).encode()
    some_shard(model).write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[end:])


def drop_tensor(model: Path) -> None:
    """A tensor that the family has is neither in the index nor in a file."""
    name = "model.layers.1.mlp.up_proj.weight"
    path = model / json.loads((model / INDEX).read_text())["weight_map"][name]
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors or {"unrelated": torch.zeros(1)}, path, {"format": "pt"})
    edit_index(model, lambda weights: weights.pop(name))


def hold_twice(model: Path) -> None:
    """Another shard holds a tensor, too; the index names the first."""
    first, second = sorted(model.glob("*.safetensors"))[:2]
    save_file(load_file(second) | {name: 2 * t for name, t in load_file(first).items()}, second, {"format": "pt"})


def as_pickle(model: Path) -> None:
    for path in (*model.glob("*.safetensors"), model / INDEX):
        path.unlink()
    torch.save({}, model / "pytorch_model.bin")


def config_as_pipe(model: Path) -> None:
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")


LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": "x", "long_factor": [1.0]}
WRONG_MODELS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "no directory": (shutil.rmtree, ["no such directory"]),
    "no index": (lambda model: (model / INDEX).unlink(), ["neither", INDEX]),
    "index is not JSON": (lambda model: (model / INDEX).write_text("{"), [INDEX, "not JSON"]),
    "shard missing": (lambda model: some_shard(model).unlink(), ["00003-of", "missing"]),
    "shard truncated": (lambda model: os.truncate(some_shard(model), 5000), ["00003-of", "truncated", "5000"]),
    "shard is text": (lambda model: some_shard(model).write_text("x" * 999), ["00003-of", "header"]),
    "header: wrong shape": (lambda model: edit_tensor(model, shape=[3, 5]), ["00003-of", "[3, 5]", "bytes"]),
    "header: wrong offsets": (
        lambda model: edit_tensor(model, data_offsets=[4, 1]),
        ["00003-of", "data_offsets [4, 1]"],
    ),
    "tensor missing": (drop_tensor, ["model.layers.1.mlp.up_proj.weight: missing"]),
    "tensors of other shapes": (
        lambda model: edit_config(model, intermediate_size=96),
        ["model.layers.2.mlp.down_proj.weight: shape [48, 80], expected [48, 96]", "model.layers.0.mlp.up_proj.weight"],
    ),
    "index names what the file has not": (
        lambda model: edit_index(model, lambda weights: weights.update({"more.weight": some_shard(model).name})),
        ["'more.weight' is in the index, not in the file"],
    ),
    "tensor in two files": (
        hold_twice,
        ["00002-of", "'model.embed_tokens.weight' is in model-00001-of", "write the model again"],
    ),
    "index leaves the directory": (
        lambda model: edit_index(
            model, lambda weights: weights.update({"lm_head.weight": "../model/model-00001.safetensors"})
        ),
        ["'lm_head.weight'", "not a safetensors file name in this directory"],
    ),
    "index is absolute": (
        lambda model: edit_index(model, lambda weights: weights.update({"lm_head.weight": str(some_shard(model))})),
        ["'lm_head.weight'", "not a safetensors file name in this directory"],
    ),
    "pickle": (as_pickle, ["pytorch_model.bin", "runs code", "safetensors"]),
    "unsupported family": (
        lambda model: edit_config(model, model_type="bert"),
        ["'bert' is not supported", "gptj", "llama", "mistral", "opt", "qwen2", "qwen3"],
    ),
    "no family": (lambda model: edit_config(model, model_type=None), ["None is not supported"]),
    "impossible config": (
        lambda model: edit_config(model, num_attention_heads=0),
        ["config.json", "num_attention_heads"],
    ),
    "no config": (lambda model: (model / "config.json").unlink(), ["config.json", "missing"]),
    "config: a factor of RoPE": (
        lambda model: edit_config(model, rope_parameters=LONG_ROPE),
        ["config.json: rope_parameters.short_factor: 'x'"],
    ),
    "config: a word for a bool": (
        lambda model: edit_config(model, tie_word_embeddings="no"),
        ["config.json", "tie_word_embeddings"],
    ),
    "config: a list for a word": (
        lambda model: edit_config(model, hidden_act=["silu"]),
        ["config.json", "hidden_act"],
    ),
    "config: NaN": (
        lambda model: edit_config(model, rms_norm_eps=float("nan")),
        ["config.json", "NaN is not a JSON number"],
    ),
    "config: a pipe": (config_as_pipe, ["config.json: missing"]),
    "config: without end": (
        lambda model: os.truncate(model / "config.json", 2**40),
        ["config.json", "bytes, more than"],
    ),
    "index names what cannot be a file": (
        lambda model: edit_index(model, lambda weights: weights.update({"lm_head.weight": f"{'x' * 300}.safetensors"})),
        [".safetensors: missing, though the index names it"],
    ),
    "no tokenizer": (lambda model: list(map(Path.unlink, model.glob("tokenizer*"))), ["no usable tokenizer"]),
    "config of a tokenizer that fails on text": (
        lambda model: edit_json(model / "tokenizer_config.json", model_max_length="x"),
        ["tokenizer: fails on the text"],
    ),
}


@pytest.mark.sample(8)
@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("case", WRONG_MODELS)
def test_model(case: str, model: Path, job: MakeJob) -> None:
    damage, words = WRONG_MODELS[case]
    damage(model)
    refused(job(model), str(model) if "famil" not in case and "config" not in case else "", *words)


@pytest.mark.usefixtures("no_ray")
def test_quantised_layers(model: Path, job: MakeJob) -> None:
    for path in model.glob("*.safetensors"):
        save_file(
            {n: t.to(torch.int8) if "layers" in n else t for n, t in load_file(path).items()}, path, {"format": "pt"}
        )
    refused(job(model), "I8", "not quantised")


# -- mixtures ----------------------------------------------------------------------------------------------------------


UP = "model.layers.3.mlp.experts.17.up_proj.weight"
ROUTER = "model.layers.0.mlp.gate.weight"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of 18 experts, of which a token passes two."""
    return make_source(tmp_path_factory.mktemp("mixture") / "source", "qwen3_moe", layers=4, num_experts=18)


def refused_by_both(made: Job, *words: str) -> None:
    """Check that `plan` and `run` refuse the job before any work, with these words."""
    for ended in (command("plan", str(made.write().manifest)), made.run()):
        check(ended, made, *words)
        assert not made.run_dir.exists()


def in_index(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    return lambda source: edit_index(source, change)


def in_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """Changes tensors and writes them as one shard."""

    def change_(source: Path) -> None:
        tensors = read_tensors(source)
        change(tensors)
        for path in [*source.glob("*.safetensors"), *source.glob("*.index.json")]:
            path.unlink()
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})

    return change_


def lose_expert(names: dict[str, Any]) -> None:
    for name in [name for name in names if ".3.mlp.experts.17." in name]:
        del names[name]


def shorten(name: str, by: int = 1) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:-by].clone()

    return change


def lengthen(tensors: dict[str, torch.Tensor]) -> None:
    tensors[ROUTER] = torch.cat((tensors[ROUTER], tensors[ROUTER][:1]))


WRONG_MIXTURES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "the index lacks an expert": (in_index(lose_expert), (f"{UP}: missing", "experts.17.gate_proj.weight: missing")),
    "an expert is missing": (in_tensors(lose_expert), (f"{UP}: missing",)),
    "an expert is narrower": (in_tensors(shorten(UP)), (f"{UP}: shape [23, 48], expected [24, 48]",)),
    "a router has too few rows": (in_tensors(shorten(ROUTER)), (f"{ROUTER}: shape [17, 48], expected [18, 48]",)),
    "a router has too many rows": (in_tensors(lengthen), (f"{ROUTER}: shape [19, 48], expected [18, 48]",)),
    "more are chosen than there are": (
        lambda source: edit_config(source, num_experts_per_tok=19),
        ("config.json", "layer 0 chooses 19 of 18 experts"),
    ),
    "none is chosen": (lambda source: edit_config(source, num_experts_per_tok=0), ("config.json", "0")),
    "another number of experts": (
        lambda source: edit_config(source, num_local_experts=20),
        ("experts.19.up_proj.weight: missing", f"{ROUTER}: shape [18, 48], expected [20, 48]"),
    ),
}


@pytest.mark.sample(2)
@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("case", WRONG_MIXTURES)
def test_a_damaged_mixture_is_refused(case: str, mixture: Path, tmp_path: Path, job: MakeJob) -> None:
    damage, words = WRONG_MIXTURES[case]
    source = shutil.copytree(mixture, tmp_path / "source")
    damage(source)
    refused_by_both(job(source), *words)


LEAST = "a router that chooses 8 experts leaves 8 of 18 or more"


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(
            (
                {"methods": [{"method": name}], "budget": {"keep": 0.43, "scope": "experts"}},
                ("budget.keep: 0.43", LEAST),
            )
            for name in ("reap", "frequency", "merge_experts")
        ),
        ({"methods": [{"method": "reap", "keep": 0.44}], "budget": None}, ("methods.0.keep: 0.44", LEAST)),
        (
            {
                "methods": [{"method": "loss_aware", "shapes": "layer"}],
                "budget": {"keep": 0.01, "scope": "experts", "multiple": 8},
            },
            ("budget.keep: 0.01", LEAST),
        ),
        (
            {"methods": [{"method": "loss_aware", "shapes": "stock"}], "budget": {"keep": 0.05, "scope": "experts"}},
            ("budget.keep: 0.05", LEAST),
        ),
    ],
    ids=lambda value: next(iter(value["methods"]))["method"] if isinstance(value, dict) else "",
)
def test_a_budget_of_fewer_experts_than_the_router_chooses_is_refused(
    changes: dict[str, Any], words: tuple[str, ...], mixture: Path, tmp_path: Path, job: MakeJob
) -> None:
    source = shutil.copytree(mixture, tmp_path / "source")
    edit_config(source, num_experts_per_tok=8)
    refused_by_both(job(source, **{"calibration.propagate": "dense"}, **changes), *words)


@pytest.mark.nightly
@pytest.mark.usefixtures("inline", "no_ray")
def test_the_least_budget_keeps_as_many_experts_as_the_router_chooses(
    mixture: Path, tmp_path: Path, job: MakeJob
) -> None:
    source = shutil.copytree(mixture, tmp_path / "source")
    edit_config(source, num_experts_per_tok=8)
    made = job(source, methods=[{"method": "reap"}], budget={"keep": 0.45, "scope": "experts"})
    assert command("plan", str(made.write().manifest)).code == 0
    assert made.run().code == 0
    forms = json.loads((made.output / "config.json").read_text())["forms"]
    assert [layer["router"]["rank"] for layer in forms] == [8, 8, 8, 8]
    assert {ranks["experts"] for ranks in made.ledger("ranks")["ranks"].values()} == {8}


# -- the text and the budget -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_ray")
def test_text(tmp_path: Path, job: MakeJob) -> None:
    def given(name: str, content: bytes, **fields: Any) -> Job:
        (tmp_path / name).write_bytes(content)
        return job(**{"calibration.text": {"files": [str(tmp_path / name)], **fields}})

    refused(given("empty.txt", b""), "empty.txt: empty")
    message = refused(
        given("short.txt", b"Anna had a red ball."),
        "8 samples of 24 need 184 besides the 1 that the tokenizer puts before each",
    )
    counted = int(message.partition(" tokens")[0].split()[-1])
    assert 3 < counted < 21
    refused(given("latin.txt", b"caf\xe9 " * 2000), "latin.txt: not UTF-8 at byte 3")
    refused(given("rows.jsonl", b'{"body": "x"}\n'), "rows.jsonl, line 1", "no field 'text'", "'body'")
    refused(given("rows.jsonl", b'{"body": "x"}\n', field="story"), "no field 'story'", "'body'")
    refused(given("torn.jsonl", b'{"text": "x"}\n{"text":'), "torn.jsonl", "line 2 is not JSON")
    refused(given("rows.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}\n'), "rows.jsonl, line 2", "surrogate")
    refused(given("table.csv", b"a,b"), "unknown kind '.csv'", ".parquet")
    refused(given("no.parquet", b"PAR1"), "no.parquet: not Parquet")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "t.parquet")
    refused(job(**{"calibration.text": {"files": [str(tmp_path / "t.parquet")]}}), "no field 'text'", "'body'")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["word " * 9] * 900}), tmp_path / "t.parquet")
    content = (tmp_path / "t.parquet").read_bytes()
    refused(given("rows.parquet", content[:4] + bytes(60) + content[64:]), "rows.parquet: not Parquet, or damaged")
    refused(job(**{"calibration.text": {"files": ["nowhere.txt"]}}), "nowhere.txt: missing")
    os.mkfifo(tmp_path / "pipe.txt")
    for name, said in ((tmp_path, "a directory; give files"), (tmp_path / "pipe.txt", "not a regular file")):
        refused(job(**{"calibration.text": {"files": [str(name)]}}), f"text file {name}: {said}")
    refused(job(**{"calibration.text": {"dataset": str(tmp_path / "nothing")}}), "cannot be loaded")


@pytest.mark.usefixtures("no_ray")
def test_tokenizer_of_another_model(model: Path, job: MakeJob) -> None:
    for path in model.glob("*.safetensors"):
        save_file({n: t[:100] if t.shape[0] == 320 else t for n, t in load_file(path).items()}, path, {"format": "pt"})
    edit_config(model, vocab_size=100)
    refused(job(model), "tokenizer: it finds in text file", "with id", "the model's vocabulary has 100")


@pytest.mark.usefixtures("no_ray")
def test_unreachable_budget_names_what_is_reachable(job: MakeJob) -> None:
    """No method claims half of the decoder. The range in the message is correct."""
    made = job(**{"budget.keep": 0.2, "methods": [{**FLAT_LLM, "mlp": False, "allocation": "uniform"}]})
    message = refused(made, "budget.keep: 0.2", "reachable is")
    low = float(message.partition("reachable is ")[2].split()[0])
    assert 0.5 < low < 1
    assert command("plan", str(made.manifest), "--set", f"budget.keep={low + 0.001}").code == 0
    assert command("plan", str(made.manifest), "--set", f"budget.keep={low - 0.002}").code == 2
    refused(job(**{"budget": {"keep": 0.1, "scope": "model"}}), "budget.keep: 0.1", "reachable is")


# -- the places --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_ray")
def test_places(tmp_path: Path, model: Path, job: MakeJob) -> None:
    before = file_digests(model)
    made = job(model)
    inside = {"output": model / "out", "run_dir": model / "run"}
    for name, place in inside.items():
        check(made.run("--set", f"{name}={place}"), made, f"{name}: {place}", "Lamina never writes into the source")
    check(made.run("--set", f"output={model}"), made, "Lamina never writes into the source")
    check(made.run("--set", f"run_dir={made.output / 'run'}"), made, "must not hold run_dir")
    for folder in ("staged", "statistics.zarr/out"):
        check(made.run("--set", f"output={made.run_dir / folder}"), made, folder, "keeps its own files")
    (tmp_path / "link").symlink_to(model)
    check(made.run("--set", f"output={tmp_path / 'link' / 'out'}"), made, "Lamina never writes into the source")
    (tmp_path / "file").write_text("")
    for name in inside:
        check(made.run("--set", f"{name}={tmp_path / 'file'}"), made, f"{name}: ", "no directory")
    check(made.run("--set", f"run_dir={tmp_path / 'file' / 'run'}"), made, "run_dir", "in the way")
    assert file_digests(model) == before


@pytest.mark.usefixtures("no_ray")
def test_output_of_another_job(job: MakeJob, llama: Path) -> None:
    """It is not overwritten."""
    made = job()
    shutil.copytree(llama, made.output)
    before = file_digests(made.output)
    ended = made.run()
    assert (ended.code, f"{made.output} holds files that Lamina did not write" in ended.err) == (2, True), ended.err
    assert file_digests(made.output) == before


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("place", ["run_dir", "output"])
def test_not_writable(place: str, tmp_path: Path, job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    if os.geteuid() == 0:  # root may write anywhere: the kernel's refusal is played
        refuse_writes_below(locked, monkeypatch)
    else:
        locked.chmod(0o500)
    made = job()
    ended = made.run("--set", f"{place}={locked / 'here'}")
    check(ended, made, str(locked), "Permission denied", "change the permissions")
    assert list(locked.iterdir()) == []


def refuse_writes_below(locked: Path, monkeypatch: pytest.MonkeyPatch, writable: Path | None = None) -> None:
    """Plays a folder without the right to write, apart from one `writable` below it."""
    original_mkdir, original_open = os.mkdir, os.open

    def refuse(path: Any) -> None:
        within = Path(os.path.abspath(path))
        if within.is_relative_to(locked) and not (writable and within.is_relative_to(writable)):
            raise PermissionError(13, "Permission denied", str(path))

    def mkdir(path: Any, *arguments: Any, **options: Any) -> None:
        refuse(Path(path).parent)
        original_mkdir(path, *arguments, **options)

    def open_(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            refuse(path)
        return original_open(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(os, "open", open_)


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("place", ["run_dir", "output"])
def test_full_disk(place: str, tmp_path: Path, job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    made = job()
    target = made.run_dir if place == "run_dir" else made.output
    original = shutil.disk_usage

    def nearly_full(path: Any) -> Any:
        roomy = place == "output" and str(path).startswith(str(made.run_dir))
        return original(path) if roomy else SimpleNamespace(total=10**9, used=10**9 - 5000, free=5000)

    monkeypatch.setattr(shutil, "disk_usage", nearly_full)
    check(made.run(), made, place, str(target.parent), "free")


# -- found by the workers ----------------------------------------------------------------------------------------------


def change_tensor(model: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    path = model / json.loads((model / INDEX).read_text())["weight_map"][name]
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize(
    ("name", "value", "propagate"),
    [
        ("model.layers.1.self_attn.k_proj.weight", float("nan"), "compressed"),
        ("model.layers.2.mlp.down_proj.weight", float("inf"), "dense"),
        ("model.layers.2.input_layernorm.weight", float("nan"), "compressed"),
    ],
)
def test_damaged_weights(name: str, value: float, propagate: str, model: Path, job: MakeJob) -> None:
    """Named by the tensor, whose name holds the layer."""
    change_tensor(model, name, lambda tensor: tensor.index_fill(0, torch.tensor([3]), value))
    made = job(model, **{"calibration.propagate": propagate})
    check(made.run(), made, f"tensor {name}", "NaN or infinity")


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"]
)
def test_damaged_weights_that_are_only_copied(name: str, model: Path, job: MakeJob) -> None:
    """Weights that are not used early are checked before the job starts, so that damaged ones are not shipped."""
    change_tensor(model, name, lambda tensor: tensor.index_fill(0, torch.tensor([3]), float("nan")))
    made = job(model, methods=[{**FLAT_LLM, "layers": "last:1"}], **{"budget.keep": 0.9})
    check(made.run(), made, f"tensor {name}", "NaN or infinity")


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
def test_activations_overflow(tmp_path: Path, job: MakeJob) -> None:
    """float16 ends at 65504; the layer where it does, the module and a way out are named."""
    source = make_source(tmp_path / "source", "llama", dtype=torch.float16)
    for name in ("up_proj", "gate_proj", "down_proj"):
        change_tensor(source, f"model.layers.1.mlp.{name}.weight", lambda tensor: tensor * 300)
    made = job(source)
    check(made.run(), made, "layer 1", "mlp.down_proj", "float16", "bfloat16")
