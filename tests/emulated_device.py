"""Emulates a CUDA device: tensors report `cuda:0` and compute on the CPU, and operations that CUDA refuses raise.

    with emulated_device() as device:
        torch.ones(3, device="cuda") + torch.ones(3)  # RuntimeError: two devices

It detects operands on two devices, operations that CUDA lacks or whose results vary from run to run, host memory used
as device memory, waits of the host (`device.waits`), and races between streams (tests/emulated_streams.py). It shows
neither the results of CUDA's kernels, nor their limits of size, nor memory and speed.

For torch's C++ code the tensors are on the CPU; for Python code, ours included, on `cuda:0`.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.emulated_streams import Event, Memory, Stream, Streams

ROOT = Path(__file__).resolve().parents[1]
CUDA = torch.device("cuda", 0)
TOTAL_BYTES = 80 * 2**30
aten: Any = torch.ops.aten

# Operations for which the host waits: their result, or its shape, depends on numbers on the device.
WAITS = {
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
    "_linalg_eigh", "_linalg_svd", "linalg_lstsq", "linalg_eig", "bincount", "multinomial", "linalg_matrix_rank",
}  # fmt: skip
# Without a deterministic kernel on CUDA (torch.use_deterministic_algorithms names them), for floating numbers.
VARYING = {"cumsum", "cumprod", "kthvalue", "median.dim", "bincount", "histc", "put_", "nll_loss2d_forward"}
PRODUCTS = {"mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "mv", "addmv", "addmv_", "dot", "vdot"}
# Arguments that may be on the CPU beside tensors of the device, by position.
FROM_CPU = {"index": (1,), "index_put_": (1,), "index_put": (1,), "_index_put_impl_": (1,)}
# Operations that, like pointwise ones, accept a single number on the CPU.
TAKES_NUMBER = {"fill_", "fill", "index_put_", "index_put", "_index_put_impl_", "masked_fill", "masked_fill_"}


class DeviceTensor(Tensor):
    """A tensor of the emulated device. `inner` holds its numbers; it shares `memory` with its views."""

    inner: Tensor
    memory: Memory
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, memory: Memory) -> DeviceTensor:
        with torch.inference_mode(inner.is_inference()):  # like a view of that tensor
            wrapper = Tensor._make_wrapper_subclass(
                cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
            )
        wrapper.inner, wrapper.memory = inner, memory
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _device().run(func, args, kwargs or {})

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def to(self, *args: Any, copy: bool = False, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        for argument in args:
            if isinstance(argument, Tensor):
                kwargs |= {"device": argument.device, "dtype": argument.dtype}
            elif isinstance(argument, bool):
                non_blocking = argument
            elif argument is not None:
                kwargs["dtype" if isinstance(argument, torch.dtype) else "device"] = argument
        device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
        converted: Tensor = self if dtype is None else super().to(dtype, **kwargs)
        if device is None or torch.device(device).type == "cuda":
            return converted.clone() if copy and converted is self else converted
        return _device().to_host(converted.detach(), non_blocking)

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return self.to("cpu")

    def cuda(self, *_: Any, **__: Any) -> Tensor:
        return self

    def type_as(self, other: Tensor) -> Tensor:
        return self.to(other)

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return torch.tensor(data, dtype=self.dtype if dtype is None else dtype, device=CUDA)

    def tolist(self) -> Any:
        return self.to("cpu").tolist()

    def __format__(self, spec: str) -> str:
        return format(self.to("cpu"), spec)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.inner!r} on {CUDA}"

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def is_pinned(self, *_: Any) -> bool:
        return False

    def pin_memory(self, *_: Any) -> Tensor:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def record_stream(self, stream: Stream) -> None:
        _device().streams.record(self.memory, stream)

    def untyped_storage(self) -> Any:
        raise NotImplementedError("memory of the emulated device has no storage")


class EmulatedDevice:
    """Runs operations of the device, and counts them, the host's waits and its uploads."""

    def __init__(self, deterministic: bool) -> None:
        self.deterministic = deterministic
        self.waits: Counter[str] = Counter()  # the host's, by "operation in module:function" of our code
        self.uploads: Counter[str] = Counter()  # copies from memory that is not pinned: the host waits for those, too
        self.operations: Counter[str] = Counter()
        self.streams = Streams(lambda operation: self.waits.update([_caller(operation)]))
        self.generators: dict[int, torch.Generator] = {}

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation with an argument or a result on the device."""
        if _decomposes(func):
            with _Mode():
                return func.decompose(*args, **kwargs)
        tensors = _tensors((args, kwargs))
        ours = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        name = func._schema.name.removeprefix("aten::")
        wanted = kwargs.get("device")
        to_device = wanted is not None and torch.device(wanted).type == "cuda"
        if not ours and not to_device:
            return self._on_host(func, args, kwargs, tensors)
        if name == "_to_copy" and not ours:
            return self._upload(func, args, kwargs)
        if name in ("copy_", "copy") and (not ours or len(ours) < len(tensors)):
            return self._copied(*args, **kwargs)
        self._check(func, name, args, kwargs, tensors)
        self._count(func, name, args, kwargs)
        return self._compute(func, name, args, kwargs, ours)

    def _compute(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], ours: list[DeviceTensor]) -> Any:
        inner_args, inner = _mapped(_inner, args), _mapped(_inner, kwargs)
        inner |= {"device": "cpu"} if inner.get("device") is not None else {}
        written = _written(func, args, kwargs)
        for tensor in ours if not _is_view(func) else ():
            self.streams.touch(tensor.memory, any(tensor is other for other in written))
        result = WITHOUT_CPU_KERNEL.get((name, func._overloadname), func)(*inner_args, **inner)
        if written and isinstance(written[0], DeviceTensor):
            for tensor in written:
                if tensor.shape != tensor.inner.shape or tensor.stride() != tensor.inner.stride():
                    raise NotImplementedError(f"the emulated device changes no shapes in place: {func}")
            return written[0] if len(written) == 1 else type(result)(written)
        memories = {tensor.inner.untyped_storage()._cdata: tensor.memory for tensor in ours}
        return _mapped(lambda value: self._wrapped(value, memories), result)

    def _wrapped(self, value: Any, memories: dict[int, Memory]) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, DeviceTensor):
            return value
        storage = value.untyped_storage()._cdata
        if storage not in memories:
            memories[storage] = self.streams.allocate()
        return DeviceTensor(value, memories[storage])

    def _check(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        allowed = {id(each) for place in FROM_CPU.get(name, ()) for each in _tensors(args[place])}
        written = _written(func, args, kwargs)
        on_cpu = [tensor for tensor in tensors if tensor.device.type == "cpu" and id(tensor) not in allowed]
        scalars = torch.Tag.pointwise in func.tags or name in TAKES_NUMBER
        for tensor in on_cpu:
            if not scalars or tensor.ndim > 0 or any(tensor is other for other in written):
                shapes = ", ".join(f"{other.device} {tuple(other.shape)}" for other in tensors)
                raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {shapes}")
        generator = kwargs.get("generator")
        if generator is not None and generator._cdata not in self.generators:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        dtypes = {tensor.dtype for tensor in tensors}
        floats = any(dtype.is_floating_point for dtype in dtypes)
        if name in PRODUCTS and not floats:
            raise NotImplementedError(f'"{name}_cuda" not implemented for {dtypes}')
        if self.deterministic and floats and not VARYING.isdisjoint((name, f"{name}.{func._overloadname}")):
            raise RuntimeError(f"{name} does not have a deterministic implementation on CUDA")

    def _count(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        self.operations[name] += 1
        masks = _tensors(args[1]) if name in FROM_CPU else []
        for index in masks:
            if index.dtype in (torch.bool, torch.uint8) and not (name != "index" and args[2].numel() == 1):
                self._wait(f"{name} by a mask")
            elif not isinstance(index, DeviceTensor):
                self.uploads[_caller("index")] += 1
        if name in WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self._wait(name)
        if name.startswith("linalg_") and kwargs.get("check_errors"):
            self._wait(name)

    def _wait(self, operation: str) -> None:
        self.waits[_caller(operation)] += 1
        self.streams.host_waits_for_current()

    # -- between host and device --------------------------------------------------------------------------------------

    def to_host(self, tensor: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy a tensor to the host. The host waits, unless `non_blocking`."""
        assert isinstance(tensor, DeviceTensor)
        self.streams.touch(tensor.memory, False)
        if non_blocking:
            # Into new pinned memory, which must not be read before a wait for the stream.
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return self._copied(host, tensor, True)
        self._wait("copy to the host")
        with torch.no_grad():
            return tensor.inner.clone()

    def _upload(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        source = args[0]
        self._reads_host(source, kwargs.get("non_blocking", False))
        inner = func(source, **{**kwargs, "device": "cpu", "non_blocking": False})
        copied = DeviceTensor(inner, self.streams.allocate())
        self.streams.touch(copied.memory, True)
        return copied

    def _copied(self, place: Tensor, values: Tensor, non_blocking: bool = False) -> Tensor:
        """Run `place.copy_(values)` from device to host or back."""
        if isinstance(values, DeviceTensor):
            self.streams.touch(values.memory, False)
            pinned = self.streams.pinned(place)
            if non_blocking and pinned is not None:
                self.streams.touch(pinned, True)
            else:
                self._wait("copy to the host")
            place.copy_(values.inner)
            return place
        assert isinstance(place, DeviceTensor)
        self._reads_host(values, non_blocking)
        self.streams.touch(place.memory, True)
        place.inner.copy_(values)
        return place

    def _reads_host(self, source: Tensor, non_blocking: bool) -> None:
        pinned = self.streams.pinned(source)
        if pinned is not None:
            self.streams.touch(pinned, False)
        if pinned is None or not non_blocking:
            self.uploads[_caller("copy to the device")] += 1
        if not non_blocking:
            self.streams.host_waits_for_current()

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Run an operation on tensors of the host alone. Copies into pinned memory may still be running."""
        pin = kwargs.pop("pin_memory", None)
        written = _written(func, args, kwargs)
        for tensor in tensors if not _is_view(func) else ():
            self.streams.host_touches(tensor, any(tensor is other for other in written))
        result = func(*args, **kwargs)
        if pin:
            self.streams.pin(result)
        return result

    def synchronize(self, *_: Any) -> None:
        """Replaces `torch.cuda.synchronize`."""
        self.waits[_caller("synchronize")] += 1
        self.streams.host_waits_for_all()


def _bmm_out_dtype(left: Tensor, right: Tensor, out_dtype: torch.dtype, product: Any = torch.bmm) -> Tensor:
    """Multiply as CUDA's kernel with `out_dtype` does, which the CPU lacks."""
    halves = left.dtype in (torch.float16, torch.bfloat16)
    if left.dtype != right.dtype or not (out_dtype == left.dtype or (halves and out_dtype == torch.float32)):
        raise RuntimeError("out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")
    return product(left.to(out_dtype), right.to(out_dtype))


WITHOUT_CPU_KERNEL: dict[tuple[str, str], Any] = {
    ("bmm", "dtype"): _bmm_out_dtype,
    ("mm", "dtype"): functools.partial(_bmm_out_dtype, product=torch.mm),
}


class _Mode(TorchDispatchMode):
    """Intercepts operations that create tensors on the device or touch pinned memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _device().run(func, args, kwargs or {})


_current: list[EmulatedDevice] = []  # the last that was entered


def _device() -> EmulatedDevice:
    return _current[0]


def _mapped(call: Any, value: Any) -> Any:
    """Return a copy of nested tuples, lists and dicts with `call` applied to each value."""
    if isinstance(value, tuple | list):
        return type(value)([_mapped(call, each) for each in value])
    return {name: _mapped(call, each) for name, each in value.items()} if isinstance(value, dict) else call(value)


def _tensors(value: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    _mapped(lambda each: tensors.append(each) if isinstance(each, Tensor) else None, value)
    return tensors


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, DeviceTensor) else value


@functools.cache
def _decomposes(func: Any) -> bool:
    return bool(func._can_decompose())


@functools.cache
def _is_view(func: Any) -> bool:
    """True if an operation returns a view, without reading numbers."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation writes to."""
    places = _writes(func)
    return _tensors([args[place] if place < len(args) else kwargs.get(name) for place, name in places])


@functools.cache
def _writes(func: Any) -> list[tuple[int, str]]:
    return [
        (sys.maxsize if argument.kwarg_only else place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _caller(operation: str) -> str:
    """Return "OPERATION in MODULE:FUNCTION" for the nearest frame of our code."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(ROOT)) and "/tests/emulated" not in path and ".venv" not in path:
            return f"{operation} in {Path(path).stem}:{frame.f_code.co_name}"
        frame = frame.f_back
    return operation


def _with_index(call: Any) -> Any:
    """Replace `cuda` by `cuda:0` in arguments, as torch would ask CUDA for the index."""

    def numbered(value: Any) -> Any:
        named = isinstance(value, str | torch.device) and torch.device(value) == torch.device("cuda")
        return CUDA if named else value

    def called(*args: Any, **kwargs: Any) -> Any:
        return call(*map(numbered, args), **{name: numbered(value) for name, value in kwargs.items()})

    return functools.wraps(call)(called)


class _Generator(torch.Generator):
    """A generator that the emulated device accepts if it was created for `cuda`."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        generator: _Generator = super().__new__(cls)
        if torch.device(device).type == "cuda":
            _device().generators[generator._cdata] = generator  # kept alive, so that its address stays unique
        return generator


@contextmanager
def emulated_device(deterministic: bool = True) -> Iterator[EmulatedDevice]:
    """Provide `cuda` in the block, and in threads that start in it. At its end, races between streams raise.

    `deterministic`: operations whose results vary from run to run raise.
    """
    device = EmulatedDevice(deterministic)
    with entered(device):
        yield device
    device.streams.require_order()


@contextmanager
def entered(device: EmulatedDevice) -> Iterator[None]:
    """Enter an existing device, for one of several blocks that use it."""
    streams, run, numpy = device.streams, threading.Thread.run, Tensor.numpy
    torch.utils._device._device_constructors()  # cached now: `with torch.device(...)` must not wrap the stand-ins

    def run_emulated(thread: threading.Thread) -> None:
        with _Mode():
            run(thread)

    properties = SimpleNamespace(name="emulated", total_memory=TOTAL_BYTES, major=9, minor=0)
    of_cuda: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: (properties.major, properties.minor),
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (TOTAL_BYTES, TOTAL_BYTES),
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "set_per_process_memory_fraction": lambda *_: None,
        "synchronize": device.synchronize,
        "Stream": lambda *_, **__: Stream(streams),
        "Event": lambda *_, **__: Event(streams),
        "current_stream": lambda *_: streams.current,
        "default_stream": lambda *_: streams.default,
        "stream": streams.entered,
    }
    of_tensor: dict[str, Any] = {
        "to": _with_index(Tensor.to),
        "cuda": lambda tensor, *_, **__: tensor.to(CUDA),
        "pin_memory": lambda tensor, *_: streams.pinned_copy(tensor),
        "is_pinned": lambda tensor, *_: streams.pinned(tensor) is not None,
        "numpy": lambda tensor, **named: (streams.host_touches(tensor, False), numpy(tensor, **named))[1],
    }
    attention = functional.scaled_dot_product_attention

    def attend(query: Tensor, *others: Any, is_causal: bool = False, **named: Any) -> Tensor:
        """Pass an explicit causal mask, as torch would create one on the CPU."""
        if is_causal and query.is_cuda and not torch.is_inference_mode_enabled():
            length = query.shape[-2], others[0].shape[-2]
            named["attn_mask"], is_causal = torch.ones(length, dtype=torch.bool, device=CUDA).tril(), False
        return attention(query, *others, is_causal=is_causal, **named)

    of_torch = {name: _with_index(getattr(torch, name)) for name in ("tensor", "as_tensor")}
    with ExitStack() as stack:
        for owner, stand_ins in ((torch.cuda, of_cuda), (Tensor, of_tensor), (torch, of_torch)):
            for name, stand_in in stand_ins.items():
                stack.enter_context(mock.patch.object(owner, name, stand_in))
        stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", attend))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run_emulated))
        # Otherwise torch.tensor(…, device="cuda") would copy without the mode.
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        _current[:] = [device]
        stack.enter_context(_Mode())
        yield
