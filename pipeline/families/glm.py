"""GLM-4 of 2024: Llama with interleaved partial rotation, and gate and up in one tensor."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import BLOCK
from pipeline.families.phi3 import FUSED_MLP

GLM_BLOCK = BLOCK | {"biases": dict.fromkeys(("q", "k", "v"), "attention_bias"), "rotary": "interleaved"}

FAMILY = Family(
    model_type="glm",
    block=GLM_BLOCK,
    fused=FUSED_MLP,
    partial_rotary=True,
    unread={"attention_dropout": TRAINING},
)
