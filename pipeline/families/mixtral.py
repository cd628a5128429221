"""Mixtral: Mistral with a mixture of experts in every layer."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import BLOCK
from pipeline.families.mixture import ROUTING, MixtureFamily

PATHS = {
    "router": "block_sparse_moe.gate",
    "experts": "block_sparse_moe.experts",
    "modules": {"gate": "w1", "up": "w3", "down": "w2"},
}
SIZES = {"experts": "num_local_experts", "width": "intermediate_size", "top_k": "num_experts_per_tok"}

FAMILY = Family(
    model_type="mixtral",
    block=BLOCK,
    windows=("sliding_window",),
    mixture=MixtureFamily(paths=PATHS, sizes=SIZES),
    unread={"attention_dropout": TRAINING, "router_jitter_noise": TRAINING, **ROUTING},
)
