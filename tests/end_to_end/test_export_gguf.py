"""Checkpoints for llama.cpp, of dense models and of mixtures."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from pipeline.checkpoint.targets import export_faults
from pipeline.families.registry import checkpoint_config, standard_config
from tests import factories
from tests.end_to_end.exports import METHODS, as_llama, export, needs_gguf, read_gguf
from tests.end_to_end.jobs import Job, MakeJob, command, load, logits_of, read_tensors, relative_error, some_tokens
from tests.end_to_end.sources import make_source
from tests.factories import make_tokenizer
from tests.llama_cpp import LlamaCpp, needs_llama_cpp

TEXTS = (
    "Once upon a time, there was a girl.", " leading", "tail ", "one\ntwo\n\n three\ttabs\r\n", "Zoë's 3rd café 😀!",
    "I'LL don't we've 123456 3..3", "中文字", "special <s> and </s> here", "x",
)  # fmt: skip
UNIFORM = {"methods": [{"method": "flat_llm", "ranks": {"value": 9, "mlp": 33}}], "budget": None}
ROUNDED = {"methods": [], "budget": None, "quantize": {"bits": 4, "group": 32, "what": "all"}}
ON_LEVELS: dict[str, Any] = {**ROUNDED, "quantize": {"bits": 4, "group": 32, "what": "all", "levels": "iq4_nl"}}
FACTORS_ON_LEVELS = {**ROUNDED, "quantize": {"bits": 4, "group": 32, "levels": "iq4_nl"}}
HEALED: dict[str, Any] = {**UNIFORM, "heal": {"epochs": 8, "learning_rate": 0.003}}
HEALED_LEVELS: dict[str, Any] = {
    **ON_LEVELS, "calibration.samples": 64, "heal": {"epochs": 4, "learning_rate": 5e-6}  # levels are up to 127
}  # fmt: skip
BY_LAYER = {"methods": [{"method": "flat_llm", "layers": [1], "ranks": {"mlp": 33}}], "budget": None}


def written(
    made: Job, name: str = "model.gguf", vocabulary: bool = True, options: Sequence[str] = ()
) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    """(what the command said, the fields, the tensors) of an export."""
    ended, destination = export(made, "gguf", name, *options, *([] if vocabulary else ["--no-vocabulary"]))
    assert ended.code == 0, ended.err
    return (ended.json, *read_gguf(destination))


@needs_gguf
@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    ("method", "architecture"),
    [(UNIFORM, "llama"), (BY_LAYER, "deci"), (METHODS["lorc"], "llama"), (METHODS["joint_rank_k"], "llama")],
)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_the_file_is_the_model(
    family: str, method: dict[str, Any], architecture: str, tmp_path: Path, job: MakeJob
) -> None:
    options: dict[str, Any] = {"sliding_window": None} if family == "mistral" else {"tie_word_embeddings": True}
    if family == "qwen2":
        options["hidden_size"] = 64  # llama.cpp has as many biases of queries
    made = job(make_source(tmp_path / "source", family, layers=3, **options), **method)
    made.run().json  # noqa: B018 - asserts the exit code
    said, fields, tensors = written(made, vocabulary=family != "qwen2")  # for which transformers adds a token
    assert (said["architecture"], fields["general.architecture"]) == (architecture, architecture)
    assert said["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    if architecture == "deci":
        assert fields["deci.feed_forward_length"] == [80, 33, 80]
    assert ("blk.0.attn_q.bias" in tensors and bool(tensors["blk.0.attn_q.bias"].any())) == (family == "qwen2")
    ids_BT = some_tokens(320)
    assert relative_error(logits_of(as_llama(fields, tensors), ids_BT), logits_of(load(made.output), ids_BT)) < 1e-5


@needs_gguf
@pytest.mark.usefixtures("inline")
def test_half_precision_and_scaled_frequencies(tmp_path: Path, job: MakeJob) -> None:
    """bfloat16 stays, norms are float32; llama3's scaling becomes factors that the frequencies are divided by."""
    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    source = make_source(tmp_path / "source", "llama", dtype=torch.bfloat16, rope_parameters=rope)
    made = job(source, **UNIFORM)
    made.run().json  # noqa: B018 - asserts the exit code
    _, fields, tensors = written(made)
    factors = tensors["rope_freqs.weight"]
    assert factors.shape == (8,)
    assert factors.min() == 1.0
    assert factors.max() == pytest.approx(8.0)
    model, ids_BT = as_llama(fields, tensors, rope), some_tokens(320)
    assert relative_error(logits_of(model, ids_BT), logits_of(load(made.output).float(), ids_BT)) < 0.03
    import gguf

    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(made.root / "model.gguf").tensors}
    assert (kinds["blk.0.attn_norm.weight"], kinds["blk.0.ffn_up.weight"]) == ("F32", "BF16")


@needs_gguf
@pytest.mark.usefixtures("inline")
def test_products_of_factors_in_float32(tmp_path: Path, job: MakeJob) -> None:
    """In the checkpoint's bfloat16 they are rounded once more, and the file says other logits than the checkpoint."""
    made = job(make_source(tmp_path / "source", "llama", dtype=torch.bfloat16), **METHODS["joint_rank_k"])
    made.run().json  # noqa: B018 - asserts the exit code
    ids_BT = some_tokens(320)
    wanted = logits_of(load(made.output).float(), ids_BT)
    _, fields, tensors = written(made)
    assert relative_error(logits_of(as_llama(fields, tensors), ids_BT), wanted) > 1e-4
    _, fields, tensors = written(made, "whole.gguf", options=["--float32"])
    assert fields["general.file_type"] == 0
    assert relative_error(logits_of(as_llama(fields, tensors), ids_BT), wanted) < 1e-5
    ended, _ = export(made, "dense", "dense", "--float32")
    assert (ended.code, "--float32 goes with --to gguf" in ended.err) == (2, True)


@needs_gguf
@pytest.mark.usefixtures("inline")
def test_embeddings_and_head_in_eight_bits(tmp_path: Path, job: MakeJob) -> None:
    import gguf

    made = job(make_source(tmp_path / "source", "llama", hidden_size=64, dtype=torch.bfloat16), **UNIFORM)
    made.run().json  # noqa: B018 - asserts the exit code
    _, fields, tensors = written(made, "small.gguf", options=["--embeddings-q8"])
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(made.root / "small.gguf").tensors}
    assert {name for name, kind in kinds.items() if kind == "Q8_0"} == {"token_embd.weight", "output.weight"}
    ids_BT = some_tokens(320)
    wanted = logits_of(load(made.output).float(), ids_BT)
    assert relative_error(logits_of(as_llama(fields, tensors), ids_BT), wanted) < 0.03
    for target, more, said in (
        ("dense", (), "--embeddings-q8 goes with --to gguf"),
        ("gguf", ("--float32",), "--float32 stores what has no codes unrounded"),
    ):
        ended, _ = export(made, target, "other", "--embeddings-q8", *more)
        assert (ended.code, said in ended.err) == (2, True)


@needs_gguf
@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(("levels", "kind"), [("uniform", "Q4_0"), ("iq4_nl", "IQ4_NL")])
def test_codes_are_kept(levels: str, kind: str, tmp_path: Path, job: MakeJob) -> None:
    """Where blocks hold them, narrow MLPs and the ends among them; the file is as much smaller."""
    import gguf

    source = make_source(tmp_path / "source", "llama", hidden_size=64, intermediate_size=128)
    ranks = {"value": 16, "mlp": 64}
    made = job(
        source, budget=None, methods=[{"method": "flat_llm", "ranks": ranks}],
        **{"quantize": {"bits": 4, "group": 64, "what": "all", "levels": levels}},
    )  # fmt: skip
    made.run().json  # noqa: B018 - asserts the exit code
    _, fields, tensors = written(made)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(made.root / "model.gguf").tensors}
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert {kinds[f"{name}.weight"] for name in ("blk.0.ffn_up", "blk.1.attn_q", "token_embd", "output")} == {kind}
    ids_BT = some_tokens(320)
    found = relative_error(logits_of(as_llama(fields, tensors), ids_BT), logits_of(load(made.output), ids_BT))
    assert found < 2e-3  # scales are float16 in the file


@needs_gguf
@pytest.mark.usefixtures("inline")
def test_what_llama_cpp_cannot_be_is_refused(tmp_path: Path, job: MakeJob) -> None:
    made = job(make_source(tmp_path / "source", "starcoder2"), **UNIFORM)
    made.run().json  # noqa: B018 - asserts the exit code
    ended, destination = export(made, "gguf", "model.gguf")
    assert ended.code == 2
    known = "llama, mistral, qwen2, mixtral, qwen3_moe, deepseek_v3"
    assert f"no place for a starcoder2 model; known are {known}; " in ended.err
    assert "; for biases on down, up; " in ended.err
    assert not destination.exists()
    destination.write_text("mine")
    ended, _ = export(made, "gguf", "model.gguf")
    assert (ended.code, "exists already" in ended.err) == (2, True)


@pytest.mark.usefixtures("inline")
def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ended = command("export", str(tmp_path), "--to", "gguf", str(tmp_path / "model.gguf"))
    assert (ended.code, "pip install 'CHECKOUT[gguf]'" in ended.err) == (2, True)


@needs_llama_cpp
@needs_gguf
@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize(
    "method",
    [UNIFORM, BY_LAYER, ROUNDED, ON_LEVELS, HEALED, HEALED_LEVELS],
    ids=["llama", "deci", "rounded", "on-levels", "healed", "healed-on-levels"],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_llama_cpp_computes_the_same(family: str, method: dict[str, Any], tmp_path: Path, job: MakeJob) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 324,
    }
    source = make_source(tmp_path / "source", family, **sizes)
    make_tokenizer().save_pretrained(source)  # 320 tokens, to which transformers adds one for qwen2
    made = job(source, **method)
    assert ("healed" in made.run().json) == ("heal" in method)
    ended, destination = export(made, "gguf", "model.gguf")
    assert ended.code == 0, ended.err
    ids_BT = some_tokens(320, length=16)[:1]
    got = LlamaCpp(destination).log_probabilities(ids_BT[0].tolist(), sizes["vocab_size"])
    expected = logits_of(load(made.output), ids_BT)[0].log_softmax(-1)
    if "quantize" in method:  # beside codes it rounds activations, to 8 bits
        assert relative_error(got, expected) < 0.08
        return
    assert relative_error(got, expected) < 0.02
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@needs_gguf
@pytest.mark.usefixtures("inline")
def test_metadata(tmp_path: Path, job: MakeJob) -> None:
    """The file names the model, what its numbers are, its special tokens and its chat template; or token ids alone."""
    source = make_source(tmp_path / "source", "llama", dtype=torch.bfloat16)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(source)
    made = job(source, **UNIFORM)
    made.run().json  # noqa: B018 - asserts the exit code
    fields = written(made)[1]
    assert fields["general.name"] == made.output.name
    assert fields["general.file_type"] == 32  # llama.cpp's number for bfloat16
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert (fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.add_bos_token"]) == (0, True)
    assert fields["tokenizer.ggml.eos_token_id"] == 1
    assert fields["tokenizer.chat_template"] == tokenizer.chat_template
    assert len(fields["tokenizer.ggml.tokens"]) == 320
    ended, destination = export(made, "gguf", "ids.gguf", "--no-vocabulary")
    assert ended.code == 0
    fields = read_gguf(destination)[0]
    assert (fields["tokenizer.ggml.model"], "tokenizer.ggml.tokens" in fields) == ("no_vocab", False)
    assert export(made, "dense", "dense", "--no-vocabulary")[0].code == 2


@needs_llama_cpp
@needs_gguf
@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("name", ["stories260K", "wiki-llama-gqa-8m"])
def test_llama_cpp_answers_in_words(name: str, tmp_path: Path, job: MakeJob, shared_dir: Path) -> None:
    """Trained models, with SentencePiece's vocabulary and with one of bytes: the same tokens, and the same answer."""
    made = job(shared_dir / "models" / name, **{"budget.keep": 0.95, "methods": [{"method": "magnitude"}]})
    made.run().json  # noqa: B018 - asserts the exit code
    ended, destination = export(made, "gguf", "model.gguf")
    assert ended.code == 0, ended.err
    tokenizer: Any = AutoTokenizer.from_pretrained(shared_dir / "models" / name)
    llama = LlamaCpp(destination)
    for text in TEXTS:
        assert llama.tokens(text) == tokenizer(text)["input_ids"], text
    prompt = tokenizer("Once upon a time", return_tensors="pt").input_ids
    said = load(made.output).float().generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    expected = tokenizer.decode([*prompt[0], *said])[len(tokenizer.decode(prompt[0])) :]
    assert llama.answer("Once upon a time", 12) == expected


@needs_llama_cpp
@needs_gguf
@pytest.mark.usefixtures("inline")
def test_llama_cpp_chats_by_the_model_s_template(tmp_path: Path, job: MakeJob) -> None:
    """What it computes of a message is the template's text, which makes transformers say the same."""
    source = make_source(tmp_path / "source", "llama", layers=2)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{{ '<s>' }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.save_pretrained(source)
    made = job(source, **UNIFORM)
    made.run().json  # noqa: B018 - asserts the exit code
    ended, destination = export(made, "gguf", "model.gguf")
    assert ended.code == 0, ended.err
    messages = [{"role": "user", "content": "a story of Anna"}]
    prompt: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    ids_BT = prompt if isinstance(prompt, Tensor) else prompt["input_ids"]
    said = load(made.output).float().generate(ids_BT, max_new_tokens=8, do_sample=False)[0, ids_BT.shape[1] :]
    answer, count = LlamaCpp(destination).chat("a story of Anna", 8)
    assert count == ids_BT.shape[1]
    assert answer == tokenizer.decode(said, skip_special_tokens=True)


STOCK: dict[str, Any] = {
    "methods": [{"method": "loss_aware", "shapes": "stock"}], "calibration.propagate": "dense", "budget.keep": 0.7,
    "budget.scope": "experts",
}  # fmt: skip
WHOLE: dict[str, Any] = {"methods": [{"method": "flat_llm", "keep": 1.0}], "budget": None}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "mscale": 0.7, "mscale_all_dim": 0.7,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("llama", {"sliding_window": None}),
    "qwen3_moe": (
        "qwen3moe",
        {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1, "num_experts": 12},
    ),
    "deepseek_v3": ("deepseek2", {"attention_bias": False, "rope_parameters": YARN}),
}
TRAINED = ("mixtral-tiny-ts", "qwen3moe-tiny-ts", "deepseekv3-tiny-ts")
OWN_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}  # fmt: skip
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


def own_tensor(name: str, stock: dict[str, Tensor], family: str, heads: dict[str, int]) -> Tensor:
    """The tensor of a file's name, put together from an ordinary checkpoint's."""
    if not name.startswith("blk."):
        return stock[f"{OUTER[name.removesuffix('.weight')]}.weight"]
    _, layer, role, _ = name.split(".")
    prefix = f"model.layers.{layer}."
    if role == "exp_probs_b":
        return stock[f"{prefix}mlp.gate.e_score_correction_bias"]
    mixture = prefix + ("block_sparse_moe" if family == "mixtral" else "mlp")
    if role == "ffn_gate_inp":
        return stock[f"{mixture}.gate.weight"]
    if role.endswith("_exps"):
        part = role.split("_")[1]
        own = IN_MIXTRAL[part] if family == "mixtral" else f"{part}_proj"
        count = len(stock[f"{mixture}.gate.weight"])
        return torch.stack([stock[f"{mixture}.experts.{expert}.{own}.weight"] for expert in range(count)])
    if role in ("attn_k_b", "attn_v_b"):
        rows = stock[f"{prefix}self_attn.kv_b_proj.weight"].unflatten(0, (4, -1))
        return rows[:, :10].transpose(1, 2) if role == "attn_k_b" else rows[:, 10:]
    tensor = stock[f"{prefix}{OWN_NAMES[role]}.weight"]
    if family == "mixtral" and role in heads:  # pairs of neighbours
        return tensor.unflatten(0, (heads[role], 2, -1)).transpose(1, 2).flatten(0, 2)
    return tensor


@needs_gguf
@pytest.mark.usefixtures("inline")
@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_holds_the_tensors_of_a_stock_checkpoint(family: str, tmp_path: Path, job: MakeJob) -> None:
    architecture, options = FAMILIES[family]
    made = job(make_source(tmp_path / "source", family, layers=2, **options), **STOCK)
    assert made.run().code == 0
    ended, destination = export(made, "gguf", "model.gguf")
    assert ended.code == 0, ended.err
    assert command("export", "--to", "stock", str(made.output), str(tmp_path / "stock")).code == 0
    fields, tensors = read_gguf(destination)
    stock = read_tensors(tmp_path / "stock")
    assert fields["general.architecture"] == architecture
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(tensor.numel() for tensor in stock.values())
    for name, tensor in tensors.items():
        assert torch.equal(tensor, own_tensor(name, stock, family, {"attn_q": 4, "attn_k": 2})), name
    field = {key.removeprefix(f"{architecture}."): value for key, value in fields.items()}
    config = json.loads((tmp_path / "stock" / "config.json").read_text())
    experts = config.get("num_local_experts") or config["n_routed_experts"]
    assert field["expert_count"] == len(tensors["blk.1.ffn_gate_inp.weight"]) == experts
    assert field["expert_used_count"] == config["num_experts_per_tok"]
    if family == "deepseek_v3":
        assert field["leading_dense_block_count"] == 1
        assert field["expert_shared_count"] == config["n_shared_experts"]
        assert (field["attention.key_length"], field["attention.key_length_mla"]) == (12 + 6, 16)
        assert field["rope.scaling.yarn_log_multiplier"] == pytest.approx(0.07)


@needs_gguf
@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob: false"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "dense MLPs between mixtures of experts"),
        ("qwen3_moe", {"attention_bias": True}, "biases on"),
        ("qwen3_moe", {"attention_bias": True, "hidden_size": 64}, "biases on k, o, q, v"),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.0}}, "YaRN with mscale 1.0 and mscale_all_dim 0.7"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave: false"),
        ("deepseek_v3", {"first_k_dense_replace": 2}, "a deepseek_v3 model without experts"),
        ("qwen2_moe", {}, "mixtures of experts"),
    ],
)
def test_what_llama_cpp_cannot_say_is_named(family: str, changes: dict[str, Any], said: str) -> None:
    fields = {**FAMILIES.get(family, ("", {}))[1], **changes}
    standard = standard_config(factories.make_config(family, num_hidden_layers=2, **fields).to_dict())
    config = checkpoint_config(standard, standard["forms"], "float32")
    assert said in "; ".join(export_faults(config, "gguf"))


@needs_gguf
@pytest.mark.usefixtures("inline")
def test_experts_that_differ_are_refused_by_name(tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", "mixtral", layers=2, **FAMILIES["mixtral"][1])
    made = job(source, **{**STOCK, "methods": [{"method": "loss_aware"}]})
    assert made.run().code == 0
    ended, destination = export(made, "gguf", "model.gguf")
    assert (ended.code, destination.exists()) == (2, False)
    assert "{method: loss_aware, shapes: stock} keeps to one" in ended.err


@needs_gguf
@pytest.mark.usefixtures("inline")
@needs_llama_cpp
@pytest.mark.parametrize("entry", [WHOLE, STOCK, FACTORS_ON_LEVELS], ids=["whole", "stock", "on-levels"])
@pytest.mark.parametrize("name", TRAINED)
def test_llama_cpp_computes_the_same_with_experts(
    name: str, entry: dict[str, Any], tmp_path: Path, job: MakeJob, shared_dir: Path
) -> None:
    check_llama_cpp(job(shared_dir / "models" / name, **entry), 512)


@needs_gguf
@pytest.mark.usefixtures("inline")
@needs_llama_cpp
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_same_at_odd_sizes(family: str, tmp_path: Path, job: MakeJob) -> None:
    """Also with YaRN, groups of experts and a correction bias."""
    check_llama_cpp(job(make_source(tmp_path / "source", family, layers=2, **FAMILIES[family][1]), **STOCK), 320)


def check_llama_cpp(made: Job, vocabulary: int) -> None:
    """Logits of a job's checkpoint in llama.cpp against ours. Its matrices of float32 meet activations of float16, and
    its codes activations of 8 bits, after which a token may choose another expert."""
    ended = made.run()
    assert ended.code == 0, ended.err
    ended, destination = export(made, "gguf", "model.gguf")
    assert ended.code == 0, ended.err
    ids_BT = some_tokens(vocabulary, length=32)[:1]
    got = LlamaCpp(destination).log_probabilities(ids_BT[0].tolist(), vocabulary)
    expected = logits_of(load(made.output), ids_BT)[0].log_softmax(-1)
    if "quantize" in made.changes:
        assert float((expected.exp() * (expected - got)).sum(-1).mean()) < 0.01
        return
    assert relative_error(got, expected) < 0.005
    # Of two tokens with logits as near as the error either may lead.
    assert (got.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.9
    chosen_T = expected.gather(-1, got.argmax(-1, keepdim=True))[:, 0]
    assert float((expected.amax(-1) - chosen_T).max()) < 0.005 * float(expected.abs().max())


CODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # other sizes of a family, and other fields of a job
    "mixtral": ({"intermediate_size": 64}, {"quantize": {"bits": 4, "group": 32, "what": "all"}}),
    "qwen3_moe": (
        {"moe_intermediate_size": 96},
        {**STOCK, "quantize": {"bits": 4, "levels": "iq4_nl"}},
    ),
    "deepseek_v3": (
        {"moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16},
        {"quantize": {"bits": 8, "group": 32}},
    ),
}


@needs_gguf
@pytest.mark.usefixtures("inline")
@pytest.mark.sample(1)
@pytest.mark.parametrize("family", CODES)
def test_codes_of_experts_are_kept(family: str, tmp_path: Path, job: MakeJob) -> None:
    """Where blocks hold them; other matrices are multiplied out: a latent's reader, and rows that end within a block.
    Scales are float16 in the file."""
    import gguf

    sizes, fields = CODES[family]
    source = make_source(tmp_path / "source", family, layers=2, hidden_size=64, **{**FAMILIES[family][1], **sizes})
    made = job(source, **({} if "methods" in fields else {"methods": [], "budget": None}), **fields)
    assert made.run().code == 0
    ended, destination = export(made, "gguf", "model.gguf")
    assert ended.code == 0, ended.err
    target = "stock" if "methods" in fields else "dense"
    assert command("export", "--to", target, str(made.output), str(tmp_path / target), "--multiply-out").code == 0
    ordinary, tensors = read_tensors(tmp_path / target), read_gguf(destination)[1]
    for name, tensor in tensors.items():
        wanted = own_tensor(name, ordinary, family, {"attn_q": 4, "attn_k": 2})
        torch.testing.assert_close(tensor, wanted, rtol=2**-11, atol=0.0, msg=name)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(destination).tensors}
    codes = {"mixtral": "Q4_0", "qwen3_moe": "IQ4_NL", "deepseek_v3": "Q8_0"}[family]
    assert {kinds[f"blk.1.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")} == {codes}
    if family == "mixtral":
        assert {kinds[f"{name}.weight"] for name in ("token_embd", "output", "blk.1.attn_q", "blk.1.attn_k")} == {codes}
    if family == "deepseek_v3":
        assert {kinds[f"blk.1.{name}.weight"] for name in ("attn_q_a", "attn_q_b", "ffn_gate_shexp")} == {codes}
        assert {kinds[f"blk.1.{name}.weight"] for name in ("attn_k_b", "attn_v_b")} == {"F32"}


@needs_gguf
@pytest.mark.usefixtures("inline")
def test_experts_without_codes_are_written_as_their_values(tmp_path: Path, job: MakeJob) -> None:
    """Their rows are no whole blocks."""
    import gguf

    source = make_source(tmp_path / "source", "mixtral", layers=2, **FAMILIES["mixtral"][1])
    made = job(source, methods=[], budget=None, quantize={"bits": 8, "group": None})
    assert made.run().code == 0
    assert any(name.endswith("weight_packed") for name in read_tensors(made.output) if ".experts." in name)
    ended, destination = export(made, "gguf", "model.gguf")
    assert ended.code == 0, ended.err
    assert command("export", "--to", "dense", str(made.output), str(tmp_path / "dense")).code == 0
    dense, tensors = read_tensors(tmp_path / "dense"), read_gguf(destination)[1]
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(destination).tensors}
    plain = {name for name, kind in kinds.items() if kind == "F32"}
    assert {f"blk.1.ffn_{part}_exps.weight" for part in ("gate", "up", "down")} <= plain
    for name in plain:
        assert torch.equal(tensors[name], own_tensor(name, dense, "mixtral", {"attn_q": 4, "attn_k": 2})), name
