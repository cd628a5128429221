"""Compressed forms: the same logits as a dense reference, a narrow value cache, decoding equal to prefill."""

import itertools
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tests.serving.serving_compressed import MIXED, compress, forms_for
from tests.serving.serving_factors import compiled_is_eager
from tests.serving.serving_sources import SOURCES, build, make_source, padded_batch

pytestmark = pytest.mark.sample(3)

TOLERANCE = 2e-5
CACHED = (
    "llama-gqa", "llama-mqa-tied", "mistral-window", "qwen2-mixed-window", "qwen3", "opt-tied", "gptj", "gemma2-tied",
    "olmo3", "cohere2",
)  # fmt: skip


def compressed(name: str, seed: int = 0) -> Any:
    source = make_source(name, seed)
    forms = forms_for(source.config, MIXED)
    return build(source.config, compress(source.config, source.state_dict(), forms)[0], forms)


def greedy(model: Any, ids_BT: torch.Tensor, mask_BT: torch.Tensor, **options: Any) -> torch.Tensor:
    # eos_token_id=None: every sequence goes on to the end, through the sliding windows too.
    tokens = model.generate(
        ids_BT, attention_mask=mask_BT, max_new_tokens=10, do_sample=False, eos_token_id=None, **options
    )
    assert isinstance(tokens, torch.Tensor)
    return tokens


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SOURCES)
def test_logits_of_the_dense_reference(name: str, attention: str) -> None:
    source = make_source(name)
    forms = forms_for(source.config, MIXED)
    ours, reference = compress(source.config, source.state_dict(), forms)
    model = build(source.config, ours, forms)
    dense_logits = source(torch.tensor([[5, 6, 7]])).logits
    source.load_state_dict(reference)
    assert (source(torch.tensor([[5, 6, 7]])).logits - dense_logits).abs().amax() > 0.01  # it is another model
    model.set_attn_implementation(attention)
    ids_BT, mask_BT = padded_batch()
    with torch.no_grad():
        theirs, ours_BTV = (one(ids_BT, attention_mask=mask_BT).logits for one in (source, model))
    assert (theirs - ours_BTV)[mask_BT.bool()].abs().amax() <= TOLERANCE


@pytest.mark.parametrize("name", SOURCES)
def test_full_rank_is_the_source(name: str) -> None:
    source = make_source(name)
    head_dim = build(source.config, source.state_dict()).config.head_dim
    full = {role: {"form": "head_pca", "rank": head_dim} for role in ("v", "o")}
    full |= {role: {"form": "head_low_rank", "rank": head_dim} for role in ("q", "k")}
    full |= {role: {"form": "pruned", "rank": 80} for role in ("gate", "up", "down")}
    forms = forms_for(source.config, [full] * 3)
    model = build(source.config, compress(source.config, source.state_dict(), forms)[0], forms)
    ids_BT, mask_BT = padded_batch()
    with torch.no_grad():
        theirs, ours = (one(ids_BT, attention_mask=mask_BT).logits for one in (source, model))
    assert (theirs - ours)[mask_BT.bool()].abs().amax() <= TOLERANCE


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CACHED)
def test_decoding_equals_prefill(name: str, cache: str) -> None:
    """Three sequences of unequal length: a prefill of 6, a piece of 3, then one token at a time."""
    model = compressed(name)
    ids_BT, mask_BT = padded_batch()
    past = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=14)
    cuts, pieces = [0, 6, 9, *range(10, 15)], []
    ids_BT[2, 5], mask_BT[2, 5:8] = 9, 1  # rows of 14, 11 and 9 tokens, so that no piece is padding only
    positions = (mask_BT.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(ids_BT, attention_mask=mask_BT, position_ids=positions, use_cache=False).logits
        for start, stop in itertools.pairwise(cuts):
            out = model(
                ids_BT[:, start:stop],
                attention_mask=mask_BT[:, :stop],
                position_ids=positions[:, start:stop],
                past_key_values=past,
                use_cache=True,
            )
            pieces.append(out.logits)
    assert (torch.cat(pieces, 1) - whole)[mask_BT.bool()].abs().amax() <= TOLERANCE


@pytest.mark.parametrize("name", ["llama-gqa", "opt-tied"])
def test_positions_by_default_in_cached_decoding(name: str) -> None:
    model = compressed(name)
    ids_BT, mask_BT = padded_batch()
    with torch.no_grad():
        whole = model(ids_BT, attention_mask=mask_BT).logits
        for past in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=14)):
            model(ids_BT[:, :11], attention_mask=mask_BT[:, :11], past_key_values=past)
            rest = model(ids_BT[:, 11:], attention_mask=mask_BT, past_key_values=past).logits
            assert (rest - whole[:, 11:]).abs().amax() <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHED)
def test_generate_with_and_without_cache(name: str) -> None:
    model = compressed(name)
    ids_BT, mask_BT = padded_batch()
    tokens = greedy(model, ids_BT, mask_BT, use_cache=True)
    assert torch.equal(tokens, greedy(model, ids_BT, mask_BT, use_cache=False))
    assert torch.equal(tokens, greedy(model, ids_BT, mask_BT, cache_implementation="static", disable_compile=True))
    for row in range(3):  # and each sequence by itself, without padding
        alone = ids_BT[row : row + 1, mask_BT[row].bool()]
        new = greedy(model, alone, torch.ones_like(alone))[0, -10:]
        assert torch.equal(tokens[row, -10:], new)


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "opt-tied", "gptj"])
def test_beam_search(name: str) -> None:
    model = compressed(name)
    ids_BT, mask_BT = padded_batch()
    beams = greedy(model, ids_BT, mask_BT, num_beams=3, use_cache=True)
    assert torch.equal(beams, greedy(model, ids_BT, mask_BT, num_beams=3, use_cache=False))


def test_the_value_cache_is_narrow() -> None:
    model = compressed("llama-gqa")
    ids_BT, mask_BT = padded_batch()
    widths = [(3, 3, 14, 5), (3, 3, 14, 3), (3, 3, 14, 12)]
    caches: tuple[Any, ...] = (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=14))
    for past in caches:
        model(ids_BT, attention_mask=mask_BT, past_key_values=past)
        assert [tuple(layer.values.shape) for layer in past.layers] == widths
        assert all(layer.keys.shape == (3, 3, 14, 12) for layer in past.layers)


def test_hooks_see_what_statistics_are_taken_of() -> None:
    model = compressed("qwen3")
    seen: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    layer = model.model.layers[1]
    roles = list(model.config.block["modules"])
    for role in roles:

        def keep(_module: object, args: tuple[torch.Tensor], out: torch.Tensor, role: str = role) -> None:
            seen.setdefault(role, []).append((args[0], out))

        layer.role(role).register_forward_hook(keep)
    ids_BT, _ = padded_batch()
    with torch.no_grad():
        model(ids_BT)
    assert {role: len(calls) for role, calls in seen.items()} == dict.fromkeys(roles, 1)
    assert seen["q"][0][0] is seen["k"][0][0] is seen["v"][0][0] is seen["input_norm"][0][1]
    assert seen["gate"][0][0] is seen["up"][0][0]
    assert seen["o"][0][0].shape == (3, 14, 6 * 3)
    assert seen["v"][0][1].shape == (3, 14, 3 * 3)
    gated = layer.act_fn(seen["gate"][0][1]) * seen["up"][0][1]
    assert torch.equal(seen["down"][0][0], gated)
    # o's input is the heads in order: head h reads the values of KV head h // 2 only.
    value_BTGr = seen["v"][0][1].reshape(3, 14, 3, 3)
    first_BHr = seen["o"][0][0][:, 0].reshape(3, 6, 3)  # the first token attends to itself alone
    assert torch.allclose(first_BHr, value_BTGr[:, 0].repeat_interleave(2, dim=1), atol=1e-6)
    with pytest.raises(KeyError):
        compressed("llama-gqa").model.layers[0].role("q_norm")


@pytest.mark.slow
def test_compiled_decoding_has_no_graph_breaks() -> None:
    assert compiled_is_eager(compressed("llama-gqa")) == 1
