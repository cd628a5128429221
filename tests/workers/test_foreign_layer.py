"""A worker's layer with foreign attention: transformers' numbers forwards and backwards, and values that overflow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lamina import LayersConfig
from manifests.errors import NumericsError
from pipeline.families.registry import geometry_of, standard_config
from tests import factories
from workers.differentiable import DifferentiableLayer
from workers.tapped_layer import TappedLayer

LAYERS = {"dense": 0, "mixture": 1}


@pytest.fixture(scope="module", params=factories.FOREIGN)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return factories.make_model(tmp_path_factory.mktemp("foreign"), request.param)


def tapped(source: Path, index: int, dtype: torch.dtype, **changed: torch.Tensor) -> tuple[TappedLayer, Any]:
    """A worker's layer and transformers' model; `changed`: tensors by the ends of their names."""
    config = standard_config(json.loads((source / "config.json").read_text()))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, experts_implementation="eager").eval()
    geometry = geometry_of(config).layers[index]
    tensors = factories.read_layer(source, geometry.prefix)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    tensors |= {name: changed[end] for name in tensors for end in changed if name.endswith(f"{end}.weight")}
    return TappedLayer(LayersConfig(**config), geometry, tensors, torch.device("cpu")), model


def by_transformers(model: Any, index: int, hidden_BSD: torch.Tensor) -> torch.Tensor:
    positions_1S = torch.arange(hidden_BSD.shape[1])[None]
    angles = model.model.rotary_emb(hidden_BSD, positions_1S)
    result: torch.Tensor = model.model.layers[index](hidden_BSD, position_embeddings=angles, position_ids=positions_1S)
    return result


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_forward_pass_is_transformers_s(kind: str, source: Path) -> None:
    layer, model = tapped(source, LAYERS[kind], torch.float32)
    hidden_BSD = draw(2, 9, 48, seed=0)
    seen: list[torch.Tensor] = []
    with torch.no_grad():
        expected_BSD = by_transformers(model, LAYERS[kind], hidden_BSD)
    torch.testing.assert_close(layer.run(hidden_BSD, [("mlp.in", seen.append)]), expected_BSD)
    assert seen[0].flatten(0, -2).shape == (18, 48)


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_are_those_of_transformers_and_repeat_bit_for_bit(kind: str, source: Path) -> None:
    layer, model = tapped(source, LAYERS[kind], torch.float32)
    hidden_SD, outgoing_SD = draw(9, 48, seed=1), draw(9, 48, seed=2)
    leaf_BSD = hidden_SD[None].clone().requires_grad_()
    expected_SD = torch.autograd.grad(by_transformers(model, LAYERS[kind], leaf_BSD), leaf_BSD, outgoing_SD[None])[0][0]
    back = DifferentiableLayer(layer)
    input_SD, points = back.pull_back(hidden_SD, lambda _: outgoing_SD, ["mid", "out"])
    torch.testing.assert_close(input_SD, expected_SD, rtol=1e-4, atol=1e-4)
    again_SD, others = back.pull_back(hidden_SD, lambda _: outgoing_SD, ["mid", "out"])
    assert torch.equal(input_SD, again_SD)
    assert all(torch.equal(points[name], others[name]) for name in points)


def test_products_of_a_half_precision_layer_are_in_it_and_the_stream_is_in_float32(source: Path) -> None:
    layer, model = tapped(source, 0, torch.bfloat16)
    hidden_SD = draw(9, 48, seed=3)
    with torch.no_grad():
        expected_SD = by_transformers(model.float(), 0, hidden_SD[None])[0]
    output_SD = DifferentiableLayer(layer).run(hidden_SD)
    assert output_SD.dtype == torch.float32
    assert (output_SD - expected_SD).norm() < 0.02 * expected_SD.norm()


@pytest.mark.parametrize("role", ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"])
def test_values_that_overflow_are_named(role: str, source: Path) -> None:
    """Scores that are not finite, too, which attention kernels turn into zeros."""
    plain, _ = tapped(source, 0, torch.float32)
    weight = plain.module.role(role).weight
    assert isinstance(weight, torch.Tensor)
    layer, _ = tapped(source, 0, torch.float32, **{role: torch.full_like(weight, 1e38)})
    with pytest.raises(NumericsError, match=rf"layer 0: NaN or infinity first .* of self_attn.{role}"):
        layer.run(draw(1, 5, 48, seed=4))
