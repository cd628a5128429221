"""The planned size of OUTPUT, counted by hand from the shapes, bits and dtypes of the stored tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lamina.stored_lamina import StoredFormat
from manifests.errors import InputError
from manifests.schema import Manifest
from pipeline.checkpoint.planned_size import bounded_plan, known_ranks, plan_of, planned_size
from pipeline.families.registry import geometry_of, standard_config
from pipeline.inputs.job_inputs import Inputs, fit_methods
from stores.headers import DTYPES, TensorRecord
from tests import factories
from tests.families.geometries import manifest

# D 48, N 80, four query heads and two of keys and values of 16 numbers, V 320, two layers, bfloat16.
SHAPES = {
    "q": (64, 48),
    "k": (32, 48),
    "v": (32, 48),
    "o": (48, 64),
    "gate": (80, 48),
    "up": (80, 48),
    "down": (48, 80),
}
LAYER = 2 * 48 + sum(math.prod(shape) for shape in SHAPES.values())
MODEL = 2 * LAYER + 2 * 320 * 48 + 48
Records = Mapping[str, TensorRecord]


def record(name: str, shape: tuple[int, ...], dtype: str = "BF16", **fields: Any) -> TensorRecord:
    size = math.prod(shape) * DTYPES[dtype].itemsize
    return TensorRecord(name, dtype, shape, "model.safetensors", 0, size, **fields)


def inputs_of(
    job: Manifest,
    dtypes: Mapping[str, str] | None = None,
    extra: Records | None = None,
    stored: Mapping[str, tuple[int, bool]] | None = None,
) -> Inputs:
    """Return the inputs of a job on a small Llama, of which headers alone exist.

    `dtypes`: of tensors that are not bfloat16. `extra`: further tensors, or others of the same name. `stored`: as
    `SourceCheckpoint.stored_bytes`.
    """
    config = standard_config(factories.make_config("llama", num_hidden_layers=2).to_dict())
    geometry = geometry_of(config)
    shapes = geometry.expected_tensors()
    tensors = {name: record(name, shape, (dtypes or {}).get(name, "BF16")) for name, shape in shapes.items()}
    source: Any = SimpleNamespace(tensors={**tensors, **(extra or {})}, stored_bytes=lambda: stored or {})
    return Inputs(job, source, config, geometry, *fit_methods(job, geometry), torch.bfloat16)


def sizes(inputs: Inputs) -> tuple[int, int]:
    size = planned_size(inputs)
    assert size is not None
    return size.numbers, size.num_bytes


def only_rounded(**quantize: Any) -> Manifest:
    job: Manifest = Manifest.model_validate(
        {**manifest().model_dump(exclude_unset=True), "methods": [], "quantize": {"feedback": False, **quantize}}
    )
    return job


def test_narrow_heads_and_mlps() -> None:
    """Layer 1 has heads of 7 of 16 numbers in v and o, and 33 of 80 channels; layer 0 is copied."""
    saved = (16 - 7) * 48 * (2 + 4) + 3 * (80 - 33) * 48
    job = manifest({"layers": [1], "ranks": {"value": 7, "mlp": 33}})
    assert sizes(inputs_of(job)) == (MODEL - saved, 2 * (MODEL - saved))


def test_layers_of_several_widths() -> None:
    saved = (80 - 33) * 3 * 48 + (80 - 47) * 3 * 48
    job = manifest({"layers": [0], "ranks": {"mlp": 33}}, {"layers": [1], "ranks": {"mlp": 47}})
    assert sizes(inputs_of(job)) == (MODEL - saved, 2 * (MODEL - saved))


def test_factors_of_each_matrix() -> None:
    """A matrix (O, I) of rank r stores r·(O + I) numbers, those of a matrix at its cap O·I."""
    job = Manifest.model_validate({**manifest().model_dump(), "methods": [{"method": "svd", "keep": 0.6}]})
    inputs = inputs_of(job)
    ranks = known_ranks(inputs)
    assert ranks is not None
    numbers = MODEL - 2 * (LAYER - 2 * 48)
    for by_role in ranks.values():
        for role, rank in by_role.items():
            outputs, columns = SHAPES[role]
            numbers += min(rank * (outputs + columns), outputs * columns)
    assert numbers < 0.9 * MODEL
    assert sizes(inputs) == (numbers, 2 * numbers)


def test_each_tensor_is_counted_in_its_own_dtype() -> None:
    """A float32 output projection stays float32 when it is narrowed; a copied float32 norm has four bytes, too."""
    job = manifest({"layers": [1], "ranks": {"value": 8}})
    name = "model.layers.{}.{}.weight"
    wide = {name.format(1, "self_attn.o_proj"): "F32", name.format(0, "input_layernorm"): "F32"}
    saved = 8 * 48 * (2 + 4)
    extra_bytes = 2 * (48 * 4 * 8 + 48)
    assert sizes(inputs_of(job, wide)) == (MODEL - saved, 2 * (MODEL - saved) + extra_bytes)


def test_copied_tensors_that_are_no_weights_are_counted() -> None:
    """Bytes of integers count as numbers of two bytes, rounded up; the file holds them as they are."""
    job = manifest({"layers": [1], "ranks": {"value": 16, "mlp": 80}})
    numbers, num_bytes = sizes(inputs_of(job))
    assert (numbers, num_bytes) == (MODEL, 2 * MODEL)
    more = inputs_of(job, extra={"rotary.mask": record("rotary.mask", (5,), "U8")})
    assert sizes(more) == (numbers + 3, num_bytes + 5)


def stored_weight(name: str, owner: str, shape: tuple[int, int]) -> TensorRecord:
    """Return a weight of bytes with a scale for each row, whose parts have the names of the module `owner`."""
    codes, scales = record(f"{owner}.weight", shape, "F8_E4M3"), record(f"{owner}.weight_scale", (shape[0], 1))
    form = StoredFormat("float", "bfloat16", "float8_e4m3fn", "bfloat16")
    return record(name, shape, form=form, parts=(("weight", codes), ("weight_scale", scales)))


@pytest.mark.parametrize("kept", [True, False])
def test_copied_weights_in_a_stored_format(kept: bool) -> None:
    """With their own names the parts are copied: a byte for each number, and the scales; else they are decoded. Numbers
    are those of the decoded weight, as in `dense_numbers`."""
    path = "model.layers.0.mlp.up_proj"
    weight = stored_weight(f"{path}.weight", path if kept else "elsewhere", (80, 48))
    job = manifest({"layers": [1], "ranks": {"value": 16, "mlp": 80}})
    expected = (MODEL, 2 * MODEL - 80 * 48 + 2 * 80) if kept else (MODEL, 2 * MODEL)
    assert sizes(inputs_of(job, extra={weight.name: weight})) == expected


@pytest.mark.parametrize(("layer", "known"), [(0, True), (1, False)])
def test_a_claimed_weight_in_a_stored_format_has_no_planned_size(layer: int, known: bool) -> None:
    """The method may leave it unchanged, and then its format stays."""
    job = manifest({"layers": [1], "ranks": {"value": 9, "mlp": 33}})
    stored = {f"model.layers.{layer}.mlp.up_proj.weight": (80 * 48, True)}
    assert (planned_size(inputs_of(job, stored=stored)) is not None) == known


@pytest.mark.parametrize(("bits", "words"), [(8, {48: 12, 64: 16, 80: 20}), (3, {48: 5, 64: 6, 80: 8})])
@pytest.mark.parametrize(("group", "scales"), [(32, {48: 3, 64: 2, 80: 5}), (None, {48: 1, 64: 1, 80: 1})])
def test_codes(bits: int, words: dict[int, int], group: int | None, scales: dict[int, int]) -> None:
    """Words of 32 bits for each row, scales of 16 bits, and two integers of 64 bits for the shape of each matrix.

    48 and 80 columns have 16 in common with a group of 32. The numbers are those before rounding.
    """
    rounded = sum(rows * (4 * words[columns] + 2 * scales[columns]) + 16 for rows, columns in SHAPES.values())
    plain = 2 * (MODEL - 2 * (LAYER - 2 * 48))
    assert sizes(inputs_of(only_rounded(bits=bits, group=group))) == (MODEL, 2 * rounded + plain)


def test_codes_with_a_table_of_levels() -> None:
    """Each matrix has one more tensor, of 2^bits levels of 16 bits."""
    uniform, learned = (sizes(inputs_of(only_rounded(bits=4, levels=levels)))[1] for levels in ("uniform", "learned"))
    assert learned - uniform == 2 * len(SHAPES) * 16 * 2


def test_the_ends_are_counted_with_the_layers_that_they_belong_to() -> None:
    """`what: all` rounds the embeddings with the first layer and the head with the last."""
    factors, everything = (sizes(inputs_of(only_rounded(bits=8, what=what))) for what in ("factors", "all"))
    codes = 320 * (48 + 3 * 2) + 16
    assert everything == (factors[0], factors[1] - 2 * (2 * 320 * 48 - codes))


def test_a_width_that_no_group_of_columns_fits_is_refused_by_name() -> None:
    inputs = inputs_of(manifest({"layers": [1], "ranks": {"value": 16, "mlp": 33}}))
    rounded = replace(inputs, manifest=only_rounded(bits=4))
    message = "quantize: layer 1, mlp: groups of 32 have only 1 in common with 33 columns; give other ranks or groups"
    with pytest.raises(InputError, match=message):
        planned_size(rounded)


def test_ranks_that_follow_importance_are_known_at_full_rank_alone() -> None:
    full, part = (inputs_of(manifest(keep=keep)) for keep in (1.0, 0.9))
    assert full.scores
    assert part.scores
    assert known_ranks(part) is None
    assert planned_size(part) is None
    assert sizes(full) == (MODEL, 2 * MODEL)


@pytest.mark.parametrize(
    ("methods", "fields"),
    [
        ([], {"quantize": {"bits": "auto"}, "budget": {"bytes": 0.4}}),
        ([{"method": "flat_llm", "ranks": {"mlp": 32}}], {"quantize": {"bits": 4, "levels": "auto"}}),
        ([{"method": "loss_aware"}], {"budget": {"max_loss": 0.1}}),
        ([{"method": "lestd", "keep": 0.6}], {}),
        ([{"method": "flat_llm", "allocation": "loss", "keep": 0.9}], {}),
        ([{"method": "lorc", "cache_keep": 0.5, "allocation": "progressive"}], {}),
        ([{"method": "lorc", "keep": 0.8, "allocation": "progressive"}], {}),
    ],
    ids=["bits", "levels", "loss", "sparse cores", "curves", "cache", "measurements"],
)
def test_sizes_that_follow_the_data_are_not_planned(methods: list[dict[str, Any]], fields: dict[str, Any]) -> None:
    """A plan then takes the upper bound, which no checkpoint exceeds."""
    text = {"text": {"files": ["t"]}, "samples": 16, "sequence_length": 24, "propagate": "dense"}
    document = {**manifest().model_dump(exclude_unset=True), "calibration": text, **fields, "methods": methods}
    inputs = inputs_of(Manifest.model_validate(document))
    assert planned_size(inputs) is None
    assert plan_of(inputs) == bounded_plan(inputs)


def test_a_plan_names_the_exact_size() -> None:
    inputs = inputs_of(manifest({"layers": [1], "ranks": {"value": 7, "mlp": 33}}))
    plan, bound = plan_of(inputs), bounded_plan(inputs)
    assert (plan.expected_numbers, plan.output_bytes) == sizes(inputs)
    assert plan.output_bytes <= bound.output_bytes
