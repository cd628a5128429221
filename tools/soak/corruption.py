"""Damage every kind of file of a job in every way: `python -m tools.soak.corruption [--methods ...]`.

RUN_DIR: a job is killed at a commit, one of its files is damaged, and the same command goes on. It must end with the
bytes of an undisturbed job, or refuse and name the file; then the next run, or `--fresh`, gives these bytes.
OUTPUT: `verify` must exit 1 and name the file, and for shards the tensor; `run` must repair a cut or lost file.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stores.durable import PARTIAL_SUFFIX
from stores.headers import read_header
from tests import factories
from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import Job, command, file_digests, without_ray
from tools.soak.damage import DAMAGES, EDITS, SAME_SIZE, copy_job, damage, edit

METHODS: dict[str, dict[str, Any]] = {
    "flat_llm": {"methods": [{"method": "flat_llm"}]},
    "flat_llm dense": {"methods": [{"method": "flat_llm", "query_key": "head_pca"}], "calibration.propagate": "dense"},
    "lestd": {"methods": [{"method": "lestd", "target": "both", "keep": 0.5}], "budget": None, "calibration": None},
    "lorc": {"methods": [{"method": "lorc", "cache_keep": 0.5, "weighting": "input"}], "budget": None},
    "joint_rank_k": {"methods": [{"method": "joint_rank_k", "mlp": False, "keep": 0.6}], "budget": None},
}
STOPS = ("dense/00001", "activations/00001", "layer/00001", "activations/00002", "assembling", "complete", "")
GENERATION = re.compile(r"[0-9a-f]{32}")
Digests = dict[str, str]


@dataclass
class Results:
    """Outcomes by kind of file and damage, faults, and (edit, job, who noticed, first fault named)."""

    table: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    edits: list[tuple[str, str, str, str]] = field(default_factory=list)

    def add(self, kind: str, how: str, result: str, fault: str = "") -> None:
        """Count an outcome; print its fault."""
        self.table.setdefault((kind, how), Counter())[result] += 1
        if fault:
            self.faults.append(fault)
            print(f"FAULT {fault}", flush=True)

    def show(self) -> str:
        """Return both tables, as Markdown."""
        lines = ["| file | " + " | ".join(DAMAGES) + " |", "|---" * (len(DAMAGES) + 1) + "|"]
        for kind in sorted({kind for kind, _ in self.table}):
            cells = (self.table.get((kind, how), Counter()) for how in DAMAGES)
            shown = (", ".join(f"{result} {count}" for result, count in sorted(cell.items())) for cell in cells)
            lines.append(f"| {kind} | " + " | ".join(shown) + " |")
        lines += ["", "| edited, digests fitting | job | noticed | as |", "|---|---|---|---|"]
        return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in self.edits)])


def run_kind(path: Path) -> str:
    """Return the kind of a file of RUN_DIR, by its path there."""
    top = path.parts[0]
    if top == "ledger":
        return f"ledger: {path.name.split('.')[0]}"
    if top.endswith(".zarr"):
        array = "tokens" if "tokens" in path.parts else top.removesuffix(".zarr")
        if path.name != "zarr.json":
            return f"{array}: chunk"
        return f"{array}: {'array' if GENERATION.fullmatch(path.parent.name) else 'group'} metadata"
    return {"staged": "staged layer", "logs": "log"}.get(top, top)


def one_of_each(run_dir: Path) -> dict[str, Path]:
    """Return the newest file of each kind, by name."""
    files = sorted(path for path in run_dir.rglob("*") if path.is_file() and not path.name.endswith(PARTIAL_SUFFIX))
    return {run_kind(path.relative_to(run_dir)): path.relative_to(run_dir) for path in files}


def stopped_job(job: Job, before: str) -> Job | None:
    """Run a job that is killed before a commit (to its end, if that is ""), and move its files elsewhere.

    Copies are damaged where the job ran, as its entries hold OUTPUT's path. Return None if there is no such commit.
    """
    job.write()
    child = Child("run", [str(job.manifest)], job.root / "log", Hook("commit", match=before) if before else None)
    code = child.end()
    assert code in (0, -signal.SIGKILL), child.said
    if (code == 0) is not (before == ""):
        shutil.rmtree(job.root)
        return None
    job.root.rename(job.root.with_name("whole"))
    return replace(job, root=job.root.with_name("whole"))


@contextmanager
def copy_of(whole: Job) -> Iterator[Job]:
    """Copy a job to its original path; remove the copy when the block ends."""
    copied = copy_job(whole, whole.root.with_name("job"))
    try:
        yield copied
    finally:
        shutil.rmtree(copied.root)


def run_again(job: Job, expected: Digests, name: str) -> tuple[str, str]:
    """Run a damaged job again. Return its outcome, and a description of the fault."""
    ended = job.run()
    message = ended.err.strip()[-300:]
    if ended.code == 0:
        repaired = any(word in ended.err for word in ("repairing", "damaged", "missing"))
        return "repaired" if repaired else "no matter", "" if file_digests(job.output) == expected else "other bytes"
    if "internal error" in ended.err or "Traceback" in ended.err or ended.code not in (1, 2):
        return "crash", message
    if name not in ended.err and str(job.output) not in ended.err:
        return "refused", f"the file is not named: {message}"
    fresh = "--fresh" in ended.err
    if not fresh and "run the same command again" not in ended.err:
        return "refused", f"no advice: {message}"
    again = job.run(*["--fresh"] * fresh)
    if again.code != 0 or file_digests(job.output) != expected:
        return "refused", f"and then: exit {again.code}, {again.err.strip()[-300:]}"
    return "refused, --fresh" if fresh else "refused, again", ""


def check_run_dir(
    whole: Job, expected: Digests, results: Results, where: str, damages: Sequence[str], only: str = ""
) -> None:
    """Damage every kind of file of the run directory (or only one) in every way."""
    for kind, path in one_of_each(whole.run_dir).items():
        for how in damages if only in ("", kind) else ():
            with copy_of(whole) as copied:
                if damage(copied.run_dir / path, DAMAGES[how]):
                    name = path.parts[1] if path.parts[0] == "ledger" else path.name
                    result, fault = run_again(copied, expected, name)
                    named = f"{where}: {path}, {how}: {fault}"
                    results.add(kind, how, f"FAULT ({result})" if fault else result, fault and named)


def output_kind(name: str) -> str:
    """Return the kind of a file of OUTPUT."""
    if name.endswith(".safetensors"):
        return "shard"
    return "tokenizer file" if name.startswith(("tokenizer", "special_tokens")) else name


def checked_shards(job: Job) -> list[tuple[str, str, int]]:
    """Return (shard, tensor or "header", a byte of it) of one tensor of every form and part, and of a header."""
    chosen: dict[str, tuple[str, str, int]] = {}
    for name, entry in sorted(job.compression()["tensors"].items()):
        at = read_header(job.output, entry["shard"])[name]
        part = name.rpartition(".")[2] if entry["form"] != "dense" else "weight"
        chosen[f"{entry['form']}.{part} {entry['origin']}"] = (entry["shard"], name, (at.begin + at.end) // 2)
        chosen["header"] = (entry["shard"], "header", 12)
    return list(chosen.values())


def verify(job: Job, *options: str) -> tuple[int, list[str], str]:
    """Run `verify --json` on an output. Return exit code, faults, and standard error."""
    ended = command("verify", str(job.output), "--json", *options)
    findings = json.loads(ended.out)["findings"] if ended.out.startswith("{") else []
    return ended.code, [fault for finding in findings for fault in finding["faults"]], ended.err


def noticed(job: Job, name: str, tensor: str = "", options: Sequence[str] = ()) -> bool:
    """Return True if `verify` exits 1 and a fault names file and tensor."""
    code, faults, message = verify(job, *options)
    return code == 1 and any(name in fault and tensor in fault for fault in faults) and "internal error" not in message


def repaired_by_run(job: Job, expected: Digests) -> str:
    """Run a finished job with a damaged output again. Return "" if it repairs the output and says so."""
    ended = job.run()
    if ended.code != 0 or file_digests(job.output) != expected:
        return f"not repaired: {ended.err[-200:]}"
    return "" if "repairing" in ended.err else "repaired without a word"


def check_output(whole: Job, expected: Digests, results: Results, where: str, damages: Sequence[str]) -> None:
    """Damage every kind of file of OUTPUT: `verify` sees it with and without the source, and `run` repairs it."""
    kinds = {output_kind(path.name): path.name for path in sorted(whole.output.iterdir())}
    for kind, name in kinds.items():
        for how in damages:
            with copy_of(whole) as copied:
                if damage(copied.output / name, DAMAGES[how]):
                    both: tuple[list[str], ...] = ([], ["--source", str(copied.source)])
                    faults = [] if all(noticed(copied, name, options=each) for each in both) else ["not noticed"]
                    if kind != "shard" or how not in SAME_SIZE:
                        faults += filter(None, [repaired_by_run(copied, expected)])
                    fault = f"{where}: {name}, {how}: {faults}" if faults else ""
                    results.add(f"OUTPUT {kind}", how, "FAULT" if faults else "noticed", fault)
    for shard, tensor, position in checked_shards(whole):
        with copy_of(whole) as copied:
            content = bytearray((copied.output / shard).read_bytes())
            content[position] ^= 1
            damage(copied.output / shard, lambda _, changed=bytes(content): changed)  # type: ignore[misc]
            named = noticed(copied, shard, tensor)
            fault = "" if named else f"{where}: {tensor}: not noticed"
            results.add("OUTPUT shard: byte of a tensor", "middle byte", "noticed" if named else "FAULT", fault)


def check_edits(whole: Job, results: Results, where: str) -> None:
    """Make edits after which every digest fits: `verify` notices them alone, or with the source.

    The logits must be as near to the source's as they were, within 1 %: random models have errors about 1.
    """
    healthy = command("verify", str(whole.output), "--source", str(whole.source), "--bound", "10", "--json").json
    assert healthy["passed"], healthy
    detail = healthy["findings"][-1]["detail"]
    error = max(map(float, re.findall(r"(?:relative error|at most) ([0-9.e+-]+)", detail)))
    for name in EDITS:
        with copy_of(whole) as copied:
            if not edit(copied.output, name):
                continue
            alone = verify(copied)
            beside = verify(copied, "--source", str(copied.source), "--bound", f"{1.01 * error:.6g}")
            by = "alone" if alone[0] == 1 else "with --source" if beside[0] == 1 else "NOT noticed"
            results.edits.append((name, where, by, (beside[1] or [""])[0].replace(str(copied.root), "")[:110]))
            if by == "NOT noticed" and not name.startswith("out of reach"):
                results.faults.append(f"{where}: {name}: {by} {beside}")
                print(f"FAULT {results.faults[-1]}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    options = argparse.ArgumentParser(prog="python -m tools.soak.corruption", description=__doc__.partition("\n")[0])
    options.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS, metavar="METHOD")
    options.add_argument("--damages", nargs="*", default=list(DAMAGES), choices=DAMAGES, metavar="DAMAGE")
    options.add_argument("--stops", nargs="*", default=list(STOPS), metavar="KEY")
    arguments = options.parse_args(argv)
    results, started = Results(), time.monotonic()
    with without_ray(), tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        source = factories.make_model(root / "source", num_hidden_layers=3)
        text = factories.write_text(root / "text.txt", 20_000)
        for name in arguments.methods:
            job = Job(root / "job", source, text, METHODS[name]).write()
            assert job.run().code == 0
            expected = file_digests(job.output)
            shutil.rmtree(job.root)
            for before in arguments.stops:
                if whole := stopped_job(job, before):
                    where = f"{name} before {before}" if before else f"{name}, finished"
                    check_run_dir(whole, expected, results, where, arguments.damages)
                    if not before:
                        check_output(whole, expected, results, where, arguments.damages)
                        check_edits(whole, results, where)
                    shutil.rmtree(whole.root)
    print(results.show())
    cases = sum(cell.total() for cell in results.table.values())
    print(f"{cases} cases, {len(results.faults)} faults, {time.monotonic() - started:.0f} s")
    return 1 if results.faults else 0


if __name__ == "__main__":
    sys.exit(main())
