"""Cases of what a job is given: manifest, options, weights, index, config, tokenizer, text.

Each function damages something in the folder of `World.fresh`, as its `Random` says.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from random import Random
from typing import Any

import yaml

from tools.soak.case import INDEX, PLAN, RUN, VERIFY, VERIFY_SOURCE, Case, Command, evaluate, write_evil
from tools.soak.mutations import HOSTILE, RAW, mutate_bytes, mutate_json, mutate_yaml
from tools.soak.world import METHODS, World, document

NAMES = ("lm_head.weight", "model.layers.0.mlp.up_proj.weight", "../x", "", "a\0", "model.embed_tokens.weight")


def manifest_case(world: World, rng: Random) -> Case:
    work = world.fresh()
    if rng.random() < 0.5:
        text = (work / "full.yaml").read_bytes()
    else:
        methods = [dict(method) for method in rng.sample(METHODS, rng.choice((1, 1, 2)))]
        text = yaml.safe_dump({**document(), "methods": methods}, sort_keys=False).encode()
    (work / "manifest.yaml").write_bytes(mutate_yaml(text, rng))
    return Case("manifest.yaml", (RUN,) if rng.random() < 0.6 else (PLAN,))


def options_case(world: World, rng: Random) -> Case:
    """`--set`, and options of the other commands."""
    world.fresh("finished" if (had := rng.random() < 0.3) else None)
    values = (
        "",
        "null",
        "-1",
        "1e308",
        ".nan",
        "[",
        "{}",
        "a: b",
        "*x",
        "!!python/name:os",
        "9" * 400,
        "\udc80",
        "\0x",
    )
    fields = ("budget.keep", "seed", "methods.0.layers", "methods.9.x", "workers.cpus", "workers.max", "a..b", "", "=",
              "output", "model.source", "calibration.text.files.0", "resume.every", "evaluation.tasks", "__class__.x",
              "workers.activation_memory_gb", "workers.gpus", "calibration.shards",
              "calibration.micro_batch")  # fmt: skip
    value = rng.choice(values[:-1] if rng.random() < 0.5 else (str(rng.choice(HOSTILE)())[:2000],)).replace("\0", "0")
    option = f"{rng.choice(fields)}={value}"
    numbers = ("-1", "0", "1", "99999999999999999999", "1e999", "nan", "", "x", "2147483648")
    commands: tuple[Command, ...] = (
        (*RUN, "--set", option), (*PLAN, "--set", option), (*PLAN, "--set", option.replace("=", "")),
        (*PLAN[:2], "--tflops", rng.choice(numbers)), (*evaluate("model"), "--window", rng.choice(numbers)),
        (*evaluate("model"), "--cpus", rng.choice(numbers)), (*evaluate("model"), "--workers", rng.choice(numbers)),
        (*evaluate("model"), "--gpus", rng.choice(("nan", "-1", "inf"))), (*VERIFY, "--bound", rng.choice(numbers)),
        ("evaluate", rng.choice(("", "/", "nowhere", "text.txt", "s3://x/y", "a/b/c", "x" * 5000)), "--text",
        "text.txt"),
        ("status", rng.choice(("", "/", "nowhere", "text.txt", "s3://x/y", "x" * 5000, "model"))),
        ("verify", rng.choice(("", "/", "nowhere", "text.txt", "s3://x/y", "x" * 5000, "model"))),
        ("run", rng.choice(("", "/", "nowhere", "model", "/dev/null", "x" * 5000))),
    )  # fmt: skip
    return Case(f"options {option[:60]!r}", (rng.choice(commands),), "finished" if had else None)


def header_case(world: World, rng: Random) -> Case:
    """A shard of the source, or of OUTPUT."""
    of_output = rng.random() < 0.25
    work = world.fresh("finished" if of_output else None)
    shards = sorted((work / ("output" if of_output else "model")).glob("*.safetensors"))
    path = rng.choice(shards)
    _damage_shard(path, rng)
    if of_output:
        return Case(path.name, (rng.choice((VERIFY, VERIFY_SOURCE, evaluate("output"))),), half="finished")
    return Case(path.name, (rng.choice((PLAN, PLAN, RUN, evaluate("model"))),))


def _damage_shard(path: Path, rng: Random) -> None:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header, body = data[8 : 8 + length], data[8 + length :]
    match rng.randrange(9):
        case 0:
            path.write_bytes(mutate_bytes(data, rng))
        case 1:
            claimed = rng.choice(
                (0, 1, length - 1, length + 1, length * 2, 10**8, 10**8 + 1, 2**63, 2**64 - 1, len(data))
            )
            path.write_bytes(struct.pack("<Q", claimed) + header + body)
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
            name = rng.choice([name for name in entries if name != "__metadata__"])
            _damage_entry(entries, name, rng)
            _write_shard(path, json.dumps(entries).encode(), body)
        case 6:
            kind = rng.randrange(4)
            if kind == 0:
                path.unlink()
            elif kind == 1:
                path.unlink()
                path.mkdir()
            elif kind == 2:
                path.unlink()
                path.symlink_to(rng.choice((path.name, "/dev/zero", "/nowhere", "../text.txt")))
            else:
                path.write_bytes(rng.choice((b"", b"\0" * 8, b"\0" * 100, b"\xff" * 8, b"PK\x03\x04" + b"\0" * 50)))
        case _:
            _write_shard(path, mutate_json(header, rng), body)


def _damage_entry(entries: dict[str, Any], name: str, rng: Random) -> None:
    entry = entries[name]
    begin, end = entry["data_offsets"]
    shift = rng.choice((1, -1, 4, 2**31, 2**62))
    changes: tuple[dict[str, Any], ...] = (
        {"dtype": rng.choice(("F32 ", "f32", "F128", "", None, 4, "BOOL", "U8", "F16", "F8_E4M3", "F4"))},
        {
            "shape": rng.choice(
                ([], [0], [-1], [2**62], [2**63], [2**32, 2**32], entry["shape"][::-1], [1.5], "x", None)
            )
        },
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


def index_case(world: World, rng: Random) -> Case:
    of_output = rng.random() < 0.2
    work = world.fresh("finished" if of_output else None)
    path = work / ("output" if of_output else "model") / INDEX
    if rng.random() < 0.5:
        path.write_bytes(mutate_json(path.read_bytes(), rng))
    else:
        index = json.loads(path.read_text())
        weights: dict[str, Any] = index["weight_map"]
        shard = next(iter(weights.values()))
        places = (
            "../model/" + shard, str(path.parent / shard), "/etc/passwd", "x.safetensors", "..", ".", "",
            "a/b.safetensors",
            "link.safetensors", "loop.safetensors", "a\0.safetensors", "..\\x.safetensors", "x" * 300 + ".safetensors",
            ".safetensors", "model", None, 3, [shard], {shard: 1}, "zero.safetensors", "../text.safetensors",
        )  # fmt: skip
        (path.parent / "loop.safetensors").symlink_to("loop.safetensors")
        (path.parent / "link.safetensors").symlink_to("../text.txt")
        (path.parent / "zero.safetensors").symlink_to("/dev/zero")
        for name in rng.sample(sorted(weights), rng.choice((1, 1, 3, len(weights)))):
            weights[name] = rng.choice(places)
        if rng.random() < 0.2:
            weights |= {f"more.{number}.weight": rng.choice(places) for number in range(rng.choice((1, 30, 20_000)))}
        path.write_text(json.dumps(index))
    if of_output:
        return Case(INDEX, (rng.choice((VERIFY, VERIFY_SOURCE, evaluate("output"))),), half="finished")
    return Case(INDEX, (rng.choice((PLAN, PLAN, RUN, evaluate("model"))),))


CONFIGS: tuple[dict[str, Any], ...] = (
    {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}, {"auto_map": "evil.Config"},
    {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}, {"model_type": "lamina"},
    {"model_type": ["llama"]},
    {"model_type": "llama\0"}, {"rope_scaling": {"type": "dynamic", "factor": -1}}, {"rope_scaling": {"factor": "x"}},
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


def config_case(world: World, rng: Random) -> Case:
    work = world.fresh()
    path = work / "model" / "config.json"
    write_evil(work / "model" / "evil.py", work / "pwned")
    if rng.random() < 0.5:
        content = {**json.loads(path.read_text()), **rng.choice(CONFIGS)}
        path.write_text(json.dumps(content))
        what = "config.json"
    else:
        path.write_bytes(mutate_json(path.read_bytes(), rng))
        what = "config.json"
    return Case(what, (rng.choice((PLAN, PLAN, PLAN, RUN, evaluate("model"))),))


def tokenizer_case(world: World, rng: Random) -> Case:
    work = world.fresh()
    folder = work / "model"
    name = rng.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "tokenizer_config.json"))
    path = folder / name
    write_evil(folder / "evil.py", work / "pwned")
    extra = rng.randrange(6)
    if extra == 0:
        other = rng.choice(("added_tokens.json", "special_tokens_map.json", "vocab.json", "merges.txt",
        "tokenizer.model",
                            "chat_template.jinja", "generation_config.json"))  # fmt: skip
        (folder / other).write_bytes(mutate_json(b'{"<s>": 0, "x": 5}', rng))
        if rng.random() < 0.3:
            path.unlink()
        name = other
    elif extra == 1 and name == "tokenizer_config.json":
        changes: tuple[dict[str, Any], ...] = (
            {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}}, {"tokenizer_class": "Evil"},
            {"auto_map": {"AutoTokenizer": [None, "evil.Tokenizer"]}, "tokenizer_class": "Evil"}, {"auto_map": "x"},
            {"tokenizer_class": 3}, {"bos_token": {"content": 5}}, {"bos_token": {"__type": "AddedToken"}},
            {"added_tokens_decoder": {"x": {}}}, {"added_tokens_decoder": {"999999": {"content": "q"}}},
            {"model_max_length": "x"}, {"extra_special_tokens": 4}, {"bos_token": "unheard-of"}, {"bos_token": None},
        )  # fmt: skip
        path.write_text(json.dumps({**json.loads(path.read_text()), **rng.choice(changes)}))
    elif extra == 2:
        path.unlink()
    else:
        path.write_bytes(mutate_json(path.read_bytes(), rng))
    return Case(name, (rng.choice((RUN, evaluate("model"), evaluate("model"))),))


def text_case(world: World, rng: Random) -> Case:
    work = world.fresh()
    path = work / f"text.{rng.choice(('txt', 'jsonl', 'json', 'parquet'))}"
    data = path.read_bytes()
    line = b'{"text": "' + b"word " * 20 + b'"}\n'
    whole = (
        b"", b"\n", b" " * 10_000, b"\0" * 5000, b"\xff\xfe" + "word ".encode("utf-16-le") * 300,
        b"\xef\xbb\xbf" + data,
        b"x" * 300_000, b"\xf0\x9f\x98\x80" * 2000, "́".encode() * 5000, b"a\r\nb\rc\n" * 500, rng.randbytes(5000),
        b'{"text": 5}\n' * 10, b'{"tex": "x"}\n', b"[1, 2]", b"null", b"NaN", b'"x"\n' * 300, b"[" * 5000,
        line * 20 + b"{",
        line * 20 + b'{"text": "\\ud800 lone"}\n', b"[" + b",".join([line.strip()] * 20) + b"]", b'{"text": null}\n',
        b'["' + b"word " * 400 + b'"]', b'["\\ud800", "' + b"word " * 400 + b'"]', b"{}" * 3,
        b'{"text": ' + b"9" * 5000 + b"}",
        b"<s></s>" * 300, b"PAR1" + b"\0" * 40 + b"PAR1", data[:-8] + b"\xff\xff\xff\x7fPAR1", data + data,
    )  # fmt: skip
    match rng.randrange(8):
        case 0 | 1 | 2:
            path.write_bytes(mutate_bytes(data, rng))
        case 3 | 4 | 5:
            path.write_bytes(rng.choice(whole))
        case 6:
            path.unlink()
            target = rng.choice(("/nowhere", path.name, "model", "/dev/null"))
            path.mkdir() if rng.random() < 0.3 else path.symlink_to(target)
        case 7:
            lines = data.split(b"\n")
            at = rng.randrange(len(lines))
            lines[at] = rng.choice((*(raw.encode() for raw in RAW), b'{"text": {}}', b'{"text": "\\u0000"}', b"\xff"))
            path.write_bytes(b"\n".join(lines))
    if rng.random() < 0.5:
        field = (
            (
                "--field",
                rng.choice(("text", "nope", "")),
            )
            if rng.random() < 0.2
            else ()
        )
        return Case(path.name, ((*evaluate("model", path.name), *field),))
    return Case(path.name, ((*RUN, "--set", f"calibration.text.files.0={path.name}"),))
