"""Replaces `budget.fit` by the bytes that an engine leaves for weights. docs/plan.md#fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from manifests.engines import FAST_BITS, FAST_LEVELS
from manifests.errors import InputError
from manifests.fit import Fit, memory_text
from manifests.methods import FlatLLM, LeSTD, OfExperts
from manifests.schema import Budget, Manifest
from pipeline.cost_model.bounds import added_head
from pipeline.cost_model.serving_memory import ServingMemory, serving_memory
from pipeline.families.geometry import Geometry
from pipeline.methods.registry import build_methods

DIGITS = 6  # of the share of the bytes
LEAST_SHARE = 0.16  # of the layers' bytes; no size below was measured: docs/results.md#levels
ADVICE = "a shorter context, fewer sequences, fewer bits, or a method for the cache"
SEARCHED = 12  # bisections for the smallest share that the methods reach

Check = Callable[[Manifest], object]  # raises InputError if a budget is out of reach


class DoesNotFitError(InputError):
    """The weights do not fit beside the memory that serving takes. `least_bytes`: of weights, at the smallest size.

    `asked_by`: the option or field with the memory. `advice`: what the user may change.
    """

    def __init__(
        self, memory: ServingMemory, least_bytes: float, asked_by: str = "budget.fit:", advice: str = ADVICE
    ) -> None:
        super().__init__(memory, least_bytes, asked_by, advice)
        self.memory, self.least_bytes = memory, least_bytes
        self._words = asked_by, advice

    @property
    def needed_bytes(self) -> int:
        """The smallest memory that would do."""
        return self.memory.needed(self.least_bytes)

    def __str__(self) -> str:
        return _message(self.memory, self.least_bytes, *self._words)


def resolve_fit(
    manifest: Manifest, config: Mapping[str, Any], geometry: Geometry, source_bytes: int, check: Check
) -> tuple[Manifest, ServingMemory | None]:
    """Return the manifest with `budget.bytes` in place of `budget.fit`, and the memory that serving takes beside the
    weights; other manifests unchanged.

    `check`: raises InputError for a manifest whose budget its methods do not reach.

    Raises InputError for forms that the engine does not keep in memory, and DoesNotFitError.
    """
    fit = manifest.budget.fit if manifest.budget else None
    if fit is None:
        return manifest, None
    check_context(fit, config, "budget.fit.context:")
    if faults := [*_unheld(fit, manifest, geometry)]:
        raise InputError("budget.fit: " + "; ".join(faults))
    check(_with_bytes(manifest, 1.0))  # finds faults other than the size
    memory = serving_memory(fit, config, geometry, build_methods(manifest), manifest.quantize)
    outside, scope_bytes = _outside(manifest, geometry, source_bytes), _scope_bytes(manifest, geometry)
    share = _share(memory.weight_bytes - outside, scope_bytes)
    reaches = partial(_reaches, manifest, check)
    if share > 0 and reaches(share):
        return _with_bytes(manifest, share), memory
    least = outside + _least_share(share, reaches) * scope_bytes
    raise DoesNotFitError(memory, least)


def fit_remarks(serving: ServingMemory | None, geometry: Geometry) -> tuple[str, ...]:
    """Return a remark where the memory leaves hardly anything of the model, or all of it."""
    if serving is None:
        return ()
    if serving.weight_bytes >= geometry.model_bytes():
        return ("budget.fit: the model fits as it is; nothing needs to be compressed",)
    if serving.weight_bytes >= least_measured(geometry):
        return ()
    return (
        f"budget.fit: {shown_bytes(max(0, serving.weight_bytes))} of {shown_bytes(geometry.model_bytes())} are left "
        f"for weights; no model with less than {LEAST_SHARE:g} of its layers' bytes was measured: expect a large loss",
    )


def least_measured(geometry: Geometry) -> int:
    """Return the bytes of a model with the smallest layers whose loss was measured."""
    return math.ceil(geometry.model_bytes() - (1 - LEAST_SHARE) * geometry.decoder_bytes())


def check_context(fit: Fit, config: Mapping[str, Any], asked_by: str) -> None:
    """Raise InputError if the model reads fewer tokens than the context. `asked_by`: the option or field with it."""
    if fit.context > (limit := config["max_position_embeddings"]):
        raise InputError(
            f"{asked_by} {fit.context} is longer than the model's max_position_embeddings {limit}; ask for at most that"
        )


def _unheld(fit: Fit, manifest: Manifest, geometry: Geometry) -> Iterator[str]:
    """Yield the settings whose results the engine does not hold as small as they are stored."""
    engine = {"transformers": _unheld_by_transformers, "vllm": _unheld_by_vllm, "llama.cpp": _unheld_by_llama_cpp}
    yield from engine[fit.engine](fit, manifest, geometry)
    stored = geometry.outer_bytes or any(layer.own_bytes for layer in geometry.layers)
    if stored and manifest.quantize is None and fit.engine != "transformers":
        yield f"{fit.engine} decodes the source's storage format when it loads weights; give quantize"
    for position, entry in enumerate(manifest.methods):
        if isinstance(entry, LeSTD) and entry.prune:
            yield f"methods.{position}: sparse cores of lestd are dense in memory; give prune: false"


def _unheld_by_transformers(fit: Fit, manifest: Manifest, geometry: Geometry) -> Iterator[str]:
    if manifest.quantize is not None and "uniform" in manifest.quantize.kinds_of_levels:
        yield (
            "transformers multiplies codes of uniform levels out at the first token; give quantize.levels: normal, "
            "which stay packed"
        )


def _unheld_by_vllm(fit: Fit, manifest: Manifest, geometry: Geometry) -> Iterator[str]:
    quantize, on_cpu = manifest.quantize, fit.device == "cpu"
    kernels = {4} if on_cpu else FAST_BITS
    if quantize is not None and quantize.may_have_tables:
        yield "vLLM multiplies codes of tables of levels out when it loads them; give quantize.levels: uniform"
    if quantize is not None and ({*quantize.choices} - kernels or (on_cpu and geometry.bits != 16)):
        have = " or ".join(map(str, sorted(kernels)))
        where = " on a CPU, of models in 16 bits" if on_cpu else ""
        yield f"vLLM has kernels for quantize.bits: {have}{where}, and multiplies other codes out"
    for position, method in enumerate(build_methods(manifest)):
        if on_cpu and method.own_class:
            yield f"methods.{position}: vLLM caches whole heads of {method.name} on a CPU; use device: gpu"


def _unheld_by_llama_cpp(fit: Fit, manifest: Manifest, geometry: Geometry) -> Iterator[str]:
    quantize = manifest.quantize
    if quantize is not None and (
        {*quantize.kinds_of_levels} - FAST_LEVELS["llama.cpp"] or {*quantize.choices} - FAST_BITS
    ):
        yield (
            "a GGUF file keeps codes of 8 or 4 bits with uniform or iq4_nl levels alone, and has others multiplied "
            "out; change quantize"
        )
    for position, entry in enumerate(manifest.methods):
        narrow = isinstance(entry, OfExperts) or (isinstance(entry, FlatLLM) and not entry.attention)
        if not narrow and getattr(entry, "shapes", "free") != "stock":
            yield (
                f"methods.{position}: factors of {entry.method} are multiplied out in a GGUF file; use flat_llm with "
                "attention: false, whose MLPs are narrower"
            )


def _outside(manifest: Manifest, geometry: Geometry, source_bytes: int) -> int:
    """Return the bytes of OUTPUT's tensors outside of the budget's scope."""
    beyond = max(0, source_bytes - geometry.model_bytes()) + added_head(build_methods(manifest), geometry).num_bytes
    return beyond + geometry.model_bytes() - _scope_bytes(manifest, geometry)


def _scope(manifest: Manifest) -> str:
    assert manifest.budget is not None
    return "experts" if manifest.budget.scope == "experts" else "model"


def _scope_bytes(manifest: Manifest, geometry: Geometry) -> int:
    return geometry.scope_bytes(_scope(manifest))


def _share(num_bytes: int, scope_bytes: int) -> float:
    """Return the share of the scope's bytes, rounded down, and at most 1."""
    steps = 10.0**DIGITS
    return min(1.0, math.floor(num_bytes / max(1, scope_bytes) * steps) / steps)


def _with_bytes(manifest: Manifest, share: float) -> Manifest:
    """Return the manifest with a budget of this share of the bytes."""
    assert manifest.budget is not None
    fields: dict[str, Any] = {"bytes": share, "scope": _scope(manifest), "multiple": manifest.budget.multiple}
    return manifest.model_copy(update={"budget": Budget(**fields)})


def _reaches(manifest: Manifest, check: Check, share: float) -> bool:
    try:
        check(_with_bytes(manifest, share))
    except InputError:
        return False
    return True


def _least_share(low: float, reaches: Callable[[float], bool]) -> float:
    """Return the smallest share above `low` that the methods reach, by bisection."""
    low, high = max(0.0, low), 1.0
    for _ in range(SEARCHED):
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def _message(memory: ServingMemory, least: float, asked_by: str, advice: str) -> str:
    fit, asked = memory.fit, memory_text(memory.fit.memory)
    unit = " bytes" if asked.isdecimal() else ""
    sequences = f"{fit.sequences} sequence{'s' if fit.sequences > 1 else ''} of {fit.context:,} tokens"
    share = f" of which it takes {memory.engine.share:.0%}," if memory.engine.share < 1 else ""
    smallest, copied = shown_bytes(memory.needed(least), up=True), memory.copied_bytes(least)
    copies = f", its second copy of their codes {shown_bytes(copied)}" if copied else ""
    return (
        f"{asked_by} {asked}{unit} are too little for {fit.engine} on a {fit.device.upper()},{share} with "
        f"{sequences}: weights take at least {shown_bytes(least)} with these methods{copies}, the cache "
        f"{shown_bytes(memory.cache_bytes)}, activations {shown_bytes(memory.activation_bytes)}, the engine itself "
        f"{shown_bytes(memory.engine_bytes)}; the smallest memory that would do: {smallest}; or give {advice}"
    )


def shown_bytes(num_bytes: float, up: bool = False) -> str:
    """Return an amount in GB or MB, rounded; `up`: rounded up."""
    unit, size = ("GB", 1e9) if num_bytes >= 1e8 else ("MB", 1e6)
    digits = 2 if num_bytes < 1e10 else 1
    scaled = num_bytes / size * 10**digits
    return f"{(math.ceil(scaled) if up else round(scaled)) / 10**digits:,.{digits}f} {unit}"
