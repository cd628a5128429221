"""GPT-J: attention and MLP in parallel behind one LayerNorm, interleaved partial rotation, biases in the MLP."""

from pipeline.families.family import Family

FAMILY = Family(
    model_type="gptj",
    modules={
        "input_norm": "ln_1",
        "q": "attn.q_proj",
        "k": "attn.k_proj",
        "v": "attn.v_proj",
        "o": "attn.out_proj",
        "up": "mlp.fc_in",
        "down": "mlp.fc_out",
    },
    embed="transformer.wte",
    layers="transformer.h",
    final_norm="transformer.ln_f",
    head_bias=True,
    norm="layer",
    rotary="interleaved",
    parallel=True,
    biases={"up": True, "down": True},
    fields={
        "intermediate_size": "n_inner",
        "hidden_act": "activation_function",
        "num_key_value_heads": "num_attention_heads",
        "norm_eps": "layer_norm_epsilon",
        "attention_dropout": "attn_pdrop",
    },
)
