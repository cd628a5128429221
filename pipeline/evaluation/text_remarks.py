"""A remark on calibration text that looks damaged, or of another language than the evaluation text.

Losses alone do not show it: intact texts of one language differ by up to 2 nats per token, and a text of another
language may have the smaller loss (docs/results.md#texts-that-differ). Common words do: all texts of a language share
most of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from stores.text_rows import Reading, ReadText

WORD = re.compile(r"[^\W\d_]+")
COMMON_SHARE, COMMON_COUNT = 0.005, 10  # of a common word: least share of the text's words, and least count
RARE = 0.1  # a word hardly occurs if it is rarer than this times its frequency in the other text
MOST_MISSING = 0.6  # share of the common words, each as often as it occurs
MANY_BREAKS = 0.02  # share of characters that are line breaks, from which their loss matters
FEW_BREAKS = 0.02  # times the evaluation text's share: next to none
MANY_NATS = 2.5  # per token
SHOWN_WORDS = 4


def text_remark(calibration: str, evaluation: str, losses: tuple[float, float]) -> str | None:
    """Return a remark on calibration text that looks damaged, or unlike the evaluation text; None if it does not.

    `losses`: the dense model's on both, in nats per token.
    """
    share, words = missing_words(calibration, evaluation)
    if share > MOST_MISSING:
        named = ", ".join(map(repr, words[:SHOWN_WORDS]))
        return (
            f"remark: {share:.0%} of the common words of the evaluation text, such as {named}, hardly occur in the "
            "calibration samples, which may be of another language, or damaged; look at the first lines of both texts"
        )
    if (breaks := _breaks(evaluation)) >= MANY_BREAKS and _breaks(calibration) < FEW_BREAKS * breaks:
        return (
            f"remark: the evaluation text has a line break in every {1 / breaks:.0f} characters, and the calibration "
            "samples have next to none; they may have lost their line ends"
        )
    if losses[0] > losses[1] + MANY_NATS:
        return (
            f"remark: the dense model's loss is {losses[0]:.3g} nats per token on the calibration samples and "
            f"{losses[1]:.3g} on the evaluation text; the samples may be damaged, or of a kind that the model hardly "
            "knows; look at the first lines of both texts"
        )
    return None


def text_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines about the read and skipped parts of the texts of a job or sweep, and the remark on the texts."""
    remark = (summary.get("texts") or {}).get("remark")
    return [*read_lines(summary), *([remark] if remark else [])]


def read_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return a line for each text that was read, and one for the skipped parts of each file or dataset. Summaries of
    earlier versions have only the numbers of rows without text."""
    if "texts_read" not in summary:
        skipped = summary.get("skipped_rows") or {}
        readings = [Reading(origin, refused=count) for origin, count in skipped.items()]
        return ReadText(tuple(readings)).left_out()
    uses = {
        use: ReadText(tuple(Reading(**reading) for reading in read["readings"]), read["tokens"])
        for use, read in summary["texts_read"].items()
    }
    left_out = dict.fromkeys(line for read in uses.values() for line in read.left_out())
    return [*(f"{use} text: {read.extent()}" for use, read in uses.items()), *left_out]


def missing_words(calibration: str, evaluation: str) -> tuple[float, list[str]]:
    """Return the share of the evaluation text's common words that hardly occur in the calibration text, and these
    words, the most frequent first. A word that is too rare for the length of the calibration text is not among them."""
    counts, others = (Counter(WORD.findall(text.lower())) for text in (evaluation, calibration))
    least = max(COMMON_COUNT, COMMON_SHARE * counts.total())
    common = {word: count for word, count in counts.most_common() if count >= least}
    scale = len(calibration) / max(1, len(evaluation))
    missing = [
        word for word, count in common.items() if count * scale >= COMMON_COUNT and others[word] <= RARE * count * scale
    ]
    return sum(common[word] for word in missing) / max(1, sum(common.values())), missing


def _breaks(text: str) -> float:
    """Return the share of characters that are line breaks."""
    return text.count("\n") / max(1, len(text))
