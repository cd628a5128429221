"""Solar Open: Llama with DeepSeek-V3's mixtures in all layers."""

from dataclasses import replace

from pipeline.families import deepseek_v3
from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import BLOCK
from pipeline.families.mixture import EVERY_LAYER

mixture = deepseek_v3.FAMILY.mixture
assert mixture is not None

FAMILY = Family(
    model_type="solar_open",
    block=BLOCK | {"biases": dict.fromkeys(("q", "k", "v"), "attention_bias")},
    fields={"intermediate_size": "moe_intermediate_size"},
    mixture=replace(mixture, dense_layers=EVERY_LAYER),
    unread={"attention_dropout": TRAINING, "output_router_logits": "the outputs of a call"},
)
