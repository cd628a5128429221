"""Remake the README's figures on a real model, SmolLM2-135M-Instruct: `make real`.

    python -m tools.real [--models FOLDER] [--texts FOLDER] [--made runs/real] [--list] [STEP ...]

Each step is one command. Its output goes to MADE/STEP.txt, below the command. A step whose file begins with the same
command is skipped, so that the same call goes on after a kill or an error; jobs, sweeps and roundings also go on within
a step. MADE also holds the models and the picture. Minutes are measured on two cores of an AMD EPYC (AVX2).
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HUB, NAME = "HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct"
PASSAGES, TEST, OTHER = "wikitext103_train_1000.json", "wikitext2_raw_test.txt", "c4_sample.jsonl"
TASKS = ("arc_easy", "piqa", "hellaswag")
ENGINES = Path(".engines")
FAILED = 1


@dataclass(frozen=True)
class Step:
    """A command and the files that it writes. `replaced`: deleted before the command, which refuses an existing one.

    `needs`: without these paths the step is left out, with the advice `remedy`.
    """

    name: str
    remakes: str
    minutes: int
    command: tuple[str, ...]
    replaced: Path | None = None
    needs: tuple[Path, ...] = ()
    remedy: str = ""

    @property
    def line(self) -> str:
        """Return the command as a shell takes it."""
        return shlex.join(("python", "-m", *self.command))

    def missing(self) -> list[Path]:
        """Return the needed paths that do not exist."""
        return [path for path in self.needs if not path.exists()]


def steps(options: argparse.Namespace) -> list[Step]:
    """Return the steps in order. Later ones read what earlier ones wrote."""
    made: Path = options.made
    fetched: list[Step] = []
    model, texts = made / NAME, made / "texts"
    if options.models:
        model = options.models / NAME
    else:
        command = ("huggingface_hub.cli.hf", "download", HUB, "--local-dir", f"{model}")
        fetched.append(Step("model", "the source, from the hub", 1, command))
    if options.texts:
        texts = options.texts
    else:
        fetched.append(Step("texts", "the texts, from the hub", 2, ("tools.hub_texts", f"{texts}")))
    passages, test, other = (f"{texts / name}" for name in (PASSAGES, TEST, OTHER))
    job = f"{made / 'job.yaml'}"
    off_grid, rounding, four, three = (made / name for name in ("off-grid", "rounding", "four-bits", "three-bits"))
    gguf = made / "four-bits.gguf"
    init = ("pipeline.init", f"{model}", "--text", passages, "-o", job, "--force")
    python, llama_cpp = ENGINES / "vllm" / "bin" / "python", ENGINES / "llama-cpp"

    def places(name: str) -> tuple[str, ...]:
        return ("--set", f"output={made / name}", "--set", f"run_dir={made / name}.run")

    def rounded(name: str, bits: int) -> tuple[str, ...]:
        codes = ("--set", "methods=[]", "--set", "budget=null", "--set", f"quantize={{bits: {bits}}}")
        return ("pipeline.run", job, *places(name), *codes)

    compared = (f"{off_grid}", "--text", f"{passages}:0-820", "--score", test, other, "--cache", f"{rounding}")
    sweep = (
        "pipeline.sweep", "manifests/sweeps/real.yaml", *places("sweep"), "--set", f"model.source={model}",
        "--set", f"calibration.text={{files: [{passages}]}}",
        "--set", f"evaluation.perplexity.text={{files: [{test}], end: 0.1}}", "--plots", f"{made}",
    )  # fmt: skip
    served = (
        "tools.benchmarks.served", f"{four}", f"{gguf}", "--tokenizer", f"{model}", "--vllm", f"{python}",
        "--llama-cpp", f"{llama_cpp}", "--new", "16", "--repeats", "1",
    )  # fmt: skip
    levels = tuple(f"bits=4{kind}" for kind in ("", ",levels=normal", ",levels=iq4_nl", ",levels=learned"))
    tasks = ("tools.benchmarks.streamed_tasks", f"{model}", *options.tasks, "--limit", "334", "--turns", "1")
    return [
        *fetched,
        Step("sweep", "the first table, and the picture", 60, sweep),
        Step("init", "the plan of the example", 1, init),
        Step("job", "the output of the example", 30, ("pipeline.run", job, *places("job"))),
        Step("off-grid", "the model of the second table", 1, ("tools.off_grid", f"{model}", f"{off_grid}"), off_grid),
        Step("llama.cpp", "its rows of the second table", 8, ("tools.peers", *compared, "ggml:Q4_0", "ggml:IQ4_NL")),
        Step("levels", "the other rows", 16, ("tools.tuning", *compared, *levels)),
        Step("tasks", "the processor's time of tasks", 20, tasks),
        Step("three-bits", "the divergence at 3 bits", 4, rounded("three-bits", 3)),
        Step("healing", "the same, healed", 30, ("pipeline.heal", f"{three}.run")),
        Step("four-bits", "the model for the engines", 4, rounded("four-bits", 4)),
        Step("gguf", "its file", 1, ("pipeline.export", f"{four}", "--to", "gguf", f"{gguf}"), gguf),
        Step(
            "engines", "tokens per second and memory in docs/results.md", 20, served, needs=(python, llama_cpp),
            remedy="`make test-vllm` and `make test-llama-cpp` install them",
        ),
        Step("simulation", "minutes of a 70B model", 5, ("tools.simulate",)),
    ]  # fmt: skip


def is_done(step: Step, folder: Path) -> bool:
    """Return True if the step's file has the output of the same command."""
    path = folder / f"{step.name}.txt"
    return path.exists() and path.read_text().partition("\n")[0] == step.line


def show(chosen: Sequence[Step], folder: Path) -> None:
    """Print the steps and the time of those that will run."""
    left = 0
    for step in chosen:
        if is_done(step, folder):
            state = f"done, {folder / step.name}.txt"
        elif missing := step.missing():
            state = f"left out: no {', '.join(map(str, missing))}; {step.remedy}"
        else:
            state = f"about {step.minutes} min"
            left += step.minutes
        print(f"{step.name:<10}  {step.remakes}: {state}")
    print(f"in all about {left / 60:.1f} hours on two cores", flush=True)


def run(step: Step, folder: Path) -> int:
    """Run a step's command, and keep its output if it ends well. Return its exit code."""
    part = folder / f"{step.name}.part"
    if step.replaced is not None and step.replaced.exists():
        (shutil.rmtree if step.replaced.is_dir() else Path.unlink)(step.replaced)
    print(f"\n{step.name}: {step.line}", flush=True)
    with part.open("w") as file:
        print(step.line, file=file, flush=True)
        process = subprocess.Popen([sys.executable, "-m", *step.command], stdout=file)
        code = _ended(process)
    if code:
        print(part.read_text().partition("\n")[2] + f"{step.name}: ended with {code}; the same command goes on here")
        return FAILED if code < 0 else code
    part.replace(part.with_suffix(".txt"))
    print(part.with_suffix(".txt").read_text().partition("\n")[2], flush=True)
    return 0


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process. Ctrl-C reaches it, too: a job then ends by itself, at a place from which it goes on."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps that have no result yet. Return the exit code of the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="default: all")
    parser.add_argument("--models", type=Path, help=f"a folder with {NAME}; default: fetched from the hub")
    parser.add_argument("--texts", type=Path, help=f"a folder with {PASSAGES}, {TEST}, {OTHER}; default: likewise")
    parser.add_argument("--tasks", nargs="+", default=TASKS, metavar="TASK", help="default: %(default)s, from the hub")
    parser.add_argument("--made", type=Path, default=Path("runs/real"), help="default: %(default)s")
    parser.add_argument("--list", action="store_true", help="only print the steps")
    options = parser.parse_args(arguments)
    known = steps(options)
    if unknown := {*options.steps} - {step.name for step in known}:
        parser.error(f"{', '.join(sorted(unknown))}: no such step; known: {', '.join(step.name for step in known)}")
    chosen = [step for step in known if not options.steps or step.name in options.steps]
    show(chosen, options.made)
    if options.list:
        return 0
    options.made.mkdir(parents=True, exist_ok=True)
    for step in chosen:
        if is_done(step, options.made) or step.missing():
            continue
        if code := run(step, options.made):
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
