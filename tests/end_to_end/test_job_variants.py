"""The output is the same for any workers, commit intervals, memory limits and kinds of text file."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.end_to_end.jobs import FLAT_LLM, MakeJob, file_digests, without_ray
from tests.end_to_end.sources import make_source

LAYERS = 3  # of the fixture `llama`
pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("shared_ray")]

UNEVEN = {"calibration.samples": 11, "calibration.shards": 3}  # 3, 4 and 4 samples, in micro-batches of 2
SPILL = {"workers.activation_memory_gb": 1e-6}


@pytest.fixture(scope="module")
def deeper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("deeper") / "source", "llama", layers=4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("propagate", ["compressed", "dense"])
def test_same_bytes(propagate: str, deeper: Path, job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    variants: dict[str, dict[str, Any]] = {
        "one worker": {},
        "two workers, states stored every 2 layers": {"workers.max": 2, "workers.min": 2, "resume.every": 2},
        "two workers, states stored every 3 layers, little memory": {
            "workers.max": 2,
            "workers.min": 2,
            "resume.every": 3,
            **SPILL,
        },
        "in the driver's process, statistics kept the other way": {
            "statistics.keep": propagate == "compressed",
            "resume.every": "auto",
        },
    }
    outputs = {}
    for name, changes in variants.items():
        with without_ray() if name.startswith("in the driver's process") else nullcontext():
            made = job(deeper, **UNEVEN, **changes, **{"calibration.propagate": propagate})
            assert made.run().code == 0
        outputs[name] = file_digests(made.output)
    first = outputs.pop("one worker")
    assert {"config.json", "compression.json", "model.safetensors.index.json"} <= set(first)
    for name, found in outputs.items():
        assert found == first, name


def test_dense_and_compressed_propagation_differ(deeper: Path, job: MakeJob) -> None:
    """Layer 0 sees the same either way; the layers after it see what the compressed ones before give."""
    fixed = {"methods": [{**FLAT_LLM, "ranks": {"value": 8, "mlp": 40}}], "budget": None, **UNEVEN}
    jobs = [job(deeper, **fixed, **{"calibration.propagate": propagate}) for propagate in ("dense", "compressed")]
    shards = []
    for made in jobs:
        assert made.run().code == 0
        shards.append(
            [
                made.compression()["shards"][f"model-{n:05d}-of-{len(made.compression()['shards']):05d}.safetensors"][
                    "sha256"
                ]
                for n in range(1, 5)
            ]
        )
    assert [one == other for one, other in zip(*shards, strict=True)] == [True, False, False, False]


def test_statistics_stay_or_go(deeper: Path, job: MakeJob) -> None:
    """With propagate: dense they outlive the job, with compressed they do not; hidden states of the
    calibration text never do."""
    for propagate, expected in (("dense", 4 * 2), ("compressed", 0)):
        made = job(deeper, **{"calibration.propagate": propagate})
        assert made.run().code == 0
        stored = made.run_dir / "statistics.zarr", made.run_dir / "activations.zarr"
        statistics, activations = ([path.relative_to(root) for path in root.rglob("c.0*")] for root in stored)
        assert len(statistics) == expected
        kept = {path.parts[0] for path in activations}
        # With the moments stays what another budget is scored by: what enters the head on the held-out text.
        assert kept == ({"tokens", "windows-held-out-dense"} if propagate == "dense" else {"tokens"})


def test_every_kind_of_text_gives_the_same_tokens(tmp_path: Path, text: Path, job: MakeJob) -> None:
    story = text.read_text()
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"id": 7, "body": story}) + "\n")
    (tmp_path / "items.json").write_text(json.dumps([story]))
    pyarrow.parquet.write_table(pyarrow.table({"body": [story]}), tmp_path / "column.parquet")
    dataset = tmp_path / "dataset"
    dataset.mkdir()
    (dataset / "train.jsonl").write_text(rows.read_text())
    texts: list[dict[str, Any]] = [
        {"files": [str(text)]},
        {"files": [str(rows)], "field": "body"},
        {"files": [str(tmp_path / "items.json")]},
        {"files": [str(tmp_path / "column.parquet")], "field": "body"},
        {"dataset": str(dataset), "field": "body"},
    ]
    entry = {**FLAT_LLM, "layers": [0], "mlp": False, "keep": 0.5, "allocation": "uniform"}
    quick = {"methods": [entry], "budget": None}
    found = []
    for given in texts:
        made = job(**quick, **{"calibration.text": given, "calibration.shards": 1})
        ended = made.run()
        assert ended.code == 0, ended.err
        found.append(
            {name: digest for name, digest in file_digests(made.output).items() if name.endswith(".safetensors")}
        )
    assert found == [found[0]] * len(texts)
    other = job(**quick, **{"calibration.shards": 1, "seed": 4})
    assert other.run().code == 0
    assert found[0] != {name: file_digests(other.output)[name] for name in found[0]}
