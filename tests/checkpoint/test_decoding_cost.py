"""The reads and products of a step of decoding, against the arithmetic written out here."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.checkpoint.decoding_cost import decoding_costs
from pipeline.checkpoint.model_card import model_card
from tests.serving import serving_factors as kinds
from tests.serving.serving_factors import forms_of, sizes_of
from tests.serving.serving_sources import SOURCES, describe, make_source

LAYERS, VOCABULARY = 3, 97
LINEAR = ("q", "k", "v", "o", "gate", "up", "down")


def costs_of(name: str, kind: Any) -> tuple[Any, dict[str, Any], dict[str, dict[str, int]]]:
    """Sizes of a source, the forms of each of its layers, and the costs."""
    source = make_source(name).config
    forms = forms_of(source, kind, 0.5)
    return sizes_of(source), forms[0], decoding_costs(describe(source, forms))


def matrices(sizes: Any) -> int:
    """Numbers of a dense layer's matrices."""
    width = {"o": sizes.heads * sizes.head_dim, "down": sizes.inner}
    return sum(sizes.out(role) * width.get(role, sizes.hidden) for role in LINEAR if role in sizes.roles)


def test_dense() -> None:
    sizes, _, costs = costs_of("llama-gqa", kinds.dense)
    norms = (2 * LAYERS + 1) * sizes.hidden
    products = LAYERS * matrices(sizes) + VOCABULARY * sizes.hidden
    assert (
        costs["compressed"]
        == costs["dense"]
        == {
            "weights": products + norms,
            "products": products,
            "cached": LAYERS * 2 * sizes.kv_heads * sizes.head_dim,
            "cached_products": LAYERS * 2 * sizes.heads * sizes.head_dim,
        }
    )


def test_angles_that_go_by_the_longest_position() -> None:
    config = describe(make_source("llama-gqa").config, [{} for _ in range(LAYERS)])
    rope = {**config["rope_parameters"], "rope_type": "dynamic", "factor": 2.0}
    assert decoding_costs({**config, "rope_parameters": rope}) == decoding_costs(config)


@pytest.mark.parametrize("kind", [kinds.low_rank, kinds.joint, kinds.pivoted])
def test_each_number_of_a_factor_is_multiplied_once(kind: Any) -> None:
    sizes, _, costs = costs_of("llama-gqa", kind)
    norms = (2 * LAYERS + 1) * sizes.hidden
    assert costs["compressed"]["products"] == costs["compressed"]["weights"] - norms < costs["dense"]["products"]
    assert costs["compressed"]["cached_products"] == costs["dense"]["cached_products"]


@pytest.mark.parametrize("name", ["llama-gqa", "gptj"])
def test_latents_are_turned_for_each_cached_token(name: str) -> None:
    """Keys by r_k·C products; values are mixed as they are."""
    sizes, forms, costs = costs_of(name, kinds.latent_both)
    key, value, ours = forms["k"]["rank"], forms["v"]["rank"], costs["compressed"]
    cached = sizes.kv_heads * sizes.head_dim
    assert ours["cached"] == LAYERS * (key + value) < costs["dense"]["cached"]
    assert ours["cached_products"] == LAYERS * (key * cached + sizes.heads * (sizes.head_dim + value))


def test_a_tucker_group_goes_through_its_factors_twice() -> None:
    """Forwards for q, k and v, backwards for o with its share of the core; all kept from the first step on."""
    sizes, forms, costs = costs_of("gptj", kinds.tucker)
    (r1, r2, r3), heads = forms["q"]["ranks"], sizes.heads
    forwards = sizes.hidden * r1 + r1 * r2 * r3 * heads + 3 * heads * r3 * r2 + 3 * heads * r2 * sizes.head_dim
    backwards = heads * sizes.head_dim * r2 + heads * r2 * r1 + r1 * sizes.hidden
    (m1, m2, m3) = forms["up"]["ranks"]
    mlp = sizes.hidden * m1 + m1 * m2 * m3 + m3 * m2 + m2 * sizes.inner
    back = sizes.inner * m2 + m2 * m1 + m1 * sizes.hidden
    found = costs["compressed"]["products"] - VOCABULARY * sizes.hidden
    assert found == LAYERS * (forwards + backwards + mlp + back)


@pytest.mark.parametrize("places", [(0, 1, 0), (0, 1, 1)])
def test_layers_that_differ_are_counted_one_by_one(places: tuple[int, ...]) -> None:
    source = make_source("llama-gqa").config
    kinds_of_layers = [forms_of(source, kinds.latent_both, share)[0] for share in (0.5, 0.3)]
    all_alike = [decoding_costs(describe(source, [forms] * LAYERS))["compressed"] for forms in kinds_of_layers]
    found = decoding_costs(describe(source, [kinds_of_layers[kind] for kind in places]))["compressed"]
    norm, head = sizes_of(source).hidden, VOCABULARY * sizes_of(source).hidden
    for name, outside in {"weights": norm + head, "products": head, "cached": 0, "cached_products": 0}.items():
        assert LAYERS * (found[name] - outside) == sum(all_alike[kind][name] - outside for kind in places)


@pytest.mark.slow
def test_sources() -> None:
    """Learned positions and an embedding that is not the head are looked up, not read."""
    for name in {source[0] if isinstance(source, tuple) else source for source in SOURCES}:
        sizes, _, costs = costs_of(name, kinds.dense)
        assert costs["dense"]["products"] == LAYERS * matrices(sizes) + VOCABULARY * sizes.hidden
        assert costs["dense"]["products"] < costs["dense"]["weights"] < 1.05 * costs["dense"]["products"]


def test_the_card_says_it() -> None:
    source = make_source("llama-gqa").config
    _, forms, costs = costs_of("llama-gqa", kinds.latent_both)
    pair = {"dense": 4 * costs["dense"]["cached"], "compressed": 4 * costs["compressed"]["cached"]}
    card = model_card(
        {
            "counts": dict.fromkeys(("parameters", "decoder_parameters", "bytes", "cache_bytes_per_token"), pair),
            "manifest": {"methods": [{"method": "lorc"}]},
            "code_version": "1",
            "source": {"model_type": "llama", "path": "/x"},
            "decoding": costs,
            "layers": [{"forms": forms}] * LAYERS,
        },
        describe(source, [forms] * LAYERS),
    )
    dense, ours = costs["dense"], costs["compressed"]
    assert f"| numbers read for each cached token | {dense['cached']} | {ours['cached']} |" in card
    assert f"from {dense['weights'] // dense['cached']:,} cached tokens on (dense)" in card
    rank = forms["k"]["rank"]
    assert f"latents of {rank} to {rank} numbers per token and layer" in card
    assert f"more than {rank / 4:,.0f} operations" in card
