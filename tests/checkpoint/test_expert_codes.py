"""Codes of experts in an export: which matrices have them, why transformers could not read them, and their scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manifests.records import Scheme
from pipeline.checkpoint.expert_codes import (
    EXPERTS,
    code_faults,
    common_group,
    described_codes,
    expert_paths,
    in_groups_of,
    whole_roles,
)
from pipeline.families.registry import checkpoint_config, geometry_of, standard_config
from pipeline.kernels.packing import scaled, unpack
from pipeline.rounding.schemes import FIELD, PACKED, SCALE, SHAPE, packed_tensors, quantization_config
from tests import factories

FOUR, EIGHT = Scheme(bits=4, group=16), Scheme(bits=8, group=16)
ROWS = Scheme(bits=4, group=None)
EXPERT = "model.layers.{}.block_sparse_moe.experts.{}.{}"


def config_of(
    family: str = "mixtral", rounded: dict[str, Scheme] | None = None, forms: Any = ({}, {})
) -> dict[str, Any]:
    source = factories.make_config(family, num_hidden_layers=2).to_dict()
    config = checkpoint_config(standard_config(source), forms, "bfloat16")
    return config if rounded is None else {**config, FIELD: quantization_config(rounded, [*rounded, *every_expert()])}


def every_expert(scheme: Scheme = FOUR) -> dict[str, Scheme]:
    """Return all 36 matrices of the experts of a small Mixtral, with one scheme."""
    paths = [
        EXPERT.format(layer, expert, name) for layer in (0, 1) for expert in range(6) for name in ("w1", "w2", "w3")
    ]
    return dict.fromkeys(paths, scheme)


def test_matrices_that_a_family_stores_one_by_one() -> None:
    assert {*expert_paths(config_of())} == {*every_expert()}
    assert expert_paths(config_of("gpt_oss")) == [], "fused"
    assert expert_paths(config_of("llama")) == []


def test_factors_are_not_whole() -> None:
    """A pruned matrix is."""
    low, narrow = {"form": "low_rank", "rank": 4}, {"form": "pruned", "rank": 16}
    forms = ({"experts.0.up": low, "experts.1.down": narrow, "experts.1.up": {"form": "dense"}}, {})
    config = config_of(forms=forms)
    layer = geometry_of(config).layers[0]
    assert {*layer.matrices} - {*whole_roles(config, layer)} == {"experts.0.up"}
    assert {*expert_paths(config)} - {*expert_paths(config, whole=True)} == {EXPERT.format(0, 0, "w3")}


def test_codes_of_all_experts_can_be_read() -> None:
    """Beside rounded matrices of attention of another scheme; a model without codes or without experts, too."""
    attention = {"model.layers.0.self_attn.q_proj": EIGHT}
    assert code_faults(config_of(rounded={**every_expert(), **attention})) == []
    assert code_faults(config_of()) == []
    assert code_faults(config_of("llama", {"model.layers.0.mlp.up_proj": FOUR})) == []


def test_experts_without_codes_are_counted() -> None:
    rounded = every_expert()
    for name in ("w1", "w3"):
        del rounded[EXPERT.format(1, 4, name)]
    (fault,) = code_faults(config_of(rounded=rounded))
    assert fault.startswith("codes, and 2 matrices of experts without (quantize.skip)")


def test_experts_of_several_bits_have_no_common_scheme() -> None:
    rounded = {**every_expert(), EXPERT.format(0, 0, "w2"): EIGHT}
    assert code_faults(config_of(rounded=rounded)) == [
        "codes of 4 and 8 bits of experts, which transformers decodes by one scheme"
    ]


def test_experts_of_several_groups_have() -> None:
    """Their scales are repeated for the smallest group."""
    assert code_faults(config_of(rounded={**every_expert(), EXPERT.format(0, 0, "w2"): ROWS})) == []


def test_a_family_whose_linears_read_their_weight() -> None:
    assert code_faults(config_of("falcon")) == []
    (fault,) = code_faults(config_of("falcon", {"transformer.h.0.mlp.dense_4h_to_h": FOUR}))
    assert fault == "codes: transformers' linears of falcon multiply by unrounded weights"


def test_a_family_whose_experts_are_apart_beside_codes() -> None:
    rounded = {"model.layers.0.self_attn.o_proj": FOUR}
    (fault,) = code_faults(config_of("llama4_text", rounded))
    assert fault == "codes beside experts of llama4_text, which transformers then expects one by one"


@pytest.mark.parametrize(
    ("groups", "common"), [([32, 64, 128], 32), ([64, None], 64), ([None, None], None), ([], None), ([16], 16)]
)
def test_the_group_that_divides_all_others(groups: list[int | None], common: int | None) -> None:
    assert common_group(Scheme(bits=4, group=group) for group in groups) == common


@pytest.mark.parametrize("own", [None, 64, 32])
@pytest.mark.parametrize("group", [32, 16])
def test_smaller_groups_repeat_scales(own: int | None, group: int) -> None:
    """The numbers stay the same, and the given tensors unchanged."""
    source = torch.Generator().manual_seed(1)
    codes = torch.randint(-8, 8, (3, 64), dtype=torch.int8, generator=source)
    scales = torch.rand(3, 1 if own is None else 64 // own, generator=source) + 0.5
    parts = packed_tensors("p", codes, scales, Scheme(bits=4, group=own))
    repeated = in_groups_of(group, "p", parts)
    assert repeated["p" + SCALE].shape == (3, 64 // group)
    assert parts["p" + SCALE] is scales
    assert torch.equal(repeated["p" + PACKED], parts["p" + PACKED])
    read = unpack(repeated["p" + PACKED], 4, int(repeated["p" + SHAPE][1]))
    assert torch.equal(scaled(read, repeated["p" + SCALE]), scaled(codes, scales))


def test_whole_rows_stay() -> None:
    parts = packed_tensors("p", torch.zeros(2, 64, dtype=torch.int8), torch.ones(2, 1), ROWS)
    assert torch.equal(in_groups_of(None, "p", parts)["p" + SCALE], torch.ones(2, 1))


def targets_of(described: dict[str, Any]) -> list[list[str]]:
    return [group["targets"] for group in described["config_groups"].values()]


def test_a_pattern_stands_for_experts_beside_another_scheme() -> None:
    """And only then; with one scheme the target is every linear module."""
    experts, attention = every_expert(), {"model.layers.0.self_attn.q_proj": EIGHT}
    linears = [*experts, *attention, "lm_head"]
    alone = described_codes(experts, linears, [*experts])
    assert targets_of(alone) == [["Linear"]]
    both = described_codes({**experts, **attention}, linears, [*experts])
    assert targets_of(both) == [[EXPERTS], [*attention]]
    assert both["ignore"] == ["lm_head"]
    without = described_codes({**attention, "lm_head": FOUR}, linears, [*experts])
    assert targets_of(without) == [["lm_head"], [*attention]]


def test_matrices_with_the_scheme_of_the_experts_are_named_beside_the_pattern() -> None:
    experts, attention = every_expert(), {"model.layers.0.self_attn.q_proj": EIGHT}
    same = {"model.layers.1.self_attn.q_proj": FOUR}
    described = described_codes({**experts, **attention, **same}, [*experts, *attention, *same], [*experts])
    assert targets_of(described) == [[EXPERTS, *same], [*attention]]
