"""The recommended manifest is valid for any names of files, and says what was chosen."""

from __future__ import annotations

import pytest

from manifests.calibration import Text
from manifests.loading import decode_document, parse_manifest
from pipeline.recommendation.commented_manifest import JobPlaces, commented_manifest
from pipeline.recommendation.settings import Goal, Settings
from pipeline.recommendation.text_use import TextUse

SETTINGS = Settings(TextUse(0.987654, 512, 300, 1 << 20), 20, 4, 10, 3, 1, 1.0)
NAMES = (
    "plain/name.txt",
    "with space, and # {signs}: 'quoted' \"twice\".txt",
    "no",
    "1.5",
    "übung.txt",
    "- a",
    "s3://b/f",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "goal", [Goal("keep", 0.7), Goal("bytes", 0.25), Goal("bytes", 0.3, ("down", "o")), Goal("max_loss", 0.02)]
)
def test_what_is_written_is_read(goal: Goal, name: str) -> None:
    places = JobPlaces(name, Text(files=(name, "second.txt")), f"out/{name}", f"out/{name}.run")
    text = commented_manifest(f"init {name}\n--force", places, goal, SETTINGS)
    manifest = parse_manifest(decode_document(text.encode(), "it"), "it")
    calibration, perplexity = manifest.calibration, manifest.evaluation.perplexity
    assert calibration is not None
    assert perplexity is not None
    assert (manifest.model.source, manifest.output, manifest.run_dir) == (name, f"out/{name}", f"out/{name}.run")
    assert calibration.texts[0][0].files == perplexity.text.files == (name, "second.txt")
    assert (calibration.texts[0][0].end, perplexity.text.begin) == (0.987654, 0.987654)
    assert (calibration.samples, calibration.sequence_length, perplexity.window) == (300, 512, 512)
    assert (calibration.shards, calibration.micro_batch) == (20, 4)
    assert (manifest.workers.max, manifest.workers.cpus, manifest.workers.gpus) == (10, 3, 1)
    assert manifest.workers.activation_memory_gb == 1.0
    assert manifest.budget is not None
    assert getattr(manifest.budget, goal.field) == goal.value
    assert (manifest.quantize is not None) == (goal.field == "bytes")
    assert manifest.quantize is None or manifest.quantize.skip == goal.unrounded
    assert manifest.methods[0].model_dump()["correct"] == ("output" if goal.corrected else "none")


@pytest.mark.parametrize(
    ("goal", "method", "bits"),
    [
        (Goal("bytes", 0.3, engine="vllm"), {"correct": "output"}, 4),
        (Goal("bytes", 0.3, engine="llama.cpp"), {"attention": False, "allocation": "loss"}, 4),
        (Goal("bytes", 0.7, engine="llama.cpp"), {"attention": False, "allocation": "loss"}, 8),
        (Goal("keep", 0.6, engine="llama.cpp"), {"attention": False, "allocation": "loss"}, None),
        (Goal("keep", 0.6, engine="llama.cpp", mixture=True), {"shapes": "stock"}, None),
        (Goal("bytes", 0.3, engine="llama.cpp", mixture=True), {"shapes": "stock"}, 4),
        (Goal("bytes", 0.3), {"correct": "output"}, "auto"),
    ],
)
def test_an_engine_gets_what_it_keeps(goal: Goal, method: dict[str, object], bits: object) -> None:
    text = commented_manifest("init", JobPlaces("model", Text(files=("text",)), "out", "run"), goal, SETTINGS)
    manifest = parse_manifest(decode_document(text.encode(), "it"), "it")
    assert {name: getattr(manifest.methods[0], name) for name in method} == method
    assert (manifest.quantize and manifest.quantize.bits) == bits
    fast = (goal.engine, bits) == ("llama.cpp", 4)
    assert manifest.quantize is None or manifest.quantize.levels == ("iq4_nl" if fast else "uniform")
    assert bits is None or manifest.rank_multiple == 32, "rows of whole blocks have codes in a GGUF file"


def test_all_that_describes_a_text_is_written() -> None:
    texts = (
        Text(files=("a.jsonl.gz",), field=("prefix", "gold completion")),
        Text(files=("b.jsonl",), messages="no", tools="t: x", template={"enable_thinking": False, "on": [1, "a, b"]}),
    )
    for text in texts:
        written = commented_manifest("init", JobPlaces("m", text, "out", "run"), Goal("keep", 0.8), SETTINGS)
        manifest = parse_manifest(decode_document(written.encode(), "it"), "it")
        assert manifest.calibration is not None
        assert manifest.evaluation.perplexity is not None
        assert manifest.calibration.text == text.model_copy(update={"end": 0.987654})
        assert manifest.evaluation.perplexity.text == text.model_copy(update={"begin": 0.987654})


def test_the_training_of_layers_takes_the_place_of_corrections() -> None:
    text = commented_manifest(
        "init", JobPlaces("model", Text(files=("text",)), "out", "run"), Goal("keep", 0.6), SETTINGS
    )
    text = text.replace("  - {method", "  # - {corrected", 1).replace("  # - {method", "  - {method", 1)
    (entry,) = parse_manifest(decode_document(text.encode(), "it"), "it").methods
    assert entry.refine is not None
    assert entry.refine.inputs == "mixed"
