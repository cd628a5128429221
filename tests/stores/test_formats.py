"""Weights in stored formats: decoded as their encoders do, on every device, and refused where parts do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lamina.stored_lamina import decoded_weights
from manifests.errors import InputError, NumericsError
from stores.disk import Disk
from stores.formats import decode, stored_weights
from stores.headers import TensorRecord, read_header
from tests.emulated_device import emulated_device
from tests.encoders import ENCODERS

Change = Callable[[dict[str, Tensor], str], None]


class Stored:
    """A random weight, encoded, in a file."""

    def __init__(self, folder: Path, kind: str, change: Change | None = None) -> None:
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
        config = {"quantization_config": field, "dtype": "bfloat16"}
        self.records, self.faults = stored_weights(config, read_header(Disk(folder), "model.safetensors"))

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
    assert [fault for fault in missing.faults if fault.startswith(f"{missing.scale}: missing; a weight in format")]

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
