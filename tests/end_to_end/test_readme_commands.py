"""The commands that the README and the pages show, run as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from transformers import AutoTokenizer

from deploy.quickstart.__main__ import main as quickstart
from tests import factories
from tests.docs.walkthrough import blocks
from tests.end_to_end.children import Child, Hook, wait_for
from tests.end_to_end.jobs import Job, command

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE = (ROOT / "docs" / "running-jobs.md").read_text(encoding="utf-8")
WAIT_S = 240
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
WINDOW = "32"  # of a model that has seen no more


def _start(folder: Path, name: str, *more: str, hook: Hook | None = None, **values: str) -> Child:
    """Start the command of the table's row, with the words in capitals replaced, without Ray. It is forked, because to
    import takes seconds."""
    (row,) = re.findall(rf"^\| `python -m pipeline\.{name} ([^`]+)` \|", TABLE, re.MULTILINE)
    words = [values.get(word, word) for word in shlex.split(row)]
    assert not [word for word in words if word.isupper()], row
    return Child(name, [*words, *more], folder / f"{name}.log", hook)


def _run(folder: Path, name: str, *more: str, **values: str) -> str:
    """Return the output of a row's command."""
    child = _start(folder, name, *more, **values)
    assert child.end(WAIT_S) == 0, child.said
    return child.said


@pytest.mark.ray
def test_the_commands_of_the_table(job: type[Job], tmp_path: Path, text: Path, llama: Path) -> None:
    one = job()
    output, run_dir = str(one.output), str(one.run_dir)
    assert "bytes" in _run(tmp_path, "plan", MANIFEST=str(one.manifest))
    pause = tmp_path / "pause"
    running = _start(tmp_path, "run", hook=Hook("commit", match="layer/", pause=str(pause)), MANIFEST=str(one.manifest))
    try:
        wait_for(pause, running)
        _run(tmp_path, "scale", RUN_DIR=run_dir, N="1")
        pause.unlink()
        assert running.end(WAIT_S) == 0, running.said
    finally:
        running.kill()
    assert output in _run(tmp_path, "status", RUN_DIR=run_dir)
    _run(tmp_path, "verify", OUTPUT=output, DIR=str(llama))
    assert re.search(r"heal step (\d+) of \1:", _run(tmp_path, "heal", RUN_DIR=run_dir))
    assert "perplexity" in _run(tmp_path, "evaluate", "--window", WINDOW, MODEL=output, FILE=str(text))
    dense = str(tmp_path / "dense")
    assert "times the compressed checkpoint's" in _run(tmp_path, "export", OUTPUT=output, DEST=dense)
    _loads_as_shown(one.output, tmp_path)


@pytest.mark.ray
def test_the_sweep_of_the_table(job: type[Job], tmp_path: Path) -> None:
    one = job(**{"calibration.propagate": "dense"})
    fields = {name: value for name, value in one.document().items() if name not in ("budget", "methods")}
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({**fields, "keep": [0.8, 0.6], "points": [{"methods": [{"method": "flat_llm"}]}]}))
    said = _run(tmp_path, "sweep", SWEEP=str(path))
    assert "flat_llm-0.8" in said
    assert "flat_llm-0.6" in said


@pytest.mark.ray
@pytest.mark.nightly
def test_the_sweep_of_make_real(tmp_path: Path, text: Path, scored: Path, llama: Path) -> None:
    """Every point of it, on another model and other texts."""
    said = _run(
        tmp_path, "sweep", "--set", f"model.source={llama}", "--set", "model.accept_loss=true",
        "--set", f"calibration.text={{files: [{text}]}}", "--set", "calibration.samples=8",
        "--set", "calibration.sequence_length=24", "--set", f"evaluation.perplexity.text={{files: [{scored}]}}",
        "--set", "evaluation.perplexity.window=24", "--set", "workers.max=1",
        "--set", f"output={tmp_path / 'real'}", "--set", f"run_dir={tmp_path / 'real.run'}",
        SWEEP=str(ROOT / "manifests/sweeps/real.yaml"),
    )  # fmt: skip
    points = ["svd_llm-0.6", "flat_llm-0.9", "loss_aware-0.8", "bits-int4", "bits-int3-normal"]
    assert [point for point in points if point not in said] == []


@pytest.mark.ray
def test_the_first_job_of_the_readme(tmp_path: Path, text: Path) -> None:
    """Word for word, but for the places of the model, the text and what is written; so is what they print. The model's
    tokenizer has a chat template, as that of the README."""
    lines = re.findall(r"^python -m pipeline\.(\w+) (.+)$", README, re.MULTILINE)
    assert [name for name, _ in lines] == ["init", "run"]
    shown = re.findall(r"^```text\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    llama = factories.make_model(tmp_path / "llama", peaked=False)
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(llama)
    places = {MODEL: llama, "passages.json": text, "job.yaml": tmp_path / "job.yaml"}
    for (name, words), printed in zip(lines, shown, strict=True):
        for place, real in places.items():
            words = words.replace(place, str(real))
        child = Child(name, words.split(), tmp_path / f"{name}.log", inline=False)
        assert child.end(WAIT_S) == 0, child.said
        heads = [line.split()[0] for line in printed.splitlines() if line[:1].islower()]
        assert len(heads) > 4
        assert [head for head in heads if not re.search(rf"^{head}", child.said, re.MULTILINE)] == []


def _loads_as_shown(output: Path, folder: Path) -> None:
    (block,) = [found for found in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "OUTPUT" in found]
    code = f'{block.replace("OUTPUT", str(output))}\nids = tokenizer("a b", return_tensors="pt").input_ids\n'
    code += (
        'assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] > ids.shape[1]\nprint("generated")\n'
    )
    path = os.pathsep.join(entry for entry in sys.path if not Path(entry, "lamina").is_dir())
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=WAIT_S,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "generated" in done.stdout


PAGE = ROOT / "docs" / "first_hour.md"
FIRST_HOUR_MODEL = Path("lamina/runs/quickstart")


class Shown(NamedTuple):
    """A command of the page and the lines below it."""

    words: tuple[str, ...]
    lines: tuple[str, ...]


def shown() -> list[Shown]:
    text = "".join(block.text for block in blocks(PAGE) if block.language == "console")
    first, *parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert not first
    return [Shown(tuple(shlex.split(part.splitlines()[0])), tuple(part.splitlines()[1:])) for part in parts]


def commands_of(name: str) -> list[Shown]:
    return [each for each in shown() if each.words[0] == name]


def test_what_is_installed_is_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    ((*_, constraints, project),) = [each.words for each in shown() if each.words[:2] == ("pip", "install")]
    assert (ROOT / Path(constraints).relative_to("lamina")).is_file()
    assert set(re.findall(r"\[(.*)\]", project)[0].split(",")) <= {*extras}


def test_the_model_is_made_by_the_command_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ((*_, module, option),) = [each.words for each in shown() if "deploy.quickstart" in each.words]
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit):
        quickstart()
    assert option.removesuffix(")") in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.nightly
def test_the_job_and_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: Path, text: Path) -> None:
    """On another small model, in this process; the first run kills itself at a commit."""
    monkeypatch.chdir(tmp_path)
    FIRST_HOUR_MODEL.mkdir(parents=True)
    (FIRST_HOUR_MODEL / "model").symlink_to(llama)
    (FIRST_HOUR_MODEL / "calibration.txt").symlink_to(text)
    following = [each.words[1] for each in commands_of("lamina")]
    assert following == ["init", "run", "status", "run", "verify", "report", "export"]
    for one in commands_of("lamina"):
        _, name, *options = one.words
        if name == "run":
            killed = options[-1] == "&"
            words = [*options[:1], "--set", "workers.max=1", "--set", "model.accept_loss=true"]
            child = Child(
                name, words, tmp_path / f"{killed}.log", Hook("commit", 2, "dense/", after=True) if killed else None
            )
            assert child.end() == (-signal.SIGKILL if killed else 0), child.said
            assert killed or missing(one, child.said) == []
            continue
        ended = command(name, *options)
        assert ended.code == 0, ended.err
        assert missing(one, ended.out + ended.err) == []
    (script,) = [block for block in blocks(PAGE) if block.language == "python"]
    assert commands_of("python")[-1].words == ("python", script.path)
    paths = os.pathsep.join(path for path in sys.path if not Path(path, "lamina").is_dir())
    said = subprocess.run(
        [sys.executable, "-c", script.text], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip()


def missing(one: Shown, said: str) -> list[str]:
    """The lines of the page that begin with a word with which no printed line begins."""
    printed = {first for line in said.splitlines() if (first := first_word(line))}
    heads = [(line, first_word(line)) for line in one.lines]
    return [line for line, head in heads if head and head not in printed]


def first_word(line: str) -> str:
    return next(iter(re.findall(r"^ *([A-Za-z_]+)", line)), "")
