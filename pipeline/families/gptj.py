"""GPT-J: attention and MLP in parallel after one LayerNorm, interleaved partial rotation, biases in the MLP."""

from pipeline.families.family import TRAINING, Family

FAMILY = Family(
    model_type="gptj",
    block={
        "embed": "transformer.wte",
        "layers": "transformer.h",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
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
        "biases": {"up": True, "down": True},
        "norm": "layer",
        "rotary": "interleaved",
        "positions": None,
        "parallel": True,
    },
    rotary_field="rotary_dim",
    fields={
        "intermediate_size": "n_inner",
        "hidden_act": "activation_function",
        "num_key_value_heads": "num_attention_heads",
        "norm_eps": "layer_norm_epsilon",
    },
    unread=dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), TRAINING),
)
