"""Remarks on calibration text: on damage and other languages, and none on intact texts of other kinds."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import pytest

from pipeline.evaluation.text_remarks import text_lines, text_remark

GERMAN = """Es war einmal ein kleiner Hund, der im Wald lebte und gern mit den anderen Tieren spielte. Eines Tages ging
er zu dem Fluss, weil er Durst hatte, und sah dort eine Ente, die nicht schwimmen wollte. Der Hund fragte sie, ob sie
Angst vor dem Wasser habe, und die Ente sagte, dass es ihr zu kalt sei. Da holte er ein Tuch aus dem Haus, und sie
waren beide froh. Am Abend erzählte er es seiner Mutter, die ihn lobte und ihm etwas zu essen gab.
"""
ALIKE = (3.0, 3.2)


@pytest.fixture(scope="module")
def kinds(shared_dir: Path) -> dict[str, str]:
    """Intact texts of several kinds, 30,000 characters each."""
    folder = shared_dir / "text"
    texts = {
        "tinystories": "\n\n".join(json.loads((folder / "tinystories_1000_clean.json").read_text())),
        "wikitext103": "\n\n".join(json.loads((folder / "wikitext103_train_1000.json").read_text())),
        "wikitext2": (folder / "wikitext2_raw_test.txt").read_text(),
        "tinyshakespeare": (folder / "tinyshakespeare.txt").read_text(),
    }
    rows = map(json.loads, (folder / "c4_sample.jsonl").read_text().splitlines()[:100])
    texts["c4"] = "\n\n".join(row["prefix"] for row in rows)
    return {name: text[:30_000] for name, text in texts.items()}


def test_intact_texts_of_other_kinds_get_none(kinds: dict[str, str]) -> None:
    """Nor losses that differ by 2 nats, as those of a story and an article do."""
    pairs = [(one, other) for one in kinds for other in kinds]
    assert [pair for pair in pairs if text_remark(kinds[pair[0]], kinds[pair[1]], (4.2, 2.2))] == []


@pytest.mark.parametrize("damage", ["another language", "blanks lost", "letters apart", "UTF-16", "base64"])
def test_damaged_calibration_text_and_another_language_get_one(damage: str, kinds: dict[str, str]) -> None:
    for calibration in kinds.values():
        damaged = {
            "another language": GERMAN * 60,
            "blanks lost": "".join(calibration.split()),
            "letters apart": " ".join(calibration),
            "UTF-16": calibration.encode("utf-16-le").decode("latin-1"),
            "base64": base64.b64encode(calibration.encode()).decode(),
        }[damage]
        for evaluation in kinds.values():
            remark = text_remark(damaged, evaluation, ALIKE)
            assert remark is not None
            assert "of the common words of the evaluation text, such as 'the'" in remark or "'and'" in remark


def test_lost_line_ends_get_one_where_lines_are_short(kinds: dict[str, str]) -> None:
    plays, articles = kinds["tinyshakespeare"], kinds["wikitext2"]
    remark = text_remark(plays.replace("\n", " "), plays, ALIKE)
    assert remark is not None
    assert "a line break in every 2" in remark
    assert text_remark(articles.replace("\n", " "), articles, ALIKE) is None


def test_text_that_the_model_does_not_know_gets_one(kinds: dict[str, str]) -> None:
    words = kinds["wikitext2"].split()
    random.Random(0).shuffle(words)
    remark = text_remark(" ".join(words), kinds["wikitext2"], (7.1, 3.7))
    assert remark is not None
    assert "is 7.1 nats per token on the calibration samples and 3.7 on" in remark
    assert text_remark(" ".join(words), kinds["wikitext2"], (6.1, 3.7)) is None


@pytest.mark.parametrize(
    "texts", [("", ""), ("a b c", ""), ("", "a b c"), ("d e f", "a b c"), ("漢字仮名", "word word")]
)
def test_short_texts_get_none(texts: tuple[str, str]) -> None:
    assert text_remark(*texts, ALIKE) is None


def test_a_summary_has_its_remark_and_the_rows_without_text() -> None:
    assert text_lines({}) == text_lines({"texts": None, "skipped_rows": {}}) == []
    summary = {"texts": {"remark": "remark: a"}, "skipped_rows": {"text file a.jsonl": 1200}}
    assert text_lines(summary) == ["text file a.jsonl: 1,200 rows without text are left out", "remark: a"]
