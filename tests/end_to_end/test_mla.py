"""`mla`: OUTPUT is a plain directory of the DeepSeek type, and says what was evaluated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM

from lamina import MODELLING_FILES
from tests import factories
from tests.end_to_end.jobs import Job, command, file_digests, logits_of, relative_error, some_tokens

MakeJob = Callable[..., Job]
METHODS = [{"method": "mla", "cache_keep": 0.5}]
pytestmark = pytest.mark.usefixtures("inline")


def test_a_model_of_the_deepseek_type(tmp_path: Path, job: MakeJob) -> None:
    source = factories.make_model(tmp_path / "source", num_hidden_layers=2)
    made = job(source, methods=METHODS, budget=None, **{"calibration.propagate": "dense"})
    assert command("plan", str(made.manifest), "--json", "--tflops", "1").code == 0
    ended = made.run().json
    cache = ended["counts"]["cache_bytes_per_token"]
    assert cache["compressed"] == 0.5 * cache["dense"]
    assert not {*MODELLING_FILES} & {path.name for path in made.output.iterdir()}
    verified = command("verify", str(made.output), "--source", str(source))
    assert verified.code == 0, verified.out
    assert command("verify", str(made.output)).code == 0
    model = AutoModelForCausalLM.from_pretrained(made.output, dtype=torch.float32).eval()
    assert type(model) is DeepseekV3ForCausalLM
    text, window = tmp_path / "text.txt", 32
    factories.write_text(text, 4000, seed=3)
    scored = command(
        "evaluate", str(made.output), "--text", str(text), "--window", str(window), "--prefix", "none", "--json"
    ).json
    assert scored["perplexity"] == pytest.approx(perplexity(model, made.output, text, window), rel=1e-4)
    ids_BT = some_tokens(320)[:, :24]
    with torch.inference_mode():
        filled = model(ids_BT, use_cache=True).past_key_values
        held = sum(tensor.numel() for layer in filled.layers for tensor in (layer.keys, layer.values))
    assert held * 4 == ids_BT.numel() * cache["compressed"]
    assert command("export", str(made.output), "--to", "dense", str(tmp_path / "dense")).code == 2
    before = file_digests(made.output)
    assert made.run().code == 0
    assert file_digests(made.output) == before


def test_a_tied_output_embedding_becomes_one_of_its_own(tmp_path: Path, job: MakeJob) -> None:
    """Engines' classes have no tied ones, and vLLM's would leave it at zeros."""
    source = factories.make_model(tmp_path / "source", num_hidden_layers=2, tie_word_embeddings=True)
    made = job(source, methods=METHODS, budget=None, **{"calibration.propagate": "dense"})
    planned = command("plan", str(made.manifest), "--json", "--tflops", "1").json
    counts = made.run().json["counts"]
    assert counts["bytes"]["compressed"] <= planned["output_bytes"]
    assert [line.split(":")[0] for line in planned["engines"][1:]] == ["not    llama.cpp", "less   vllm"]
    assert planned["engines"][2].endswith("kernels for heads of 16 + 16 numbers: give one of these as `rope`")
    tensors, config = load_tensors(made.output), json.loads((made.output / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert counts["bytes"]["compressed"] == sum(tensor.numel() * 4 for tensor in tensors.values())
    verified = command("verify", str(made.output), "--source", str(source))
    assert verified.code == 0, verified.out
    model, loaded = AutoModelForCausalLM.from_pretrained(made.output, output_loading_info=True)
    assert not any(loaded.values())
    assert model.lm_head.weight is not model.model.embed_tokens.weight


def test_full_rank_gives_the_source_s_logits(tmp_path: Path, job: MakeJob) -> None:
    """One key head keeps its rotations; latents of the whole hidden state undo the norm before, and lose nothing."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}
    source = factories.make_model(tmp_path / "source", num_hidden_layers=2, **sizes)
    methods = [{"method": "mla", "cache_keep": 1.0}]
    made = job(source, methods=methods, budget=None, **{"calibration.propagate": "dense"})
    made.run().json  # noqa: B018 - asserts the exit code
    after, before = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (made.output, source))
    assert (after.config.kv_lora_rank, after.config.qk_rope_head_dim) == (32, 64)
    ids_BT = some_tokens(320)
    assert relative_error(logits_of(after, ids_BT), logits_of(before, ids_BT)) < 1e-3


def test_denser_frequencies_are_read_from_the_base(tmp_path: Path, job: MakeJob) -> None:
    """Two key heads of 16 with 20 rotated dimensions: two frequencies for each of the source's."""
    source = factories.make_model(tmp_path / "source", num_hidden_layers=2)
    methods = [{**METHODS[0], "cache_keep": 0.75, "rope": 20}]
    made = job(source, methods=methods, budget=None, **{"calibration.propagate": "dense"})
    ended = made.run().json
    cache = ended["counts"]["cache_bytes_per_token"]
    assert cache["compressed"] == 0.75 * cache["dense"]
    verified = command("verify", str(made.output), "--source", str(source))
    assert verified.code == 0, verified.out
    model = AutoModelForCausalLM.from_pretrained(made.output).eval()
    assert type(model) is DeepseekV3ForCausalLM
    theta = AutoModelForCausalLM.from_pretrained(source).config.rope_parameters["rope_theta"]
    assert model.config.qk_rope_head_dim == 20
    assert model.config.rope_parameters["rope_theta"] == pytest.approx(theta ** (20 / 16 / 2))
    ids_BT = some_tokens(320)[:2, :12]
    with torch.inference_mode():
        whole_BTV, state = model(ids_BT).logits, None
        for place in range(ids_BT.shape[1]):
            step = model(ids_BT[:, place : place + 1], past_key_values=state, use_cache=True)
            state = step.past_key_values
            torch.testing.assert_close(step.logits[:, 0], whole_BTV[:, place], rtol=1e-3, atol=1e-4)


def test_narrow_mlps_of_one_width_stay(tmp_path: Path, job: MakeJob) -> None:
    """Of the stock export of a job that cut them, which is a model of the source's class."""
    source = factories.make_model(tmp_path / "source", num_hidden_layers=2)
    narrow = job(source, methods=[{"method": "flat_llm", "attention": False, "ranks": {"mlp": 33}}], budget=None)
    narrow.run().json  # noqa: B018 - asserts the exit code
    stock = tmp_path / "stock"
    assert command("export", str(narrow.output), "--to", "stock", str(stock)).code == 0
    made = job(stock, methods=METHODS, budget=None, **{"calibration.propagate": "dense"})
    made.run().json  # noqa: B018 - asserts the exit code
    before, after = load_tensors(stock), load_tensors(made.output)
    mlps = [name for name in before if ".mlp." in name]
    assert [after[name].shape == before[name].shape and 33 in after[name].shape for name in mlps] == [True] * 6
    assert all(torch.equal(after[name], before[name]) for name in mlps)
    model = AutoModelForCausalLM.from_pretrained(made.output)
    assert (type(model), model.config.intermediate_size) == (DeepseekV3ForCausalLM, 33)


@pytest.mark.parametrize("sizes", [{"ranks": {"mlp": 33}}, {"uniform": True, "allocation": "loss"}])
def test_mlps_of_one_width_beside_it(tmp_path: Path, job: MakeJob, sizes: dict[str, Any]) -> None:
    """The same MLPs as in a job that cuts them alone, in the class that one job writes."""
    source = factories.make_model(tmp_path / "source", num_hidden_layers=2)
    narrow = {"method": "flat_llm", "attention": False, **sizes}
    dense = {"calibration.propagate": "dense"}
    made = job(source, methods=[*METHODS, narrow], budget=None if "ranks" in sizes else {"keep": 0.8}, **dense)
    planned = command("plan", str(made.manifest), "--json", "--tflops", "1").json
    counts = made.run().json["counts"]
    model = AutoModelForCausalLM.from_pretrained(made.output)
    width = model.config.intermediate_size
    assert type(model) is DeepseekV3ForCausalLM
    assert width == 33 if "ranks" in sizes else width < 88
    assert counts["cache_bytes_per_token"]["compressed"] == 0.5 * counts["cache_bytes_per_token"]["dense"]
    assert counts["bytes"]["compressed"] <= planned["output_bytes"]
    for words in (("--source", str(source)), ()):
        verified = command("verify", str(made.output), *words)
        assert verified.code == 0, verified.out
    fixed = {"uniform": False, "allocation": "importance", "ranks": {"mlp": width}}
    alone = job(source, methods=[{**narrow, **fixed}], budget=None, **dense)
    alone.run().json  # noqa: B018 - asserts the exit code
    before, after = load_tensors(alone.output), load_tensors(made.output)
    mlps = [name for name in before if ".mlp." in name]
    assert len(mlps) == 6
    assert all(torch.equal(after[name], before[name]) for name in mlps)


@pytest.mark.parametrize(
    "other",
    [
        {"method": "flat_llm", "attention": False},
        {"method": "flat_llm", "uniform": True},
        {"method": "flat_llm", "attention": False, "layers": "last:1", "ranks": {"mlp": 33}},
        {"method": "flat_llm", "attention": False, "uniform": True, "refine": True},
        {"method": "loss_aware", "attention": False, "query_key": False},
        {"method": "joint_rank_k", "query_key": "none", "ranks": {"mlp": 8}},
    ],
)
def test_what_the_class_cannot_say_ends_before_work(tmp_path: Path, job: MakeJob, other: dict[str, Any]) -> None:
    source = factories.make_model(tmp_path / "source", num_hidden_layers=2)
    dense = {"calibration.propagate": "dense"}
    ended = job(source, methods=[*METHODS, other], budget={"keep": 0.8}, **dense).run()
    assert ended.code == 2
    assert f"methods.1 ({other['method']}): OUTPUT of mla is an ordinary checkpoint of another class" in ended.err


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in file.items()}


def perplexity(model: DeepseekV3ForCausalLM, output: Path, text: Path, window: int) -> float:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(output)(text.read_text(), return_tensors="pt", add_special_tokens=False)
    ids_BT = ids.input_ids[0][: ids.input_ids.shape[1] // window * window].view(-1, window)
    with torch.inference_mode():
        loss: torch.Tensor = model(ids_BT, labels=ids_BT).loss
    return float(loss.exp())


def test_wrong_models_end_before_work(tmp_path: Path, job: MakeJob) -> None:
    source = factories.make_model(tmp_path / "source", "opt", num_hidden_layers=2)
    ended = job(source, methods=METHODS, budget=None, **{"calibration.propagate": "dense"}).run()
    assert ended.code == 2
    assert "methods.0 (mla): OUTPUT is of the DeepSeek type" in ended.err
