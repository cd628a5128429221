"""What methods declare: names of moments, statistics as they receive them."""

from __future__ import annotations

import torch

from pipeline.methods.method import Moment, Statistics, Task, read_task_key
from pipeline.methods.registry import tasks_by_layer


def test_value_moments_keep_their_keys() -> None:
    assert Moment("attention.in").key == "attention.in-1-1"
    assert Moment("o.in", heads=8, groups=2).key == "o.in-8-2"


def test_gradient_moments_have_keys_of_their_own() -> None:
    moments = [
        Moment("mid", kind="gradient"),
        Moment("out", kind="gradient"),
        Moment("q.out", heads=4, groups=2, kind="gradient"),
        Moment("up.out", kind="gradient", diagonal=True),
        Moment("up.out", kind="gradient"),
        Moment("up.out"),
        Moment("pull:q+k", kind="gradient"),
        Moment("mlp.in", kind="sample", tokens=64),
    ]
    keys = [moment.key for moment in moments]
    assert keys[0] == "gradient-mid-1-1"
    assert keys[3] == "gradient-up.out-1-1-diagonal"
    assert keys[6:] == ["gradient-pull-q-k-1-1", "sample-mlp.in-64"]
    assert len(set(keys)) == len(keys)
    assert not any(character in key for key in keys for character in ":/+")


def test_a_layer_names_values_and_gradients_apart() -> None:
    value, gradient = Moment("attention.in"), Moment("pull:q+k", kind="gradient")
    tasks = [
        Task(1, "query_key", ("q", "k"), (gradient, value), method=0),
        Task(1, "x", ("v",), (value,), method=0),
    ]
    assert tasks_by_layer(tasks) == {1: (tuple(tasks), (value,), (gradient,))}


def test_means_of_both_kinds() -> None:
    value, gradient = Moment("attention.in"), Moment("mid", kind="gradient")
    statistics = Statistics({value: torch.full((1, 2, 2), 6.0), gradient: torch.full((1, 2, 2), 0.5)}, tokens=3)
    assert torch.equal(statistics.mean(value), torch.full((1, 2, 2), 2.0, dtype=torch.float64))
    assert torch.equal(statistics.mean(gradient), torch.full((1, 2, 2), 0.5, dtype=torch.float64))


def test_the_key_of_a_task_is_read_as_it_was_made() -> None:
    task = Task(12, "query_key", ("q", "k"), method=1)
    assert task.key == "12/1/query_key"
    assert read_task_key(task.key) == (task.layer, task.method, task.name)
