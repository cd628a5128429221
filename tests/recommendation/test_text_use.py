"""Lengths, numbers of samples and the held-out part follow from a text's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from manifests.calibration import Text
from manifests.errors import InputError
from pipeline.recommendation import text_use
from pipeline.recommendation.text_use import TextUse, choose_text_use, shortened
from tests.factories import make_tokenizer, write_text

LONGEST = 2048


def use_of(tmp_path: Path, num_bytes: int, longest: int = LONGEST, channels: int = 80) -> TextUse:
    path = write_text(tmp_path / "text.txt", num_bytes)
    return choose_text_use(Text(files=(str(path),)), make_tokenizer(), longest, channels, 320)[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("num_bytes", "length"), [(4_000, 32), (60_000, 256), (400_000, 2048)])
def test_the_longest_samples_of_which_there_are_enough(num_bytes: int, length: int, tmp_path: Path) -> None:
    use = use_of(tmp_path, num_bytes)
    assert use.length == length
    assert use.end == 0.8
    assert 16 <= use.samples <= 256
    assert use.samples * use.length < use.available


def test_the_model_limits_the_length(tmp_path: Path) -> None:
    assert use_of(tmp_path, 60_000, longest=100).length == 100


@pytest.mark.slow
def test_wide_models_get_more_samples(tmp_path: Path) -> None:
    narrow, wide = (use_of(tmp_path, 400_000, 128, channels) for channels in (80, 8_000))
    assert (narrow.samples, wide.samples) == (256, 8 * 8_000 // 128)


def test_a_long_text_is_not_counted_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length is guessed by its bytes, and little of it is held out."""
    monkeypatch.setattr(text_use, "COUNTED_TOKENS", 2_500)
    monkeypatch.setattr(text_use, "EVALUATION_TOKENS", 250)
    use = use_of(tmp_path, 100_000, 128)
    assert 0.99 < use.end < 0.999


@pytest.mark.parametrize("num_bytes", [10, 700])
def test_too_short(num_bytes: int, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokens; with a fifth held out .* needs about 640; give more text"):
        use_of(tmp_path, num_bytes)


def test_shorter_samples_are_more() -> None:
    assert shortened(TextUse(0.9, 2048, 256, 600_000), 1024) == TextUse(0.9, 1024, 512, 600_000)
    assert shortened(TextUse(0.9, 2048, 64, 2048 * 65), 1024).samples == 128


def test_a_token_that_the_embedding_lacks_is_named(tmp_path: Path) -> None:
    """A special token that the text spells, or the tokenizer of another model."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    path = write_text(tmp_path / "text.txt", 4_000)
    path.write_text(f"Once.\nThen <|tool|> came.\n{path.read_text()}")
    text = Text(files=(str(path),))
    said = (
        rf"it finds in text file {path}, line 2, character 6 the token '<\|tool\|>' with id 320, but the model's "
        r"vocabulary has 320; leave '<\|tool\|>' out of the text, or give the tokenizer that belongs to the model"
    )
    with pytest.raises(InputError, match=said):
        choose_text_use(text, tokenizer, LONGEST, 80, 320)
    with pytest.raises(InputError, match=r"with id 3\d\d, but the model's vocabulary has 300; give the tokenizer that"):
        choose_text_use(text, make_tokenizer(), LONGEST, 80, 300)
