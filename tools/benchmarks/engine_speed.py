"""Measure tokens per second, memory and cache of checkpoints and their dense model in transformers and in vLLM.

    python -m tools.benchmarks.engine_speed --vllm .engines/vllm/bin/python [--layers 4] [--new 32]
    make gpu VLLM=.engines/vllm/bin/python          # on a GPU, after its tests

The checkpoints have Llama-3.2-1B's geometry (hidden 2048, 32 heads of 64 over 8, MLPs of 8192, 128,256 tokens, tied)
and random weights in the forms that jobs write, as speed does not depend on the values. Each row is loaded in a
separate process. A prefill takes `--context` tokens of each sequence, decoding `--new` further ones. Prints Markdown:
tokens per second as the median of `--repeats` turns, after one to warm up, with half of the range of the turns in
percent. Memory is that of the process after a first answer, or on a GPU that of the model's tensors. Where an engine
fails, the line holds its last error, and standard error has all of it. `vllm` runs Lamina's class, `vllm-stock` vLLM's
own class on a stock export of the row. `mla` is a model of the DeepSeek type with a quarter of the cache, and with an
untied output embedding, which vLLM's class needs. On a CPU vLLM multiplies its latents out to whole heads
(`VLLM_MLA_DISABLE=1`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
SIZES: dict[str, Any] = {
    "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_parameters": ROPE, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MARK = "RESULT "
Forms = dict[str, dict[str, Any]]


def flat_llm(share: float) -> Forms:
    """Return forms of narrower value heads and fewer channels, each with a share of its numbers."""
    value = {"form": "head_pca", "rank": round(SIZES["head_dim"] * share)}
    return {"v": value, "o": value, **narrow_mlp(share)}


def narrow_mlp(share: float) -> Forms:
    """Return forms of fewer channels alone, which the source's own class can express."""
    channels = {"form": "pruned", "rank": round(SIZES["intermediate_size"] * share / 64) * 64}
    return {role: channels for role in ("gate", "up", "down")}


def loss_aware(share: float) -> Forms:
    """Return forms of fewer channels, with pivoted factors of the remaining matrices."""
    width = round(SIZES["intermediate_size"] * (1 + share) / 128) * 64
    stack = {"form": "pivoted", "rank": round(SIZES["hidden_size"] * share / 16) * 16}
    mlp = {**stack, "width": width}
    reads = {**mlp, "group": "gate_up"}
    return {"gate": reads, "up": reads, "down": {**mlp, "group": "down"}, "o": {**stack, "group": "output"}}


def lorc(share: float) -> Forms:
    """Return forms of latent keys and values with a share of the cache."""
    rank = round(SIZES["num_key_value_heads"] * SIZES["head_dim"] * share)
    latent = {"form": "latent", "rank": rank}
    return {"k": latent, "v": latent}


SEARCHED: dict[str, Callable[[float], Forms]] = {
    method.__name__: method for method in (flat_llm, narrow_mlp, loss_aware)
}
ROWS = ("dense", "flat_llm", "narrow_mlp", "loss_aware", "lorc", "int4", "mla")
STOCK_ROWS = ("dense", "narrow_mlp", "int4", "mla")
LATENT_SHARE, ROTATED = 0.25, 64  # of the cache; a CPU's kernels take heads of 64 + 64


def described(layers: int, forms: Forms) -> Any:
    """Return the config of a model whose layers all have these forms."""
    from lamina import LaminaConfig

    return LaminaConfig(
        **SIZES, num_hidden_layers=layers, rope_parameters=ROPE, forms=[forms] * layers, source_model_type="llama",
        bos_token_id=1, eos_token_id=2, dtype="bfloat16",
    )  # fmt: skip


def layer_numbers(forms: Forms) -> int:
    """Count the numbers that a layer stores."""
    from lamina import LaminaForCausalLM
    from lamina.factored_lamina import stored_state

    with torch.device("meta"):
        model = LaminaForCausalLM(described(1, forms))
    return sum(tensor.numel() for name, tensor in stored_state(model).items() if ".layers." in name)


def forms_of(row: str, keep: float) -> Forms:
    """Return a row's forms: of `keep` of a layer's numbers, or LoRC's of half of the cache."""
    if row == "lorc":
        return lorc(0.5)
    if row not in SEARCHED:
        return {}
    low, high, limit = 0.02, 1.0, keep * layer_numbers({})
    for _ in range(12):
        share = (low + high) / 2
        low, high = (share, high) if layer_numbers(SEARCHED[row](share)) <= limit else (low, share)
    return SEARCHED[row](low)


def write_latent(folder: Path, layers: int) -> Path:
    """Write a checkpoint like those of `mla`, with random weights."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    from pipeline.families.latent_config import output_config
    from pipeline.families.registry import standard_config

    standard = standard_config({**SIZES, **LLAMA, "num_hidden_layers": layers})
    rank = round(2 * SIZES["num_key_value_heads"] * SIZES["head_dim"] * LATENT_SHARE) - ROTATED
    forms = [{"q": {"form": "mla", "rank": rank, "rope": ROTATED, "group": "attention"}}] * layers
    content = output_config(standard, forms, "bfloat16") | {"tie_word_embeddings": False}
    torch.manual_seed(0)
    model: Any = DeepseekV3ForCausalLM(DeepseekV3Config(**content))
    return _stored(folder, content, model.to(torch.bfloat16).state_dict())


def write_checkpoint(folder: Path, row: str, layers: int, keep: float, stock: bool) -> Path:
    """Write a row's checkpoint with random weights; `stock`: as Llama's own class."""
    from lamina import LaminaForCausalLM
    from lamina.factored_lamina import stored_state

    if row == "mla":
        return write_latent(folder, layers)
    config = described(layers, forms_of(row, keep))
    torch.manual_seed(0)
    model: Any = LaminaForCausalLM(config)
    model = model.to(torch.bfloat16)
    tensors = {name: tensor.contiguous() for name, tensor in stored_state(model).items() if name != "lm_head.weight"}
    content = config.to_dict()
    content |= {"model_type": "lamina", "architectures": ["LaminaForCausalLM"]}
    if stock:
        down = tensors["model.layers.0.mlp.down_proj.weight"]
        content = {**SIZES, **LLAMA, "intermediate_size": down.shape[1], "num_hidden_layers": layers}
    if row == "int4":
        content["quantization_config"], tensors = _rounded(tensors)
    return _stored(folder, content, tensors)


def _stored(folder: Path, content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def _rounded(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the config and the tensors of layers whose matrices have codes of 4 bits, in groups of 32."""
    from manifests.records import Scheme
    from pipeline.rounding.schemes import packed_tensors, quantization_config

    scheme, kept, schemes = Scheme(bits=4, group=32), {}, {}
    for name, tensor in tensors.items():
        path = name.removesuffix(".weight")
        if tensor.ndim < 2 or ".layers." not in name:
            kept[name] = tensor
            continue
        groups_OSg = tensor.float().unflatten(1, (-1, 32))
        scales_OS = groups_OSg.abs().amax(-1) / 7
        codes_OI = (groups_OSg / scales_OS[..., None]).round().flatten(1).to(torch.int8)
        kept |= packed_tensors(path, codes_OI, scales_OS.to(tensor.dtype), scheme)
        schemes[path] = scheme
    return quantization_config(schemes, [*schemes, "lm_head"]), kept


# -- in the process of an engine --------------------------------------------------------------------------------------


def now() -> float:
    """Return the time after all work that the device was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def resident_bytes(model: torch.nn.Module) -> int:
    """Return the memory of this process, or the bytes of the model's tensors where they are on a GPU."""
    if torch.cuda.is_available():
        return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))


def turns(options: argparse.Namespace, prefill: Callable[[], Any], decode: Callable[[Any], Any]) -> dict[str, Any]:
    """Time prefills and decodings, each after one that warms up."""
    seconds: dict[str, list[float]] = {"prefill": [], "decode": []}
    for _ in range(options.repeats + 1):
        start = now()
        state = prefill()
        middle = now()
        decode(state)
        seconds["prefill"].append(middle - start)
        seconds["decode"].append(now() - middle)
    return {name: each[1:] for name, each in seconds.items()}


def in_transformers(options: argparse.Namespace) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield for each batch the seconds of its turns, and memory and cache."""
    from transformers import AutoModelForCausalLM

    import lamina  # noqa: F401  # registers its classes

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(options.child, dtype=dtype, device_map=device).eval()
    for batch in options.batches:
        ids = torch.randint(3, 60, (batch, options.context), device=device)

        def prefill(ids: torch.Tensor = ids) -> Any:
            return model(ids, use_cache=True, logits_to_keep=1)

        def decode(out: Any) -> None:
            for _ in range(options.new):
                out = model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)

        with torch.inference_mode():
            cache = prefill().past_key_values
            resident = resident_bytes(model)
            stored = sum(
                part.numel() * part.element_size() for layer in cache.layers for part in (layer.keys, layer.values)
            )
            yield (
                batch,
                turns(options, prefill, decode) | {"bytes": resident, "cache": stored // (batch * options.context)},
            )


def in_vllm(options: argparse.Namespace) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield what `in_transformers` yields; decoding takes the time of a longer answer minus that of a prefill."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    latent = json.loads(Path(options.child, "config.json").read_text())["model_type"] == "deepseek_v3"
    if latent and not torch.cuda.is_available():
        os.environ["VLLM_MLA_DISABLE"] = "1"
    from vllm import LLM, SamplingParams

    limit = options.context + options.new + 8
    llm = LLM(
        options.child, skip_tokenizer_init=True, enforce_eager=True, dtype=options.dtype, max_model_len=limit,
        max_num_seqs=max(options.batches), max_num_batched_tokens=max(options.batches) * limit,
        enable_prefix_caching=False, compilation_config={"custom_ops": ["-rotary_embedding"]} if latent else {},
    )  # fmt: skip
    specs = llm.llm_engine.engine_core.engine_core.model_executor.get_kv_cache_specs()[0]
    cache = sum(spec.page_size_bytes // spec.block_size for spec in specs.values())

    def answer(batch: int, new: int) -> None:
        settings = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": torch.randint(3, 1000, (options.context,)).tolist()} for _ in range(batch)]
        llm.generate(prompts, settings, use_tqdm=False)

    answer(1, 1)
    (resident,) = llm.apply_model(resident_bytes)
    for batch in options.batches:
        seconds = turns(options, lambda: answer(batch, 1), lambda _: answer(batch, options.new + 1))  # noqa: B023
        seconds["decode"] = [whole - first for whole, first in zip(seconds["decode"], seconds["prefill"], strict=True)]
        yield batch, seconds | {"bytes": resident, "cache": cache}


# -- the table --------------------------------------------------------------------------------------------------------


def measured(
    python: str, engine: str, folder: Path, options: argparse.Namespace, dtype: str
) -> list[dict[str, Any]] | str:
    """Return the measurements of a process of the engine, one mapping for each batch, or its last error."""
    settings = {"child": folder, "engine": engine, "dtype": dtype}
    settings |= {name: getattr(options, name) for name in ("context", "new", "repeats")}
    command = [python, "-m", "tools.benchmarks.engine_speed", *(f"--{name}={each}" for name, each in settings.items())]
    command += ["--batches", *map(str, options.batches)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'deploy' / 'serving'}"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        print(ended.stderr, file=sys.stderr)
        return last_error(ended.stderr)
    return [json.loads(line.removeprefix(MARK)) for line in ended.stdout.splitlines() if line.startswith(MARK)]


def last_error(stderr: str) -> str:
    """Return the last line that names an exception, without the rank that vLLM puts before it."""
    lines = [line.removeprefix("[rank0]:").strip() for line in stderr.splitlines()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or [line for line in lines if line] or ["no message"])[-1]


def rate(tokens: int, seconds: list[float]) -> str:
    """Return tokens per second: the median to three digits, and half of the range in percent of it."""
    middle = statistics.median(seconds)
    per_second = tokens / middle
    digits = max(0, 2 - math.floor(math.log10(per_second)))
    return f"{per_second:,.{digits}f} ± {(max(seconds) - min(seconds)) / 2 / middle:.0%}"


def line(options: argparse.Namespace, each: Mapping[str, Any]) -> str:
    """Return the cells of one batch."""
    batch = each["batch"]
    rates = rate(batch * options.context, each["prefill"]), rate(batch * options.new, each["decode"])
    return " | ".join((f"{batch}", *rates, f"{each['bytes'] / 1e9:.2f}", f"{each['cache']:,}"))


def main() -> None:
    """Print the table, or measure one checkpoint as a child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="the Python of an environment with vLLM; transformers alone without it")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--keep", type=float, default=0.6)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        for batch, result in (in_transformers if options.engine == "transformers" else in_vllm)(options):
            print(MARK + json.dumps({"batch": batch, **result}), flush=True)
        return
    engines = [("transformers", sys.executable)]
    engines += [("vllm", options.vllm), ("vllm-stock", options.vllm)] if options.vllm else []
    print("| row | engine | dtype | batch | prefill, tokens/s | decode, tokens/s | memory, GB | cache, bytes/token |")
    print("|---|---|---|---|---|---|---|---|")
    for row in options.rows:
        for engine, python in engines:
            stock = engine == "vllm-stock"
            if (stock and row not in STOCK_ROWS) or (row == "mla" and engine == "vllm"):
                continue
            with tempfile.TemporaryDirectory() as directory:
                folder = write_checkpoint(Path(directory) / row, row, options.layers, options.keep, stock)
                for dtype in options.dtypes:
                    results = measured(python, engine, folder, options, dtype)
                    if isinstance(results, str):
                        print(f"| {row} | {engine} | {dtype} | failed: {results} |", flush=True)
                        continue
                    for each in results:
                        print(f"| {row} | {engine} | {dtype} | {line(options, each)} |", flush=True)


if __name__ == "__main__":
    main()
