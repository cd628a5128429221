"""Hostile inputs of a job: manifest, options, weights, index, config, codes, tokenizer, text.

Each function damages the folder of `World.fresh` as its `Random` says, and returns the commands to run there.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from tests.encoders import encode_model
from tools.soak.mutations import HOSTILE, RAW, mutate_bytes, mutate_json, mutate_tree, mutate_yaml
from tools.soak.world import INDEX, METHODS, PLAN, RUN, VERIFY, VERIFY_SOURCE, Case, Command, World, document, evaluate

NAMES = ("lm_head.weight", "model.layers.0.mlp.up_proj.weight", "../x", "", "a\0", "model.embed_tokens.weight")
EVIL = "evil.py"


def write_evil(folder: Path, mark: Path) -> None:
    """Write Python beside a checkpoint that leaves a mark when it is imported."""
    code = f"open({str(mark)!r}, 'w').close()\nclass Config: ...\nclass Tokenizer: ...\nclass Model: ...\n"
    (folder / EVIL).write_text(code)


def _manifest(world: World, rng: Random) -> Case:
    work = world.fresh()
    if rng.random() < 0.5:
        text = (work / "full.yaml").read_bytes()
    else:
        methods = [dict(method) for method in rng.sample(METHODS, rng.choice((1, 1, 2)))]
        text = yaml.safe_dump({**document(), "methods": methods}, sort_keys=False).encode()
    (work / "manifest.yaml").write_bytes(mutate_yaml(text, rng))
    return Case("manifest.yaml", (RUN,) if rng.random() < 0.6 else (PLAN,))


OPTION_VALUES = ("", "null", "-1", "1e308", ".nan", "[", "{}", "a: b", "*x", "!!python/name:os", "9" * 400, "\udc80")
OPTION_FIELDS = (
    "budget.keep", "seed", "methods.0.layers", "methods.9.x", "workers.cpus", "workers.max", "a..b", "", "=",
    "output", "model.source", "calibration.text.files.0", "resume.every", "evaluation.tasks", "__class__.x",
    "workers.activation_memory_gb", "workers.gpus", "calibration.shards", "calibration.micro_batch",
)  # fmt: skip
NUMBERS = ("-1", "0", "1", "99999999999999999999", "1e999", "nan", "", "x", "2147483648")
PLACES = ("", "/", "nowhere", "text.txt", "s3://x/y", "x" * 5000)


def _options(world: World, rng: Random) -> Case:
    """`--set`, and options of the other commands."""
    stop = "finished" if rng.random() < 0.3 else None
    world.fresh(stop)
    value = rng.choice(OPTION_VALUES if rng.random() < 0.5 else (str(rng.choice(HOSTILE))[:2000],)).replace("\0", "0")
    option = f"{rng.choice(OPTION_FIELDS)}={value}"
    scored, number, place = evaluate("model"), rng.choice(NUMBERS), rng.choice((*PLACES, "model"))
    commands: tuple[Command, ...] = (
        (*RUN, "--set", option), (*PLAN, "--set", option), (*PLAN, "--set", option.replace("=", "")),
        (*PLAN[:2], "--tflops", number), (*scored, "--window", number), (*scored, "--cpus", number),
        (*scored, "--workers", number), (*scored, "--gpus", rng.choice(("nan", "-1", "inf"))),
        (*VERIFY, "--bound", number), ("evaluate", rng.choice((*PLACES, "a/b/c")), "--text", "text.txt"),
        ("status", place), ("verify", place), ("run", rng.choice((*PLACES, "model", "/dev/null"))),
    )  # fmt: skip
    return Case(f"options {option[:60]!r}", (rng.choice(commands),), stop)


def _header(world: World, rng: Random) -> Case:
    """A shard of the source, or of OUTPUT."""
    of_output = rng.random() < 0.25
    work = world.fresh("finished" if of_output else None)
    path = rng.choice(sorted((work / ("output" if of_output else "model")).glob("*.safetensors")))
    _damage_shard(path, rng)
    return _reads(path.name, of_output, rng)


def _reads(name: str, of_output: bool, rng: Random) -> Case:
    """A command that reads a damaged file of the source or of OUTPUT."""
    if of_output:
        return Case(name, (rng.choice((VERIFY, VERIFY_SOURCE, evaluate("output"))),), stop="finished")
    return Case(name, (rng.choice((PLAN, PLAN, RUN, evaluate("model"))),))


def _damage_shard(path: Path, rng: Random) -> None:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header, body = data[8 : 8 + length], data[8 + length :]
    match rng.randrange(9):
        case 0:
            path.write_bytes(mutate_bytes(data, rng))
        case 1:
            lengths = (0, 1, length - 1, length + 1, length * 2, 10**8, 10**8 + 1, 2**63, 2**64 - 1, len(data))
            path.write_bytes(struct.pack("<Q", rng.choice(lengths)) + header + body)
        case 2:
            os.truncate(path, rng.randrange(len(data)))
        case 3:
            numbers = bytearray(body)
            for _ in range(rng.randint(1, 8)):
                at = rng.randrange(len(body) // 4) * 4
                numbers[at : at + 4] = struct.pack("<f", rng.choice((float("nan"), float("inf"), 1e38, -1e38, 1e-40)))
            path.write_bytes(data[: 8 + length] + numbers)
        case 4 | 5:
            entries = json.loads(header)
            _damage_entry(entries, rng.choice([name for name in entries if name != "__metadata__"]), rng)
            _write_shard(path, json.dumps(entries).encode(), body)
        case 6:
            path.unlink()
            match rng.randrange(4):
                case 1:
                    path.mkdir()
                case 2:
                    path.symlink_to(rng.choice((path.name, "/dev/zero", "/nowhere", "../text.txt")))
                case 3:
                    path.write_bytes(rng.choice((b"", b"\0" * 8, b"\0" * 100, b"\xff" * 8, b"PK\x03\x04" + b"\0" * 50)))
        case _:
            _write_shard(path, mutate_json(header, rng), body)


def _damage_entry(entries: dict[str, Any], name: str, rng: Random) -> None:
    entry = entries[name]
    begin, end = entry["data_offsets"]
    shift = rng.choice((1, -1, 4, 2**31, 2**62))
    shapes: tuple[Any, ...] = ([], [0], [-1], [2**62], [2**63], [2**32, 2**32], entry["shape"][::-1], [1.5], "x", None)
    changes: tuple[dict[str, Any], ...] = (
        {"dtype": rng.choice(("F32 ", "f32", "F128", "", None, 4, "BOOL", "U8", "F16", "F8_E4M3", "F4"))},
        {"shape": rng.choice(shapes)},
        {"data_offsets": rng.choice(([begin + shift, end + shift], [end, begin], [0, 0], [begin, end + shift], [0]))},
        {"data_offsets": [begin, begin], "shape": [0, 48]},
        {"shape": [2**20] * 20, "data_offsets": [0, 2**61]},
        {"extra": 1},
    )
    entry.update(rng.choice(changes))
    if rng.random() < 0.2:
        entries[rng.choice(NAMES)] = dict(entry)


def _write_shard(path: Path, header: bytes, body: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + body)


def _index(world: World, rng: Random) -> Case:
    of_output = rng.random() < 0.2
    work = world.fresh("finished" if of_output else None)
    path = work / ("output" if of_output else "model") / INDEX
    if rng.random() < 0.5:
        path.write_bytes(mutate_json(path.read_bytes(), rng))
        return _reads(INDEX, of_output, rng)
    index = json.loads(path.read_text())
    weights: dict[str, Any] = index["weight_map"]
    shard = next(iter(weights.values()))
    places = (
        "../model/" + shard, str(path.parent / shard), "/etc/passwd", "x.safetensors", "..", ".", "",
        "a/b.safetensors", "link.safetensors", "loop.safetensors", "a\0.safetensors", "..\\x.safetensors",
        "x" * 300 + ".safetensors", ".safetensors", "model", None, 3, [shard], {shard: 1}, "zero.safetensors",
        "../text.safetensors",
    )  # fmt: skip
    for name, target in (("loop", "loop.safetensors"), ("link", "../text.txt"), ("zero", "/dev/zero")):
        (path.parent / f"{name}.safetensors").symlink_to(target)
    for name in rng.sample(sorted(weights), rng.choice((1, 1, 3, len(weights)))):
        weights[name] = rng.choice(places)
    if rng.random() < 0.2:
        weights |= {f"more.{number}.weight": rng.choice(places) for number in range(rng.choice((1, 30, 20_000)))}
    path.write_text(json.dumps(index))
    return _reads(INDEX, of_output, rng)


CONFIGS: tuple[dict[str, Any], ...] = (
    {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}, {"auto_map": "evil.Config"},
    {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}, {"model_type": "lamina"},
    {"model_type": ["llama"]}, {"model_type": "llama\0"},
    {"rope_scaling": {"type": "dynamic", "factor": -1}}, {"rope_scaling": {"factor": "x"}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 0}}, {"rope_scaling": {"rope_type": "llama3"}},
    {"rope_scaling": {"rope_type": "longrope", "short_factor": [], "long_factor": []}}, {"rope_scaling": [1]},
    {"rope_parameters": {"rope_type": "linear", "factor": float("nan")}}, {"rope_parameters": "x"},
    {"rope_parameters": {"rope_type": "linear", "factor": 0}}, {"rope_parameters": {"rope_theta": None}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, {"rope_theta": 0}, {"rope_theta": "x"},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": "x"}},
    {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1e308}}, {"tie_word_embeddings": True},
    {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": "x", "long_factor": [1.0]}},
    {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}, {"rope_parameters": []},
    {"num_hidden_layers": 10**9}, {"num_hidden_layers": 10_000}, {"num_hidden_layers": 1}, {"num_hidden_layers": -1},
    {"vocab_size": 10**12}, {"hidden_size": 2**40}, {"max_position_embeddings": 2**40}, {"max_position_embeddings": 1},
    {"hidden_act": "nope"}, {"hidden_act": ["silu"]}, {"hidden_act": {}}, {"head_dim": 15}, {"head_dim": 0.5},
    {"num_key_value_heads": 3}, {"num_key_value_heads": 0}, {"attention_bias": True}, {"mlp_bias": True},
    {"attention_bias": "yes"}, {"tie_word_embeddings": "no"}, {"rms_norm_eps": -1}, {"rms_norm_eps": "x"},
    {"rms_norm_eps": float("nan")}, {"torch_dtype": "evil"}, {"dtype": "float3"}, {"quantization_config": {"bits": 4}},
    {"quantization_config": "x"}, {"bos_token_id": "x"}, {"bos_token_id": -5}, {"eos_token_id": [1, "x"]},
    {"pad_token_id": 10**12}, {"architectures": "x"}, {"architectures": [None]}, {"attn_implementation": "evil"},
    {"_attn_implementation": "evil/kernel"}, {"_name_or_path": "../../x"}, {"transformers_version": 3},
    {"model_type": "mistral", "sliding_window": 0}, {"model_type": "mistral", "sliding_window": "x"},
    {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": -1},
    {"model_type": "qwen2", "layer_types": ["x"]}, {"model_type": "qwen3", "layer_types": 3}, {"model_type": "gptj"},
    {"model_type": "opt"}, {"initializer_range": None}, {"id2label": 5}, {"num_labels": -1}, {"problem_type": "x"},
    {"return_dict": "x"}, {"output_attentions": 7}, {"use_cache": None}, {"pretraining_tp": 4}, {"is_decoder": 5},
    {"attribute_map": {"hidden_size": "vocab_size"}}, {"base_model_tp_plan": 3}, {"__class__": "x"}, {"to_dict": 1},
)  # fmt: skip


QUANTIZED = (
    "fp8 blocks",
    "fp8 plain",
    "fp8 rows",
    "float",
    "int4",
    "int4 zeros",
    "int8",
    "gptq",
    "gptq ordered",
    "awq",
)
QUANTIZATION_FIELDS: tuple[dict[str, Any], ...] = (
    {"spin": 1}, {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, {"adapter": {"rank": 8}},
    {"sparsity_config": {"format": "sparse-bitmask"}}, {"checkpoint_format": "gptq_v2"}, {"format": "gptq_v2"},
    {"dynamic": {"-:.*q_proj": {}}}, {"dynamic": {"+:.*down": {"bits": 8}}}, {"dynamic": {"+:(": {}}}, {"bits": 3},
    {"group_size": 0}, {"group_size": 10**30}, {"desc_act": True}, {"ignore": ["re:.*"]}, {"ignore": ["Linear"]},
    {"config_groups": {"W8A8": ["Linear"]}}, {"config_groups": {"g": {"targets": ["Linear"]}}}, {"config_groups": []},
    {"weight_block_size": [0, 128]}, {"weight_block_size": "16x16"}, {"quant_method": ["gptq"]}, {"version": "gemv"},
)  # fmt: skip
BESIDE = ("self_attn.q_proj.bias", "mlp.up_proj.lora_A.weight", "self_attn.k_scale", "mlp.down_proj.weight_zero_point")


def _quantized(world: World, rng: Random) -> Case:
    """Codes under a `quantization_config` with fields that are unknown, contradict the codes, or are no fields."""
    work = world.fresh()
    model, kind = work / "model", rng.choice(QUANTIZED)
    encoded, decoded = encode_model(model, work / "tmp", kind)
    for folder in (model, decoded):
        shutil.rmtree(folder)
    encoded.rename(model)
    config = json.loads((model / "config.json").read_text())
    if rng.random() < 0.5:
        config["quantization_config"] |= rng.choice(QUANTIZATION_FIELDS)
    else:
        config["quantization_config"] = mutate_tree(config["quantization_config"], rng, HOSTILE)
    (model / "config.json").write_text(json.dumps(config))
    if rng.random() < 0.3:
        _damage_shard(rng.choice(sorted(model.glob("*.safetensors"))), rng)
    elif rng.random() < 0.3:
        name = f"model.layers.0.{rng.choice(BESIDE)}"
        save_file({name: torch.full((4,), rng.choice((0.0, 1.0)))}, model / "more.safetensors")
        index = json.loads((model / INDEX).read_text())
        index["weight_map"][name] = "more.safetensors"
        (model / INDEX).write_text(json.dumps(index))
    return Case(kind, (rng.choice((PLAN, PLAN, RUN, evaluate("model"))),))


def _config(world: World, rng: Random) -> Case:
    work = world.fresh()
    path = work / "model" / "config.json"
    write_evil(path.parent, work / "pwned")
    if rng.random() < 0.5:
        path.write_text(json.dumps({**json.loads(path.read_text()), **rng.choice(CONFIGS)}))
    else:
        path.write_bytes(mutate_json(path.read_bytes(), rng))
    return Case(path.name, (rng.choice((PLAN, PLAN, PLAN, RUN, evaluate("model"))),))


TOKENIZER_CONFIGS: tuple[dict[str, Any], ...] = (
    {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}}, {"tokenizer_class": "Evil"},
    {"auto_map": {"AutoTokenizer": [None, "evil.Tokenizer"]}, "tokenizer_class": "Evil"}, {"auto_map": "x"},
    {"tokenizer_class": 3}, {"bos_token": {"content": 5}}, {"bos_token": {"__type": "AddedToken"}},
    {"added_tokens_decoder": {"x": {}}}, {"added_tokens_decoder": {"999999": {"content": "q"}}},
    {"model_max_length": "x"}, {"extra_special_tokens": 4}, {"bos_token": "unheard-of"}, {"bos_token": None},
)  # fmt: skip
TOKENIZER_FILES = (
    "added_tokens.json", "special_tokens_map.json", "vocab.json", "merges.txt", "tokenizer.model",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def _tokenizer(world: World, rng: Random) -> Case:
    work = world.fresh()
    folder = work / "model"
    path = folder / rng.choice(("tokenizer.json", "tokenizer_config.json"))
    write_evil(folder, work / "pwned")
    kind = rng.randrange(6)
    if kind == 0:
        other = folder / rng.choice(TOKENIZER_FILES)
        other.write_bytes(mutate_json(b'{"<s>": 0, "x": 5}', rng))
        if rng.random() < 0.3:
            path.unlink()
        path = other
    elif kind == 1 and path.name == "tokenizer_config.json":
        path.write_text(json.dumps({**json.loads(path.read_text()), **rng.choice(TOKENIZER_CONFIGS)}))
    elif kind == 2:
        path.unlink()
    else:
        path.write_bytes(mutate_json(path.read_bytes(), rng))
    return Case(path.name, (rng.choice((RUN, evaluate("model"), evaluate("model"))),))


LINE = b'{"text": "' + b"word " * 20 + b'"}\n'
TEXTS = (
    b"", b"\n", b" " * 10_000, b"\0" * 5000, b"\xff\xfe" + "word ".encode("utf-16-le") * 300,
    b"x" * 300_000, b"\xf0\x9f\x98\x80" * 2000, "́".encode() * 5000, b"a\r\nb\rc\n" * 500,
    b'{"text": 5}\n' * 10, b'{"tex": "x"}\n', b"[1, 2]", b"null", b"NaN", b'"x"\n' * 300, b"[" * 5000,
    LINE * 20 + b"{", LINE * 20 + b'{"text": "\\ud800 lone"}\n', b"[" + b",".join([LINE.strip()] * 20) + b"]",
    b'{"text": null}\n', b'["' + b"word " * 400 + b'"]', b'["\\ud800", "' + b"word " * 400 + b'"]', b"{}" * 3,
    b'{"text": ' + b"9" * 5000 + b"}", b"<s></s>" * 300, b"PAR1" + b"\0" * 40 + b"PAR1",
)  # fmt: skip
LINES = (*(raw.encode() for raw in RAW), b'{"text": {}}', b'{"text": "\\u0000"}', b"\xff")


def _text(world: World, rng: Random) -> Case:
    work = world.fresh()
    path = work / f"text.{rng.choice(('txt', 'jsonl', 'json', 'parquet'))}"
    data = path.read_bytes()
    match rng.randrange(8):
        case 0 | 1 | 2:
            path.write_bytes(mutate_bytes(data, rng))
        case 3 | 4 | 5:
            of_data = (b"\xef\xbb\xbf" + data, data[:-8] + b"\xff\xff\xff\x7fPAR1", data + data, rng.randbytes(5000))
            path.write_bytes(rng.choice((*TEXTS, *of_data)))
        case 6:
            path.unlink()
            target = rng.choice(("/nowhere", path.name, "model", "/dev/null"))
            path.mkdir() if rng.random() < 0.3 else path.symlink_to(target)
        case 7:
            lines = data.split(b"\n")
            lines[rng.randrange(len(lines))] = rng.choice(LINES)
            path.write_bytes(b"\n".join(lines))
    if rng.random() < 0.5:
        field = ("--field", rng.choice(("text", "nope", ""))) if rng.random() < 0.2 else ()
        return Case(path.name, ((*evaluate("model", path.name), *field),))
    return Case(path.name, ((*RUN, "--set", f"calibration.text.files.0={path.name}"),))


KINDS: dict[str, Callable[[World, Random], Case]] = {
    "manifest": _manifest,
    "options": _options,
    "header": _header,
    "index": _index,
    "config": _config,
    "quantized": _quantized,
    "tokenizer": _tokenizer,
    "text": _text,
}
