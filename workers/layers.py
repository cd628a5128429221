"""Reads layers for a worker, from the source or from a staged shard, and holds one at a time as a block."""

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
from workers.config import WorkerConfig
from workers.copies import Copies
from workers.differentiable import DifferentiableLayer
from workers.memory import return_freed_pages
from workers.tapped_layer import TappedLayer

T = TypeVar("T")
Shared = Callable[[], Mapping[str, Tensor]]  # returns source tensors that another worker has read, by name
Read = Callable[[list[str]], dict[str, Tensor]]
BlockKey = tuple[int, str]  # layer, and which version of its weights


class LayerReader:
    """Builds the block of a layer.

    Holds one block on the device and at most one more layer's tensors. While the first layer or none is on the device,
    it also holds the modules outside the layers that were built last (embeddings, final norm, head).
    """

    def __init__(self, setup: WorkerConfig, device: torch.device) -> None:
        self.setup = setup
        self.device = device
        self.copies = Copies(device)
        self.config = LayersConfig(**setup.config)
        self.current: tuple[BlockKey, Any] | None = None
        self.outside: tuple[Hashable, Any] | None = None
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        self.ahead: tuple[BlockKey, Future[dict[str, Tensor]]] | None = None

    # -- blocks ------------------------------------------------------------------------------------------------------

    def block(self, layer: int, staged: StagedLayer | None, shared: Shared = dict) -> TappedLayer:
        """Return the layer with its dense weights, or as staged. `shared`: see `read_ahead`."""
        block: TappedLayer = self._current_block(_block_key(layer, staged), lambda: self._build(layer, staged, shared))
        return block

    def unwritten_block(self, solved: Unwritten, tensors: Callable[[], Mapping[str, Tensor]]) -> TappedLayer:
        """Return a solved layer that is not written yet. `tensors` returns everything that will be written of it."""
        layer = solved.write.layer
        forms = {role: form.as_json() for role, form in solved.write.forms.items()}
        key = (layer, f"unwritten {solved.name}")
        block: TappedLayer = self._current_block(
            key, lambda: self._factored_block(layer, forms, solved.rounded, tensors())
        )
        return block

    def differentiable_block(self, layer: int) -> DifferentiableLayer:
        """Return the layer with its dense weights for the backward pass."""
        key = (layer, "differentiable dense")
        block: DifferentiableLayer = self._current_block(key, lambda: DifferentiableLayer(self._build(layer, None)))
        return block

    def kept_outside(self, name: Hashable, build: Callable[[], T]) -> T:
        """Return the modules of this name outside the layers; build them unless they are held."""
        if self.outside is None or self.outside[0] != name:
            self.outside = None
            with torch.inference_mode(False), torch.no_grad():
                self.outside = (name, build())
        modules: T = self.outside[1]
        return modules

    def release(self) -> None:
        """Free everything on the device."""
        self.outside = self.current = None

    def release_layer(self) -> None:
        """Free the block."""
        self.current = None

    def _current_block(self, key: BlockKey, build: Callable[[], Any]) -> Any:
        if self.current is None or self.current[0] != key:
            self.current = None  # frees the device before the next layer is built
            self.outside = self.outside if key[0] == 0 else None
            return_freed_pages()
            with torch.inference_mode(False), torch.no_grad():  # autograd accepts no tensors of inference mode
                self.current = (key, build())
        return self.current[1]

    def _build(self, layer: int, staged: StagedLayer | None, shared: Shared = dict) -> TappedLayer:
        tensors = self._tensors(layer, staged, shared)
        if staged is not None:
            return self._factored_block(layer, staged.as_json()["forms"], staged.rounded, tensors)
        rounded = rounded_modules(self.setup.config, packed_modules(tensors))
        return self._block(self.config, layer, tensors, rounded)

    def _factored_block(
        self, layer: int, forms: dict[str, Any], rounded: Mapping[str, Scheme], tensors: Mapping[str, Tensor]
    ) -> TappedLayer:
        config = copy.copy(self.config)
        config.forms = [forms if index == layer else {} for index in range(config.num_hidden_layers)]
        return self._block(config, layer, tensors, rounded)

    def _block(
        self, config: LayersConfig, layer: int, tensors: Mapping[str, Tensor], rounded: Mapping[str, Scheme]
    ) -> TappedLayer:
        """Build a block. Rounded weights are dequantized in the forward's dtype, as in transformers."""
        geometry = self.setup.geometry.layers[layer]
        prefix = geometry.prefix
        converted = {name: self._converted(tensor) for name, tensor in tensors.items() if name.startswith(prefix)}
        relative = {name.removeprefix(prefix): tensor for name, tensor in unpacked(converted, rounded).items()}
        return TappedLayer(config, geometry, relative, self.device)

    def _converted(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device in the forward's dtype; indices keep theirs."""
        placed = tensor.to(self.device)
        return placed.to(self.setup.dtype) if tensor.is_floating_point() else placed

    # -- weights -----------------------------------------------------------------------------------------------------

    def outer(self, *names: str, staged: StagedLayer | None = None) -> dict[str, Tensor]:
        """Return tensors outside the layers (embeddings, final norm, head), on the device in the forward's dtype.

        `staged`: the layer that holds the rounded ones among them, if they are not the source's.
        """
        stored = self.setup.source.tensors.keys() | (staged.tensors.keys() if staged is not None else set())
        wanted = {part for name in names for part in (name, *packed_names(name, stored))}
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

        Tensors of the current dense block are returned without a copy: callers must not write to them. A current dense
        block that holds none of them in the source's dtype is released.
        """
        placed = self._placed_weights(layer, names.values())
        if not placed and self._is_current(layer):
            self.release_layer()  # its weights are in float32, and solving needs the memory
        records = self.setup.source.tensors  # embeddings and head are in no layer
        sizes = {name: records[name].num_bytes for name in names.values() if name not in placed}
        tensors = self._arrived(self._fetched(sizes, partial(self._read, where=f"layer {layer}"))) | placed
        return {role: tensors[name] for role, name in names.items()}

    def _placed_weights(self, layer: int, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the source tensors that the current block holds in their stored dtype.

        A block in the setup's dtype has rounded a wider bias, and may have widened its weights to float32 afterwards.
        """
        if self.current is None or not self._is_current(layer):
            return {}
        prefix, records = self.setup.geometry.layers[layer].prefix, self.setup.source.tensors
        state = {prefix + name: tensor.detach() for name, tensor in stored_state(self.current[1].module).items()}
        exact = [name for name in names if name in state and records[name].torch_dtype == self.setup.dtype]
        return {name: state[name] for name in exact if state[name].dtype == self.setup.dtype}

    def _is_current(self, layer: int) -> bool:
        return self.current is not None and self.current[0] == _block_key(layer, None)

    # -- reading -----------------------------------------------------------------------------------------------------

    def read_ahead(self, layer: int | None, staged: StagedLayer | None = None, shared: Shared = dict) -> None:
        """Start to read a layer's tensors in the background, dense or staged, and to copy them to the device.

        Does nothing for a layer behind the last. `shared` returns source tensors that were read once for all nodes.
        """
        if layer is None or layer >= self.setup.geometry.num_layers:
            return
        key = _block_key(layer, staged)
        if self.ahead is None or self.ahead[0] != key:
            self.ahead = (key, self.thread.submit(self._read_layer, layer, staged, shared))

    def read_part(self, layer: int, part: int, parts: int) -> dict[str, Tensor]:
        """Return one of `parts` parts of a layer's source tensors, in their stored dtype."""
        return self.setup.source.read(_balanced_parts(self._sizes(layer), parts)[part])

    def _tensors(self, layer: int, staged: StagedLayer | None, shared: Shared) -> dict[str, Tensor]:
        if self.ahead is None or self.ahead[0] != _block_key(layer, staged):
            tensors = self._read_layer(layer, staged, shared)
        else:
            future, self.ahead = self.ahead[1], None  # forgotten even if it failed, so that the next call tries again
            tensors = future.result()
        return self._arrived(tensors)

    def _sizes(self, layer: int) -> dict[str, int]:
        """Return the sizes of a layer's source tensors, in bytes."""
        prefix = self.setup.geometry.layers[layer].prefix
        return {name: at.num_bytes for name, at in self.setup.source.tensors.items() if name.startswith(prefix)}

    def _read_layer(self, layer: int, staged: StagedLayer | None, shared: Shared) -> dict[str, Tensor]:
        """Read a layer's tensors in their stored dtype, which is half the size where the forward pass is in float32."""
        if staged is not None:
            sizes = {name: prod(tensor.shape) for name, tensor in staged.tensors.items()}
            return self._fetched(sizes, partial(read_staged, self.setup.run_dir, staged))
        return self._fetched(self._sizes(layer), partial(self._read, shared=shared()))

    def _fetched(self, sizes: Mapping[str, int], read: Read) -> dict[str, Tensor]:
        """Read tensors by as many threads as the worker has, and start to copy them to a GPU."""

        def fetch(names: list[str]) -> dict[str, Tensor]:
            return {name: self.copies.bring(tensor) for name, tensor in read(names).items()}

        threads = self.setup.threads
        parts = parallel_map(fetch, filter(None, _balanced_parts(sizes, threads)), threads)
        return {name: tensor for part in parts for name, tensor in part.items()}

    def _arrived(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.copies.arrived(tensor) for name, tensor in tensors.items()}

    def _read(
        self, names: list[str], shared: Mapping[str, Tensor] = MappingProxyType({}), where: str = "source"
    ) -> dict[str, Tensor]:
        """Return source tensors, from `shared` where it has them. Raises NumericsError if one is not finite."""
        read = self.setup.source.read([name for name in names if name not in shared])
        tensors = {name: shared[name] if name in shared else read[name] for name in names}
        for name, tensor in tensors.items():
            _require_finite(name, tensor, where)
        return tensors


def cpu_reader(source: SourceCheckpoint, config: Mapping[str, Any], dtype: torch.dtype) -> LayerReader:
    """Return a reader of a checkpoint, dense or compressed, whose blocks are in `dtype` on this process's CPU.

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


def _balanced_parts(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Split names into parts of similar size, some perhaps empty: the largest goes first, to the smallest part."""
    dealt: list[list[str]] = [[] for _ in range(parts)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        min(dealt, key=lambda names: sum(sizes[other] for other in names)).append(name)
    return dealt


def _block_key(layer: int, staged: StagedLayer | None) -> BlockKey:
    return layer, "dense" if staged is None else staged.path


def _require_finite(name: str, tensor: Tensor, where: str) -> None:
    if tensor.is_floating_point() and not all_finite(tensor):
        raise NumericsError(f"{where}: tensor {name} holds NaN or infinity; the checkpoint is damaged")
