"""The text model of Gemma 3: Gemma 2 with norms over heads, a rotation for each layer type, and no capped scores."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.gemma2 import GEMMA_BLOCK
from pipeline.families.qwen3 import HEAD_NORMS

FAMILY = Family(
    model_type="gemma3_text",
    block=GEMMA_BLOCK | {"modules": GEMMA_BLOCK["modules"] | HEAD_NORMS},
    settings={"query_scalar": "query_pre_attn_scalar", "logit_softcap": "final_logit_softcapping"},
    fields={"hidden_act": "hidden_activation"},
    requires={"use_bidirectional_attention": False},
    windows=("sliding_window", "layer_types"),
    unread={"attention_dropout": TRAINING, "attn_logit_softcapping": "the model caps no scores"},
)
