"""The fingerprint of a job: fields that change it, and fields that do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manifests.records import SourceFile
from pipeline.inputs.fingerprint import job_fingerprint
from tests.families.geometries import llama, manifest

FILES = {"model.safetensors": SourceFile(size=3, sha256="a" * 64)}
TOKENS = torch.arange(6).reshape(2, 3)


def fingerprint(tokens: torch.Tensor | None = TOKENS, files: Any = FILES, **fields: Any) -> dict[str, Any]:
    source, document = SimpleNamespace(config={"model_type": "llama"}), manifest(keep=0.5, **fields)
    passes = SimpleNamespace(gradient_samples=2 if document.methods[0].method == "loss_aware" else 0)
    inputs: Any = SimpleNamespace(
        source=source, manifest=document, dtype_name="float32", geometry=llama(), passes=passes
    )
    return job_fingerprint(inputs, tokens, files)


def text(name: str, **fields: Any) -> dict[str, Any]:
    return {"text": {"files": [name]}, "samples": 2, "sequence_length": 3, "shards": 1, **fields}


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"seed": 1}, {"manifest"}),
        ({"calibration": text("a.txt", samples=3)}, {"manifest"}),
        ({"calibration": text("b.txt")}, set()),  # files may move; their token ids count
        ({"workers": {"max": 3, "experts": 2}}, set()),
        ({"workers": {"cpus": 2}}, {"manifest"}),  # the order of sums within a product
        ({"workers": {"gpus": 1}}, {"device"}),
        ({"resume": {"every": 2}}, set()),
        ({"tokens": TOKENS + 1}, {"calibration_tokens"}),
        ({"tokens": TOKENS.to(torch.int32)}, set()),
        ({"tokens": TOKENS.reshape(3, 2)}, {"calibration_tokens"}),
        ({"tokens": None}, {"calibration_tokens"}),
        ({"files": {"model.safetensors": SourceFile(size=3, sha256="b" * 64)}}, {"source"}),
        ({"files": {"other.safetensors": SourceFile(size=3, sha256="a" * 64)}}, {"source"}),
    ],
)
def test_what_changes_it(fields: dict[str, Any], expected: set[str]) -> None:
    base = {"calibration": text("a.txt"), "workers": {}}
    assert changed(fingerprint(**base), fingerprint(**{**base, **fields})) == expected


def test_multiples_of_ranks_are_those_of_this_model() -> None:
    entries = {}, {"rank_multiple": 1}, {"rank_multiple": 8}
    manifests = [fingerprint(methods=[{"method": "flat_llm", **entry}])["manifest"] for entry in entries]
    default, one, eight = (semantic["methods"] for semantic in manifests)
    assert default == one  # of a narrow model
    assert eight[0]["rank_multiple"] == 8


@pytest.mark.parametrize(("correct", "kept"), [("none", [1e-3, 1e-4]), ("output", [0.1, 0.3])])
def test_ridges_count_where_something_is_corrected(correct: str, kept: list[float]) -> None:
    """Directories begun before they were a field have their former values."""
    found = fingerprint(methods=[{"method": "loss_aware", "correct": correct}], calibration=text("a.txt"))
    assert found["manifest"]["methods"][0]["correct_ridges"] == kept


@pytest.mark.parametrize(("correct", "counts"), [("none", False), ("output", True)])
def test_ridges_of_rounding_count_where_it_corrects(correct: str, counts: bool) -> None:
    ridges = {}, {"correct_ridges": [0.2, 0.2]}
    rounded = [{"bits": 4, "correct": correct, **given} for given in ridges]
    one, other = (
        fingerprint(calibration=text("a.txt"), methods=[{"method": "lorc", "cache_keep": 0.5}], quantize=quantize)
        for quantize in rounded
    )
    assert (one != other) is counts


@pytest.mark.parametrize(
    ("method", "gradient", "kept"),
    [("flat_llm", {}, 16_384), ("loss_aware", {}, 65_536), ("loss_aware", {"samples": 2}, 16_384)],
)
def test_the_least_tokens_of_gradients_count_where_they_matter(
    method: str, gradient: dict[str, int], kept: int
) -> None:
    """Directories begun before it was a field have its former value."""
    found = fingerprint(methods=[{"method": method}], calibration=text("a.txt", gradient=gradient))
    assert found["manifest"]["calibration"]["gradient"]["least_tokens"] == kept


@pytest.mark.parametrize(("quantize", "named"), [({"shrinkage": 0.0}, False), ({}, True), ({"shrinkage": 0.1}, True)])
def test_which_moments_are_shrunk_is_said(quantize: dict[str, float], named: bool) -> None:
    """A directory of the rule before, which shrank all of them, is refused."""
    found = fingerprint(quantize={"bits": 3, **quantize}, calibration=text("a.txt"))
    assert ("shrunk_moments" in found) == named
    assert "shrunk_moments" not in fingerprint(calibration=text("a.txt"))
