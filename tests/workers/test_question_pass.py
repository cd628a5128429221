"""Answers to questions: a worker's passes of padded and branched windows, against transformers on each question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lamina import LayersConfig
from pipeline.driver.scoring import window_units
from pipeline.evaluation.questions import Question, packed, windows_of
from pipeline.evaluation.streamed_tasks import can_branch
from pipeline.families.registry import standard_config
from pipeline.units.questions import Answer, Answers, Questions
from tests import factories
from tests.workers.bench import make_setup, make_worker, save_source
from workers.branched_layer import Places
from workers.config import WorkerConfig
from workers.tapped_layer import TappedLayer

pytestmark = pytest.mark.sample(4)
FAMILIES = ("llama-gqa", "mistral-window", "opt-tied", "gemma2-tied", "olmo3", "gptj")


def questions_of(vocab: int) -> list[Question]:
    """Contexts of several lengths with choices of several lengths, one of them the likeliest by chance."""
    draws = torch.Generator().manual_seed(3)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, vocab, (count,), generator=draws).tolist())

    contexts = [ids(count) for count in (1, 4, 11, 23)]
    asked = [Question(context, ids(count)) for context in contexts for count in (1, 3, 6, 2)]
    alike = [Question(question.context, (*question.continuation[:3], 5, 6)) for question in asked[2::4]]
    return [*asked, *alike, Question((*contexts[3][:20], 7), (8, 9))]


def answered(setup: WorkerConfig, asked: Sequence[Question], branching: bool, batch_tokens: int = 64) -> list[Answers]:
    shards, numbers = packed(windows_of(asked, 1000, branching))
    worker = make_worker(setup)
    worker.setup = worker.scores.setup = setup_with(setup, numbers)
    windows = Questions.of_shards(shards, "float32", batch_tokens, "digest")
    layers: list[None] = [None] * setup.geometry.num_layers
    for layer in range(len(layers)):
        for unit in window_units(windows, "tasks", layers, layer):
            worker.execute(unit)
    units = [Answer(windows, "tasks", len(layers), shard, replay=tuple(layers)) for shard in range(windows.shards)]
    return [worker.execute(unit) for unit in units]


def setup_with(setup: WorkerConfig, numbers: Tensor) -> WorkerConfig:
    return replace(setup, tokens=None, token_ids=numbers)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_transformers_own(family: str, tmp_path: Path) -> None:
    """Alone and with shared contexts, some beyond the sliding window; padding and other choices change nothing."""
    setup = make_setup(save_source(tmp_path / "model", family), tmp_path / "run")
    assert can_branch(setup.config, 8)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    asked = questions_of(setup.geometry.vocab)
    with torch.no_grad():
        for number in (2, 9):  # a greedy continuation, of a question with other choices
            ids = [*asked[number].context]
            for _ in asked[number].continuation:
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            asked[number] = Question(asked[number].context, tuple(ids[len(asked[number].context) :]))
        expected = [own_answer(model, question) for question in asked]
    for branching in (False, True):
        answers = answered(setup, asked, branching)
        found = {
            number: (log, greedy)
            for shard in answers
            for number, log, greedy in zip(shard.questions, shard.logs, shard.greedy, strict=True)
        }
        for number, (log, greedy) in enumerate(expected):
            assert found[number][0] == pytest.approx(log, abs=1e-4), (number, branching)
            assert found[number][1] == greedy, (number, branching)
    assert [greedy for _, greedy in expected].count(True) >= 2


def own_answer(model: torch.nn.Module, question: Question) -> tuple[float, bool]:
    ids = torch.tensor([(*question.context, *question.continuation)])
    logs = model(ids).logits[0].log_softmax(-1)
    places = range(len(question.context), ids.shape[1])
    log = sum(float(logs[place - 1, ids[0, place]]) for place in places)
    return log, all(int(logs[place - 1].argmax()) == ids[0, place] for place in places)


def test_layers_see_no_padding_beyond_the_longest_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup(save_source(tmp_path / "model", "llama-gqa"), tmp_path / "run")
    run, lengths = TappedLayer.run, list[int]()

    def seen(self: TappedLayer, hidden_BSD: Tensor, *arguments: Any, **named: Any) -> Tensor | None:
        lengths.extend([hidden_BSD.shape[1]] * len(hidden_BSD))
        return run(self, hidden_BSD, *arguments, **named)

    monkeypatch.setattr(TappedLayer, "run", seen)
    asked = [Question(tuple(range(3, 3 + length)), (9,)) for length in (24, 20, 6, 5)]
    asked = [Question((number, *question.context[1:]), (9,)) for number, question in enumerate(asked)]
    (answers,) = answered(setup, asked, branching=True, batch_tokens=48)
    assert lengths == [24, 24, 6, 6] * setup.geometry.num_layers
    assert len(answers.questions) == 4


def test_places_of_branches() -> None:
    places = Places(torch.tensor([[6, 6, 4, 4, 6, 6]]))
    assert places.positions.tolist() == [[0, 1, 2, 3, 2, 3]]
    assert places.mask(None)[0, 5].tolist() == [True, True, False, False, True, True]
    assert places.mask(3)[0, 5].tolist() == [False, True, False, False, True, True]


def test_foreign_attention_and_streamed_experts_do_not_branch(tmp_path: Path) -> None:
    for family, branches in (("deepseek_v3", False), ("mixtral", True)):
        config = factories.make_config(family)
        standard = standard_config(config.to_dict())
        assert can_branch(standard, 8) is branches, family
    assert not can_branch(standard, 1)
    assert LayersConfig(**standard).mixture is not None
