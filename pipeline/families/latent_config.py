"""The config of a compressed model: of Lamina's class, or of DeepSeek's for latent attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.families.config_fields import COPIED_FIELDS
from pipeline.families.latent import ACTIVATION, LATENT_FORM
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.families.registry import checkpoint_config, standard_config
from pipeline.families.source_config import source_config

NARROW_FORM = "pruned"  # of MLPs with fewer channels; beside latent attention all have one width
Forms = Mapping[str, Mapping[str, Any]]  # role -> form


def latent_form(forms: Sequence[Forms]) -> Mapping[str, Any] | None:
    """Return the form of latent attention, the same in all layers, or None."""
    return next((form for layer in forms for form in layer.values() if form["form"] == LATENT_FORM), None)


def described_config(standard: Mapping[str, Any], forms: Sequence[Forms]) -> dict[str, Any]:
    """Return the standard config of the compressed model; with latent attention, that of a dense DeepSeek model.

    The DeepSeek model has an untied output embedding, because engines' classes require it, and MLPs of one width.
    `standard`: that of the source. `forms`: those of all layers, or of some.
    """
    latent = latent_form(forms)
    if latent is None:
        return {**standard, "forms": [dict(layer) for layer in forms]}
    shared, head_dim, heads = latent["rope"], standard["head_dim"], standard["num_attention_heads"]
    theta = standard["rope_parameters"]["rope_theta"] ** (shared / head_dim / latent.get("density", 1))
    return standard_config(
        {name: standard[name] for name in COPIED_FIELDS}
        | {
            "model_type": "deepseek_v3",
            "hidden_act": ACTIVATION,
            "intermediate_size": _mlp_width(standard, forms),
            "rms_norm_eps": standard["norm_eps"],
            "initializer_range": standard["initializer_range"],
            "num_key_value_heads": heads,
            "q_lora_rank": None,
            "kv_lora_rank": latent["rank"],
            "qk_nope_head_dim": head_dim,
            "qk_rope_head_dim": shared,
            "v_head_dim": head_dim,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "rope_interleave": True,
            "tie_word_embeddings": False,
            "first_k_dense_replace": standard["num_hidden_layers"],
            **dict.fromkeys(
                ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group"), 1
            ),
        }
    )


def _mlp_width(standard: Mapping[str, Any], forms: Sequence[Forms]) -> int:
    """Return the width of all MLPs: that of pruned ones, or the source's."""
    narrow = (form["rank"] for layer in forms for form in layer.values() if form["form"] == NARROW_FORM)
    return int(next(narrow, standard["intermediate_size"]))


def untied_head(standard: Mapping[str, Any], own_class: bool) -> dict[str, str]:
    """Map the output embedding of a checkpoint with its own class to the tied embedding that it copies.

    `standard`: that of the source. Empty if the source's embeddings are untied, and for Lamina's class.
    """
    block = standard["block"]
    tied = own_class and standard["tie_word_embeddings"]
    return {f"{block['head']}.weight": f"{block['embed']}.weight"} if tied else {}


def latent_paths(layer: LayerGeometry, forms: Forms) -> dict[str, str]:
    """Map the prefix of a layer's latent tensors to their role."""
    role = next((role for role, form in forms.items() if form["form"] == LATENT_FORM), None)
    return {} if role is None else {f"{layer.group_path((role,), forms[role]['group'])}.kv_": role}


def output_config(standard: Mapping[str, Any], forms: Sequence[Forms], dtype: str) -> dict[str, Any]:
    """Return the config.json of OUTPUT."""
    if latent_form(forms) is None:
        return checkpoint_config(standard, forms, dtype)
    return source_config(described_config(standard, forms), dtype) | {"num_nextn_predict_layers": 0}
