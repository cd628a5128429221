"""The table of real checkpoints as servers: answers, rates and what a chat client would not expect."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import factories
from tests.end_to_end.exports import needs_gguf, read_gguf
from tools.benchmarks import served

WORDS = ["Paris", " is", " nice"]


class Successor:
    """A model whose most likely token is the last one plus one."""

    def __call__(self, ids_BT: torch.Tensor) -> Any:
        return SimpleNamespace(logits=torch.nn.functional.one_hot(ids_BT + 1, 16) * 2.0)


class Chat(served.Server):
    """A server that answers with the words, and keeps to what it is asked for, unless it is `deaf`."""

    deaf = False

    def post(self, route: str, **body: Any) -> str:
        said = "".join(WORDS)
        if body.get("stream"):
            words = WORDS[:-1] if self.deaf else WORDS
            parts = [json.dumps({"choices": [{"delta": {"content": word}}]}) for word in words]
            return "\n\n".join(f"data: {part}" for part in (*parts, "[DONE]")) + "\n\n"
        stopped = bool(body.get("stop")) and not self.deaf
        content = said.split(body["stop"][0])[0] if stopped else said
        tokens = {"content": [{"token": word} for word in WORDS]}
        choice = {"message": {"content": content}, "finish_reason": "stop" if stopped else "length"}
        return json.dumps({"choices": [{**choice, "logprobs": tokens}]})


def test_answers_that_are_the_most_likely_ones() -> None:
    assert served.agreement(Successor(), [[1, 2], [5]], [[3, 4, 5], [6]]) == (2, 0.0)
    assert served.agreement(Successor(), [[1, 2], [5]], [[3, 9, 10], [6]]) == (1, 2.0)


def test_the_first_token_is_no_decoding() -> None:
    clock = [0.0]

    def answer(new: int) -> None:
        clock[0] += 5 + new  # a prefill of five seconds

    options = argparse.Namespace(new=8, repeats=3)
    assert served.decoding_rate(lambda: clock[0], answer, 2, options) == 2.0


def test_what_a_chat_client_gets() -> None:
    chat = Chat("http://nowhere", "vllm", [])
    assert served.chat_faults(chat) == []
    deaf = type("Deaf", (Chat,), {"deaf": True})("http://nowhere", "vllm", [])
    streamed, stopped = served.chat_faults(deaf)
    assert streamed == "streamed 'Paris is', whole 'Paris is nice'"
    assert stopped == "not stopped at 'nice': 'Paris is nice'"


def test_the_line_names_the_gap() -> None:
    each = {"rates": [1.0, 2000.0], "memory": 4 * 2**20, "predicted": 5 * 2**20, "chat": "ok"}
    line = served.row("a/b.gguf", "llama.cpp", "the file's", each, (19, 0.0123))
    assert line == "| b.gguf | llama.cpp | the file's | 1.0 | 2,000.0 | 4 | 5 | +25.0% | 19 of 20 (gap 0.012) | ok |"


def test_the_peak_is_that_of_a_process_and_its_children() -> None:
    held = "held = b'x' * (64 << 20); print(flush=True); input()"
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {held!r}])"
    with subprocess.Popen([sys.executable, "-c", inner], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        peak = served.Peak(process.pid)
        deadline = time.monotonic() + 20
        while peak.bytes < 64 << 20 and time.monotonic() < deadline:
            time.sleep(0.05)
        peak.end()
        process.communicate(b"\n")
    assert 64 << 20 <= peak.bytes < 256 << 20


def test_the_prediction_has_the_cache_that_an_engine_reserves(tmp_path: Path) -> None:
    config = {**factories.make_config("llama", num_hidden_layers=2).to_dict(), "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = argparse.Namespace(
        dtype="bfloat16", new=16, context=512, sequences=4, vllm="python", llama_cpp="", port=8093
    )
    cache = 2 * 2 * 2 * 32 * 512 * 4  # bytes, layers, keys and values, their width, tokens, sequences
    vllm, cpp = (served.serving(str(tmp_path), engine, options) for engine in ("vllm", "llama.cpp"))
    assert vllm.cache_bytes == cpp.cache_bytes == cache
    assert served.serving(str(tmp_path), "llama.cpp", options, cache_bits=32).cache_bytes == 2 * cache
    command, _ = served.vllm_command(str(tmp_path), vllm.cache_bytes, options)
    assert {f"--kv-cache-memory-bytes={cache}", "--max-model-len=512", "--max-num-seqs=4"} <= {*command}


@pytest.mark.parametrize(
    ("dtype", "bits", "flags", "held"),
    [
        ("bfloat16", 4, {"avx512f"}, 3),
        ("bfloat16", 4, {"avx2"}, 1000),
        ("float32", 4, {"avx512f"}, 1000),
        ("bfloat16", 8, {"avx512f"}, 1000),
        ("bfloat16", None, {"avx512f"}, 1000),
    ],
)
def test_codes_that_vllm_keeps_count_as_they_are_stored(
    dtype: str, bits: int | None, flags: set[str], held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "processor_flags", lambda: flags)
    rounded = {"config_groups": {"group_0": {"weights": {"num_bits": bits}}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": rounded} if bits else {}))
    (tmp_path / "model.safetensors").write_bytes(b"123")
    assert served.held_by_vllm(str(tmp_path), dtype, 1000) == held


@needs_gguf
@pytest.mark.parametrize(("wanted", "error"), [("F32", 0.0), ("Q4_0", 0.2)])
def test_a_file_in_other_numbers(wanted: str, error: float, tmp_path: Path) -> None:
    import gguf
    import numpy as np

    from tools.benchmarks.plain_gguf import rewrite

    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    writer = gguf.GGUFWriter(first, "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "b"])
    matrix = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    for name in ("token_embd.weight", "blk.0.ffn_up.weight"):
        writer.add_tensor(name, matrix)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    rewrite(first, second, wanted)
    fields, tensors = read_gguf(second)
    assert (fields["llama.block_count"], fields["tokenizer.ggml.tokens"]) == (1, ["a", "b"])
    rearranged = {"F32": 0, "Q4_0": 8 * 2 * 18}[wanted]  # of the matrix: 8 rows of two blocks; the embedding is in Q8_0
    assert served.held_bytes(str(second)) == second.stat().st_size + rearranged
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(second).tensors}
    assert kinds["blk.0.ffn_up.weight"] == wanted
    assert kinds["token_embd.weight"] == ("F32" if wanted == "F32" else "Q8_0")
    assert kinds["output_norm.weight"] == "F32"
    gone = tensors["blk.0.ffn_up.weight"] - torch.from_numpy(matrix)
    assert float(gone.abs().max()) <= error * float(np.abs(matrix).max())
