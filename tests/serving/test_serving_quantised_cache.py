"""Caches that hold few bits, of models whose widths the groups divide: quanto and HQQ, where they are installed."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, QuantizedCache

from tests.serving import serving_factors as kinds
from tests.serving.serving_factors import factorise, forms_of
from tests.serving.serving_sources import build

# Keys of 128 numbers a token, latents and narrow values of 64: groups of 64 divide them, as with budget: {multiple: 64}
SOURCE = LlamaConfig(
    vocab_size=97, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, head_dim=32, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
BACKENDS = {"quanto": ("optimum.quanto", 4), "hqq": ("hqq.core.quantize", 8)}


def narrow(sizes: Any, share: float) -> dict[str, Any]:
    """Value heads of half the numbers."""
    value = {"form": "head_pca", "rank": sizes.head_dim // 2}
    return {"v": value, "o": value}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "kind", [kinds.dense, narrow, kinds.latent_keys, kinds.latent_keys_narrow_values], ids=lambda kind: kind.__name__
)
@torch.no_grad()
def test_decoding_from_a_quantised_cache(kind: Any, backend: str) -> None:
    package, bits = BACKENDS[backend]
    pytest.importorskip(package)
    torch.manual_seed(0)
    source = LlamaForCausalLM(SOURCE)
    for parameter in source.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
    forms = forms_of(SOURCE, kind, 0.5)
    model = build(SOURCE, factorise(SOURCE, source.state_dict(), forms)[0], forms)
    ids = torch.arange(3, 43)[None]
    cache = QuantizedCache(backend, model.config, nbits=bits, q_group_size=64, residual_length=4)
    model(ids[:, :32], past_key_values=cache)
    steps = torch.cat([model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(32, 40)], dim=1)
    whole = model(ids).logits[:, 32:]
    assert cache.get_seq_length() == 40
    error = (steps - whole).norm() / whole.norm()
    assert 0 < error < 0.2
