"""Mixtures of experts as tensors and fields of a GGUF file: `llama` for Mixtral, `qwen3moe`, `deepseek2`.

A file holds the matrices of all experts of a layer in one tensor, expert by expert. All layers have the same number and
width of experts, as in a `stock` checkpoint, whose config gives the sizes. `llama` and `deepseek2` rotate neighbours,
like DeepSeek's checkpoints; `qwen3moe` rotates halves.

Legend: D hidden, H heads, N numbers of a key without rotation, V of a value, L of the latent, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import Any

import torch
from torch import Tensor

from lamina.mixture_lamina import ROUTER, ROUTER_BIAS, SHARED, split_role
from pipeline.checkpoint.exporting import coarsest, layer_weights
from pipeline.checkpoint.gguf_codes import Coded, coded_matrices, coded_tensor, unchanged
from pipeline.checkpoint.gguf_names import EXPERTS, NAMES
from pipeline.checkpoint.targets import counted, stock_widths, written_config
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.families.registry import geometry_of, standard_config
from pipeline.inputs.source_dtypes import source_dtype
from stores.source import SourceCheckpoint
from workers.checkpoint_reader import cpu_reader

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file.

    Attributes:
        name: the name in the file.
        shape: the shape; for experts' matrices (E, O, I).
        dtype: the dtype in the file.
        keys: role and part of the weights that it holds.
        paths: the modules of these weights.
        arranged: returns a weight, or a part of it, in the file's order.
        stacked: it holds the weights of all experts.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    keys: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    arranged: Callable[[Tensor], Tensor] = unchanged
    stacked: bool = False


@dataclass(frozen=True)
class MixtureFile:
    """The tensors and sizes of a compressed mixture in a GGUF file.

    Attributes:
        checkpoint: the compressed checkpoint.
        config: its config.
        architecture: llama.cpp's architecture.
    """

    checkpoint: SourceCheckpoint
    config: Mapping[str, Any]
    architecture: str

    @cached_property
    def standard(self) -> Mapping[str, Any]:
        """Return the standard config of the `stock` checkpoint."""
        return standard_config(self._stock)

    @cached_property
    def _stock(self) -> Mapping[str, Any]:
        return written_config(counted(self.config), "stock")

    @cached_property
    def outer(self) -> dict[str, FileTensor]:
        """Map the names of the checkpoint's tensors outside of layers to those of the file."""
        block, tied = self.config["block"], self.config["tie_word_embeddings"]
        names = {block["embed"]: "token_embd", block["final_norm"]: "output_norm", block["head"]: "output"}
        shapes = dict(geometry_of(self.config).outer)
        keys = {f"{path}.weight": f"{name}.weight" for path, name in names.items() if not (tied and name == "output")}
        return {
            key: FileTensor(name, shapes[key], self._dtype([key], shapes[key]), paths=(key.removesuffix(".weight"),))
            for key, name in keys.items()
        }

    @cached_property
    def layers(self) -> list[list[FileTensor]]:
        """Return the tensors of each layer."""
        return [[*self._layer(layer)] for layer in geometry_of(self.standard).layers]

    @property
    def all(self) -> Iterator[FileTensor]:
        """Yield every tensor, in the order of the file."""
        yield from self.outer.values()
        yield from (tensor for tensors in self.layers for tensor in tensors)

    @cached_property
    def coded(self) -> dict[str, Coded]:
        """Map the names of tensors whose codes the file keeps to their matrices. Others are dequantized."""
        matrices = coded_matrices(self.checkpoint, counted(self.config))
        tensors = {each.name: coded_tensor(matrices, each.paths, each.shape, each.arranged) for each in self.all}
        return {name: coded for name, coded in tensors.items() if coded is not None}

    def tensors(self, say: Callable[[str], None]) -> Iterator[Tensor]:
        """Yield the tensors in the order of `all`, with one layer in memory."""
        config = counted(self.config)
        widths, dtype_of = stock_widths(config), partial(source_dtype, tensors=self.checkpoint.tensors, config=config)
        reader = cpu_reader(self.checkpoint, config, torch.float64, whole=True)
        for name, tensor in self.outer.items():
            yield reader.outer(name)[name].to(tensor.dtype)
        for layer, tensors in zip(geometry_of(config).layers, self.layers, strict=True):
            reader.read_ahead(layer.index + 1)
            module = reader.block(layer.index, None).module
            weights = layer_weights(module, layer, coarsest(layer, dtype_of), widths, self._stock)
            for tensor in tensors:
                parts = [tensor.arranged(weights[key]).to(tensor.dtype) for key in tensor.keys]
                yield torch.stack(parts) if tensor.stacked else parts[0]
            say(f"layer {layer.index} written")

    def _layer(self, layer: LayerGeometry) -> Iterator[FileTensor]:
        """Yield the tensors of a layer."""
        shapes = {key: shape for key, (_, shape) in layer.tensors().items()}
        of_experts: dict[str, list[str]] = {}
        for key, shape in shapes.items():
            role, _, part = key.rpartition(".")
            block, local = split_role(role)
            if role == "kv_b_proj":
                yield from self._keys_and_values(layer, key, shape)
            elif block and block != SHARED:
                of_experts.setdefault(local, []).append(key)
            elif role == ROUTER_BIAS:
                yield self._tensor(layer, "exp_probs_b.bias", [key], shape, torch.float32)
            else:
                dtype = torch.float32 if role == ROUTER else None
                arranged = self._arranged(layer, role)
                yield self._tensor(layer, f"{NAMES[role]}.{part}", [key], shape, dtype, arranged)
        for local, keys in of_experts.items():
            name, shape = f"{EXPERTS[local]}.weight", (len(keys), *shapes[keys[0]])
            yield replace(self._tensor(layer, name, keys, shape), stacked=True)

    def _arranged(self, layer: LayerGeometry, role: str) -> Callable[[Tensor], Tensor]:
        """Return the function that reorders the rows of a matrix for the file."""
        if self.architecture == "llama" and role in ("q", "k"):
            block = layer.attention
            return partial(neighbours_first, heads=block.heads if role == "q" else block.kv_heads)
        return unchanged

    def _keys_and_values(self, layer: LayerGeometry, key: str, shape: tuple[int, ...]) -> Iterator[FileTensor]:
        """Yield the two parts of the latent's reader: keys (H, L, N) and values (H, V, L)."""
        fields, heads, width = self.standard["foreign"], self.standard["num_attention_heads"], shape[1]
        nope, value = fields["qk_nope_head_dim"], fields["v_head_dim"]

        def keys(weight: Tensor) -> Tensor:
            weight_HNL: Tensor = weight.unflatten(0, (heads, -1))[:, :nope]
            return weight_HNL.transpose(1, 2).contiguous()

        def values(weight: Tensor) -> Tensor:
            weight_HVL: Tensor = weight.unflatten(0, (heads, -1))[:, nope:]
            return weight_HVL.contiguous()

        yield self._tensor(layer, "attn_k_b.weight", [key], (heads, width, nope), None, keys)
        yield self._tensor(layer, "attn_v_b.weight", [key], (heads, value, width), None, values)

    def _tensor(
        self,
        layer: LayerGeometry,
        name: str,
        keys: Sequence[str],
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        arranged: Callable[[Tensor], Tensor] | None = None,
    ) -> FileTensor:
        names = {key: own for key, (own, _) in layer.tensors().items()}
        dtype = dtype or self._dtype([names[key] for key in keys], shape)
        paths = tuple(names[key].removesuffix(".weight") for key in keys)
        return FileTensor(f"blk.{layer.index}.{name}", shape, dtype, tuple(keys), paths, arranged or unchanged)

    def _dtype(self, names: Sequence[str], shape: tuple[int, ...]) -> torch.dtype:
        """Return the dtype of a tensor in the file: the source's, but float32 for vectors and wider dtypes."""
        if len(shape) == 1:
            return torch.float32
        dtype = reduce(
            torch.promote_types, {source_dtype(name, self.checkpoint.tensors, self.config) for name in names}
        )
        return dtype if dtype in HALVES else torch.float32

    def add_sizes(self, writer: Any) -> None:
        """Write the model's sizes and its routing rule."""
        import gguf

        standard, mixture = self.standard, self.standard["mixture"]
        sizes = next(sizes for sizes in mixture["layers"] if sizes is not None)
        writer.add_context_length(standard["max_position_embeddings"])
        writer.add_embedding_length(standard["hidden_size"])
        writer.add_block_count(standard["num_hidden_layers"])
        writer.add_feed_forward_length(standard["intermediate_size"])
        writer.add_head_count(standard["num_attention_heads"])
        writer.add_layer_norm_rms_eps(standard["norm_eps"])
        writer.add_vocab_size(standard["vocab_size"])
        writer.add_rope_freq_base(float(standard["rope_parameters"]["rope_theta"]))
        writer.add_expert_count(sizes["experts"])
        writer.add_expert_used_count(sizes["top_k"])
        if self.architecture != "llama":
            writer.add_expert_feed_forward_length(sizes["width"])
        if self.architecture != "deepseek2":
            writer.add_head_count_kv(standard["num_key_value_heads"])
            writer.add_key_length(standard["head_dim"])
            writer.add_value_length(standard["head_dim"])
            writer.add_rope_dimension_count(standard["head_dim"])
            return
        _add_latent_sizes(writer, standard["foreign"])
        _add_scaling(writer, standard["rope_parameters"])
        writer.add_leading_dense_block_count(sum(each is None for each in mixture["layers"]))
        writer.add_expert_shared_count(sizes.get("shared_width", 0) // sizes["width"])
        writer.add_expert_weights_scale(float(mixture["scale"]))
        writer.add_expert_weights_norm(mixture["renormalise"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType[mixture["score"].upper()])
        writer.add_expert_group_count(mixture["groups"])
        writer.add_expert_group_used_count(mixture["top_groups"])


def _add_latent_sizes(writer: Any, fields: Mapping[str, Any]) -> None:
    """Write the sizes of latent attention, which llama.cpp computes with one head of keys: the latent."""
    latent, rope = fields["kv_lora_rank"], fields["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_key_length(latent + rope)
    writer.add_value_length(latent)
    writer.add_key_length_mla(fields["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(fields["v_head_dim"])
    writer.add_kv_lora_rank(latent)
    if fields["q_lora_rank"] is not None:
        writer.add_q_lora_rank(fields["q_lora_rank"])
    writer.add_rope_dimension_count(rope)


def _add_scaling(writer: Any, rope: Mapping[str, Any]) -> None:
    """Write the parameters of YaRN. llama.cpp expects a tenth of `mscale_all_dim`."""
    import gguf

    if rope["rope_type"] != "yarn":
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(float(rope["factor"]))
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(float(rope.get("beta_fast") or 32))
    writer.add_rope_scaling_yarn_beta_slow(float(rope.get("beta_slow") or 1))
    writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def neighbours_first(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows (n·d, D) of each head from pairs (i, i + d/2) to pairs (2i, 2i + 1)."""
    pairs_n2hD: Tensor = weight.unflatten(0, (heads, 2, -1))
    return pairs_n2hD.transpose(1, 2).flatten(0, 2).contiguous()
