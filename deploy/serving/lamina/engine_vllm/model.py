"""Lamina's causal model for vLLM: the layers of `lamina` with vLLM's linears, attention, embedding and head.

T tokens of all sequences of a step, D hidden, V vocabulary.
"""

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.sequence import IntermediateTensors

from lamina.block_lamina import in_base
from lamina.checking_lamina import check_checkpoint, shown
from lamina.configuration_lamina import LaminaConfig
from lamina.decoder_layer_lamina import attach, find
from lamina.engine_vllm.attention import CachedHeads, VllmAttention
from lamina.engine_vllm.mixtures import FusedExperts, check_mixtures
from lamina.engine_vllm.parallel import Cut, Parallel, Place, check_cut, unpacked_places
from lamina.engine_vllm.rounded import Scheme, scheme_of
from lamina.factored_lamina import PivotedLinears, stored_state
from lamina.layers_lamina import LaminaDecoderLayer
from lamina.modeling_lamina import LaminaForCausalLM, unused
from lamina.norms_lamina import make_norm
from lamina.stored_lamina import decoded_weights, stored_modules
from lamina.vllm_lamina import foreign_rotation, vllm_lacks

logger = init_logger("vllm.lamina")


class VllmDecoderLayer(LaminaDecoderLayer):
    """A decoder layer with this device's heads and channels."""

    attention_class = VllmAttention
    fused: FusedExperts | None = None

    def _mixture(self, x_BTD: Tensor) -> Tensor:
        """Apply the fused experts, or experts of different shapes one after another, and the shared one."""
        if self.fused is None:
            return super()._mixture(x_BTD)
        x_TD = x_BTD.flatten(0, -2)
        return self.with_shared(x_TD, self.fused(x_TD)).view_as(x_BTD)

    def forward(self, positions_T: Tensor, hidden_TD: Tensor) -> Tensor:  # type: ignore[override]
        """Map hidden states (T, D) to the same shape."""
        normed_TD = self._apply_role("input_norm", hidden_TD)
        attended_TD: Tensor = find(self, self._attention)(positions_T, normed_TD)
        if self.parallel:
            normed_TD = self._apply_role("mlp_norm", hidden_TD) if "mlp_norm" in self._names else normed_TD
            return attended_TD + self._feed_forward(normed_TD.unsqueeze(0)).squeeze(0) + hidden_TD
        hidden_TD = hidden_TD + attended_TD
        return hidden_TD + self._feed_forward(self._apply_role("mlp_norm", hidden_TD).unsqueeze(0)).squeeze(0)


class LookedUp(UnquantizedEmbeddingMethod):  # type: ignore[misc]  # types are checked without vLLM
    """Embeds tokens. Makes no second copy of the table, which vLLM packs on a CPU, also where no product reads it."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave the table as it is."""


@support_torch_compile
class LaminaBase(nn.Module):
    """Embedding, decoder layers and final norm, at the block's paths below the base module."""

    def __init__(self, *, vllm_config: VllmConfig, config: LaminaConfig, prefix: str) -> None:
        super().__init__()
        self.config, block = config, config.block
        quant, cache = vllm_config.quant_config, vllm_config.cache_config
        self.places: dict[str, Place] = {}
        self.unpacked: dict[str, str] = {}
        self._names = {key: tuple(in_base(block[key]).split(".")) for key in ("embed", "layers", "final_norm")}
        table = VocabParallelEmbedding(config.vocab_size, config.hidden_size, prefix=block["embed"])
        table.quant_method = LookedUp()
        attach(self, in_base(block["embed"]), table)
        scale = block["embed_scale"]
        self.embed_scale = config.hidden_size**0.5 if scale == "sqrt(hidden_size)" else scale
        if positions := block["positions"]:
            self._names["positions"] = tuple(in_base(positions["module"]).split("."))
            learned = nn.Embedding(config.max_position_embeddings + positions["offset"], config.hidden_size)
            attach(self, in_base(positions["module"]), learned)
        heads = _cached_heads(config, vllm_config)
        path = in_base(block["layers"])
        layers = (self._layer(i, heads, cache, quant, f"{prefix}.{path}.{i}") for i in range(config.num_hidden_layers))
        attach(self, path, nn.ModuleList(layers))
        attach(self, in_base(block["final_norm"]), make_norm(config))
        if self.unpacked:
            logger.warning(
                "%d rounded matrices have no kernel here and are multiplied out: as large in memory as unrounded ones. "
                "The first is %s: %s", len(self.unpacked), *next(iter(self.unpacked.items())),
            )  # fmt: skip

    def _layer(self, index: int, heads: CachedHeads, cache: Any, quant: Any, prefix: str) -> VllmDecoderLayer:
        with torch.device("meta"):
            layer = VllmDecoderLayer(self.config, index)
        parallel = Parallel(self.config, index, quant, prefix)
        layer.fused = parallel.convert(layer)
        self.places |= {f"{prefix}.{name}": place for name, place in parallel.places.items()}
        self.unpacked |= {f"{prefix}.{path}": reason for path, reason in parallel.unpacked.items()}
        attention = cast(VllmAttention, find(layer, layer._attention))
        attention.connect(heads, parallel.cut.parts, cache, quant, f"{prefix}.{'.'.join(layer._attention)}")
        attention.rotary = make_rotary(self.config)
        return layer

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Map token ids (T) to embeddings (T, D)."""
        hidden_TD: Tensor = find(self, self._names["embed"])(input_ids)
        return hidden_TD if self.embed_scale is None else hidden_TD * hidden_TD.new_full((), self.embed_scale)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Map token ids (T), or embeddings (T, D), and positions (T) to hidden states (T, D) after the final norm."""
        hidden_TD = self.embed_input_ids(cast(Tensor, input_ids)) if inputs_embeds is None else inputs_embeds
        if table := self._names.get("positions"):
            hidden_TD = hidden_TD + find(self, table)(positions + self.config.block["positions"]["offset"])
        for layer in find(self, self._names["layers"]).children():
            hidden_TD = layer(positions, hidden_TD)
        normed_TD: Tensor = find(self, self._names["final_norm"])(hidden_TD)
        return normed_TD


class LaminaForVllm(nn.Module):
    """vLLM's model of the architecture `LaminaForCausalLM`. Its tensors have the names of the checkpoint."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = config = _own_config(vllm_config.model_config.hf_config)
        if lacking := vllm_lacks(config, own_class=True):
            raise ValueError(f"Lamina's class for vLLM does not compute {lacking}; load the checkpoint in transformers")
        check_cut(config, Cut.mine().parts)
        check_mixtures(config, vllm_config)
        folder = Path(vllm_config.model_config.model)
        if folder.is_dir():
            check_checkpoint(folder)
        base, self._head = config.block["embed"].partition(".")[0], tuple(config.block["head"].split("."))
        self._base = base
        self.add_module(base, LaminaBase(vllm_config=vllm_config, config=config, prefix=base))
        head = ParallelLMHead(
            config.vocab_size, config.hidden_size, bias=config.block["head_bias"], prefix=config.block["head"]
        )
        if config.tie_word_embeddings:
            table = find(self, tuple(config.block["embed"].split(".")))
            head = head.tie_weights(cast(VocabParallelEmbedding, table))
        attach(self, config.block["head"], head)
        self._stored = stored_modules(config.stored_formats)
        if self._stored:
            logger.warning(
                "%d weights in stored formats of the source are decoded: as large in memory as in %s",
                len(self._stored), next(iter(self._stored.values())).dtype,
            )  # fmt: skip
        self._rounded_ends: dict[str, Scheme] = {}  # unpacked at loading: vLLM has kernels only for linears of layers
        for path, linear in ((config.block["embed"], False), (config.block["head"], True)):
            if (scheme := scheme_of(config, path, linear)) is not None:
                self._rounded_ends[path] = scheme
                self.base.places |= unpacked_places(find(self, tuple(path.split("."))), path, scheme)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    @property
    def base(self) -> LaminaBase:
        """The model below the head."""
        return cast(LaminaBase, getattr(self, self._base))

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Map token ids (T) to embeddings (T, D)."""
        return self.base.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states of the base model."""
        hidden_TD: Tensor = self.base(input_ids, positions, intermediate_tensors, inputs_embeds)
        return hidden_TD

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Map hidden states (T, D) to logits (T, V), on the device that samples."""
        head: Any = find(self, self._head)
        logits: Tensor | None = self.logits_processor(head, hidden_states, head.bias)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the stored tensors. Return the names of the tensors that are loaded.

        Raises ValueError for tensors that are missing, unknown, or not of the shape that the forms of config.json need.
        """
        expected, targets = self._expected(), {**dict(self.named_parameters()), **dict(self.named_buffers())}
        places, head = self.base.places, f"{self.config.block['head']}.weight"
        ignored = [re.compile(pattern) for pattern in unused(self.config)]
        ends: dict[str, Tensor] = {}  # embedding and head of a model that ties them, if both are stored
        loaded: set[str] = set()
        for name, tensor in decoded_weights(weights, self._stored):
            if self.config.tie_word_embeddings and name in (head, f"{self.config.block['embed']}.weight"):
                ends[name] = tensor
            if (self.config.tie_word_embeddings and name == head) or any(p.search(name) for p in ignored):
                continue
            if name not in expected:
                raise ValueError(f"the checkpoint has {name}, which config.json's forms do not ask for")
            if (shape := expected[name]) is not None and shape != tuple(tensor.shape):
                raise ValueError(f"{name} is of shape {tuple(tensor.shape)}, config.json's forms ask for {shape}")
            if name in places:
                places[name](tensor)
            elif (load := getattr(targets[name], "weight_loader", None)) is not None:
                load(targets[name], tensor)
            else:
                targets[name].data.copy_(tensor)
            loaded.add(name)
        if missing := sorted({*expected} - loaded):
            raise ValueError(
                f"the checkpoint lacks {len(missing)} tensors that its config.json describes: {shown(missing)}. "
                "A shard may be missing, or the files are of different checkpoints; copy it again."
            )
        if len(ends) == 2 and not torch.equal(*ends.values()):
            raise ValueError(f"{head} differs from the embedding, although tie_word_embeddings of config.json is true")
        for module in self.modules():
            if isinstance(module, PivotedLinears):
                module.fix_positions()
        return {*targets}

    def _expected(self) -> dict[str, tuple[int, ...] | None]:
        """Return the shapes of the checkpoint's tensors by name; None for tensors of vLLM's own quantisation."""
        plain = copy.copy(self.config)
        plain.level_tables, plain.stored_formats = {}, []
        with torch.device("meta"):
            model = LaminaForCausalLM(plain)
        expected: dict[str, tuple[int, ...] | None] = {n: tuple(t.shape) for n, t in stored_state(model).items()}
        if self.config.tie_word_embeddings:
            expected.pop(f"{self.config.block['head']}.weight", None)
        for path, rounded in self._rounded_ends.items():
            shape = expected.pop(f"{path}.weight")
            expected |= {f"{path}.{part}": size for part, size in rounded.shapes(*cast(Any, shape)).items()}
        quantised = {
            path: module
            for path, module in self.named_modules()
            if isinstance(module, LinearBase) and not isinstance(module.quant_method, UnquantizedLinearMethod)
        }
        for path in {**quantised, **self.base.unpacked}:
            shape = expected.pop(f"{path}.weight")
            if (scheme := scheme_of(self.config, path)) is not None:
                expected |= {f"{path}.{part}": size for part, size in scheme.shapes(*cast(Any, shape)).items()}
            else:
                names = (name for name, _ in quantised[path].named_parameters() if name != "bias")
                expected |= {f"{path}.{name}": None for name in names}
        return expected


def _own_config(config: Any) -> LaminaConfig:
    """Return the config as this package's class, because `trust_remote_code` loads that of the checkpoint's files."""
    return config if isinstance(config, LaminaConfig) else LaminaConfig(**config.to_dict())


def _cached_heads(config: LaminaConfig, vllm_config: VllmConfig) -> CachedHeads:
    from vllm.platforms import current_platform

    kernel_sizes: tuple[int, ...] = ()
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        kernel_sizes = tuple(CPUAttentionBackend.get_supported_head_sizes())
    return CachedHeads(config, vllm_config.attention_config.backend, kernel_sizes)


def make_rotary(config: LaminaConfig) -> nn.Module | None:
    """Return vLLM's rotation of queries and keys, or None without rotation.

    Raises ValueError if vLLM's rotation would differ from transformers'.
    """
    if config.block["rotary"] is None:
        return None
    if fault := foreign_rotation(config):
        raise ValueError(f"{fault}, unlike transformers; serve it with transformers, or with another rope_parameters")
    rope: dict[str, Any] = config.rope_parameters or {}
    width = round(config.head_dim * rope.get("partial_rotary_factor", 1.0))  # vLLM would round down
    rotary: nn.Module = get_rope(
        config.head_dim,
        max_position=config.max_position_embeddings,
        is_neox_style=config.block["rotary"] == "half",
        rope_parameters={**rope, "rope_dim": width},
    )
    return rotary
