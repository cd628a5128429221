# mypy: allow-untyped-calls
# (transformers ships types, but its base classes' hooks carry no annotations)
"""The description of decoder layers by data, `block` and `forms`, with the checks of its fields.

Imports only transformers' configurations: its modelling code takes seconds to import.
"""

import copy
from dataclasses import field
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig

from .block_lamina import (
    ATTENTION,
    BLOCK_DEFAULTS,
    DEFAULT_BLOCK,
    FULL,
    INDEXED,
    LAYER_FIELDS,
    LAYER_TYPES,
    MLP_ROLES,
    SLIDING,
    LayerShape,
    check_block,
    has_part,
    modules_of_type,
    sizes_of_layer,
    value_faults,
)
from .foreign_lamina import (
    CHUNK,
    check_foreign,
    check_value_ranks,
    foreign_cache_numbers,
    foreign_layer,
    is_hybrid,
    narrowed,
)
from .form_lamina import VALUE_ROLES, Form, FormSpec
from .forms_lamina import FORMS
from .mixture_lamina import (
    DEFAULTS,
    ROUTER,
    LayerMixture,
    block_modules,
    check_mixture,
    expert_blocks,
    has_biases,
    layer_modules,
    mixture_of,
    split_role,
    with_experts,
)

LISTS = ("forms", "layer_types", "layer_sizes", "unused_tensors", "stored_formats")
BLOCK_KINDS: dict[str, Any] = {
    **dict.fromkeys(("embed", "layers", "final_norm", "head"), str),
    "modules": dict,
    "biases": list | tuple | set | frozenset,
    "parallel": bool,
    "positions": dict | None,
    "foreign": str | dict | None,
    "alone": dict | None,
    "rotary_layers": list | tuple | str | None,
}
VALUE_MULTIPLE = 16  # kernels of engines need widths of value heads that are multiples of this


class LayersConfig(PreTrainedConfig):
    """The layers of a model: transformers' usual fields, and these.

    Attributes:
        block: a decoder layer of the source family, see `block_lamina`.
        forms: for each layer, how each role is stored; a role without an entry is dense.
        layer_types: null: sliding in all layers if `sliding_window` is set, else full.
        layer_sizes: empty, or for each layer the LAYER_FIELDS in which it differs from the model.
        mixture: null, or the mixtures of experts of the layers, see `mixture_lamina`.
        core_format: layout in memory of sparse Tucker cores, "dense" or "csr"; may be set at each loading.
        unused_tensors: stored tensors of the source that the model does not use.
        wrapper: config.json of the multimodal model around this text decoder, see `wrapper_lamina`.
        foreign: fields of the source's config that foreign attention reads, see `foreign_lamina`.
        level_tables: modules whose codes are indices of a table of levels, by path: `bits`, `group`, the kind of
            levels.
        stored_formats: modules that keep a storage format of the source, with that format, see `stored_lamina`.
        source_dtypes: dtypes of the source's factored tensors that differ from `dtype`, by name; exports use them.

    Raises ValueError for a block that cannot be built and for forms that do not fit it, naming layer and role.
    """

    model_type = "lamina"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    ignore_keys_at_rope_validation = {"partial_rotary_factor", "mrope_section", "mrope_interleaved", "alpha"}  # noqa: RUF012 - the base class declares the type

    source_model_type: str | None = None
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 2048
    rope_parameters: dict[str, Any] | None = None
    norm_eps: float = 1e-5
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    sliding_window: int | None = None
    layer_types: list[str] = field(default_factory=list)
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    core_format: str = "dense"
    block: dict[str, Any] = field(default_factory=dict)
    forms: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    layer_sizes: list[dict[str, int]] = field(default_factory=list)
    mixture: dict[str, Any] | None = None
    unused_tensors: list[str] = field(default_factory=list)
    wrapper: dict[str, Any] = field(default_factory=dict)
    foreign: dict[str, Any] = field(default_factory=dict)
    source_dtypes: dict[str, str] = field(default_factory=dict)
    level_tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    stored_formats: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self, **kwargs: Any) -> None:
        _check_types(self)
        self.block = {**BLOCK_DEFAULTS, **copy.deepcopy(self.block or DEFAULT_BLOCK)}
        self.forms = self.forms or [{} for _ in range(self.num_hidden_layers)]
        # Always filled in, because transformers' mask and cache helpers read the list if the attribute exists.
        layer_type = FULL if self.sliding_window is None else SLIDING
        self.layer_types = self.layer_types or [layer_type] * self.num_hidden_layers
        super().__post_init__(**kwargs)
        check_block(self.block)
        if self.mixture is not None:
            check_mixture(self.mixture, self.num_hidden_layers)
            self.mixture = {**DEFAULTS, **self.mixture}
        check_foreign(self.block, self.foreign)
        _check_fields(self)
        _check_forms(self)
        if self.block["rotary"] is None:
            self.rope_parameters = None  # the base class filled in a default

    def layer_mixture(self, layer: int) -> LayerMixture | None:
        """Return the mixture of a layer, with the stored number of experts; None for a layer with a dense MLP.

        Raises ValueError if its form stores an impossible number of experts.
        """
        mixture, forms = vars(self)["mixture"], vars(self)["forms"][layer]
        sizes = mixture_of(mixture, layer)
        spec = forms.get(ROUTER) if isinstance(forms, dict) else None
        if sizes is None or not isinstance(spec, dict):
            return sizes
        try:
            return with_experts(mixture, sizes, spec.get("rank"))
        except ValueError as error:
            raise ValueError(f"layer {layer}, {ROUTER}: {error}") from error

    def layer_modules(self, layer: int) -> dict[str, str]:
        """Map all roles of a layer to their module paths inside it."""
        modules = modules_of_type(self.block, self.layer_types[layer])
        return layer_modules(modules, self.mixture, self.layer_mixture(layer))

    def layer_shape(self, layer: int, block: str = "") -> LayerShape:
        """Return the sizes and modules of a layer; `block` names an expert, whose roles are `gate`, `up` and `down`."""
        fields = vars(self)  # transformers' access to an attribute takes microseconds
        sizes = sizes_of_layer(fields, layer)
        block_fields, mixtures = fields["block"], fields["mixture"]
        modules = modules_of_type(block_fields, fields["layer_types"][layer])
        biases = frozenset(block_fields["biases"])
        mixture = None if mixtures is None else self.layer_mixture(layer)
        if mixture is not None:
            modules = {role: path for role, path in modules.items() if role not in MLP_ROLES}
            if block:
                has_bias = has_biases(mixtures, block)
                modules, biases = block_modules(mixtures, block), frozenset(MLP_ROLES if has_bias else ())
                sizes["intermediate_size"] = mixture.width_of(block)
        more = {name: fields[name] for name in ("core_format", "foreign")}
        return LayerShape(fields["hidden_size"], **sizes, modules=modules, biases=biases, **more)

    def mlp_blocks(self, layer: int) -> list[str]:
        """Return the names of a layer's MLPs: the experts, or one without a name."""
        mixture = self.layer_mixture(layer)
        return [""] if mixture is None else [*expert_blocks(mixture)]

    @property
    def attention_chunk_size(self) -> int | None:
        """Return the number of tokens in a chunk, for transformers' masks and caches; None without chunks."""
        return self.foreign.get(CHUNK)

    def attention_scale(self, layer: int) -> float:
        """Return the factor of a layer's attention scores."""
        scale, scalar = self.block["attention_scale"], self.block["query_scalar"]
        return float(scale if scale is not None else (scalar or self.layer_shape(layer).head_dim) ** -0.5)

    def rotates(self, layer: int) -> bool:
        """Return True if a layer rotates its queries and keys."""
        chosen = self.block["rotary_layers"]
        if chosen is None:
            return bool(self.foreign and not is_hybrid(self.foreign)) or self.block["rotary"] is not None
        return self.layer_types[layer] == chosen if isinstance(chosen, str) else bool(chosen[layer])

    def rope_of(self, layer_type: str) -> dict[str, Any]:
        """Return the rope parameters of a layer type: its own, or those of all layers."""
        rope: dict[str, Any] = self.rope_parameters or {}
        return rope[layer_type] if self.has_own_ropes() else rope

    def has_own_ropes(self) -> bool:
        """Return True if `rope_parameters` holds parameters for each layer type."""
        rope = self.rope_parameters or {}
        return bool(rope) and {*rope} <= {*LAYER_TYPES}

    def form_of(self, layer: int, role: str) -> tuple[Form, FormSpec]:
        """Return the form of a role in a layer, and its entry in `forms` (by default dense)."""
        spec = vars(self)["forms"][layer].get(role, {"form": "dense"})
        return FORMS[spec["form"]], spec

    def cache_numbers(self, layer: int) -> int:
        """Return the numbers that a layer caches per token, keys and values together."""
        if not has_part(self.block, self.layer_types[layer], ATTENTION):
            return 0
        if is_hybrid(self.foreign) and (own_type := self.layer_types[layer]) in self.block["foreign"]:
            return foreign_layer(self.foreign, own_type).cache_numbers({**vars(self), **self.foreign})
        if self.foreign and not is_hybrid(self.foreign):
            return foreign_cache_numbers(narrowed(self.foreign, self.forms[layer]))
        forms = ((role, *self.form_of(layer, role)) for role in ("k", "v"))
        return sum(form.cache_numbers(self.layer_shape(layer), role, spec) for role, form, spec in forms)

    def widest_value(self) -> int:
        """Return the width of the widest value head of any layer."""
        forms = (self.form_of(layer, "v") for layer in range(self.num_hidden_layers))
        return max(form.head_width(self.layer_shape(layer), spec) for layer, (form, spec) in enumerate(forms))

    def served_value_width(self) -> int:
        """Return the width of value heads in an engine with one width for all layers, and kernels for some widths."""
        widest, head_dim = self.widest_value(), self.head_dim
        width = -(-widest // VALUE_MULTIPLE) * VALUE_MULTIPLE
        return width if widest > head_dim else min(width, head_dim)

    def latent_key_layers(self) -> dict[str, int]:
        """Return the first layer with latent keys of each layer type that has one."""
        layers = (i for i in range(self.num_hidden_layers) if self.form_of(i, "k")[0].latent)
        return {self.layer_types[i]: i for i in reversed([*layers])}


def _check_types(config: LayersConfig) -> None:
    """Check the fields whose damage would cause an unrelated error or other logits."""
    if faults := value_faults(vars(config)):
        raise ValueError(f"config.json: {'; '.join(faults)}")
    dicts = ("block", "foreign", "level_tables", "source_dtypes", "wrapper")
    for name, kind in {**dict.fromkeys(dicts, dict), **dict.fromkeys(LISTS, list)}.items():
        if not isinstance(value := getattr(config, name), kind | None):
            raise ValueError(f"config.json: {name} is {value!r}, not a {kind.__name__}")
    for name, value in (config.block or {}).items():
        if name in BLOCK_KINDS and not isinstance(value, BLOCK_KINDS[name]):
            raise ValueError(f"config.json: block.{name} is {value!r}, which is not allowed")
    if config.forms and len(config.forms) != config.num_hidden_layers:
        raise ValueError(f"forms has {len(config.forms)} entries for {config.num_hidden_layers} layers")


def _check_fields(config: LayersConfig) -> None:
    if config.core_format not in ("dense", "csr"):
        raise ValueError(f"core_format is {config.core_format!r}, allowed are 'dense' and 'csr'")
    layer_types = config.layer_types
    known = (*LAYER_TYPES, *(config.block["foreign"] if is_hybrid(config.foreign) else ()))
    known += tuple(config.block["alone"] or ())
    if len(layer_types) != config.num_hidden_layers or not {*layer_types} <= {*known}:
        needed = f"{config.num_hidden_layers} of {', '.join(dict.fromkeys(known))}"
        raise ValueError(f"layer_types must be {needed}, not {layer_types}")
    sharing = [is_hybrid(config.foreign) and foreign_layer(config.foreign, each).shares for each in layer_types]
    if True in sharing and INDEXED not in layer_types[: sharing.index(True)]:
        raise ValueError("layer_types: the first layer has no indexer, and there is no earlier one to share")
    if SLIDING in layer_types and config.sliding_window is None:
        raise ValueError("layer_types has sliding_attention, but sliding_window is null")
    _check_layer_sizes(config)
    _check_rotation(config)


def _check_rotation(config: LayersConfig) -> None:
    chosen, count = config.block["rotary_layers"], config.num_hidden_layers
    if isinstance(chosen, str) and chosen not in LAYER_TYPES:
        raise ValueError(f"block.rotary_layers is {chosen!r}, not one of {', '.join(LAYER_TYPES)}")
    if isinstance(chosen, list | tuple) and (len(chosen) != count or not {*chosen} <= {0, 1}):
        raise ValueError(f"block.rotary_layers is {chosen!r}, not 1 or 0 for each of {count} layers")
    if config.has_own_ropes() and (missing := sorted({*config.layer_types} - {*(config.rope_parameters or {})})):
        raise ValueError(f"rope_parameters has none for {', '.join(missing)}")


def _check_layer_sizes(config: LayersConfig) -> None:
    for layer, sizes in enumerate(config.layer_sizes):
        if unknown := sorted({*sizes} - {*LAYER_FIELDS}):
            raise ValueError(f"layer_sizes: layer {layer} has unknown {', '.join(unknown)}; a newer lamina may know it")
        if config.block["rotary"] and sizes.get("head_dim", config.head_dim) != config.head_dim:
            raise ValueError(
                f"layer_sizes: layer {layer} has head_dim {sizes['head_dim']}, the model {config.head_dim}; rotary "
                "angles are those of one width"
            )


def _check_forms(config: LayersConfig) -> None:
    for layer_idx, forms in enumerate(config.forms):
        modules = config.layer_modules(layer_idx)
        if not isinstance(forms, dict):
            raise ValueError(f"layer {layer_idx}: forms are an object with an entry for a role, not {forms!r}")
        for role, spec in forms.items():
            where = f"layer {layer_idx}, {role}"
            if not isinstance(spec, dict):
                raise ValueError(f"{where}: the form must be an object, not {spec!r}")
            form = FORMS.get(str(spec.get("form")))
            if role not in modules:
                raise ValueError(f"{where}: block.modules has no such role")
            block, local = split_role(role)
            shape = config.layer_shape(layer_idx, block)
            if form is None:
                raise ValueError(f"{where}: unknown form {spec.get('form')!r}, this version knows {', '.join(FORMS)}")
            if local not in form.roles:
                raise ValueError(f"{where}: {spec['form']} is for {', '.join(form.roles)}")
            if extra := {*spec} - {"form", *form.fields}:
                raise ValueError(f"{where}: {spec['form']} has no {', '.join(sorted(extra))}")
            if problem := form.problem(shape, local, spec):
                raise ValueError(f"{where}: {spec['form']} {problem}")
            for partner, needed in form.partners(shape, local, spec).items():
                other = f"{block}.{partner}" if block else partner
                if forms.get(other) != needed:
                    text = "the same" if needed == spec else needed
                    raise ValueError(f"{where}: {spec} needs {text} on {other}, which has {forms.get(other, 'none')}")
        try:
            check_value_ranks(forms)
        except ValueError as error:
            raise ValueError(f"layer {layer_idx}: {error}") from error
        _check_widths(config, layer_idx, "", "value heads of", "head_width", VALUE_ROLES)
        for block in config.mlp_blocks(layer_idx):
            _check_widths(config, layer_idx, block, "channels:", "inner_width", MLP_ROLES)


def _check_widths(
    config: LayersConfig, layer_idx: int, block: str, what: str, method: str, roles: tuple[str, ...]
) -> None:
    """Check that v and o agree on the width of a value head, or gate, up and down on the channels of an MLP."""
    shape = config.layer_shape(layer_idx, block)
    present = {role: f"{block}.{role}" if block else role for role in roles if role in shape.modules}
    forms = {role: config.form_of(layer_idx, full) for role, full in present.items()}
    widths = {present[role]: getattr(form, method)(shape, spec) for role, (form, spec) in forms.items()}
    if len({*widths.values()}) > 1:
        stored = {present[role]: spec["form"] for role, (_, spec) in forms.items()}
        listed = ", ".join(f"{role} {width} ({stored[role]})" for role, width in widths.items())
        raise ValueError(f"layer {layer_idx}: different {what} {listed}")
