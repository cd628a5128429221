"""Python that lies in a checkpoint runs only where the manifest trusts it, and is not passed on where it does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.end_to_end.jobs import Job, command

MakeJob = Callable[..., Job]
CODE = """
from pathlib import Path
from transformers import LlamaConfig, PreTrainedTokenizerFast
Path({mark!r}).touch()
class MarkedTokenizer(PreTrainedTokenizerFast): ...
class Config(LlamaConfig): ...
"""
TOKENIZER_OF_ITS_OWN = """
class MarkedTokenizer(PreTrainedTokenizerFast):
    vocab_files_names = {"tokenizer_file": "pieces.txt"}
    def __init__(self, *args, tokenizer_file=None, **kwargs):
        super().__init__(*args, tokenizer_file=str(Path(kwargs["name_or_path"]) / "pieces.txt"), **kwargs)
"""


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that the code in the checkpoint makes."""
    return tmp_path / "the-code-was-run"


@pytest.fixture
def model(tmp_path: Path, llama: Path, mark: Path, modules_cache: Path) -> Path:
    """A model whose config names code for itself, and whose tokenizer may be had with code or without."""
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    (model / "tokenization_marked.py").write_text(CODE.format(mark=str(mark)))
    edit(model / "config.json", auto_map={"AutoConfig": "tokenization_marked.Config"})
    auto_map = {"AutoTokenizer": [None, "tokenization_marked.MarkedTokenizer"]}
    edit(model / "tokenizer_config.json", auto_map=auto_map)
    return model


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def play(job: Job, text: Path) -> int:
    """Every command that meets the checkpoint; the exit code of `run`."""
    assert command("plan", str(job.manifest)).code == 0
    code = job.run().code
    command("evaluate", str(job.source), "--text", str(text), "--window", "16")
    if code == 0:
        assert command("verify", str(job.output), "--source", str(job.source)).code == 0
        assert command("evaluate", str(job.output), "--text", str(text), "--window", "16").code == 0
    return code


@pytest.mark.usefixtures("inline")
def test_code_is_not_run(job: MakeJob, model: Path, mark: Path, text: Path) -> None:
    """The tokenizer can do without; its `auto_map` is not in the output, which users load with trust_remote_code."""
    made = job(model)
    assert play(made, text) == 0
    assert "auto_map" not in json.loads((made.output / "tokenizer_config.json").read_text())
    assert not (made.output / "tokenization_marked.py").exists()
    AutoTokenizer.from_pretrained(made.output, trust_remote_code=True)
    assert not mark.exists()


@pytest.mark.usefixtures("inline")
def test_a_tokenizer_that_is_code_is_refused(job: MakeJob, model: Path, mark: Path, text: Path) -> None:
    edit(model / "tokenizer_config.json", tokenizer_class="MarkedTokenizer")
    (model / "tokenizer.json").unlink()
    made = job(model)
    assert play(made, text) == 2
    assert "no usable tokenizer" in made.run().err
    assert not mark.exists()


@pytest.mark.usefixtures("inline")
def test_trusted_code_is_run_and_travels(job: MakeJob, model: Path, mark: Path, text: Path) -> None:
    perplexity = {"text": {"files": [str(text)]}, "window": 16}
    made = job(model, **{"model.trust_remote_code": True, "evaluation": {"perplexity": perplexity}})
    ended = made.run()
    assert ended.code == 0, ended.err
    assert mark.exists()
    mark.unlink()
    exported = made.root / "exported"
    assert command("export", str(made.output), "--to", "dense", str(exported)).code == 0
    for directory in (made.output, exported):
        loaded = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
        assert type(loaded).__name__ == "MarkedTokenizer"


@pytest.mark.usefixtures("inline")
def test_evaluate_runs_code_where_it_is_told_to(model: Path, mark: Path, text: Path) -> None:
    edit(model / "tokenizer_config.json", tokenizer_class="MarkedTokenizer")
    code = CODE.format(mark=str(mark)) + TOKENIZER_OF_ITS_OWN
    (model / "tokenization_marked.py").write_text(code)
    (model / "tokenizer.json").rename(model / "pieces.txt")
    options = (str(model), "--text", str(text), "--window", "16")
    ended = command("evaluate", *options)
    assert (ended.code, "--trust-remote-code" in ended.err) == (2, True), ended.err
    assert not mark.exists()
    ended = command("evaluate", *options, "--trust-remote-code")
    assert (ended.code, mark.exists()) == (0, True), ended.err
