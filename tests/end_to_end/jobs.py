"""Runs jobs for end-to-end tests: a manifest in a new folder, the real commands in this process, their files."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import manifests.heal
import pipeline.evaluate
import pipeline.export
import pipeline.heal
import pipeline.init
import pipeline.plan
import pipeline.push
import pipeline.report
import pipeline.run
import pipeline.scale
import pipeline.status
import pipeline.sweep
import pipeline.verify
from manifests.records import Record

COMMANDS: dict[str, Callable[[list[str] | None], int]] = {
    "init": pipeline.init.main,
    "run": pipeline.run.main,
    "plan": pipeline.plan.main,
    "status": pipeline.status.main,
    "report": pipeline.report.main,
    "scale": pipeline.scale.main,
    "evaluate": pipeline.evaluate.main,
    "heal": pipeline.heal.main,
    "export": pipeline.export.main,
    "push": pipeline.push.main,
    "verify": pipeline.verify.main,
    "sweep": pipeline.sweep.main,
}
MORE: ContextVar[Callable[[str], tuple[str, ...]]] = ContextVar("MORE", default=lambda _: ())  # arguments of a command
FLAT_LLM: dict[str, Any] = {"method": "flat_llm"}


@dataclass
class Ended:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


@dataclass
class Job:
    """A manifest and the folders of its job. `changes` of the manifest: {"budget.keep": 0.5, "calibration": ...}."""

    root: Path
    source: Path
    text: Path
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.yaml"

    @property
    def output(self) -> Path:
        return self.root / "output"

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "version": 1,
            "model": {"source": str(self.source), "accept_loss": True},  # of random weights
            "output": str(self.output),
            "run_dir": str(self.run_dir),
            "seed": 3,
            "budget": {"keep": 0.7},
            "calibration": {
                "propagate": "compressed",
                "text": {"files": [str(self.text)]},
                "samples": 8,
                "sequence_length": 24,
                "shards": 2,
                "micro_batch": 2,
            },
            "methods": [dict(FLAT_LLM)],
            "workers": {"max": 1},
        }
        for path, value in self.changes.items():
            *parents, last = path.split(".")
            target = document
            for parent in parents:
                target = target.setdefault(parent, {})
            target[last] = value
        return document

    def write(self) -> Job:
        self.root.mkdir(parents=True, exist_ok=True)
        self.manifest.write_text(yaml.safe_dump(self.document()))
        return self

    def run(self, *options: str) -> Ended:
        """Run `python -m pipeline.run MANIFEST --json` in this process."""
        return command("run", str(self.write().manifest), "--json", *options)

    def keep(self) -> None:
        """Save a copy of the job's folder beside it."""
        shutil.copytree(self.root, self.root.with_name("kept"))

    def put_back(self) -> Job:
        """Restore the job's folder from the saved copy."""
        shutil.rmtree(self.root)
        shutil.copytree(self.root.with_name("kept"), self.root)
        return self

    def compression(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.output / "compression.json").read_text())
        return content

    def ledger(self, key: str) -> Any:
        """Return the newest record of a key."""
        files = sorted((self.run_dir / "ledger").glob(f"{key.replace('/', '.')}.[0-9]*.json"))
        return json.loads(files[-1].read_text())["record"]

    def scored(self, evaluation: dict[str, Any]) -> Ended:
        """Run the same job, asked for other scores."""
        return Job(self.root, self.source, self.text, {**self.changes, "evaluation": evaluation}).run()


MakeJob = Callable[..., Job]  # the fixture `job`


class Sweep:
    """A sweep on the model of a job, in its folder. `changes` replace blocks of the document."""

    def __init__(self, job: Job, points: list[dict[str, Any]], scored: Path | None = None, **changes: Any) -> None:
        self.job = job
        self.document = job.document()
        del self.document["budget"], self.document["methods"]
        self.document["calibration"]["propagate"] = "dense"
        if scored is not None:
            self.document["evaluation"] = {"perplexity": {"text": {"files": [str(scored)]}, "window": 24}}
        self.document |= {"keep": [0.8, 0.6], "points": points, **changes}

    def write(self) -> Path:
        """Write the sweep's file, and return it."""
        path = self.job.root / "sweep.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(self.document))
        return path

    def run(self, *options: str) -> Ended:
        """Run `python -m pipeline.sweep SWEEP --json` in this process."""
        return command("sweep", str(self.write()), "--json", *options)

    def units(self) -> list[str]:
        """Return the units of all runs."""
        logs = sorted((self.job.run_dir / "logs").glob("*.units.jsonl"))
        return [json.loads(line)["unit"] for path in logs for line in path.read_text().splitlines()]

    def forwards(self) -> list[str]:
        """Return the passes of shards of calibration text through the dense model, in all runs."""
        return [unit for unit in self.units() if unit.startswith(("forward/", "backward/"))]


def in_process(name: str) -> tuple[str, ...]:
    """Return `--in-process` for commands that have it."""
    return ("--in-process",) if name in ("run", "sweep", "evaluate", "heal") else ()


def interrupting(owner: Any, name: str, calls: int, after: bool = False) -> tuple[Any, str, Callable[..., Any]]:
    """Return arguments of `setattr` that interrupt the command at a call of a function, before or after it."""
    real, done = getattr(owner, name), list[int]()

    def call(*arguments: Any, **options: Any) -> Any:
        done.append(1)
        if len(done) == calls and not after:
            raise KeyboardInterrupt
        result = real(*arguments, **options)
        if len(done) == calls:
            raise KeyboardInterrupt
        return result

    return owner, name, call


def take_small_steps(patch: pytest.MonkeyPatch) -> None:
    """Make a healing take a step for each three windows."""
    patch.setattr(manifests.heal, "STEPS", 1)
    patch.setattr(manifests.heal, "STEP_TOKENS", 96)


@contextlib.contextmanager
def without_ray(options: Callable[[str], tuple[str, ...]] = in_process) -> Iterator[None]:
    """Make `command` add `--in-process`, or other `options` of each command, in the block."""
    more = MORE.set(options)
    try:
        yield
    finally:
        MORE.reset(more)


def work_done(job: Job) -> list[str]:
    """Return the units that the workers of a job have done, of its log."""
    path = job.root / "log.units"
    return path.read_text().splitlines() if path.exists() else []


def command(name: str, *arguments: str) -> Ended:
    """Call a command's `main`, and restore signal handlers afterwards."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                accepting = ("--accept-loss",) if name == "evaluate" else ()  # most models of tests are random
                code = COMMANDS[name]([*arguments, *accepting, *MORE.get()(name)])
            except SystemExit as ended:  # of argparse
                code = int(ended.code or 0)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Ended(code, out.getvalue(), err.getvalue())


def edit_json(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def file_digests(directory: Path) -> dict[str, str]:
    """Return path below a folder -> sha256, for each file in it."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def weight_digests(directory: Path) -> dict[str, str]:
    """Return the digests of a checkpoint's safetensors files, by name."""
    return {name: digest for name, digest in file_digests(directory).items() if name.endswith(".safetensors")}


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors in a checkpoint's files, by the library safetensors, without the index."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                assert name not in tensors, f"{name} is in two files"
                tensors[name] = file.get_tensor(name)
    return tensors


def load(directory: Path, **options: Any) -> Any:
    """Load a checkpoint as a user does; fail if weights are missing or left over."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, **options)
    model, report = loaded
    assert not any(report.values()), report
    return model.eval()


def some_tokens(vocab: int, batch: int = 3, length: int = 20, seed: int = 5) -> torch.Tensor:
    """Return token ids (batch, length) without special ones."""
    return torch.randint(2, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits_of(model: Any, ids_BT: torch.Tensor, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        logits_BTV: torch.Tensor = model(ids_BT, **inputs).logits
    return logits_BTV


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest expected number."""
    return ((found.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def source_error(output: Path, source: Path) -> float:
    """Return the relative error of a checkpoint's logits on some tokens, against those of its source."""
    dense = load(source)
    ids_BT = some_tokens(dense.config.vocab_size)
    return relative_error(logits_of(load(output), ids_BT), logits_of(dense, ids_BT))


def leaves(value: Any) -> Iterator[Any]:
    """Yield all values inside a unit or a result, through records, dataclasses, mappings and sequences."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from leaves(key)
            yield from leaves(child)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for child in value:
            yield from leaves(child)
    elif isinstance(value, Record) or hasattr(value, "__dataclass_fields__"):
        yield from leaves(vars(value))
    else:
        yield value
