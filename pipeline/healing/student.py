"""The compressed model while it is trained: loaded by transformers as a user loads it, with float32 weights.

With several processes, FSDP2 gives each a part of every decoder layer's weights; a layer is whole only while it
computes. Embeddings, the final norm and the head do not train, and are whole in every process. If a process's part is
too large for its GPU, FSDP keeps it in host memory, and brings one layer at a time to the GPU, also for one process.

Legend: B windows, S tokens of a window, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import lamina  # noqa: F401 - registers its classes, so that no code of the checkpoint runs
from lamina.decoder_layer_lamina import find
from lamina.embedding_lamina import finish_logits
from lamina.factored_lamina import StoredFactor, stored_factors
from lamina.levels_lamina import PACKED
from lamina.processor_lamina import product_dtype
from lamina.stored_lamina import StoredLinear
from manifests.errors import InputError
from manifests.heal import CHECKPOINTED_BYTES
from pipeline.healing.processes import Processes, local
from pipeline.healing.rounded import LATENT, TrainedTable, even_codes, multiply_out, train_rounded
from pipeline.kernels.moments import bfloat16_factors
from stores.headers import DTYPES, read_header

DENSE_HEAD, WEIGHT = "dense_head.safetensors", "weight"  # beside a student with a rounded head; its tensor


class Student:
    """A compressed model. Only the named tensors are trained.

    Attributes:
        trained: stored name -> parameter in float32; of packed codes, the weight that they follow.
    """

    def __init__(
        self,
        folder: Path,
        names: Mapping[str, torch.dtype],
        device: torch.device,
        activation_bytes: int,
        processes: Processes,
        *,
        offloads: bool = False,
    ) -> None:
        """Load a checkpoint; all processes at the same time.

        Args:
            folder: the checkpoint.
            names: the stored names of the trained tensors, and the dtypes in which they are stored.
            device: where the model is trained.
            activation_bytes: of a micro-batch; many are computed again in the backward pass.
            offloads: the layers' weights, gradients and moments are in host memory, where the optimizer computes.

        Raises InputError if a named tensor is no parameter.
        """
        self.model = _loaded(folder, device, processes, names, offloads)
        self.model.config.attention_dropout = 0.0
        self.dtypes, self.device = names, device
        head_file = folder / DENSE_HEAD
        self.dense_head_VD = load_file(head_file, str(device))[WEIGHT].float() if head_file.exists() else None
        self.half_products = product_dtype(torch.bfloat16, device) is torch.bfloat16
        self.factors = {stored: (name, factor) for name, (stored, factor) in stored_factors(self.model).items()}
        parameters = dict(self.model.named_parameters())
        self.trained = {name: _parameter(parameters, self._path(name), name) for name in sorted(names)}
        self.tables = {name: self._table(name) for name in self.trained if name.endswith(f".{PACKED}")}
        for parameter in self.trained.values():
            parameter.requires_grad_(True)
        self.model.eval()
        if activation_bytes > CHECKPOINTED_BYTES:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
            self.model.train()

    def hidden(self, ids_BS: Tensor) -> Tensor:
        """Return the head's inputs (B, S, D).

        With gradients, products are in bfloat16 where the device multiplies it fast, and sums in float32.
        """
        half = self.half_products and torch.is_grad_enabled()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            hidden_BSD: Tensor = self.model.get_decoder()(input_ids=ids_BS, use_cache=False).last_hidden_state
        return hidden_BSD.float()

    def head_products(self) -> AbstractContextManager[None]:
        """Return a context for products with the head in a step, forth and back. Their factors are in bfloat16 where a
        CPU multiplies it fast; sums, and so logits, are in float32."""
        return bfloat16_factors() if self.half_products and self.device.type == "cpu" else nullcontext()

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits (T, V) of the head's inputs (T, D)."""
        head: nn.Module = self.model.get_output_embeddings()
        return self._finished(head(hidden_TD))

    def teacher_logits(self, outputs_TD: Tensor) -> Tensor:
        """Return logits (T, V) of the dense model, of its last layer's outputs (T, D). Its final norm is the student's,
        and so is its head, unless that is rounded."""
        base = self.model.get_decoder()
        norm: nn.Module = find(base, _path_of(base, "final_norm"))
        hidden_TD = norm(outputs_TD.to(self.device, torch.float32))
        if self.dense_head_VD is None:
            return self.logits(hidden_TD)
        bias_V = self.model.get_output_embeddings().bias
        return self._finished(nn.functional.linear(hidden_TD, self.dense_head_VD, bias_V))

    def _finished(self, logits_TV: Tensor) -> Tensor:
        """Return logits (T, V) of the head's outputs, which are the logits already in transformers' own classes."""
        if not hasattr(self.model.config, "block"):
            return logits_TV
        finished_TV: Tensor = finish_logits(self.model.config, logits_TV)
        return finished_TV

    def rounded_copy(self) -> dict[str, Tensor]:
        """Return this process's parts of the trained tensors, on the CPU, in the dtypes that a checkpoint stores. Codes
        are those for the present scales: call it in the block of `rounded`."""
        stored = {name: table.pack_codes() for name, table in self.tables.items()}
        return {
            name: stored.get(name, parameter.detach()).to("cpu", self.dtypes[name], copy=True)
            for name, parameter in self.trained.items()
        }

    def restore(self, stored: Mapping[str, Tensor]) -> None:
        """Take this process's parts of the trained tensors from a result of `rounded_copy`."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                if name not in self.tables:
                    local(parameter).copy_(local(stored[name]))
            for name, table in self.tables.items():
                table.take_codes(stored[name])

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """Compute with the weights as they would be stored, in the block. The exact ones wait on the CPU."""
        parts = {name: local(self.trained[name].detach()) for name in self.trained.keys() - self.tables.keys()}
        masters = {name: part.to("cpu", copy=True) for name, part in parts.items()}
        for name, part in parts.items():
            part.copy_(part.to(self.dtypes[name]))
        try:
            yield
        finally:
            for name, part in parts.items():
                part.copy_(masters[name])

    def _path(self, stored: str) -> str:
        if stored.endswith(f".{PACKED}"):
            return f"{stored.removesuffix(PACKED)}{LATENT}"
        return self.factors[stored][0] if stored in self.factors else stored

    def _table(self, stored: str) -> TrainedTable:
        table = self.model.get_submodule(stored.removesuffix(f".{PACKED}"))
        assert isinstance(table, TrainedTable)
        return table


def stored_forms(folder: Path) -> dict[str, StoredFactor]:
    """Return the factors of a checkpoint's model that are stored in another shape, by stored name. No weight is
    read."""
    return dict(stored_factors(_empty(folder)).values())


def _empty(folder: Path) -> Any:
    """Return the model of a checkpoint in float32, without memory for its tensors."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)


def _parameter(parameters: Mapping[str, nn.Parameter], path: str, stored: str) -> nn.Parameter:
    if path not in parameters:
        raise InputError(
            f"heal: the tensor {stored} is not a parameter of the model that transformers loads: its stored form does "
            "not train; leave out heal, or compress without the method that wrote it"
        )
    return parameters[path]


def _path_of(base: Any, name: str) -> tuple[str, ...]:
    """Return the path of `layers` or `final_norm` in a decoder of Lamina's class, or of DeepSeek's, which `mla`
    writes."""
    names = getattr(base, "_names", None) or {"layers": ("layers",), "final_norm": ("norm",)}
    return tuple(names[name])


def _loaded(folder: Path, device: torch.device, processes: Processes, trained: Container[str], offloads: bool) -> Any:
    """Load a model in float32; each process gets a part of its layers. Process 0 reads and sends it layer by layer."""
    if processes.rank == 0:
        with _undivided():
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=_stored_dtype(folder), trust_remote_code=False
            )
        model.config.dtype = torch.float32
    else:
        model = _empty(folder)
    train_rounded(model, processes.first(even_codes(model)), trained)
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    for module in ends:
        _widen(module)
    multiply_out(model, ends)
    model.requires_grad_(False)
    if processes.count == 1 and not offloads:
        _widen(model.to(device))
        return model
    base = model.get_decoder()
    *parents, last = _path_of(base, "layers")
    holder, layers = find(base, tuple(parents)), find(base, (*parents, last))
    setattr(holder, last, nn.ModuleList())
    _place(model, device)
    model.tie_weights()  # which `to_empty` has untied: every process must have as many tensors
    _send(model)
    whole = {*model.parameters()}
    setattr(holder, last, layers)
    mesh = init_device_mesh(device.type, (processes.count,))
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offloads else OffloadPolicy()
    for layer in layers.children():
        _place(layer, device)
        _send(layer)
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(base, mesh=mesh, ignored_params=whole, offload_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reduce_scatter_unused_params(True)  # such as those of experts without a token here
    return model


@contextmanager
def _undivided() -> Iterator[None]:
    """Keep compressed-tensors from dividing the work of loading with processes that do not load."""
    if find_spec("compressed_tensors") is None:
        yield
        return
    compressor: Any = import_module("compressed_tensors.compressors.model_compressors.model_compressor")
    original, compressor.is_distributed = compressor.is_distributed, lambda: False
    try:
        yield
    finally:
        compressor.is_distributed = original


def _stored_dtype(folder: Path) -> torch.dtype:
    """Return the dtype of a checkpoint's numbers, in which its weights are mapped and not read; float32 for several."""
    headers = [read_header(folder, file.name) for file in folder.glob("*.safetensors")]
    dtypes = {DTYPES[record.dtype] for header in headers for record in header.values()}
    numbers = {dtype for dtype in dtypes if dtype.is_floating_point}
    return numbers.pop() if len(numbers) == 1 else torch.float32


def _place(module: nn.Module, device: torch.device) -> None:
    """Move a module of process 0 to the device, in float32; give those of other processes memory there."""
    if next(module.parameters()).is_meta:
        module.to_empty(device=device)
    else:
        _widen(module.to(device))


def _widen(module: nn.Module) -> None:
    """Make the numbers of a module float32, but for weights in the formats of a source, which keep their codes."""
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.float()
        for name, buffer in [] if isinstance(each, StoredLinear) else [*each.named_buffers(recurse=False)]:
            if buffer.is_floating_point():
                setattr(each, name, buffer.float())


def _send(module: nn.Module) -> None:
    """Send the tensors of process 0 to the other processes."""
    for tensor in (*module.parameters(), *module.buffers()):
        data = tensor.detach()
        dist.broadcast(data.view(torch.uint8) if data.itemsize == 1 else data, src=0)  # gloo has no fp8
