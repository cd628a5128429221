"""Falcon: LayerNorms, rotary halves, an MLP without gate; layers of several kinds.

Checkpoints hold queries, keys and values in one tensor: the queries of a key/value head, the key, the value, and so on
for the next one.
"""

from typing import Any

from pipeline.families.family import TRAINING, Family, Variant

MODULES = {
    "input_norm": "input_layernorm",
    "q": "self_attention.query",
    "k": "self_attention.key",
    "v": "self_attention.value",
    "o": "self_attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
TWO_NORMS = {"input_norm": "ln_attn", "mlp_norm": "ln_mlp"}
BLOCK: dict[str, Any] = {
    "embed": "transformer.word_embeddings",
    "layers": "transformer.h",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "head_bias": False,
    "modules": MODULES,
    "biases": dict.fromkeys(("q", "k", "v", "o", "up", "down"), "bias"),
    "norm": "layer",
    "rotary": "half",
    "positions": None,
    "parallel": True,
}
FIELDS = {"intermediate_size": "ffn_hidden_size", "hidden_act": "activation", "norm_eps": "layer_norm_epsilon"}
KV_HEADS = "num_key_value_heads"
IN_TURN = BLOCK | {"modules": MODULES | {"mlp_norm": "post_attention_layernorm"}, "parallel": False}
NEW = {"new_decoder_architecture": True, "parallel_attn": True, "multi_query": (True, False)}  # since Falcon-40B
OLD = {"new_decoder_architecture": False}
ONE_HEAD: dict[str, Any] = {
    "fields": FIELDS | {KV_HEADS: 1},
    "unread": {**dict.fromkeys(("attention_dropout", "hidden_dropout"), TRAINING), "num_kv_heads": "of other kinds"},
}
ALL_HEADS = {"fields": FIELDS | {KV_HEADS: "num_attention_heads"}, "equal": {"num_kv_heads": "num_attention_heads"}}

FAMILY = Family(
    model_type="falcon",
    block=BLOCK,
    fields=FIELDS | {KV_HEADS: "num_kv_heads"},
    variants=(
        *(
            Variant(
                OLD | {"multi_query": heads is ONE_HEAD, "parallel_attn": block is BLOCK, **norms},
                {"block": block, **heads},
            )
            for heads in (ONE_HEAD, ALL_HEADS)
            for block, norms in (
                (BLOCK, {"num_ln_in_parallel_attn": (None, 1)}),
                (IN_TURN, {"num_ln_in_parallel_attn": (None, 1, 2)}),
            )
        ),
        Variant(NEW | {"num_ln_in_parallel_attn": (2, None)}, {"block": BLOCK | {"modules": MODULES | TWO_NORMS}}),
        Variant(NEW | {"num_ln_in_parallel_attn": 1}),
    ),
    fused={"self_attention.query_key_value": ("q", "k", "v")},
    fused_by_heads=True,
    requires={"alibi": False},
    unread=dict.fromkeys(("attention_dropout", "hidden_dropout"), TRAINING),
)
