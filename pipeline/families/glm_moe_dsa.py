"""GLM-5: DeepSeek-V3.2 with another rotation in the indexer."""

from pipeline.families.deepseek_v32 import indexed_family

FAMILY = indexed_family("glm_moe_dsa")
