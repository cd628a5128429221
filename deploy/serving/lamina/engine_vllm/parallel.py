"""Replace a decoder layer's modules by vLLM's parallel layers, split over the tensor-parallel devices.

Readers of the hidden states compute the heads or channels of their device. Writers read these, and the results of all
devices are summed. Of a reader's factors, the first is on every device, and the second is split by outputs. Of a
writer's, the first is split by inputs, and its r outputs are summed before the second. Pivoted readers are whole on
every device, because their rows belong to all heads. Tucker cores are split by heads; in an MLP, `second` is split.

D hidden, H query heads, G key/value heads, d head_dim, N MLP width, n heads of a projection, r rank.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear

from lamina.block_lamina import LINEAR_ROLES, QKVO_ROLES, ROWWISE_ROLES
from lamina.configuration_lamina import LaminaConfig
from lamina.decoder_layer_lamina import attach
from lamina.engine_vllm.mixtures import FusedExperts
from lamina.engine_vllm.rounded import Scheme, Unpacking, check_kernel, check_operator, scheme_of
from lamina.factored_lamina import Factored, HeadLowRankLinear, LowRankLinear, PivotedLinears, RoleOutput
from lamina.layers_lamina import LaminaDecoderLayer
from lamina.mixture_lamina import SHARED, split_role
from lamina.norms_lamina import LaminaRMSNorm
from lamina.tucker_lamina import SparseCore, TuckerLinears
from lamina.vllm_lamina import fused_width

Place = Callable[[Tensor], None]  # copies a stored tensor, or this device's part of it, into a parameter
COLUMN, ROW, WHOLE = ColumnParallelLinear, RowParallelLinear, ReplicatedLinear


class Cut(NamedTuple):
    """This device's part: number `rank` of `parts` equal parts."""

    rank: int
    parts: int

    @classmethod
    def mine(cls) -> "Cut":
        """Return this device's part in the running tensor-parallel group."""
        return cls(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this device's slice along a dimension."""
        return tensor.chunk(self.parts, dim)[self.rank]


def check_cut(config: LaminaConfig, parts: int) -> None:
    """Raise ValueError for heads or channels that cannot be split over the devices.

    Heads of another width than the model's are also refused, because vLLM's cache has one width, and foreign attention.
    """
    if config.foreign:
        raise ValueError(
            f"the attention of {config.foreign['model_type']} is transformers' own module, which Lamina's class for "
            "vLLM does not run; use transformers"
        )
    for layer in range(config.num_hidden_layers):
        shape = config.layer_shape(layer)
        if shape.head_dim != config.head_dim:
            raise ValueError(
                f"layer {layer}: head_dim {shape.head_dim} beside {config.head_dim} of the model: not in vLLM; "
                "use transformers"
            )
        for name in ("num_attention_heads", "num_key_value_heads"):
            if (number := getattr(shape, name)) % parts:
                raise ValueError(
                    f"layer {layer}: {number} {name} cannot be split over {parts} devices; use another "
                    "tensor_parallel_size"
                )
        for block in config.mlp_blocks(layer):
            form, spec = config.form_of(layer, f"{block}.up" if block else "up")
            if (width := form.inner_width(config.layer_shape(layer, block), spec)) % parts:
                raise ValueError(
                    f"layer {layer}: {width} channels of {block or 'the MLP'} cannot be split over {parts} devices; "
                    f"compress with budget: {{multiple: {parts}}} or a multiple of it, or use another "
                    "tensor_parallel_size"
                )


class CutRole(RoleOutput):
    """A role of a pivoted stack that is whole on every device. Selects this device's part of the outputs."""

    cut: Cut

    def forward(self, x_BTD: Tensor, outputs: dict[str, Tensor]) -> Tensor:
        """Return this device's outputs (B, T, out / parts)."""
        part = self.cut.of(outputs[self.role], -1)
        return part if self.bias is None else part + self.bias


class SummedRole(RoleOutput):
    """The writer of a Tucker group, of which each device has the sum over its heads or channels."""

    def forward(self, x_BTD: Tensor, outputs: dict[str, Tensor]) -> Tensor:
        """Return the sum of the outputs over all devices."""
        total: Tensor = tensor_model_parallel_all_reduce(outputs[self.role])
        return total if self.bias is None else total + self.bias


def unpacked_places(module: Any, path: str, scheme: Scheme) -> dict[str, Place]:
    """Return places for the packed tensors of a linear or a table that is unpacked at loading."""
    unpacking = Unpacking(scheme, lambda stored: module.weight.weight_loader(module.weight, stored))
    return {f"{path}.{part}": partial(unpacking.take, part) for part in scheme.parts}


class Parallel:
    """Replaces a layer's linears by vLLM's layers.

    `places` are the targets of stored tensors, by name below the layer. Other tensors go to the parameter or buffer of
    their name.
    """

    def __init__(self, config: LaminaConfig, layer: int, quant_config: Any, prefix: str) -> None:
        self.config, self.layer, self.quant_config, self.prefix = config, layer, quant_config, prefix
        self.cut = Cut.mine()
        self.places: dict[str, Place] = {}
        self.unpacked: dict[str, str] = {}  # path of a rounded linear -> why vLLM has no kernel for it

    def convert(self, layer: LaminaDecoderLayer) -> FusedExperts | None:
        """Replace the linears of a layer on the meta device, and allocate the other tensors.

        Return the fused experts, if the layer has experts that can be fused.
        """
        paths, fused = self.config.layer_modules(self.layer), self._fused(layer)
        for role in paths:
            block, local = split_role(role)
            if local not in LINEAR_ROLES or (fused is not None and block not in ("", SHARED)):
                continue
            form, spec = self.config.form_of(self.layer, role)
            if source := form.source(self.config.layer_shape(self.layer, block), local, spec):
                module = layer.get_submodule(source.path)
                if isinstance(module, PivotedLinears):
                    self._pivoted(layer, source.path, module, local)
                elif isinstance(module, TuckerLinears) and source.path not in self._tuckers(layer):
                    self._tucker(layer, source.path, module, local)
            self._role(layer, paths[role], role)
        for path in (paths[role] for role in ("input_norm", "mlp_norm") if role in paths):
            norm = layer.get_submodule(path)
            if type(norm) is LaminaRMSNorm and not norm.offset:
                attach(layer, path, RMSNorm(norm.weight.shape[0], norm.variance_epsilon))
        _materialise(layer)
        return fused

    def _fused(self, layer: LaminaDecoderLayer) -> FusedExperts | None:
        """Replace the experts of a layer by a fused mixture if they have the same shape."""
        if self.config.layer_mixture(self.layer) is None:
            return None
        if (width := fused_width(self.config, self.layer)) is None:
            return None
        fused = FusedExperts(self.config, self.layer, width, self.prefix)
        fused.attach(layer)
        for path, load in fused.places():
            if (scheme := scheme_of(self.config, f"{self.prefix}.{path}")) is None:
                self.places[f"{path}.weight"] = load
            else:
                unpacking = Unpacking(scheme, load)
                self.places |= {f"{path}.{part}": partial(unpacking.take, part) for part in scheme.parts}
                self.unpacked[path] = "experts are fused as whole matrices"
        return fused

    def _role(self, layer: nn.Module, path: str, role: str) -> None:
        module, writes = layer.get_submodule(path), split_role(role)[1] in ROWWISE_ROLES
        if type(module) is nn.Linear:
            attach(layer, path, self._linear(ROW if writes else COLUMN, module, path))
        elif isinstance(module, LowRankLinear):
            if module.first is not None:
                attach(layer, f"{path}.first", self._linear(ROW if writes else WHOLE, module.first, f"{path}.first"))
            if module.second is not None:
                style = WHOLE if writes else COLUMN
                attach(layer, f"{path}.second", self._linear(style, module.second, f"{path}.second"))
        elif isinstance(module, HeadLowRankLinear):
            self._per_head(layer, path, module)
        elif isinstance(module, RoleOutput):
            pivoted = self.config.forms[self.layer][role]["form"] == "pivoted"
            if pivoted and not writes:
                module.__class__, module.cut = CutRole, self.cut  # type: ignore[assignment]
            elif not pivoted and writes:
                module.__class__ = SummedRole
        if isinstance(module, Factored) and getattr(module, "bias", None) is not None and not writes:
            self._cut_bias(module, path)

    def _linear(self, style: Any, linear: nn.Linear, path: str) -> nn.Module:
        sizes, name = (linear.in_features, linear.out_features), f"{self.prefix}.{path}"
        options = {"bias": linear.bias is not None, "prefix": name, "return_bias": False}
        scheme = scheme_of(self.config, name)
        scheme = scheme if self.quant_config or (scheme and scheme.table) else None
        try:
            if scheme is not None:
                check_kernel(scheme)
            parallel: nn.Module = style(*sizes, quant_config=self.quant_config, **options)
            check_operator(parallel)
        except ValueError as error:  # no kernel of the platform takes these bits and widths
            if scheme is None:
                raise
            parallel = style(*sizes, **options)
            self.places |= unpacked_places(parallel, path, scheme)
            self.unpacked[path] = str(error)
        return parallel

    def _cut_bias(self, module: Any, path: str) -> None:
        module.bias = nn.Parameter(self.cut.of(module.bias, 0).contiguous())
        self.places[f"{path}.bias"] = lambda stored: _fill(module.bias, self.cut.of(stored, 0))

    def _per_head(self, layer: nn.Module, path: str, module: HeadLowRankLinear) -> None:
        if module.first is not None:
            attach(layer, f"{path}.first", self._linear(COLUMN, module.first, f"{path}.first"))
        module.num_heads //= self.cut.parts
        head_dim, rank = module.factors["second"].shape[1:]
        module.add_factor("second", (module.num_heads, head_dim, rank), reads_first=False, module="head_second")
        factor, linear = module.factors["second"], cast(nn.Linear, module.head_second)
        self.places[f"{path}.second"] = lambda stored: _fill(linear.weight, factor.weight(self.cut.of(stored, 0)))

    def _pivoted(self, layer: nn.Module, path: str, module: PivotedLinears, role: str) -> None:
        if type(module.rows) is not nn.Linear:
            return  # replaced for another role of the stack
        style = ROW if role in ROWWISE_ROLES else WHOLE
        attach(layer, f"{path}.rows", self._linear(style, module.rows, f"{path}.rows"))
        if module.coefficients is not None:
            attach(layer, f"{path}.coefficients", self._linear(WHOLE, module.coefficients, f"{path}.coefficients"))

    def _tuckers(self, layer: nn.Module) -> set[str]:
        return {path for path, module in layer.named_modules() if getattr(module, "is_cut", False)}

    def _tucker(self, layer: nn.Module, path: str, whole: TuckerLinears, role: str) -> None:
        """Replace the group by one with this device's heads or channels. Sparse cores become dense."""
        parts, attention = self.cut.parts, role in QKVO_ROLES
        heads = {core: core.num_heads // parts if attention else 1 for core in whole.cores}
        cores = tuple(replace(core, num_heads=n, nnz=None) for core, n in heads.items())
        mine: Any = TuckerLinears(whole.width, whole.inner if attention else whole.inner // parts, cores, csr=False)
        mine.is_cut = True
        attach(layer, path, mine)
        for name, factor in mine.factors.items():
            dim = -1 if attention and name.startswith("core") else 0 if name == "second" and not attention else None
            self.places[f"{path}.{name}"] = _placed(mine, name, factor, self.cut, dim)
        for core in whole.cores:
            if core.nnz is not None:
                name = f"{path}.core{core.suffix}"
                self._sparse(SparseCore(core.shape, core.nnz), name, self.places.pop(name))

    def _sparse(self, core: SparseCore, name: str, place: Place) -> None:
        stored: dict[str, Tensor] = {}

        def collect(part: str, tensor: Tensor) -> None:
            stored[part] = tensor
            if len(stored) == 2:
                core.load_state_dict(stored, assign=True)
                place(core().detach())
                stored.clear()

        for part in ("values", "mask"):
            self.places[f"{name}.{part}"] = partial(collect, part)


def _placed(module: nn.Module, name: str, factor: Any, cut: Cut, dim: int | None) -> Place:
    def place(stored: Tensor) -> None:
        part = stored if dim is None else cut.of(stored, dim)
        _fill(getattr(module, name).weight, factor.weight(part))

    return place


@torch.no_grad()
def _fill(parameter: Tensor, value: Tensor) -> None:
    if parameter.shape != value.shape:
        raise ValueError(f"a tensor of shape {tuple(value.shape)}, not {tuple(parameter.shape)}")
    parameter.copy_(value)


def _materialise(layer: nn.Module) -> None:
    """Allocate, on the current device, the tensors that vLLM's layers have not replaced."""
    device = torch.empty(0).device
    for module in layer.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and tensor.is_meta:
                empty = torch.empty_like(tensor, device=device)
                value = nn.Parameter(empty, requires_grad=False) if name in module._parameters else empty
                setattr(module, name, value)
