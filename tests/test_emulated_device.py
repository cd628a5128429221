"""The emulated device refuses what CUDA refuses, and finds what streams do to each other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.emulated_device import emulated_device

WRONG: dict[str, Callable[[Tensor], object]] = {
    "a sum of both": lambda values: values + torch.ones(3),
    "a product with the CPU": lambda values: torch.ones(3, 3) @ values,
    "an index on the device": lambda values: torch.arange(9)[values.long()],
    "values of the CPU put in": lambda values: values.index_put_((values > 0,), torch.ones(3)),
    "a result on the CPU": lambda values: torch.mm(values, values, out=torch.empty(3, 3)),
    "a sum into a number of the CPU": lambda values: torch.zeros(()).add_(values.sum()),
    "rows of the CPU joined on": lambda values: torch.cat((values, torch.ones(3, 3))),
    "numpy": lambda values: values.numpy(),
    "an array": lambda values: np.asarray(values),
    "the CPU's random numbers": lambda values: torch.randn(3, device="cuda", generator=torch.Generator()),
    "integers multiplied": lambda values: values.long() @ values.long(),
    "sums of another width": lambda values: torch.bmm(values[None], values[None], out_dtype=torch.float64),
    "a sum that varies": lambda values: values.cumsum(0),
    "bins that vary": lambda values: torch.bincount(values.long().flatten(), weights=values.flatten()),
    "memory that is not of the host pinned": lambda values: values.pin_memory(),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("what", WRONG)
def test_what_cuda_refuses_raises(what: str, inference: bool) -> None:
    with emulated_device(), torch.inference_mode(inference):
        values = torch.ones(3, 3, device="cuda")
        with pytest.raises((RuntimeError, TypeError, NotImplementedError)):
            WRONG[what](values)


def test_the_device_that_is_asked_for_is_taken() -> None:
    for _ in range(2):
        with emulated_device(), torch.device("meta"):
            assert torch.tensor(1.0).is_meta
        with torch.device("meta"):
            assert torch.tensor(1.0).is_meta


def test_what_cuda_takes_is_computed() -> None:
    with emulated_device() as device:
        values = torch.arange(6.0, device="cuda").reshape(2, 3)
        values[torch.tensor([1]), :2] += torch.tensor(2.0)
        assert values.is_cuda
        assert str(values.to(torch.float64).T.device) == "cuda:0"
        assert values.tolist() == [[0, 1, 2], [5, 6, 5]]
        assert (values.T @ values).cpu().tolist()[0] == [25, 30, 25]
        weight = torch.ones(2, 3, device="cuda", requires_grad=True)
        (gradient,) = torch.autograd.grad((torch.nn.functional.linear(values, weight) ** 2).sum(), weight)
        assert gradient.is_cuda
        device.waits.clear()
        assert bool(values.sum() > 0)
        assert values.nonzero().is_cuda
        assert sorted(device.waits) == [
            "_local_scalar_dense in test_emulated_device:test_what_cuda_takes_is_computed",
            "nonzero in test_emulated_device:test_what_cuda_takes_is_computed",
        ]


def copy_out(wait: bool) -> float:
    """What another stream has copied to the host, read there."""
    values, host, aside = torch.ones(3, device="cuda"), torch.empty(3, pin_memory=True), torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        host.copy_(values, non_blocking=True)
    values.record_stream(aside)
    if wait:
        aside.synchronize()
    return float(host.sum())


def write_aside(wait: bool) -> None:
    """Memory that one stream fills and another reads."""
    values, aside = torch.ones(3, device="cuda"), torch.cuda.Stream()
    if wait:
        aside.wait_event(torch.cuda.current_stream().record_event())
    with torch.cuda.stream(aside):
        values.add_(1)
    torch.cuda.current_stream().wait_stream(aside)
    values.add_(1)


def free_early(wait: bool) -> None:
    """Memory that goes back to its stream while another reads it."""
    values, aside = torch.ones(3, device="cuda"), torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        values.sum()
    if wait:
        values.record_stream(aside)


def write_early(wait: bool) -> None:
    """Pinned memory that the host fills again while it is copied from."""
    host = torch.zeros(3).pin_memory()
    values = host.to("cuda", non_blocking=True)
    if wait:
        torch.cuda.synchronize()
    host.add_(1)
    del values


@pytest.mark.parametrize("do", [copy_out, write_aside, free_early, write_early])
def test_streams_that_do_not_wait_are_found(do: Callable[[bool], object]) -> None:
    with emulated_device():
        do(True)
    with pytest.raises(AssertionError, match="streams"), emulated_device():
        do(False)
