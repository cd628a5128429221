"""Latent keys and values: the cache holds latents, whatever cache it is, and decoding still is the prefill."""

import itertools
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from lamina.latent_attention_lamina import attend_in_blocks
from lamina.layers_lamina import LaminaAttention
from lamina.rotary_lamina import LaminaRotaryEmbedding, rotate, rotate_once
from tests.serving import serving_factors as kinds
from tests.serving.serving_factors import compiled_is_eager, factored, factorise, forms_of, same_as_prefill, same_logits
from tests.serving.serving_sources import SMALL, build, make_source, padded_batch

pytestmark = pytest.mark.sample(3)

SOURCES = (
    "llama-gqa", "llama-yarn-rope", "qwen2-tied", "qwen2-mixed-window", "qwen3", "mistral-window", "opt-tied", "gptj",
)  # fmt: skip
KINDS = (
    kinds.latent_keys, kinds.latent_values, kinds.latent_both, kinds.absorbed, kinds.latent_keys_absorbed_values,
    kinds.latent_keys_narrow_values, kinds.narrow_keys_latent_values,
)  # fmt: skip
ALL = [(kind, name) for kind in KINDS for name in SOURCES]
# Layers of different kinds, the first of them the one whose lengths a cache reports.
MIXES = (
    [kinds.latent_both, kinds.dense, kinds.latent_keys_absorbed_values],
    [kinds.dense, kinds.latent_keys, kinds.absorbed],
    [kinds.narrow_keys_latent_values, kinds.latent_keys_narrow_values, kinds.tucker],
)
CACHED = ("llama-gqa", "qwen2-mixed-window", "qwen3", "mistral-window", "opt-tied", "gptj")
CACHED_MIXES = [(MIXES[i % 3], name) for i, name in enumerate(CACHED)] + [(MIXES[0], "mistral-window")]


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_full_rank_is_the_source(kind: Any, name: str) -> None:
    model, _ = factored(name, kind, 1.0)
    same_logits(model, make_source(name), 1e-5)


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_lower_rank_is_the_products(kind: Any, name: str) -> None:
    same_logits(*factored(name, kind, 0.5), relative=2e-5)


def test_eager_attention() -> None:
    for kind in (kinds.latent_both, kinds.latent_keys_absorbed_values):
        model, reference = factored("llama-gqa", kind, 0.5)
        model.set_attn_implementation("eager")
        same_logits(model, reference, 2e-5)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(("mix", "name"), CACHED_MIXES)
@torch.no_grad()
def test_decoding_is_the_prefill(mix: Any, name: str) -> None:
    model, _ = factored(name, mix, 0.5)
    same_as_prefill(model)
    same_as_prefill(model, num_new=12, cache_implementation="static", disable_compile=True)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(("mix", "name"), CACHED_MIXES)
@torch.no_grad()
def test_decoding_in_blocks_is_the_prefill(mix: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 3 cached tokens: some hold nothing but the padding of a row, or lie before its window."""
    blocks: list[int] = []

    def counted(query: Any, read: Any, num_slots: int, *rest: Any, **named: Any) -> torch.Tensor:
        blocks.append(num_slots)
        return attend_in_blocks(query, read, num_slots, *rest, **named)

    monkeypatch.setattr(LaminaAttention, "block", 3)
    monkeypatch.setattr("lamina.layers_lamina.attend_in_blocks", counted)
    model, _ = factored(name, mix, 0.5)
    same_as_prefill(model, num_new=16)
    assert max(blocks, default=0) > 3
    same_as_prefill(model, num_new=8, cache_implementation="static", disable_compile=True)
    blocks.clear()
    with torch.enable_grad():
        same_as_prefill(model, num_new=2)  # generate() decodes without gradients
    assert blocks


@pytest.mark.parametrize(("heads", "kv_heads", "value_heads"), [(6, 3, 3), (6, 3, 1), (4, 4, 4), (4, 1, 1)])
@pytest.mark.parametrize("block", [1, 4, 7, 50])
def test_blocks_are_the_whole(heads: int, kv_heads: int, value_heads: int, block: int) -> None:
    """Against softmax attention in float64; large scores, a mask of booleans or of numbers, none, two tokens."""
    torch.manual_seed(block)
    query_BHTd = torch.randn(2, heads, 2, 8) * 6
    key_BGSd, value_BGSw = torch.randn(2, kv_heads, 19, 8), torch.randn(2, value_heads, 19, 5)
    mask_B1TS = torch.rand(2, 1, 2, 19) > 0.6
    mask_B1TS[:, :, :, 11] = True
    mask_B1TS[0, :, :, :8] = False
    added = torch.zeros(mask_B1TS.shape).masked_fill(~mask_B1TS, torch.finfo(torch.float32).min)
    scores = query_BHTd.double() @ key_BGSd.double().repeat_interleave(heads // kv_heads, 1).mT * 0.3
    values = value_BGSw.double().repeat_interleave(heads // value_heads, 1)
    for mask in (None, mask_B1TS, added):
        hidden = scores if mask is None else scores.masked_fill(~mask_B1TS, -torch.inf)
        expected_BHTw = hidden.softmax(-1) @ values

        def read(slots: slice) -> tuple[torch.Tensor, torch.Tensor]:
            return key_BGSd[:, :, slots], value_BGSw[:, :, slots]

        found_BTHw = attend_in_blocks(query_BHTd, read, 19, mask, 0.3, block)
        torch.testing.assert_close(found_BTHw.transpose(1, 2).double(), expected_BHTw, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(("mix", "name"), CACHED_MIXES)
def test_pieces_are_the_prefill(mix: Any, name: str, cache: str) -> None:
    """Pieces of 3, 1, 2 and 3 tokens, then one token at a time: shorter than the window, filling it, and beyond."""
    model, _ = factored(name, mix, 0.5)
    ids_BT, mask_BT = padded_batch(20)
    past = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=23)
    cuts, pieces = [0, 3, 4, 6, 9, *range(10, 15), 20], []
    for row in range(3):
        mask_BT[row, row:] = 1  # no piece is padding only
    positions = (mask_BT.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(ids_BT, attention_mask=mask_BT, position_ids=positions, use_cache=False).logits
        for start, stop in itertools.pairwise(cuts):
            inputs = {"attention_mask": mask_BT[:, :stop], "position_ids": positions[:, start:stop]}
            pieces.append(model(ids_BT[:, start:stop], past_key_values=past, use_cache=True, **inputs).logits)
    assert (torch.cat(pieces, 1) - whole)[mask_BT.bool()].abs().amax() <= 2e-5


def test_the_cache_holds_the_latents() -> None:
    model, _ = factored("llama-gqa", MIXES[0], 0.5)
    ids_BT, mask_BT = padded_batch()
    caches: tuple[Any, ...] = (DynamicCache(config=model.config), DynamicCache(), StaticCache(model.config, 20))
    for past in caches:
        with torch.no_grad():
            model(ids_BT, attention_mask=mask_BT, past_key_values=past)
        slots = 20 if isinstance(past, StaticCache) else 14
        shapes = [(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in past.layers]
        assert shapes[0] == ((3, 1, slots, 18), (3, 1, slots, 15))
        assert shapes[1] == ((3, 3, slots, 12), (3, 3, slots, 12))
        assert shapes[2] == ((3, 1, slots, 15), (3, 1, slots, 18))
        for layer_idx, layer in enumerate(past.layers):
            numbers = (layer.keys.numel() + layer.values.numel()) // (3 * slots)
            assert numbers == model.config.cache_numbers(layer_idx)
    assert torch.equal(caches[0].layers[0].keys, caches[2].layers[0].keys[:, :, :14])


def test_dense_values_beside_latent_keys_lie_in_one_head() -> None:
    model, _ = factored("llama-gqa", kinds.latent_keys, 0.5)
    past: Any = StaticCache(model.config, max_cache_len=16)
    with torch.no_grad():
        model(padded_batch()[0], past_key_values=past)
    assert past.layers[0].keys.shape == (3, 1, 16, 18)
    assert past.layers[0].values.shape == (3, 1, 16, 36)


@pytest.mark.parametrize(("mix", "name"), CACHED_MIXES[:4])
def test_beam_search(mix: Any, name: str) -> None:
    model, _ = factored(name, mix, 0.5)
    ids_BT, mask_BT = padded_batch()
    options = {"attention_mask": mask_BT, "max_new_tokens": 8, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    beams = model.generate(ids_BT, use_cache=True, **options)
    assert torch.equal(beams, model.generate(ids_BT, use_cache=False, **options))


@pytest.mark.parametrize(("mix", "name"), CACHED_MIXES[:4])
def test_a_chat_goes_on(mix: Any, name: str) -> None:
    model, _ = factored(name, mix, 0.5)
    ids_BT, mask_BT = padded_batch()
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    for past in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=40)):
        first = model.generate(ids_BT, attention_mask=mask_BT, past_key_values=past, disable_compile=True, **options)
        said = torch.cat((first, torch.randint(3, 97, (3, 5), generator=torch.Generator().manual_seed(5))), dim=1)
        mask = torch.cat((mask_BT, torch.ones(3, 11, dtype=torch.long)), dim=1)
        answer = model.generate(said, attention_mask=mask, past_key_values=past, disable_compile=True, **options)
        assert torch.equal(answer, model.generate(said, attention_mask=mask, use_cache=False, **options))


@pytest.mark.parametrize("name", ["llama-gqa", "opt-tied", "gptj"])
def test_cropped_caches_go_on(name: str) -> None:
    model, _ = factored(name, MIXES[0], 0.5)
    ids_BT, _ = padded_batch()
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(ids_BT, use_cache=False).logits
        model(torch.cat((ids_BT[:, :9], ids_BT[:, :4]), 1), past_key_values=past)
        past.crop(-4)
        rest = model(ids_BT[:, 9:], past_key_values=past).logits
    assert (rest - whole[:, 9:]).abs().amax() <= 2e-5
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    guessed = model.generate(ids_BT[:1], prompt_lookup_num_tokens=3, **options)  # crops what it guessed wrong
    assert torch.equal(guessed, model.generate(ids_BT[:1], **options))


@pytest.mark.slow
def test_compiled_decoding_has_no_graph_breaks() -> None:
    def joint_keys(sizes: Any, share: float) -> Any:
        return kinds.joint_head(sizes, share) | kinds.latent_values(sizes, share)

    def joint_mlp(sizes: Any, share: float) -> Any:
        low = {"q": {"form": "low_rank", "rank": 9}}
        return kinds.joint(sizes, share) | kinds.latent_keys_absorbed_values(sizes, share) | low

    model, _ = factored("llama-mha", [joint_keys, joint_mlp, kinds.tucker_sparse], 0.5)
    assert compiled_is_eager(model) == 1


@pytest.mark.slow
def test_compiled_decoding_beyond_a_window() -> None:
    compiled_is_eager(factored("mistral-window", [kinds.latent_both, kinds.latent_keys, kinds.tucker], 0.5)[0])


def test_chunked_prefill_of_a_static_cache() -> None:
    """generate() allocates the cache ahead here, from head_dim, unless the model says that it cannot know."""
    model, _ = factored("llama-gqa", MIXES[0], 0.5)
    assert model._get_static_cache_init_shape() is None
    narrow, _ = factored("llama-gqa", [kinds.latent_keys_narrow_values, kinds.dense, kinds.dense], 1.0)
    assert narrow._get_static_cache_init_shape() is None
    plain, _ = factored("llama-gqa", kinds.joint, 0.5)
    if hasattr(super(type(plain), plain), "_get_static_cache_init_shape"):
        assert plain._get_static_cache_init_shape() == (3, 12)


def test_slot_angles_are_made_once_per_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    angles = LaminaRotaryEmbedding.angles

    def counted(self: Any, x_BTD: torch.Tensor, position_ids_BT: torch.Tensor) -> Any:
        calls.append(position_ids_BT.shape[-1])
        return angles(self, x_BTD, position_ids_BT)

    monkeypatch.setattr(LaminaRotaryEmbedding, "angles", counted)
    ids_BT, _ = padded_batch()
    expected = [(kinds.latent_keys, [14, 14, 20]), (kinds.latent_values, [14]), (kinds.dense, [14])]
    for kind, widths in expected:
        model, _ = factored("llama-gqa", kind, 0.5)
        calls.clear()
        with torch.no_grad():
            model(ids_BT, past_key_values=StaticCache(model.config, max_cache_len=20))
        assert calls == widths
        calls.clear()
        model(ids_BT, use_cache=False)  # without a cache there are no slots
        assert calls == [14]


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_go_by_positions_not_by_slots(rope_type: str) -> None:
    """These rope types change with the length of the text; the free slots of a static cache are no text."""
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 6, "long_factor": [8.0] * 6, "original_max_position_embeddings": 24}
    sizes = {"num_key_value_heads": 3, "head_dim": 12, "max_position_embeddings": 24 if rope_type == "dynamic" else 96}
    torch.manual_seed(0)
    source: Any = LlamaForCausalLM(LlamaConfig(**{**SMALL, **sizes}, rope_parameters=rope)).eval()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    forms = forms_of(source.config, kinds.latent_both, 0.5)
    ours, reference = factorise(source.config, source.state_dict(), forms)
    model = build(source.config, ours, forms)
    source.load_state_dict(reference)
    ids_BT, _ = padded_batch()
    with torch.no_grad():
        past = StaticCache(model.config, max_cache_len=90)
        pieces = [model(ids_BT[:, a:b], past_key_values=past).logits for a, b in ((0, 10), (10, 13), (13, 14))]
        assert (torch.cat(pieces, 1) - source(ids_BT).logits).abs().amax() <= 5e-5
        long_BT = ids_BT.repeat(1, 3)
        assert (model(long_BT).logits - source(long_BT).logits).abs().amax() <= 5e-5


def test_a_layer_alone() -> None:
    """Keys, values and o as hooks see them: without a cache they are those of a dense layer."""
    model, reference = factored("llama-gqa", kinds.latent_both, 0.5)
    seen: dict[str, Any] = {}
    for role, attribute in (("k", "k_proj"), ("v", "v_proj"), ("o", "o_proj")):
        model.model.layers[0].role(role).register_forward_hook(lambda _, a, out, r=role: seen.update({r: (a[0], out)}))
        theirs = getattr(reference.model.layers[0].self_attn, attribute)
        theirs.register_forward_hook(lambda _, a, out, r=role: seen.update({r + "'": (a[0], out)}))
    ids_BT, _ = padded_batch()
    with torch.no_grad():
        model(ids_BT, use_cache=False)
        reference(ids_BT)
    for role in "kvo":
        for ours, theirs in zip(seen[role], seen[role + "'"], strict=True):
            assert (ours - theirs).abs().amax() <= 2e-5


@torch.no_grad()
def test_decoding_makes_keys_of_a_block_and_turns_no_cached_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by a block; of latent values only the heads' mixtures pass the second factor."""
    monkeypatch.setattr(LaminaAttention, "block", 4)
    model, _ = factored("llama-gqa", kinds.latent_both, 0.5)
    cache = DynamicCache(config=model.config)
    model(torch.arange(4, 15)[None], past_key_values=cache)
    seen: dict[str, list[int]] = {"k_proj": [], "v_proj": []}
    for name, module in model.named_modules():
        if name.endswith(".second"):
            role = name.split(".")[-2]
            module.register_forward_pre_hook(lambda _, args, role=role: seen[role].append(args[0].shape[1]))
    model(torch.tensor([[5]]), past_key_values=cache)
    layers = model.config.num_hidden_layers
    assert seen["k_proj"] == [4, 4, 4] * layers, "12 cached tokens, 4 at a time"
    assert seen["v_proj"] == [model.config.num_attention_heads] * layers


@pytest.mark.parametrize("width", [8, 6])
def test_rotating_once_is_rotating(width: int) -> None:
    x_BHTd, angles = torch.randn(2, 3, 5, 8).transpose(1, 2), torch.randn(2, 3, width // 2).repeat(1, 1, 2)
    expected = rotate(x_BHTd, angles.cos(), angles.sin(), interleaved=False)
    torch.testing.assert_close(rotate_once(x_BHTd, angles.cos(), angles.sin()), expected)
