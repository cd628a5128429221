"""Weights in stored formats: decoded as their encoders do, on every device, and refused where parts do not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lamina.stored_lamina import decoded_weights
from manifests.errors import InputError, NumericsError
from stores.disk import Disk
from stores.format_methods import EMBEDDING_CLASSES, LINEAR_CLASSES, target_of
from stores.formats import decode, stored_weights
from stores.headers import TensorRecord, read_header
from tests.emulated_device import emulated_device
from tests.encoders import ENCODERS, INT4, INT8

Change = Callable[[dict[str, Tensor], str], None]


class Stored:
    """A random weight, encoded, in a file."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        change: Change | None = None,
        fields: Mapping[str, Any] | None = None,
        file_path: str = "q_proj",
    ) -> None:
        """`fields`: other values in its quantization_config. `file_path`: the path of the module in the file."""
        encode, field = ENCODERS[kind]
        shape = (3, 64, 32) if kind == "mxfp4" else (32, 64)
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        parts, self.decoded = encode(weight)
        prefix = "experts.down_proj_" if kind == "mxfp4" else "q_proj."
        self.tensors = {prefix + part: tensor.contiguous() for part, tensor in parts.items()}
        self.scale = next(name for name in self.tensors if "scale" in name)
        if change is not None:
            change(self.tensors, self.scale)
        save_file(self.tensors, folder / "model.safetensors")
        config = {"quantization_config": {**field, **(fields or {})}, "dtype": "bfloat16"}
        file_names = {name: name.replace("q_proj", file_path) for name in self.tensors}
        self.records, self.faults = stored_weights(
            config, read_header(Disk(folder), "model.safetensors"), "", file_names
        )

    @property
    def weight(self) -> TensorRecord:
        (record,) = (record for record in self.records.values() if record.parts)
        return record

    def parts(self) -> dict[str, Tensor]:
        """The parts of the weight; of experts those of the second."""
        parts = {part: self.tensors[at.name] for part, at in self.weight.parts}
        return {part: tensor[1] for part, tensor in parts.items()} if self.weight.form.kind == "mxfp4" else parts  # type: ignore[union-attr]

    @property
    def expected(self) -> Tensor:
        return self.decoded[1].T if self.decoded.ndim == 3 else self.decoded


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ENCODERS)
def test_a_weight_is_decoded_on_its_parts_device(kind: str, device: str, tmp_path: Path) -> None:
    """A GPU gives the same numbers; where there is none, an emulated one refuses what a GPU would."""
    stored = Stored(tmp_path, kind)
    if device == "cpu" or torch.cuda.is_available():
        weight = decode(stored.weight, {part: tensor.to(device) for part, tensor in stored.parts().items()})
        assert weight.device.type == device
        assert torch.equal(weight.cpu(), stored.expected)
        return
    with emulated_device():
        weight = decode(stored.weight, {part: tensor.to("cuda") for part, tensor in stored.parts().items()})
        assert weight.is_cuda
        assert torch.equal(weight.cpu(), stored.expected)


def test_awq_is_read_as_compressed_tensors_reads_it(tmp_path: Path) -> None:
    """Its converter of AWQ checkpoints is the judge, not the encoder of these tests; any bits are a weight."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    bits = torch.iinfo(torch.int32)

    def any_bits(tensors: dict[str, Tensor], scale: str) -> None:
        random = torch.Generator().manual_seed(1)
        for name in tensors.keys() - {scale}:
            tensors[name] = torch.randint(bits.min, bits.max, tensors[name].shape, generator=random, dtype=torch.int32)
        tensors[scale] = tensors[scale].half()

    stored = Stored(tmp_path, "awq", any_bits)
    parts = AutoAWQConverter(group_size=16, ignore=()).process(dict(stored.tensors))
    shape = torch.Size(parts["q_proj.weight_shape"].tolist())
    scales = parts["q_proj.weight_scale"]
    expected = dequantize(
        unpack_from_int32(parts["q_proj.weight_packed"], 4, shape),
        scales.float(),
        unpack_from_int32(parts["q_proj.weight_zero_point"], 4, scales.shape, packed_dim=0),
        QuantizationArgs(num_bits=4, group_size=16, symmetric=False, strategy="group"),
        dtype=torch.float32,
    )
    weight = decode(stored.weight, stored.parts())
    assert torch.equal(weight, expected.to(weight.dtype))


TARGETS = (
    "Linear", "Embedding", "Module", "q_proj", "model.layers.0.self_attn.q_proj", "model.embed_tokens", "lm_head",
    "re:.*q_proj", "re:.*proj$", "re:model.layers.0", "re:model.layers.1", "re:.*embed", "re:q_proj", "re:.*",
)  # fmt: skip
MODULES = {
    "model.layers.0.self_attn.q_proj": nn.Linear(2, 2),
    "model.layers.1.mlp.down_proj": nn.Linear(2, 2),
    "model.embed_tokens": nn.Embedding(2, 2),
    "lm_head": nn.Linear(2, 2),
}


@pytest.mark.parametrize("seed", range(200))
def test_groups_are_chosen_as_compressed_tensors_chooses_them(seed: int) -> None:
    """Whole names, then patterns in alphabetical order, then classes, whatever the order of the groups."""
    from compressed_tensors.utils.match import match_targets

    targets = Random(seed).sample(TARGETS, 4)
    for path, module in MODULES.items():
        classes = LINEAR_CLASSES if isinstance(module, nn.Linear) else EMBEDDING_CLASSES
        assert target_of(path, targets, classes) == next(iter(match_targets(path, module, targets)), None)


def test_the_group_of_a_pattern_decodes_its_modules(tmp_path: Path) -> None:
    """A pattern that comes earlier in the alphabet comes first, not the group that the file lists first."""
    four, eight = INT4["config_groups"]["group_0"], INT8["config_groups"]["group_0"]
    groups = {
        "a": {**eight, "targets": ["re:.*proj"]},
        "b": {**eight, "targets": ["Linear"]},
        "c": {**four, "targets": ["re:.*p"]},
    }
    stored = Stored(tmp_path, "int4", fields={"config_groups": groups})
    assert torch.equal(decode(stored.weight, stored.parts()), stored.expected)


@pytest.mark.parametrize("ignored", ["q_proj", "re:q_", "Linear"])
def test_codes_of_an_ignored_module_are_refused(ignored: str, tmp_path: Path) -> None:
    stored = Stored(tmp_path, "int4", fields={"ignore": ["lm_head", ignored]})
    assert stored.faults == [f"q_proj: its weight is stored in codes, but quantization_config.ignore has {ignored!r}"]


DYNAMIC: dict[str, dict[str, Any]] = {
    "other": {r"+:k_proj": {"bits": 2}, r".*": {"bits": 8}},
    "first of two": {r"+:.*q_proj": {"bits": 8, "sym": False}, r"+:q": {"bits": 2}},
    "no prefix": {r"q_proj$": {"bits": 8}},
    "skipped elsewhere": {r"-:.*k_proj": {}, r"+:.*": {"bits": 8, "group_size": 16}},
}


@pytest.mark.parametrize("changes", DYNAMIC)
def test_sizes_of_single_modules_are_read(changes: str, tmp_path: Path) -> None:
    """`dynamic` of GPTQ: the first pattern that matches counts. Without it the codes do not fit the config."""
    stored = Stored(tmp_path, "gptq8", fields={"bits": 4, "dynamic": DYNAMIC[changes]})
    assert torch.equal(decode(stored.weight, stored.parts()), stored.expected)


@pytest.mark.parametrize("kind", ["gptq8", "int8"])
def test_modules_are_named_as_in_the_files(kind: str, tmp_path: Path) -> None:
    """Where a family has other names for the tensors of some files."""
    eight, four = ({**each["config_groups"]["group_0"]} for each in (INT8, INT4))
    groups = {"a": {**eight, "targets": ["re:w1"]}, "b": {**four, "targets": ["Linear"]}}
    fields: dict[str, Any] = (
        {"bits": 4, "dynamic": {"w1": {"bits": 8}}} if kind == "gptq8" else {"config_groups": groups}
    )
    stored = Stored(tmp_path, kind, fields=fields, file_path="w1")
    assert torch.equal(decode(stored.weight, stored.parts()), stored.expected)


def test_codes_of_a_skipped_module_are_refused(tmp_path: Path) -> None:
    stored = Stored(tmp_path, "gptq", fields={"dynamic": {r"-:.*q_proj": {}}})
    assert stored.faults == [
        "q_proj: its weight is stored in codes, but quantization_config.dynamic skips it by '-:.*q_proj'"
    ]


def test_columns_in_another_order_need_their_groups(tmp_path: Path) -> None:
    def without_groups(tensors: dict[str, Tensor], _: str) -> None:
        del tensors["q_proj.g_idx"]

    stored = Stored(tmp_path, "gptq ordered", without_groups)
    assert stored.faults == ["q_proj.g_idx: missing; a weight in format gptq with desc_act has it"]


def test_zeros_count_if_the_scheme_has_them(tmp_path: Path) -> None:
    """As in compressed-tensors, which reads them of an asymmetric scheme alone."""
    group = INT4["config_groups"]["group_0"]
    asymmetric = {"config_groups": {"g": {**group, "weights": {**group["weights"], "symmetric": False}}}}
    stored = Stored(tmp_path, "int4", fields=asymmetric)
    assert stored.faults == ["q_proj.weight_zero_point: missing; a weight in format packed has it"]
    stored = Stored(tmp_path, "int4 zeros", fields={"config_groups": INT4["config_groups"]})
    assert [*stored.records] == ["q_proj.weight_zero_point", "q_proj.weight"]


@pytest.mark.parametrize("strategy", ["group", "channel", "tensor"])
def test_a_missing_strategy_follows_from_the_group(strategy: str, tmp_path: Path) -> None:
    kind = {"group": "int4", "channel": "int8", "tensor": "float tensor"}[strategy]
    group = ENCODERS[kind][1]["config_groups"]["group_0"]
    size = {"group": 16, "channel": -1, "tensor": None}[strategy]
    weights = {**group["weights"], "strategy": None, "group_size": size}
    stored = Stored(tmp_path, kind, fields={"config_groups": {"g": {**group, "weights": weights}}})
    assert torch.equal(decode(stored.weight, stored.parts()), stored.expected)


@pytest.mark.parametrize("kind", ["fp8 blocks", "float", "int4", "gptq", "awq"])
def test_integer_scales_are_named(kind: str, tmp_path: Path) -> None:
    """Powers of two in bytes would be read as numbers."""

    def bytes_of(tensors: dict[str, Tensor], scale: str) -> None:
        tensors[scale] = tensors[scale].to(torch.uint8)

    (fault,) = Stored(tmp_path, kind, bytes_of).faults
    assert "U8 numbers; only floating-point scales are read" in fault


def remove(tensors: dict[str, Tensor], scale: str) -> None:
    del tensors[scale]


def double(tensors: dict[str, Tensor], scale: str) -> None:
    tensors[scale] = torch.cat([torch.atleast_1d(tensors[scale])] * 2)


def filled(value: float) -> Change:
    def change(tensors: dict[str, Tensor], scale: str) -> None:
        tensors[scale].fill_(value)

    return change


@pytest.mark.parametrize("kind", ENCODERS)
def test_scales_that_do_not_fit_are_named(kind: str, tmp_path: Path) -> None:
    missing = Stored(tmp_path, kind, remove)
    scale = "q_proj.weight_scale_inv" if kind.startswith("fp8") else missing.scale
    assert [fault for fault in missing.faults if fault.startswith(f"{scale}: missing; a weight in format")]

    doubled = Stored(tmp_path, kind, double)
    (fault,) = doubled.faults
    named = fault.startswith(f"{doubled.scale}: shape {list(doubled.tensors[doubled.scale].shape)}, its weight")
    assert named or "beside U8 [6, 32, 2], expected bytes (experts, rows, groups, 16)" in fault, fault


@pytest.mark.parametrize("kind", ENCODERS)
def test_scales_that_are_no_numbers_are_named(kind: str, tmp_path: Path) -> None:
    stored = Stored(tmp_path, kind, filled(255 if kind == "mxfp4" else float("nan")))
    with pytest.raises(NumericsError, match=r"its \w*scale\w* hold NaN"):
        decode(stored.weight, stored.parts())


@pytest.mark.parametrize("kind", [kind for kind in ENCODERS if kind != "mxfp4"])  # whose scales are powers of two
def test_scales_of_zero_are_named(kind: str, tmp_path: Path) -> None:
    stored = Stored(tmp_path, kind, filled(0))
    with pytest.raises(NumericsError, match="hold zeros for codes that are not"):
        decode(stored.weight, stored.parts())


@pytest.mark.parametrize("method", ["bitsandbytes", "fbgemm_fp8", None])
def test_unknown_formats_are_named(method: str | None) -> None:
    with pytest.raises(
        InputError, match=rf"format {method or 'unnamed'!r} cannot be read; known are fp8, .* gptq, awq"
    ):
        stored_weights({"quantization_config": {"quant_method": method}}, {})


def test_parts_that_come_one_by_one_become_weights(tmp_path: Path) -> None:
    """As vLLM loads them, in any order, among other tensors; a part that does not come is named."""
    stored = Stored(tmp_path, "fp8 blocks")
    form = stored.weight.form
    assert form is not None
    coming = [("norm.weight", torch.ones(2)), *sorted(stored.tensors.items(), reverse=True)]
    read = dict(decoded_weights(coming, {"q_proj": form}))
    assert read.keys() == {"norm.weight", "q_proj.weight"}
    assert torch.equal(read["q_proj.weight"], stored.expected)
    with pytest.raises(ValueError, match="lacks weight of q_proj, which"):
        dict(decoded_weights(coming[:2], {"q_proj": form}))
