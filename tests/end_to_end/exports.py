"""Exports of checkpoints, and the results of other programs on them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.end_to_end.jobs import Ended, Job, command

needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf, an extra, is not installed")

ROLES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "flat_llm": {"methods": [{"method": "flat_llm", "query_key": "head_pca"}]},
    "lorc": {"methods": [{"method": "lorc", "cache_keep": 0.4, "allocation": "uniform"}], "budget": None},
    "lorc-wide": {"methods": [{"method": "lorc", "cache_keep": 0.8, "allocation": "uniform"}], "budget": None},
    "lestd": {"methods": [{"method": "lestd", "target": "both", "sweeps": 1, "refine_sweeps": 0}]},
    "joint_rank_k": {"methods": [{"method": "joint_rank_k"}]},
    "loss_aware": {"methods": [{"method": "loss_aware"}], "calibration.propagate": "dense"},
}


def export(made: Job, target: str, name: str = "exported", *more: str) -> tuple[Ended, Path]:
    destination = made.root / name
    return command("export", str(made.output), "--to", target, str(destination), "--json", *more), destination


def stock(directory: Path) -> Any:
    """By transformers alone, as any model; nothing missing, nothing left over."""
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, trust_remote_code=False)
    assert not any(report.values()), report
    return model.eval()


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
