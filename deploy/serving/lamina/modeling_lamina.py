# mypy: allow-untyped-calls
# (transformers ships types, but its base classes' hooks carry no annotations)
"""A decoder-only language model, dense or compressed, that is described by data.

`config.block` describes a decoder layer of the source family (module paths, biases, norms). `config.forms` describes
how each projection of each layer is stored; if it is empty, the model computes the source's logits. The code names no
family. The files need only torch and transformers: they are copied next to a checkpoint and loaded with
`trust_remote_code`.

B batch, T tokens of this call, S cached tokens, D hidden, H query heads, G key/value heads, d head_dim, r a rank or the
width of a value head, c rotary width (c <= d), N MLP width, V vocabulary.

The files beside this one: configuration_lamina and layers_config_lamina (config.json, and the layers in it),
block_lamina (the block and the sizes of a layer), mixture_lamina (mixtures of experts), foreign_lamina (attention that
transformers runs), activation_lamina, form_lamina and forms_lamina (stored forms of projections), factored_lamina and
tucker_lamina (the modules of factored projections), conversion_lamina (names and shapes of stored factors),
decoder_layer_lamina (norm, attention and MLP over whole sequences), layers_lamina (the same in transformers: caches,
attention functions), embedding_lamina (the embedding table and the head), levels_lamina (weights as codes and a table),
stored_lamina (weights in formats of other tools), rotary_lamina, latent_attention_lamina (cached latents, in blocks),
norms_lamina, attention_lamina (whole sequences, soft caps), wrapper_lamina (the decoder inside of a multimodal model),
vllm_lamina (its limits), processor_lamina (the dtype of products on a CPU), inputs_lamina (positions and masks),
checking_lamina (checks of a checkpoint's files).
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
    MoeModelOutputWithPast,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .block_lamina import LAYER_FIELDS, RECURRENT, attention_path, in_base
from .checking_lamina import check_checkpoint, check_reader, shown
from .configuration_lamina import LaminaConfig
from .conversion_lamina import register_conversions
from .decoder_layer_lamina import attach, find
from .embedding_lamina import finish_logits, make_embedding, make_head, make_positions
from .factored_lamina import stored_factors
from .inputs_lamina import prepare_layer_inputs
from .layers_lamina import LaminaAttention, LaminaDecoderLayer
from .levels_lamina import attach_tables
from .norms_lamina import make_norm
from .rotary_lamina import make_rotary
from .stored_lamina import attach_stored, stored_modules
from .vllm_lamina import vllm_lacks

register_conversions(LaminaConfig.model_type)


class LaminaPreTrainedModel(PreTrainedModel):
    """The attributes that transformers requires of a model's class. Loading accepts only complete checkpoints."""

    config: LaminaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LaminaDecoderLayer"]  # noqa: RUF012 - the base class declares the types
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    has_head = False
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": LaminaDecoderLayer, "attentions": LaminaAttention}  # noqa: RUF012

    def __init__(self, config: LaminaConfig) -> None:
        super().__init__(config)
        self.base_model_prefix = config.block["embed"].partition(".")[0]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as `load_whole` does."""
        return load_whole(super().from_pretrained, pretrained_model_name_or_path, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # By method, not by class: transformers may load a file twice, for the config and for the model.
        if (initialise_ := getattr(module, "initialise_", None)) is not None:
            initialise_(self.config.initializer_range)


def load_whole(load: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
    """Load as transformers does, but refuse a checkpoint that is incomplete or of another model.

    `load`: the `from_pretrained` of transformers. Raises ValueError if tensors are missing or have other shapes, which
    transformers would initialise at random (`ignore_mismatched_sizes` allows other shapes), if there are unknown
    tensors, and if the files of a folder are damaged or differ from its `compression.json`. Raises ImportError if
    compressed-tensors is too old for the weights' bits.
    """
    with_report = kwargs.pop("output_loading_info", False)
    if path is not None and Path(path).is_dir():
        check_checkpoint(Path(path, kwargs.get("subfolder", "")))
    mismatched = kwargs.pop("ignore_mismatched_sizes", False)
    model, report = load(path, *args, **{**kwargs, "output_loading_info": True, "ignore_mismatched_sizes": True})
    faults = _faults({**report, "mismatched_keys": () if mismatched else report["mismatched_keys"]}, model)
    if faults:
        raise ValueError(
            f"{path} is not of the model that its config.json describes: {'; '.join(faults)}. "
            "A shard may be missing, or the files are of different checkpoints; copy it again."
        )
    if quantization := getattr(model.config, "quantization_config", None):
        check_reader(quantization if isinstance(quantization, dict) else quantization.to_dict())
    for module in model.modules():
        if (check := getattr(module, "check_stored", None)) is not None:
            check()
    return (model, report) if with_report else model


def _faults(report: dict[str, Any], model: Any) -> list[str]:
    """List the faults in transformers' loading report, by the names of the checkpoint."""
    stored, faults = stored_factors(model), []
    if missing := sorted(stored[name][0] if name in stored else name for name in report["missing_keys"]):
        faults.append(f"it lacks {len(missing)} tensors: {shown(missing)}")
    unexpected = report["unexpected_keys"]
    if not getattr(model, "has_head", True):
        head = f"{model.config.block['head']}."  # not of the base model
        unexpected = (name for name in unexpected if not name.startswith(head))
    if unknown := sorted(unexpected):
        faults.append(f"it has {len(unknown)} tensors too many: {shown(unknown)}")
    others = []
    for name, shape, expected in report["mismatched_keys"]:
        if name in stored:  # conversion_lamina gives tensors of another shape one more dimension
            others.append(f"{stored[name][0]} {tuple(shape[1:])}, not {stored[name][1].shape}")
        else:
            others.append(f"{name} {tuple(shape)}, not {tuple(expected)}")
    return faults + ([f"{len(others)} tensors are of another shape: {shown(sorted(others))}"] if others else [])


def _check_backend(config: LaminaConfig) -> None:
    """Raise ValueError for a model that vLLM's Transformers backend cannot serve.

    The backend needs the same heads in all layers, and cannot load tables of levels.
    """
    if lacking := vllm_lacks(config, own_class=False):
        raise ValueError(f"vLLM's Transformers backend does not compute {lacking}; load the checkpoint in transformers")
    if config.foreign:
        raise ValueError(
            f"vLLM's Transformers backend does not serve the attention of {config.foreign['model_type']} inside of "
            "Lamina's model; load the checkpoint in transformers"
        )
    if config.level_tables:
        raise ValueError(
            "weights whose codes stand for levels in a table (level_tables): vLLM's Transformers backend loads none; "
            "with Lamina's serving package (pip install CHECKOUT/deploy/serving), vLLM has a class that does"
        )
    for layer in range(config.num_hidden_layers):
        shape, (form, spec) = config.layer_shape(layer), config.form_of(layer, "v")
        odd = [f"{name} {n}" for name in LAYER_FIELDS[1:] if (n := getattr(shape, name)) != getattr(config, name)]
        if (width := form.head_width(shape, spec)) > config.head_dim:
            odd.append(f"values of {width} numbers beside keys of {config.head_dim}")
        if odd:
            raise ValueError(
                f"layer {layer}: {', '.join(odd)}: vLLM's Transformers backend does not support such heads; with "
                "Lamina's serving package (pip install CHECKOUT/deploy/serving), vLLM has a class that does"
            )


def unused(config: LaminaConfig) -> list[str]:
    """Return patterns of stored tensors that no model loads.

    These are `unused_tensors`, with or without the name of the base model, the towers of a multimodal model, and
    buffers that old checkpoints hold for each layer: causal masks and rotary frequencies.
    """
    foreign = config.block["foreign"] or attention_path(config.block["modules"])
    paths = [foreign] if isinstance(foreign, str) else [*foreign.values()]
    attention, base = "|".join(map(re.escape, paths)), config.block["embed"].partition(".")[0]
    others = [rf"^({base}\.)?{re.escape(name.removeprefix(f'{base}.'))}$" for name in config.unused_tensors or ()]
    if config.wrapper:
        text = re.escape(in_base(config.block["layers"]).partition(".")[0])
        others.append(rf"^({base}\.)?(?!{base}\.|{text}\.|{re.escape(config.block['head'])}\.)")
    return [r"\.rotary_emb\.inv_freq$", rf"\.({attention})\.(bias|masked_bias)$", *others]


class LaminaModel(LaminaPreTrainedModel):
    """Embedding, decoder layers and final norm, at the block's paths below the base module."""

    _auto_class = "AutoModel"

    def __init__(self, config: LaminaConfig) -> None:
        super().__init__(config)
        block, positions = config.block, config.block["positions"]
        if config._attn_implementation == "vllm":
            _check_backend(config)
        self._names = {key: tuple(in_base(block[key]).split(".")) for key in ("embed", "layers", "final_norm")}
        layers = nn.ModuleList([LaminaDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        attach(self, in_base(block["embed"]), make_embedding(config))
        if positions:
            self._names["positions"] = tuple(in_base(positions["module"]).split("."))
            attach(self, in_base(positions["module"]), make_positions(config))
        attach(self, in_base(block["layers"]), layers)
        attach(self, in_base(block["final_norm"]), make_norm(config))
        tables = config.level_tables.items()
        attach_tables(self, {in_base(path): scheme for path, scheme in tables if path != block["head"]})
        stored = stored_modules(config.stored_formats).items()
        attach_stored(self, {in_base(path): form for path, form in stored if path != block["head"]})
        self.rotary_emb = make_rotary(config)
        self.gradient_checkpointing = False
        # Must not match tensors of a causal model, because vLLM builds its models around this one and skips matches.
        self._keys_to_ignore_on_load_unexpected = set(unused(config))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the table (V, D) of token embeddings."""
        return find(self, self._names["embed"])

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the table of token embeddings."""
        attach(self, ".".join(self._names["embed"]), value)

    def get_decoder(self) -> "LaminaModel":
        """Return this model, which has no encoder."""
        return self

    def _add_positions(self, hidden_BTD: Tensor, position_ids: Tensor) -> Tensor:
        if (positions := self.config.block["positions"]) is None:
            return hidden_BTD
        table = find(self, self._names["positions"])
        return hidden_BTD + cast(Tensor, table(position_ids + positions["offset"]))

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | MoeModelOutputWithPast:
        """Map token ids (B, T), or embeddings (B, T, D), to hidden states (B, T, D) after the final norm and the cache.

        `attention_mask` (B, S) is 1 on tokens and 0 on padding; a dict holds ready masks by layer type. Raises
        ValueError unless exactly one of ids and embeddings is passed.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        hidden_BTD: Tensor = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        inputs = prepare_layer_inputs(
            self.config, self.rotary_emb, hidden_BTD, attention_mask, past_key_values, position_ids
        )
        hidden_BTD = self._add_positions(hidden_BTD, inputs.position_ids)
        choices: dict[int, Tensor] = {}  # the choices of indexers, which other layers share
        for layer in find(self, self._names["layers"]).children():
            options = {**inputs.of(layer), **kwargs}  # type: ignore[arg-type]
            options |= {"choices": choices} if layer.masked else {}
            hidden_BTD = layer(hidden_BTD, past_key_values=past_key_values, use_cache=use_cache, **options)
        hidden_BTD = find(self, self._names["final_norm"])(hidden_BTD)
        kind = BaseModelOutputWithPast if self.config.mixture is None else MoeModelOutputWithPast
        return kind(last_hidden_state=hidden_BTD, past_key_values=past_key_values)


class LaminaForCausalLM(LaminaPreTrainedModel, GenerationMixin):
    """The base model, under its name in the source (`model`, `transformer`), and the language-model head."""

    _auto_class = "AutoModelForCausalLM"
    has_head = True

    def __init__(self, config: LaminaConfig) -> None:
        super().__init__(config)
        self._head = tuple(config.block["head"].split("."))
        self._is_stateful = RECURRENT in config.layer_types
        base = LaminaModel(config)
        self.add_module(self.base_model_prefix, base)
        head = config.block["head"]
        attach(self, head, make_head(config))
        attach_tables(self, {path: scheme for path, scheme in config.level_tables.items() if path == head})
        stored = stored_modules(config.stored_formats).items()
        attach_stored(self, {path: form for path, form in stored if path == head})
        self._tied_weights_keys = {f"{config.block['head']}.weight": f"{config.block['embed']}.weight"}
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the table (V, D) of token embeddings."""
        return self.get_decoder().get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the table of token embeddings."""
        self.get_decoder().set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, a linear from D to V."""
        return find(self, self._head)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head."""
        attach(self, ".".join(self._head), new_embeddings)

    def get_decoder(self) -> LaminaModel:
        """Return the model below the head."""
        return cast(LaminaModel, getattr(self, self.base_model_prefix))

    def _get_static_cache_init_shape(self) -> tuple[int | list[int], int | list[int]] | None:
        """Return None for widths other than d, so that generate() allocates a static cache at its first update."""
        config = self.config
        if any(config.layer_sizes) or config.foreign:
            return None
        for i in range(config.num_hidden_layers):
            shape, forms = config.layer_shape(i), [config.form_of(i, role) for role in ("k", "v")]
            if any(form.latent or form.head_width(shape, spec) != config.head_dim for form, spec in forms):
                return None
        return super()._get_static_cache_init_shape()  # type: ignore[misc]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        """Compute the base model's outputs, logits (B, T or fewer, V), and the loss if there are labels (B, T).

        `logits_to_keep`: the number of last tokens, or indices of the tokens, that get logits; 0 means all.
        """
        outputs = self.get_decoder()(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        tokens = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        head_BTV = self.get_output_embeddings()(outputs.last_hidden_state[:, tokens])
        logits_BTV = finish_logits(self.config, head_BTV)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits_BTV, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        kind = CausalLMOutputWithPast if self.config.mixture is None else MoeCausalLMOutputWithPast
        return kind(
            loss=loss,
            logits=logits_BTV,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
