"""gpt-oss: attention sinks, windows in every other layer, and mixtures with biases and clamped channels."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import ATTENTION_BIAS, BLOCK, MODULES
from pipeline.families.mixtral import SIZES
from pipeline.families.mixture import GATE_UP, ROUTING, FusedExperts, MixtureFamily
from pipeline.families.qwen3_moe import PROJECTIONS

FAMILY = Family(
    model_type="gpt_oss",
    block=BLOCK | {"modules": MODULES | {"sinks": "self_attn"}, "biases": ATTENTION_BIAS},
    settings={"glu_alpha": "swiglu_alpha", "glu_limit": "swiglu_limit"},
    windows=("sliding_window", "layer_types"),
    mixture=MixtureFamily(
        paths={"router": "mlp.router", "experts": "mlp.experts", "modules": PROJECTIONS},
        sizes=SIZES,
        routing={"biases": True, "logit_bias": True},
        fused={
            "mlp.experts.gate_up_proj": FusedExperts(GATE_UP, transposed=True, interleaved=True),
            "mlp.experts.gate_up_proj_bias": FusedExperts(GATE_UP, "bias", interleaved=True),
            "mlp.experts.down_proj": FusedExperts(("down",), transposed=True),
            "mlp.experts.down_proj_bias": FusedExperts(("down",), "bias"),
        },
    ),
    unread={"attention_dropout": TRAINING, **ROUTING},
)
