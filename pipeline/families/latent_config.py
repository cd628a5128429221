"""The config of a model whose layers have the forms of a job: Lamina's, or DeepSeek's for latent attention."""

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
    """Return the latent attention among the forms of layers, if there is any: it is the same in all layers."""
    return next((form for layer in forms for form in layer.values() if form["form"] == LATENT_FORM), None)


def described_config(standard: Mapping[str, Any], forms: Sequence[Forms]) -> dict[str, Any]:
    """Return the standard config of the compressed model; with latent attention, that of a dense DeepSeek model.

    That one has an output embedding of its own: engines' classes know no other. Its MLPs have one width in all layers.
    `standard`: of the source. `forms`: of all layers, or of those that are known.
    """
    latent = latent_form(forms)
    if latent is None:
        return {**standard, "forms": [dict(layer) for layer in forms]}
    shared, head_dim, heads = latent["rope"], standard["head_dim"], standard["num_attention_heads"]
    theta = standard["rope_parameters"]["rope_theta"] ** (shared / head_dim)
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
    """Return the width of the MLPs, which the class has once: that of narrow ones, or the source's."""
    narrow = (form["rank"] for layer in forms for form in layer.values() if form["form"] == NARROW_FORM)
    return int(next(narrow, standard["intermediate_size"]))


def untied_head(standard: Mapping[str, Any], own_class: bool) -> dict[str, str]:
    """Return the output embedding that a checkpoint of a class of its own stores -> the tied one that it is a copy of.

    `standard`: of the source. Empty where the source has one, and in Lamina's class.
    """
    block = standard["block"]
    tied = own_class and standard["tie_word_embeddings"]
    return {f"{block['head']}.weight": f"{block['embed']}.weight"} if tied else {}


def latent_paths(layer: LayerGeometry, forms: Forms) -> dict[str, str]:
    """Return the beginning of the names of a layer's latent tensors -> the role whose they are."""
    role = next((role for role, form in forms.items() if form["form"] == LATENT_FORM), None)
    return {} if role is None else {f"{layer.group_path((role,), forms[role]['group'])}.kv_": role}


def output_config(standard: Mapping[str, Any], forms: Sequence[Forms], dtype: str) -> dict[str, Any]:
    """Return the config.json of OUTPUT."""
    if latent_form(forms) is None:
        return checkpoint_config(standard, forms, dtype)
    return source_config(described_config(standard, forms), dtype) | {"num_nextn_predict_layers": 0}
