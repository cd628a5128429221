"""Writes a tokenizer into a GGUF file, as llama.cpp's vocabulary `llama` (SentencePiece) or `gpt2` (byte-level BPE).

llama.cpp has fixed rules where a tokenizer.json has data: regular expressions by name, and merges by the score of the
merged token. A tokenizer that these rules would tokenize differently is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manifests.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE = "▁"
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
NUM_BYTES = 256
GPT2_PATTERN = ""  # ByteLevel's own, with use_regex
SINGLE_DIGITS = "digits"  # GPT2_PATTERN between single digits, as SmolLM has it
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {  # pattern of the pre-tokenizer, and whether whole words skip the merges -> its name in llama.cpp
    (GPT2_PATTERN, False): "gpt-2",
    (SINGLE_DIGITS, False): "smollm",
    (CONTRACTIONS + r"\p{N}{1,3}" + ENDS, True): "llama-bpe",
    (CONTRACTIONS + r"\p{N}" + ENDS, False): "qwen2",
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE_TOKEN = 1, 2, 3, 4, 5, 6  # llama.cpp's types of tokens


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as llama.cpp reads it.

    Attributes:
        kind: `llama` or `gpt2`.
        pre: llama.cpp's name of the pre-tokenizer.
        tokens, types, scores: by id; scores of `gpt2` are empty.
        merges: the pairs of `gpt2` in order, each with a space between its parts.
        space_first: a space is inserted before the text.
        single_spaces: several spaces are merged into one.
        composed: text is composed (Unicode's NFC), which llama.cpp does not do.
    """

    kind: str
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...] = ()
    merges: tuple[str, ...] = ()
    space_first: bool = False
    single_spaces: bool = False
    composed: bool = False


def add_vocabulary(writer: Any, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Write a tokenizer, its special tokens and its chat template. Raises InputError if llama.cpp cannot express it."""
    vocabulary = vocabulary_of(tokenizer, vocab_size)
    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.kind == "llama":
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.space_first)
        writer.add_remove_extra_whitespaces(vocabulary.single_spaces)
    else:
        writer.add_token_merges(vocabulary.merges)
    _add_special_tokens(writer, tokenizer)


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Vocabulary:
    """Return a tokenizer as llama.cpp reads it, padded to `vocab_size` tokens. Raises InputError."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refusal(f"{type(tokenizer).__name__} is written in Python, without a tokenizer.json")
    described = json.loads(backend.to_str())
    model = described["model"]
    if model["type"] != "BPE" or model.get("dropout") or model.get("continuing_subword_prefix"):
        raise _refusal(f"a {model['type']} model, or options of it that llama.cpp lacks")
    tokens, types = _tokens(described, vocab_size)
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    if model.get("byte_fallback"):
        return _sentencepiece(described, tokens, types, merges)
    return _byte_level(described, tokens, types, merges)


def _tokens(described: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the token and the type of each id; ids without a token are unused."""
    names: dict[int, tuple[str, int]] = {}
    unknown = described["model"].get("unk_token")
    for token, index in described["model"]["vocab"].items():
        names[index] = (token, BYTE_TOKEN if BYTE.fullmatch(token) else NORMAL)
    for added in described["added_tokens"]:
        kind = CONTROL if added["special"] else USER_DEFINED
        names[added["id"]] = (added["content"], UNKNOWN if added["content"] == unknown else kind)
    if max(names) >= vocab_size:
        raise _refusal(f"{max(names) + 1} tokens, but the model has {vocab_size}")
    rows = [names.get(index, (f"[PAD{index}]", UNUSED)) for index in range(vocab_size)]
    return [token for token, _ in rows], [kind for _, kind in rows]


def _byte_level(
    described: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], merges: Sequence[tuple[str, ...]]
) -> Vocabulary:
    composed = described["normalizer"] == {"type": "NFC"}
    if described["normalizer"] is not None and not composed:
        raise _refusal(f"the normalizer {described['normalizer']['type']}")
    key = (_byte_pattern(described["pre_tokenizer"]), bool(described["model"].get("ignore_merges")))
    if key not in PATTERNS:
        raise _refusal(f"a pre-tokenizer that is none of {', '.join(PATTERNS.values())}")
    pairs = tuple(" ".join(pair) for pair in merges)
    return Vocabulary("gpt2", PATTERNS[key], tuple(tokens), tuple(types), merges=pairs, composed=composed)


def _byte_pattern(described: Mapping[str, Any] | None) -> str | None:
    """Return the pattern at which a byte-level pre-tokenizer splits; None for another kind."""
    parts = [] if described is None else described.get("pretokenizers", [described])
    kinds = [part["type"] for part in parts]
    first = "Digits" if kinds[:1] == ["Digits"] else "Split"
    if kinds not in (["ByteLevel"], [first, "ByteLevel"]) or parts[-1]["add_prefix_space"]:
        return None
    if kinds[0] == "Digits":
        return SINGLE_DIGITS if parts[0]["individual_digits"] and parts[1].get("use_regex", True) else None
    if kinds == ["ByteLevel"]:
        return GPT2_PATTERN if parts[0].get("use_regex", True) else None
    split = parts[0]
    plain = split["behavior"] == "Isolated" and not split["invert"] and not parts[1].get("use_regex", True)
    pattern: str | None = split["pattern"].get("Regex")
    return pattern if plain else None


def _sentencepiece(
    described: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], merges: Sequence[tuple[str, ...]]
) -> Vocabulary:
    if types.count(BYTE_TOKEN) != NUM_BYTES:
        raise _refusal(f"{types.count(BYTE_TOKEN)} of {NUM_BYTES} tokens for bytes")
    space_first, single_spaces = _spaces(described)
    scores = _scores([token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL], merges)
    by_id = tuple(scores.get(token, 0.0) if kind == NORMAL else 0.0 for token, kind in zip(tokens, types, strict=True))
    return Vocabulary("llama", "default", tuple(tokens), tuple(types), by_id, (), space_first, single_spaces)


def _spaces(described: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return `space_first` and `single_spaces` of a tokenizer."""
    normalizer, pre = described["normalizer"], described["pre_tokenizer"]
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    single = bool(steps) and steps[0] == {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    steps = steps[1:] if single else steps
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if pre is None and steps in ([replaced], [{"type": "Prepend", "prepend": SPACE}, replaced]):
        return len(steps) == 2, single
    if pre is not None and not steps and pre["type"] == "Metaspace" and not pre.get("split", True):
        return pre["prepend_scheme"] != "never", single
    raise _refusal("a normalizer or pre-tokenizer that is not SentencePiece's")


def _scores(tokens: Sequence[str], merges: Sequence[tuple[str, ...]]) -> dict[str, float]:
    """Return the score of each merged token: the earlier the merge, the higher.

    llama.cpp merges any two neighbours whose text is a token, the highest score first. The result is the same if every
    such pair is a merge, and the merges that produce a token are consecutive. Raises InputError otherwise.
    """
    vocabulary, pairs = set(tokens), set(merges)
    scores: dict[str, float] = {}
    previous = ""
    for rank, merge in enumerate(merges):
        token = "".join(merge)
        if token in scores and token != previous:
            raise _refusal(f"merges of {token!r} at several ranks")
        scores.setdefault(token, -float(rank))
        previous = token
    for token in tokens:
        for pair in _splits(token):
            if vocabulary.issuperset(pair) and pair not in pairs:
                raise _refusal(f"{pair[0]!r} and {pair[1]!r}, which are not merged, although {token!r} is a token")
    return scores


def _splits(token: str) -> Iterator[tuple[str, str]]:
    return ((token[:end], token[end:]) for end in range(1, len(token)))


def _add_special_tokens(writer: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    for name in ("bos", "eos", "unk", "pad"):
        index = getattr(tokenizer, f"{name}_token_id", None)
        if index is not None:
            getattr(writer, f"add_{name}_token_id")(index)
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id])
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and ids[-1:] == [tokenizer.eos_token_id])
    template: Any = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)


def _refusal(reason: str) -> InputError:
    return InputError(
        f"--to gguf: llama.cpp has no vocabulary like this tokenizer: {reason}; with --no-vocabulary, llama.cpp reads "
        "and prints token ids"
    )
