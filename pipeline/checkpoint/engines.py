"""The model card's table of engines that can run a checkpoint, from its forms, layer sizes and rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lamina import LayersConfig
from lamina.checking_lamina import READER, READER_VERSION
from lamina.configuration_lamina import tensor_parallel_plan
from lamina.stored_lamina import FIELD as STORED_FORMATS
from lamina.vllm_lamina import foreign_rotation, unlike_experts, vllm_lacks
from manifests.engines import FAST_BITS, FAST_LEVELS, GGUF_BLOCK, Engine
from manifests.methods import MLA
from pipeline.checkpoint.expert_codes import code_faults
from pipeline.checkpoint.nf4 import is_nf4
from pipeline.checkpoint.targets import counted, expert_widths, export_faults, is_mixture, mlp_widths
from pipeline.families.registry import checkpoint_config
from pipeline.inputs.job_inputs import Inputs
from pipeline.rounding.schemes import FIELD, TABLES

NO_CACHE = "nothing of the cache"
TABLE = {"bits": 4, "group": None}  # stands for the schemes of a planned output
NOT_SERVED = "not served"
ENGINE_WIDTH = 128  # channels of an expert in a block of fused kernels
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # numbers of a head in vLLM's kernels for CPUs


def engine_table(config: Mapping[str, Any], cache_share: float) -> str:
    """Return a Markdown table. `cache_share`: cached bytes per token in transformers, over the dense model's."""
    if config["model_type"] != "lamina":
        return _ordinary_table(config, cache_share)
    described, rounded, tables = LayersConfig(**config), bool(config.get(FIELD)), bool(config.get(TABLES))
    eager = " --enforce-eager" if unlike_experts(described) else ""
    loops = " --enforce-eager" if is_mixture(config) else ""
    rows = [
        ("engine", "how", "savings"),
        ("---", "---", "---"),
        ("transformers, 5.14 or newer", *_transformers(rounded, tables, cache_share)),
        ("vLLM with Lamina's serving package", f"`vllm serve PATH{eager}`", _own_class(described, rounded, tables)),
        ("vLLM (Transformers backend)", f"`vllm serve PATH --trust-remote-code{loops}`", _backend(described, rounded)),
    ]
    export, cut = "python -m pipeline.export PATH", _kept_by_exports(config, described)
    uniform = " and have uniform levels" if tables else ""
    if (option := _gguf_option(config)) is not None:
        keeps = rounded or (tables and not option)
        which = uniform if option else ""
        codes = f"; codes of 8 and 4 bits of matrices that are not factored{which}" if keeps else ""
        rows.append(("llama.cpp", f"`{export} --to gguf{option} FILE`", cut + codes))
    kept = f"; codes of matrices that are not factored{uniform}" if rounded else ""
    if not export_faults(config, "stock"):
        kept = "; NF4 codes, for bitsandbytes, of matrices that are not factored" if is_nf4(config) else kept
        rows.append(("any other", f"`{export} --to stock DEST`", cut + kept))
    elif not export_faults(config, "stock", multiply_out=True):
        kept = "" if code_faults(counted(config)) else kept
        rows.append(("any other", f"`{export} --to stock --multiply-out DEST`", cut + kept))
    elif not export_faults(config, "dense"):
        rows.append(("any other", f"`{export} --to dense DEST`", "nothing"))
    return _table(rows)


def _gguf_option(config: Mapping[str, Any]) -> str | None:
    """Return the option with which a GGUF file can be written, empty if it needs none; None if none can be."""
    if not export_faults(config, "gguf"):
        return ""
    return None if export_faults(config, "gguf", multiply_out=True) else " --multiply-out"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" if cells[0] != "---" else "|---|---|---|" for cells in rows)


def _ordinary_table(config: Mapping[str, Any], cache_share: float) -> str:
    """Return the table of an ordinary checkpoint, whose class engines have."""
    cache = f"{1 - cache_share:.0%} of the cache"
    # vLLM 0.32's own rotation on CPUs turns only the first head of this class.
    unrotated = """VLLM_MLA_DISABLE=1 vllm serve PATH --compilation-config '{"custom_ops": ["-rotary_embedding"]}'"""
    serve = f"`vllm serve PATH`; on a CPU `{unrotated}`, which caches whole heads"
    if (width := config.get("qk_head_dim", CPU_HEADS[0])) not in CPU_HEADS:
        serve = f"`vllm serve PATH`; on a GPU alone, as there is no kernel for heads of {width} numbers on a CPU"
    rows = [("engine", "how", "savings"), ("---", "---", "---"), ("transformers, 5.14 or newer", "as above", cache)]
    return _table([*rows, ("vLLM", serve, cache)])


def _kept_by_exports(config: Mapping[str, Any], described: LayersConfig) -> str:
    """Return the savings of an export to the source's class."""
    if is_mixture(config):
        width = min(expert_widths(described))
        return (
            f"fewer and narrower experts, of {width} channels; tensor parallelism over n devices wants multiples of "
            f"{ENGINE_WIDTH} n"
        )
    widths = mlp_widths(described)
    sizes = zip(widths, (described.layer_shape(i).intermediate_size for i in range(len(widths))), strict=True)
    return "narrower MLPs" if any(width < dense for width, dense in sizes) else "nothing"


def planned_lines(inputs: Inputs) -> list[str]:
    """Return, before a job, a line with the engines that will load its output, and one for each engine that will not,
    or that keeps less of it than transformers."""
    stays_stored = bool(inputs.source.stored_bytes()) and not inputs.manifest.quantize
    if any(method.own_class for method in inputs.methods):
        return [
            "serves transformers, vLLM (an ordinary model of the DeepSeek type)",
            "not    llama.cpp: export writes no GGUF file of an ordinary model of the DeepSeek type",
            f"less   vllm: caches whole heads on a CPU{_without_kernel(inputs)}",
        ]
    config = planned_config(inputs)
    refusals = planned_refusals(config, stays_stored)
    lines = [f"serves {', '.join(planned_engines(config, stays_stored))}"]
    lines += [f"not    {engine}: {reason}" for engine, reason in refusals.items()]
    return [*lines, *(f"less   {engine}: {why}" for engine, why in _lost(inputs).items() if engine not in refusals)]


def _without_kernel(inputs: Inputs) -> str:
    """Return which rotated dimensions of `mla` vLLM has kernels for on a CPU, unless the entry gives some of them."""
    head_dim = inputs.geometry.layers[0].attention.head_dim
    ropes = [width - head_dim for width in CPU_HEADS if head_dim < width <= 2 * head_dim]
    chosen = [entry.rope for entry in inputs.manifest.methods if isinstance(entry, MLA)]
    if not ropes or {*chosen} <= {*ropes}:
        return ""
    listed = " or ".join(map(str, ropes))
    return f", where it has kernels for heads of {head_dim} + {listed} numbers: give one of these as `rope`"


def planned_config(inputs: Inputs) -> Mapping[str, Any]:
    """Return the config of the output, as if nothing were factored; rounding is named, without its groups."""
    forms: list[Mapping[str, Any]] = [{} for _ in inputs.geometry.layers]
    config = checkpoint_config(inputs.config, forms, inputs.dtype_name)
    quantize, codes = inputs.manifest.quantize, dict[str, Any]()
    for kind in quantize.kinds_of_levels if quantize else ():
        codes |= {FIELD: {"config_groups": {}}} if kind == "uniform" else {TABLES: {"any": {**TABLE, "levels": kind}}}
    return config | codes


def planned_refusals(config: Mapping[str, Any], stays_stored: bool = False) -> dict[str, str]:
    """Map the engines of ENGINES that will not load a checkpoint with this config to the reason."""
    described, rounded, tables = _planned(config, stays_stored)
    vllm = [how(described, rounded, *more) for how, more in ((_own_class, (tables,)), (_backend, ()))]
    refusals = {}
    if all(said.startswith(NOT_SERVED) for said in vllm):
        refusals["vllm"] = vllm[0].removeprefix(f"{NOT_SERVED}: ")
    if faults := export_faults(config, "gguf", tables):
        refusals["llama.cpp"] = "; ".join(faults)
    return refusals


def _lost(inputs: Inputs) -> dict[str, str]:
    """Map engines to the parts of the output that they do not keep."""
    quantize, mlps = inputs.manifest.quantize, _mlp_roles(inputs)
    bits = {*quantize.choices} - FAST_BITS if quantize else set()
    lost: dict[Engine, list[str]] = {"vllm": [], "llama.cpp": []}
    if quantize and (bits or quantize.may_have_tables):
        slow = f"{' and '.join(map(str, sorted(bits)))} bits" if bits else f"{quantize.levels} levels"
        for engine, reasons in lost.items():
            if bits or not FAST_LEVELS[engine].issuperset(quantize.kinds_of_levels):
                reasons.append(f"has no kernel for {slow}, which are multiplied out")
    elif quantize:
        lost["vllm"].append("multiplies codes out on a CPU, except 4 bits of a model in 16 bits where it has AVX-512")
    lengths = {matrix.inputs for layer in inputs.geometry.layers for matrix in layer.matrices.values()}
    if quantize and (odd := sorted(length for length in lengths if length % GGUF_BLOCK)):
        rows = " and ".join(map(str, odd))
        lost["llama.cpp"].append(f"rows of {rows} numbers are no whole blocks of {GGUF_BLOCK}, and multiplied out")
    tasks = [task for task in inputs.tasks if task.method < len(inputs.manifest.methods)]  # others are rounded whole
    if any(role not in mlps for task in tasks for role in task.roles):
        lost["llama.cpp"].append("factors of attention are multiplied out; narrower MLPs stay")
    return {engine: "; ".join(reasons) for engine, reasons in lost.items() if reasons}


def _mlp_roles(inputs: Inputs) -> set[str]:
    return {role for layer in inputs.geometry.layers for mlp in layer.mlps for role in mlp.roles}


def _planned(config: Mapping[str, Any], stays_stored: bool) -> tuple[LayersConfig, bool, bool]:
    config = {**config, STORED_FORMATS: [{}]} if stays_stored else config
    return LayersConfig(**config), bool(config.get(FIELD)), bool(config.get(TABLES))


def planned_engines(config: Mapping[str, Any], stays_stored: bool = False) -> list[str]:
    """Return the engines that load a checkpoint with this config, judged by the known forms and rounding.

    `stays_stored`: weights may keep a storage format of the source.
    """
    described, rounded, tables = _planned(config, stays_stored)
    engines = [f"transformers{f' with {READER}' if rounded else ''}"]
    if not _own_class(described, rounded, tables).startswith(NOT_SERVED):
        engines.append("vLLM with Lamina's serving package")
    elif not _backend(described, rounded).startswith(NOT_SERVED):
        engines.append("vLLM's Transformers backend")
    if (option := _gguf_option(config)) is not None:
        engines.append(f"llama.cpp after `export --to gguf{option}`")
    return engines


def _transformers(rounded: bool, tables: bool, cache_share: float) -> tuple[str, str]:
    how = "as above, or `transformers serve --trust-remote-code`"
    parts = ["on the disk and in memory; each product looks levels up in tables, which takes time"] if tables else []
    if rounded:
        how += f", after `pip install '{READER}>={READER_VERSION}'`"
        which, whose = ("with uniform levels ", "these") if tables else ("", "all")
        parts.append(f"{which}on the disk, and in memory until the first token, which dequantizes {whose} weights")
    cache = f"{1 - cache_share:.0%} of the cache" if cache_share < 1 else NO_CACHE
    return how, "; ".join([*(parts or ["weights"]), cache])


def _not_served(described: LayersConfig) -> str:
    return f"not served: attention of {described.foreign['model_type']} inside of Lamina's model"


def _own_class(described: LayersConfig, rounded: bool, tables: bool) -> str:
    if described.foreign:
        return _not_served(described)
    shapes = [described.layer_shape(layer) for layer in range(described.num_hidden_layers)]
    if any(shape.head_dim != described.head_dim for shape in shapes):
        return f"{NOT_SERVED}: layers with different head widths"
    if lacking := vllm_lacks(described, own_class=True):
        return f"{NOT_SERVED}: {lacking}"
    if fault := foreign_rotation(described):
        return f"{NOT_SERVED}: {fault}"
    weights = "weights, if vLLM has a kernel for their bits and widths" if rounded else "weights"
    if tables:
        looked_up = "levels in tables are multiplied out when vLLM loads the model"
        weights = f"{weights}; {looked_up}" if rounded else f"on the disk; {looked_up}"
    if described.stored_formats:
        weights = "on the disk; weights in stored formats of the source are decoded when vLLM loads the model"
    if unlike_experts(described):
        weights += "; experts one after another"
    width, head_dim = described.served_value_width(), described.head_dim
    if width > head_dim:
        return f"{weights}; the cache is larger than the dense model's: heads of {width} numbers, not {head_dim}"
    share = (head_dim - width) / (2 * head_dim)
    return f"{weights}; on CUDA {share:.0%} of the cache" if share > 0 else f"{weights}; {NO_CACHE}"


def _backend(described: LayersConfig, rounded: bool) -> str:
    if described.foreign:
        return _not_served(described)
    if described.level_tables:
        return "not served: codes that stand for levels in a table"
    if lacking := vllm_lacks(described, own_class=False):
        return f"{NOT_SERVED}: {lacking}"
    heads = {"num_attention_heads", "num_key_value_heads", "head_dim"}
    if any(heads & {*sizes} for sizes in described.layer_sizes):
        return f"{NOT_SERVED}: layers with different heads"
    if described.widest_value() > described.head_dim:
        return f"{NOT_SERVED}: value heads wider than key heads"
    weights = "weights; fails if vLLM has no kernel for their bits and widths" if rounded else "weights"
    return f"{weights}; {NO_CACHE}" + ("" if tensor_parallel_plan(described) else "; one device")
