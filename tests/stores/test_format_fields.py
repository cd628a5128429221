"""Every field of the config classes of transformers and compressed-tensors is in the tables; others are refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import transformers
from compressed_tensors.base import (
    COMPRESSION_VERSION_NAME,
    MOE_SPARSITY_CONFIG_NAME,
    SPARSITY_CONFIG_NAME,
    TRANSFORM_CONFIG_NAME,
)
from compressed_tensors.config import DenseSparsityConfig
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

from manifests.errors import InputError
from stores.format_fields import ARGUMENTS, AWQ, COMPRESSED, FP8, GPTQ, GPTQ_MODULE, MXFP4, SCHEME, SPARSITY, FieldTable
from stores.formats import stored_weights
from tests.encoders import ENCODERS, scheme

CLASSES: dict[str, tuple[FieldTable, Any]] = {
    "fp8": (FP8, transformers.FineGrainedFP8Config()),
    "mxfp4": (MXFP4, transformers.Mxfp4Config()),
    "gptq": (GPTQ, transformers.GPTQConfig(bits=4)),
    "awq": (AWQ, transformers.AwqConfig()),
}


def arguments(kind: type) -> set[str]:
    """The named arguments of a class and of its parents."""
    signatures = (inspect.signature(each.__init__) for each in kind.__mro__ if "__init__" in vars(each))  # type: ignore[misc]
    return {
        name
        for signature in signatures
        for name, parameter in signature.parameters.items()
        if name != "self" and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }


@pytest.mark.parametrize("method", CLASSES)
def test_every_field_of_transformers_is_listed(method: str) -> None:
    fields, config = CLASSES[method]
    assert arguments(type(config)) | {*vars(config)} | {*config.to_dict()} <= fields.names


def test_every_field_of_compressed_tensors_is_listed() -> None:
    assert {*QuantizationConfig.model_fields} | arguments(transformers.CompressedTensorsConfig) <= COMPRESSED.names
    beside = {SPARSITY_CONFIG_NAME, MOE_SPARSITY_CONFIG_NAME, TRANSFORM_CONFIG_NAME, COMPRESSION_VERSION_NAME}
    assert beside <= COMPRESSED.names
    assert {*QuantizationScheme.model_fields} <= SCHEME.names
    assert {*QuantizationArgs.model_fields} <= ARGUMENTS.names
    assert {*DenseSparsityConfig.model_fields} <= SPARSITY.names


@pytest.mark.parametrize("fields", [FP8, MXFP4, GPTQ, GPTQ_MODULE, AWQ, COMPRESSED, SPARSITY, SCHEME, ARGUMENTS])
def test_a_field_has_one_treatment(fields: FieldTable) -> None:
    assert len(fields.names) == len(fields.kept) + len(fields.fixed) + len(fields.unread)


def refused(field: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        stored_weights({"quantization_config": field}, {})
    return str(caught.value)


@pytest.mark.parametrize("kind", ENCODERS)
def test_unknown_fields_are_named(kind: str) -> None:
    field = ENCODERS[kind][1]
    said = refused({**field, "spin": {"size": 4}, "empty": {"x": [None, ""]}})
    assert "spin: {'size': 4}: this version of Lamina does not know the field" in said
    assert "empty" not in said


PACKED = scheme("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16)


def with_weights(**weights: Any) -> dict[str, Any]:
    return scheme("pack-quantized", **{"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, **weights})


GROUP = PACKED["config_groups"]["group_0"]
GPTQ4 = ENCODERS["gptq"][1]
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "transforms": (
        {**PACKED, "transform_config": {"config_groups": {"R4": {"type": "hadamard"}}}},
        "transform_config: {'config_groups': {'R4': {'type': 'hadamard'}}}: inputs or outputs of modules are "
        "transformed (rotated) while the model runs; not supported",
    ),
    "sparse": ({**PACKED, "sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config.format: 'sparse-bitmask'"),
    "sparsity": ({**PACKED, "sparsity_config": {"spin": 1}}, "sparsity_config.spin: 1: this version"),
    "experts": (
        {**PACKED, "moe_sparsity_config": {"method": "prune"}},
        "moe_sparsity_config: {'method': 'prune'}: exp",
    ),
    "scheme": ({**PACKED, "config_groups": {"g": {**GROUP, "spin": 1}}}, "config_groups.g.spin: 1: this version"),
    "preset": ({**PACKED, "config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16: ['Linear'] is not an object"),
    "groups": ({**PACKED, "config_groups": [GROUP]}, "is not an object with groups"),
    "targets": ({**PACKED, "config_groups": {"g": {**GROUP, "targets": [3]}}}, "config_groups.g.targets: [3] is not a"),
    "ignore": ({**PACKED, "ignore": "lm_head"}, "ignore: 'lm_head' is not a list of names"),
    "arguments": (with_weights(spin=1), "config_groups.group_0.weights.spin: 1: this version"),
    "order": (with_weights(actorder="group"), "config_groups.group_0.weights.actorder: 'group': columns in another"),
    "at run time": (with_weights(dynamic=True), "weights.dynamic: True: weights are rounded while the model runs"),
    "adapter": (
        {**GPTQ4, "adapter": {"name": "lora", "path": "x", "rank": 8}},
        "adapter: {'name': 'lora', 'path': 'x', 'rank': 8}: a low-rank adapter is added to the codes while the model",
    ),
    "adapter of a module": (
        {**GPTQ4, "dynamic": {r"+:.*q_proj": {"adapter": {"rank": 8}}}},
        "dynamic.+:.*q_proj.adapter: {'rank': 8}: a low-rank adapter",
    ),
    "module": ({**GPTQ4, "dynamic": {".*": {"spin": 1}}}, "dynamic..*.spin: 1: this version"),
    "bits of a module": ({**GPTQ4, "dynamic": {".*": {"bits": 3}}}, "dynamic..*: GPTQ with bits 3 and group_size 16"),
    "pattern": ({**GPTQ4, "dynamic": {"-:(": {}}}, "'(' is not a regular expression"),
    "dynamic": ({**GPTQ4, "dynamic": [1]}, "dynamic: [1] is not an object with patterns"),
    "bits": ({**GPTQ4, "bits": "4"}, "GPTQ with bits '4' and group_size 16; known are 2, 4, 8 bits"),
    "layout": ({**GPTQ4, "checkpoint_format": "marlin"}, "checkpoint_format: weights of gptq in layout 'marlin'"),
    "two layouts": (
        {**GPTQ4, "checkpoint_format": "gptq_v2", "format": "gptq"},
        "checkpoint_format: gptq_v2 and format: gptq name two layouts; remove the wrong one",
    ),
    "words": ({**GPTQ4, "pack_dtype": "int64"}, "pack_dtype: 'int64': words of another size; only 'int32' or"),
    "rotation": ({**GPTQ4, "rotation": "hadamard"}, "rotation: 'hadamard': the model rotates hidden states"),
    "awq layout": ({**ENCODERS["awq"][1], "version": "gemv"}, "version: weights of awq in layout 'gemv'"),
    "awq format": ({"quant_method": "awq", "bits": 4, "group_size": 16, "format": "gemv"}, "format: weights of awq in"),
    "awq zeros": ({**ENCODERS["awq"][1], "zero_point": False}, "zero_point: False: codes without zeros; only True is"),
    "fp4": ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype: 'fp4': experts in codes of four bits"),
    "method": ({"quant_method": ["fp8"]}, "weights of format ['fp8'] cannot be read"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_values_that_are_not_read_are_named(fault: str) -> None:
    field, words = FAULTS[fault]
    said = refused(field)
    assert said.startswith("config.json: quantization_config: ")
    assert words in said


def test_every_fault_of_an_object_is_listed() -> None:
    said = refused({**GPTQ4, "spin": 1, "rotation": "random"})
    assert len(said.splitlines()) == 3
