"""Decoders from before Llama, with names of their own: LayerNorms, MLPs without a gate.

Checkpoints of GPT-NeoX and Falcon hold queries, keys and values in one tensor: for each key/value head its queries, its
key and its value.
"""

from typing import Any

from pipeline.families.dense import BLOCK, QKV, QKVO
from pipeline.families.family import Family
from pipeline.families.variants import Variant

UNGATED = ("up", "down")
HEADS, KV_HEADS = "num_attention_heads", "num_key_value_heads"

# Learned positions, ReLU.
OPT = Family(
    "opt",
    "OPT",
    BLOCK
    | {
        "embed": "model.decoder.embed_tokens",
        "layers": "model.decoder.layers",
        "final_norm": "model.decoder.final_layer_norm",
        "modules": {
            "input_norm": "self_attn_layer_norm",
            "q": "self_attn.q_proj",
            "k": "self_attn.k_proj",
            "v": "self_attn.v_proj",
            "o": "self_attn.out_proj",
            "mlp_norm": "final_layer_norm",
            "up": "fc1",
            "down": "fc2",
        },
        "biases": dict.fromkeys((*QKVO, *UNGATED), "enable_bias"),
        "norm": "layer",
        "rotary": None,
        "positions": {"module": "model.decoder.embed_positions", "offset": 2},
    },
    fields={
        "intermediate_size": "ffn_dim",
        "hidden_act": "activation_function",
        KV_HEADS: HEADS,
        "initializer_range": "init_std",
        "norm_eps": 1e-5,
    },
    requires={"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
    equal={"word_embed_proj_dim": "hidden_size"},
    own_head_dim=False,
)
# Attention and MLP in parallel after one norm; interleaved partial rotation.
GPTJ = Family(
    "gptj",
    "GPT-J",
    BLOCK
    | {
        "embed": "transformer.wte",
        "layers": "transformer.h",
        "final_norm": "transformer.ln_f",
        "head_bias": True,
        "modules": {
            "input_norm": "ln_1",
            "q": "attn.q_proj",
            "k": "attn.k_proj",
            "v": "attn.v_proj",
            "o": "attn.out_proj",
            "up": "mlp.fc_in",
            "down": "mlp.fc_out",
        },
        "biases": dict.fromkeys(UNGATED, True),
        "norm": "layer",
        "rotary": "interleaved",
        "parallel": True,
    },
    rotary_field="rotary_dim",
    fields={
        "intermediate_size": "n_inner",
        "hidden_act": "activation_function",
        KV_HEADS: HEADS,
        "norm_eps": "layer_norm_epsilon",
    },
    own_head_dim=False,
)
# GPT-NeoX and Pythia: partial rotation; attention and MLP in parallel or one after another.
GPT_NEOX = Family(
    "gpt_neox",
    "GPT-NeoX",
    BLOCK
    | {
        "embed": "gpt_neox.embed_in",
        "layers": "gpt_neox.layers",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
        "modules": {
            "input_norm": "input_layernorm",
            "q": "attention.query",
            "k": "attention.key",
            "v": "attention.value",
            "o": "attention.dense",
            "mlp_norm": "post_attention_layernorm",
            "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        },
        "biases": dict.fromkeys(QKVO, "attention_bias") | dict.fromkeys(UNGATED, True),
        "norm": "layer",
    },
    settings={"parallel": "use_parallel_residual"},
    fused={"attention.query_key_value": QKV},
    fused_by_heads=True,
    partial_rotary=True,
    fields={KV_HEADS: HEADS, "norm_eps": "layer_norm_eps"},
    unread={"is_decoder": "unused"},
    own_head_dim=False,
)

# Layers of several kinds. Those before Falcon-40B have attention and MLP in parallel after one norm, or in turn.
FALCON_MODULES = {
    "input_norm": "input_layernorm",
    "q": "self_attention.query",
    "k": "self_attention.key",
    "v": "self_attention.value",
    "o": "self_attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
FALCON_BLOCK: dict[str, Any] = BLOCK | {
    "embed": "transformer.word_embeddings",
    "layers": "transformer.h",
    "final_norm": "transformer.ln_f",
    "modules": FALCON_MODULES,
    "biases": dict.fromkeys((*QKVO, *UNGATED), "bias"),
    "norm": "layer",
    "parallel": True,
}
IN_TURN = FALCON_BLOCK | {
    "modules": FALCON_MODULES | {"mlp_norm": "post_attention_layernorm"},
    "parallel": False,
}
TWO_NORMS = FALCON_BLOCK | {"modules": FALCON_MODULES | {"input_norm": "ln_attn", "mlp_norm": "ln_mlp"}}
FALCON_FIELDS = {"intermediate_size": "ffn_hidden_size", "hidden_act": "activation", "norm_eps": "layer_norm_epsilon"}
NEW = {"new_decoder_architecture": True, "parallel_attn": True, "multi_query": (True, False)}  # since Falcon-40B


def _old_falcon(one_head: bool, parallel: bool) -> Variant:
    """Return a kind of layers from before Falcon-40B, with one key/value head or as many as query heads."""
    norms = (None, 1) if parallel else (None, 1, 2)  # the last has no effect if the halves are sequential
    when = {"new_decoder_architecture": False, "multi_query": one_head, "parallel_attn": parallel}
    changes: dict[str, Any] = {"block": FALCON_BLOCK if parallel else IN_TURN}
    if one_head:
        changes |= {"fields": FALCON_FIELDS | {KV_HEADS: 1}, "unread": {"num_kv_heads": "multi_query: it is 1"}}
    else:
        changes |= {"fields": FALCON_FIELDS | {KV_HEADS: HEADS}, "equal": {"num_kv_heads": HEADS}}
    return Variant(when | {"num_ln_in_parallel_attn": norms}, changes)


FALCON = Family(
    "falcon",
    "Falcon",
    FALCON_BLOCK,
    fields=FALCON_FIELDS | {KV_HEADS: "num_kv_heads"},
    variants=(
        *(_old_falcon(one_head, parallel) for one_head in (True, False) for parallel in (True, False)),
        Variant(NEW | {"num_ln_in_parallel_attn": (2, None)}, {"block": TWO_NORMS}),
        Variant(NEW | {"num_ln_in_parallel_attn": 1}),
    ),
    fused={"self_attention.query_key_value": QKV},
    fused_by_heads=True,
    requires={"alibi": False},
    own_head_dim=False,
)

FAMILIES = (OPT, GPTJ, GPT_NEOX, FALCON)
