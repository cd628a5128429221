"""The streamed backward pass against autograd over transformers' whole model, on every family.

M gradient samples, S sequence, D hidden, F features at a point, V vocabulary.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manifests.errors import CorruptError, NumericsError
from pipeline.kernels.gradients import draw_labels
from pipeline.methods.method import Moment
from pipeline.units.sharding import gradient_count, gradient_samples
from pipeline.units.sums import ChooseGrids, Total
from pipeline.units.units import Backward, Forward
from tests.failing_disk import flip
from tests.workers.bench import (
    FAMILIES,
    SEQUENCE,
    Reference,
    make_setup,
    make_worker,
    save_source,
    sum_gradients,
    sum_units,
)
from workers.config import WorkerConfig
from workers.worker import Worker

SAMPLES, SHARDS = 4, 2  # of five: the first of shard 0 (0, 1) and all of shard 1 (2, 3, 4)
CHOSEN = [0, 2, 3, 4]
SETTINGS = {"dtype": torch.float64, "gradient_samples": SAMPLES}


def gradient_moments(setup: WorkerConfig) -> tuple[Moment, ...]:
    """Every kind of point, in full, by heads and by diagonal."""
    geometry = setup.geometry.layers[0]
    inner = ("gate", "up") if "gate" in geometry.roles else ("up",)
    return tuple(
        Moment(point, heads, groups, "gradient", diagonal)
        for point, heads, groups, diagonal in [
            ("mid", 1, 1, False),
            ("out", 1, 1, False),
            ("out", 1, 1, True),
            ("q.out", geometry.attention.heads, geometry.attention.kv_heads, False),
            ("k.out", geometry.attention.kv_heads, 1, False),
            ("v.out", geometry.attention.kv_heads, geometry.attention.kv_heads, True),
            ("o.out", 1, 1, False),
            ("down.out", 1, 1, True),
            *((f"{role}.out", 1, 1, diagonal) for role in inner for diagonal in (False, True)),
            ("pull:q+k", 1, 1, False),
            ("pull:" + "+".join(inner), 1, 1, False),
        ]
    )


def kept_inputs(worker: Worker) -> list[list[Any]]:
    """Return the inputs that the dense pass stores for the backward pass, by layer and shard."""
    inputs = []
    for layer in range(worker.setup.geometry.num_layers):
        units = [Forward("dense", layer, s, keep_inputs=True, replay=(None,) * layer) for s in range(SHARDS)]
        inputs.append([worker.execute(unit).inputs for unit in units])
    return inputs


def go_back(worker: Worker, moments: tuple[Moment, ...], **settings: Any) -> list[dict[Moment, list[dict[str, Any]]]]:
    """Through all layers: of each, the moments by shard."""
    inputs = kept_inputs(worker)
    layers: list[dict[Moment, list[dict[str, Any]]]] = []
    for layer in reversed(range(len(inputs))):
        found = [
            taken(worker, Backward(layer, s, tuple(records[s] for records in inputs[layer:]), moments, **settings))
            for s in range(SHARDS)
        ]
        layers.insert(0, {moment: [of_shard[moment] for of_shard in found] for moment in moments})
    return layers


def taken(worker: Worker, unit: Backward) -> dict[Moment, dict[str, Tensor]]:
    """The moments of one unit alone."""
    _, records = sum_gradients([unit], [worker])
    return {moment: given(worker, record) for moment, record in records.items()}


def given(worker: Worker, record: Any) -> dict[str, Tensor]:
    norms = torch.tensor(record.square_norms, dtype=torch.float64)
    return {"moment": worker.statistics.read(record), "square_norms": norms}


class Autograd:
    """All gradients at once: transformers' model, labels drawn in the plainest way from the same random numbers."""

    def __init__(self, reference: Reference, worker: Worker) -> None:
        self.reference = reference
        self.found: dict[str, Tensor] = {}
        model, geometry = reference.model, reference.setup.geometry
        handles = []
        for layer in range(geometry.num_layers):
            for role in ("q", "k", "v", "o", "gate", "up", "down"):
                if role in geometry.layers[layer].roles:
                    module = reference.module(layer, role)
                    handles.append(module.register_forward_hook(self._keep_output(f"{layer}/{role}.out")))
            whole = reference.layers[layer]
            handles.append(whole.register_forward_hook(self._keep_output(f"{layer}/out")))
            if not reference.setup.config["block"]["parallel"]:
                reader = "mlp_norm" if "mlp_norm" in geometry.layers[layer].roles else "gate"
                handles.append(reference.module(layer, reader).register_forward_pre_hook(self._keep_mid(layer)))
        model.requires_grad_(True)
        logits_MSV = model(reference.ids_MS[CHOSEN], use_cache=False).logits
        for handle in handles:
            handle.remove()
        probability_MSV = logits_MSV.detach().double().softmax(-1)
        self.labels_MS = torch.empty(logits_MSV.shape[:2], dtype=torch.int64)
        for row, sample in enumerate(CHOSEN):
            generator = worker.backward._generator("labels", sample)
            uniform_S = torch.rand(SEQUENCE, generator=generator, dtype=torch.float64)
            for position, uniform in enumerate(uniform_S):
                beyond = probability_MSV[row, position].cumsum(0) > uniform
                self.labels_MS[row, position] = int(beyond.nonzero()[0])
        log_p = logits_MSV.log_softmax(-1).gather(-1, self.labels_MS[..., None]).sum()
        log_p.backward()

    def _keep_output(self, name: str) -> Any:
        def keep(_: nn.Module, __: Any, result: Any) -> None:
            values = result[0] if isinstance(result, tuple) else result
            values.retain_grad()
            self.found[name] = values

        return keep

    def _keep_mid(self, layer: int) -> Any:
        def keep(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            arguments[0].retain_grad()
            self.found[f"{layer}/mid"] = arguments[0]

        return keep

    def at(self, layer: int, point: str) -> Tensor:
        """(M, S, F)"""
        if point.startswith("pull:"):
            roles = point.removeprefix("pull:").split("+")
            weights = {role: self.reference.model.get_parameter(f"{self._path(layer, role)}.weight") for role in roles}
            return sum(
                (self.at(layer, f"{role}.out") @ weights[role].detach() for role in roles),
                start=torch.zeros((), dtype=torch.float64),
            )
        if point == "mid" and self.reference.setup.config["block"]["parallel"]:
            point = "out"
        gradient = self.found[f"{layer}/{point}"].grad
        assert gradient is not None
        return gradient.reshape(SAMPLES, SEQUENCE, -1)

    def _path(self, layer: int, role: str) -> str:
        return self.reference.setup.geometry.layers[layer].path(role)

    def moment_of(self, layer: int, moment: Moment, rows: slice) -> tuple[Tensor, Tensor]:
        """The sum over some samples, and Σ ‖A_s‖² by group."""
        values = self.at(layer, moment.point)[rows]
        values = values.unflatten(-1, (moment.groups, moment.heads // moment.groups, -1))
        samples = torch.einsum("msghi,msghj->mgij", values, values)
        if moment.diagonal:
            samples = samples.diagonal(dim1=2, dim2=3)
        return samples.sum(0), samples.square().flatten(2).sum(2).sum(0)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Worker, Autograd]:
    directory = tmp_path_factory.mktemp("backward")
    model = save_source(directory / "model", request.param)
    setup = make_setup(model, directory / "run", **SETTINGS)
    worker = make_worker(setup)
    return worker, Autograd(Reference(model, setup), worker)


@pytest.mark.slow
@pytest.mark.sample(2)
def test_moments_are_those_of_autograd_over_the_whole_model(family: tuple[Worker, Autograd]) -> None:
    worker, autograd = family
    moments = gradient_moments(worker.setup)
    layers = go_back(worker, moments)
    for (layer, found), (shard, rows) in itertools.product(enumerate(layers), enumerate((slice(0, 1), slice(1, 4)))):
        for moment in moments:
            expected, square_norms = autograd.moment_of(layer, moment, rows)
            square_norms = torch.zeros_like(square_norms) if moment.diagonal else square_norms
            part = found[moment][shard]
            scale = float(expected.abs().max())
            assert scale > 0
            where = f"layer {layer}, shard {shard}, {moment.key}"
            torch.testing.assert_close(
                part["moment"], expected, rtol=0, atol=2e-5 * scale, msg=lambda m, w=where: w + m
            )
            torch.testing.assert_close(part["square_norms"], square_norms, rtol=1e-4, atol=0)


def test_positions_that_predict_the_prefix_have_no_gradient(llama: Path, tmp_path: Path) -> None:
    """The prefix's last position predicts the text, and has one."""
    setup, moment = make_setup(llama, tmp_path / "run", **SETTINGS), Moment("out", 1, 1, "gradient")
    last = setup.geometry.num_layers - 1
    seen: list[Tensor] = []
    for prefix in (0, 1, 3):
        worker = make_worker(replace(setup, prefix=prefix))
        unit = Backward(last, 0, (kept_inputs(worker)[last][0],), (moment,))
        worker.backward.gradients(unit, [(moment.point, lambda values: seen.append(values.clone()))])
    whole_SD, behind_one_SD, behind_three_SD = seen
    assert torch.equal(whole_SD, behind_one_SD)
    assert not behind_three_SD[:2].any()
    assert torch.equal(whole_SD[2:], behind_three_SD[2:])


@pytest.mark.sample(3)
@pytest.mark.slow
def test_a_worker_that_held_nothing_gets_the_same_bits(family: tuple[Worker, Autograd]) -> None:
    """It starts from the head, through every later layer, or from committed gradients."""
    worker, _ = family
    last = worker.setup.geometry.num_layers - 1
    moments = gradient_moments(worker.setup)
    expected = go_back(worker, moments)
    inputs = kept_inputs(worker)
    newcomer = make_worker(worker.setup)
    records = tuple(by_shard[1] for by_shard in inputs)
    found_there = taken(newcomer, Backward(0, 1, records, moments, emit=False))
    for moment, found in found_there.items():
        assert torch.equal(found["moment"], expected[0][moment][1]["moment"]), moment.key
        assert torch.equal(found["square_norms"], expected[0][moment][1]["square_norms"])
    stored = newcomer.execute(Backward(last, 1, records[last:], store=True)).activation
    third = make_worker(worker.setup)
    found_there = taken(third, Backward(last - 1, 1, records[last - 1 : last], moments, base_record=stored))
    for moment, found in found_there.items():
        assert torch.equal(found["moment"], expected[last - 1][moment][1]["moment"]), moment.key


OUT = Moment("out", kind="gradient")


def one_moment(worker: Worker, **settings: Any) -> list[Tensor]:
    """Return the sum over both shards, by layer."""
    return [
        sum((part["moment"] for part in found[OUT]), start=torch.zeros((), dtype=torch.float64))
        for found in go_back(worker, (OUT,), **settings)
    ]


def test_the_micro_batch_changes_no_bit(llama: Path, tmp_path: Path) -> None:
    """Samples go back one by one, from the same stored inputs."""
    workers = [
        make_worker(make_setup(llama, tmp_path / "run", micro_batch=batch, gradient_samples=SAMPLES))
        for batch in (1, 3)
    ]
    records = tuple(by_shard[1] for by_shard in kept_inputs(workers[0]))
    found = [taken(worker, Backward(0, 1, records, (OUT,), emit=False))[OUT]["moment"] for worker in workers]
    assert torch.equal(*found)


@pytest.mark.slow
def test_spilled_gradients_are_the_same(llama: Path, tmp_path: Path) -> None:
    held = one_moment(make_worker(make_setup(llama, tmp_path / "held", gradient_samples=SAMPLES)))
    spilled = one_moment(make_worker(make_setup(llama, tmp_path / "out", gradient_samples=SAMPLES, hidden_bytes=0)))
    assert all(map(torch.equal, held, spilled))


def test_stored_sums_hold_what_shrinkage_needs(llama: Path, tmp_path: Path) -> None:
    worker = make_worker(make_setup(llama, tmp_path / "run", gradient_samples=SAMPLES))
    records = kept_inputs(worker)[-1]
    last, moments = worker.setup.geometry.num_layers - 1, (OUT, replace(OUT, diagonal=True))
    units = [Backward(last, shard, (records[shard],), moments) for shard in range(SHARDS)]
    parts = [taken(worker, unit) for unit in units]
    _, sums = sum_units(units, [worker] * SHARDS)
    for moment, summed in sums.items():
        once = worker.execute(Total("gradient", last, moment, summed))
        first, second = (part[moment] for part in parts)
        added = first["moment"] + second["moment"]  # of other grids
        torch.testing.assert_close(given(worker, once)["moment"], added, rtol=0, atol=1e-7 * float(added.abs().max()))
        assert once.square_norms == pytest.approx((first["square_norms"] + second["square_norms"]).tolist(), rel=1e-15)
        assert (once.sequences, once.tokens) == (SAMPLES, SAMPLES * SEQUENCE)


@pytest.mark.slow
def test_no_order_and_no_division_of_the_shards_shows(llama: Path, tmp_path: Path) -> None:
    """All ways of giving five shards to two workers, forth and back: moments and square norms have the same bits."""
    shards, last = 5, 2
    setup = make_setup(llama, tmp_path / "run", shards=shards, gradient_samples=shards)
    workers = [make_worker(setup), make_worker(setup)]
    forth = [Forward("dense", last, s, keep_inputs=True, replay=(None,) * last) for s in range(shards)]
    inputs = [workers[0].execute(unit).inputs for unit in forth]
    moments = gradient_moments(setup)
    units = [Backward(last, s, (inputs[s],), moments, emit=False) for s in range(shards)]
    _, expected = sum_gradients(units, [workers[0]] * shards)
    for way, holders in enumerate(itertools.product((0, 1), repeat=shards)):
        order = [0, *range(1, shards)[:: 1 if way % 2 else -1]]  # grids are chosen by the first
        _, found = sum_gradients([units[s] for s in order], [workers[holders[s]] for s in order])
        for moment in moments:
            assert torch.equal(
                given(workers[0], found[moment])["moment"], given(workers[0], expected[moment])["moment"]
            )
            assert found[moment].square_norms == expected[moment].square_norms, holders


def test_grids_are_chosen_by_a_sample_that_is_not_silent(llama: Path, tmp_path: Path) -> None:
    """A model that is certain of a sample returns no gradient, so the next sample decides the grid."""
    worker = make_worker(make_setup(llama, tmp_path / "run", gradient_samples=SAMPLES))
    inputs = worker.execute(Forward("dense", 0, 1, keep_inputs=True)).inputs
    gradients = 1e-6 * torch.randn(3, SEQUENCE, 48, generator=torch.Generator().manual_seed(5))
    gradients[0] = 0.0
    unit = Backward(0, 1, (inputs,), (OUT,), base_record=worker.activations.write("gradient", 1, 1, gradients))
    found = taken(worker, unit)[OUT]["moment"]
    rows_TD = gradients.flatten(0, 1).double()
    torch.testing.assert_close(found[0], rows_TD.T @ rows_TD, rtol=0, atol=1e-6 * float(found.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(llama: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """Through a layer, from the same gradient; float16 goes by bfloat16, the residual stream by float32."""
    generator = torch.Generator().manual_seed(3)
    hidden_SD, outgoing_SD = (torch.randn(SEQUENCE, 48, generator=generator) for _ in range(2))
    found = {}
    for kind in (torch.float64, dtype):
        worker = make_worker(make_setup(llama, tmp_path / str(kind), dtype=kind, gradient_samples=SAMPLES))
        with torch.inference_mode(False):
            block = worker.layers.differentiable_block(1)
            gradient = outgoing_SD.to(torch.float64 if kind == torch.float64 else torch.float32)
            found[kind] = block.pull_back(hidden_SD.to(kind), lambda _, given=gradient: given, ["q.out", "pull:q+k"])
    (near_SD, near), (exact_SD, exact) = found[dtype], found[torch.float64]
    assert near_SD.dtype == near["pull:q+k"].dtype == torch.float32
    assert near["q.out"].dtype == torch.bfloat16
    for value, expected in (
        (near_SD, exact_SD),
        (near["q.out"], exact["q.out"]),
        (near["pull:q+k"], exact["pull:q+k"]),
    ):
        error = torch.linalg.matrix_norm(value.double() - expected) / torch.linalg.matrix_norm(expected)
        assert 1e-5 < error < 0.03


def test_probes_are_of_each_layer_alone(llama: Path, tmp_path: Path) -> None:
    """Random gradients at a layer's own output: nothing of the layers above, the same whoever draws them."""
    setup = make_setup(llama, tmp_path / "run", gradient_samples=SAMPLES)
    worker = make_worker(setup)
    records = kept_inputs(worker)
    units = [Backward(layer, 1, (records[layer][1],), (OUT,), probe=True, emit=False) for layer in (0, 1)]
    first, second = (taken(worker, unit)[OUT]["moment"] for unit in units)
    assert torch.equal(taken(make_worker(setup), units[0])[OUT]["moment"], first)
    assert not torch.equal(first, second)
    output_SD = Reference(llama, setup).hidden_LMSD[1][2:5].flatten(0, 1).double()
    expected = float((1 / output_SD.square().mean(1)).sum()) * output_SD.shape[1]
    assert float(first.diagonal(dim1=1, dim2=2).sum()) == pytest.approx(expected, rel=0.2)


def test_an_overflow_is_blamed_on_its_layer(llama: Path, tmp_path: Path) -> None:
    worker = make_worker(make_setup(llama, tmp_path / "run", gradient_samples=SAMPLES))
    inputs = worker.execute(Forward("dense", 0, 1, keep_inputs=True)).inputs
    endless = worker.activations.write("gradient", 1, 1, torch.full((3, SEQUENCE, 48), 3e38))
    with pytest.raises(NumericsError, match=r"layer 0: the gradient at .* holds NaN or infinity \(torch.float32\)"):
        worker.execute(ChooseGrids(Backward(0, 1, (inputs,), (OUT,), base_record=endless)))


def test_damaged_inputs_are_named(llama: Path, tmp_path: Path) -> None:
    worker = make_worker(make_setup(llama, tmp_path / "run", gradient_samples=SAMPLES))
    record = worker.execute(Forward("dense", 0, 1, keep_inputs=True)).inputs
    flip(next((tmp_path / "run" / "activations.zarr" / record.path).glob("c.1*")))
    with pytest.raises(CorruptError) as raised:
        worker.execute(Backward(0, 1, (record,), (OUT,), probe=True))
    assert raised.value.path == record.path


def test_samples_of_the_pass_are_spread_over_the_shards() -> None:
    for shards, samples, chosen in itertools.product((1, 2, 3, 5), (5, 8, 11), (1, 3, 5)):
        counts = [gradient_count(shard, shards, samples, chosen) for shard in range(shards)]
        assert sum(counts) == chosen
        assert max(counts) - min(counts) <= 2
    assert [gradient_count(shard, 2, 5, 5) for shard in range(2)] == [2, 3]
    assert gradient_samples(256, 2048, 4096, 16_384) == 32
    assert gradient_samples(8, 2048, 4096, 16_384) == 8
    assert gradient_samples(256, 2048, 129, 16_384) == 8
    assert gradient_samples(256, 4096, 8192, 65_536) == 32
    assert gradient_samples(256, 1024, 576, 65_536) == 64


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("vocab", [1, 7, 512, 513, 1300])
def test_labels_are_drawn_from_the_softmax(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits_V = 2 * torch.randn(vocab, generator=generator)
    draws = 20_000
    uniform_T = torch.rand(draws, generator=generator, dtype=torch.float64)
    labels_T = draw_labels(logits_V.expand(draws, vocab), uniform_T)
    expected_T = torch.searchsorted(logits_V.double().softmax(0).cumsum(0), uniform_T, right=True)
    assert (labels_T != expected_T).sum() <= 2  # a draw on the edge between two
    share_V = torch.bincount(labels_T, minlength=vocab) / draws
    assert (share_V - logits_V.softmax(0)).abs().max() < 0.02


def test_an_impossible_label_is_never_drawn() -> None:
    logits_TV = torch.full((3, 700), -torch.finfo(torch.float32).max)
    logits_TV[:, 3] = 0.0
    assert draw_labels(logits_TV, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)).tolist() == [3, 3, 3]
