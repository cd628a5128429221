"""Mistral: Llama without biases, every layer with a sliding window where the config gives one."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import BLOCK

FAMILY = Family(
    model_type="mistral",
    block=BLOCK,
    requires={"layer_types": None},  # with these, transformers loads it as another family, ministral
    windows=("sliding_window",),
    unread={"attention_dropout": TRAINING},
)
