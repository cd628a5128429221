"""Prints greedy tokens of checkpoints by vLLM, as JSON: python -m tests.vllm.generate IMPL TP KIND FOLDER…

KIND is a dtype; `float32-compiled` is a run with torch.compile, `bfloat16-avx2` one of vLLM's build for CPUs with AVX2
alone. With `-native`, rotations are torch's instead of vLLM's operator, which on CPUs rotates only the first head of
latent attention's queries (vLLM 0.32). With `-ep`, experts are divided over devices.

Prints a line for each folder: its tokens, or the error; for a model in this process also the bytes that a token takes
in the cache, by vLLM's specification, and how many tokens the cache's one GiB holds.
"""

import json
import os
import sys
from typing import Any

import torch

PROMPTS = [[5, 17, 90, 33, 4], [101, 7, 7, 64, 12, 3, 88, 20, 41], [11]]
LENGTH = 16


def main(impl: str, parts: int, kind: str, folders: list[str]) -> None:
    dtype, _, way = kind.partition("-")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if way == "avx2":
        for later in (
            "avx512",
            "avx512_bf16",
            "vnni",
            "amx_tile",
            "amx_fp16",
        ):  # by which vLLM chooses build and kernels
            setattr(torch.cpu, f"_is_{later}_supported", lambda: False)
    if parts == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    from tests.vllm import generate  # by this name workers know it

    greedy = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    for folder in folders:
        said: dict[str, Any] = {"folder": folder}
        try:
            llm = LLM(
                folder, model_impl=impl, tensor_parallel_size=parts, skip_tokenizer_init=True,
                enforce_eager=way != "compiled", dtype=dtype, max_model_len=64, max_num_seqs=4,
                trust_remote_code=impl == "transformers", enable_expert_parallel=way == "ep",
                compilation_config={"custom_ops": ["-rotary_embedding"]} if way == "native" else {},
            )  # fmt: skip
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], greedy, use_tqdm=False)
            said["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
            said |= llm.apply_model(generate.describe)[0]
            if parts == 1:
                said |= cache_of(llm.llm_engine.engine_core.engine_core)
            del llm
        except Exception as error:
            said["error"] = f"{type(error).__name__}: {error}"
        finally:
            cleanup_dist_env_and_memory()
        print("RESULT " + json.dumps(said), flush=True)


def describe(model: Any) -> dict[str, Any]:
    """Return the model's class, its count of numbers, cached numbers of a token on this device, packed matrices, and
    the tables of embeddings and heads of which a CPU holds a second copy, packed."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    tables = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    found = [module for module in model.modules() if isinstance(module, Attention)]
    cached = sum(a.num_kv_heads * (a.head_size + a.head_size_v) for a in found)
    return {
        "class": type(model).__name__,
        "cached": cached,
        "numbers": sum(parameter.numel() for parameter in model.parameters()),
        "packed": sum(name.endswith(".weight_packed") for name, _ in model.named_parameters()),
        "copied": sum(hasattr(table, "cpu_linear") for table in tables),
    }


def cache_of(core: Any) -> dict[str, int]:
    """Return the bytes of a token in the cache of all layers, and the number of tokens in all blocks."""
    specs = core.model_executor.get_kv_cache_specs()[0].values()
    caching = core.vllm_config.cache_config
    return {
        "token_bytes": sum(spec.page_size_bytes // spec.block_size for spec in specs),
        "capacity": caching.num_gpu_blocks * caching.block_size,
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])
