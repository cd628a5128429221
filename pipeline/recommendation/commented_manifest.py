"""Writes a recommended manifest in YAML, with a comment where a user may want to change something."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manifests.calibration import Text
from manifests.fit import memory_text
from manifests.quantize import CORRECTED_TOKENS
from manifests.schema import MANIFEST_VERSION
from pipeline.recommendation.recipes import Recipe
from pipeline.recommendation.settings import ACTIVATION_GB, Goal, Settings

PLAIN = re.compile(r"[A-Za-z_/][\w./-]*", re.ASCII)  # text that YAML reads as text without quotes, in a list as well
WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
KERNELS = "bits for which the engine has kernels; `auto` would choose 3, too"
GOALS = {
    "keep": "share of the decoder's numbers that stays",
    "bytes": "share of the decoder's bytes that stays; ranks and bits are chosen together",
    "fit": "memory of the device that serves; the bytes of the weights follow from it",
    "max_loss": "nats per token of divergence from the dense model; the job finds the smallest size within it",
}


@dataclass(frozen=True)
class JobPlaces:
    """The addresses of a job's files, and its text."""

    model: str
    text: Text
    output: str
    run_dir: str


def commented_manifest(command: str, places: JobPlaces, goal: Goal, settings: Settings) -> str:
    """Return the manifest as text. `command`: the command line that it comes from."""
    return "".join(f"{line}\n" for line in _lines(command, places, goal, settings))


def quoted(text: str) -> str:
    """Return a text, in quotes if YAML needs them to read it back, also inside of brackets."""
    plain = PLAIN.fullmatch(text) and text.lower() not in WORDS
    return text if plain else json.dumps(text, ensure_ascii=False)


def _lines(command: str, places: JobPlaces, goal: Goal, settings: Settings) -> Iterator[str]:
    use = settings.text
    files = ", ".join(_text_fields(places.text))
    yield f"# Written by: {' '.join(command.split())}"
    yield f"version: {MANIFEST_VERSION}"
    yield f"model: {{source: {quoted(places.model)}}}"
    yield f"output: {quoted(places.output)}"
    yield f"run_dir: {quoted(places.run_dir)}  # ledger and statistics, from which an interrupted job resumes"
    yield f"budget: {{{goal.field}: {_limit(goal)}}}  # {GOALS[goal.field]}"
    if goal.recipe is not None:
        yield from _recipe(goal.recipe, goal, use.samples * use.length)
    elif goal.field == "bytes":
        reader = "transformers loads these with compressed-tensors"
        yield f"{_quantize(goal.bits, goal.levels, goal.unrounded)}  # {reader if goal.bits == 'auto' else KERNELS}"
    if goal.recipe is None:
        yield from _method(goal)
    yield "calibration:"
    yield "  # Give text like the text that the model will serve: compression first removes what this text never uses."
    yield f"  text: {{{files}, end: {use.end:g}}}"
    yield f"  samples: {use.samples}"
    yield f"  sequence_length: {use.length}"
    yield f"  shards: {settings.shards}  # parts of the samples, which the workers share"
    yield f"  micro_batch: {settings.micro_batch}  # samples computed at once"
    yield "evaluation:"
    yield "  perplexity:"
    yield "    # The rest of the text, which calibration does not use."
    yield f"    text: {{{files}, begin: {use.end:g}}}"
    yield f"    window: {use.length}"
    yield "    dense: true  # the dense model's perplexity, too"
    yield f"workers: {{{_workers(settings)}}}  # cpus: threads of each; `max` changes no byte of the output"


def _limit(goal: Goal) -> str:
    """Return the value of the budget's field."""
    if goal.fit is None:
        return f"{goal.value:g}"
    fields = {**goal.fit.model_dump(), "memory": memory_text(goal.fit.memory)}
    return f"{{{', '.join(f'{name}: {value}' for name, value in fields.items())}}}"


def _recipe(recipe: Recipe, goal: Goal, tokens: int) -> Iterator[str]:
    """Yield the methods and the rounding of a recipe. `tokens`: of the calibration."""
    rounds_alone = recipe.bits == 4 and not recipe.entries and not goal.uncorrected and not goal.mixture
    corrects = rounds_alone and tokens >= CORRECTED_TOKENS * goal.widest
    if corrects:
        yield "# With `correct: output` each layer compensates the error of the rounded layers before it: less loss,"
        yield "# for the time of several more passes of the text. Leave it out to save that."
    if recipe.bits is not None:
        yield _quantize(recipe.bits, recipe.levels, goal.unrounded, corrects)
    yield f"methods: [{', '.join(recipe.entries)}]  # {recipe.label}"


def _quantize(bits: int | str, levels: str, unrounded: Sequence[str], corrects: bool = False) -> str:
    """Return the block `quantize`, in YAML."""
    given = "" if levels == "uniform" else f", levels: {levels}"
    given += ", correct: output" if corrects else ""
    skip = f", skip: [{', '.join(unrounded)}]" if unrounded else ""
    return f"quantize: {{bits: {bits}{given}{skip}}}"


def _text_fields(text: Text) -> Iterator[str]:
    """Yield the fields of a text that are given, as YAML."""
    for name in ("files", "field", "messages", "tools", "template"):
        value = getattr(text, name)
        if value is not None:
            yield f"{name}: {_flow(value)}"


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{quoted(name)}: {_flow(child)}' for name, child in value.items())}}}"
    return quoted(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _method(goal: Goal) -> Iterator[str]:
    if goal.engine == "llama.cpp" and goal.mixture:
        yield "methods: [{method: loss_aware, shapes: stock}]  # one number and width of experts, as in a GGUF file"
    elif goal.engine == "llama.cpp":
        yield "methods:"
        yield "  # A GGUF file keeps narrower MLPs, and multiplies factors out."
        yield "  - {method: flat_llm, attention: false, allocation: loss}"
    elif goal.corrected:
        yield "methods:"
        yield "  # Each layer compensates the error of the layers before it: less loss, and up to twice the time."
        yield "  - {method: loss_aware, correct: output}"
        if goal.field == "keep":
            yield "  # Or train each layer instead, with less loss and in less time on GPUs:"
            yield "  # - {method: loss_aware, refine: {inputs: mixed}}"
    elif goal.small:
        yield f"methods: [{{method: loss_aware}}]  # without `correct: output`: {goal.uncorrected}"
    elif goal.field == "keep" and not goal.uncorrected:
        yield "methods: [{method: loss_aware}]  # at smaller sizes, add `correct: output`"
    else:
        yield "methods: [{method: loss_aware}]"


def _workers(settings: Settings) -> str:
    fields = [f"max: {settings.workers}", f"cpus: {settings.cpus}"]
    fields += [f"gpus: {settings.gpus}"] if settings.gpus else []
    if settings.activation_gb != ACTIVATION_GB:
        fields.append(f"activation_memory_gb: {settings.activation_gb:g}")
    return ", ".join(fields)
