"""`budget.fit` becomes the bytes that an engine leaves for weights, or is refused with the least memory that does."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest

from manifests.errors import InputError
from manifests.fit import Fit, memory_bytes, memory_text
from manifests.schema import Budget, Manifest
from pipeline.cost_model.bounds import size_bound
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.serving_memory import ENGINES, ServingMemory, live_numbers, serving_memory
from pipeline.families.registry import geometry_of, standard_config
from pipeline.inputs.fitting import DoesNotFitError, fit_remarks
from pipeline.inputs.job_inputs import fit_methods, fitted
from tests import factories
from tests.families.geometries import manifest

CONFIG = standard_config(factories.make_config("llama", num_hidden_layers=2).to_dict())
GEOMETRY = geometry_of(CONFIG, 16)
TOKENS, SEQUENCES = 64, 4
CACHE = 2 * 2 * 2 * 32 * TOKENS * SEQUENCES  # bytes, layers, keys and values, their width (2 heads of 16)
ACTIVATIONS = 2 * TOKENS * SEQUENCES * live_numbers(GEOMETRY.layers[0]) + SEQUENCES * GEOMETRY.vocab * 8
ENGINE = ENGINES["transformers", "cpu"].process_bytes
BESIDE = CACHE + ACTIVATIONS + ENGINE
NORMAL = {"bits": 4, "levels": "normal", "feedback": False}


def job(
    memory: float, quantize: dict[str, Any] | None = None, methods: tuple[dict[str, Any], ...] = (), **fit: Any
) -> Manifest:
    """Return a job whose output is served in this memory; methods default to `flat_llm` where nothing is rounded."""
    fields = {"memory": int(memory), "context": TOKENS, "sequences": SEQUENCES, "device": "cpu", **fit}
    entries = methods or (() if quantize else ({"method": "flat_llm"},))
    calibration = {"text": {"files": ["t"]}}
    return manifest(methods=[*entries], budget={"fit": fields}, calibration=calibration, quantize=quantize)


def resolved(manifest: Manifest) -> tuple[Manifest, ServingMemory | None]:
    return fitted(manifest, CONFIG, GEOMETRY, GEOMETRY.model_bytes())


def test_weights_get_what_cache_activations_and_the_engine_leave() -> None:
    dense = GEOMETRY.model_bytes()
    manifest, serving = resolved(job(BESIDE + 0.8 * dense))
    assert serving is not None
    assert (serving.cache_bytes, serving.activation_bytes, serving.engine_bytes) == (CACHE, ACTIVATIONS, ENGINE)
    assert manifest.budget is not None
    assert manifest.budget.bytes == pytest.approx(0.8, abs=1e-5)
    assert manifest.budget == Budget(bytes=manifest.budget.bytes, scope="model")
    assert serving.report(dense)["total"] == BESIDE + dense
    assert resolved(manifest) == (manifest, None)
    plenty, _ = resolved(job(BESIDE + 2 * dense))
    assert plenty.budget == Budget(bytes=1.0, scope="model")
    assert resolved(job(BESIDE + 0.8 * dense))[0].semantic() == manifest.semantic()
    assert resolved(job(BESIDE + 0.7 * dense))[0].semantic() != manifest.semantic()


def test_the_engine_leaves_a_share_of_a_gpu_unused() -> None:
    dense = GEOMETRY.model_bytes()
    _, serving = resolved(job(10e9, NORMAL, device="gpu"))
    assert serving is not None
    report, unused = serving.report(dense), 10e9 * (1 - ENGINES["transformers", "gpu"].share)
    assert report["overhead"] == pytest.approx(ENGINES["transformers", "gpu"].process_bytes + unused, abs=1)
    assert serving.needed(serving.weight_bytes) == pytest.approx(10e9, abs=2)


@pytest.mark.parametrize("quantize", [None, NORMAL])
def test_what_cannot_fit_is_refused_with_the_least_memory(quantize: dict[str, Any] | None) -> None:
    with pytest.raises(DoesNotFitError, match="the smallest memory that would do") as refused:
        resolved(job(BESIDE, quantize))
    error = pickle.loads(pickle.dumps(refused.value))
    assert (str(error), error.needed_bytes) == (str(refused.value), refused.value.needed_bytes)
    fit_methods(resolved(job(error.needed_bytes, quantize))[0], GEOMETRY)
    with pytest.raises(DoesNotFitError):
        resolved(job(error.needed_bytes - 0.002 * GEOMETRY.model_bytes(), quantize))


def test_too_little_and_too_much_memory_is_remarked_on() -> None:
    dense = GEOMETRY.model_bytes()
    servings = (resolved(job(BESIDE + share * dense))[1] for share in (0.8, 1.0))
    hardly = serving_memory(Fit(memory=int(BESIDE), context=TOKENS, sequences=SEQUENCES), CONFIG, GEOMETRY, ())
    remarks = [fit_remarks(serving, GEOMETRY) for serving in (hardly, *servings)]
    assert ["expect a large loss" in str(remarks[0]), remarks[1], "fits as it is" in str(remarks[2])] == [
        True,
        (),
        True,
    ]
    assert fit_remarks(None, GEOMETRY) == ()


def test_the_head_that_mla_unties_counts() -> None:
    config = standard_config(factories.make_config("llama", num_hidden_layers=2, tie_word_embeddings=True).to_dict())
    geometry = geometry_of(config, 16)
    methods = ({"method": "mla", "cache_keep": 0.5}, {"method": "flat_llm", "attention": False, "uniform": True})
    asked = job(BESIDE + 0.9 * geometry.model_bytes(), methods=methods)
    manifest, serving = fitted(asked, config, geometry, geometry.model_bytes())
    planned = PlannedJob(manifest, geometry, *fit_methods(manifest, geometry))
    assert serving is not None
    most = size_bound(planned, geometry.model_bytes()).num_bytes
    assert 0.99 * serving.weight_bytes < most <= serving.weight_bytes


def test_a_second_copy_of_codes_has_its_place_in_the_memory() -> None:
    codes = {"bits": 4, "feedback": False}
    with pytest.raises(DoesNotFitError, match="its second copy of their codes") as refused:
        resolved(job(1, codes, engine="llama.cpp"))
    manifest, serving = resolved(job(refused.value.needed_bytes, codes, engine="llama.cpp"))
    assert serving is not None
    planned = PlannedJob(manifest, GEOMETRY, *fit_methods(manifest, GEOMETRY))
    weights = size_bound(planned, GEOMETRY.model_bytes()).num_bytes
    assert serving.copied_bytes(weights) > 0
    assert serving.report(weights)["total"] <= refused.value.needed_bytes


def test_other_faults_are_reported_as_they_are() -> None:
    faulty = job(1, methods=({"method": "flat_llm"}, {"method": "flat_llm"}))
    with pytest.raises(InputError, match="a tensor is claimed once"):
        resolved(faulty)


@pytest.mark.parametrize(
    ("fit", "quantize", "method", "message"),
    [
        ({}, {"bits": 4}, None, "transformers multiplies codes of uniform levels out"),
        ({"engine": "vllm", "device": "gpu"}, NORMAL, None, "give quantize.levels: uniform"),
        ({"engine": "vllm", "device": "gpu"}, {"bits": 3}, None, "vLLM has kernels for quantize.bits: 4 or 8"),
        ({"engine": "vllm"}, {"bits": 8}, None, "quantize.bits: 4 on a CPU"),
        ({"engine": "vllm"}, None, {"method": "mla", "cache_keep": 0.5}, "caches whole heads of mla on a CPU"),
        ({"engine": "llama.cpp"}, {"bits": 3}, None, "codes of 8 or 4 bits with uniform or iq4_nl"),
        ({"engine": "llama.cpp"}, NORMAL, None, "codes of 8 or 4 bits with uniform or iq4_nl levels alone"),
        ({"engine": "llama.cpp"}, None, {"method": "loss_aware"}, "factors of loss_aware are multiplied out"),
        ({}, None, {"method": "lestd", "target": "attention"}, "give prune: false"),
        ({"context": 10**6}, None, None, "budget.fit.context: 1000000 is longer than the model's"),
    ],
)
def test_forms_that_an_engine_does_not_hold_are_refused(
    fit: dict[str, Any], quantize: dict[str, Any] | None, method: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        resolved(job(1e12, quantize, (method,) if method else (), **fit))


@pytest.mark.parametrize(
    ("fit", "quantize", "methods"),
    [
        ({"engine": "vllm", "device": "gpu"}, {"bits": 8}, ()),
        ({"engine": "vllm"}, {"bits": 4}, ()),
        ({"engine": "llama.cpp"}, {"bits": 4}, ({"method": "flat_llm", "attention": False},)),
        ({"engine": "llama.cpp"}, None, ({"method": "flat_llm", "attention": False},)),
        ({"engine": "llama.cpp"}, {"bits": 4, "levels": "iq4_nl"}, ()),
        ({}, {"bits": "auto", "levels": "normal"}, ({"method": "loss_aware"},)),
    ],
)
def test_forms_that_an_engine_holds(
    fit: dict[str, Any], quantize: dict[str, Any] | None, methods: tuple[dict[str, Any], ...]
) -> None:
    assert resolved(job(1e12, quantize, methods, **fit))[0].budget == Budget(bytes=1.0, scope="model")


@pytest.mark.parametrize(("text", "num_bytes"), [("24GB", 24 * 10**9), ("8GiB", 2**33), ("0.5 gb", 5 * 10**8)])
def test_amounts_of_memory(text: str, num_bytes: int) -> None:
    assert memory_bytes(text) == memory_bytes(memory_text(num_bytes)) == num_bytes
    assert memory_text(1) == "1"
    for wrong in ("24", "24 KB", "GB"):
        with pytest.raises(ValueError, match="an amount with a unit"):
            memory_bytes(wrong)
