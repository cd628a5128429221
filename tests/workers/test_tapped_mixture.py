"""Taps on a mixture of experts: shared inputs, the rows of single experts, and the router's weights."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from lamina import LayersConfig
from pipeline.families.blocks import MLPBlock
from pipeline.families.registry import geometry_of, standard_config
from tests import factories
from workers.tapped_layer import TappedLayer

LAYER = 1  # of the Qwen2-MoE model, whose first layer is dense


@pytest.fixture(scope="module", params=["mixtral", "qwen2_moe", "qwen3_moe", *factories.FOREIGN])
def layer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TappedLayer:
    source = factories.make_model(tmp_path_factory.mktemp("mixture"), request.param)
    config = standard_config(json.loads((source / "config.json").read_text()))
    geometry = geometry_of(config).layers[LAYER]
    tensors = factories.read_layer(source, geometry.prefix)
    return TappedLayer(LayersConfig(**config), geometry, tensors, torch.device("cpu"))


def seen(layer: TappedLayer, points: list[str]) -> dict[str, Tensor]:
    """The values at some points, all rows in order."""
    rows: dict[str, list[Tensor]] = {point: [] for point in points}
    hidden_BSD = torch.randn(2, 7, layer.geometry.hidden, generator=torch.Generator().manual_seed(3))
    layer.run(hidden_BSD, [(point, lambda values, point=point: rows[point].append(values)) for point in points])
    return {point: torch.cat([part.flatten(0, -2) for part in parts]) for point, parts in rows.items() if parts}


def experts(layer: TappedLayer) -> list[MLPBlock]:
    return [block for block in layer.geometry.mlps if block.routing]


def test_an_expert_s_channels_are_weighted_by_the_router(layer: TappedLayer) -> None:
    blocks = experts(layer)
    points = ["mlp.in", *(block.routing for block in blocks), *(block.writer.reads for block in blocks)]
    values = seen(layer, points)
    m_TD = values["mlp.in"]
    assert len(m_TD) == 14
    for block in blocks:
        weight_T = values[block.routing][:, 0]
        token_t = weight_T.nonzero()[:, 0]
        gate, up = (layer.module.role(matrix.role)(m_TD[token_t]) for matrix in block.readers)
        expected_tN = layer.module.act_fn(gate) * up * weight_T[token_t, None]
        found_tN = values.get(block.writer.reads, expected_tN.new_zeros(0, block.width))
        torch.testing.assert_close(found_tN, expected_tN)


def test_the_weights_of_a_token_are_those_of_as_many_experts_as_it_passes(layer: TappedLayer) -> None:
    routed = [block.routing for block in experts(layer) if block.name != "shared"]
    values = seen(layer, routed)
    weight_TE = torch.cat([values[point] for point in routed], dim=1)
    assert ((weight_TE > 0).sum(dim=1) == 2).all()


def test_every_expert_sees_all_tokens_where_grids_are_chosen_and_the_output_is_the_same(layer: TappedLayer) -> None:
    hidden_BSD = torch.randn(1, 5, layer.geometry.hidden, generator=torch.Generator().manual_seed(4))
    counts: dict[str, int] = {}
    taps = [
        (block.writer.reads, lambda values, name=block.name: counts.update({name: counts.get(name, 0) + len(values)}))
        for block in layer.geometry.mlps
    ]
    usual_BSD = layer.run(hidden_BSD)
    with layer.every_expert():
        result_BSD = layer.run(hidden_BSD, taps)
    assert usual_BSD is not None
    assert result_BSD is not None
    assert torch.equal(usual_BSD, result_BSD)
    assert min(counts.values()) >= 5
    assert len(counts) == len(layer.geometry.mlps)
