"""Runs windows of different lengths through a model, and answers the questions at their places.

Legend: M windows of a shard, S their length, B of these at a time, D hidden, P places, R rows that have some, V
vocabulary.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from manifests.errors import NumericsError
from pipeline.kernels.checks import all_finite
from pipeline.units.questions import ROW_WIDTH, Answer, Answers, Questions, QuestionShard
from pipeline.units.scores import Score, WindowForward
from workers.branched_layer import Places
from workers.copies import HiddenReader
from workers.embedding_and_head import head
from workers.score_pass import ROWS_PER_LOGITS, ScoreRunner, WindowShard


class QuestionRunner(ScoreRunner):
    """Runs a worker's units on windows, of one length or of several."""

    def shard(self, unit: WindowForward | Score) -> WindowShard:
        """Return the shard of a unit."""
        return QuestionWindows(self, unit) if isinstance(unit.windows, Questions) else WindowShard(self, unit)

    def answer(self, unit: Answer) -> Answers:
        """Answer the questions of one shard. Raises the errors of `Worker.execute`."""
        shard = QuestionWindows(self, unit)
        answers = shard.answers(shard.inputs(unit))
        self.hidden.release_shard(shard.lineage, unit.shard)
        return answers


class QuestionWindows(WindowShard):
    """The shard of one unit, with windows of its own length."""

    def _sizes(self) -> tuple[int, int, int]:
        assert isinstance(self.unit.windows, Questions)
        batch = max(1, round(self.unit.windows.batch_tokens / self.at.length))
        return self.at.windows, self.at.length, batch

    @property
    def at(self) -> QuestionShard:
        """Return where the shard's windows and their questions are."""
        assert isinstance(self.unit.windows, Questions)
        return self.unit.windows.of[self.unit.shard]

    def places(self, start: int, stop: int) -> Places | None:
        """Return the places of the tokens of some windows; None: each window is one sequence."""
        if not self.at.branched:
            return None
        return Places(self.ends[start:stop, : self.longest(start, stop)].to(self.layers.device))

    def longest(self, start: int, stop: int) -> int:
        """Return the tokens of the longest of some windows, without padding."""
        return int(self.ends[start:stop, 0].max())

    def answers(self, last: HiddenReader) -> Answers:
        """Return the answers of all windows. `last`: the outputs of the last layer.

        Raises NumericsError on NaN or infinity.
        """
        to_logits = head(self.layers, self.unit.staged)
        window_P, row_P, target_P, question_P = self.numbers[-4 * self.at.places :].view(-1, 4).long().T
        rows_R, index_P = torch.unique(window_P * self.at.length + row_P, return_inverse=True)
        hidden_RD = self._rows(last, rows_R)
        log_P = torch.empty(len(row_P), dtype=torch.float64)
        likeliest_P = torch.empty(len(row_P), dtype=torch.bool)
        for first in range(0, len(rows_R), ROWS_PER_LOGITS):
            here = (index_P >= first) & (index_P < first + ROWS_PER_LOGITS)
            logits_RV = to_logits(hidden_RD[first : first + ROWS_PER_LOGITS])
            if not all_finite(logits_RV):
                raise NumericsError("evaluation: the logits hold NaN or infinity")
            log_P[here], likeliest_P[here] = _at_targets(logits_RV, index_P[here] - first, target_P[here])
        return _by_question(question_P, log_P, likeliest_P)

    def _rows(self, last: HiddenReader, rows_R: Tensor) -> Tensor:
        """Return the last layer's outputs (R, D) at rows of the shard, in ascending order."""
        parts = []
        for start, stop in self.batches:
            first, end = start * self.at.length, stop * self.at.length
            inside_R = rows_R[(rows_R >= first) & (rows_R < end)] - first
            parts.append(last.read(start, stop).flatten(0, 1)[inside_R].to(self.layers.device))
        return torch.cat(parts)

    @cached_property
    def numbers(self) -> Tensor:
        """Return the numbers of the shard, on the CPU."""
        first, stop = self.at.first, self.at.first + self.at.numbers
        rows = self.ids.read(first // ROW_WIDTH, -(-stop // ROW_WIDTH)).flatten()
        return rows[first % ROW_WIDTH :][: stop - first]

    @property
    def ends(self) -> Tensor:
        """Return the end of each token (M, S)."""
        return self.numbers[self.at.tokens : 2 * self.at.tokens].view(self.at.windows, self.at.length)

    def tokens(self, start: int, stop: int) -> Tensor:
        """Return token ids (B, S) of some of the shard's windows, without padding beyond the longest."""
        ids_MS = self.numbers[: self.at.tokens].view(self.at.windows, self.at.length)
        return ids_MS[start:stop, : self.longest(start, stop)].long().to(self.layers.device)


def _at_targets(logits_RV: Tensor, row_P: Tensor, target_P: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target in float64, and True if the target is the likeliest, on the CPU."""
    row_P, target_P = (index.to(logits_RV.device) for index in (row_P, target_P))
    log_P = logits_RV.log_softmax(dim=1)[row_P, target_P]  # whose rounding is that of lm-eval's own class
    return log_P.double().cpu(), (logits_RV.argmax(dim=1)[row_P] == target_P).cpu()


def _by_question(question_P: Tensor, log_P: Tensor, likeliest_P: Tensor) -> Answers:
    """Sum the figures of the places of each question."""
    questions_Q, index_P = torch.unique(question_P, return_inverse=True)
    log_Q = torch.zeros(len(questions_Q), dtype=torch.float64).index_add_(0, index_P, log_P)
    missed_Q = torch.zeros(len(questions_Q)).index_add_(0, index_P, (~likeliest_P).float())
    return Answers(tuple(questions_Q.tolist()), tuple(log_Q.tolist()), tuple((missed_Q == 0).tolist()))
