"""The recommended manifest is valid for any names of files, and says what was chosen."""

from __future__ import annotations

import pytest

from manifests.calibration import Text
from manifests.loading import decode_document, parse_manifest
from pipeline.recommendation.commented_manifest import Places, commented_manifest
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
    places = Places(name, Text(files=(name, "second.txt")), f"out/{name}", f"out/{name}.run")
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


def test_the_training_of_layers_takes_the_place_of_corrections() -> None:
    text = commented_manifest("init", Places("model", Text(files=("text",)), "out", "run"), Goal("keep", 0.6), SETTINGS)
    text = text.replace("  - {method", "  # - {corrected", 1).replace("  # - {method", "  - {method", 1)
    (entry,) = parse_manifest(decode_document(text.encode(), "it"), "it").methods
    assert entry.refine is not None
    assert entry.refine.inputs == "mixed"
