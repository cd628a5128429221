"""OLMo 2: Llama with norms after attention and MLP instead of before them, and over all queries and all keys."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import ATTENTION_BIAS, BLOCK, MODULES
from pipeline.families.qwen3 import HEAD_NORMS

OUTPUT_NORMS = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
MATRICES = {role: path for role, path in MODULES.items() if not role.endswith("norm")}
OLMO_BLOCK = BLOCK | {
    "modules": MATRICES | OUTPUT_NORMS | HEAD_NORMS,
    "biases": ATTENTION_BIAS,
    "head_norms": "all",
}

FAMILY = Family(model_type="olmo2", block=OLMO_BLOCK, unread={"attention_dropout": TRAINING}, unlisted=("head_dim",))
