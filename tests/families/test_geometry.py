"""Sizes of whole models and of single layers, from their geometry."""

from __future__ import annotations

import math

import pytest

from tests.families import geometries


@pytest.mark.parametrize("name", ["gqa", "biased"])
def test_every_number_of_the_checkpoint_is_counted_once(name: str) -> None:
    geometry = geometries.llama(name)
    expected = sum(math.prod(shape) for shape in geometry.expected_tensors().values())
    assert geometry.model_numbers() == geometry.scope_numbers("model") == expected
    outer = sum(math.prod(shape) for _, shape in geometry.outer)
    assert geometry.decoder_numbers() == expected - outer
    assert geometry.scope_numbers("experts") == 0
    assert geometry.model_bytes() == 2 * expected


def test_a_layer_names_its_tensors_in_the_familys_order() -> None:
    layer = geometries.llama().layers[2]
    tensors = layer.tensors(("o", "q"))
    assert [*tensors] == ["q.weight", "o.weight"]
    name, shape = tensors["q.weight"]
    assert name == "model.layers.2.self_attn.q_proj.weight"
    assert shape == layer.matrices["q"].shape
    assert layer.tensor_name("q.weight", ("q",)) == name


def test_a_point_has_the_width_of_what_reads_it() -> None:
    layer = geometries.llama().layers[0]
    down = layer.mlps[0].writer
    assert layer.features(down.reads) == down.inputs
    assert layer.features("mid") == layer.hidden
    assert layer.mlp_of(down.role) is layer.mlps[0]
    with pytest.raises(KeyError):
        layer.mlp_of("q")
