"""Mistral: Llama without biases, every layer with a sliding window where the config gives one."""

from pipeline.families.family import Family
from pipeline.families.llama import MODULES

FAMILY = Family(model_type="mistral", modules=MODULES, windows=("sliding_window",))
