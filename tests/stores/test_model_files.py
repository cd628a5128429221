"""Files that travel with the weights of a model, and those of them that name code."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import transformers
from transformers.utils import (
    AUDIO_TOKENIZER_NAME,
    CHAT_TEMPLATE_FILE,
    FEATURE_EXTRACTOR_NAME,
    GENERATION_CONFIG_NAME,
    IMAGE_PROCESSOR_NAME,
    LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE,
    PROCESSOR_NAME,
    VIDEO_PROCESSOR_NAME,
)

from manifests.errors import InputError
from stores.disk import Disk
from stores.model_files import companions, copy_companions, download_patterns, is_copy, with_class, without_code
from stores.storage import Storage
from tests.memory_storage import Memory

NAMES = re.compile(r"^VOCAB_FILES_NAMES = (\{.*?\})", re.MULTILINE | re.DOTALL)
SETTINGS = (
    AUDIO_TOKENIZER_NAME, CHAT_TEMPLATE_FILE, FEATURE_EXTRACTOR_NAME, GENERATION_CONFIG_NAME, IMAGE_PROCESSOR_NAME,
    LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME,
)  # fmt: skip


def holding(*names: str) -> Memory:
    storage = Memory()
    for name in names:
        storage.replace(name, b"{}")
    return storage


def test_files_of_every_tokenizer_of_transformers_travel() -> None:
    modules = [*(Path(transformers.__file__).parent / "models").glob("*/tokenization_*.py")]
    found = [ast.literal_eval(text) for path in modules for text in NAMES.findall(path.read_text(encoding="utf-8"))]
    names = {name for files in found for name in files.values()}
    assert {"tokenizer.json", "sentencepiece.bpe.model", "vocab.json", "merges.txt"} <= names
    source = holding(*names, *SETTINGS, "tekken.json", "tokenizer.model.v3", "qwen.tiktoken")
    assert companions(source, code=False) == source.files()


UNTRUSTED = ("tokenizer_x.py", "tokenizer.PY", "vocab.bin", "tokenizer.pkl", "chat_template.so", "tokenization_x.py")
WEIGHTS = ("model-00001-of-00002.safetensors", "pytorch_model.bin", "x.gguf", "config.json", "README.md")
ELSEWHERE = ("onnx/tokenizer.json", "additional_chat_templates/x.py", "LICENSES/x.txt")


@pytest.mark.parametrize("code", [False, True])
def test_code_travels_where_it_is_trusted_and_weights_never(code: bool) -> None:
    data = ("tokenizer.json", "additional_chat_templates/rag.jinja", "LICENSE")
    read_by_code = ("pieces.dat", "rwkv_20230424.txt", "tokenization_x.py", "tokenizer_x.py", "tokenizer.pkl")
    names = companions(holding(*data, *UNTRUSTED, *WEIGHTS, *ELSEWHERE, *read_by_code), code)
    assert {*data} <= {*names}
    assert not {*WEIGHTS, *ELSEWHERE} & {*names}
    if code:
        assert {*read_by_code} <= {*names}
    else:
        assert {*names} == {*data}
    wanted, unwanted = download_patterns(code)
    assert ("*" in wanted, "*/*" in unwanted) == (code, True)


def test_settings_lose_the_names_of_code(tmp_path: Path) -> None:
    nested = {"image_processor": {"auto_map": {"AutoImageProcessor": "x.Y"}, "size": 3}, "kinds": [{"auto_map": 1}]}
    source, plain = Memory(), json.dumps({"model_max_length": 9}).encode()
    source.replace("preprocessor_config.json", json.dumps(nested).encode())
    source.replace("tokenizer_config.json", plain)
    source.replace("generation_config.json", b"no JSON")
    target = Disk(tmp_path)
    copied = copy_companions(target, source, code=False, ours=frozenset(), tokenizer="GPT2Tokenizer")
    assert copied == ["generation_config.json", "preprocessor_config.json", "tokenizer_config.json"]
    assert json.loads(target.read("preprocessor_config.json")) == {"image_processor": {"size": 3}, "kinds": [{}]}
    said = json.loads(target.read("tokenizer_config.json"))
    assert said == {"model_max_length": 9, "tokenizer_class": "GPT2Tokenizer"}
    for name in copied:
        assert is_copy(name, target.read(name), source.read(name))
        assert not is_copy(name, b'{"another": 1}', source.read(name))
    assert without_code(plain) == plain


@pytest.mark.parametrize("named", ["GPT2Tokenizer", "GPT2TokenizerFast"])
def test_a_class_that_is_named_already_is_left(named: str) -> None:
    settings = json.dumps({"tokenizer_class": named}).encode()
    assert with_class(settings, "GPT2Tokenizer") == settings
    assert with_class(settings, None) == settings
    assert json.loads(with_class(settings, "Qwen2Tokenizer"))["tokenizer_class"] == "Qwen2Tokenizer"
    plain = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}).encode()
    assert with_class(plain, "TokenizersBackend") == plain


def test_links_within_a_model_and_within_a_cache_are_let_in(tmp_path: Path) -> None:
    """As the cache of huggingface_hub has them: a snapshot of links into the folder of blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "commit"
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate(("config.json", "tokenizer.json", "additional_chat_templates/rag.jinja")):
        (blobs / str(number)).write_text("{}")
        (snapshot / name).symlink_to(blobs / str(number))
    storage: Storage = Disk(snapshot)
    assert companions(storage, code=False) == ["additional_chat_templates/rag.jinja", "tokenizer.json"]
    (snapshot / "LICENSE").symlink_to(tmp_path / "key")
    (tmp_path / "key").write_text("private")
    with pytest.raises(InputError, match="LICENSE: a symbolic link out of the model's folder"):
        companions(storage, code=False)
