"""lm-eval's interface to a model whose log-likelihoods are passes of all layers.

Contexts, continuations and their tokens are those of lm-eval's own class `hf`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from jinja2.exceptions import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from manifests.errors import InputError
from pipeline.evaluation.questions import Answered, Question
from pipeline.inputs.task_names import GENERATE, refuse_generating

CACHED_TEXTS = 4096  # contexts whose tokens are kept for the other choices of a question


class StreamedLM(TemplateLM):  # type: ignore[misc]  # lm-eval ships no types
    """lm-eval's interface to a model that answers questions in passes of all layers."""

    def __init__(
        self, tokenizer: Any, max_length: int, answers: Callable[[str, Sequence[Question], int], Answered]
    ) -> None:
        """`answers`: returns the answers to questions, given the name of the pass and the most tokens of a window."""
        super().__init__()
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.answers = answers
        self._encoded = lru_cache(CACHED_TEXTS)(self._encode)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, for lm-eval's own caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text, as lm-eval's class `hf`: a text that begins with a BOS gets no second one."""
        return list(self._encoded(string, add_special_tokens))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text. A template that knows no system role gets the conversation without it."""
        try:
            return self._templated(chat_history, add_generation_prompt)
        except TemplateError:
            return self._templated([turn for turn in chat_history if turn["role"] != "system"], add_generation_prompt)

    def _templated(self, chat_history: list[dict[str, str]], prompt: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=prompt, continue_final_message=not prompt
        )
        return text

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, whose tokens are each predicted once."""
        questions: list[Question] = []
        counts: list[int] = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            asked = [Question(*map(tuple, make_disjoint_window(window))) for window in windows]
            questions += asked
            counts.append(len(asked))
        logs = iter([log for log, _ in self.answers("texts", questions, self.max_length)])
        return [sum(next(logs) for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Raise InputError: a pass of all layers for each token would take too long."""
        refuse_generating("tasks", sorted({str(request.task_name) for request in requests}) or [GENERATE])
        raise AssertionError

    def _loglikelihood_tokens(self, requests: list[Any], disable_tqdm: bool = False, **kwargs: Any) -> Answered:
        questions = [Question(tuple(context), tuple(continuation)) for _, context, continuation in requests]
        lengths = [len(question.continuation) for question in questions]
        if lengths and not 0 < min(lengths) <= max(lengths) <= self.max_length:
            raise InputError(
                f"tasks: continuations have {min(lengths)} to {max(lengths)} tokens; the model scores 1 to "
                f"{self.max_length}"
            )
        return self.answers("tasks", questions, self.max_length)

    def _encode(self, string: str, add_special_tokens: bool | None) -> tuple[int, ...]:
        if add_special_tokens is None:
            return tuple(encode_text(self.tokenizer, string, self.prefix_token_id))
        return tuple(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))


def encode_text(tokenizer: Any, text: str, prefix_token: int) -> list[int]:
    """Return the tokens of a text, with those that the tokenizer puts before it, unless it begins with `prefix_token`
    already."""
    special = {"add_special_tokens": False} if text.startswith(tokenizer.decode(prefix_token)) else {}
    tokens: list[int] = tokenizer.encode(text, **special)
    return tokens
