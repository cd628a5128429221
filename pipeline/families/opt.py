"""OPT: LayerNorm before each half, learned positions, ReLU MLP without gate, biases everywhere."""

from pipeline.families.family import TRAINING, Family

BIASED = ("q", "k", "v", "o", "up", "down")

FAMILY = Family(
    model_type="opt",
    block={
        "embed": "model.decoder.embed_tokens",
        "layers": "model.decoder.layers",
        "final_norm": "model.decoder.final_layer_norm",
        "head": "lm_head",
        "head_bias": False,
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
        "biases": dict.fromkeys(BIASED, "enable_bias"),
        "norm": "layer",
        "rotary": None,
        "positions": {"module": "model.decoder.embed_positions", "offset": 2},
        "parallel": False,
    },
    fields={
        "intermediate_size": "ffn_dim",
        "hidden_act": "activation_function",
        "num_key_value_heads": "num_attention_heads",
        "initializer_range": "init_std",
        "norm_eps": 1e-5,
    },
    requires={"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
    equal={"word_embed_proj_dim": "hidden_size"},
    unread=dict.fromkeys(("dropout", "attention_dropout", "layerdrop"), TRAINING),
)
