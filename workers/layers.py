"""Reads layers for a worker, from the source or from staged shards, and holds one block at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
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
from pipeline.families.latent_config import described_config, latent_form
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.families.registry import geometry_of
from pipeline.kernels.checks import all_finite
from pipeline.rounding.schemes import packed_modules, packed_names, rounded_modules, unpacked_weights
from pipeline.units.units import Unwritten
from stores.staging import read_staged
from stores.threads import parallel_map
from workers.config import WorkerConfig
from workers.copies import Copies
from workers.differentiable import DifferentiableLayer
from workers.expert_slices import ExpertSlices, expert_slices
from workers.memory import return_freed_pages
from workers.streamed_weights import StreamedWeights
from workers.tapped_layer import TappedLayer

T = TypeVar("T")
Shared = Callable[[], Mapping[str, Tensor]]  # returns source tensors that other workers have read, by name
Read = Callable[[list[str]], dict[str, Tensor]]
Tensors = Callable[[Callable[[str], bool]], Mapping[str, Tensor]]  # returns the tensors whose names pass the filter
BlockKey = tuple[int, str]  # layer, and which version of its weights
SliceKey = tuple[BlockKey, int, bool]  # block, slice of its experts, and True with the tensors outside of experts


class LayerReader:
    """Builds the blocks of layers.

    It holds one block on the device, and the tensors of at most one more layer. For a layer with many experts, it holds
    only one slice of them, and the next. While the first layer or none is on the device, it also holds the last built
    modules outside the layers (embeddings, final norm, head).
    """

    def __init__(self, setup: WorkerConfig, device: torch.device) -> None:
        self.setup = setup
        self.device = device
        self.copies = Copies(device)
        self.config = LayersConfig(**setup.config)
        self.current: tuple[BlockKey, Any] | None = None
        self.outside: tuple[Hashable, Any] | None = None
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        self.ahead: tuple[SliceKey, Future[dict[str, Tensor]]] | None = None
        self.following: Callable[[], None] | None = None  # reads the next layer ahead, after the last slice of this one

    # -- blocks ------------------------------------------------------------------------------------------------------

    def block(self, layer: int, staged: StagedLayer | None, shared: Shared = dict) -> TappedLayer:
        """Return the layer with its dense weights, or as staged. `shared`: see `read_ahead`."""
        block: TappedLayer = self._current_block(_block_key(layer, staged), lambda: self._build(layer, staged, shared))
        return block

    def unwritten_block(self, solved: Unwritten, tensors: Tensors) -> TappedLayer:
        """Return a solved layer that is not written yet. `tensors`: returns the tensors that will be written."""
        layer = solved.write.layer
        config = self._config_of(layer, {role: form.as_json() for role, form in solved.write.forms.items()})
        slices = self._slices(config, layer)

        def read(number: int, outside: bool, step: int) -> Mapping[str, Tensor]:
            return tensors(lambda name: slices is None or slices.is_read(name, number, outside))

        key = (layer, f"unwritten {solved.name}")
        block: TappedLayer = self._current_block(key, lambda: self._block(config, layer, solved.rounded, read))
        return block

    def differentiable_block(self, layer: int, start: int = 0, step: int = 1) -> DifferentiableLayer:
        """Return the layer with its dense weights for the backward pass. `start`: the slice of experts that it holds
        first; `step`: as in `TappedLayer.hold`."""
        key = (layer, "differentiable dense")
        build = partial(self._build, layer, None, start=start, step=step)
        block: DifferentiableLayer = self._current_block(key, lambda: DifferentiableLayer(build()))
        return block

    def kept_outside(self, name: Hashable, build: Callable[[], T]) -> T:
        """Return the modules of this name outside the layers, which are built unless they are held."""
        if self.outside is None or self.outside[0] != name:
            self.outside = None
            with torch.inference_mode(False), torch.no_grad():
                self.outside = (name, build())
        modules: T = self.outside[1]
        return modules

    @property
    def version(self) -> str:
        """Return a name of the current block's weights."""
        assert self.current is not None
        return self.current[0][1]

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
            with torch.inference_mode(False), torch.no_grad():  # autograd does not accept tensors of inference mode
                self.current = (key, build())
        return self.current[1]

    def _build(
        self, layer: int, staged: StagedLayer | None, shared: Shared = dict, *, start: int = 0, step: int = 1
    ) -> TappedLayer:
        config = self.config if staged is None else self._config_of(layer, staged.as_json()["forms"])
        names = self._sizes(layer) if staged is None else staged.tensors
        rounded = rounded_modules(self.setup.config, packed_modules(names)) if staged is None else staged.rounded
        return self._block(config, layer, rounded, partial(self._tensors, layer, staged, shared), start, step)

    def _config_of(self, layer: int, forms: dict[str, Any]) -> LayersConfig:
        """Return the config of a model in which one layer has these forms."""
        if latent_form([forms]):
            return LayersConfig(**described_config(self.setup.config, [forms]))
        config = copy.copy(self.config)
        config.forms = [forms if index == layer else {} for index in range(config.num_hidden_layers)]
        return config

    def _geometry_of(self, config: LayersConfig, layer: int) -> LayerGeometry:
        """Return the geometry of a layer in the class of the compressed model."""
        if config.source_model_type == self.config.source_model_type:
            return self.setup.geometry.layers[layer]
        return geometry_of(config.to_dict()).layers[layer]

    def _slices(self, config: LayersConfig, layer: int) -> ExpertSlices | None:
        return expert_slices(config, layer, self.setup.geometry.layers[layer].prefix, self.setup.experts)

    def _block(
        self,
        config: LayersConfig,
        layer: int,
        rounded: Mapping[str, Scheme],
        read: Callable[[int, bool, int], Mapping[str, Tensor]],
        start: int = 0,
        step: int = 1,
    ) -> TappedLayer:
        """Build a block. `read`: see `_tensors`. `start`, `step`: see `differentiable_block`.

        Rounded weights are dequantized in the forward's dtype, as in transformers.
        """
        geometry, slices = self._geometry_of(config, layer), self._slices(config, layer)

        def placed(number: int, outside: bool, step: int) -> dict[str, Tensor]:
            prefix, tensors = geometry.prefix, read(number, outside, step)
            inside = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            plain = self.setup.source.decoded(inside)
            converted = {name: self._converted(tensor) for name, tensor in plain.items()}
            packed = packed_modules(converted)
            schemes = {path: scheme for path, scheme in rounded.items() if path in packed}
            relative = unpacked_weights(converted, schemes)
            return {name.removeprefix(prefix): tensor for name, tensor in relative.items()}

        tensors = placed(start, True, step)
        if slices is None:
            return TappedLayer(config, geometry, tensors, self.device)
        path = slices.prefix.removeprefix(geometry.prefix)
        first = {name: tensors.pop(name) for name in [*tensors] if name.startswith(path)}

        def load(number: int, step: int) -> dict[str, Tensor]:
            return first if first else placed(number, False, step)

        block = TappedLayer(config, geometry, tensors, self.device, slices.ranges, load)
        block.hold(start)
        first.clear()
        return block

    def _converted(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device in the forward's dtype; indices keep theirs."""
        placed = tensor.to(self.device)
        return placed.to(self.setup.dtype) if tensor.is_floating_point() else placed

    # -- weights -----------------------------------------------------------------------------------------------------

    def outer(self, *names: str, staged: StagedLayer | None = None) -> dict[str, Tensor]:
        """Return tensors outside the layers (embeddings, final norm, head), on the device in the forward's dtype.

        `staged`: the layer that holds those that are rounded.
        """
        stored = self.setup.source.tensors.keys() | (staged.tensors.keys() if staged is not None else set())
        wanted = {part for name in names for part in (name, *packed_names(name, stored))}
        inside = {name for name in wanted if staged is not None and name in staged.tensors}
        replaced = {name for name in names if packed_names(name) <= inside}
        present = [name for name in wanted - replaced if name in self.setup.source.tensors]
        tensors = self._arrived({name: self.copies.bring(tensor) for name, tensor in self._read(present).items()})
        rounded = rounded_modules(self.setup.config, packed_modules(present))
        if staged is not None and inside:
            tensors |= read_staged(self.setup.run_dir, staged, inside)
            rounded |= staged.rounded
        return unpacked_weights({name: self._converted(tensor) for name, tensor in tensors.items()}, rounded)

    def dense_weights(self, layer: int, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Map each `role.weight` in `names` to its source tensor, in the source's dtype, on the device.

        `names`: `role.weight` -> tensor name. Tensors of the current dense block are not copied, so that callers must
        not write to them. A current dense block that holds none of them in the source's dtype is released.
        """
        placed = self._placed_weights(layer, names.values())
        if not placed and self._is_current(layer):
            self.release_layer()  # its weights are in float32, and a solve needs the memory
        records = self.setup.source.tensors  # embeddings and head belong to no layer
        sizes = {name: records[name].num_bytes for name in names.values() if name not in placed}
        tensors = self._arrived(self._fetched(sizes, partial(self._read, where=f"layer {layer}"))) | placed
        return {role: tensors[name] for role, name in names.items()}

    def group_weights(self, layer: int, roles: Sequence[str]) -> Mapping[str, Tensor]:
        """Return the dense weights of a group, as `dense_weights`; with too many experts, read one expert at a time."""
        geometry, records = self.setup.geometry.layers[layer], self.setup.source.tensors
        names = {key: name for key, (name, _) in geometry.tensors(roles).items()}
        experts = [block.roles for block in geometry.mlps if block.routing and set(block.roles) <= set(roles)]
        if len(experts) <= self.setup.experts:
            return self.dense_weights(layer, names)
        if self._is_current(layer):
            self.release_layer()

        def begin(keys: Sequence[str]) -> dict[str, Tensor]:
            sizes = {names[key]: records[names[key]].num_bytes for key in keys}
            tensors = self._fetched(sizes, partial(self._read, where=f"layer {layer}"))
            return {key: tensors[names[key]] for key in keys}

        prefixes = [tuple(f"{role}." for role in own) for own in experts]
        owned = [[key for key in names if key.startswith(own)] for own in prefixes]
        dtypes = {key: records[name].torch_dtype for key, name in names.items()}
        return StreamedWeights(dtypes, owned, begin, self._arrived, self.thread)

    def _placed_weights(self, layer: int, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the source tensors that the current block holds in their stored dtype.

        A block in the setup's dtype has rounded wider biases, and may have widened its weights to float32 afterwards.
        """
        if self.current is None or not self._is_current(layer):
            return {}
        prefix, records = self.setup.geometry.layers[layer].prefix, self.setup.source.tensors
        state = {prefix + name: tensor.detach() for name, tensor in stored_state(self.current[1].module).items()}
        held = {name for name, tensor in state.items() if not tensor.is_meta}  # without the experts of other slices
        exact = [name for name in names if name in held and records[name].torch_dtype == self.setup.dtype]
        return {name: state[name] for name in exact if state[name].dtype == self.setup.dtype}

    def _is_current(self, layer: int) -> bool:
        return self.current is not None and self.current[0] == _block_key(layer, None)

    # -- reading -----------------------------------------------------------------------------------------------------

    def read_ahead(
        self, layer: int | None, staged: StagedLayer | None = None, shared: Shared = dict, *, back: bool = False
    ) -> None:
        """Start to read a layer's tensors in the background, dense or staged, and to copy them to the device.

        Do nothing for a layer after the last. `shared` returns source tensors that were read once for all nodes.
        `back`: begin with the last slice of its experts.
        """
        if layer is None or layer >= self.setup.geometry.num_layers:
            return
        slices = self._slices_of(layer, staged)
        start = len(slices.ranges) - 1 if slices is not None and back else 0
        self.following = partial(self._read_ahead, layer, staged, shared, start, True)
        block = None if self.current is None else self.current[1]
        if not isinstance(block, TappedLayer) or block.held + 1 == block.parts:
            self._begin_following()

    def _begin_following(self) -> None:
        following, self.following = self.following, None
        if following is not None:
            following()

    def _read_ahead(
        self, layer: int, staged: StagedLayer | None, shared: Shared, number: int, outside: bool = False
    ) -> None:
        key = (_block_key(layer, staged), number, outside)
        if self.ahead is None or self.ahead[0] != key:
            self.ahead = (key, self.thread.submit(self._read_layer, layer, staged, shared, number, outside))

    def read_part(self, layer: int, part: int, parts: int) -> dict[str, Tensor]:
        """Return one of `parts` parts of a layer's source tensors, in their stored dtype."""
        return self.setup.source.read(_balanced_parts(self._sizes(layer), parts)[part])

    def _tensors(
        self,
        layer: int,
        staged: StagedLayer | None,
        shared: Shared,
        number: int,
        outside: bool,
        step: int,
    ) -> dict[str, Tensor]:
        """Return a layer's tensors, or those of a slice of its experts. The next slice is read ahead.

        `outside`: include the tensors outside of experts. `step`: to the next slice, as in `TappedLayer.hold`.
        """
        if self.ahead is None or self.ahead[0] != (_block_key(layer, staged), number, outside):
            tensors = self._read_layer(layer, staged, shared, number, outside)
        else:
            future, self.ahead = self.ahead[1], None  # forgotten even if it failed, so that the next call tries again
            tensors = future.result()
        slices, following = self._slices_of(layer, staged), number + step
        if slices is not None and step and 0 <= following < len(slices.ranges):
            self._read_ahead(layer, staged, shared, following)
        elif slices is not None:
            self._begin_following()
        return self._arrived(tensors)

    def _slices_of(self, layer: int, staged: StagedLayer | None) -> ExpertSlices | None:
        config = self.config if staged is None else self._config_of(layer, staged.as_json()["forms"])
        return self._slices(config, layer)

    def _sizes(self, layer: int) -> dict[str, int]:
        """Return the sizes of a layer's source tensors, in bytes."""
        prefix = self.setup.geometry.layers[layer].prefix
        return {name: at.num_bytes for name, at in self.setup.source.tensors.items() if name.startswith(prefix)}

    def _read_layer(
        self, layer: int, staged: StagedLayer | None, shared: Shared, number: int, outside: bool
    ) -> dict[str, Tensor]:
        """Read a layer's tensors in their stored dtype, which takes half the memory of a float32 forward pass.

        `number`: the slice of experts to read alone. `outside`: include the tensors outside of experts.
        """
        if staged is not None:
            sizes = {name: prod(tensor.shape) for name, tensor in staged.tensors.items()}
            read: Read = partial(read_staged, self.setup.run_dir, staged)
        else:
            sizes, read = self._sizes(layer), partial(self._read, shared=shared())
        slices = self._slices_of(layer, staged)
        if slices is not None:
            sizes = {name: size for name, size in sizes.items() if slices.is_read(name, number, outside)}
        return self._fetched(sizes, read)

    def _fetched(self, sizes: Mapping[str, int], read: Read) -> dict[str, Tensor]:
        """Read tensors with all of the worker's threads, and start to copy them to a GPU."""

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
        """Return source tensors, from `shared` if it has them. Raises NumericsError if one is not finite.

        Weights in a storage format are decoded on the device; like copies, the caller must await them.
        """
        with self.copies.ahead():
            read = self.setup.source.read([name for name in names if name not in shared], self.copies.bring)
            tensors = {name: shared[name] if name in shared else read[name] for name in names}
            for name, tensor in tensors.items():
                _require_finite(name, tensor, where)
        return tensors


def _balanced_parts(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Split names into parts of similar size: each name, the largest first, goes to the smallest part."""
    dealt: list[list[str]] = [[] for _ in range(parts)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        min(dealt, key=lambda names: sum(sizes[other] for other in names)).append(name)
    return dealt


def _block_key(layer: int, staged: StagedLayer | None) -> BlockKey:
    return layer, "dense" if staged is None else staged.path


def _require_finite(name: str, tensor: Tensor, where: str) -> None:
    if tensor.is_floating_point() and not all_finite(tensor):
        raise NumericsError(f"{where}: tensor {name} holds NaN or infinity; the checkpoint is damaged")
