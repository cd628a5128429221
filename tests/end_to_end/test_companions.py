"""Files beside the weights: tokenizers, licences, and code of the source."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.end_to_end.jobs import Job, MakeJob, command, edit_json
from tests.end_to_end.sources import make_source
from tests.factories import make_tokenizer

WRONG_INPUT = 2
TEMPLATES = {
    "chat_template.jinja": "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}: {{ messages[0].content }}",
    "additional_chat_templates/rag.jinja": "by {{ messages[0].role }}",
}
WITHOUT_TEXT: dict[str, Any] = {"methods": [{"method": "magnitude"}], "calibration": None}
SENTENCES = ("Then Anna's  dog, 12 é\n", "<s>the<|endoftext|>", "<tool>")


def unchanged(directory: Path) -> None:
    """As `make_source` leaves it."""


def without_class(directory: Path) -> None:
    """The class of the tokenizer follows from the model's type alone."""
    edit(directory / "tokenizer_config.json", tokenizer_class=None)


def as_vocabulary(directory: Path) -> None:
    """As before there was a tokenizer.json."""
    bpe = json.loads(make_tokenizer().backend_tokenizer.to_str())["model"]
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").unlink()
    (directory / "vocab.json").write_text(json.dumps(bpe["vocab"]))
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, bpe["merges"])]))


def as_tekken(directory: Path) -> None:
    """As Mistral publishes it, alone."""
    pieces = [*(bytes([byte]) for byte in range(256)), b"th", b"the"]
    vocabulary = [{"rank": i, "token_bytes": base64.b64encode(p).decode()} for i, p in enumerate(pieces)]
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(("<unk>", "<s>", "</s>"))]
    settings = {"pattern": r"\p{L}+|\p{N}|\s+|.", "version": "v3"}
    settings |= {"num_vocab_tokens": 258, "default_vocab_size": 261, "default_num_special_tokens": 3}
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").unlink()
    content = {"config": settings, "vocab": vocabulary, "special_tokens": special}
    (directory / "tekken.json").write_text(json.dumps(content))


def with_more_tokens(directory: Path) -> None:
    """Special tokens of a chat model, in the three files that older versions wrote."""
    (directory / "special_tokens_map.json").write_text(json.dumps({"sep_token": "<tool>"}))
    (directory / "added_tokens.json").write_text(json.dumps({"<tool>": 320}))


def edit(path: Path, **fields: Any) -> None:
    """Sets fields of a JSON file; None: removes them."""
    content = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)


def behaviour(directory: Path) -> dict[str, Any]:
    """What a tokenizer makes of texts, and of a conversation by each of its templates."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
    talk: dict[str, Any] = {"conversation": [{"role": "user", "content": "Anna"}], "tokenize": False}
    names = {"tool_use", "rag", "default"} if isinstance(tokenizer.chat_template, dict) else set()
    return {
        "class": type(tokenizer).__name__,
        "ids": [tokenizer(text)["input_ids"] for text in SENTENCES],
        "texts": [tokenizer.decode(tokenizer(text)["input_ids"]) for text in SENTENCES],
        "special": {**tokenizer.special_tokens_map},
        "added": {token: str(added) for token, added in tokenizer.added_tokens_decoder.items()},
        "templates": tokenizer.chat_template,
        "talks": {name: tokenizer.apply_chat_template(**talk, chat_template=name) for name in sorted(names)},
    }


@pytest.mark.usefixtures("inline")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of transformers, to old kinds of files
@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", unchanged), ("llama", with_more_tokens), ("mistral", as_tekken), ("qwen2", unchanged),
        ("qwen3", without_class), ("opt", as_vocabulary), ("gptj", without_class), ("qwen2", as_vocabulary),
    ],
)  # fmt: skip
def test_outputs_and_exports_have_the_tokenizer_of_the_source(
    family: str, change: Callable[[Path], None], tmp_path: Path, job: MakeJob
) -> None:
    source = make_source(tmp_path / "source", family, layers=1)
    change(source)
    write(source, TEMPLATES)
    expected = behaviour(source)
    assert expected["talks"]["tool_use"].endswith(": Anna")
    made = job(source, **WITHOUT_TEXT)
    assert made.run().code == 0
    assert behaviour(made.output) == expected
    verified = command("verify", str(made.output), "--source", str(source))
    assert verified.code == 0, verified.out
    exported = command("export", str(made.output), "--to", "dense", str(made.root / "dense"))
    assert exported.code == 0, exported.err
    assert behaviour(made.root / "dense") == expected


@pytest.mark.usefixtures("inline")
def test_code_that_is_not_trusted_stays_where_it_is(tmp_path: Path, job: MakeJob) -> None:
    """OUTPUT is loaded with trust_remote_code, meant for our own files: no Python, no pickle, no name of either."""
    source = make_source(tmp_path / "source", "llama", layers=1)
    write(source, {name: "import os" for name in ("tokenizer_x.py", "tokenizer.pkl", "vocab.bin", "chat_template.sh")})
    auto_map = {"AutoProcessor": "tokenizer_x.Processor"}
    write(source, {"processor_config.json": json.dumps({"tokenizer": {"auto_map": auto_map}, "size": 3})})
    made = job(source, **WITHOUT_TEXT)
    before = {*made.compression()["files"]} if made.run().code == 0 else set()
    assert {"processor_config.json", "tokenizer.json"} <= before
    assert not {name for name in before if name.endswith((".py", ".pkl", ".bin", ".sh")) and "lamina" not in name}
    assert json.loads((made.output / "processor_config.json").read_text()) == {"tokenizer": {}, "size": 3}
    made.changes = {**made.changes, "model.trust_remote_code": True}
    assert made.run().json.get("already_finished") is None, "trusted now: put together anew"
    assert (made.output / "tokenizer_x.py").exists()
    assert json.loads((made.output / "processor_config.json").read_text())["tokenizer"]["auto_map"] == auto_map
    assert made.run().json["already_finished"] is True


@pytest.mark.usefixtures("inline")
def test_links_out_of_the_model_are_refused(tmp_path: Path, job: MakeJob) -> None:
    """A licence that links to a private key would be copied to OUTPUT, and pushed. Caches of links are let in."""
    source, secret = make_source(tmp_path / "source", "llama", layers=1), tmp_path / "elsewhere" / "key"
    secret.parent.mkdir()
    secret.write_text("private")
    for name in ("LICENSE", "additional_chat_templates/x.jinja"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).symlink_to(secret)
        made = job(source, **WITHOUT_TEXT)
        for ended in (command("plan", str(made.manifest)), made.run()):
            assert (ended.code, f"{name}: a symbolic link out" in ended.err) == (WRONG_INPUT, True), ended.err
        assert not made.output.exists()
        (source / name).unlink()
    (source / "LICENSE").symlink_to("config.json")
    links = tmp_path / "links"
    links.mkdir()
    for path in (path for path in source.iterdir() if path.is_file()):
        os.symlink(path, links / path.name)
    assert job(links, **WITHOUT_TEXT).run().code == 0


@pytest.mark.usefixtures("inline")
def test_stale_templates_go(tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", "llama", layers=1)
    write(source, TEMPLATES)
    made = job(source, **WITHOUT_TEXT)
    assert made.run().code == 0
    (made.output / "additional_chat_templates" / "mine.jinja").write_text("theirs")
    faults = command("verify", str(made.output)).out
    assert "mine.jinja: not part of the checkpoint" in faults
    (made.output / "additional_chat_templates" / "mine.jinja").unlink()
    shutil.rmtree(source / "additional_chat_templates")
    assert made.run().code == 0
    assert not list((made.output / "additional_chat_templates").glob("*"))
    assert command("verify", str(made.output), "--source", str(source)).code == 0


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
def model_with_code(tmp_path: Path, llama: Path, mark: Path, modules_cache: Path) -> Path:
    """A model whose config names code for itself, and whose tokenizer may be had with code or without."""
    model_with_code = Path(shutil.copytree(llama, tmp_path / "model"))
    (model_with_code / "tokenization_marked.py").write_text(CODE.format(mark=str(mark)))
    edit_json(model_with_code / "config.json", auto_map={"AutoConfig": "tokenization_marked.Config"})
    auto_map = {"AutoTokenizer": [None, "tokenization_marked.MarkedTokenizer"]}
    edit_json(model_with_code / "tokenizer_config.json", auto_map=auto_map)
    return model_with_code


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
def test_code_is_not_run(job: MakeJob, model_with_code: Path, mark: Path, text: Path) -> None:
    """The tokenizer can do without; its `auto_map` is not in the output, which users load with trust_remote_code."""
    made = job(model_with_code)
    assert play(made, text) == 0
    assert "auto_map" not in json.loads((made.output / "tokenizer_config.json").read_text())
    assert not (made.output / "tokenization_marked.py").exists()
    AutoTokenizer.from_pretrained(made.output, trust_remote_code=True)
    assert not mark.exists()


@pytest.mark.usefixtures("inline")
def test_a_tokenizer_that_is_code_is_refused(job: MakeJob, model_with_code: Path, mark: Path, text: Path) -> None:
    edit_json(model_with_code / "tokenizer_config.json", tokenizer_class="MarkedTokenizer")
    (model_with_code / "tokenizer.json").unlink()
    made = job(model_with_code)
    assert play(made, text) == 2
    assert "no usable tokenizer" in made.run().err
    assert not mark.exists()


@pytest.mark.usefixtures("inline")
def test_trusted_code_is_run_and_travels(job: MakeJob, model_with_code: Path, mark: Path, text: Path) -> None:
    perplexity = {"text": {"files": [str(text)]}, "window": 16}
    made = job(model_with_code, **{"model.trust_remote_code": True, "evaluation": {"perplexity": perplexity}})
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
def test_evaluate_runs_code_where_it_is_told_to(model_with_code: Path, mark: Path, text: Path) -> None:
    edit_json(model_with_code / "tokenizer_config.json", tokenizer_class="MarkedTokenizer")
    code = CODE.format(mark=str(mark)) + TOKENIZER_OF_ITS_OWN
    (model_with_code / "tokenization_marked.py").write_text(code)
    (model_with_code / "tokenizer.json").rename(model_with_code / "pieces.txt")
    options = (str(model_with_code), "--text", str(text), "--window", "16")
    ended = command("evaluate", *options)
    assert (ended.code, "--trust-remote-code" in ended.err) == (2, True), ended.err
    assert not mark.exists()
    ended = command("evaluate", *options, "--trust-remote-code")
    assert (ended.code, mark.exists()) == (0, True), ended.err
