"""GPT-NeoX and Pythia: LayerNorms, partial rotary halves, biases, attention and MLP in parallel or one after another.

Checkpoints hold queries, keys and values in one tensor: those of the first head, then those of the second, and so on.
"""

from pipeline.families.family import TRAINING, Family

FAMILY = Family(
    model_type="gpt_neox",
    block={
        "embed": "gpt_neox.embed_in",
        "layers": "gpt_neox.layers",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
        "head_bias": False,
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
        "biases": dict.fromkeys(("q", "k", "v", "o"), "attention_bias") | {"up": True, "down": True},
        "norm": "layer",
        "rotary": "half",
        "positions": None,
    },
    settings={"parallel": "use_parallel_residual"},
    fused={"attention.query_key_value": ("q", "k", "v")},
    fused_by_heads=True,
    partial_rotary=True,
    fields={"num_key_value_heads": "num_attention_heads", "norm_eps": "layer_norm_eps"},
    unread={
        **dict.fromkeys(("attention_dropout", "hidden_dropout"), TRAINING),
        "classifier_dropout": "a setting of a classifier",
        "is_decoder": "unused",
    },
)
