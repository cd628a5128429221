"""What the README shows is done as it stands there: the table of commands, and the lines that load the result."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.jobs import Job

pytestmark = pytest.mark.ray
README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
WAIT_S = 240
WINDOW = "32"  # of a model that has seen no more


def _command(name: str, **values: str) -> list[str]:
    """The row of the table, with the words in capitals replaced."""
    (row,) = re.findall(rf"^\| `(python -m pipeline\.{name} [^`]+)` \|", README, re.MULTILINE)
    words = [values.get(word, word) for word in shlex.split(row)]
    assert not [word for word in words if word.isupper()], row
    return [sys.executable, *words[1:]]


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def test_the_commands_of_the_table(job: type[Job], tmp_path: Path, text: Path, llama: Path) -> None:
    one = job()
    output, run_dir = str(one.output), str(one.run_dir)
    assert "bytes" in _run(_command("plan", MANIFEST=str(one.manifest)), tmp_path)
    log = tmp_path / "run.log"
    with log.open("w") as file:
        running = subprocess.Popen(
            _command("run", MANIFEST=str(one.manifest)), cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + WAIT_S
            while not (one.run_dir / "lock.json").exists():
                assert running.poll() is None, log.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            _run(_command("scale", RUN_DIR=run_dir, N="1"), tmp_path)
            assert running.wait(timeout=WAIT_S) == 0, log.read_text()
        finally:
            running.kill()
    assert output in _run(_command("status", RUN_DIR=run_dir), tmp_path)
    _run(_command("verify", OUTPUT=output, DIR=str(llama)), tmp_path)
    scored = _run([*_command("evaluate", MODEL=output, FILE=str(text)), "--window", WINDOW], tmp_path)
    assert "perplexity" in scored
    assert "times the compressed checkpoint's" in _run(
        _command("export", OUTPUT=output, DEST=str(tmp_path / "dense")), tmp_path
    )
    _loads_as_shown(one.output, tmp_path)


def test_the_sweep_of_the_table(job: type[Job], tmp_path: Path) -> None:
    one = job(**{"calibration.propagate": "dense"})
    fields = {name: value for name, value in one.document().items() if name not in ("budget", "methods")}
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({**fields, "keep": [0.8, 0.6], "points": [{"methods": [{"method": "flat_llm"}]}]}))
    said = _run(_command("sweep", SWEEP=str(path)), tmp_path)
    assert "flat_llm-0.8" in said
    assert "flat_llm-0.6" in said


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
