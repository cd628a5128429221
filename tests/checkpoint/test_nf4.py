"""Codes of normal levels as bitsandbytes reads them: nibble by nibble, with an absmax for each block."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from manifests.errors import InputError
from manifests.records import Scheme
from pipeline.checkpoint.nf4 import BITS, QUANT_STATE, is_nf4, nf4_config, nf4_tensors
from pipeline.kernels.levels import normal_levels
from pipeline.rounding.schemes import FIELD, TABLES, packed_tensors

NF4: dict[str, Any] = {"bits": 4, "group": 32, "levels": "normal"}


def test_it_stands_for_the_same_weight() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-8, 8, (3, 64), generator=generator, dtype=torch.int8)
    scales = torch.randn(3, 2, generator=generator).to(torch.bfloat16)
    levels = normal_levels(BITS)
    parts = packed_tensors("q", codes, scales, Scheme(**NF4), levels.to(torch.bfloat16))

    stored = nf4_tensors("q", parts, 32)

    state = json.loads(bytes(stored[f"q.weight.{QUANT_STATE}"].tolist()))
    assert (state["quant_type"], state["blocksize"], state["shape"]) == ("nf4", 32, [3, 64])
    packed = stored["q.weight"].flatten().tolist()
    nibbles = [nibble for byte in packed for nibble in (byte >> 4, byte & 15)]  # bitsandbytes: high half first
    table, absmax = stored["q.weight.quant_map"], stored["q.weight.absmax"]
    read = torch.stack([table[nibble] * absmax[place // 32] for place, nibble in enumerate(nibbles)]).view(3, 64)
    expected = levels.float()[codes.long() + 8] * scales.float().repeat_interleave(32, dim=1)
    assert torch.equal(read, expected)


def test_levels_that_were_trained_are_refused() -> None:
    levels = normal_levels(BITS).to(torch.bfloat16)
    levels[3] *= 1.1
    parts = packed_tensors("q", torch.zeros(1, 32, dtype=torch.int8), torch.ones(1, 1), Scheme(**NF4), levels)
    with pytest.raises(InputError, match="q: its levels were trained"):
        nf4_tensors("q", parts, 32)


@pytest.mark.parametrize(
    ("changes", "config"),
    [({"bits": 3}, {}), ({"group": 16}, {}), ({"levels": "learned"}, {}), ({}, {FIELD: {"quant_method": "other"}})],
)
def test_other_codes_are_not_nf4(changes: dict[str, Any], config: dict[str, Any]) -> None:
    assert is_nf4({TABLES: {"q": NF4}})
    assert not is_nf4({TABLES: {"q": NF4, "k": {**NF4, **changes}}, **config})
    assert not is_nf4({})


def test_linears_that_keep_their_dtype_are_skipped() -> None:
    config = nf4_config(["q", "k"], ["q", "k", "lm_head", "v"], "bfloat16")
    assert config["llm_int8_skip_modules"] == ["lm_head", "v"]
