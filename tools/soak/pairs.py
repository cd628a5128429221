"""Play random pairs of a model and a manifest: each must be refused by name, or its output must pass every check.

    python -m tools.soak.pairs [--pairs 1000] [--seed 0] [--only N] [--first N] [--results FILE] [--directory DIR]

A pair is played in a forked child of this warm process, without Ray. `--results` gets a line of JSON for each pair;
pairs of the same seed that have a line are skipped, so that an interrupted run continues. `--only N` plays one pair and
prints everything.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # before transformers is imported

import torch
import yaml

import lamina.modeling_lamina  # noqa: F401 - seconds, once, before children are forked
import pipeline.job.stages
import pipeline.verification.runner  # noqa: F401
from tests.end_to_end.jobs import command, without_ray
from tests.factories import make_tokenizer, write_text
from tools.soak.pair_checks import PLAIN, Played, faults_of
from tools.soak.pair_manifests import TEXT, draw_manifest
from tools.soak.pair_models import TOKENIZER_SIZE, ModelSpec, draw_model
from tools.soak.pair_sources import draw_methods, draw_prefixes, draw_source
from tools.soak.pair_writing import write_model
from tools.soak.sandbox import in_child

SECONDS = 300  # after which a pair's child is ended
TEXT_BYTES = 3_000
SHOWN = 600
MEASURED = "parts stay dense, such as experts that no token passed"


@dataclass
class Verdict:
    """The outcome of a pair: `refused`, `clean` or `faulty`."""

    seed: int
    number: int
    outcome: str = "faulty"
    message: str = ""
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    model: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)


def draw(seed: int, number: int) -> tuple[ModelSpec, dict[str, Any]]:
    """Draw the pair of a number."""
    random = Random(f"{seed}/{number}")
    further = Random(f"{seed}/{number}/source")
    spec = draw_source(further, draw_model(random))
    positions = spec.config["max_position_embeddings"]
    document = draw_manifest(random, spec.layers, positions, spec.gated, spec.grouped)
    return spec, draw_prefixes(further, draw_methods(further, spec, document))


def judge(seed: int, number: int, folder: Path) -> Verdict:
    """Play a pair in a new folder, in a child."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started, report = time.monotonic(), folder / "verdict.json"
    verdict = Verdict(seed, number)
    spec, document = draw(seed, number)
    verdict.model, verdict.manifest = asdict(spec), document

    def act() -> None:
        signal.alarm(SECONDS)  # has no handler: it ends the child
        os.chdir(folder)
        log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.fsync = lambda _: None  # type: ignore[assignment]  # no power cut is tested: it would only take time
        try:
            _play(verdict, spec, document)
        except Exception:
            verdict.faults.append(traceback.format_exc()[-SHOWN:])
        report.write_text(json.dumps(asdict(verdict)))

    status = in_child(act)
    if report.exists():
        verdict = Verdict(**json.loads(report.read_text()))
    else:
        verdict.faults.append(f"the child ended with {status} (a signal, where negative)")
    verdict.seconds = round(time.monotonic() - started, 2)
    return verdict


def _play(verdict: Verdict, spec: ModelSpec, document: dict[str, Any]) -> None:
    """Play a pair in the working directory."""
    write_model(spec, Path("model"), Path(PLAIN))
    write_text(TEXT, TEXT_BYTES)
    Path("manifest.yaml").write_text(yaml.safe_dump(document))
    with without_ray():
        ended = command("run", "manifest.yaml", "--json")
        verdict.message = ended.err[-SHOWN:]
        if ended.code == 0 and spec.refused:
            verdict.faults.append(f"run: takes a model with {spec.refused}")
            return
        if ended.code == 0:
            verdict.faults += faults_of(Played(spec, document, ended.json))
            verdict.outcome = "faulty" if verdict.faults else "clean"
            return
    verdict.faults += _refusal_faults(ended.code, ended.err)
    if spec.refused not in ended.err and not _refused_without_it(spec):
        verdict.faults.append(f"run: the refusal does not name {spec.refused}")
    verdict.outcome = "faulty" if verdict.faults else "refused"


def _refused_without_it(spec: ModelSpec) -> bool:
    """Return True if the model is refused without the fields that must be refused, too, for another reason."""
    for folder in ("model", PLAIN):
        shutil.rmtree(folder)
    write_model(replace(spec, fields={}, encoded="", refused=""), Path("model"), Path(PLAIN))
    with without_ray():
        return command("plan", "manifest.yaml").code == 2


def _refusal_faults(code: int, message: str) -> Iterator[str]:
    """Check that a refusal has a message and writes nothing.

    A budget that only the text shows to be out of reach, by experts that no token passed, may be refused after passes.
    """
    if code != 2:
        yield f"run: exit code {code}"
    if "wrong input: " not in message or "Traceback" in message:
        yield "run: no message"
    if MEASURED in message:
        return
    for path in (Path("output"), Path("run")):
        if path.exists() and any(entry.is_file() for entry in path.rglob("*")):
            yield f"run: refused, and leaves files in {path}"


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    options = argparse.ArgumentParser(prog="python -m tools.soak.pairs", description=__doc__.partition("\n")[0])
    options.add_argument("--pairs", type=int, default=1000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--first", type=int, default=0, metavar="N", help="the number of the first pair")
    options.add_argument("--only", type=int, metavar="N", help="one pair, with everything it says")
    options.add_argument("--most", type=int, metavar="COUNT", help="end after so many new pairs")
    options.add_argument("--results", type=Path, metavar="FILE", help="JSON lines, extended by each run")
    options.add_argument("--directory", type=Path, help="where to work; emptied at the end, but for --only")
    arguments = options.parse_args(argv)
    torch.set_num_threads(1)
    make_tokenizer(TOKENIZER_SIZE)  # trained once
    if arguments.only is not None:
        return _show(arguments.seed, arguments.only, arguments.directory or Path(tempfile.mkdtemp(prefix="pair-")))
    if arguments.directory is not None:
        arguments.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pairs-", dir=arguments.directory) as directory:
        return _all(arguments, Path(directory) / "pair")


def _show(seed: int, number: int, folder: Path) -> int:
    verdict = judge(seed, number, folder)
    print(yaml.safe_dump({"model": verdict.model, "manifest": verdict.manifest}, sort_keys=False))
    print((folder / "log").read_text() + verdict.message)
    print(f"pair {number}: {verdict.outcome}, {verdict.seconds} s, in {folder}")
    print("\n".join(verdict.faults))
    return 1 if verdict.faults else 0


def _all(arguments: argparse.Namespace, folder: Path) -> int:
    numbers_done = _numbers_done(arguments.results, arguments.seed)
    numbers = range(arguments.first, arguments.first + arguments.pairs)
    outcomes: Counter[str] = Counter()
    for number in [number for number in numbers if number not in numbers_done][: arguments.most]:
        verdict = judge(arguments.seed, number, folder)
        outcomes[verdict.outcome] += 1
        for fault in verdict.faults:
            print(f"pair {number}: {fault}", flush=True)
        if arguments.results:
            with arguments.results.open("a") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")
    print(f"seed {arguments.seed}: {', '.join(f'{count} {name}' for name, count in sorted(outcomes.items()))}")
    return 1 if outcomes["faulty"] else 0


def _numbers_done(results: Path | None, seed: int) -> set[int]:
    """Read the numbers of the pairs that have a whole line."""
    numbers: set[int] = set()
    for line in results.read_text().splitlines() if results is not None and results.exists() else ():
        with suppress(ValueError):
            entry = json.loads(line)
            if entry["seed"] == seed:
                numbers.add(entry["number"])
    return numbers


if __name__ == "__main__":
    sys.exit(main())
