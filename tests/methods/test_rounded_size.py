"""Budgets by bytes: between shares of bytes and shares of numbers."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from manifests.errors import InputError
from manifests.loading import parse_manifest
from manifests.schema import Manifest
from pipeline.families.geometry import Geometry
from pipeline.methods.method import Scores
from pipeline.methods.registry import allocate_ranks, build_methods
from pipeline.methods.rounded_size import RoundedSizes
from tests.families.geometries import llama, manifest


def wide(**sizes: Any) -> Geometry:
    return llama(**{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, **sizes})


def of_bytes(
    share: float, quantize: dict[str, Any] | None, *methods: dict[str, Any], scope: str = "decoder"
) -> Manifest:
    budget, calibration = {"bytes": share, "scope": scope}, {"text": {"files": ["t"]}}
    return manifest(methods=[*methods], budget=budget, calibration=calibration, quantize=quantize)


def share_of_bytes(job: Manifest, geometry: Geometry, keep: float) -> float:
    """Of the dense bytes, what a share of the numbers takes once it is rounded."""
    sizes = RoundedSizes(job, geometry)
    return (sizes.reserved() + keep * geometry.scope_numbers(sizes.scope)) / sizes.whole


def counted(geometry: Geometry, bits: int, group: int, scope: str = "decoder") -> float:
    """The share of bytes when every matrix is rounded as it is, each counted by itself."""
    stored = dense = 0.0
    for role in geometry.layers[0].roles:
        for shape in geometry.layers[0].role_shapes(role).values():
            numbers = math.prod(shape)
            dense += numbers * 2
            if len(shape) == 1:
                stored += numbers * 2
            else:
                own = math.gcd(shape[1], group)
                stored += shape[0] * math.ceil(shape[1] * bits / 32) * 4 + numbers // own * 2 + 16
    outer = 2 * sum(math.prod(shape) for _, shape in geometry.outer) if scope == "model" else 0
    return (geometry.num_layers * stored + outer) / (geometry.num_layers * dense + outer)


@pytest.mark.parametrize("scope", ["decoder", "model"])
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("sizes", [{}, {"intermediate_size": 112}, {"attention_bias": True}])
def test_rounding_alone_takes_what_is_counted(sizes: dict[str, Any], bits: int, scope: str) -> None:
    geometry = wide(**sizes)
    quantize, true = {"bits": bits, "group": 32}, counted(geometry, bits, 32, scope)
    found = share_of_bytes(of_bytes(0.5, quantize, scope=scope), geometry, 1.0)
    assert true <= found < true * 1.02  # shapes of two matrices a role, where one may do
    fits, short = (
        of_bytes(min(1.0, found * 1.0001), quantize, scope=scope),
        of_bytes(true * 0.99, quantize, scope=scope),
    )
    assert allocate_ranks(fits, build_methods(fits), geometry, Scores())
    with pytest.raises(InputError, match=r"budget\.bytes: .* is out of reach: the stored tensors take 0\.\d+"):
        allocate_ranks(short, build_methods(short), geometry, Scores())


def test_a_scale_for_each_row_is_not_counted_ahead() -> None:
    with pytest.raises(InputError, match=r"budget\.bytes counts a scale for each group"):
        of_bytes(0.5, {"bits": 8, "group": None}, {"method": "flat_llm"})
    with pytest.raises(InputError, match="give either `keep`, `bytes`, `max_loss` or `fit`, and not keep and bytes"):
        parse_manifest(
            {**of_bytes(0.5, None, {"method": "flat_llm"}).model_dump(), "budget": {"keep": 0.5, "bytes": 0.5}}
        )


def test_what_is_out_of_reach_is_said_in_bytes() -> None:
    """And the share that it names is reachable, and hardly more than need be."""
    quantize, method = {"bits": 4, "group": 32}, {"method": "flat_llm"}
    for share in (0.001, 0.1):
        job = of_bytes(share, quantize, method)
        with pytest.raises(InputError, match=rf"budget\.bytes: {share:g} leaves .* reachable is 0\.\d+ to 1") as raised:
            allocate_ranks(job, build_methods(job), wide(), Scores({0: 1.0, 1: 1.0}))
        named = float(re.search(r"reachable is (\S+) to", str(raised.value)).group(1))  # type: ignore[union-attr]
        enough, short = of_bytes(named, quantize, method), of_bytes(named - 0.001, quantize, method)
        assert allocate_ranks(enough, build_methods(enough), wide(), Scores({0: 1.0, 1: 1.0}))
        with pytest.raises(InputError):
            allocate_ranks(short, build_methods(short), wide(), Scores({0: 1.0, 1: 1.0}))
