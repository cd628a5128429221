"""Sources whose weights are stored in formats of other tools: decoded as they are read, kept where nothing changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from pipeline.checkpoint.counting import stored_sizes
from pipeline.inputs.checkpoints import read_checkpoint
from pipeline.inputs.sources import open_dense
from pipeline.verification.output_checks import check_counts
from stores.headers import DTYPE_NAMES
from tests import factories
from tests.encoders import ENCODERS, encode_model
from tests.end_to_end.jobs import (
    Job,
    MakeJob,
    command,
    edit_json,
    load,
    logits_of,
    read_tensors,
    relative_error,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("inline")
ATTENTION: dict[str, Any] = {"methods": [{"method": "flat_llm", "layers": [0, 1], "mlp": False}], "budget.keep": 0.9}

GPT_OSS_EXPERTS = ("gate_up_proj", "down_proj")
NO_VOCABULARY: dict[str, tuple[str, ...]] = {"dense": (), "gguf": ("--no-vocabulary",)}
EXPERTS: dict[str, Any] = {"methods": [{"method": "svd", "layers": [1]}], "calibration": None}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """A model in a format and decoded again, written once."""
    written: dict[str, tuple[Path, Path]] = {}

    def make(kind: str, family: str = "llama", **sizes: int) -> tuple[Path, Path]:
        key = f"{kind} {family} {sizes}"
        if key not in written:
            folder = tmp_path_factory.mktemp("formats")
            source = factories.make_model(folder / "source", family, **sizes)
            written[key] = encode_model(source, folder, kind)
        return written[key]

    return make


def check_pair(encoded: Path, decoded: Path, job: MakeJob, **changes: Any) -> Job:
    """A job on the encoded model stores what it changes as one on the decoded model, and the rest as the source."""
    ran, plain = job(encoded, **changes), job(decoded, **changes)
    for each in (ran, plain):
        ended = each.run()
        assert ended.code == 0, ended.err
    output, expected, source = read_tensors(ran.output), read_tensors(plain.output), read_tensors(encoded)
    for name, tensor in output.items():
        same = expected.get(name)
        same = source[name] if same is None or same.dtype != tensor.dtype else same
        assert torch.equal(tensor.flatten().view(torch.uint8), same.flatten().view(torch.uint8)), name
    verified = command("verify", str(ran.output), "--source", str(encoded))
    assert verified.code == 0, verified.out + verified.err
    return ran


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [kind for kind in ENCODERS if kind != "mxfp4"])
def test_untouched_weights_stay_as_they_are(kind: str, job: MakeJob, models: Any) -> None:
    encoded, decoded = models(kind)
    ran = check_pair(encoded, decoded, job, **ATTENTION)
    config = json.loads((ran.output / "config.json").read_text())
    (group,) = config["stored_formats"]
    kept = group["modules"]
    assert len([path for path in kept if ".2." in path]) == 7
    assert len([path for path in kept if "mlp" in path]) == 9
    ids = some_tokens(config["vocab_size"])
    mine, plain = load(ran.output), load(ran.output.parents[1] / "job-1" / "output")
    assert torch.equal(logits_of(mine, ids), logits_of(plain, ids))


@pytest.mark.parametrize("kind", ["int4", "gptq"])
def test_a_resumed_job_keeps_layers_with_weights_in_stored_formats(kind: str, job: MakeJob, models: Any) -> None:
    """Codes and scales are in the layer's file in place of the weight."""
    made = job(models(kind)[0], **ATTENTION)
    assert made.run().code == 0
    ledger = made.run_dir / "ledger"
    kept = [*ledger.glob("layer.00000.*")]
    for entry in (*ledger.glob("layer.00001.*"), *ledger.glob("complete.*")):
        entry.unlink()
    ended = made.run()
    assert ended.code == 0
    assert "does not fit the job" not in ended.err
    assert [*ledger.glob("layer.00000.*")] == kept


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "int4" else [pytest.mark.nightly]) for kind in ENCODERS if kind != "mxfp4"],
)
def test_a_healing_trains_beside_stored_weights(kind: str, job: MakeJob, models: Any) -> None:
    """With the numbers of the decoded model; no code and no scale of the source changes."""
    encoded, decoded = models(kind)
    heal = {"epochs": 4, "learning_rate": 0.002}
    ran = check_pair(encoded, decoded, job, **ATTENTION, heal=heal)
    tensors = ran.compression()["tensors"]
    healed = {name for name, tensor in tensors.items() if tensor.get("healed")}
    assert {name.split(".")[2] for name in healed} == {"0", "1"}
    assert any("norm" in name for name in healed)
    assert any("proj" in name for name in healed)


@pytest.mark.parametrize("target", ["dense", "gguf"])
def test_exports_are_decoded(target: str, job: MakeJob, models: Any, tmp_path: Path) -> None:
    exported = []
    for number, source in enumerate(models("fp8 blocks")):
        ran = job(source, methods=[{"method": "svd", "layers": [1]}], calibration=None)
        assert ran.run().code == 0
        place = tmp_path / f"export-{number}{'.gguf' if target == 'gguf' else ''}"
        ended = command("export", str(ran.output), "--to", target, str(place), *NO_VOCABULARY[target])
        assert ended.code == 0, ended.err
        exported.append(place.read_bytes() if target == "gguf" else read_tensors(place))
    if target == "gguf":
        assert exported[0] == exported[1]
        return
    mine, plain = exported
    assert mine.keys() == plain.keys()
    assert all(torch.equal(mine[name], plain[name]) for name in plain)


def test_experts_of_a_mixture_in_blocks(job: MakeJob, models: Any) -> None:
    """DeepSeek-V3: attention stays in fp8, in blocks that do not divide it, as do the experts that no method claims."""
    encoded, decoded = models("fp8 blocks", "deepseek_v3")
    ran = check_pair(encoded, decoded, job, **{**EXPERTS, "budget.keep": 0.9})
    (group,) = json.loads((ran.output / "config.json").read_text())["stored_formats"]
    assert "model.layers.1.self_attn.kv_a_proj_with_mqa" in group["modules"]
    assert not any("layers.1.mlp" in path for path in group["modules"])
    assert "model.layers.2.mlp.experts.5.down_proj" in group["modules"]
    ids = some_tokens(320)
    plain = load(ran.output.parents[1] / "job-1" / "output")
    assert torch.equal(logits_of(load(ran.output), ids), logits_of(plain, ids))
    assert relative_error(logits_of(load(ran.output), ids), logits_of(load(decoded), ids)) < 1


def test_fused_experts_stay_one_by_one(job: MakeJob, models: Any) -> None:
    """gpt-oss: rows of gate and up take turns. What a job does not change stays in mxfp4, bit for bit."""
    encoded, decoded = models("mxfp4", "gpt_oss", hidden_size=64, intermediate_size=32)
    ran, plain = (job(source, **EXPERTS, **{"budget.keep": 0.9}) for source in (encoded, decoded))
    planned = command("plan", str(ran.manifest), "--json", "--gpu", "H100").json
    assert [each.run().code for each in (ran, plain)] == [0, 0]
    assert ran.compression()["counts"]["bytes"]["compressed"] <= planned["output_bytes"]
    output, expected, source = (read_tensors(folder) for folder in (ran.output, plain.output, encoded))
    (group,) = json.loads((ran.output / "config.json").read_text())["stored_formats"]
    assert len(group["modules"]) == 2 * 6 * 3  # of two layers; the third is compressed
    for layer, expert in [(layer, expert) for layer in (0, 2) for expert in range(6)]:
        path = f"model.layers.{layer}.mlp.experts"
        for name, fused, rows in (
            ("gate", "gate_up", slice(0, None, 2)),
            ("up", "gate_up", slice(1, None, 2)),
            ("down", "down", slice(None)),
        ):
            for part in ("blocks", "scales"):
                stored = source[f"{path}.{fused}_proj_{part}"][expert, rows]
                assert torch.equal(output.pop(f"{path}.{expert}.{name}_proj.weight_{part}"), stored)
    assert output.keys() <= expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in output.items())
    verified = command("verify", str(ran.output), "--source", str(encoded))
    assert verified.code == 0, verified.out + verified.err
    ids = some_tokens(320)
    assert torch.equal(logits_of(load(ran.output), ids), logits_of(load(plain.output), ids))


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["fp8 blocks", "fp8 ragged", "fp8 tensor", "float", "int4", "gptq", "awq"])
def test_fused_weights(kind: str, job: MakeJob, models: Any) -> None:
    """Phi-3: q, k and v in one weight, gate and up in another."""
    encoded, decoded = models(kind, "phi3")
    ran, plain = (
        job(source, methods=[{"method": "svd", "layers": [0, 1]}], calibration=None) for source in (encoded, decoded)
    )
    assert [each.run().code for each in (ran, plain)] == [0, 0]
    verified = command("verify", str(ran.output), "--source", str(encoded))
    assert verified.code == 0, verified.out + verified.err
    ids = some_tokens(320)
    assert torch.equal(logits_of(load(ran.output), ids), logits_of(load(plain.output), ids))
    kept = [name for name in read_tensors(ran.output) if "layers.2" in name and "scale" in name]
    assert len(kept) == {"fp8 blocks": 7, "fp8 ragged": 5, "fp8 tensor": 7, "float": 7}.get(kind, 2)


@pytest.mark.parametrize("kind", ["fp8 blocks", "int4"])
@pytest.mark.parametrize("quantize", [None, {"bits": 4, "group": 32}], ids=["", "rounded"])
def test_bytes_are_a_share_of_the_stored_ones(kind: str, quantize: Any, job: MakeJob, models: Any) -> None:
    encoded, _ = models(kind, hidden_size=64, intermediate_size=96)
    share = 0.8 if quantize is None else 0.55 if kind == "fp8 blocks" else 0.95
    run = job(encoded, methods=[{"method": "svd"}], calibration=None, budget={"bytes": share}, quantize=quantize)
    planned = command("plan", str(run.manifest), "--json", "--gpu", "H100").json
    assert planned["decoded_bytes"] > planned["source_bytes"]
    ended = run.run()
    assert ended.code == 0, ended.err
    before, after = (
        sum(tensor.nbytes for name, tensor in read_tensors(folder).items() if "layers" in name)
        for folder in (encoded, run.output)
    )
    assert 0.8 * share * before < after <= share * before
    verified = command("verify", str(run.output), "--source", str(encoded))
    assert verified.code == 0, verified.out + verified.err
    load(run.output)


KEPT_AND_CHANGED: dict[str, dict[str, Any]] = {
    "factors": {"methods": [{"method": "svd", "layers": [1]}], "budget.keep": 0.9},
    "codes": {"methods": [], "budget": None, "quantize": {"bits": 8, "group": 32, "feedback": False, "skip": ["o"]}},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("changed", KEPT_AND_CHANGED)
@pytest.mark.parametrize("kind", ENCODERS)
def test_the_plan_counts_bytes_as_they_are_stored(kind: str, changed: str, job: MakeJob, models: Any) -> None:
    """Of the source, of what is read of it, and of OUTPUT, which keeps formats beside changed weights."""
    family = "gpt_oss" if kind == "mxfp4" else "llama"
    encoded, _ = models(kind, family, hidden_size=64, intermediate_size=32 if kind == "mxfp4" else 96)
    run = job(encoded, calibration=None, **KEPT_AND_CHANGED[changed])
    planned = command("plan", str(run.manifest), "--json", "--gpu", "H100").json
    assert run.run().code == 0
    source, output = (
        sum(tensor.nbytes for tensor in read_tensors(folder).values()) for folder in (encoded, run.output)
    )
    assert planned["source_bytes"] == source
    assert planned["read_phases"]["digests"] >= source
    assert min(planned["read_phases"].values()) > 0
    assert planned["expected_numbers"] <= planned["dense_numbers"]
    assert output <= planned["output_bytes"] <= 1.05 * output


def test_a_stored_head_is_counted_as_it_is_stored(job: MakeJob, models: Any, tmp_path: Path) -> None:
    """It becomes a rounded one. Its bytes were once taken away decoded from a sum in which they were stored."""
    encoded, _ = models("float", hidden_size=64, intermediate_size=96)
    shutil.copytree(encoded, source := tmp_path / "source")
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        if (head_VD := tensors.pop("lm_head.weight", None)) is not None:
            scales_V1 = (head_VD.float().abs().amax(dim=1, keepdim=True) / 448).to(head_VD.dtype)
            tensors["lm_head.weight"] = (head_VD / scales_V1).float().to(torch.float8_e4m3fn)
            tensors["lm_head.weight_scale"] = scales_V1
            save_file(tensors, file, {"format": "pt"})
            index = json.loads((source / "model.safetensors.index.json").read_text())
            index["weight_map"]["lm_head.weight_scale"] = file.name
            (source / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    (source / "config.json").write_text(json.dumps(config))
    quantize = {"bits": 8, "group": 32, "feedback": False, "what": "all"}
    run = job(source, calibration=None, methods=[], budget=None, quantize=quantize)
    planned = command("plan", str(run.manifest), "--json", "--gpu", "H100").json
    ended = run.run()
    assert ended.code == 0, ended.err
    output = sum(tensor.nbytes for tensor in read_tensors(run.output).values())
    assert output <= planned["output_bytes"] <= 1.05 * output


@pytest.mark.parametrize("kind", ["fp8 blocks", "int4", "gptq", "mxfp4"])
def test_a_result_that_may_not_be_smaller_is_announced(kind: str, job: MakeJob, models: Any) -> None:
    """Against the stored source; a share of its bytes is smaller."""
    sizes = {"hidden_size": 64, "intermediate_size": 32} if kind == "mxfp4" else {}
    encoded, _ = models(kind, "gpt_oss" if kind == "mxfp4" else "llama", **sizes)
    form = {"fp8 blocks": "fp8", "int4": "packed"}.get(kind, kind)
    for budget in ({"keep": 0.9}, {"bytes": 0.9}):
        run = job(encoded, methods=[{"method": "svd"}], calibration=None, budget=budget)
        ended = command("plan", str(run.manifest), "--gpu", "H100")
        assert ended.code == 0, ended.err
        said = ended.out + ended.err
        assert (f"its weights are stored in {form}, " in said) == ("keep" in budget)
        assert ("not smaller: give budget.bytes, or quantize" in said) == ("keep" in budget)


@pytest.mark.parametrize("skip", [[], ["o"]])
def test_stored_weights_beside_rounded_ones_are_announced(skip: list[str], job: MakeJob, models: Any) -> None:
    """By `plan`, before any work: vLLM refuses such a checkpoint."""
    encoded, _ = models("fp8 blocks")
    quantize = {"bits": 8, "group": None, "skip": skip}
    run = job(encoded, methods=[], calibration=None, budget=None, quantize=quantize)
    ended = command("plan", str(run.manifest), "--gpu", "H100")
    assert ended.code == 0, ended.err
    announced = "quantize: o stay in the source's storage format beside rounded matrices; transformers loads that, vLLM"
    assert (announced in ended.out) == bool(skip)


def test_a_weight_that_stays_dense_stays_stored(job: MakeJob, models: Any) -> None:
    """Full ranks change nothing: the result has the source's bytes."""
    encoded, _ = models("fp8 blocks")
    run = job(encoded, methods=[{"method": "svd"}], calibration=None, **{"budget.keep": 1.0})
    assert run.run().code == 0
    output = read_tensors(run.output)
    for name, tensor in read_tensors(encoded).items():
        assert torch.equal(output[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


@pytest.mark.parametrize("kind", ["fp8 blocks", "int4", "gptq"])
@pytest.mark.parametrize("quantize", [None, {"bits": 4, "group": 32}], ids=["", "rounded"])
def test_numbers_are_those_of_the_decoded_model(kind: str, quantize: Any, job: MakeJob, models: Any) -> None:
    """In the record, the summary and the plan; kept codes count as the weights that they stand for."""
    encoded, decoded = models(kind, hidden_size=64, intermediate_size=96)
    methods = [{"method": "svd", "layers": [1]}]
    made = [
        job(each, methods=methods, calibration=None, quantize=quantize, **{"budget.keep": 0.97})
        for each in (encoded, decoded)
    ]
    planned = command("plan", str(made[0].manifest), "--json", "--gpu", "H100").json
    ended = [each.run() for each in made]
    assert [each.code for each in ended] == [0, 0]
    counts, plain = (each.compression()["counts"] for each in made)
    for name in ("parameters", "decoder_parameters"):
        assert counts[name] == plain[name]
        assert counts[name]["compressed"] < counts[name]["dense"]
    assert counts["parameters"]["dense"] == planned["dense_numbers"]
    assert ended[0].json["counts"] == counts
    verified = command("verify", str(made[0].output), "--source", str(encoded))
    assert verified.code == 0, verified.out + verified.err
    assert "counts weights in storage formats by their bytes" not in verified.out


def test_records_of_earlier_versions_pass(job: MakeJob, models: Any) -> None:
    """They count the codes of storage formats by their bytes."""
    encoded, _ = models("int4")
    run = job(encoded, methods=[{"method": "svd", "layers": [1]}], calibration=None)
    assert run.run().code == 0
    compression = run.compression()
    for side, folder in (("dense", encoded), ("compressed", run.output)):
        tensors = [
            (name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in read_tensors(folder).items()
        ]
        for name, size in stored_sizes(tensors, "model.layers", 2).items():
            compression["counts"][name][side] = size
    (original, standard), (checkpoint, config) = open_dense(str(encoded)), read_checkpoint(str(run.output))
    found = check_counts(checkpoint, config, compression, original, standard)
    assert not found.faults
    assert found.detail.endswith("compression.json counts weights in storage formats by their bytes")
    compression["counts"]["parameters"]["compressed"] += 1
    assert check_counts(checkpoint, config, compression, original, standard).faults


def damaged(encoded: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a model with other tensors in the file of a query."""
    shutil.copytree(encoded, folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / next(name for key, name in index["weight_map"].items() if "layers.1.self_attn.q_proj" in key)
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    names = {key: name for key, name in index["weight_map"].items() if name != file.name}
    index["weight_map"] = names | dict.fromkeys(tensors, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


SCALE = "model.layers.1.self_attn.q_proj.weight_scale_inv"
DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "missing": (lambda tensors: tensors.pop(SCALE), f"{SCALE}: missing"),
    "shape": (lambda tensors: tensors.update({SCALE: tensors[SCALE][:1]}), f"{SCALE}: shape [1, 3]"),
    "zero": (lambda tensors: tensors[SCALE].zero_(), "weight_scale_inv hold zeros for codes that are not"),
    "NaN": (lambda tensors: tensors[SCALE].fill_(float("nan")), "weight_scale_inv hold NaN or infinity"),
    "infinite": (lambda tensors: tensors[SCALE].fill_(float("inf")), "weight_scale_inv hold NaN or infinity"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("layers", [[1], [2]], ids=["claimed", "copied"])
def test_damaged_scales_are_named(kind: str, layers: list[int], job: MakeJob, models: Any, tmp_path: Path) -> None:
    change, words = DAMAGE[kind]
    source = damaged(models("fp8 blocks")[0], tmp_path / "damaged", change)
    ended = job(source, methods=[{"method": "svd", "layers": layers}], calibration=None).run()
    assert (ended.code, words in ended.err) == (2, True), ended.err


def test_unknown_layouts_are_named(job: MakeJob, models: Any, tmp_path: Path) -> None:
    shutil.copytree(models("int4")[0], source := tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["format"] = "nvfp4-pack-quantized"
    (source / "config.json").write_text(json.dumps(config))
    ended = job(source, methods=[{"method": "svd"}], calibration=None).run()
    assert ended.code == 2
    assert "nvfp4-pack-quantized cannot be read" in ended.err
    assert "pack-quantized), mxfp4, gptq, awq" in ended.err


def gpt_oss_in_mxfp4(directory: Path) -> Path:
    """A random gpt-oss whose experts are stored as on the hub: fused, in codes of four bits."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    source = factories.make_model(directory, "gpt_oss", max_shard_size="1GB", dtype=torch.bfloat16, **sizes)
    file, generator = source / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(120, 125, shape, dtype=torch.uint8, generator=generator)
    save_file(tensors, file, metadata={"format": "pt"})
    edit_json(source / "config.json", quantization_config={"quant_method": "mxfp4"})
    return source


def test_experts_of_gpt_oss_are_read_from_mxfp4(tmp_path: Path, job: MakeJob) -> None:
    """Every weight is that of transformers' own dequantization, in a job and in an export of it."""
    source = gpt_oss_in_mxfp4(tmp_path / "source")
    dequantize: Any = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(source, quantization_config=dequantize, dtype=torch.bfloat16)
    opened, _ = open_dense(str(source))
    expected = theirs.state_dict()
    for layer in range(2):
        gate_up_EDF, down_END = (expected[f"model.layers.{layer}.mlp.experts.{name}"] for name in GPT_OSS_EXPERTS)
        for expert in range(6):
            path = f"model.layers.{layer}.mlp.experts.{expert}"
            read = opened.read(f"{path}.{name}_proj.weight" for name in ("gate", "up", "down"))
            gate_ND, up_ND, down_DN = read.values()
            assert torch.equal(gate_ND, gate_up_EDF[expert, :, ::2].T)
            assert torch.equal(up_ND, gate_up_EDF[expert, :, 1::2].T)
            assert torch.equal(down_DN, down_END[expert].T)
    attention = {"method": "loss_aware", "mlp": False}
    calibration = {"calibration.propagate": "dense", "calibration.samples": 12, "calibration.shards": 3}
    run = job(source, methods=[attention], **calibration, **{"budget.keep": 0.98})
    ended = run.run()
    assert ended.code == 0, ended.err
    (group,) = json.loads((run.output / "config.json").read_text())["stored_formats"]
    assert (group["kind"], len(group["modules"])) == ("mxfp4", 2 * 6 * 3)
    assert command("verify", str(run.output), "--source", str(source), "--bound", "10").code == 0
    ended = command("export", str(run.output), "--to", "dense", str(tmp_path / "dense"))
    assert ended.code == 0, ended.err
    ids = some_tokens(300)
    exported, output = (
        logits_of(load(folder, dtype=torch.float32), ids) for folder in (tmp_path / "dense", run.output)
    )
    assert relative_error(exported, output) < 0.01  # in bfloat16 a router may choose another expert
