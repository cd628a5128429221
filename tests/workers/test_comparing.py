"""Both models side by side, as a job's workers do it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.units.scores import Compare
from tests.workers.bench import LOW, make_setup, make_worker, solve_layer
from workers.comparing import compare_models
from workers.layers import LayerReader


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


def test_one_table_or_head_is_held_at_a_time(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a large vocabulary they are the largest tensors of a job, and both models once held theirs."""
    holding: set[LayerReader] = set()
    kept_outside = LayerReader.kept_outside

    def counted(reader: LayerReader, name: Hashable, build: Callable[[], Any]) -> Any:
        modules = kept_outside(reader, name, build)
        holding.add(reader)
        assert sum(each.outside is not None for each in holding) == 1
        return modules

    monkeypatch.setattr(LayerReader, "kept_outside", counted)
    setup = make_setup(llama, tmp_path / "run")
    nothing = (None,) * len(setup.geometry.layers)
    done = make_worker(setup).execute(Compare(((1, 2, 3),), nothing))
    assert done.figures["error"] < 1e-4
    assert len(holding) == 1
    dense, packed = (LayerReader(setup, torch.device("cpu")) for _ in range(2))
    holding.clear()
    assert compare_models(dense, packed, nothing, torch.tensor([[1, 2, 3]])).error < 1e-4
    assert len(holding) == 2
