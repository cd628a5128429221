"""vLLM's rotation of queries is ours, which is transformers', for every rope type; or it is refused by name."""

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config

from lamina import LaminaConfig
from lamina.block_lamina import DEFAULT_BLOCK
from lamina.engine_vllm.model import make_rotary
from lamina.rotary_lamina import LaminaRotaryEmbedding, rotate

SCALED: dict[str, Any] = {"rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", **SCALED, "original_max_position_embeddings": 16}
SAME: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "linear", **SCALED},
    {"rope_type": "dynamic", **SCALED},
    {"rope_type": "proportional", "rope_theta": 10000.0},
    YARN,
    {**YARN, "attention_factor": 1.5, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    {
        "rope_type": "llama3", **SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
]  # fmt: skip


def described(rope: dict[str, Any], head_dim: int, rotary: str) -> LaminaConfig:
    return LaminaConfig(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=head_dim, num_hidden_layers=1,
        max_position_embeddings=64, vocab_size=10, intermediate_size=8, rope_parameters=dict(rope),
        block={**DEFAULT_BLOCK, "rotary": rotary},
    )  # fmt: skip


def difference(config: LaminaConfig) -> float:
    """The largest between rotated queries, of 40 tokens."""
    width, positions_T = config.head_dim, torch.arange(40)
    query_1HTd = torch.randn(1, 2, 40, width, generator=torch.Generator().manual_seed(0))
    cos, sin = LaminaRotaryEmbedding(config)(query_1HTd, positions_T[None])
    expected = rotate(query_1HTd, cos, sin, config.block["rotary"] == "interleaved")
    rows_TX = query_1HTd[0].transpose(0, 1).flatten(1)
    with set_current_vllm_config(VllmConfig()):
        rotary: Any = make_rotary(config)
        found_TX, _ = rotary.forward_native(positions_T, rows_TX.clone(), rows_TX.clone())
    return float((found_TX.unflatten(1, (2, width)).transpose(0, 1)[None] - expected).abs().max())


@pytest.mark.parametrize("rope", SAME, ids=str)
def test_it_rotates_as_transformers_does(rope: dict[str, Any]) -> None:
    assert difference(described(rope, 16, "half")) < 1e-5


@pytest.mark.parametrize(("head_dim", "width"), [(44, 30), (16, 8), (78, 62)])
def test_a_part_of_a_head_is_of_the_width_that_the_source_says(head_dim: int, width: int) -> None:
    """44 times 30 / 44 is less than 30 in floating point."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": width / head_dim}
    assert difference(described(rope, head_dim, "interleaved")) < 1e-5


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "proportional", **SCALED}, "vLLM ignores its factor 4, unlike transformers"),
        (
            {
                "rope_type": "longrope", **SCALED, "original_max_position_embeddings": 16, "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
            },
            "rope_type longrope: vLLM chooses factors by the longest sequence",
        ),
    ],
)  # fmt: skip
def test_another_rotation_is_refused(rope: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_rotary(described(rope, 16, "half"))
