"""Mistral: Llama without biases, and with a sliding window in every layer if the config has one."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import BLOCK

FAMILY = Family(
    model_type="mistral",
    block=BLOCK,
    requires={"layer_types": None},  # with these, transformers loads it as another family, ministral
    windows=("sliding_window",),
    unread={"attention_dropout": TRAINING},
)
