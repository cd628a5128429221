"""Both models side by side on a worker, against transformers' model with the compressed layers' outputs put into it.

M samples, S sequence, D hidden, F features at a point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manifests.errors import CorruptError
from pipeline.methods.method import Moment
from pipeline.units.units import Pair, ShardDone
from tests.failing_disk import flip
from tests.workers.bench import (
    LOW,
    SAMPLES,
    Reference,
    close,
    hooked,
    make_setup,
    make_worker,
    save_source,
    solve_layer,
    sum_units,
)
from workers.worker import Worker

pytestmark = pytest.mark.sample(3)

FLAT = {"method": "flat_llm"}
RANKS = {name: rank for name, rank in LOW.items() if name != "query_key"}
POINTS = ("attention.in", "o.in", "mlp.in", "down.in")
MOMENTS = tuple(Moment(point, kind="pair") for point in POINTS)
FAMILIES = ("llama-gqa", "qwen2-tied", "opt-tied", "gptj", "gemma2-tied", "granite")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("family") / "model", request.param, torch.float64)


class Behind:
    """Records the values in a layer of the reference for other hidden states."""

    def __init__(self, reference: Reference, layer: int, hidden_MSD: Tensor) -> None:
        self.seen: dict[str, Tensor] = {"in": hidden_MSD}
        self.reference, self.layer = reference, layer
        whole = reference.layers[layer]
        handles = [
            whole.register_forward_pre_hook(self._replace, with_kwargs=True),
            whole.register_forward_hook(self._keep("out", 1)),
            *(
                reference.module(layer, role).register_forward_pre_hook(self._keep(point, 0))
                for role, point in {"q": "attention.in", "o": "o.in", "up": "mlp.in", "down": "down.in"}.items()
            ),
            *(
                reference.module(layer, role).register_forward_hook(self._keep(f"{role}.out", 1))
                for role in ("o", "down", *self._norms())
            ),
        ]
        with torch.no_grad():
            reference.model(reference.ids_MS, use_cache=False)
        for handle in handles:
            with hooked(handle):
                pass

    def _replace(self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if arguments:
            return (self.seen["in"], *arguments[1:]), named
        return arguments, {**named, "hidden_states": self.seen["in"]}

    def _keep(self, name: str, place: int) -> Any:
        def keep(_: nn.Module, *passed: Any) -> None:
            values = passed[place]
            values = values[0] if isinstance(values, tuple) else values
            self.seen[name] = values.detach().reshape(SAMPLES, -1, values.shape[-1])

        return keep

    def _norms(self) -> list[str]:
        return [role for role in self.reference.setup.geometry.layers[self.layer].roles if role.endswith("out_norm")]

    def stream(self, point: str) -> Tensor:
        """Return the values that are compared at a point."""
        if point in ("attention.in", "mlp.in"):
            return self.seen[point]
        if point == "down.in":
            return self.seen["out"]
        added = self.seen["attention_out_norm.out" if self._norms() else "o.out"]
        return self.seen["in"] + added * (self.reference.setup.config["block"].get("residual_scale") or 1.0)

    def weight(self, point: str) -> Tensor | float:
        """Return the weights (M, S, 1) of tokens at a point of the dense model, in whose residual stream errors are."""
        if point in ("attention.in", "mlp.in"):
            return 1.0
        return (self.stream(point).square().mean(-1, keepdim=True) + 1e-6) ** -0.5

    def felt(self, point: str, errors_MSD: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and errors at a point; behind a norm or a scale, as the linear map before it has them."""
        scale = self.reference.setup.config["block"].get("residual_scale") or 1.0
        norms = {"o.in": ("o", "attention_out_norm"), "down.in": ("down", "mlp_out_norm")}
        if point not in norms:
            return self.seen[point], errors_MSD
        role, norm = norms[point]
        if norm not in self._norms():
            return self.seen[point], errors_MSD / (scale * (1 + 1e-4) if scale != 1.0 else 1.0)
        module: Any = self.reference.module(self.layer, norm)
        gains_D = 1 + module.weight.detach()  # of Gemma
        size_MS1 = (self.seen[f"{role}.out"].square().mean(-1, keepdim=True) + module.eps).sqrt()
        ridge = 1e-4 * gains_D.square().mean()
        return self.seen[point] / size_MS1, errors_MSD * gains_D / (gains_D.square() + ridge)


def behind_a_compressed_layer(model: Path, run_dir: Path, **changes: Any) -> tuple[Worker, Reference, Any]:
    setup = make_setup(model, run_dir, FLAT, dtype=torch.float64, **changes)
    worker = make_worker(setup)
    staged, _ = solve_layer(worker, 0, RANKS)
    return worker, Reference(model, setup), staged


def run_pairs(workers: Sequence[Worker], unit: Pair) -> tuple[list[ShardDone], dict[Moment, Tensor]]:
    """Each shard by one of the workers, and what they have summed: (1, F + D, F)."""
    units = [replace(unit, shard=shard) for shard in range(workers[0].setup.shards)]
    done, sums = sum_units(units, [workers[shard % len(workers)] for shard in range(len(units))])
    read = {moment: workers[0].totals.moment(moment, found) for moment, found in sums.items()}
    return done, read


@pytest.mark.slow
def test_sums_are_those_of_hooks_on_the_source(model: Path, tmp_path: Path) -> None:
    worker, reference, staged = behind_a_compressed_layer(model, tmp_path / "run")
    packed_MSD = worker.layers.block(0, staged).run(reference.hidden_LMSD[0])
    assert packed_MSD is not None
    dense = Behind(reference, 1, reference.hidden_LMSD[1])
    packed = Behind(reference, 1, packed_MSD)
    _, sums = run_pairs([worker], Pair(1, 0, 0, moments=MOMENTS, replay=(staged,)))
    for moment in MOMENTS:
        errors_MSD = dense.stream(moment.point) - packed.stream(moment.point)
        weight = dense.weight(moment.point)
        values_TF, errors_TD = ((part * weight).flatten(0, 1) for part in packed.felt(moment.point, errors_MSD))
        assert errors_TD.abs().max() > 1e-3
        expected_PF = torch.cat((values_TF, errors_TD), dim=1).T @ values_TF
        found_PF = sums[moment][0]
        assert found_PF.dtype == torch.float64
        torch.testing.assert_close(found_PF, expected_PF, rtol=1e-4, atol=2e-6 * float(expected_PF.abs().max()))


def test_nothing_is_missing_behind_dense_layers(model: Path, tmp_path: Path) -> None:
    worker = make_worker(make_setup(model, tmp_path / "run", FLAT))
    _, sums = run_pairs([worker], Pair(1, 0, 0, moments=MOMENTS, replay=(None,)))
    for (sums_PF,) in (sums[moment] for moment in MOMENTS):
        width = sums_PF.shape[1]
        assert sums_PF[:width].diagonal().min() >= 0
        assert torch.equal(sums_PF[width:], torch.zeros_like(sums_PF[width:]))


@pytest.mark.sample(2)
def test_who_does_which_shard_changes_no_bit(model: Path, tmp_path: Path) -> None:
    worker, _, staged = behind_a_compressed_layer(model, tmp_path / "run")
    unit = Pair(1, 0, 0, moments=MOMENTS, replay=(staged,))
    _, alone = run_pairs([worker], unit)
    _, together = run_pairs([worker, make_worker(worker.setup)], unit)
    assert all(torch.equal(together[moment], alone[moment]) for moment in MOMENTS)


@pytest.mark.sample(2)
def test_outputs_of_both_travel_on(model: Path, tmp_path: Path) -> None:
    """Held, or replayed from the embeddings by another worker, or from what was stored."""
    worker, reference, staged = behind_a_compressed_layer(model, tmp_path / "run")
    packed_MSD = worker.layers.block(0, staged).run(reference.hidden_LMSD[0])
    expected_MSD = torch.cat((reference.hidden_LMSD[1], packed_MSD), dim=-1)
    stored, _ = run_pairs([worker], Pair(0, 0, 4, staged, emit=True, store=True, ahead=1))
    records = [done.activation for done in stored]
    for shard in range(worker.setup.shards):
        start, stop = worker.setup.sample_range(shard)
        held = worker.hidden.get(("paired", 1, shard))
        assert held is not None
        close(held.read(0, stop - start), expected_MSD[start:stop])
    unit = Pair(1, 0, 0, moments=MOMENTS[:1], replay=(staged,))
    _, replayed = run_pairs([make_worker(worker.setup)], unit)
    _, here = run_pairs([worker], unit)
    other = make_worker(worker.setup)
    again = [replace(unit, shard=shard, base=1, base_record=record, replay=()) for shard, record in enumerate(records)]
    _, sums = sum_units(again, [other] * len(again))
    fresh = other.totals.moment(MOMENTS[0], sums[MOMENTS[0]])
    assert torch.equal(here[MOMENTS[0]], replayed[MOMENTS[0]])
    assert torch.equal(fresh, replayed[MOMENTS[0]])


@pytest.mark.sample(2)
@pytest.mark.parametrize("held", [2**30, 1], ids=["in memory", "spilled"])
def test_steps_from_held_streams_are_those_from_the_inputs(model: Path, tmp_path: Path, held: int) -> None:
    """The MLP's steps pass the attention once, and the last step and the outputs pass the dense layer once."""
    worker, _, staged = behind_a_compressed_layer(model, tmp_path / "run", hidden_bytes=held)
    draft, _ = solve_layer(worker, 1, RANKS)
    geometry = worker.setup.geometry.layers[1]
    results = []
    for drafts in ((), ("", "", "one", "two", "three")):
        sums: list[Tensor] = []
        fresh = make_worker(worker.setup)
        for step, (point,) in enumerate(geometry.corrected_points):
            moments = (Moment(point, kind="pair"),)
            unit = Pair(1, 0, step, draft, moments, replay=(staged,), drafts=drafts[: step + 1])
            for _ in range(2):  # as after a grid that was too small
                sums.append(run_pairs([fresh], unit)[1][moments[0]])
        keys = {key[3:] for key in fresh.hidden.held if key[1] == 1}
        last = Pair(1, 0, len(geometry.corrected_points), draft, emit=True, replay=(staged,), drafts=drafts)
        run_pairs([fresh], last)
        outputs = [fresh.hidden.get(("paired", 2, shard)) for shard in range(fresh.setup.shards)]
        samples = [fresh.setup.sample_range(shard) for shard in range(fresh.setup.shards)]
        read = [each.read(0, stop - start) for each, (start, stop) in zip(outputs, samples, strict=True) if each]
        results.append((sums, torch.cat(read), keys))
    (plain, plain_MSD, plain_keys), (again, again_MSD, keys) = results
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    assert torch.equal(plain_MSD, again_MSD)
    parallel = geometry.attention_steps is None
    assert plain_keys == {()}
    assert keys == ({()} if parallel or held == 1 else {(("outputs", "one"),)})


@pytest.mark.slow
@pytest.mark.sample(2)
def test_spilled_hidden_states_give_the_same(model: Path, tmp_path: Path) -> None:
    sums = []
    for name, limit in {"large": 2**30, "small": 1}.items():
        worker, _, staged = behind_a_compressed_layer(model, tmp_path / name, hidden_bytes=limit)
        sums.append(run_pairs([worker], Pair(1, 0, 0, moments=MOMENTS[1:2], replay=(staged,)))[1][MOMENTS[1]])
    assert torch.equal(*sums)


def test_a_damaged_draft_is_told_by_its_path(model: Path, tmp_path: Path) -> None:
    worker, _, staged = behind_a_compressed_layer(model, tmp_path / "run")
    flip(worker.setup.run_dir / staged.path)
    with pytest.raises(CorruptError) as raised:
        worker.execute(Pair(0, 0, 1, staged, emit=True))
    assert raised.value.path == staged.path
