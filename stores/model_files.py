"""Lists and copies the companions of a model's weights: from the hub, to OUTPUT, and to exports.

By default companions are data: the files that tokenizers and processors of transformers read, in folders too, and
licences. If the checkpoint's Python code is trusted, it is copied too, with every file that it might read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Set
from typing import Any

from manifests.errors import InputError
from stores.backend import Storage, matching

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
CODE = ("*.py",)
CODE_SUFFIXES = (".py", ".pyc", ".pyd", ".so", ".sh", *PICKLE_SUFFIXES)  # loading a pickle runs code
WEIGHT_SUFFIXES = (
    ".safetensors", ".gguf", ".ggml", ".onnx", ".onnx_data", ".h5", ".msgpack", ".ot", ".tflite", ".npz", ".pb",
    ".bin", ".pt", ".pth", ".ckpt",
)  # fmt: skip
TEMPLATE_FOLDER = "additional_chat_templates"
FOLDERS = (TEMPLATE_FOLDER,)
TOKENIZERS = (  # vocabularies and settings, by the names that transformers looks for
    "tokenizer*", "tekken*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "*vocab*.json",
    "*vocab*.txt", "dict.txt", "merges.txt", "bpe.codes", "*.model", "*.spm", "*.tiktoken", "prophetnet.tokenizer",
    "byte_maps.json", "normalizer.json", "emoji.json", "word_*.json",
)  # fmt: skip
COMPANIONS = (
    *TOKENIZERS,
    # Chat templates: the default, the older form of processors, and named ones.
    "chat_template*", f"{TEMPLATE_FOLDER}/*.jinja",
    # Processors of images, audio, video and their combinations.
    "*processor_config.json", "audio_tokenizer_config.json",
    "generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
NO_COMPANIONS = (CONFIG_FILE, "*.index.json", "README*", ".*", *(f"*{suffix}" for suffix in WEIGHT_SUFFIXES))
MAX_SETTINGS_BYTES = 64 * 1024 * 1024
CODE_FIELD, CLASS_FIELD = "auto_map", "tokenizer_class"
SETTINGS_SUFFIX = "_config.json"
TOKENIZER_SETTINGS = "tokenizer_config.json"
PLAIN_CLASSES = ("PreTrainedTokenizer", "PythonBackend", "TokenizersBackend")  # names of the same class


def download_patterns(code: bool) -> tuple[list[str], list[str]]:
    """Return allow and ignore patterns of huggingface_hub for the files beside the weights.

    Files in folders are excluded, because its `*` also matches slashes.
    """
    if code:
        return ["*"], ["*/*", *(pattern for pattern in NO_COMPANIONS if pattern not in (CONFIG_FILE, "*.index.json"))]
    flat = [pattern for pattern in COMPANIONS if "/" not in pattern]
    return [CONFIG_FILE, INDEX_FILE, *flat], ["*/*", *(f"*{suffix}" for suffix in CODE_SUFFIXES)]


def companions(storage: Storage, code: bool) -> list[str]:
    """Return the files to copy with a model's weights, ascending; those in folders as `FOLDER/NAME`.

    `code`: include Python files, and every file that they may read. Raises InputError if a symbolic link among them
    leads out of the model's folder.
    """
    names = matching(storage, COMPANIONS)
    if code:
        excluded = {*matching(storage, NO_COMPANIONS)}
        names = sorted({*names, *(name for name in storage.files() if name not in excluded)})
    else:
        names = [name for name in names if not name.lower().endswith(CODE_SUFFIXES)]
    _check_links(storage, names)
    return names


def _check_links(storage: Storage, names: list[str]) -> None:
    """Refuse links to unrelated files: their copies would end up in OUTPUT, and by `push` on the hub.

    Links may lead to the folder of config.json's target: the cache of huggingface_hub is built so.
    """
    if storage.folder is None:
        return
    root = os.path.realpath(storage.folder)
    home = os.path.dirname(os.path.realpath(os.path.join(root, CONFIG_FILE)))
    for name in names:
        target = os.path.realpath(os.path.join(root, name))
        inside = os.path.commonpath([root, target]) == root
        if not inside and os.path.dirname(target) not in (home, os.path.join(home, os.path.dirname(name))):
            raise InputError(
                f"{storage.at(name)}: a symbolic link out of the model's folder, to {target}; Lamina would copy that "
                "file to the output: put a copy in the place of the link, or remove the link"
            )


def copy_companions(
    target: Storage, source: Storage, code: bool, ours: Set[str], tokenizer: str | None = None
) -> list[str]:
    """Copy the companions, except files named `ours`. Return the names.

    Without `code`, settings lose their `auto_map`, which names Python classes: OUTPUT is loaded with
    `trust_remote_code`, which is meant for our own files. `tokenizer`: the class to name in the tokenizer's settings.

    Raises the InputErrors of `companions`, and StorageError.
    """
    names = [name for name in companions(source, code) if name not in ours]
    for name in names:
        if name.endswith(SETTINGS_SUFFIX):
            content = read_settings(source, name)
            content = content if code else without_code(content)
            target.replace(name, with_class(content, tokenizer if name == TOKENIZER_SETTINGS else None))
        else:
            target.copy(name, source, name)
    if tokenizer and TOKENIZER_SETTINGS not in names:
        target.replace(TOKENIZER_SETTINGS, with_class(b"{}", tokenizer))
        names.append(TOKENIZER_SETTINGS)
    return names


def read_settings(source: Storage, name: str) -> bytes:
    """Return a JSON file of settings. Raises InputError if it is too large to be one, and StorageError."""
    try:
        return source.read_whole(name, MAX_SETTINGS_BYTES)
    except ValueError as error:
        raise InputError(f"{source.at(name)}: {error}: not settings of a tokenizer or processor") from error


def without_code(settings: bytes) -> bytes:
    """Return a JSON file without any `auto_map`; the same bytes if it has none."""
    fields = _fields(settings)
    cleaned = _without_field(fields)
    return settings if cleaned == fields else _encoded(cleaned)


def with_class(settings: bytes, tokenizer: str | None) -> bytes:
    """Return a tokenizer's settings that name this class; the same bytes if they name it already, or for None."""
    fields = _fields(settings)
    if tokenizer is None or not isinstance(fields, dict) or _names_class(fields.get(CLASS_FIELD), tokenizer):
        return settings
    return _encoded({**fields, CLASS_FIELD: tokenizer})


def is_copy(name: str, copied: bytes, original: bytes) -> bool:
    """True if `copy_companions` may have written these bytes for the source's."""
    if copied == original or not name.endswith(SETTINGS_SUFFIX):
        return copied == original
    ours, theirs = _fields(copied), _without_field(_fields(original))
    if name == TOKENIZER_SETTINGS and isinstance(ours, dict) and isinstance(theirs, dict):
        theirs = {**theirs, CLASS_FIELD: ours.get(CLASS_FIELD)}
        ours = {**ours, CLASS_FIELD: ours.get(CLASS_FIELD)}
    return bool(_without_field(ours) == theirs)


def _names_class(named: Any, tokenizer: str) -> bool:
    if not isinstance(named, str):
        return False
    return named.removesuffix("Fast") == tokenizer or {named.removesuffix("Fast"), tokenizer} <= {*PLAIN_CLASSES}


def _fields(settings: bytes) -> Any:
    """Parse a JSON file; None if it is damaged: a job that needs the tokenizer has refused it already."""
    try:
        return json.loads(settings)
    except (ValueError, RecursionError):
        return None


def _encoded(fields: Any) -> bytes:
    return json.dumps(fields, indent=2).encode()


def _without_field(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_field(child) for name, child in value.items() if name != CODE_FIELD}
    if isinstance(value, list):
        return [_without_field(child) for child in value]
    return value
