"""Token ids that a model's embedding has no row for, in all windows that a job reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from manifests.errors import InputError
from pipeline.inputs.calibration import calibration_tokens, evaluation_tokens
from tests.families.geometries import manifest

WORDS = 400


def inputs_of(folder: Path, seed: int, vocab: int) -> Any:
    """Inputs whose text is `w0 w1 …`; the word w<n> is token n."""
    calibration = {"text": {"files": [str(folder / "a.txt")]}, "samples": 20, "sequence_length": 8, "shards": 2}
    evaluation = {"perplexity": {"text": {"files": [str(folder / "a.txt")]}, "window": 8}}
    return SimpleNamespace(
        manifest=manifest(seed=seed, calibration=calibration, evaluation=evaluation),
        needs_calibration=True,
        source=SimpleNamespace(storage=folder),
        geometry=SimpleNamespace(vocab=vocab),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the text and its tokenizer."""
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(tmp_path)
    lines = [" ".join(f"w{number}" for number in range(begin, begin + 10)) for begin in range(0, WORDS, 10)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.parametrize("among", ["samples", "held_out"])
def test_every_window_of_calibration_text_is_checked(among: str, folder: Path) -> None:
    """Held-out windows reach the model, too. The place is the first in the text, whichever window has it."""
    for seed in range(100):
        tokens = calibration_tokens(inputs_of(folder, seed, WORDS))
        assert tokens is not None
        largest = {name: int(getattr(tokens, name).max()) for name in ("samples", "held_out")}
        if max(largest, key=largest.__getitem__) == among:
            break
    vocab = sorted(largest.values())[0] + 1
    line, word = divmod(vocab, 10)
    character = len(" ".join(f"w{number}" for number in range(10 * line, vocab))) + 2 if word else 1
    place = rf"a.txt, line {line + 1}, character {character} the token 'w{vocab}' with id {vocab}, but the model's"
    with pytest.raises(
        InputError, match=rf"tokenizer: it finds in text file .*{place} vocabulary has {vocab}; give the"
    ):
        calibration_tokens(inputs_of(folder, seed, vocab))


def test_the_evaluation_text_is_checked(folder: Path) -> None:
    assert evaluation_tokens(inputs_of(folder, 0, WORDS)) is not None
    with pytest.raises(
        InputError, match="line 4, character 1 the token 'w30' with id 30, but the model's vocabulary has 30"
    ):
        evaluation_tokens(inputs_of(folder, 0, 30))
