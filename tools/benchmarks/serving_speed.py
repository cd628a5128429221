"""Measure prefill, decoding and peak memory of each method's forms and of the dense model in transformers.

    python -m tools.benchmarks.serving_speed [--hidden 1024] [--layers 4] [--keep 0.8] [--contexts 256 1024]
    python -m tools.benchmarks.serving_speed --methods lorc lorc_at_once --batches 1 --contexts 256 2048 4096
    ONEDNN_MAX_CPU_ISA=AVX2 python -m tools.benchmarks.serving_speed --layers 2 --methods lorc --dtype bfloat16

The models have Llama's layers with random weights, as speed does not depend on them: D hidden channels, heads of 64
over four times fewer KV heads, and MLPs of 2.75 D, in `dtype` on as many threads as torch has. Every method has one
rank share, such that its decoder layers store `keep` of the dense numbers; LoRC's latents hold `keep` of the cache. The
models take turns, `repeats` times after a first turn to warm up. The fastest turn counts, in CPU-seconds, which other
programs on the machine disturb least. Prints a Markdown table of ratios to the dense model: below 1 is faster, or
smaller. Memory is the most by which the process grows in prefill and decoding: the cache and temporary tensors.
`lorc_at_once` computes the keys of all cached tokens at once while decoding; `lorc` computes those of a block.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lamina import LaminaConfig, LaminaForCausalLM
from lamina.factored_lamina import stored_state
from lamina.layers_lamina import LaminaAttention

Forms = dict[str, dict[str, Any]]
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
HEAD, GROUP, NEW = 64, 4, 8


def sizes(hidden: int) -> tuple[int, int, int]:
    """Return query width, key width and channels."""
    return hidden, hidden // GROUP, hidden * 11 // 4


def flat_llm(hidden: int, share: float) -> Forms:
    """Narrow value heads and fewer channels."""
    value = {"form": "head_pca", "rank": max(1, round(HEAD * share))}
    pruned = {"form": "pruned", "rank": round(sizes(hidden)[2] * share)}
    return {"v": value, "o": value, "gate": pruned, "up": pruned, "down": pruned}


def lorc(hidden: int, share: float) -> Forms:
    """Latent keys and values."""
    latent = {"form": "latent", "rank": max(1, round(sizes(hidden)[1] * share))}
    return {"k": latent, "v": latent}


def lorc_at_once(hidden: int, share: float) -> Forms:
    """Latent keys and values, read without blocks."""
    return lorc(hidden, share)


def lestd(hidden: int, share: float) -> Forms:
    """A Tucker group of the attention."""
    spec = {"form": "tucker", "ranks": [max(1, round(hidden * share)), max(1, round(HEAD * share)), 2]}
    return {role: spec for role in ("q", "k", "v", "o")}


def joint_rank_k(hidden: int, share: float) -> Forms:
    """One first factor for q and k, one for gate and up; down factored."""
    pair = {"form": "joint_low_rank", "rank": round(hidden * share), "group": "query_key"}
    mlp = {"form": "joint_low_rank", "rank": round(hidden * share), "group": "gate_up"}
    return {"q": pair, "k": pair, "gate": mlp, "up": mlp, "down": {"form": "low_rank", "rank": round(hidden * share)}}


def loss_aware(hidden: int, share: float) -> Forms:
    """Pivoted stacks."""
    forms: Forms = {}
    for group, roles in (("query_key", "q k"), ("output", "o"), ("gate_up", "gate up"), ("down", "down")):
        forms |= {role: {"form": "pivoted", "rank": round(hidden * share), "group": group} for role in roles.split()}
    return forms


AT_ONCE = lorc_at_once.__name__
METHODS: dict[str, Callable[[int, float], Forms]] = {
    method.__name__: method for method in (flat_llm, lorc, lorc_at_once, lestd, joint_rank_k, loss_aware)
}


def describe(options: argparse.Namespace, forms: Forms) -> LaminaConfig:
    """Return the config of a model whose layers all have these forms."""
    query, key, inner = sizes(options.hidden)
    return LaminaConfig(
        vocab_size=1024, hidden_size=options.hidden, intermediate_size=inner, num_hidden_layers=options.layers,
        num_attention_heads=query // HEAD, num_key_value_heads=key // HEAD, head_dim=HEAD,
        max_position_embeddings=65536, forms=[forms] * options.layers,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, attn_implementation="sdpa",  # type: ignore[call-arg]  # of the base class
    )  # fmt: skip


def decoder_numbers(config: LaminaConfig) -> int:
    """Count the numbers that the decoder layers store."""
    with torch.device("meta"):
        model = LaminaForCausalLM(config)
    return sum(tensor.numel() for name, tensor in stored_state(model).items() if ".layers." in name)


def forms_at(options: argparse.Namespace, method: Callable[[int, float], Forms], keep: float) -> tuple[Forms, float]:
    """Search the rank share that stores at most `keep` of the dense numbers. Return its forms and the share stored."""
    dense, low, high = decoder_numbers(describe(options, {})), 0.02, 1.0
    for _ in range(12):
        share = (low + high) / 2
        stored = decoder_numbers(describe(options, method(options.hidden, share))) / dense
        low, high = (share, high) if stored <= keep else (low, share)
    forms = method(options.hidden, low)
    return forms, decoder_numbers(describe(options, forms)) / dense


def without_blocks_(model: Any) -> None:
    """Make decoding compute all keys at once, as a prefill does."""
    for module in model.modules():
        if isinstance(module, LaminaAttention):
            module._in_blocks = lambda *_: False  # type: ignore[method-assign]


def memory_kib(field: str) -> int:
    """Return VmRSS, or VmHWM: its peak since the last `CLEAR`."""
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(field))


@torch.inference_mode()
def measure(model: Any, batch: int, context: int) -> tuple[float, float, float]:
    """Return CPU-seconds of the prefill and of a step of decoding, and the KiB by which memory grew at the peak."""
    ids = torch.randint(1024, (batch, context))
    ctypes.CDLL(None).malloc_trim(0)  # return freed memory, or this model's growth would not show
    before = memory_kib("VmRSS")
    CLEAR.write_text("5")
    start = time.process_time()
    out = model(ids, use_cache=True, logits_to_keep=1)
    prefill, cache = time.process_time() - start, out.past_key_values
    steps = []
    for _ in range(NEW):
        start = time.process_time()
        out = model(out.logits[:, -1:].argmax(-1), past_key_values=cache)
        steps.append(time.process_time() - start)
    return prefill, min(steps), float(max(memory_kib("VmHWM") - before, 1))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--keep", type=float, default=0.8)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[name for name in METHODS if name != AT_ONCE])
    options = parser.parse_args()
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    models: dict[str, Any] = {"dense": LaminaForCausalLM(describe(options, {})).to(dtype).eval()}
    stored, cached = {}, {}
    for name in options.methods:
        method = METHODS[name]
        if method in (lorc, lorc_at_once):
            forms = lorc(options.hidden, options.keep)
            stored[name] = decoder_numbers(describe(options, forms)) / decoder_numbers(describe(options, {}))
        else:
            forms, stored[name] = forms_at(options, method, options.keep)
        models[name] = LaminaForCausalLM(describe(options, forms)).to(dtype).eval()
        if method is lorc_at_once:
            without_blocks_(models[name])
        cached[name] = models[name].config.cache_numbers(0) / models["dense"].config.cache_numbers(0)
    print("| forms of | batch | context | stored | cache | prefill | decode | peak memory |")
    print("|---|---|---|---|---|---|---|---|")
    for batch in options.batches:
        for context in options.contexts:
            turns = []
            for _ in range(options.repeats + 1):
                turns.append({name: measure(model, batch, context) for name, model in models.items()})
            best = {name: [min(turn[name][i] for turn in turns[1:]) for i in range(3)] for name in models}
            for name in options.methods:
                ratios = (mine / of for mine, of in zip(best[name], best["dense"], strict=True))
                figures = " | ".join(f"{ratio:.2f}" for ratio in (stored[name], cached[name], *ratios))
                print(f"| {name} | {batch} | {context} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
