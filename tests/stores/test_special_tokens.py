"""The ids around a text, by kind of tokenizer; transformers' own tokenization of a text is the judge."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from manifests.errors import InputError
from stores.special_tokens import text_end, text_prefix

SPECIAL = {"<unk>": 0, "<s>": 1, "</s>": 2, "[gMASK]": 3, "<sop>": 4}


def tokenizer_of(template: str | None = None, words: str = "ab c", **special: Any) -> Any:
    """Return a byte-level tokenizer of single characters with a post-processor."""
    vocabulary = SPECIAL | {character: 5 + n for n, character in enumerate(sorted({*words}))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    if template is not None:
        used = [(name, index) for name, index in SPECIAL.items() if name in template]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)


@pytest.mark.parametrize(
    ("tokenizer", "prefix", "end"),
    [
        pytest.param(tokenizer_of(), (), (), id="none"),
        pytest.param(tokenizer_of("<s> $A", bos_token="<s>", eos_token="</s>"), (1,), (2,), id="BOS"),
        pytest.param(tokenizer_of("[gMASK] <sop> $A", eos_token="</s>"), (3, 4), (2,), id="two tokens"),
        pytest.param(tokenizer_of("<s> $A <sop>", bos_token="<s>", eos_token="</s>"), (1,), (4,), id="both sides"),
        pytest.param(tokenizer_of("$A </s>"), (), (2,), id="end alone"),
        pytest.param(tokenizer_of(bos_token="<s>", eos_token="</s>"), (), (2,), id="BOS only by bos_token_id"),
        pytest.param(tokenizer_of("<s> $A", words="xyz", bos_token="<s>"), (1,), (), id="a is unknown"),
        pytest.param(tokenizer_of("<s> $A", words="ab", bos_token="a"), (1,), (), id="a is special"),
    ],
)
def test_ids_around_a_text(tokenizer: Any, prefix: tuple[int, ...], end: tuple[int, ...]) -> None:
    assert text_prefix(tokenizer) == prefix
    assert text_end(tokenizer) == end
    text = "zyx"
    whole, bare = tokenizer(text)["input_ids"], tokenizer(text, add_special_tokens=False)["input_ids"]
    assert whole[: len(prefix) + len(bare)] == [*prefix, *bare]


class Odd:
    """A tokenizer that tokenizes a text otherwise with special tokens."""

    all_special_ids = (0,)
    eos_token_id = 9

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [0, 3] if add_special_tokens else [4]}


def test_an_unknown_prefix_is_refused_by_name() -> None:
    odd: Any = Odd()
    with pytest.raises(InputError, match=r"ids that it puts before a text are unknown.* set prefix: none"):
        text_prefix(odd)
    assert text_end(odd) == (9,)
