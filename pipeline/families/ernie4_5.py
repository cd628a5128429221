"""ERNIE 4.5: Llama with an interleaved rotation; one switch for all biases."""

from pipeline.families.family import Family
from pipeline.families.llama import BLOCK

ROLES = ("q", "k", "v", "o", "gate", "up", "down")

FAMILY = Family(
    model_type="ernie4_5",
    block=BLOCK | {"biases": dict.fromkeys(ROLES, "use_bias"), "rotary": "interleaved"},
)
