"""`python -m tools.soak.corruption [--methods ...]`: every kind of file of a job, damaged in every way.

RUN_DIR: a job is killed at a commit, one of its files is damaged, and the same command goes on. It must end with the
bytes of a job that was left alone, or refuse by naming the file; then the next run, or `--fresh`, gives these bytes.
OUTPUT: `verify` must exit 1 and name the file, and for shards the tensor; `run` must put a cut or lost file right.
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
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stores.durable import PARTIAL_SUFFIX
from stores.headers import read_header
from tests import factories
from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import Ended, Job, command, file_digests, without_ray
from tools.soak.damage import DAMAGES, SAME_SIZE, copy_job, damage
from tools.soak.edits import EDITS, edit

METHODS: dict[str, dict[str, Any]] = {
    "flat_llm": {"methods": [{"method": "flat_llm"}]},
    "flat_llm dense": {"methods": [{"method": "flat_llm", "query_key": "head_pca"}], "calibration.propagate": "dense"},
    "lestd": {"methods": [{"method": "lestd", "target": "both", "keep": 0.5}], "budget": None, "calibration": None},
    "lorc": {"methods": [{"method": "lorc", "cache_keep": 0.5, "weighting": "input"}], "budget": None},
    "joint_rank_k": {"methods": [{"method": "joint_rank_k", "mlp": False, "keep": 0.6}], "budget": None},
}
STOPS = ("dense/00001", "activations/00001", "layer/00001", "activations/00002", "assembling", "complete", "")
GENERATION = re.compile(r"[0-9a-f]{32}")


@dataclass
class Results:
    """What became of each kind of file under each damage."""

    table: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    edits: list[tuple[str, str, str, str]] = field(default_factory=list)

    def add(self, kind: str, how: str, result: str) -> None:
        self.table.setdefault((kind, how), Counter())[result] += 1

    def note(self, kind: str, how: str, seen: str, again: str, where: str) -> None:
        """One damage of OUTPUT: what `verify` and what `run` made of it."""
        result = ", ".join(filter(None, (seen, again.partition(":")[0])))
        self.add(kind, how, result)
        if "NOT" in result:
            self.faults.append(f"{where}, {how}: {seen}, {again}")
            print(f"FAULT {self.faults[-1]}", flush=True)

    def show(self) -> str:
        kinds = sorted({kind for kind, _ in self.table})
        lines = ["| file | " + " | ".join(DAMAGES) + " |", "|---" * (len(DAMAGES) + 1) + "|"]
        for kind in kinds:
            cells = [self.table.get((kind, how), Counter()) for how in DAMAGES]
            shown = (", ".join(f"{result} {count}" for result, count in sorted(cell.items())) for cell in cells)
            lines.append(f"| {kind} | " + " | ".join(shown) + " |")
        lines += ["", "| edited, digests fitting | job | found | as |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(found)} |" for found in self.edits]
        return "\n".join(lines)


def run_kind(path: Path) -> str:
    """What a file of RUN_DIR is: `path` is relative to it."""
    top = path.parts[0]
    if top == "ledger":
        return f"ledger: {path.name.split('.')[0]}"
    if top.endswith(".zarr"):
        what = "tokens" if "tokens" in path.parts else top.removesuffix(".zarr")
        if path.name != "zarr.json":
            return f"{what}: chunk"
        return f"{what}: {'array' if GENERATION.fullmatch(path.parent.name) else 'group'} metadata"
    return {"staged": "staged layer", "logs": "log"}.get(top, top)


def one_of_each(run_dir: Path) -> dict[str, Path]:
    """Kind -> the newest file of it, by name."""
    found = sorted(path for path in run_dir.rglob("*") if path.is_file() and not path.name.endswith(PARTIAL_SUFFIX))
    return {run_kind(path.relative_to(run_dir)): path.relative_to(run_dir) for path in found}


def stopped_job(job: Job, before: str) -> Job | None:
    """Runs a job that is killed before a commit (to its end, if that is ""), and moves what it left elsewhere.

    None when there is no such commit. The copies that are damaged stand where it ran: entries hold OUTPUT's path.
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


def go_on(job: Job, expected: dict[str, str], name: str) -> tuple[str, str]:
    """Runs a damaged job again: (what became of it, what is wrong with that)."""
    ended = job.run()
    if ended.code == 0:
        return said_of(ended), "" if file_digests(job.output) == expected else "other bytes"
    if "internal error" in ended.err or "Traceback" in ended.err or ended.code not in (1, 2):
        return "crash", ended.err.strip()[-300:]
    if name not in ended.err and str(job.output) not in ended.err:
        return "refused", f"the file is not named: {ended.err.strip()[-300:]}"
    if "--fresh" not in ended.err and "run the same command again" not in ended.err:
        return "refused", f"no advice: {ended.err.strip()[-300:]}"
    again = job.run("--fresh") if "--fresh" in ended.err else job.run()
    if again.code != 0 or file_digests(job.output) != expected:
        return "refused", f"and then: exit {again.code}, {again.err.strip()[-300:]}"
    return "refused, --fresh" if "--fresh" in ended.err else "refused, again", ""


def said_of(ended: Ended) -> str:
    """Whether the repair is told."""
    if any(word in ended.err for word in ("repairing", "damaged", "missing")):
        return "repaired"
    return "no matter"


def check_run_dir(
    made: Job, expected: dict[str, str], results: Results, where: str, damages: list[str], only: str = ""
) -> None:
    """Every kind of file of the run directory (or only one) under every damage."""
    for kind, path in one_of_each(made.run_dir).items():
        for how in damages if only in ("", kind) else ():
            copied = copy_job(made, made.root.with_name("job"))
            try:
                if damage(copied.run_dir / path, DAMAGES[how]):
                    name = path.parts[1] if path.parts[0] == "ledger" else path.name
                    result, fault = go_on(copied, expected, name)
                    results.add(kind, how, result if not fault else f"FAULT ({result})")
                    if fault:
                        results.faults.append(f"{where}: {path}, {how}: {fault}")
                        print(f"FAULT {results.faults[-1]}", flush=True)
            finally:
                shutil.rmtree(copied.root)


def output_kind(name: str) -> str:
    """What a file of OUTPUT is."""
    if name.endswith(".safetensors"):
        return "shard"
    return "tokenizer file" if name.startswith(("tokenizer", "special_tokens")) else name


def checked_shards(job: Job) -> list[tuple[Path, str, int]]:
    """(path, tensor or "header", a byte of it): of one tensor of every form and part, and of a header."""
    found: dict[str, tuple[Path, str, int]] = {}
    for name, entry in sorted(job.compression()["tensors"].items()):
        path = job.output / entry["shard"]
        at = read_header(path.parent, path.name)[name]
        part = name.rpartition(".")[2] if entry["form"] != "dense" else "weight"
        found[f"{entry['form']}.{part} {entry['origin']}"] = (path, name, (at.begin + at.end) // 2)
        found["header"] = (path, "header", 12)
    return list(found.values())


def faults_of(job: Job, *options: str) -> tuple[int, list[str], str]:
    """`verify --json` of an output: exit code, faults, what else it said."""
    ended = command("verify", str(job.output), "--json", *options)
    findings = json.loads(ended.out)["findings"] if ended.out.startswith("{") else []
    return ended.code, [fault for finding in findings for fault in finding["faults"]], ended.err


def check_output(made: Job, expected: dict[str, str], results: Results, where: str, damages: list[str]) -> None:
    """Every kind of file of OUTPUT under every damage: seen by `verify` with and without source, repaired by `run`."""
    kinds = {output_kind(path.name): path.name for path in sorted(made.output.iterdir())}
    for kind, name in kinds.items():
        for how in damages:
            copied = copy_job(made, made.root.with_name("job"))
            if damage(copied.output / name, DAMAGES[how]):
                seen = all(seen_by_verify(copied, name, options) for options in ([], ["--source", str(copied.source)]))
                again = "same size" if kind == "shard" and how in SAME_SIZE else repaired_by_run(copied, expected)
                results.note(f"OUTPUT {kind}", how, "seen" if seen else "NOT seen", again, f"{where}: {name}")
            shutil.rmtree(copied.root)
    for path, tensor, position in checked_shards(made):
        copied = copy_job(made, made.root.with_name("job"))
        content = bytearray(path.read_bytes())
        content[position] ^= 1
        target = copied.output / path.name
        target.unlink()
        target.write_bytes(content)
        seen = seen_by_verify(copied, path.name, [], "header" if tensor == "header" else tensor)
        results.note(
            "OUTPUT shard: byte of a tensor", "middle byte", "seen" if seen else "NOT seen", "", f"{where}: {tensor}"
        )
        shutil.rmtree(copied.root)


def check_edits(made: Job, results: Results, where: str) -> None:
    """Changes after which every digest fits again: found by what the files say, or only beside the source.

    The logits are to be as near to the source's as they were, but for 1 %: random models have errors about 1.
    """
    bound = f"{1.01 * logits_error(made):.6g}"
    for name in EDITS:
        copied = copy_job(made, made.root.with_name("job"))
        if edit(copied.output, name):
            with_source = ["--source", str(copied.source), "--bound", bound]
            alone, beside = (faults_of(copied, *options) for options in ([], with_source))
            found = "alone" if alone[0] == 1 else "with --source" if beside[0] == 1 else "NOT found"
            told = (beside[1] or [""])[0].replace(str(copied.root), "")
            results.edits.append((name, where, found, told[:110]))
            if found == "NOT found" and not name.startswith("out of reach"):
                results.faults.append(f"{where}: {name}: {found} {beside}")
                print(f"FAULT {results.faults[-1]}", flush=True)
        shutil.rmtree(copied.root)


def logits_error(made: Job) -> float:
    """Of the undamaged output, or of its worst layer; `verify` has nothing else against it."""
    found = command("verify", str(made.output), "--source", str(made.source), "--bound", "10", "--json").json
    assert found["passed"], found
    return max(map(float, re.findall(r"(?:relative error|at most) ([0-9.e+-]+)", found["findings"][-1]["detail"])))


def seen_by_verify(job: Job, name: str, options: list[str], tensor: str = "") -> bool:
    """Exit 1, and a fault that names file and tensor."""
    code, faults, said = faults_of(job, *options)
    named = any(name in fault and tensor in fault for fault in faults)
    return code == 1 and named and "internal error" not in said


def repaired_by_run(job: Job, expected: dict[str, str]) -> str:
    """What `run` does with a finished job whose output was damaged."""
    ended = job.run()
    if ended.code != 0 or file_digests(job.output) != expected:
        return f"NOT repaired: {ended.err[-200:]}"
    return "repaired" if "repairing" in ended.err else "NOT told"


def jobs(root: Path, names: list[str]) -> Iterator[tuple[str, Job, dict[str, str]]]:
    """Method -> a job that is not yet begun, and the bytes of its output."""
    source = factories.make_model(root / "source", num_hidden_layers=3)
    text = factories.write_text(root / "text.txt", 20_000)
    for name in names:
        job = Job(root / "job", source, text, METHODS[name]).write()
        assert job.run().code == 0
        expected = file_digests(job.output)
        shutil.rmtree(job.root)
        yield name, job, expected


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = argparse.ArgumentParser(prog="python -m tools.soak.corruption", description=__doc__.partition("\n")[0])
    options.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS, metavar="METHOD")
    options.add_argument("--damages", nargs="*", default=list(DAMAGES), choices=DAMAGES, metavar="DAMAGE")
    options.add_argument("--stops", nargs="*", default=list(STOPS), metavar="KEY")
    arguments = options.parse_args(argv)
    results = Results()
    started = time.monotonic()
    with without_ray(), tempfile.TemporaryDirectory() as directory:
        for name, job, expected in jobs(Path(directory), arguments.methods):
            for before in arguments.stops:
                whole = stopped_job(job, before)
                if whole is not None:
                    where = f"{name} before {before}" if before else f"{name}, finished"
                    check_run_dir(whole, expected, results, where, arguments.damages)
                    if not before:
                        check_output(whole, expected, results, where, arguments.damages)
                        check_edits(whole, results, where)
                    shutil.rmtree(whole.root)
    print(results.show())
    cases = sum(sum(cell.values()) for cell in results.table.values())
    print(f"{cases} cases, {len(results.faults)} faults, {time.monotonic() - started:.0f} s")
    return 1 if results.faults else 0


if __name__ == "__main__":
    sys.exit(main())
