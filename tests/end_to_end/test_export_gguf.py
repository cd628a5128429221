"""`export --to gguf`: what is in the file, read by the package gguf, is the model; and llama.cpp agrees where it is."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.end_to_end.jobs import Job, command, load, logits_of, relative_error, some_tokens
from tests.end_to_end.sources import make_source
from tests.end_to_end.test_export import METHODS, export
from tests.factories import make_tokenizer
from tests.llama_cpp import LlamaCpp, needs_llama_cpp

MakeJob = Callable[..., Job]
needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf, an extra, is not installed")
ROLES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
}  # fmt: skip
TEXTS = (
    "Once upon a time, there was a girl.", " leading", "tail ", "one\ntwo\n\n three\ttabs\r\n", "Zoë's 3rd café 😀!",
    "I'LL don't we've 123456 3..3", "中文字", "special <s> and </s> here", "x",
)  # fmt: skip
UNIFORM = {"methods": [{"method": "flat_llm", "ranks": {"value": 9, "mlp": 33}}], "budget": None}
ROUNDED = {"methods": [], "budget": None, "quantize": {"bits": 4, "group": 32, "what": "all"}}
BY_LAYER = {"methods": [{"method": "flat_llm", "layers": [1], "ranks": {"mlp": 33}}], "budget": None}


def written(
    made: Job, name: str = "model.gguf", vocabulary: bool = True, options: Sequence[str] = ()
) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    """(what the command said, the fields, the tensors) of an export."""
    ended, destination = export(made, "gguf", name, *options, *([] if vocabulary else ["--no-vocabulary"]))
    assert ended.code == 0, ended.err
    return (ended.json, *read_gguf(destination))


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields and the tensors of a file."""
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in reader.tensors
    }
    return fields, tensors


def as_llama(fields: dict[str, Any], tensors: dict[str, Tensor], rope: dict[str, Any] | None = None) -> Any:
    """What llama.cpp's `llama` and `deci` would compute, as transformers' class: MLPs filled up with zeros."""
    arch = fields["general.architecture"]
    field = {key.removeprefix(f"{arch}."): value for key, value in fields.items()}
    first = {key: value[0] if isinstance(value, list) else value for key, value in field.items()}
    widths = field["feed_forward_length"] if arch == "deci" else [field["feed_forward_length"]] * field["block_count"]
    heads = {"attn_q": first["attention.head_count"], "attn_k": first["attention.head_count_kv"]}
    config = LlamaConfig(
        hidden_size=field["embedding_length"], intermediate_size=max(widths), vocab_size=field["vocab_size"],
        num_hidden_layers=field["block_count"], num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        head_dim=field["attention.key_length"], rms_norm_eps=field["attention.layer_norm_rms_epsilon"],
        rope_parameters=rope or {"rope_type": "default", "rope_theta": field["rope.freq_base"]},
        tie_word_embeddings="output.weight" not in tensors, attention_bias="blk.0.attn_q.bias" in tensors,
    )  # fmt: skip
    state = {}
    for name, tensor in tensors.items():
        layer, role, kind = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name).groups()  # type: ignore[union-attr]
        if role == "rope_freqs":
            continue
        if role in heads:  # back from pairs of neighbours to halves
            tensor = tensor.unflatten(0, (heads[role], -1, 2)).transpose(1, 2).flatten(0, 2)
        if layer and role.startswith("ffn_") and tensor.ndim == 2:
            missing = max(widths) - widths[int(layer)]
            tensor = torch.nn.functional.pad(tensor, (0, missing) if role == "ffn_down" else (0, 0, 0, missing))
        prefix = f"model.layers.{layer}." if layer else ""
        state[f"{prefix}{ROLES[role]}.{kind}"] = tensor
    model = LlamaForCausalLM(config)
    if config.attention_bias:
        state |= {
            name: torch.zeros_like(t) for name, t in model.state_dict().items() if name.endswith("o_proj.bias")
        } | state
    missing_keys, unexpected = model.load_state_dict({key: t.float() for key, t in state.items()}, strict=False)
    assert not unexpected
    assert missing_keys == (["lm_head.weight"] if config.tie_word_embeddings else [])
    return model.eval()


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
def test_codes_are_kept(tmp_path: Path, job: MakeJob) -> None:
    """Where blocks hold them, narrow MLPs and the ends among them; the file is as much smaller."""
    import gguf

    source = make_source(tmp_path / "source", "llama", hidden_size=64, intermediate_size=128)
    ranks = {"value": 16, "mlp": 64}
    made = job(
        source, budget=None, methods=[{"method": "flat_llm", "ranks": ranks}],
        **{"quantize": {"bits": 4, "group": 64, "what": "all"}},
    )  # fmt: skip
    made.run().json  # noqa: B018 - asserts the exit code
    _, fields, tensors = written(made)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(made.root / "model.gguf").tensors}
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert {kinds[f"{name}.weight"] for name in ("blk.0.ffn_up", "blk.1.attn_q", "token_embd", "output")} == {"Q4_0"}
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
@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("method", [UNIFORM, BY_LAYER, ROUNDED], ids=["llama", "deci", "rounded"])
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
    made.run().json  # noqa: B018 - asserts the exit code
    ended, destination = export(made, "gguf", "model.gguf")
    assert ended.code == 0, ended.err
    ids_BT = some_tokens(320, length=16)[:1]
    got = LlamaCpp(destination).log_probabilities(ids_BT[0].tolist(), sizes["vocab_size"])
    expected = logits_of(load(made.output), ids_BT)[0].log_softmax(-1)
    if method is ROUNDED:  # beside codes it rounds activations, to 8 bits
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
