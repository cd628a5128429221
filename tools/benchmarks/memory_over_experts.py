"""Measure whether the memory of any process grows with the number of experts.

    python -m tools.benchmarks.memory_over_experts [--experts 8 64] [--method loss_aware] [--propagate dense] [--json]

`python -m pipeline.run` compresses models of the Qwen3-MoE kind that differ only in the number of random experts, all
of one width, of which a token passes two, with one worker. Its processes are watched as by
`tools.benchmarks.memory_over_layers`. Exits 1 if the heap of a process grows by more than `--tolerance` from the
smallest model to the largest.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import Qwen3MoeConfig

from tools.benchmarks.jobs import end_on_sigterm, print_table
from tools.benchmarks.memory_over_layers import MIB, watched_job
from tools.benchmarks.random_models import Shapes, write_random_model

CONFIG: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
METHODS: Mapping[str, dict[str, Any]] = {
    "loss_aware": {"method": "loss_aware", "query_key": False, "attention": False},
    "stock": {"method": "loss_aware", "shapes": "stock"},
    "layer": {"method": "loss_aware", "shapes": "layer", "attention": False},
    "reap": {"method": "reap", "refit": True},
    "merge_experts": {"method": "merge_experts"},
    "flat_llm": {"method": "flat_llm", "attention": False, "allocation": "uniform"},
}


def write_model(directory: Path, experts: int) -> int:
    """Write a random mixture, a shard for every layer. Return the bytes of an expert."""
    config = Qwen3MoeConfig(**CONFIG, num_experts=experts, dtype="bfloat16")
    sizes = {**CONFIG, "num_experts": experts}
    write_random_model(directory, config, "Qwen3MoeForCausalLM", lambda layer: layer_shapes(layer, sizes))
    return int(2 * 3 * CONFIG["hidden_size"] * CONFIG["moe_intermediate_size"])


def layer_shapes(layer: int, sizes: Mapping[str, Any]) -> Shapes:
    """Return the names and shapes of a layer of this config."""
    hidden, wide, head = sizes["hidden_size"], sizes["moe_intermediate_size"], sizes["head_dim"]
    queries, keys = (sizes[f"num_{name}_heads"] * head for name in ("attention", "key_value"))
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate.weight": (sizes["num_experts"], hidden),
    }
    for expert in range(sizes["num_experts"]):
        shapes |= {
            f"mlp.experts.{expert}.gate_proj.weight": (wide, hidden),
            f"mlp.experts.{expert}.up_proj.weight": (wide, hidden),
            f"mlp.experts.{expert}.down_proj.weight": (hidden, wide),
        }
    return {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}


def measure(experts: int, method: str, propagate: str, directory: Path) -> dict[str, Any]:
    """Run one job. Return peaks by kind of process, and seconds by phase."""
    expert_bytes = write_model(directory / "model", experts)
    blocks = {"methods": [METHODS[method]], "budget": {"keep": 0.8, "multiple": 16}}
    job = watched_job(propagate, directory, **blocks)
    return {"experts": experts, "method": method, "expert_bytes": expert_bytes, **job}


def growth(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the heap of every kind of process in the largest model, over that in the smallest."""
    least, most = runs[0]["processes"], runs[-1]["processes"]
    return {kind: most[kind]["heap_bytes"] / least[kind]["heap_bytes"] for kind in most if kind in least}


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("--experts", type=int, nargs="+", default=[8, 64], help="ascending")
    options.add_argument("--method", choices=tuple(METHODS), default="loss_aware")
    options.add_argument("--propagate", choices=("compressed", "dense"), default="dense")
    options.add_argument("--tolerance", type=float, default=0.05, help="growth of a peak that is allowed")
    options.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = options.parse_args(argv)
    end_on_sigterm()
    runs = []
    for experts in arguments.experts:
        with tempfile.TemporaryDirectory(prefix="lamina-benchmark-") as directory:
            runs.append(measure(experts, arguments.method, arguments.propagate, Path(directory)))
        print(f"{experts} experts: {runs[-1]['seconds']['total']:.0f} s", file=sys.stderr, flush=True)
    ratios = growth(runs)
    if arguments.json:
        print(json.dumps({"runs": runs, "growth": ratios}))
    else:
        print(f"\none expert {runs[0]['expert_bytes'] / MIB:.1f} MiB; peaks in MiB, RSS / heap\n")
        rows = [
            [kind, *(f"{_mib(run, kind, 'rss')} / {_mib(run, kind, 'heap')}" for run in runs), f"{ratio:.3f}"]
            for kind, ratio in ratios.items()
        ]
        rows.append(["planned worker", *(f"{run['planned_worker_bytes'] / MIB:,.0f}" for run in runs), ""])
        print_table(["process", *(f"{count} experts" for count in arguments.experts), "heap, ratio"], rows)
    return int(any(ratio > 1 + arguments.tolerance for kind, ratio in ratios.items() if kind in ("worker", "driver")))


def _mib(run: Mapping[str, Any], kind: str, quantity: str) -> str:
    return f"{run['processes'][kind].get(f'{quantity}_bytes', 0) / MIB:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
