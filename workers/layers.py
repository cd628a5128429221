"""Layers for a worker: read from the source or from a staged shard, checked, one at a time, the next one read ahead."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from lamina import LayersConfig
from lamina.factored_lamina import stored_state
from manifests.errors import NumericsError
from manifests.records import Scheme, StagedLayer
from pipeline.families.registry import geometry_of
from pipeline.kernels.checks import all_finite
from pipeline.rounding.schemes import packed_modules, packed_names, rounded_modules, unpacked
from pipeline.units.units import Unwritten
from stores.source import SourceCheckpoint
from stores.staging import read_staged
from stores.threads import parallel_map
from workers.block import Block
from workers.config import WorkerConfig
from workers.copies import Copies
from workers.differentiable import DifferentiableBlock
from workers.layer_memory import LayerMemory
from workers.memory import return_freed_pages
from workers.wide_linear import Convert

T = TypeVar("T")
Shared = Callable[[], Mapping[str, Tensor]]  # gives source tensors, by name
Read = Callable[[list[str]], dict[str, Tensor]]


class LayerReader:
    """Builds the block of a layer. Holds one block on the device and at most one more layer's tensors; and, at the
    first layer or behind the last, the modules there that are of no layer."""

    def __init__(self, setup: WorkerConfig, device: torch.device) -> None:
        self.setup = setup
        self.device = device
        self.copies = Copies(device)
        self.config = LayersConfig(**setup.config)
        self.memory = LayerMemory()
        self.current: tuple[tuple[int, str], Any] | None = None
        self.outside: tuple[Hashable, Any] | None = None
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        self.ahead: tuple[tuple[int, str], Future[dict[str, Tensor]]] | None = None

    def block(self, layer: int, staged: StagedLayer | None, shared: Shared = dict) -> Block:
        """The layer with its dense weights, or as staged. `shared` as of `read_ahead`."""
        block = self._placed(_name(layer, staged), lambda: self._built(layer, staged, shared))
        assert isinstance(block, Block)
        return block

    def unwritten_block(self, made: Unwritten, tensors: Callable[[], Mapping[str, Tensor]]) -> Block:
        """A layer as its solves left it; `tensors`: all that is being written of it."""
        layer = made.write.layer
        forms = {role: form.as_json() for role, form in made.write.forms.items()}
        name = (layer, f"unwritten {made.name}")
        block = self._placed(name, lambda: self._packed_block(layer, forms, made.rounded, tensors()))
        assert isinstance(block, Block)
        return block

    def differentiable_block(self, layer: int) -> DifferentiableBlock:
        """Builds the layer with its dense weights for the backward pass."""
        _, name = _name(layer, None)

        def build() -> DifferentiableBlock:
            block = DifferentiableBlock(self._built(layer, None))
            if block.dtype != self.setup.dtype:
                self.memory.release()  # it has made its weights anew
            return block

        block = self._placed((layer, f"differentiable {name}"), build)
        assert isinstance(block, DifferentiableBlock)
        return block

    def _placed(self, name: tuple[int, str], build: Callable[[], Any]) -> Any:
        """The one block that is held: the one of this name, or it is built in place of what was held."""
        if self.current is None or self.current[0] != name:
            self.current = None  # frees the device before the next layer is placed
            self.outside = self.outside if name[0] == 0 else None
            return_freed_pages()
            with torch.inference_mode(False), torch.no_grad():  # or its tensors would not go with autograd
                self.memory.begin()
                self.current = (name, build())
        return self.current[1]

    def kept_outside(self, name: Hashable, build: Callable[[], T]) -> T:
        """The modules of this name that are of no layer, kept while no layer but the first is placed."""
        if self.outside is None or self.outside[0] != name:
            self.outside = None
            with torch.inference_mode(False), torch.no_grad():
                self.outside = (name, build())
        modules: T = self.outside[1]
        return modules

    def release(self) -> None:
        """Lets go of everything on the device."""
        self.outside = None
        self.release_layer()

    def release_layer(self) -> None:
        """Lets go of the layer that is held."""
        self.current = None
        self.memory.release()

    def read_ahead(self, layer: int | None, staged: StagedLayer | None = None, shared: Shared = dict) -> None:
        """Starts reading a layer's source tensors, or those of what it has become, in the background, and copying them
        to the device; behind the last layer, nothing.

        `shared`: gives those of the source that were read for all nodes.
        """
        if layer is None or layer >= self.setup.geometry.num_layers:
            return
        name = _name(layer, staged)
        if self.ahead is None or self.ahead[0] != name:
            self.ahead = (name, self.thread.submit(self._read_layer, layer, staged, shared))

    def outer(self, *names: str, staged: StagedLayer | None = None) -> dict[str, Tensor]:
        """Tensors outside the layers (embeddings, final norm, head), on the device, in the forward's dtype.

        `staged`: the layer that holds those of them that are rounded, where they are not the source's.
        """
        wanted = {part for name in names for part in (name, *packed_names(name))}
        inside = {name for name in wanted if staged is not None and name in staged.tensors}
        replaced = {name for name in names if packed_names(name) <= inside}
        present = [name for name in wanted - replaced if name in self.setup.source.tensors]
        tensors, rounded = self._read(present), rounded_modules(self.setup.config, packed_modules(present))
        if staged is not None and inside:
            tensors |= read_staged(self.setup.run_dir, staged, inside)
            rounded |= staged.rounded
        return unpacked({name: self._converted(tensor) for name, tensor in tensors.items()}, rounded)

    def dense_weights(self, layer: int, names: Mapping[str, str]) -> dict[str, Tensor]:
        """`role.weight` -> source tensor, for {role.weight: tensor name}; in the source's dtype, on the device.

        Those of the dense block at hand are not read again, nor copied: they are not to be written to. A block that
        holds none of them as it is stored is let go of.
        """
        placed = self._placed_weights(layer, names.values())
        if not placed and self._placed_dense(layer):
            self.release_layer()  # its weights are in float32: memory that solving needs
        records = self.setup.source.tensors  # embeddings and head are in no layer
        sizes = {name: records[name].num_bytes for name in names.values() if name not in placed}
        found = self._arrived(self._fetched(sizes, partial(self._read, where=f"layer {layer}"))) | placed
        return {role: found[name] for role, name in names.items()}

    def _placed_weights(self, layer: int, names: Iterable[str]) -> dict[str, Tensor]:
        """Those of a layer's source tensors that its block holds as they are stored.

        A block at hand may be in float32 after it was placed in the setup's dtype, to which a wider bias was rounded.
        """
        if self.current is None or not self._placed_dense(layer):
            return {}
        prefix, records = self.setup.geometry.layers[layer].prefix, self.setup.source.tensors
        state = {prefix + name: tensor.detach() for name, tensor in stored_state(self.current[1].module).items()}
        exact = [name for name in names if name in state and records[name].torch_dtype == self.setup.dtype]
        return {name: state[name] for name in exact if state[name].dtype == self.setup.dtype}

    def _placed_dense(self, layer: int) -> bool:
        return self.current is not None and self.current[0] == _name(layer, None)

    def _built(self, layer: int, staged: StagedLayer | None, shared: Shared = dict) -> Block:
        tensors = self._tensors(layer, staged, shared)
        if staged is not None:
            return self._packed_block(layer, staged.as_json()["forms"], staged.rounded, tensors)
        rounded = rounded_modules(self.setup.config, packed_modules(tensors))
        geometry, named = self.setup.geometry.layers[layer], self._relative(layer, tensors, rounded)
        return Block(self.config, geometry, named, self.device, self.memory.converted)

    def _tensors(self, layer: int, staged: StagedLayer | None, shared: Shared) -> dict[str, Tensor]:
        """As they were read ahead, or are read now."""
        if self.ahead is None or self.ahead[0] != _name(layer, staged):
            tensors = self._read_layer(layer, staged, shared)
        else:
            ahead, self.ahead = self.ahead[1], None  # forgotten even if it failed, so that it is tried again
            tensors = ahead.result()
        return self._arrived(tensors)

    def _packed_block(
        self, layer: int, forms: dict[str, Any], rounded: Mapping[str, Scheme], tensors: Mapping[str, Tensor]
    ) -> Block:
        config = copy.copy(self.config)
        config.forms = [forms if index == layer else {} for index in range(config.num_hidden_layers)]
        geometry, named = self.setup.geometry.layers[layer], self._relative(layer, tensors, rounded)
        return Block(config, geometry, named, self.device, self.memory.converted)

    def read_part(self, layer: int, part: int, parts: int) -> dict[str, Tensor]:
        """One of so many parts of a layer's source tensors, as they are stored: the largest are dealt first."""
        return self.setup.source.read(_dealt(self._sizes(layer), parts)[part])

    def _sizes(self, layer: int) -> dict[str, int]:
        """Of its source tensors, in bytes."""
        prefix = self.setup.geometry.layers[layer].prefix
        return {name: at.num_bytes for name, at in self.setup.source.tensors.items() if name.startswith(prefix)}

    def _read_layer(self, layer: int, staged: StagedLayer | None, shared: Shared) -> dict[str, Tensor]:
        """What is stored of it, checked, as it is stored: of half the size where the forward pass is in float32."""
        if staged is not None:
            sizes = {name: prod(tensor.shape) for name, tensor in staged.tensors.items()}
            return self._fetched(sizes, partial(read_staged, self.setup.run_dir, staged))
        return self._fetched(self._sizes(layer), partial(self._read, there=shared()))

    def _fetched(self, sizes: Mapping[str, int], read: Read) -> dict[str, Tensor]:
        """Tensors of these sizes, read by as many threads as the worker has; on their way to a GPU."""

        def fetch(names: list[str]) -> dict[str, Tensor]:
            return {name: self.copies.bring(tensor) for name, tensor in read(names).items()}

        threads = self.setup.threads
        parts = parallel_map(fetch, filter(None, _dealt(sizes, threads)), threads)
        return {name: tensor for part in parts for name, tensor in part.items()}

    def _arrived(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.copies.arrived(tensor) for name, tensor in tensors.items()}

    def _read(
        self, names: list[str], there: Mapping[str, Tensor] = MappingProxyType({}), where: str = "source"
    ) -> dict[str, Tensor]:
        """Source tensors, checked; some may be there."""
        read = self.setup.source.read([name for name in names if name not in there])
        tensors = {name: there[name] if name in there else read[name] for name in names}
        for name, tensor in tensors.items():
            _require_finite(name, tensor, where)
        return tensors

    def _relative(self, layer: int, tensors: Mapping[str, Tensor], rounded: Mapping[str, Scheme]) -> dict[str, Tensor]:
        """By names inside the layer; rounded weights multiplied out in the forward's dtype, as transformers does."""
        prefix = self.setup.geometry.layers[layer].prefix
        converted = {
            name: self._converted(tensor, self.memory.converted)
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        return {name.removeprefix(prefix): tensor for name, tensor in unpacked(converted, rounded).items()}

    def _converted(self, tensor: Tensor, convert: Convert = Tensor.to) -> Tensor:
        """On the device, there in the forward's dtype; indices stay as they are."""
        placed = tensor.to(self.device)
        return convert(placed, self.setup.dtype) if tensor.is_floating_point() else placed


def cpu_reader(source: SourceCheckpoint, config: Mapping[str, Any], dtype: torch.dtype) -> LayerReader:
    """Reads the layers of a checkpoint, dense or compressed, in this process: blocks in `dtype` on its CPU.

    `config`: of the checkpoint, under standard names (`pipeline.families.registry.standard_config`) or Lamina's own.
    """
    setup = WorkerConfig(
        source=source,
        config=config,
        geometry=geometry_of(config),
        run_dir=source.storage,
        tokens=None,
        shards=1,
        micro_batch=1,
        dtype=dtype,
        threads=torch.get_num_threads(),
        use_gpu=False,
        hidden_bytes=0,
    )
    return LayerReader(setup, torch.device("cpu"))


def _dealt(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """So many parts, of which some may be empty, of much the same size: the largest are dealt first."""
    dealt: list[list[str]] = [[] for _ in range(parts)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        min(dealt, key=lambda names: sum(sizes[other] for other in names)).append(name)
    return dealt


def _name(layer: int, staged: StagedLayer | None) -> tuple[int, str]:
    return layer, "dense" if staged is None else staged.path


def _require_finite(name: str, tensor: Tensor, where: str) -> None:
    if tensor.is_floating_point() and not all_finite(tensor):
        raise NumericsError(f"{where}: tensor {name} holds NaN or infinity; the checkpoint is damaged")
