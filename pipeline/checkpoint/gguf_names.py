"""The names that llama.cpp gives to the tensors of a layer, by role."""

LAYER_NAMES = {
    "input_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "mlp_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip
BIASES = ("q", "k", "v", "o")  # roles that may have one
NAMES = LAYER_NAMES | {
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "q_proj": "attn_q", "q_a_proj": "attn_q_a",
    "q_a_layernorm": "attn_q_a_norm", "q_b_proj": "attn_q_b", "kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "kv_a_layernorm": "attn_kv_a_norm", "o_proj": "attn_output", "router": "ffn_gate_inp",
    "shared.gate": "ffn_gate_shexp", "shared.up": "ffn_up_shexp", "shared.down": "ffn_down_shexp",
}  # fmt: skip
EXPERTS = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}
