"""Inputs and commands of the fuzzer and of failing disks: a small model, texts in every format, jobs cut short.

All files are written in ROOT/work, where every case is played, and copied there from folders beside it, so that
absolute paths stay valid.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from manifests.loading import dump_manifest, load_manifest
from stores.ledger import Ledger
from tests import factories
from tests.end_to_end.jobs import COMMANDS, file_digests
from tools.soak.sandbox import in_child

INDEX = "model.safetensors.index.json"
Command = tuple[str, ...]
RUN: Command = ("run", "manifest.yaml")
SWEEP: Command = ("sweep", "manifest.yaml")
PLAN: Command = ("plan", "manifest.yaml", "--tflops", "1")
STATUS: Command = ("status", "run")
VERIFY: Command = ("verify", "output")
VERIFY_SOURCE: Command = ("verify", "output", "--source", "model")

CUT = 9  # exit status of a job that is cut short
STOPS: dict[str, tuple[str, str | None]] = {  # name -> propagate, and the ledger key before whose commit a job ends
    "walk": ("compressed", "layer/00001"),
    "between": ("compressed", "activations/00001"),
    "dense": ("dense", "layer/00001"),
    "start": ("compressed", "ranks"),
    "assembling": ("compressed", "complete"),
    "finished": ("compressed", None),
}
METHODS: tuple[dict[str, Any], ...] = (
    {"method": "flat_llm"},
    {"method": "lorc", "cache_keep": 0.6},
    {"method": "joint_rank_k", "query_key": "joint", "mlp": False},
    {"method": "lestd", "target": "attention", "sweeps": 2, "refine_sweeps": 1},
)


@dataclass(frozen=True)
class Case:
    """A damaged folder and the commands to run there.

    Attributes:
        stop: the entry of `STOPS` that the folder began as; None: without a job.
        repairable: the last command must leave the bytes of an undisturbed job.
        elsewhere: a folder of RUN_DIR was replaced by a link, as to another disk: files are added behind it.
    """

    name: str
    commands: Sequence[Command]
    stop: str | None = None
    repairable: bool = False
    elsewhere: bool = False


def evaluate(model: str, text: str = "text.txt") -> Command:
    """Return the command that evaluates a model."""
    return ("evaluate", model, "--text", text, "--window", "16", "--accept-loss", "--json")


@dataclass(frozen=True)
class World:
    """A folder for cases, and digests of undisturbed outputs by `propagate`."""

    root: Path
    reference: dict[str, dict[str, str]]

    @property
    def work(self) -> Path:
        """The folder that a case is played in."""
        return self.root / "work"

    @property
    def scratch(self) -> Path:
        """The folder for logs and reports."""
        return self.root / "scratch"

    def fresh(self, stop: str | None = None) -> Path:
        """Make the working folder again, with a job that was cut short if `stop` names one. Return the folder."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.root / "kept" / (stop or "new"), self.work, symlinks=True)
        return self.work


def document(propagate: str = "compressed") -> dict[str, Any]:
    """Return a manifest. Its paths are relative: a path that is cut short stays in the folder."""
    return {
        "version": 1,
        "model": {"source": "model", "accept_loss": True},  # of random weights
        "output": "output",
        "run_dir": "run",
        "seed": 3,
        "budget": {"keep": 0.7},
        "calibration": {
            "text": {"files": ["text.txt"]},
            "samples": 4,
            "sequence_length": 16,
            "shards": 2,
            "micro_batch": 2,
            "propagate": propagate,
        },
        "methods": [dict(METHODS[0])],
        "workers": {"max": 1},
    }


def make_world(root: Path) -> World:
    """Make all folders, in child processes. Takes some seconds."""
    new = root / "kept" / "new"
    for folder in (new / "tmp", root / "scratch"):
        folder.mkdir(parents=True)
    assert in_child(lambda: _make_inputs(new)) == 0
    world = World(root, {})
    for propagate in ("compressed", "dense"):
        _play(world, propagate, None)
        world.reference[propagate] = file_digests(world.work / "output")
    for name, (propagate, key) in STOPS.items():
        _play(world, propagate, key)
        shutil.copytree(world.work, root / "kept" / name, symlinks=True)
    return world


def _make_inputs(new: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    factories.make_model(new / "model", num_hidden_layers=2, max_position_embeddings=64)
    (new / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    lines = factories.write_text(new / "text.txt", 2000).read_text().splitlines()
    (new / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (new / "text.json").write_text(json.dumps([{"text": line} for line in lines]))
    pyarrow.parquet.write_table(pyarrow.table({"text": lines}), new / "text.parquet")
    (new / "manifest.yaml").write_text(yaml.safe_dump(document()))
    (new / "full.yaml").write_text(dump_manifest(load_manifest(new / "manifest.yaml")))


def _play(world: World, propagate: str, stop: str | None) -> None:
    """Run a job in a fresh folder; it ends, as if killed, when the ledger key `stop` is about to be committed."""
    (world.fresh() / "manifest.yaml").write_text(yaml.safe_dump(document(propagate)))
    commit: Any = Ledger.commit

    def commit_or_die(ledger: Ledger, key: Any, record: Any) -> None:
        if key == stop:
            os._exit(CUT)
        commit(ledger, key, record)

    def act() -> None:
        os.chdir(world.work)
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        Ledger.commit = commit_or_die  # type: ignore[method-assign,assignment]
        assert COMMANDS["run"](["manifest.yaml", "--in-process"]) == 0

    status, expected = in_child(act), CUT if stop else 0
    assert status == expected, f"the job that a case starts from ended with {status}, expected {expected}"
