"""Writes checkpoints of every method's forms, in sizes that vLLM's kernels accept: heads of 32, in one case of 8.

D 128, H 4 query heads over G 2, MLPs of 192; OPT and GPT-J with H = G = 4.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GPTJConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from lamina import LaminaConfig, LaminaForCausalLM
from lamina.stored_lamina import StoredFormat
from manifests.records import Scheme
from pipeline.healing.processes import Processes
from pipeline.healing.student import Student, stored_forms
from pipeline.rounding.schemes import packed_tensors, quantization_config
from tests.serving import serving_factors as kinds
from tests.serving.serving_factors import factorise, forms_of, low_rank
from tests.serving.serving_sources import CLASSES, describe

GROUP = 32
FP8 = ("float8_e4m3fn", "float32")  # codes and scales
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 32}
SOURCES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**LLAMA),
    "llama-tied": LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "llama-mha": LlamaConfig(**{**LLAMA, "num_key_value_heads": 4}),
    "llama-small-heads": LlamaConfig(**{**LLAMA, "head_dim": 8}),
    "llama-yarn": LlamaConfig(
        **LLAMA, hidden_act="gelu",
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16,
            "attention_factor": 1.5, "beta_fast": 8.0, "truncate": False,
        },
    ),
    "mistral-window": MistralConfig(**LLAMA, sliding_window=6),
    "qwen2-windows": Qwen2Config(
        **LLAMA, hidden_act="relu", use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**LLAMA),
    "opt": OPTConfig(**SIZES, ffn_dim=192, word_embed_proj_dim=128, dropout=0.0, tie_word_embeddings=True),
    "gptj": GPTJConfig(
        vocab_size=128, n_embd=128, n_inner=192, n_layer=3, n_head=4, n_positions=128, rotary_dim=16, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    ),
}  # fmt: skip


def flat(sizes: Any, share: float) -> dict[str, Any]:
    """Return flat_llm's forms: narrow value heads, factors per head of q and k, fewer channels."""
    value = {"form": "head_pca", "rank": round(sizes.head_dim * share)}
    per_head = {"form": "head_low_rank", "rank": round(sizes.head_dim * share)}
    pruned = {"form": "pruned", "rank": round(sizes.inner * share / 2) * 2}
    return {**dict.fromkeys(("v", "o"), value), **dict.fromkeys(("q", "k"), per_head)} | {
        role: pruned for role in ("gate", "up", "down") if role in sizes.roles
    }


def wide(sizes: Any, share: float) -> dict[str, Any]:
    """Return forms of absorbed values with more numbers than a head."""
    return kinds.absorbed(sizes, 0.8)


# Method → the kinds of forms that its layers may have; one of the shares for each layer, so that widths differ.
METHODS: dict[str, list[Any]] = {
    "dense": [kinds.dense] * 3,
    "flat_llm": [flat, flat, kinds.dense],
    "lorc": [kinds.latent_both, kinds.latent_keys_narrow_values, kinds.latent_keys_absorbed_values],
    "lestd": [kinds.tucker, kinds.tucker_sparse, kinds.tucker_own_output],
    "joint_rank_k": [kinds.joint, kinds.low_rank_in_bases, kinds.joint],
    "loss_aware": [kinds.pivoted, kinds.pivoted_in_bases, low_rank],
}
CASES = {
    **{method: ("llama", layers) for method, layers in METHODS.items()},
    "flat_llm-mha": ("llama-mha", [kinds.joint_head, flat, kinds.narrow_keys_latent_values]),
    "lestd-mha": ("llama-mha", [kinds.tucker, kinds.tucker_sparse_own_output, kinds.joint_head]),
    "small-heads": ("llama-small-heads", [*METHODS["loss_aware"][:2], flat]),
    "lorc-wide": ("llama", [wide, kinds.latent_keys, kinds.latent_values]),
    "tied": ("llama-tied", METHODS["flat_llm"]),
    "yarn": ("llama-yarn", METHODS["lorc"]),
    "window": ("mistral-window", METHODS["lorc"]),
    "windows": ("qwen2-windows", METHODS["flat_llm"]),
    "qwen3": ("qwen3", METHODS["loss_aware"]),
    "opt": ("opt", [flat, kinds.low_rank, kinds.tucker]),
    "gptj": ("gptj", [kinds.latent_both, kinds.joint_head, kinds.tucker_own_output]),
}


def write(folder: Path, name: str, dtype: torch.dtype = torch.float32, bits: int | None = None) -> Path:
    """Write the checkpoint of a case in the pipeline's format, with random weights whose outputs differ by token.

    `bits`: round the linears of its layers, in groups of 32 where these divide the columns.
    """
    source, layers = SOURCES[CASES[name][0]], CASES[name][1]
    torch.manual_seed(0)
    model = CLASSES[source.model_type](source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    forms = forms_of(source, layers, 0.5)
    tensors, _ = factorise(source, model.state_dict(), forms)
    if source.tie_word_embeddings:
        del tensors["lm_head.weight"]
    described = {**describe(source, forms), "dtype": str(dtype).removeprefix("torch.")}
    if bits is not None:
        tensors = round_(described, tensors, bits)
    folder.mkdir(parents=True)
    stored = {k: (t.to(dtype) if t.is_floating_point() else t).contiguous() for k, t in tensors.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    del described["auto_map"]
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def heal(folder: Path) -> Path:
    """Train the layers of a checkpoint on random tokens as a healing does, and write it back in its forms."""
    tensors = load_file(folder / "model.safetensors")
    inside = {name: each for name, each in tensors.items() if ".layers." in name and not name.endswith("gate.weight")}
    names = {name: tensor.dtype for name, tensor in inside.items() if tensor.is_floating_point()}
    student = Student(folder, names, torch.device("cpu"), 0, Processes())
    optimizer = torch.optim.AdamW(student.trained.values(), lr=1e-3)
    ids_BS = torch.randint(3, SIZES["vocab_size"], (4, 32), generator=torch.Generator().manual_seed(2))
    for _ in range(4):
        logits_TV = student.logits(student.hidden(ids_BS)[:, :-1].flatten(0, 1))
        torch.nn.functional.cross_entropy(logits_TV, ids_BS[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with student.rounded():
        best = student.rounded_copy()
    forms = stored_forms(folder)
    healed = {name: forms[name].stored(tensor) if name in forms else tensor for name, tensor in best.items()}
    assert not any(torch.equal(tensor, tensors[name]) for name, tensor in healed.items())
    save_file({**tensors, **healed}, folder / "model.safetensors", {"format": "pt"})
    return folder


DIFFERING: dict[str, list[dict[str, int]]] = {
    "by-heads": [{}, {"num_key_value_heads": 1}, {"num_attention_heads": 2, "intermediate_size": 96}],
    "by-channels": [{}, {"intermediate_size": 96}, {}],
}


def write_differing(folder: Path, name: str) -> Path:
    """Write a checkpoint of dense layers of which some have other sizes than the model: a case of DIFFERING."""
    described = {**describe(SOURCES["llama"], forms_of(SOURCES["llama"], kinds.dense, 1.0)), "dtype": "float32"}
    described |= {"layer_sizes": DIFFERING[name]}
    del described["auto_map"]
    torch.manual_seed(0)
    model = LaminaForCausalLM(LaminaConfig(**described))
    folder.mkdir(parents=True)
    noisy = {key: tensor + torch.randn_like(tensor) * 0.05 for key, tensor in model.state_dict().items()}
    save_file(noisy, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def write_stored(folder: Path, name: str) -> Path:
    """Write the checkpoint of a case whose dense linears are stored in fp8, in blocks that do not divide all of
    them."""
    described = json.loads((write(folder, name) / "config.json").read_text())
    tensors, form = load_file(folder / "model.safetensors"), StoredFormat("fp8", "float32", *FP8, block=(48, 48))
    with torch.device("meta"):
        model = LaminaForCausalLM(LaminaConfig(**described))
    linears = [path for path, module in model.named_modules() if type(module) is torch.nn.Linear]
    paths = [path for path in linears if f"{path}.weight" in tensors]
    for path in paths:
        tensors |= {f"{path}.{part}": tensor for part, tensor in _fp8(tensors[f"{path}.weight"], form).items()}
    described["stored_formats"] = [{**form.described, "modules": paths}]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def _fp8(weight_OI: torch.Tensor, form: StoredFormat) -> dict[str, torch.Tensor]:
    (rows, columns), (outputs, inputs) = form.block, weight_OI.shape
    scales_RC = torch.rand(form.grid(outputs, inputs)) * 2e-4 + 1e-4
    spread_OI = scales_RC.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
    codes_OI = (weight_OI.float() / spread_OI).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes_OI, "weight_scale_inv": scales_RC}


def round_(described: dict[str, Any], tensors: dict[str, torch.Tensor], bits: int) -> dict[str, torch.Tensor]:
    """Return the tensors with packed codes for weights, and add `quantization_config` to `described`."""
    with torch.device("meta"):
        model = LaminaForCausalLM(LaminaConfig(**described))
    linears = [path for path, module in model.named_modules() if type(module) is torch.nn.Linear]
    found, schemes = dict(tensors), {}
    block, tied = described["block"], described["tie_word_embeddings"]
    for path in [*linears, block["embed"]]:
        if (tied and path in (block["embed"], block["head"])) or (
            weight_OI := found.pop(f"{path}.weight", None)
        ) is None:
            continue
        scheme = Scheme(bits=bits, group=None if weight_OI.shape[1] % GROUP else GROUP)
        grouped_OSg = weight_OI.unflatten(1, (-1, scheme.group or weight_OI.shape[1]))
        scales_OS = grouped_OSg.abs().amax(-1) / (2 ** (bits - 1) - 1)
        codes_OI = (grouped_OSg / scales_OS[..., None]).round().flatten(1).to(torch.int8)
        found |= packed_tensors(path, codes_OI, scales_OS, scheme)
        schemes[path] = scheme
    described["quantization_config"] = quantization_config(schemes, linears)
    return found
