"""The compressed model while it is trained: loaded by transformers as a user loads it, with float32 weights.

Of several processes, each holds a part of every decoder layer's weights, cut by FSDP2; a layer is whole only while it
computes. Embeddings, the final norm and the head do not train, and are whole in every process.

Legend: B windows, S tokens of a window, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import lamina  # noqa: F401 - registers its classes, so that no code of the checkpoint runs
from lamina.decoder_layer_lamina import find
from lamina.embedding_lamina import Embedding, ScaledEmbedding, finish_logits
from lamina.factored_lamina import StoredFactor, stored_factors
from lamina.levels_lamina import BLOCK_NUMBERS, LEVELS, PACKED, SCALE, WORD_BITS, TableEmbedding, TableLinear
from lamina.processor_lamina import product_dtype
from manifests.errors import InputError
from manifests.heal import CHECKPOINTED_BYTES
from pipeline.healing.processes import Processes, local

DENSE_HEAD, WEIGHT = "dense_head.safetensors", "weight"  # beside a student with a rounded head; its tensor


class Student:
    """A compressed model. Only the named tensors are trained.

    Attributes:
        trained: stored name -> parameter in float32.
    """

    def __init__(
        self,
        folder: Path,
        names: Mapping[str, torch.dtype],
        device: torch.device,
        activation_bytes: int,
        processes: Processes,
    ) -> None:
        """Load a checkpoint; all processes at the same time.

        Args:
            folder: the checkpoint.
            names: the stored names of the trained tensors, and the dtypes in which they are stored.
            device: where the model is trained.
            activation_bytes: of a micro-batch; many are computed again in the backward pass.

        Raises InputError if a named tensor is no parameter.
        """
        self.model = _loaded(folder, device, processes)
        self.model.config.attention_dropout = 0.0
        self.dtypes, self.device = names, device
        head_file = folder / DENSE_HEAD
        self.dense_head_VD = load_file(head_file, str(device))[WEIGHT].float() if head_file.exists() else None
        self.half_products = product_dtype(torch.bfloat16, device) is torch.bfloat16
        self.factors = {stored: (name, factor) for name, (stored, factor) in stored_factors(self.model).items()}
        parameters = dict(self.model.named_parameters())
        self.trained = {name: _parameter(parameters, self._path(name), name) for name in sorted(names)}
        for parameter in self.trained.values():
            parameter.requires_grad_(True)
        self.model.eval()
        if activation_bytes > CHECKPOINTED_BYTES:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()

    def hidden(self, ids_BS: Tensor) -> Tensor:
        """Return the head's inputs (B, S, D).

        With gradients, products are in bfloat16 where the device multiplies it fast, and sums in float32.
        """
        half = self.half_products and torch.is_grad_enabled()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            hidden_BSD: Tensor = self.model.get_decoder()(input_ids=ids_BS, use_cache=False).last_hidden_state
        return hidden_BSD.float()

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
        """Return logits (T, V) of the head's outputs: as they are, of a class of transformers' own."""
        if not hasattr(self.model.config, "block"):
            return logits_TV
        finished_TV: Tensor = finish_logits(self.model.config, logits_TV)
        return finished_TV

    def rounded_copy(self) -> dict[str, Tensor]:
        """Return this process's parts of the trained tensors, on the CPU, in the dtypes that a checkpoint stores."""
        return {
            name: parameter.detach().to("cpu", self.dtypes[name], copy=True) for name, parameter in self.trained.items()
        }

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """Compute with the weights as they would be stored, in the block. The exact ones wait on the CPU."""
        parts = {name: local(parameter.detach()) for name, parameter in self.trained.items()}
        masters = {name: part.to("cpu", copy=True) for name, part in parts.items()}
        for name, part in parts.items():
            part.copy_(part.to(self.dtypes[name]))
        try:
            yield
        finally:
            for name, part in parts.items():
                part.copy_(masters[name])

    def _path(self, stored: str) -> str:
        return self.factors[stored][0] if stored in self.factors else stored


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
            f"heal: the tensor {stored} is no parameter of the model that transformers loads; its stored form does not "
            "train; leave out heal, or compress without the method that wrote it"
        )
    return parameters[path]


def _path_of(base: Any, name: str) -> tuple[str, ...]:
    """Return the path of `layers` or `final_norm` in a decoder of Lamina's class, or of DeepSeek's, which `mla`
    writes."""
    names = getattr(base, "_names", None) or {"layers": ("layers",), "final_norm": ("norm",)}
    return tuple(names[name])


def _loaded(folder: Path, device: torch.device, processes: Processes) -> Any:
    """Load a model in float32, each process a part of its layers. Process 0 reads it, and sends it layer by layer."""
    if processes.rank == 0:
        with _undivided():
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    else:
        model = _empty(folder)
    _train_codes(model, processes.first(_even_codes(model)))
    _multiply_out(model, (model.get_input_embeddings(), model.get_output_embeddings()))
    model.requires_grad_(False)
    if processes.count == 1:
        return model.to(device)
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
    for layer in layers.children():
        _place(layer, device)
        _send(layer)
        fully_shard(layer, mesh=mesh)
    fully_shard(base, mesh=mesh, ignored_params=whole)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reduce_scatter_unused_params(True)  # such as of experts without a token in this process
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


def _even_codes(model: nn.Module) -> dict[str, tuple[int, int | None]]:
    """Return the linears that compressed-tensors stores as codes of even steps: path → (bits, group)."""
    even = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and hasattr(module, PACKED):
            words, scales = getattr(module, PACKED).shape[1], getattr(module, SCALE).shape[1]
            group = module.in_features // scales if scales > 1 else None
            even[path] = (words * WORD_BITS // module.in_features, group)
    return even


def _train_codes(model: nn.Module, even: Mapping[str, tuple[int, int | None]]) -> None:
    """Make the stored tensors of rounded matrices parameters, which FSDP cuts. Scales and levels train; the levels of
    even steps do not."""
    for path, (bits, group) in even.items():
        linear: Any = model.get_submodule(path)
        with next(linear.parameters()).device:
            table = TableLinear(linear, bits, group)
            table.weight_levels = torch.arange(2**bits, dtype=torch.float32) - 2 ** (bits - 1)
        for name in (PACKED, SCALE) if hasattr(linear, PACKED) else ():
            setattr(table, name, getattr(linear, name).detach())
        model.set_submodule(path, table)
    for path, module in model.named_modules():
        if isinstance(module, TableLinear):
            for name in (PACKED, SCALE) if path in even else (PACKED, SCALE, LEVELS):
                stored: Tensor = getattr(module, name)
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(stored, requires_grad=False))


def _multiply_out(model: nn.Module, ends: tuple[nn.Module, ...]) -> None:
    """Replace rounded embeddings and a rounded head, which do not train, by modules with their weights."""
    paths = {module: path for path, module in model.named_modules()}
    for module in ends:
        is_even = isinstance(module, nn.Embedding) and hasattr(module, PACKED)
        table = _even_embedding(module) if is_even else module
        if isinstance(table, TableLinear | TableEmbedding):
            model.set_submodule(paths[module], _whole(table))


def _even_embedding(embedding: Any) -> TableEmbedding:
    """Return embeddings whose codes of even steps compressed-tensors has loaded as ones with a table of levels."""
    packed, scale = getattr(embedding, PACKED).detach(), getattr(embedding, SCALE).detach()
    columns, scales = embedding.embedding_dim, scale.shape[1]
    bits = packed.shape[1] * WORD_BITS // columns
    table = TableEmbedding(embedding, bits, columns // scales if scales > 1 else None)
    table.weight_levels = torch.arange(2**bits, dtype=torch.float32) - 2 ** (bits - 1)
    table.weight_packed, table.weight_scale = packed, scale
    return table


def _whole(table: TableLinear | TableEmbedding) -> nn.Module:
    """Return a module with the weight (V, D) of a rounded one, in float32."""
    rows, columns = table.weight_packed.shape[0], table.columns
    step = max(1, BLOCK_NUMBERS // columns)
    weight_VD = torch.cat([table.rows(slice(at, at + step)).detach() for at in range(0, rows, step)]).float()
    with torch.device("meta"):
        whole: nn.Linear | nn.Embedding
        if isinstance(table, TableLinear):
            whole = nn.Linear(columns, rows, bias=False)
            whole.bias = table.bias
        elif table.embed_scale is None:
            whole = Embedding(rows, columns)
        else:
            whole = ScaledEmbedding(rows, columns, table.embed_scale)
    whole.weight = nn.Parameter(weight_VD)
    return whole


def _place(module: nn.Module, device: torch.device) -> None:
    """Move a module of process 0 to the device; give those of other processes memory there."""
    if next(module.parameters()).is_meta:
        module.to_empty(device=device)
    else:
        module.to(device)


def _send(module: nn.Module) -> None:
    """Send the tensors of process 0 to the other processes."""
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), src=0)
