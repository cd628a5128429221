"""lm-eval's interface to a model that a server answers with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.models.openai_completions import LocalCompletionsAPI

from pipeline.evaluation.streamed_lm import encode_text


class ServedLM(LocalCompletionsAPI):  # type: ignore[misc]  # lm-eval ships no types
    """lm-eval's class `local-completions`, with tokens as those of its class `hf`.

    `local-completions` itself leaves out the BOS that a tokenizer puts before a text.
    """

    def tok_encode(self, string: str | Sequence[str], left_truncate_len: int | None = None, **kwargs: Any) -> Any:
        """Return the tokens of a text, or a list of the tokens of each text. `left_truncate_len`: at most the last so
        many."""
        if not isinstance(string, str):
            return [self.tok_encode(each, left_truncate_len) for each in string]
        return encode_text(self.tokenizer, string, self.prefix_token_id)[-(left_truncate_len or 0) :]
