"""Mistral: Llama without biases, every layer with a sliding window where the config gives one."""

from pipeline.families.family import Family
from pipeline.families.llama import BLOCK

FAMILY = Family(model_type="mistral", block=BLOCK, windows=("sliding_window",))
