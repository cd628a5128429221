"""`verify` on the job's own sample: figures that come out again, and differ when any tensor does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.checkpoint.compression_record import encode_json, read_record, sealed
from pipeline.inputs.checkpoints import read_checkpoint
from pipeline.inputs.sources import open_dense
from pipeline.verification.source_checks import SKETCH_BOUND, SourceAndOutput, check_logits
from stores.corpus import load_tokenizer
from tests.end_to_end.jobs import Job, MakeJob, command, read_tensors
from tests.end_to_end.sources import make_source

NIGHTLY = ("joint_rank_k", "lestd")
METHODS: dict[str, dict[str, Any]] = {
    "flat_llm": {"methods": [{"method": "flat_llm", "query_key": "head_pca"}], "budget": {"keep": 0.4}},
    "lorc": {"methods": [{"method": "lorc", "cache_keep": 0.4}], "budget": None, "calibration": None},
    "lestd": {"methods": [{"method": "lestd", "sweeps": 1, "refine_sweeps": 0}], "calibration": None},
    "joint_rank_k": {"methods": [{"method": "joint_rank_k"}], "calibration": None},
    "loss_aware": {"methods": [{"method": "loss_aware"}], "budget": {"keep": 0.4}, "calibration.propagate": "dense"},
    "rounded": {"methods": [], "budget": None, "quantize": {"bits": 8}, "calibration.propagate": "dense"},
}


def faults(made: Job) -> tuple[str, ...]:
    original, standard = open_dense(str(made.source))
    checkpoint, config = read_checkpoint(str(made.output))
    try:
        return check_logits(
            SourceAndOutput(original, standard, checkpoint, config, read_record(made.output)), None
        ).faults
    except ValueError as error:  # indices and bitmaps that make no sense; the command lists it as a fault, too
        return (str(error),)


def replace_tensors(output: Path, changed: dict[str, torch.Tensor]) -> dict[Path, bytes]:
    """Writes tensors into their shards; returns what the shards held."""
    index = json.loads((output / "model.safetensors.index.json").read_text())["weight_map"]
    before = {}
    for shard in {output / index[name] for name in changed}:
        before[shard] = shard.read_bytes()
        held = load_file(shard)
        shard.unlink()  # it may be a link to the source
        save_file({**held, **{name: t for name, t in changed.items() if name in held}}, shard, {"format": "pt"})
    return before


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in METHODS]
)
def test_healthy_passes_and_any_zeroed_or_swapped_tensor_does_not(name: str, tmp_path: Path, job: MakeJob) -> None:
    made = job(make_source(tmp_path / "source", "llama", layers=2), **METHODS[name])
    made.run().json  # noqa: B018 - asserts the exit code
    assert faults(made) == ()
    tensors = read_tensors(made.output)
    tried = 0
    for tensor_name, tensor in tensors.items():
        if tensor_name.endswith("_shape"):  # of what is rounded: it says what the codes' own shape says
            continue
        layer, _, rest = tensor_name.removeprefix("model.layers.").partition(".")
        other = f"model.layers.{int(layer) + 1}.{rest}" if layer.isdecimal() else ""
        swapped = other in tensors and tensors[other].shape == tensor.shape
        for changed in (
            {tensor_name: torch.zeros_like(tensor)},
            {tensor_name: tensors[other], other: tensor} if swapped else {},
        ):
            if changed:
                before = replace_tensors(made.output, changed)
                assert faults(made) != (), changed.keys()
                for shard, content in before.items():
                    shard.write_bytes(content)
                tried += 1
    assert tried > 20
    assert faults(made) == ()


@pytest.mark.usefixtures("inline")
def test_the_sample_is_calibration_text_and_travels(job: MakeJob, text: Path, llama: Path) -> None:
    made = job(**METHODS["flat_llm"])
    made.run().json  # noqa: B018 - asserts the exit code
    compared = made.compression()["compared"]
    assert compared["origin"] == "calibration"
    said = load_tokenizer(llama).decode(compared["tokens"][0][1:])
    assert said in text.read_text()
    ended = command("verify", str(made.output), "--source", str(llama))
    assert (ended.code, "on 48 calibration tokens" in ended.out) == (0, True), ended.out
    assert f"as the job measured, to {SKETCH_BOUND:g}" in ended.out
    other = command("verify", str(made.output), "--source", str(llama), "--bound", "0.001")
    assert (other.code, "above 0.001 (as given)" in other.out) == (1, True), other.out


@pytest.mark.usefixtures("inline")
def test_a_record_without_figures_is_held_against_the_loose_bound(job: MakeJob, llama: Path) -> None:
    made = job()
    made.run().json  # noqa: B018 - asserts the exit code
    record = {key: value for key, value in made.compression().items() if key not in ("compared", "sha256")}
    (made.output / "compression.json").write_bytes(encode_json(sealed(record)))
    ended = command("verify", str(made.output), "--source", str(llama))
    assert (ended.code, "random tokens" in ended.out, "bound 1 (lossy" in ended.out) == (0, True, True), ended.out


@pytest.mark.usefixtures("inline")
def test_other_ranks_are_measured_again(job: MakeJob) -> None:
    made = job(**{"calibration.propagate": "dense"})
    made.run().json  # noqa: B018 - asserts the exit code
    second = Job(made.root, made.source, made.text, {**made.changes, "budget.keep": 0.5})
    second.run("--fresh").json  # noqa: B018
    first = made.compression()["compared"]["error"]
    assert faults(made) == ()
    third = made.run("--set", "budget.keep=0.9", "--set", f"output={made.root / 'third'}")
    assert third.code == 0
    again = json.loads((made.root / "third" / "compression.json").read_text())["compared"]["error"]
    assert again < first


@pytest.mark.usefixtures("inline")
def test_a_dense_matrix_with_other_numbers_is_named_as_that(job: MakeJob) -> None:
    """An MLP at its full width, gate and up cut: down is fitted to what it reads now, at full rank, and has no form."""
    made = job(methods=[{"method": "loss_aware", "widths": 3}], **{"calibration.propagate": "dense"})
    made.run().json  # noqa: B018 - asserts the exit code
    layers = made.compression()["layers"]
    refitted = {
        (n, role)
        for n, layer in enumerate(layers)
        for one in layer["groups"].values()
        for role in one.get("refitted", ())
    }
    assert refitted, "the case is not met"
    assert not any(role in layers[n]["forms"] for n, role in refitted)
    verified = command("verify", str(made.output), "--source", str(made.source))
    assert verified.code == 0, verified.out + verified.err
