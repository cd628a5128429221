"""GLM-4 of 2025: GLM with additional norms after attention and MLP."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.glm import GLM_BLOCK
from pipeline.families.llama import MODULES
from pipeline.families.phi3 import FUSED_MLP

OUTPUT_NORMS = {"attention_out_norm": "post_self_attn_layernorm", "mlp_out_norm": "post_mlp_layernorm"}

FAMILY = Family(
    model_type="glm4",
    block=GLM_BLOCK | {"modules": MODULES | OUTPUT_NORMS},
    fused=FUSED_MLP,
    partial_rotary=True,
    unread={"attention_dropout": TRAINING},
)
