"""The windows of both texts on which the dense model is scored."""

from __future__ import annotations

import pytest
import torch

from pipeline.inputs.calibration import EvaluationTokens
from pipeline.job.texts import compared_windows
from pipeline.units.sharding import TEXT_TOKENS


@pytest.mark.parametrize(
    ("evaluation", "length", "expected"),
    [
        (None, 24, 0),
        ((5, 16), 24, 3),  # 80 tokens: the last 8 fill no window
        ((1, 9), 9, 1),  # shorter than a sample, so that both are cut to its length
        ((40, 2048), 24, -(-TEXT_TOKENS // 24)),
    ],
)
def test_windows_of_both_texts_are_of_one_length(
    evaluation: tuple[int, int] | None, length: int, expected: int
) -> None:
    samples = torch.arange(12 * 24).view(12, 24)
    tokens = None if evaluation is None else torch.arange(evaluation[0] * evaluation[1]).view(evaluation)
    of_samples, of_text = compared_windows(samples, tokens if tokens is None else EvaluationTokens(tokens), ())
    assert of_samples.shape == (12, length)
    assert torch.equal(of_samples, samples[:, :length])
    assert len(of_text) == expected
    assert tokens is None or of_text.shape[1] == length
    assert tokens is None or torch.isin(of_text, tokens).all()
    assert all(row.diff().eq(1).all() for row in of_text), "each window is a passage of the text"


def test_windows_of_both_texts_begin_with_the_samples_prefix() -> None:
    samples = torch.cat((torch.full((12, 2), 7), torch.arange(12 * 6).view(12, 6)), dim=1)
    evaluation = EvaluationTokens(torch.cat((torch.full((5, 1), 9), torch.arange(100, 150).view(5, 10)), dim=1), (9,))
    of_samples, of_text = compared_windows(samples, evaluation, (7, 7))
    assert torch.equal(of_samples, samples)
    assert of_text.tolist() == [[7, 7, *range(100 + 6 * n, 106 + 6 * n)] for n in range(8)]


def test_many_samples_are_scored_in_part_and_evenly() -> None:
    samples = torch.arange(64)[:, None].expand(64, 2048)
    of_samples, _ = compared_windows(samples, None, ())
    assert of_samples[:, 0].tolist() == list(range(0, 64, 16))
    assert of_samples.numel() == TEXT_TOKENS
