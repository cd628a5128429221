from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from workers.tensor_transfer import LocalTransfer, pack_tensors, unpack_tensors

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip


def values_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_packed_comes_out_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = values_of(dtype, *shape)
    found = unpack_tensors(pickle.loads(pickle.dumps(pack_tensors({"a.weight": values}))))["a.weight"]
    assert found.dtype == dtype
    assert found.shape == values.shape
    assert torch.equal(found.reshape(-1).view(torch.uint8), values.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_read_only_memory_is_taken_without_a_copy_or_a_warning(dtype: torch.dtype) -> None:
    """Ray gives read-only arrays; a warning is an error in these tests."""
    packed = pack_tensors({"x": values_of(dtype, 4, 5)})
    array = packed["x"][1]
    array.flags.writeable = False
    found = unpack_tensors(packed)["x"]
    assert found.data_ptr() == array.__array_interface__["data"][0]


def test_other_warnings_are_not_silenced() -> None:
    import warnings

    unpack_tensors(pack_tensors({"x": torch.ones(2)}))
    with pytest.warns(UserWarning, match="seen"):
        warnings.warn("seen", UserWarning, stacklevel=1)


def test_nan_and_negative_zero_survive() -> None:
    values = torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.bfloat16)
    assert torch.equal(unpack_tensors(pack_tensors({"x": values}))["x"].view(torch.int16), values.view(torch.int16))


def test_strided_and_required_gradient() -> None:
    values = torch.arange(12.0).reshape(3, 4).T.requires_grad_()
    found = unpack_tensors(pack_tensors({"x": values}))["x"]
    assert torch.equal(found, values)
    assert not found.requires_grad


def test_names_and_order_are_kept() -> None:
    names = ["q.first.weight", "q.second", "k.bias"]
    assert list(unpack_tensors(pack_tensors({name: torch.ones(1) for name in names}))) == names
    assert unpack_tensors(pack_tensors({})) == {}


def test_the_packed_form_is_plain() -> None:
    dtype, array = pack_tensors({"x": torch.ones(2, dtype=torch.bfloat16)})["x"]
    assert dtype == "bfloat16"
    assert isinstance(array, np.ndarray)
    assert array.dtype == np.int16


def test_a_local_handle_is_a_copy() -> None:
    transfer = LocalTransfer()
    values = torch.ones(3)
    handle = transfer.put({"x": values})
    values.zero_()
    assert transfer.get(handle)["x"].tolist() == [1.0, 1.0, 1.0]
