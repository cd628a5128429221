"""GLM-4.7-Flash: DeepSeek-V3 with a list of the layers that have a dense MLP."""

from dataclasses import replace

from pipeline.families import deepseek_v3
from pipeline.families.foreign import latent_family
from pipeline.families.mixture import LISTED

family = deepseek_v3.FAMILY
assert family.mixture is not None

FAMILY = replace(
    family,
    model_type="glm4_moe_lite",
    foreign=latent_family("glm4_moe_lite"),
    mixture=replace(family.mixture, dense_layers=LISTED),
)
