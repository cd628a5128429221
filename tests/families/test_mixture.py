"""A family's fields for mixtures of experts: read into the standard config, and written back."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from manifests.errors import InputError
from pipeline.families.mixture import (
    BY_TYPE,
    EVERY_LAYER,
    FIRST_DENSE,
    LISTED,
    MIXED,
    SPARSE_STEP,
    MixtureFamily,
)

PATHS: dict[str, Any] = {
    "router": "mlp.gate", "experts": "mlp.experts",
    "modules": {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
}  # fmt: skip
SIZES = {"experts": "num_experts", "width": "moe_width", "top_k": "top"}
NUMBERS: dict[str, Any] = {"num_experts": 6, "moe_width": 24, "top": 2, "num_hidden_layers": 4}
PATTERNS = [*itertools.product([False, True], repeat=4)]  # of mixtures, by layer


def family(**fields: Any) -> MixtureFamily:
    return MixtureFamily(**{"paths": PATHS, "sizes": SIZES, "routing": {"score": "softmax"}, **fields})


def source(**fields: Any) -> Any:
    return SimpleNamespace(**{**NUMBERS, **fields})


def pattern_of(mixture: dict[str, Any]) -> tuple[bool, ...]:
    return tuple(sizes is not None for sizes in mixture["layers"])


def standard_of(pattern: tuple[bool, ...], **fields: Any) -> dict[str, Any]:
    sizes = {"experts": 6, "width": 24, "top_k": 2}
    return {"groups": 1, **fields, "layers": [{**sizes} if is_mixture else None for is_mixture in pattern]}


def prefix(pattern: tuple[bool, ...]) -> bool:
    """Return True if all dense layers come first."""
    return [*pattern] == sorted(pattern)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: "".join("-x"[each] for each in pattern))
@pytest.mark.parametrize("dense_layers", [SPARSE_STEP, LISTED, MIXED, FIRST_DENSE])
def test_dense_layers_are_written_as_they_are_read(dense_layers: str, pattern: tuple[bool, ...]) -> None:
    """Every pattern of four layers, but for a family whose config counts the first dense layers."""
    of = family(dense_layers=dense_layers)
    fields = of.source_fields(standard_of(pattern))
    again = of.standard(source(**fields))
    if dense_layers != FIRST_DENSE or prefix(pattern):
        assert pattern_of(again) == pattern
    sizes = {name: fields[name] for name in SIZES.values()}
    assert not any(pattern) or sizes == {name: NUMBERS[name] for name in SIZES.values()}
    assert {*fields} == {*of.own_fields}


@pytest.mark.parametrize(
    ("pattern", "fields"),
    [
        ("xxxx", {"mlp_only_layers": [], "decoder_sparse_step": 1}),
        ("-x-x", {"mlp_only_layers": [], "decoder_sparse_step": 2}),
        ("---x", {"mlp_only_layers": [], "decoder_sparse_step": 4}),
        ("x-xx", {"mlp_only_layers": [1], "decoder_sparse_step": 1}),
        ("----", {"mlp_only_layers": [0, 1, 2, 3], "decoder_sparse_step": 1}),
    ],
)
def test_a_regular_step_is_written_as_one(pattern: str, fields: dict[str, Any]) -> None:
    of = family(dense_layers=SPARSE_STEP)
    written = of.source_fields(standard_of(tuple(each == "x" for each in pattern)))
    assert {name: written[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("pattern", "mixed", "step"),
    [
        ("xxxx", [0, 1, 2, 3], 1),
        ("-x-x", [1, 3], 2),
        ("--x-", [2], 3),
        ("x--x", [0, 3], 1),
        ("-xx-", [1, 2], 1),
        ("----", [], 5),
    ],
)
def test_listed_mixtures_have_the_step_of_their_distance(pattern: str, mixed: list[int], step: int) -> None:
    """1, if they have none; beyond the last layer if there are no mixtures."""
    of = family(dense_layers=MIXED)
    written = of.source_fields(standard_of(tuple(each == "x" for each in pattern)))
    assert (written["moe_layers"], written["interleave_moe_layer_step"]) == (mixed, step)


def test_layer_types_say_which_layers_are_mixtures() -> None:
    """The family's own field of types is written elsewhere."""
    of = family(dense_layers=BY_TYPE)
    read = of.standard(source(layer_types=["moe", "mamba", "moe", "attention"]))
    assert pattern_of(read) == (True, False, True, False)
    assert {*of.source_fields(read)} == {*SIZES.values()} == {*of.own_fields}


def test_all_layers_are_mixtures_in_most_families() -> None:
    assert family().dense_layers == EVERY_LAYER
    assert pattern_of(family().standard(source())) == (True,) * 4


def test_sizes_may_be_listed_by_layer() -> None:
    read = family().standard(source(moe_width=[24, 16, 24, 8]))
    assert [sizes["width"] for sizes in read["layers"]] == [24, 16, 24, 8]
    with pytest.raises(InputError, match="the mixtures of this model's layers differ in size"):
        family().source_fields(read)


@pytest.mark.parametrize(("count", "width"), [(0, 0), (1, 24), (3, 72), (None, 0)])
def test_a_shared_expert_is_a_number_of_routed_ones(count: int | None, width: int) -> None:
    """`null` is none."""
    of = family(paths={**PATHS, "shared": "mlp.shared"}, shared=("moe_width", "n_shared"))
    read = of.standard(source(n_shared=count))
    assert read["layers"][0]["shared_width"] == width
    assert of.source_fields(read)["n_shared"] == (count or 0)


def test_a_shared_width_that_is_no_multiple_is_refused() -> None:
    of = family(paths={**PATHS, "shared": "mlp.shared"}, shared=("moe_width", "n_shared"))
    read = of.standard(source(n_shared=2))
    for sizes in read["layers"]:
        sizes["shared_width"] = 40
    with pytest.raises(InputError, match="a shared expert of 40 channels is not a multiple of 24"):
        of.source_fields(read)


@pytest.mark.parametrize(
    ("shared", "width", "padded"), [(0, 24, 0), (1, 24, 24), (24, 24, 24), (25, 24, 48), (40, 7, 42)]
)
def test_the_least_expressible_width_of_a_shared_expert(shared: int, width: int, padded: int) -> None:
    """A multiple of the routed width, or any width where the config has a field for it."""
    assert family(shared=("moe_width", "n_shared")).padded_shared(shared, width) == padded
    assert family(shared=("shared_width",)).padded_shared(shared, width) == shared


GROUPED = {"groups": "n_group", "top_groups": "topk_group"}
METHODS = ("topk_method", "greedy", "group_limited_greedy")


@pytest.mark.parametrize(
    ("fields", "groups"),
    [
        ({"n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy"}, (3, 2)),
        ({"n_group": 3, "topk_group": 2, "topk_method": "greedy"}, (1, 1)),
        ({"n_group": None, "topk_group": None, "topk_method": "greedy"}, (1, 1)),
    ],
)
def test_groups_count_by_the_method_that_chooses_experts(fields: dict[str, Any], groups: tuple[int, int]) -> None:
    of = family(fields=GROUPED, group_methods=METHODS)
    read = of.standard(source(**fields))
    assert (read["groups"], read["top_groups"]) == groups
    written = of.source_fields(read)
    assert written["topk_method"] == fields["topk_method"]


def test_groups_that_are_null_are_one() -> None:
    read = family(fields=GROUPED).standard(source(n_group=None, topk_group=None))
    assert (read["groups"], read["top_groups"]) == (1, 1)


def test_another_method_of_choosing_experts_is_refused_by_name() -> None:
    of = family(fields=GROUPED, group_methods=METHODS)
    with pytest.raises(InputError, match="topk_method: 'noaux_tc' is not one of greedy, group_limited_greedy"):
        of.standard(source(n_group=3, topk_group=2, topk_method="noaux_tc"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"top": 7}, "layer 0 chooses 7 of 6 experts"),
        ({"num_experts": 0}, "layer 0 has experts 0"),
        ({"moe_width": "24"}, "layer 0 has width '24'"),
    ],
)
def test_sizes_of_which_no_mixture_can_be_built(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=rf"config\.json: mixture\.layers: {said}"):
        family().standard(source(**fields))
