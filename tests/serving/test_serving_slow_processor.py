"""Latents are multiplied in float32 where a CPU multiplies half precision slower: in a prefill as in decoding."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lamina import LaminaForCausalLM, processor_lamina
from lamina.factored_lamina import LowRankLinear
from lamina.layers_lamina import LaminaAttention
from tests.serving import serving_factors as kinds
from tests.serving.serving_factors import factored
from tests.serving.serving_sources import padded_batch

pytestmark = pytest.mark.sample(3)

KINDS = (kinds.latent_both, kinds.latent_keys_narrow_values, kinds.narrow_keys_latent_values, kinds.absorbed)
CASES = [(kind, "llama-gqa") for kind in KINDS]
CASES += [(kinds.latent_both, name) for name in ("qwen3", "opt-tied", "gptj", "mistral-window")]


@pytest.fixture
def made_in(monkeypatch: pytest.MonkeyPatch) -> set[torch.dtype]:
    """The dtypes of what latents are made into."""
    found: set[torch.dtype] = set()
    forward = LowRankLinear.forward

    def noted(self: LowRankLinear, x_BTD: Tensor, given_BTr: Tensor | None = None) -> Tensor:
        out = forward(self, x_BTD, given_BTr)
        if given_BTr is not None:
            found.add(out.dtype)
        return out

    monkeypatch.setattr(LowRankLinear, "forward", noted)
    return found


def in_half(
    name: str, kind: Any, dtype: torch.dtype, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Any]:
    """A model in half precision on such a CPU, and the same in float32."""
    monkeypatch.setattr(processor_lamina, "multiplies_fast", lambda dtype: not is_slow)
    monkeypatch.setattr(LaminaAttention, "block", 3)
    exact, _ = factored(name, kind, 0.5)
    model = LaminaForCausalLM(exact.config)
    model.load_state_dict(exact.state_dict())
    return model.to(dtype).eval(), exact.to(dtype).float()


def logits_of(model: Any, mask_BT: Tensor, ids_BT: Tensor, num_decoded: int) -> Tensor:
    """Logits of all tokens: of a prefill, then of the last few one by one."""
    num_first, positions = ids_BT.shape[1] - num_decoded, (mask_BT.cumsum(1) - 1).clamp(min=0)
    parts, past = [], None
    with torch.no_grad():
        for start, stop in [(0, num_first), *((i, i + 1) for i in range(num_first, ids_BT.shape[1]))]:
            out = model(
                ids_BT[:, start:stop], attention_mask=mask_BT[:, :stop], position_ids=positions[:, start:stop],
                past_key_values=past, use_cache=True,
            )  # fmt: skip
            past = out.past_key_values
            parts.append(out.logits)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("is_slow", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_latents_are_multiplied_in_the_better_dtype(
    kind: Any, name: str, dtype: torch.dtype, is_slow: bool, made_in: set[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both implementations that a CPU has; logits stay half precision's."""
    model, exact = in_half(name, kind, dtype, is_slow, monkeypatch)
    ids_BT, mask_BT = padded_batch(16)
    real = mask_BT.bool()
    expected = logits_of(exact, mask_BT, ids_BT, 0)[real]
    made_in.clear()
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        for num_decoded in (0, 5):
            found = logits_of(model, mask_BT, ids_BT, num_decoded)[real]
            assert found.dtype == dtype
            tolerance = 0.06 if dtype == torch.bfloat16 else 0.01
            assert (found.float() - expected).norm() < tolerance * expected.norm()
    assert made_in <= {torch.float32 if is_slow else dtype}
    assert made_in or kind is kinds.absorbed


def test_a_mask_of_numbers_and_a_linear_of_another_module(
    made_in: set[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, exact = in_half("llama-gqa", kinds.latent_both, torch.bfloat16, True, monkeypatch)
    ids_BT, _ = padded_batch(8)
    causal_TT = torch.full((8, 8), torch.finfo(torch.bfloat16).min).triu(1)
    expected = logits_of(exact, torch.ones_like(ids_BT), ids_BT, 0)
    seen = []
    for module in model.modules():
        if isinstance(module, LowRankLinear) and module.second is not None:
            module.second.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.no_grad():
        mask = causal_TT.bfloat16().expand(len(ids_BT), 1, 8, 8)
        found = model(ids_BT, attention_mask=mask, use_cache=False).logits
    assert (found.float() - expected).norm() < 0.06 * expected.norm()
    assert {*seen} == {torch.bfloat16}
    assert made_in >= {torch.float32}


@pytest.mark.parametrize("implementation", ["vllm", "flex_attention"])
def test_engines_get_their_own_dtype(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = in_half("llama-gqa", kinds.latent_both, torch.bfloat16, True, monkeypatch)
    attention = next(module for module in model.modules() if isinstance(module, LaminaAttention))
    query = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    assert attention._dtype_of_latents(query) == torch.float32
    monkeypatch.setattr(attention.config, "_attn_implementation_internal", implementation)
    assert attention._dtype_of_latents(query) == torch.bfloat16
    assert attention._dtype_of_latents(query.to("meta")) == torch.bfloat16
