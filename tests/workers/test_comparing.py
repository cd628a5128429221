"""Both models side by side, as a job's workers do it."""

from __future__ import annotations

from pathlib import Path

import torch

from pipeline.units.scores import Compare
from tests.workers.bench import LOW, make_setup, make_worker, solve_layer


def test_some_layers_at_a_time_tell_the_same_as_all(llama: Path, tmp_path: Path) -> None:
    """Whoever goes on: what enters the next layers comes with them."""
    entry = {"layers": [0, 1], "ranks": {"value": LOW["value"], "mlp": LOW["mlp"]}}
    workers = [make_worker(make_setup(llama, tmp_path / "run", entry)) for _ in range(2)]
    layers = len(workers[0].setup.geometry.layers)
    staged = (*(solve_layer(workers[0], layer, LOW)[0] for layer in range(2)), *[None] * (layers - 2))
    tokens = tuple(map(tuple, torch.arange(24).reshape(2, 12).tolist()))
    whole = workers[0].execute(Compare(tokens, staged))
    first = workers[0].execute(Compare(tokens, staged[:1], head=False))
    rest = workers[1].execute(Compare(tokens, staged[1:], 1, first.after))
    assert whole.after is None
    assert max(whole.figures["layer_errors"][:2]) > 0
    assert set(whole.figures["layer_errors"][2:]) == {0.0}
    joined = {name: first.figures[name] + rest.figures[name] for name in ("layer_errors", "sketch")}
    assert {**rest.figures, **joined} == dict(whole.figures)
