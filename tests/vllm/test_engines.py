"""Greedy tokens of vLLM are those of transformers: for every method, by our class and by vLLM's Transformers backend.

Each run of vLLM is a process of its own, for all checkpoints one after another.
"""

import json
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamina import LaminaForCausalLM
from tests.vllm.checkpoints import CASES, DIFFERING, heal, write, write_differing, write_stored
from tests.vllm.generate import LENGTH, PROMPTS

SCRIPT = "tests.vllm.generate"
OURS = ("lorc-wide", "small-heads")  # vLLM's Transformers backend knows no values beyond d, and no other heads
BACKEND = [name for name in CASES if name not in OURS]
SPLIT = ("flat_llm-mha", "lorc", "lestd", "loss_aware", "opt")
ROUNDED = {"flat_llm": 8, "loss_aware": 8, "lorc": 4, "joint_rank_k": 4}  # bits
HEALED = {"flat_llm": None, "lestd": None, "loss_aware": None, "joint_rank_k": 4, "lorc": 8}
COMPILED = ("loss_aware", "lorc")
STORED = ("dense", "flat_llm")  # those of dense linears, and of factors beside them


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in CASES:
        write(folder / name, name)
    for name in DIFFERING:
        write_differing(folder / name, name)
    return folder


def run(impl: str, parts: int, folders: list[Path], kind: str = "float32", **settings: str) -> dict[str, Any]:
    """What generate.py says of each folder, by the folder's name; vLLM chooses which cores its workers use.

    `settings`: of vLLM's environment.
    """
    options = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", **settings}  # a function goes to the workers
    command = [sys.executable, "-m", SCRIPT, impl, str(parts), kind, *map(str, folders)]
    ended = subprocess.run(command, env=os.environ | options, capture_output=True, text=True, timeout=1800, check=False)
    lines = [line.removeprefix("RESULT ") for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(folders), ended.stdout[-4000:] + ended.stderr[-4000:]
    return {Path(said["folder"]).name: said for said in map(json.loads, lines)}


@cache
def expected(folder: Path) -> list[list[int]]:
    """The greedy tokens of transformers."""
    model: Any = LaminaForCausalLM.from_pretrained(folder)
    found = []
    for ids in PROMPTS:
        out = model.generate(torch.tensor([ids]), max_new_tokens=LENGTH, do_sample=False, eos_token_id=None)
        found.append(out[0, len(ids) :].tolist())
    return found


@pytest.fixture(scope="module")
def native(root: Path) -> dict[str, Any]:
    return run("auto", 1, [root / name for name in (*CASES, *DIFFERING)])


@pytest.fixture(scope="module")
def backend(root: Path) -> dict[str, Any]:
    refused = run("transformers", 1, [root / name for name in ("lorc-wide", "by-heads")])  # in a process of their own
    return refused | run("transformers", 1, [root / name for name in (*BACKEND, "by-channels")])


@pytest.fixture(scope="module")
def on_two(root: Path) -> dict[str, Any]:
    return run("auto", 2, [root / name for name in SPLIT])


@pytest.fixture(scope="module")
def rounded_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rounded")
    for name, bits in ROUNDED.items():
        write(folder / name, name, bits=bits)
    return folder


@pytest.fixture(scope="module")
def rounded(rounded_root: Path) -> dict[str, Any]:
    return run("auto", 1, [rounded_root / name for name in ROUNDED])


@pytest.fixture(scope="module")
def stored_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    for name in STORED:
        write_stored(folder / name, name)
    return folder


@pytest.mark.parametrize("parts", [1, 2])
def test_weights_in_stored_formats_are_decoded(stored_root: Path, parts: int) -> None:
    said = run("auto", parts, [stored_root / name for name in STORED])
    for name in STORED:
        assert said[name].get("error") is None
        assert said[name]["class"] == "LaminaForVllm"
        assert said[name]["tokens"] == expected(stored_root / name)


@pytest.fixture(scope="module")
def compiled(root: Path, rounded_root: Path) -> dict[str, Any]:
    return run("auto", 1, [*(root / name for name in COMPILED), rounded_root / "flat_llm"], "float32-compiled")


@pytest.mark.parametrize("name", [*CASES, *DIFFERING])
def test_our_class_says_the_same(native: dict[str, Any], root: Path, name: str) -> None:
    assert native[name].get("error") is None
    assert native[name]["class"] == "LaminaForVllm"
    assert native[name]["copied"] == 1  # the head alone, which products read
    assert native[name]["tokens"] == expected(root / name)


@pytest.mark.parametrize("name", [*BACKEND, "by-channels"])
def test_the_transformers_backend_says_the_same(backend: dict[str, Any], root: Path, name: str) -> None:
    assert backend[name].get("error") is None
    assert backend[name]["class"] == "TransformersForCausalLM"
    assert backend[name]["tokens"] == expected(root / name)


def test_the_transformers_backend_refuses_heads_that_differ(backend: dict[str, Any]) -> None:
    for name, said in (("lorc-wide", "layer 0: values of 51 numbers"), ("by-heads", "layer 1: num_key_value_heads 1")):
        assert said in backend[name]["error"]
        assert "Transformers backend does not support such heads" in backend[name]["error"]


def test_our_class_caches_the_heads_that_a_layer_has(native: dict[str, Any]) -> None:
    """2, 1 and 2 KV heads of 32 numbers, keys and values."""
    assert native["by-heads"]["cached"] == 5 * 2 * 32
    assert native["by-channels"]["cached"] == 6 * 2 * 32


@pytest.mark.parametrize("name", SPLIT)
def test_two_devices_say_the_same(on_two: dict[str, Any], root: Path, name: str) -> None:
    assert on_two[name].get("error") is None
    assert on_two[name]["tokens"] == expected(root / name)


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_weights_say_the_same(rounded: dict[str, Any], rounded_root: Path, name: str) -> None:
    """No CPU kernel computes with codes in float32: they are multiplied out."""
    assert rounded[name].get("error") is None
    assert rounded[name]["class"] == "LaminaForVllm"
    assert rounded[name]["packed"] == 0
    assert rounded[name]["tokens"] == expected(rounded_root / name)


def test_healed_checkpoints_say_the_same(tmp_path: Path) -> None:
    """Each form is written back as it was stored."""
    folders = [heal(write(tmp_path / name, name, bits=bits)) for name, bits in HEALED.items()]
    for name, one in run("auto", 1, folders).items():
        assert one.get("error") is None
        assert one["class"] == "LaminaForVllm"
        assert one["tokens"] == expected(tmp_path / name)


@pytest.mark.parametrize("name", [*COMPILED, "flat_llm"])
def test_compiled_it_says_the_same(compiled: dict[str, Any], root: Path, rounded_root: Path, name: str) -> None:
    assert compiled[name].get("error") is None
    assert compiled[name]["tokens"] == expected((root if name in COMPILED else rounded_root) / name)


def test_kernels_take_factors_of_four_bits(root: Path, rounded_root: Path) -> None:
    """In bfloat16, those with widths that 32 divides: 26 of 28. Most of the tokens are those of float32."""
    said = run("auto", 1, [root / "flat_llm", rounded_root / "joint_rank_k"], "bfloat16")
    assert (said["flat_llm"].get("packed"), said["joint_rank_k"].get("packed")) == (0, 26), said
    for name, folder in (("flat_llm", root), ("joint_rank_k", rounded_root)):
        assert share_of_equal_tokens(said[name], folder / name) > 0.6, said[name]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="vLLM has builds by instruction set for x86 alone")
def test_without_the_kernels_operator_factors_are_multiplied_out(rounded_root: Path) -> None:
    """vLLM's build for CPUs with AVX2 alone offers the kernel of four bits, and lacks its operator."""
    said = run("auto", 1, [rounded_root / "joint_rank_k"], "bfloat16-avx2")["joint_rank_k"]
    assert said.get("error") is None
    assert said["packed"] == 0
    assert share_of_equal_tokens(said, rounded_root / "joint_rank_k") > 0.6, said


def share_of_equal_tokens(said: dict[str, Any], folder: Path) -> float:
    """Of the tokens that transformers says in the checkpoint's own dtype."""
    both = zip(said["tokens"], expected(folder), strict=True)
    equal = [found == meant for tokens in both for found, meant in zip(*tokens, strict=True)]
    return sum(equal) / (len(PROMPTS) * LENGTH)


@pytest.mark.parametrize("name", CASES)
def test_the_cache_of_a_cpu_is_as_wide_as_keys(native: dict[str, Any], root: Path, name: str) -> None:
    """Its kernels know one width of keys and values, from a list: nothing is saved, and wide latents cost more."""
    config = json.loads((root / name / "config.json").read_text())
    groups, head_dim = config["num_key_value_heads"], config["head_dim"]
    wide = {"lorc-wide": 64, "small-heads": 32}.get(name, head_dim)
    assert native[name]["cached"] == config["num_hidden_layers"] * groups * 2 * wide
    if name == "lorc-wide":
        assert LaminaForCausalLM.from_pretrained(root / name).config.served_value_width() == 64  # 51, in sixteens


def without(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.1.self_attn.q_proj.second"]


def of_another_shape(tensors: dict[str, Any]) -> None:
    tensors["model.layers.1.self_attn.v_proj.weight"] = torch.zeros(34, 128)


def strange(tensors: dict[str, Any]) -> None:
    tensors["model.layers.1.self_attn.q_proj.third"] = torch.zeros(3)


def without_a_scale(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.1.self_attn.q_proj.first.weight_scale"]


def with_few_scales(tensors: dict[str, Any]) -> None:
    name = "model.layers.1.self_attn.q_proj.first.weight_scale"
    tensors[name] = tensors[name][:, :1].contiguous()


def of_other_positions(tensors: dict[str, Any]) -> None:
    tensors["model.layers.0.self_attn.query_key.pivoted.indices"].zero_()


Q = "model.layers.1.self_attn.q_proj"
WRONG: list[tuple[str, str, int | None, Any]] = [  # message, case, bits, change
    (f"lacks 1 tensors that its config.json describes: {Q}.second", "flat_llm", None, without),
    ("v_proj.weight is of shape (34, 128), config.json's forms ask for (32, 128)", "flat_llm", None, of_another_shape),
    (f"the checkpoint has {Q}.third, which config.json's forms do not", "flat_llm", None, strange),
    (f"lacks 1 tensors that its config.json describes: {Q}.first.weight_scale", "flat_llm", 8, without_a_scale),
    (f"{Q}.first.weight_scale is of shape (64, 1), config.json's forms ask", "flat_llm", 4, with_few_scales),
    ("the indices of pivoted q, k are not 64 ascending positions below 192", "loss_aware", None, of_other_positions),
]


def test_wrong_input(tmp_path: Path) -> None:
    """An error that says what is wrong, and no model."""
    messages, folders = [], []
    for index, (message, name, bits, change) in enumerate(WRONG):
        folders.append(write(tmp_path / str(index), name, bits=bits))
        messages.append(message)
        tensors = load_file(folders[-1] / "model.safetensors")
        change(tensors)
        save_file(tensors, folders[-1] / "model.safetensors", {"format": "pt"})
    forms, record, short = (write(tmp_path / name, "flat_llm") for name in ("form", "record", "short"))
    config = json.loads((forms / "config.json").read_text())
    config["forms"][1]["q"]["form"] = "of tomorrow"
    (forms / "config.json").write_text(json.dumps(config))
    (record / "compression.json").write_text(json.dumps({"version": 1, "tensors": {}, "shards": {"a": {"size": 1}}}))
    with (short / "model.safetensors").open("r+b") as shard:
        shard.truncate(shard.seek(0, 2) - 100)
    messages += ["layer 1, q: unknown form 'of tomorrow'", "a: missing", "bytes, its header describes"]
    said = run("auto", 1, [*folders, forms, record, short])
    for message, one in zip(messages, said.values(), strict=True):
        assert "tokens" not in one, message
        assert message in one["error"]


def test_what_two_devices_do_not_divide(tmp_path: Path) -> None:
    folder = write(tmp_path / "odd", "flat_llm")
    config = json.loads((folder / "config.json").read_text())
    for role in ("gate", "up", "down"):
        config["forms"][1][role]["rank"] = 95
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", SCRIPT, "auto", "2", "float32", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert "layer 1: 95 channels of the MLP cannot be split over 2 devices" in ended.stdout + ended.stderr
    assert '"tokens"' not in ended.stdout
