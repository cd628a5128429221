"""`magnitude`: the channels with the largest weights stay as they are."""

from __future__ import annotations

import pytest
import torch

from pipeline.methods.magnitude import WIDTH, MagnitudeMethod
from pipeline.methods.method import Statistics
from pipeline.methods.registry import build_methods
from tests.families.geometries import llama, manifest, other


@pytest.mark.parametrize("geometry", [llama(), llama("biased"), other("opt")], ids=["gqa", "biased", "opt"])
def test_the_largest_channels_stay_in_their_order(geometry: object) -> None:
    (method,) = build_methods(manifest({"method": "magnitude"}))
    assert isinstance(method, MagnitudeMethod)
    layer = geometry.layers[1]  # type: ignore[attr-defined]
    group = next(group for group in method.claims(geometry) if group.layer == 1)  # type: ignore[arg-type]
    block = layer.mlps[0]
    source = torch.Generator().manual_seed(1)
    weights = {
        key: torch.randn(shape, generator=source, dtype=torch.float64)
        for key, (_, shape) in layer.tensors(group.roles).items()
    }
    large = [3, 7, 40]
    for reader in block.readers:
        weights[reader.weight_key][large] *= 100.0
    solution = group.with_data(weights, Statistics({}, 0)).solve({WIDTH: len(large)})
    for reader in block.readers:
        assert torch.equal(solution.tensors[reader.weight_key], weights[reader.weight_key][large])
        if reader.bias:
            assert torch.equal(solution.tensors[reader.bias_key], weights[reader.bias_key][large])
    writer = block.writer
    assert torch.equal(solution.tensors[writer.weight_key], weights[writer.weight_key][:, large])
    if writer.bias:
        assert torch.equal(solution.tensors[writer.bias_key], weights[writer.bias_key])
    assert {(form.form, form.rank) for form in solution.forms.values()} == {("pruned", 3)}
    assert 0.0 < solution.report["dropped_magnitude"] < 0.02
    stored = sum(tensor.numel() for tensor in solution.tensors.values())
    (variable,) = (each for each in method.rank_variables(geometry) if each.layer == 1)  # type: ignore[arg-type]
    assert stored == variable.cost(len(large))
