"""What the cases of the fuzzer start from: a small model, texts in every format, a whole job, and jobs cut short.

All of it is made at ROOT/work, where every case is played, and kept beside it, so that absolute paths stay true.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from manifests.loading import dump_manifest, load_manifest
from stores.ledger import Ledger
from tests import factories
from tests.end_to_end.jobs import COMMANDS, file_digests
from tools.soak.sandbox import in_child

CUT = 9
HALVES = {  # name -> (propagate, the ledger key before whose commit the job is killed)
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
class World:
    """`work`: the folder a case is played in; the rest is copied from `kept`."""

    root: Path
    reference: dict[str, dict[str, str]]

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def kept(self) -> Path:
        return self.root / "kept"

    @property
    def scratch(self) -> Path:
        return self.root / "scratch"

    def fresh(self, half: str | None = None) -> Path:
        """The working folder, as new; with the run directory and output of a job cut short, or of a whole one."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.kept / "new", self.work)
        if half is not None:
            shutil.copytree(self.kept / half, self.work, dirs_exist_ok=True, symlinks=True)
        return self.work


def document(propagate: str = "compressed") -> dict[str, Any]:
    """The job's manifest. Paths are relative: a path that is cut short stays in the folder."""
    return {
        "version": 1,
        "model": {"source": "model"},
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
    """Everything, in children of this process: it takes some seconds."""
    new = root / "kept" / "new"
    for folder in (new / "tmp", root / "scratch"):
        folder.mkdir(parents=True)
    _succeed(lambda: _make_inputs(new))
    world = World(root, {})
    for propagate in ("compressed", "dense"):
        _play(world, propagate, None)
        world.reference[propagate] = file_digests(world.work / "output")
    for name, (propagate, key) in HALVES.items():
        _play(world, propagate, key)
        for part in ("run", "output", "manifest.yaml"):
            _copy(world.work / part, root / "kept" / name / part)
    return world


def _make_inputs(new: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    factories.make_model(new / "model", num_hidden_layers=2, max_position_embeddings=64)
    (new / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    factories.write_text(new / "text.txt", 2000)
    lines = (new / "text.txt").read_text().splitlines()
    (new / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (new / "text.json").write_text(json.dumps([{"text": line} for line in lines]))
    pyarrow.parquet.write_table(pyarrow.table({"text": lines}), new / "text.parquet")
    (new / "manifest.yaml").write_text(yaml.safe_dump(document()))
    full = dump_manifest(load_manifest(new / "manifest.yaml"))
    (new / "full.yaml").write_text(full)


def _play(world: World, propagate: str, cut: str | None) -> None:
    world.fresh()
    (world.work / "manifest.yaml").write_text(yaml.safe_dump(document(propagate)))

    def act() -> None:
        os.chdir(world.work)
        _quiet()
        if cut is not None:
            cut_before(cut)
        code = COMMANDS["run"](["manifest.yaml"])
        assert code == 0, code

    status = in_child(act)
    expected = CUT if cut else 0
    assert status == expected, f"the job to start from ended with {status}, expected {expected}"


def cut_before(key: str) -> None:
    """This process ends as if killed when `key` is about to be committed."""
    commit = Ledger.commit

    def commit_or_die(self: Ledger, committed: str, record: dict[str, Any]) -> None:
        if committed == key:
            os._exit(CUT)
        commit(self, committed, record)

    Ledger.commit = commit_or_die  # type: ignore[method-assign]


def _quiet() -> None:
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def _copy(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.copytree(path, target, symlinks=True)
    elif path.exists():
        shutil.copy2(path, target)


def _succeed(action: Callable[[], None]) -> None:
    assert in_child(action) == 0
