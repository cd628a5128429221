"""Chooses what to change in a model that should fit into a memory: bits, ranks or cache, by what loses least.

docs/choosing-a-method.md#a-given-memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from manifests.errors import InputError
from manifests.fit import Fit
from pipeline.inputs.fitting import DoesNotFitError, shown_bytes
from pipeline.inputs.job_inputs import Inputs

CORRECTED, SOLVED = "{method: loss_aware, correct: output}", "{method: loss_aware}"
NARROW = "{method: flat_llm, attention: false, allocation: loss}"
NARROW_ALIKE = "{method: flat_llm, attention: false, uniform: true}"
STOCK = "{method: loss_aware, shapes: stock}"
CACHES = {0.5: "half", 0.25: "a quarter"}


@dataclass(frozen=True)
class Recipe:
    """A way to make a model smaller.

    Attributes:
        label: in messages.
        bits: of rounded weights; None: no rounding.
        levels: the numbers that codes stand for.
        entries: the manifest's methods, in YAML.
        cache: makes the cache smaller.
    """

    label: str
    bits: Literal[8, 4, 3, "auto"] | None = None
    levels: Literal["uniform", "normal", "iq4_nl"] = "uniform"
    entries: tuple[str, ...] = ()
    cache: bool = False


@dataclass(frozen=True)
class RecipeChoice:
    """A recipe whose result fits, and the memory that its neighbours need at least.

    Attributes:
        better: label and bytes of the best recipe before it that loses less; None if none does.
        cheaper: likewise of the next one that needs less memory.
    """

    recipe: Recipe
    better: tuple[str, int] | None
    cheaper: tuple[str, int] | None

    def line(self) -> str:
        """Return the line about the neighbours."""
        better = "better: none" if self.better is None else f"better: {self.better[0]}, from {_up(self.better[1])} on"
        if self.cheaper is None:
            return f"{better}; cheaper: none"
        return f"{better}; cheaper: {self.cheaper[0]}, from {_up(self.cheaper[1])} on"


def recipes(fit: Fit, dtype_bits: int, rounds: bool, corrected: bool, mixture: bool) -> list[Recipe]:
    """Return the recipes whose results the engine keeps, those that lose least first.

    `rounds`: groups of scales fit the model. `corrected`: its layers can be corrected. `mixture`: it has experts.
    """
    solved = CORRECTED if corrected else SOLVED
    rounds = rounds and (fit.engine, fit.device, dtype_bits) != ("vllm", "cpu", 32)  # its kernels need 16 bits
    if fit.engine == "llama.cpp":
        return _of_llama_cpp(rounds, mixture)
    listed = _of_vllm(fit, solved) if fit.engine == "vllm" else _of_transformers(solved)
    unrounded = [recipe for recipe in listed if recipe.bits is None]
    return listed if rounds else [Recipe("ranks", entries=(solved,)), *unrounded]


def _of_transformers(solved: str) -> list[Recipe]:
    latents = [
        Recipe(
            f"4 bits, {share} of the cache as latents",
            4,
            "normal",
            (f"{{method: lorc, cache_keep: {keep}, weighting: input}}",),
            cache=True,
        )
        for keep, share in CACHES.items()
    ]
    return [
        Recipe("8 bits", 8, "normal"),
        Recipe("4 bits", 4, "normal"),
        Recipe("bits and ranks chosen together", "auto", "normal", (solved,)),
        *latents,
    ]


def _of_vllm(fit: Fit, solved: str) -> list[Recipe]:
    weights = [Recipe("4 bits", 4), Recipe("4 bits and ranks", 4, entries=(solved,))]
    if fit.device == "cpu":  # without kernels for 8 bits, and with a cache of whole heads
        return weights
    latents = [
        Recipe(
            f"{share} of the cache as latents, narrower MLPs",
            entries=(f"{{method: mla, cache_keep: {keep}}}", NARROW_ALIKE),
            cache=True,
        )
        for keep, share in CACHES.items()
    ]
    return [Recipe("8 bits", 8), *weights, *latents]


def _of_llama_cpp(rounds: bool, mixture: bool) -> list[Recipe]:
    less, entry = ("fewer and narrower experts", STOCK) if mixture else ("narrower MLPs", NARROW)
    if not rounds:
        return [Recipe(less, entries=(entry,))]
    return [
        Recipe("8 bits", 8),
        Recipe("4 bits", 4, "iq4_nl"),
        Recipe(f"4 bits and {less}", 4, "iq4_nl", (entry,)),
    ]


def choose_recipe(candidates: Sequence[Recipe], inputs_of: Callable[[Recipe, bool], Inputs]) -> RecipeChoice:
    """Return the first recipe that fits.

    Where the cache takes more than the weights of a recipe that does not fit, smaller caches are tried before further
    steps of the weights.

    Args:
        inputs_of: checks the job of a recipe; if the flag is True, in hardly any memory. Raises DoesNotFitError, or
            InputError for a model that the recipe does not take.

    Raises DoesNotFitError with the smallest memory of any recipe, and InputError if no recipe takes the model.
    """
    too_large: dict[str, int] = {}
    refused: InputError | None = None
    ordered = list(candidates)
    while ordered:
        recipe, *ordered = ordered
        try:
            inputs_of(recipe, False)
        except DoesNotFitError as error:
            too_large[recipe.label] = error.needed_bytes
            refused = error if refused is None or error.needed_bytes == min(too_large.values()) else refused
            if error.memory.cache_bytes > error.least_bytes and not recipe.entries and recipe.bits == 4:
                ordered.sort(key=lambda other: not other.cache)
        except InputError as error:
            refused = refused or error
        else:
            better = next(reversed(too_large.items()), None)
            return RecipeChoice(recipe, better, _cheaper(recipe, ordered, inputs_of))
    assert refused is not None
    raise refused


def _cheaper(
    recipe: Recipe, others: Sequence[Recipe], inputs_of: Callable[[Recipe, bool], Inputs]
) -> tuple[str, int] | None:
    """Return label and memory of the first of the others that needs less memory than the smallest of the recipe."""
    own = next((needed for _, needed in _needs([recipe], inputs_of)), 0)
    return next(((label, needed) for label, needed in _needs(others, inputs_of) if needed < own), None)


def _needs(candidates: Sequence[Recipe], inputs_of: Callable[[Recipe, bool], Inputs]) -> Iterator[tuple[str, int]]:
    for recipe in candidates:
        try:
            inputs_of(recipe, True)
        except DoesNotFitError as error:
            yield recipe.label, error.needed_bytes
        except InputError:
            continue


def _up(num_bytes: int) -> str:
    return shown_bytes(num_bytes, up=True)
