"""Units that answer questions: log-likelihoods of tokens at given places of windows of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from manifests.records import ArrayRecord
from pipeline.units.scores import Score, Windows

ROW_WIDTH = 1024  # numbers in a row of the table with the numbers of all shards


@dataclass(frozen=True)
class QuestionShard:
    """Windows of one length, and the places in them that are scored, within the table of the numbers of all shards.

    Attributes:
        first: the index of the shard's first number. Its token ids (windows, length) come first, then the end of each
            token (windows, length), then its places (places, 4): window, row, next token, question. Rows from a token
            up to its end, exclusive, continue its sequence. The end of a window's first token is the window's length.
        branched: windows are trees of sequences that begin alike. A token attends to those whose end is behind it.
    """

    first: int
    windows: int
    length: int
    places: int
    branched: bool = False

    @property
    def tokens(self) -> int:
        """The number of tokens, padding included."""
        return self.windows * self.length

    @property
    def numbers(self) -> int:
        """The number of all numbers of the shard."""
        return 2 * self.tokens + 4 * self.places


@dataclass(frozen=True, kw_only=True)
class Questions(Windows):
    """Windows of different lengths, padded on the right to the length of their shard. `micro_batch` is unused.

    Attributes:
        of: the shards.
        batch_tokens: the number of tokens that go through a layer at a time, about.
        digest: names the model and all numbers, for entries of the ledger.
    """

    of: tuple[QuestionShard, ...]
    batch_tokens: int
    digest: str

    @classmethod
    def of_shards(
        cls,
        of: Sequence[QuestionShard],
        dtype: str,
        batch_tokens: int,
        digest: str,
        tokens: ArrayRecord | None = None,
    ) -> Questions:
        """Return the windows of these shards. `tokens`: the record of their numbers; None: the workers received these
        when they started."""
        ends = accumulate((shard.windows for shard in of), initial=0)
        return cls(tuple(pairwise(ends)), dtype, 1, tokens, of=tuple(of), batch_tokens=batch_tokens, digest=digest)

    @property
    def name(self) -> str:
        """The digest."""
        return self.digest


@dataclass(frozen=True)
class Answer(Score):
    """Answers the questions of one shard, after the last layer. The result is `Answers`."""

    @property
    def key(self) -> str:
        return f"answer/{self.model}/{self.shard}"


@dataclass(frozen=True)
class Answers:
    """Answers by question: the log-likelihood of its tokens, and True if each is the likeliest at its place."""

    questions: tuple[int, ...]
    logs: tuple[float, ...]
    greedy: tuple[bool, ...]
