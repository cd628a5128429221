"""Phi-3 and Phi-4: Llama whose checkpoints hold q, k and v in one tensor, and gate and up in another."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import BLOCK

FUSED_MLP = {"mlp.gate_up_proj": ("gate", "up")}

FAMILY = Family(
    model_type="phi3",
    block=BLOCK,
    fused={"self_attn.qkv_proj": ("q", "k", "v"), **FUSED_MLP},
    partial_rotary=True,
    windows=("sliding_window",),
    unread=dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop"), TRAINING),
    unlisted=("head_dim",),
)
