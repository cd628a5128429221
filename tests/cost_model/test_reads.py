"""The bytes that a plan says a job reads, by phase: counted by hand for small models."""

from __future__ import annotations

import math
from typing import Any

import pytest

from manifests.schema import Manifest
from pipeline.cost_model.bounds import Size
from pipeline.cost_model.estimate import make_plan
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.families.geometry import Geometry
from pipeline.methods.registry import build_methods, claim_tasks
from tests.families.geometries import llama, manifest, other

# Bytes of a Llama of 16 bits: D 48, N 80, six layers, four query heads and two of keys and values of 16, V 320.
NORMS, ATTENTION, MLP = 2 * 2 * 48, 2 * (2 * 64 * 48 + 2 * 32 * 48), 2 * 3 * 80 * 48
LAYER = NORMS + ATTENTION + MLP
OUTER = 2 * (2 * 320 * 48 + 48)
MODEL = 6 * LAYER + OUTER
SOURCE, OUTPUT = 1_000_000, Size(150_000, 300_000)
TEXT: dict[str, Any] = {
    "text": {"files": ["t"]}, "samples": 16, "sequence_length": 32, "shards": 4, "propagate": "dense",
}  # fmt: skip


def job(*methods: dict[str, Any], text: bool = True, **fields: Any) -> Manifest:
    calibration = {**TEXT, **fields.pop("calibration", {})} if text else None
    return manifest(*methods, calibration=calibration, **fields)


def phases(of: Manifest, geometry: Geometry | None = None) -> dict[str, int]:
    return dict(make_plan(PlannedJob.of(of, geometry or llama()), SOURCE, OUTPUT).read_phases)


def test_a_job_without_text() -> None:
    """Two of six layers are claimed; the phases are in the order of the job, and those without bytes are left out."""
    rest = MODEL - 2 * LAYER
    read = phases(job({"method": "svd", "keep": 0.5, "layers": [1, 4]}, text=False))
    assert list(read.items()) == [
        ("digests", SOURCE + rest + 2 * NORMS),
        ("solve", 2 * LAYER),
        ("verify", OUTPUT.num_bytes - rest),
        ("compare", MODEL + OUTPUT.num_bytes),
        ("assemble", rest),
    ]


def test_a_job_that_changes_nothing_copies_the_model() -> None:
    """Its checkpoint is as large as the model, so that no compressed layer is verified."""
    planned = PlannedJob.of(job({"method": "svd", "keep": 0.5}, text=False), llama(), ())
    read = make_plan(planned, SOURCE, Size(MODEL // 2, MODEL)).read_phases
    assert read == {"digests": SOURCE + MODEL, "compare": 2 * MODEL, "assemble": MODEL}
    smaller = make_plan(planned, SOURCE, Size(MODEL // 2, MODEL - 9)).read_phases
    assert "verify" not in smaller


def test_statistics_of_the_dense_model() -> None:
    """Stored moments are read where ranks wait for importance: two of 16 x 16 for values, one of 80 x 80."""
    read = phases(job({"method": "flat_llm"}, keep=0.8))
    copied = 6 * (LAYER - 2 * (32 * 48 + 48 * 64) - MLP)
    moments = 6 * 8 * (2 * 16**2 + 80**2)
    assert read == {
        "digests": SOURCE + OUTER + copied,
        "texts": MODEL,
        "statistics": MODEL,
        "solve": 6 * LAYER + moments,
        "verify": OUTPUT.num_bytes - OUTER,
        "compare": MODEL + OUTPUT.num_bytes,
        "held-out": OUTPUT.num_bytes + MODEL,
        "assemble": OUTER,
    }


def test_layers_that_are_solved_in_the_pass_read_no_moments() -> None:
    in_pass = phases(job({"method": "flat_llm", "uniform": True}, keep=0.8))
    assert in_pass["solve"] == 6 * LAYER


def test_statistics_behind_compressed_layers() -> None:
    """Importance has a pass of its own over the dense model; the walk reads what compressed layers copy."""
    compressed = {"propagate": "compressed"}
    copied = 6 * (LAYER - 2 * (32 * 48 + 48 * 64) - MLP)
    ranked = phases(job({"method": "flat_llm"}, calibration=compressed, keep=0.8))
    assert [name for name in ranked if name not in ("texts", "verify", "compare", "held-out", "assemble")] == [
        "digests", "importance", "statistics", "propagate", "solve",
    ]  # fmt: skip
    assert (ranked["importance"], ranked["propagate"], ranked["solve"]) == (MODEL, copied, 6 * LAYER)
    uniform = phases(job({"method": "flat_llm", "uniform": True}, calibration=compressed, keep=0.8))
    assert {name: ranked[name] for name in ranked if name != "importance"} == uniform
    without_moments = phases(job({"method": "svd", "keep": 0.5}, calibration=compressed))
    assert without_moments.keys().isdisjoint({"importance", "statistics", "propagate"})


@pytest.mark.parametrize(("width", "tiles"), [(80, 80**2), (1024, 1024**2), (2048, 3 * 1024**2), (3072, 6 * 1024**2)])
def test_upper_tiles_of_wide_moments(width: int, tiles: int) -> None:
    """Tiles of 1,024 x 1,024 float64 numbers; the lower ones are not stored."""
    entry = {"method": "flat_llm", "attention": False, "layers": [0]}
    geometry = llama(intermediate_size=width)
    own = geometry.layers[0].num_bytes()
    assert phases(job(entry, keep=0.9), geometry)["solve"] == own + 8 * tiles


def test_samples_and_diagonals() -> None:
    """A sample has the source's bits, and no more tokens than the text; a diagonal one number per channel.

    `loss_aware` of an MLP: its curve and its solve read weights, moments and the sample.
    """
    entry = {"method": "loss_aware", "attention": False, "query_key": False, "layers": [5]}
    read = phases(job(entry, keep=0.9))
    geometry = llama()
    (task,) = claim_tasks(build_methods(job(entry, keep=0.9)), geometry)
    stored = 0
    for moment in task.moments:
        width = geometry.layers[5].features(moment.point)
        if moment.kind == "sample":
            assert moment.tokens > 16 * 32
            stored += 16 * 32 * width * 2
        else:
            stored += 8 * width * (1 if moment.diagonal else width)
    assert {moment.kind for moment in task.moments} >= {"sample", "gradient"}
    assert read["curves"] == MLP + stored
    assert read["solve"] == LAYER + stored


@pytest.mark.parametrize(("first", "count"), [(0, 6), (3, 3), (5, 1)])
def test_the_backward_pass_reads_from_the_first_layer_that_asks(first: int, count: int) -> None:
    """And the head; the layers behind it read nothing of their own for it."""
    entry = {"method": "flat_llm", "allocation": "loss", "layers": [first, 5] if first < 5 else [5]}
    assert phases(job(entry, keep=0.9))["gradient"] == count * LAYER + OUTER


@pytest.mark.parametrize(("dense", "models"), [(False, 0), (True, 1)])
def test_an_evaluation_reads_the_dense_model_on_request(dense: bool, models: int) -> None:
    evaluation = {"perplexity": {"text": {"files": ["t"]}, "window": 16, "dense": dense}}
    read = phases(job({"method": "svd", "keep": 0.5}, text=False, evaluation=evaluation))
    assert read["evaluate"] == OUTPUT.num_bytes + models * MODEL


def test_corrections_and_training_read_both_layers() -> None:
    """A corrected layer passes once for each of its points and once for its outputs: of q, o, gate and down."""
    corrected = {"method": "loss_aware", "correct": "output", "layers": [1, 2]}
    assert phases(job(corrected, keep=0.9))["correct"] == 2 * 2 * LAYER * 5
    trained = {"method": "svd", "keep": 0.5, "refine": True, "layers": [1, 2, 3]}
    read = phases(job(trained))
    assert read["refine"] == 2 * 3 * LAYER
    assert "correct" not in read


# Mixtral: six experts of 24 channels in each of six layers.
EXPERT = 2 * 3 * 24 * 48
EXPERTS = 6 * EXPERT


def mixture_job(entry: dict[str, Any], held: int, **fields: Any) -> Manifest:
    return job(entry, keep=0.8, scope="experts", workers={"max": 2, "experts": held}, **fields)


@pytest.mark.parametrize(("held", "slices"), [(6, 1), (4, 2), (2, 3), (1, 6)])
@pytest.mark.parametrize("kind", ["model", "local"])
def test_experts_in_slices_pass_forwards_before_they_pass_backwards(held: int, slices: int, kind: str) -> None:
    """Where the gradient follows from the layer's output: all slices twice, but for the last, which is in memory."""
    geometry = other("mixtral")
    layer = geometry.layers[0].num_bytes()
    entry = {"method": "flat_llm", "attention": False, "allocation": "loss", "layers": [2, 4]}
    more = 0 if slices == 1 else EXPERTS + EXPERTS * (slices - 1) // slices
    outer = geometry.model_bytes() - 6 * layer
    read = phases(mixture_job(entry, held, calibration={"gradient": {"kind": kind}}), geometry)
    assert read["gradient"] == 4 * layer + (4 if kind == "local" else 1) * more + outer


@pytest.mark.parametrize(("held", "visits"), [(6, 1), (5, 9)])
def test_streamed_experts_are_read_as_often_as_they_are_visited(held: int, visits: int) -> None:
    """`reap` with a refit visits an expert nine times (docs/plan.md), a layer whose experts all fit once."""
    geometry = other("mixtral")
    entry = {"method": "reap", "refit": True, "layers": [3]}
    of = mixture_job(entry, held)
    layer = geometry.layers[3]
    (task,) = claim_tasks(build_methods(of), geometry)
    moments = 0
    for moment in task.moments:
        width = layer.features(moment.point)
        moments += 16 * 32 * width * 2 if moment.kind == "sample" else 8 * width**2
    in_memory = held == 6
    read = phases(of, geometry)
    assert read["solve"] == layer.num_bytes() + (visits - 1) * EXPERTS + (0 if in_memory else moments)
    assert "curves" not in read


@pytest.mark.parametrize(("held", "dense"), [(6, 1), (5, 0)])
def test_held_out_text_passes_the_dense_model_with_both_texts_where_experts_are_streamed(held: int, dense: int) -> None:
    geometry = other("mixtral")
    read = phases(mixture_job({"method": "flat_llm", "attention": False}, held), geometry)
    assert read["held-out"] == OUTPUT.num_bytes + dense * geometry.model_bytes()


def test_moments_of_streamed_experts_are_read_even_if_layers_are_solved_in_the_pass() -> None:
    """Those of the slices before the last are stored: of the writer of each of six experts, in six layers."""
    geometry = other("mixtral")
    entry = {"method": "flat_llm", "attention": False, "uniform": True}
    whole, sliced = (phases(mixture_job(entry, held), geometry)["solve"] for held in (6, 3))
    assert sliced - whole == 6 * 6 * 8 * 24**2


def test_weights_in_a_stored_format_count_as_they_are_stored() -> None:
    """Each in a byte a number and a scale of two bytes for each row, in every phase."""
    plain = llama()
    stored = {
        name: (math.prod(shape) + 2 * shape[0], True)
        for layer in plain.layers
        for name, shape in layer.tensors(layer.linear_roles).values()
    }
    geometry = llama(stored_bytes=stored)
    linears = sum(own for own, _ in stored.values()) // 6
    layer, source = NORMS + linears, 6 * (NORMS + linears) + OUTER
    assert (geometry.model_bytes(), geometry.layers[0].stored_bytes()) == (source, layer)
    of = job({"method": "loss_aware", "layers": [1, 4]}, keep=0.9)
    read, plain_read = phases(of, geometry), phases(of, plain)
    rest = source - 2 * layer
    assert read["digests"] == SOURCE + rest + 2 * NORMS
    assert (read["texts"], read["statistics"], read["assemble"]) == (source, source, rest)
    assert plain_read["curves"] - read["curves"] == plain_read["solve"] - read["solve"] == 2 * (LAYER - layer)
    assert plain_read["gradient"] - read["gradient"] == 5 * (LAYER - layer)
    assert min(read.values()) > 0
