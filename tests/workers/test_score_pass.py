"""Windows through a worker's model and its head: against transformers on the same tokens."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from manifests.errors import CorruptError
from pipeline.driver.scoring import window_units
from pipeline.kernels.gradients import NUMBERS_AT_ONCE
from pipeline.units.scores import Score, WindowForward, Windows
from pipeline.units.sharding import expert_parts
from pipeline.units.units import Forward
from stores.activations import ActivationStore
from stores.source import SourceCheckpoint
from tests import factories
from tests.failing_disk import flip
from tests.workers.bench import (
    EVERYTHING,
    LOW,
    SAMPLES,
    Reference,
    held,
    make_setup,
    make_worker,
    solve_layer,
)
from workers.config import WorkerConfig
from workers.embedding_and_head import head
from workers.layers import LayerReader
from workers.score_pass import LogitRows, summed_divergence, summed_loss

pytestmark = pytest.mark.sample(3)


def windows_of(setup: WorkerConfig, dtype: str = "float32") -> Windows:
    """The calibration samples themselves."""
    return Windows.even(SAMPLES, 2, dtype, 2, setup.tokens)


def logits_and_targets(reference: Reference, shard: int) -> tuple[Tensor, Tensor]:
    logits_MSV, ids_MS = reference.shard(reference.logits_MSV, shard), reference.shard(reference.ids_MS, shard)
    return logits_MSV[:, :-1].flatten(0, 1), ids_MS[:, 1:].flatten()


def test_score_is_the_cross_entropy_of_the_source(model: Path, tmp_path: Path) -> None:
    setup = make_setup(model, tmp_path / "run")
    worker, reference = make_worker(setup), Reference(model, setup)
    layers = setup.geometry.num_layers
    for shard in range(2):
        found = worker.execute(Score(windows_of(setup), "source", layers, shard, replay=(None,) * layers))
        logits, target = logits_and_targets(reference, shard)
        assert found.tokens == len(target)
        loss = functional.cross_entropy(logits, target, reduction="sum").item()
        assert found.loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_a_prefix_is_not_scored(llama: Path, tmp_path: Path, prefix: int) -> None:
    """The first token behind it is, and without one, a window's first token is not."""
    setup = make_setup(llama, tmp_path / "run")
    worker, reference, first = make_worker(setup), Reference(llama, setup), max(1, prefix)
    unit = Score(replace(windows_of(setup), prefix=prefix), "source", 3, 0, replay=(None,) * 3)
    logits_MSV, ids_MS = reference.shard(reference.logits_MSV, 0), reference.shard(reference.ids_MS, 0)
    logits_TV, target_T = logits_MSV[:, first - 1 : -1].flatten(0, 1), ids_MS[:, first:].flatten()
    found = worker.execute(unit)
    assert found.tokens == len(target_T)
    assert found.loss == pytest.approx(functional.cross_entropy(logits_TV, target_T, reduction="sum").item(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.sample(2)
def test_divergence_is_that_of_the_logits(model: Path, tmp_path: Path) -> None:
    """The dense last outputs stored, the compressed ones held: divergence and both losses, summed over the tokens."""
    setup = make_setup(model, tmp_path / "run", EVERYTHING)
    worker, reference = make_worker(setup), Reference(model, setup)
    layers, windows = setup.geometry.num_layers, windows_of(setup)
    staged: list[Any] = [None] * layers
    staged[1] = solve_layer(worker, 1, LOW)[0]
    for shard in range(2):
        last = WindowForward(windows, "dense", layers - 1, shard, store=True, replay=(None,) * (layers - 1))
        dense = worker.execute(last).activation
        worker.execute(WindowForward(windows, "made", layers - 1, shard, replay=tuple(staged[:-1])))
        hidden_TD = held(worker, "windows-made", layers, shard)[:, :-1].flatten(0, 1)
        found = worker.execute(Score(windows, "made", layers, shard, dense=dense, replay=tuple(staged)))
        assert not any(lineage.startswith("windows") for lineage, _, _ in worker.hidden.held)
        logits, target = logits_and_targets(reference, shard)
        table = logits.double().log_softmax(-1)
        assert found.tokens == len(target)
        assert found.dense_loss == pytest.approx(functional.nll_loss(table, target, reduction="sum").item(), rel=1e-5)
        with torch.no_grad():
            other = head(worker.layers)(hidden_TD).double().log_softmax(-1)
        expected = functional.kl_div(other, table, reduction="sum", log_target=True).item()
        assert found.divergence == pytest.approx(expected, rel=1e-3)
        assert found.divergence > 1e-3
        loss = functional.nll_loss(other, target, reduction="sum").item()
        assert found.loss == pytest.approx(loss, rel=1e-5)
        same = Score(windows, "same", layers, shard, dense=dense, replay=(None,) * layers)
        assert abs(make_worker(setup).execute(same).divergence) < 1e-4


def test_logits_are_made_a_few_rows_at_a_time(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup(llama, tmp_path / "run")
    worker, unit = make_worker(setup), Score(windows_of(setup), "source", 3, 0, replay=(None,) * 3)
    whole = worker.execute(unit)
    monkeypatch.setattr("workers.score_pass.ROWS_PER_LOGITS", 3)
    again = worker.execute(unit)
    assert (again.loss, again.tokens) == (pytest.approx(whole.loss), whole.tokens)


def test_in_a_dtype_of_its_own(llama: Path, tmp_path: Path) -> None:
    """The job computes in bfloat16, which tells nothing of small differences."""
    setup = make_setup(llama, tmp_path / "run", dtype=torch.bfloat16)
    worker, reference = make_worker(setup), Reference(llama, replace(setup, dtype=torch.float32))
    worker.execute(Forward("dense", 0, 0))
    worker.execute(WindowForward(windows_of(setup), "m", 0, 0))
    assert held(worker, "windows-m", 1, 0).dtype == torch.float32
    assert worker.layers.current is None, "of two layers one is held"
    found = worker.execute(Score(windows_of(setup), "m", 3, 0, replay=(None,) * 3))
    loss = functional.cross_entropy(*logits_and_targets(reference, 0), reduction="sum").item()
    assert found.loss == pytest.approx(loss, rel=1e-6)
    worker.execute(Forward("dense", 0, 0))
    assert worker.scores.reader is not None
    assert worker.scores.reader.current is None
    assert held(worker, "dense", 1, 0).dtype == torch.bfloat16


def test_a_layer_in_between_reads_no_tokens_and_embedding_and_head_come_once(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make_setup(llama, tmp_path / "run")
    worker, windows, layers = make_worker(setup), windows_of(setup), setup.geometry.num_layers
    opened, read = [], []
    opening, outer = ActivationStore.open, LayerReader.outer
    monkeypatch.setattr(ActivationStore, "open", lambda *of: opened.append(of) or opening(*of))
    monkeypatch.setattr(LayerReader, "outer", lambda *of, **more: read.append(of[1:]) or outer(*of, **more))
    for layer in range(layers):
        for shard in range(2):
            worker.execute(WindowForward(windows, "m", layer, shard, replay=(None,) * layer))
    assert len(opened) == 2, "by each shard, for the embeddings"
    for shard in range(2):
        worker.execute(Score(windows, "m", layers, shard, replay=(None,) * layers))
    assert [names[0] for names in read][-1] == "model.norm.weight"
    assert len(read) <= 3, "the embeddings before and with the first layer, the head"


def test_slices_of_experts_are_read_once_for_all_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = factories.make_model(tmp_path / "model", "qwen3_moe"), list[str]()
    setup = make_setup(model, tmp_path / "run", experts=2)
    whole, worker = make_worker(replace(setup, experts=100)), make_worker(setup)
    reading = SourceCheckpoint.read
    monkeypatch.setattr(
        SourceCheckpoint, "read", lambda source, names, *of: read.extend(names) or reading(source, names, *of)
    )
    windows = windows_of(setup)
    for part in expert_parts(setup.geometry.layers[0].num_experts, 2):
        for shard in range(2):
            worker.execute(WindowForward(windows, "m", 0, shard, part=part))
    experts = [name for name in read if name.startswith("model.layers.0.mlp.experts.")]
    assert len(experts) == len({*experts}) == 3 * 6
    for shard in range(2):
        whole.execute(WindowForward(windows, "m", 0, shard))
        assert torch.equal(held(worker, "windows-m", 1, shard), held(whole, "windows-m", 1, shard))
    assert len(worker.hidden.held) == 2, "nothing is left between slices"


def test_windows_that_came_with_the_setup(llama: Path, tmp_path: Path) -> None:
    setup = make_setup(llama, tmp_path / "run")
    assert setup.tokens is not None
    ids = ActivationStore(tmp_path / "run" / "activations.zarr").open(setup.tokens).read(0, SAMPLES)
    given = make_worker(replace(setup, tokens=None, token_ids=ids))
    for shard in range(2):
        stored = Score(windows_of(setup), "m", 3, shard, replay=(None,) * 3)
        unit = replace(stored, windows=replace(stored.windows, tokens=None))
        assert given.execute(unit) == make_worker(setup).execute(stored)


def test_who_takes_a_shard_over_goes_on_from_what_is_committed(llama: Path, tmp_path: Path) -> None:
    setup = make_setup(llama, tmp_path / "run")
    worker, windows = make_worker(setup), windows_of(setup)
    worker.execute(WindowForward(windows, "m", 0, 0))
    record = worker.execute(WindowForward(windows, "m", 1, 0, store=True, replay=(None,))).activation
    worker.execute(WindowForward(windows, "m", 2, 0, base=2, base_record=record))
    for newcomer, unit in (
        (make_worker(setup), WindowForward(windows, "m", 2, 0, replay=(None, None))),
        (make_worker(setup), WindowForward(windows, "m", 2, 0, base=2, base_record=record)),
    ):
        newcomer.execute(unit)
        assert torch.equal(held(newcomer, "windows-m", 3, 0), held(worker, "windows-m", 3, 0))


def test_what_is_forgotten_is_not_taken_for_another_models(llama: Path, tmp_path: Path) -> None:
    """Two models under one name: only the first layer differs, which a worker that holds its outputs would not do."""
    setup = make_setup(llama, tmp_path / "run", EVERYTHING)
    worker, windows = make_worker(setup), windows_of(setup)
    staged = solve_layer(worker, 0, LOW)[0]
    worker.execute(WindowForward(windows, "m", 1, 0, replay=(None,)))
    before = worker.execute(Score(windows, "m", 3, 0, replay=(None,) * 3))
    worker.forget()
    assert worker.execute(Score(windows, "m", 3, 0, replay=(staged, None, None))).loss != before.loss


def test_a_compressed_layer_is_read_ahead_and_held_against_its_digest(llama: Path, tmp_path: Path) -> None:
    setup = make_setup(llama, tmp_path / "run", EVERYTHING)
    worker, windows = make_worker(setup), windows_of(setup)
    staged = solve_layer(worker, 1, LOW)[0]
    layers: list[Any] = [None, staged]
    first, last = (window_units(windows, "made", layers, layer)[0] for layer in (0, 1))
    assert (first.ahead, first.ahead_staged) == (1, staged)
    assert (last.ahead, last.ahead_staged) == (None, None)
    worker.execute(first)
    reader = worker.scores.layers(windows)
    assert reader.ahead is not None
    name, future = reader.ahead
    assert name == ((1, staged.path), 0, True)
    read = {tensor.data_ptr() for tensor in future.result(timeout=30).values()}
    worker.execute(last)
    assert reader.ahead is None
    assert reader.current is not None
    held_here = {tensor.data_ptr() for tensor in reader.current[1].module.state_dict().values()}
    assert held_here & read
    flip(tmp_path / "run" / staged.path)
    make_worker(setup).execute(first)
    with pytest.raises(CorruptError, match="is not what was committed"):
        make_worker(setup).execute(last)


class CopiedBytes(TorchDispatchMode):
    """Records the largest tensor that an operation returns, other than random numbers."""

    num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not function.is_view and "rand" not in str(function):
            self.num_bytes = max(self.num_bytes, result.nbytes)
        return result


def test_scores_copy_few_rows_of_logits_and_hold_one_part() -> None:
    """With a vocabulary of 262,144 a part is 256 MiB; copies and an earlier part once took four more. All bits stay."""
    tokens, vocab = 24, 1 << 18
    generator = torch.Generator().manual_seed(1)
    made: list[weakref.ref[Tensor]] = []

    def parts(models: int) -> Iterator[LogitRows]:
        generator.manual_seed(1)
        for _ in range(2):
            assert not any(reference() is not None for reference in made)
            logits = tuple(torch.randn(tokens, vocab, generator=generator) for _ in range(models))
            made.extend(map(weakref.ref, logits))
            yield logits, torch.randint(0, vocab, (tokens,), generator=generator)
            del logits

    rows = max(1, NUMBERS_AT_ONCE // vocab)
    for models, summed in ((1, summed_loss), (2, summed_divergence)):
        made.clear()
        with CopiedBytes() as copied:
            scored = summed(parts(models))
        assert 0 < copied.num_bytes <= 8 * rows * vocab, "of a sum in float64"
        total, losses = 0.0, [0.0, 0.0]
        for logits, target_T in parts(models):
            log_p = [each.log_softmax(dim=1) for each in logits]
            for place, each in enumerate(log_p):
                losses[place] -= each.gather(1, target_T[:, None]).double().sum().item()
            if models == 2:
                gain_TV = log_p[1] - log_p[0]
                total += (-(gain_TV * log_p[0].exp()).sum(dim=1, dtype=torch.float64)).sum().item()
            del logits, log_p
        assert (scored.loss, scored.divergence if models == 2 else 0.0) == (losses[models - 1], total)
