"""Falcon: LayerNorms, rotary halves, an MLP without gate; layers of several kinds.

Checkpoints hold queries, keys and values in one tensor: for each key/value head its queries, its key and its value.
"""

from typing import Any

from pipeline.families.family import TRAINING, Family
from pipeline.families.variants import Variant

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
HEADS, KV_HEADS = "num_attention_heads", "num_key_value_heads"
IN_TURN = BLOCK | {"modules": MODULES | {"mlp_norm": "post_attention_layernorm"}, "parallel": False}
TWO = BLOCK | {"modules": MODULES | TWO_NORMS}
NEW = {"new_decoder_architecture": True, "parallel_attn": True, "multi_query": (True, False)}  # since Falcon-40B
UNREAD = dict.fromkeys(("attention_dropout", "hidden_dropout"), TRAINING)


def _old(one_head: bool, parallel: bool) -> Variant:
    """Return a kind of layers from before Falcon-40B, with one key/value head or as many as query heads."""
    norms = (None, 1) if parallel else (None, 1, 2)  # the last has no effect if the halves are sequential
    when = {"new_decoder_architecture": False, "multi_query": one_head, "parallel_attn": parallel}
    changes: dict[str, Any] = {"block": BLOCK if parallel else IN_TURN}
    if one_head:
        changes |= {"fields": FIELDS | {KV_HEADS: 1}, "unread": UNREAD | {"num_kv_heads": "multi_query: it is 1"}}
    else:
        changes |= {"fields": FIELDS | {KV_HEADS: HEADS}, "equal": {"num_kv_heads": HEADS}}
    return Variant(when | {"num_ln_in_parallel_attn": norms}, changes)


FAMILY = Family(
    model_type="falcon",
    block=BLOCK,
    fields=FIELDS | {KV_HEADS: "num_kv_heads"},
    variants=(
        *(_old(one_head, parallel) for one_head in (True, False) for parallel in (True, False)),
        Variant(NEW | {"num_ln_in_parallel_attn": (2, None)}, {"block": TWO}),
        Variant(NEW | {"num_ln_in_parallel_attn": 1}),
    ),
    fused={"self_attention.query_key_value": ("q", "k", "v")},
    fused_by_heads=True,
    requires={"alibi": False},
    unread=UNREAD,
)
