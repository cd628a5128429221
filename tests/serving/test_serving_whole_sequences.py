"""The decoder layer without a model around it: it computes what transformers' functions do."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.activations import ACT2FN

from lamina import LayersConfig
from lamina.activation_lamina import ACTIVATIONS, activation
from lamina.attention_lamina import attend
from lamina.decoder_layer_lamina import DecoderLayer
from lamina.inputs_lamina import prepare_layer_inputs
from lamina.layers_lamina import LaminaDecoderLayer
from lamina.rotary_lamina import make_rotary
from tests.serving.serving_compressed import MIXED, compress, forms_for
from tests.serving.serving_sources import SOURCES, describe, layer_prefix, make_source

pytestmark = pytest.mark.sample(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_transformers_own(name: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-9.0, 9.0, 999).to(dtype)
    assert torch.equal(activation(name)(x), ACT2FN[name](x))


def test_the_rarer_activations_come_from_transformers() -> None:
    assert type(activation("quick_gelu")) is type(ACT2FN["quick_gelu"])
    with pytest.raises(KeyError):
        activation("softer_than_relu")


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 6, 10, 17])
def test_a_window_of_five(num_tokens: int, groups: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 2 * groups, num_tokens, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, num_tokens, 8, dtype=torch.float64)
    distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
    for window, near in ((None, distance >= 0), (5, (distance >= 0) & (distance < 5))):
        expected = scaled_dot_product_attention(
            query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), attn_mask=near, scale=0.3
        )
        torch.testing.assert_close(attend(query, key, value, 0.3, window).transpose(1, 2), expected)


def test_no_mask_of_a_long_sequence_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def spied(*args: Any, attn_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        seen.append(0 if attn_mask is None else attn_mask.numel())
        return scaled_dot_product_attention(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", spied)
    attend(torch.randn(1, 2, 100, 4), torch.randn(1, 1, 100, 4), torch.randn(1, 1, 100, 4), 0.5, 8)
    assert len(seen) == 13
    assert max(seen) == 8 * 15


@pytest.mark.parametrize("kind", ["dense", "compressed"])
@pytest.mark.parametrize("name", SOURCES)
def test_a_layer_is_that_of_the_model(name: str, kind: str) -> None:
    """The same tensors, with and without transformers' attention functions and masks; sliding windows included."""
    source = make_source(name)
    forms = forms_for(source.config, MIXED) if kind == "compressed" else None
    tensors = source.state_dict() if forms is None else compress(source.config, source.state_dict(), forms)[0]
    config = LayersConfig(**describe(source.config, forms))
    config._attn_implementation = "sdpa"
    hidden_BTD = torch.randn(2, 13, config.hidden_size)
    inputs = prepare_layer_inputs(config, make_rotary(config), hidden_BTD)  # type: ignore[arg-type]
    for layer_idx in range(3):
        prefix = layer_prefix(source.config, layer_idx)
        mine = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        bare, whole = DecoderLayer(config, layer_idx), LaminaDecoderLayer(config, layer_idx)
        for layer in (bare, whole):
            layer.load_state_dict(mine)
            layer.eval().requires_grad_(False)
        expected = whole(hidden_BTD, **inputs.of(whole))
        torch.testing.assert_close(
            bare(hidden_BTD, position_embeddings=inputs.of(whole)["position_embeddings"]), expected
        )


AUTO = """
import lamina
config = lamina.LaminaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                             num_key_value_heads=2, head_dim=8, vocab_size=9)
from transformers import AutoModel, AutoModelForCausalLM
for auto, made in ((AutoModel, lamina.LaminaModel), (AutoModelForCausalLM, lamina.LaminaForCausalLM)):
    assert type(auto.from_config(config)) is made
"""


@pytest.mark.slow
def test_a_config_is_enough_for_the_auto_classes() -> None:
    """Whenever they are imported: the models are registered when a config is made, not with the package."""
    subprocess.run([sys.executable, "-c", AUTO], timeout=60, check=True)
