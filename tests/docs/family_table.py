"""Writes the table of docs/families.md from the code: `python -m tests.docs.family_table`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lamina import LayersConfig
from lamina.vllm_lamina import vllm_lacks
from manifests.errors import InputError
from pipeline.checkpoint.targets import gguf_faults
from pipeline.families.registry import FAMILIES, checkpoint_config, geometry_of, standard_config
from pipeline.inputs.job_inputs import fit_methods
from tests import factories
from tests.families.geometries import manifest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->\n"
ENTRIES: dict[str, dict[str, Any]] = {
    "loss_aware": {}, "flat_llm": {}, "lorc": {"cache_keep": 0.5}, "mla": {"cache_keep": 0.5},
    "lestd": {"target": "both", "keep": 0.6}, "joint_rank_k": {"keep": 0.6}, "svd": {"keep": 0.6},
    "asvd": {"keep": 0.6}, "svd_llm": {"keep": 0.6}, "magnitude": {"keep": 0.6}, "heapr": {}, "reap": {},
    "frequency": {}, "merge_experts": {},
}  # fmt: skip
SMALLER: dict[str, dict[str, dict[str, Any]]] = {  # the part of a method that applies where the whole does not
    "joint_rank_k": {"of queries and keys": {"keep": 0.6, "mlp": False}},
    "lestd": {"of the MLP": {"target": "mlp", "keep": 0.6}, "of attention": {"target": "attention", "keep": 0.6}},
}
CALIBRATION = {"text": {"files": ["text.txt"]}, "samples": 16, "sequence_length": 8, "propagate": "dense"}
OF_EXPERTS = ("reap", "frequency", "merge_experts")
USUAL: dict[str, dict[str, Any]] = {  # fields of models on the hub, where the tests' fields are unusual
    "gemma3_text": {"final_logit_softcapping": None},
    "mistral": {"sliding_window": None},
    "qwen2": {"hidden_size": 64},
    "mixtral": {"sliding_window": None},
    "qwen3_moe": {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
    "deepseek_v3": {
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
}  # fmt: skip


def table() -> str:
    """Return the rows of all families, dense ones first."""
    lines = ["| family | `model_type` | methods | vLLM | llama.cpp |", "|---|---|---|---|---|"]
    dense = [name for name in FAMILIES if name in factories.FAMILIES]
    lines += [_row(name) for name in (*dense, *(name for name in FAMILIES if name not in dense))]
    return "\n".join(lines) + "\n"


def _row(name: str) -> str:
    standard = standard_config(factories.make_config(name, **USUAL.get(name, {})).to_dict())
    described = LayersConfig(**checkpoint_config(standard, standard["forms"], "float32"))
    cells = [FAMILIES[name].name, f"`{name}`", _methods(standard), _vllm(described)]
    return f"| {' | '.join([*cells, 'no' if gguf_faults(described) else 'yes'])} |"


def _methods(standard: dict[str, Any]) -> str:
    """Name the methods that do not apply, or the part of one that does."""
    missing = []
    for method, entry in ENTRIES.items():
        if _applies(standard, {"method": method, **entry}) or (method in OF_EXPERTS and "mixture" not in standard):
            continue
        parts = (
            part for part, less in SMALLER.get(method, {}).items() if _applies(standard, {"method": method, **less})
        )
        part = next(parts, None)
        missing.append(f"`{method}` {part} alone" if part else f"no `{method}`")
    return ", ".join(missing) or "all"


def _applies(standard: dict[str, Any], entry: dict[str, Any]) -> bool:
    budget = None if {"keep", "cache_keep"} & {*entry} else {"keep": 1.0}
    try:
        return bool(fit_methods(manifest(entry, calibration=CALIBRATION, budget=budget), geometry_of(standard))[1])
    except InputError:
        return False


def _vllm(described: LayersConfig) -> str:
    """Name the class that serves a checkpoint of the family in vLLM, or the missing feature."""
    if described.foreign:
        return "no"
    for own, name in ((True, "Lamina's class"), (False, "Transformers backend")):
        if not vllm_lacks(described, own_class=own):
            return name
    return f"no: {vllm_lacks(described, own_class=False)}"


def written(page: str) -> str:
    """Return the page with its table replaced by the code's."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
