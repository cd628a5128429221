"""Latent attention: sources that have it, and a method that gives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM

from lamina import MODELLING_FILES
from tests import factories
from tests.end_to_end.jobs import (
    Job,
    MakeJob,
    command,
    file_digests,
    load,
    logits_of,
    read_tensors,
    relative_error,
    some_tokens,
)
from tests.serving.serving_sources import padded_batch

pytestmark = pytest.mark.usefixtures("inline")

LOSS_AWARE: dict[str, Any] = {"method": "loss_aware", "widths": 3}
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("deepseek_v3", {"methods": [LOSS_AWARE], "budget.keep": 0.5}),
    "attention": (
        "deepseek_v2",
        {"methods": [{**LOSS_AWARE, "mlp": False, "factors": "plain", "weighting": "input"}], "budget.keep": 0.84},
    ),
    "rounded": (
        "deepseek_v3",
        {"methods": [LOSS_AWARE], "budget.keep": 0.5, "quantize": {"bits": 8, "group": None}},
    ),
}
ROUNDED: dict[str, dict[str, Any]] = {
    "feedback": {},
    "levels": {"quantize": {"bits": 8, "group": 32, "levels": "learned"}},
    "nearest": {"quantize": {"bits": 8, "group": None, "feedback": False}, "calibration": None},
    "bits": {
        "methods": [LOSS_AWARE],
        "quantize": {"bits": "auto", "group": 32},
        "budget": {"bytes": 0.3},
        "calibration.propagate": "dense",
    },
    "refined": {
        "methods": [{**LOSS_AWARE, "refine": {"steps": 5}}],
        "budget": {"keep": 0.8},
        "calibration.propagate": "dense",
    },
}
WIDE: dict[str, Any] = {
    "first_k_dense_replace": 3,
    "hidden_size": 64,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "v_head_dim": 16,
    "intermediate_size": 96,
}
MATRICES = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
LATENTS = {"latent_values": "kv_lora_rank", "key_value_latent": "kv_lora_rank", "query_latent": "q_lora_rank"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("latent")
    return {family: factories.make_model(folder / family, family) for family in ("deepseek_v2", "deepseek_v3")}


def ranks(run: Job) -> list[dict[str, int]]:
    """Of each layer the ranks of its latents, by the source's names."""
    layers = run.compression()["layers"]
    return [
        {field: each["groups"][group]["ranks"]["latent"] for group, field in LATENTS.items() if group in each["groups"]}
        for each in layers
    ]


def check_cache(model: Any, expected_bytes: int) -> None:
    """Token by token, of padded samples, the logits are those of a whole pass, and the cache has the job's size."""
    ids, mask = padded_batch(vocab=64)
    steps, cache = [], None
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
        for end in (*range(9, ids.shape[1]), ids.shape[1]):
            start = 0 if cache is None else end - 1
            out = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    seen = mask.bool()
    assert (torch.cat(steps, dim=1)[seen] - whole[seen]).abs().max() <= 1e-4 * whole[seen].abs().max()
    assert cache is not None
    cached = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert cached == ids.numel() * expected_bytes


@pytest.mark.parametrize("name", ["all", *(pytest.param(name, marks=pytest.mark.nightly) for name in [*JOBS][1:])])
def test_a_job(name: str, job: MakeJob, sources: dict[str, Path], tmp_path: Path) -> None:
    family, changes = JOBS[name]
    source = sources[family]
    run = job(source, **{"calibration.propagate": "dense", **changes})
    ended = run.run()
    assert ended.code == 0, ended.err
    verified = command("verify", str(run.output), "--source", str(source), "--bound", "10")
    assert verified.code == 0, verified.out + verified.err
    counts = run.compression()["counts"]
    assert (
        counts["decoder_parameters"]["compressed"]
        <= run.document()["budget"]["keep"] * (counts["decoder_parameters"]["dense"])
    )
    cached, dense = (counts["cache_bytes_per_token"][which] for which in ("compressed", "dense"))
    assert cached == 4 * sum(each["kv_lora_rank"] + 6 for each in ranks(run)) < dense
    model, ids = load(run.output, trust_remote_code=True), some_tokens(320)
    if "quantize" not in changes:
        check_cache(model, cached)
    logits = logits_of(model, ids)
    assert 1e-3 < relative_error(logits, logits_of(load(source), ids)) < 1.5
    ended = command("export", str(run.output), "--to", "dense", str(tmp_path / "dense"))
    assert ended.code == 0, ended.err
    assert relative_error(logits_of(load(tmp_path / "dense"), ids), logits) < 1e-4


@pytest.mark.parametrize(
    ("family", "mlp", "keep"),
    [pytest.param("deepseek_v2", False, 0.95, marks=pytest.mark.nightly), ("deepseek_v3", True, 0.5)],
)
def test_shapes_of_the_source_s_own_class(
    family: str, mlp: bool, keep: float, job: MakeJob, sources: dict[str, Path], tmp_path: Path
) -> None:
    """One width of each latent for all layers; its own class has the smaller cache too."""
    run = job(
        sources[family],
        methods=[{"method": "loss_aware", "shapes": "stock", "mlp": mlp}],
        **{"calibration.propagate": "dense", "budget.keep": keep, "budget.multiple": 4},
    )
    ended = run.run()
    assert ended.code == 0, ended.err
    first, *others = ranks(run)
    assert all(each == first for each in others)
    assert first["kv_lora_rank"] < 12 or first["q_lora_rank"] < 20
    ended = command("export", str(run.output), "--to", "stock", str(tmp_path / "stock"))
    assert ended.code == 0, ended.err
    config = json.loads((tmp_path / "stock" / "config.json").read_text())
    assert {name: config[name] for name in first} == first
    assert config["model_type"] == family
    before, after = (
        sum(x.numel() for x in read_tensors(folder).values()) for folder in (run.output, tmp_path / "stock")
    )
    assert after == before
    model = load(tmp_path / "stock")
    ids = some_tokens(320)
    assert relative_error(logits_of(model, ids), logits_of(load(run.output, trust_remote_code=True), ids)) < 1e-4
    check_cache(model, run.compression()["counts"]["cache_bytes_per_token"]["compressed"])


def test_all_numbers_give_the_source_s_logits(job: MakeJob, tmp_path: Path) -> None:
    """Values are few enough to need all of their numbers."""
    source = factories.make_model(tmp_path / "source", "deepseek_v3", v_head_dim=5)
    run = job(source, methods=[{**LOSS_AWARE, "mlp": False}], **{"calibration.propagate": "dense", "budget.keep": 1.0})
    assert run.run().code == 0
    assert ranks(run) == [{"kv_lora_rank": 12, "q_lora_rank": 20}] * 3
    ids = some_tokens(320)
    assert relative_error(logits_of(load(run.output), ids), logits_of(load(source), ids)) < 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_queries_without_a_latent_stay_and_the_rest_shrinks(family: str, job: MakeJob, tmp_path: Path) -> None:
    source = factories.make_model(tmp_path / "source", family, q_lora_rank=None)
    run = job(source, methods=[{**LOSS_AWARE, "mlp": False}], **{"calibration.propagate": "dense", "budget.keep": 0.95})
    ended = run.run()
    assert ended.code == 0, ended.err
    before, after = read_tensors(source), read_tensors(run.output)
    queries = [name for name in before if ".q_proj." in name]
    assert len(queries) >= 3
    assert all(torch.equal(before[name], after[name]) for name in queries)
    forms = json.loads((run.output / "config.json").read_text())["forms"]
    assert {"kv_b_proj", "o_proj"} <= {role for layer in forms for role in layer}
    assert command("verify", str(run.output), "--source", str(source), "--bound", "10").code == 0
    ids, model = some_tokens(320), load(run.output, trust_remote_code=True)
    cache = model(ids[:, :12], use_cache=True).past_key_values
    logits = logits_of(model, ids)
    assert relative_error(logits_of(model, ids[:, 12:], past_key_values=cache), logits[:, 12:]) < 1e-4
    assert command("export", str(run.output), "--to", "dense", str(tmp_path / "dense")).code == 0
    assert relative_error(logits_of(load(tmp_path / "dense"), ids), logits) < 1e-4


@pytest.mark.nightly
def test_corrections_of_attention_alone_know_mixtures(job: MakeJob, sources: dict[str, Path]) -> None:
    """Each matrix is rounded with its correction, or with the first where it has none of its own."""
    run = job(
        sources["deepseek_v3"],
        methods=[{**LOSS_AWARE, "mlp": False, "correct": "output"}],
        quantize={"bits": 8, "group": None},
        **{"calibration.propagate": "dense", "budget.keep": 0.85},
    )
    ended = run.run()
    assert ended.code == 0, ended.err
    stored = read_tensors(run.output)
    assert all(
        any(name.startswith(f"model.layers.{layer}.self_attn.{role}.") and "_packed" in name for name in stored)
        for layer in range(3)
        for role in MATRICES
    )
    verified = command("verify", str(run.output), "--source", str(sources["deepseek_v3"]), "--bound", "10")
    assert verified.code == 0, verified.out + verified.err
    assert any(each["kv_lora_rank"] < 12 or each["q_lora_rank"] < 20 for each in ranks(run))


@pytest.mark.nightly
@pytest.mark.parametrize("change", [{"correct": "output"}, {"refine": {"steps": 10}}], ids=["corrected", "refined"])
def test_beside_corrections_and_training(change: dict[str, Any], job: MakeJob, tmp_path: Path) -> None:
    """Of a model with dense MLPs."""
    source = factories.make_model(tmp_path / "source", "deepseek_v2", first_k_dense_replace=3)
    changes = {"calibration.propagate": "dense", "budget.keep": 0.6}
    run = job(source, methods=[{**LOSS_AWARE, **change}], **changes)
    ended = run.run()
    assert ended.code == 0, ended.err
    assert any(each["kv_lora_rank"] < 12 for each in ranks(run))
    verified = command("verify", str(run.output), "--source", str(source), "--bound", "10")
    assert verified.code == 0, verified.out + verified.err


@pytest.mark.parametrize(
    "name", ["feedback", *(pytest.param(name, marks=pytest.mark.nightly) for name in [*ROUNDED][1:])]
)
def test_its_matrices_are_rounded(name: str, job: MakeJob, tmp_path: Path) -> None:
    """All of them, loaded by transformers with compressed-tensors, and by an export that multiplies codes out."""
    pytest.importorskip("compressed_tensors")
    source = factories.make_model(tmp_path / "source", "deepseek_v3", **WIDE)
    base = {"methods": [], "budget": None, "quantize": {"bits": 8, "group": 32}}
    run = job(source, **{**base, **ROUNDED[name]})
    ended = run.run()
    assert ended.code == 0, ended.err
    stored, record = read_tensors(run.output), run.compression()
    for layer, role in [(layer, role) for layer in range(3) for role in MATRICES]:
        path = f"model.layers.{layer}.self_attn.{role}"
        assert f"{path}.weight" not in stored
        assert f"{path}.weight_packed" in stored or any(key.startswith(f"{path}.pivoted") for key in stored)
    groups = [group for layer in record["layers"] for group in layer["groups"].values()]
    assert not any("nearest" in group for group in groups)
    verified = command("verify", str(run.output), "--source", str(source), "--bound", "10")
    assert verified.code == 0, verified.out + verified.err
    ids = some_tokens(320)
    logits = logits_of(load(run.output), ids)
    assert (
        1e-4
        < relative_error(logits, logits_of(load(source), ids))
        < (0.1 if name in ("feedback", "levels", "nearest") else 1.5)
    )
    assert command("export", str(run.output), "--to", "dense", str(tmp_path / "dense")).code == 0
    assert relative_error(logits_of(load(tmp_path / "dense"), ids), logits) < 1e-4


@pytest.mark.parametrize(
    ("quantize", "says"),
    [
        ({"bits": 4, "group": 32}, "q_b_proj reads 20 numbers"),
        ({"bits": 4, "group": None, "skip": ["o"]}, "deepseek_v3 model has no matrix o; it has q_a_proj, "),
    ],
    ids=["group", "skip"],
)
def test_what_cannot_be_rounded_is_named(
    quantize: dict[str, Any], says: str, job: MakeJob, sources: dict[str, Path]
) -> None:
    ended = job(sources["deepseek_v3"], methods=[], budget=None, quantize=quantize).run()
    assert (ended.code, says in ended.err) == (2, True), ended.err


def test_skipped_matrices_stay(job: MakeJob, sources: dict[str, Path]) -> None:
    run = job(
        sources["deepseek_v3"],
        methods=[],
        budget=None,
        calibration=None,
        quantize={"bits": 8, "group": None, "skip": ["q_a_proj", "kv_b_proj"]},
    )
    ended = run.run()
    assert ended.code == 0, ended.err
    before, after = read_tensors(sources["deepseek_v3"]), read_tensors(run.output)
    kept = {name for name in before if name in after and ".self_attn." in name and name.endswith("proj.weight")}
    assert {name.split(".")[-2] for name in kept} == {"q_a_proj", "kv_b_proj"}
    assert all(torch.equal(before[name], after[name]) for name in kept)


METHODS = [{"method": "mla", "cache_keep": 0.5}]


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
