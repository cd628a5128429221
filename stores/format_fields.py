"""Every field of a source's `quantization_config`, by method, and its treatment.

A field is *kept* (it says how weights are decoded), *fixed* (only some of its values are read) or *unread* (it changes
no weight). Any other field that holds something is refused by name. A test compares the tables with the config classes
of transformers and compressed-tensors. docs/formats.md#stored-formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from manifests.errors import InputError
from stores.checkpoint_files import raise_faults

FIELD = "quantization_config"  # of a source's config.json
ACTIVATIONS = "rounding of activations by an engine; Lamina computes them in the model's dtype"
LOADING = "how a library loads or runs the model"
METHOD = "how the codes were computed"
TENSORS = "the tensors show which weights are codes"
WRITTEN = "facts about the files"


@dataclass(frozen=True)
class FieldTable:
    """The treatment of the fields of one JSON object.

    Attributes:
        kept: fields that `stores.formats` reads.
        fixed: field -> the values that are read, and the meaning of others. An empty field is always accepted.
        unread: field -> the reason why its value changes no weight.
    """

    kept: tuple[str, ...]
    fixed: Mapping[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """All fields of the table."""
        return {*self.kept, *self.fixed, *self.unread}

    def faults(self, values: Mapping[str, Any], where: str) -> Iterator[str]:
        """Yield a fault for each field of `values` that is not read. `where`: the place of the object, or empty."""
        for name, value in values.items():
            at = f"{where}.{name}" if where else name
            if name in self.kept or name in self.unread or is_empty(value):
                continue
            if name not in self.fixed:
                yield (
                    f"{at}: {value!r:.80}: this version of Lamina does not know the field, which may change the "
                    "weights; a newer Lamina may know it"
                )
                continue
            known, meaning = self.fixed[name]
            if value not in known:
                only = f"only {' or '.join(map(repr, known))} is supported" if known else "not supported"
                yield f"{at}: {value!r:.80}: {meaning}; {only}"


def is_empty(value: Any) -> bool:
    """Return True for null, an empty string, and lists and objects of such values alone."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
        elif each is not None and each != "":
            return False
    return True


def check_format_fields(fields: FieldTable, values: Any, where: str = "") -> Mapping[str, Any]:
    """Return an object of the config if all of its fields are read. Raises InputError with every fault."""
    if not isinstance(values, Mapping):
        raise InputError(f"config.json: {FIELD}: {where}: {values!r:.80} is not an object with fields")
    raise_faults(f"config.json: {FIELD}: weights that cannot be read as it says", [*fields.faults(values, where)])
    return values


_FP8_UNREAD = {
    "fmt": "the dtype of the codes shows it",
    "scale_fmt": "the dtype of the scales shows it",
    "activation_scheme": ACTIVATIONS,
    "kv_cache_scheme": ACTIVATIONS,
    "kv_cache_quant_targets": ACTIVATIONS,
    "dequantize": LOADING,
    **dict.fromkeys(("modules_to_not_convert", "modules_to_convert", "ignored_layers"), TENSORS),
}
FP8 = FieldTable(
    ("quant_method", "weight_block_size"),
    {"expert_dtype": (("fp8",), "experts in codes of four bits")},
    _FP8_UNREAD,
)

MXFP4 = FieldTable(("quant_method",), unread={"modules_to_not_convert": TENSORS, "dequantize": LOADING})

_GPTQ_METHOD = (
    "act_group_aware", "amp", "autoround_version", "block_name_to_quantize", "cache_block_outputs",
    "damp_auto_increment", "damp_percent", "dataset", "enable_minmax_tuning", "enable_norm_bias_tuning",
    "enable_quanted_input", "gptaq", "gradient_accumulate_steps", "hyb_act", "iters", "low_gpu_mem_usage", "lr",
    "minmax_lr", "model_free", "module_name_preceding_first_block", "mse", "nsamples", "seqlen", "static_groups",
    "to_quant_block_names", "true_sequential", "v2", "v2_alpha", "tokenizer", "pad_token_id",
)  # fmt: skip
_GPTQ_LOADING = (
    "backend", "batch_size", "device", "disable_exllama", "exllama_config", "max_input_length", "model_seqlen",
    "pack_impl", "parallel_packing", "use_cuda_fp16", "use_exllama",
)  # fmt: skip
_GPTQ_WRITTEN = ("meta", "model_file_base_name", "model_name_or_path")
_PACKED_UNREAD = {
    **dict.fromkeys(_GPTQ_METHOD, METHOD),
    **dict.fromkeys(_GPTQ_LOADING, LOADING),
    **dict.fromkeys(_GPTQ_WRITTEN, WRITTEN),
    **dict.fromkeys(("lm_head", "modules_in_block_to_quantize", "modules_to_not_convert"), TENSORS),
    "sym": "the stored zeros show it",
    "scale_dtype": "the dtype of the scales shows it",
}
_PACKED_FIXED = {
    "adapter": ((), "a low-rank adapter is added to the codes while the model runs"),
    "rotation": ((), "the model rotates hidden states while it runs"),
    "extra_config": ((), "some modules are stored in another way"),
    "pack_dtype": (("int32", "torch.int32"), "words of another size"),
    "is_marlin_format": ((False,), "codes in the order of a GPU kernel"),
    "data_type": (("int",), "codes that are not integers"),
}
GPTQ = FieldTable(
    ("quant_method", "bits", "group_size", "desc_act", "checkpoint_format", "format", "dynamic"),
    _PACKED_FIXED,
    _PACKED_UNREAD,
)
GPTQ_MODULE = FieldTable(("bits", "group_size", "desc_act"), _PACKED_FIXED, _PACKED_UNREAD)  # an entry of `dynamic`

AWQ = FieldTable(
    ("quant_method", "bits", "group_size", "version", "format"),
    {
        **_PACKED_FIXED,
        "zero_point": ((True,), "codes without zeros"),
        "desc_act": ((False,), "columns in another order"),
        "dynamic": ((), "some modules are stored in another way"),
        "checkpoint_format": (("gemm",), "another layout of the codes"),
    },
    {**_PACKED_UNREAD, "do_fuse": LOADING, "fuse_max_seq_len": LOADING, "modules_to_fuse": LOADING},
)

COMPRESSED = FieldTable(
    ("quant_method", "config_groups", "format", "ignore", "sparsity_config"),
    {
        "transform_config": ((), "inputs or outputs of modules are transformed (rotated) while the model runs"),
        "moe_sparsity_config": ((), "experts are removed or replaced"),
    },
    {
        "quantization_status": "the tensors show it",
        "kv_cache_scheme": ACTIVATIONS,
        "global_compression_ratio": WRITTEN,
        "version": WRITTEN,
        **dict.fromkeys(("run_compressed", "dequantize", "use_optimized_inference"), LOADING),
    },
)
SPARSITY = FieldTable(  # of `sparsity_config`
    (),
    {"format": (("dense",), "weights without their zeros")},
    dict.fromkeys(
        ("targets", "ignore", "global_sparsity", "sparsity_structure", "registry_requires_subclass", "sparsity_type"),
        "zeros are stored as other numbers",
    ),
)
SCHEME = FieldTable(  # a group of `config_groups`
    ("targets", "weights", "format"), unread={"input_activations": ACTIVATIONS, "output_activations": ACTIVATIONS}
)
ARGUMENTS = FieldTable(  # `weights` of a group
    ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure"),
    {
        "dynamic": ((False,), "weights are rounded while the model runs"),
        "actorder": ((False, "weight", "static"), "columns in another order"),
    },
    {
        "observer": METHOD,
        "observer_kwargs": METHOD,
        "scale_dtype": "the dtype of the scales shows it",
        "zp_dtype": "the dtype of the zeros shows it",
    },
)
