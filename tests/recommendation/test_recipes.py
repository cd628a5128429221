"""The recipe for a memory is the first that fits, and its manifest is read for every engine."""

from __future__ import annotations

from typing import Any, cast

import pytest

from manifests.calibration import Text
from manifests.errors import InputError
from manifests.fit import Fit
from manifests.loading import decode_document, parse_manifest
from pipeline.cost_model.serving_memory import ServingMemory
from pipeline.inputs.fitting import DoesNotFitError
from pipeline.inputs.job_inputs import Inputs
from pipeline.recommendation.commented_manifest import JobPlaces, commented_manifest
from pipeline.recommendation.recipes import Recipe, choose_recipe, recipes
from pipeline.recommendation.settings import Goal
from tests.recommendation.test_commented_manifest import SETTINGS

PLACES = JobPlaces("model", Text(files=("text",)), "out", "run")
GB = 10**9


def fit_for(engine: Any, device: Any = "gpu") -> Fit:
    return Fit(memory=24 * GB, context=4096, sequences=2, engine=engine, device=device)


def test_corrections_need_tokens() -> None:
    """300 samples of 512 tokens are 4 for each of 38,400 numbers."""
    fit, recipe = fit_for("vllm"), Recipe("4 bits", 4)
    for widest, corrects in ((38_400, True), (38_401, False)):
        goal = Goal("fit", fit.memory, fit=fit, recipe=recipe, widest=widest)
        assert ("correct: output" in commented_manifest("init", PLACES, goal, SETTINGS)) == corrects


@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize(
    ("engine", "device"),
    [("transformers", "gpu"), ("vllm", "gpu"), ("vllm", "cpu"), ("llama.cpp", "gpu"), ("llama.cpp", "cpu")],
)
def test_every_recipe_is_a_manifest(engine: str, device: str, rounds: bool, mixture: bool) -> None:
    fit = fit_for(engine, device)
    candidates = recipes(fit, 16, rounds, corrected=True, mixture=mixture)
    assert candidates
    for recipe in candidates:
        goal = Goal("fit", fit.memory, ("down",), fit=fit, recipe=recipe, mixture=mixture)
        text = commented_manifest("init", PLACES, goal, SETTINGS)
        manifest = parse_manifest(decode_document(text.encode(), "it"), "it")
        assert manifest.budget is not None
        assert manifest.budget.fit == fit
        assert (manifest.quantize and manifest.quantize.bits) == recipe.bits
        assert len(manifest.methods) == len(recipe.entries)
        corrects = recipe.bits == 4 and not recipe.entries and not mixture
        assert manifest.quantize is None or manifest.quantize.correct == ("output" if corrects else "none")
        assert not recipe.bits or manifest.rank_multiple == 32, "rows of whole blocks have codes in a GGUF file"
    assert goal.label == "fits-24GB"


def chosen(needs: dict[str, int | None], memory: int, large_cache: bool = False) -> tuple[str, Any, Any]:
    """Choose among recipes for transformers that need so many GB; None: refused for another reason."""

    def inputs_of(recipe: Recipe, in_hardly_any: bool) -> Inputs:
        needed = needs.get(recipe.label)
        if needed is None:
            raise InputError(f"{recipe.label}: impossible")
        if in_hardly_any or needed > memory:
            cache = 2 * needed if large_cache else 0
            raise DoesNotFitError(ServingMemory(fit_for("transformers", "cpu"), cache, 0, -cache), needed)
        return cast(Inputs, None)

    choice = choose_recipe(recipes(fit_for("transformers"), 16, rounds=True, corrected=True, mixture=False), inputs_of)
    return choice.recipe.label, choice.better, choice.cheaper


BITS8, BITS4, MIXED = "8 bits", "4 bits", "bits and ranks chosen together"
HALF, QUARTER = "4 bits, half of the cache as latents", "4 bits, a quarter of the cache as latents"
NEEDS: dict[str, int | None] = {BITS8: 20, BITS4: 14, MIXED: 8, HALF: 10, QUARTER: 7}


def test_the_first_recipe_that_fits_is_chosen_with_its_neighbours() -> None:
    assert chosen(NEEDS, 30) == (BITS8, None, (BITS4, 14))
    assert chosen(NEEDS, 15) == (BITS4, (BITS8, 20), (MIXED, 8))
    assert chosen(NEEDS, 9) == (MIXED, (BITS4, 14), (QUARTER, 7))
    assert chosen({**NEEDS, MIXED: None}, 15) == (BITS4, (BITS8, 20), (HALF, 10))
    with pytest.raises(DoesNotFitError, match="are too little") as refused:
        chosen(NEEDS, 6)
    assert refused.value.needed_bytes == NEEDS[QUARTER]
    with pytest.raises(InputError, match="8 bits: impossible"):
        chosen({}, 6)


def test_the_cache_is_made_smaller_first_where_it_is_the_larger_part() -> None:
    assert chosen(NEEDS, 12, large_cache=True)[0] == HALF
    assert chosen(NEEDS, 12)[0] == MIXED
