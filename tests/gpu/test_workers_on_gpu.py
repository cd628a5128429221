"""Units of a worker on a CUDA device, or the emulated one, against the same on the CPU: there, the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lamina import processor_lamina
from pipeline.evaluation import questions
from pipeline.evaluation.questions import Question, packed
from pipeline.methods.method import Moment
from pipeline.units.questions import Answer, Questions
from pipeline.units.scores import Compare, Score, WindowForward
from pipeline.units.sums import ChooseGrids, Sums
from pipeline.units.units import Backward, Forward, Pair
from stores.staging import read_staged
from tests.emulated_device import EmulatedDevice
from tests.workers.bench import (
    EVERYTHING,
    LOW,
    make_setup,
    make_worker,
    save_source,
    solve_layer,
    sum_gradients,
    sum_units,
)
from tests.workers.test_backward import gradient_moments
from tests.workers.test_score_pass import windows_of
from workers.tensor_transfer import Packed, pack_tensors, unpack_tensors
from workers.worker import Worker

pytestmark = pytest.mark.gpu
FLAT = {"method": "flat_llm", **EVERYTHING}
PLACES: dict[str, dict[str, Any]] = {  # of hidden states
    "device": {"gpu_share": 1.0, "device_bytes": 1, "hidden_bytes": 0},
    "pinned": {"hidden_bytes": 2**30},
    "store": {"hidden_bytes": 0},
}
PAIR = Moment("mlp.in", kind="pair")


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "dtype"), [("device", torch.float32), ("pinned", torch.bfloat16), ("store", torch.float32)]
)
def test_units_compute_what_they_do_on_a_cpu(
    place: str, dtype: torch.dtype, tmp_path: Path, emulated: EmulatedDevice | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor_lamina, "multiplies_fast", lambda dtype: True)  # or the CPU would multiply otherwise
    model = save_source(tmp_path / "model", "llama-gqa", dtype)
    settings = {"dtype": dtype, "gradient_samples": 4, **PLACES[place]}
    if emulated is not None:  # a CPU's fused attention, which a GPU's backward pass does not have, has other bits
        monkeypatch.setattr("workers.differentiable.deterministic_attention", lambda _: sdpa_kernel(SDPBackend.MATH))
    expected = done_by(Worker(make_setup(model, tmp_path / "cpu", FLAT, **settings), Packing()))
    found = done_by(Worker(make_setup(model, tmp_path / "gpu", FLAT, **settings, use_gpu=True), Packing()))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if emulated is not None:
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=lambda text, of=name: f"{of}: {text}")
        else:
            torch.testing.assert_close(found[name], value, rtol=0.05, atol=0.05)


class Packing:
    """What Ray's object store gets and gives, without Ray."""

    def put(self, tensors: Mapping[str, Tensor]) -> Packed:
        return pack_tensors(tensors)

    def get(self, handle: Packed) -> dict[str, Tensor]:
        return unpack_tensors(handle)


def done_by(worker: Worker) -> dict[str, Any]:
    """One unit of each kind that computes, or more; hidden states and layers stay where they come to lie."""
    setup, found = worker.setup, dict[str, Any]()
    staged, _ = solve_layer(worker, 0, LOW)
    found |= {f"solved {name}": tensor for name, tensor in read_staged(setup.run_dir, staged).items()}
    for shard in range(2):
        made = worker.execute(Forward("made", 0, shard, staged, cosine=True, ahead=1))
        found[f"cosine {shard}"] = made.cosine[0]
    pairs = [Pair(1, shard, 0, moments=(PAIR,), replay=(staged,), emit=True) for shard in range(2)]
    _, sums = sum_units(pairs, [worker, worker])
    found["pairs"] = worker.totals.moment(PAIR, sums[PAIR]).cpu()
    inputs = tuple(
        worker.execute(Forward("dense", layer, 0, keep_inputs=True, replay=(None,) * layer)).inputs
        for layer in range(setup.geometry.num_layers)
    )
    moments, last = gradient_moments(setup), len(inputs) - 1
    for layer in (last, last - 1):
        _, records = sum_gradients([Backward(layer, 0, inputs[layer:], moments, emit=True)], [worker])
        for moment, record in records.items():
            found[f"{layer} {moment.key}"] = worker.statistics.read(record)
            found[f"{layer} {moment.key} square norms"] = torch.tensor(record.square_norms)
    replay, windows = (staged, *[None] * last), windows_of(setup)
    dense = worker.execute(WindowForward(windows, "dense", last, 0, store=True, replay=(None,) * last)).activation
    scored = worker.execute(Score(windows, "made", last + 1, 0, dense=dense, replay=replay))
    found |= {"loss": scored.loss, "divergence": scored.divergence}
    asked = [Question((5, 6, 7), (8, 9)), Question((5, 6, 7), (10, 11, 12)), Question((9,), (3,))]
    shards, numbers = packed(questions.windows_of(asked, 100, branching=True))
    passed = Questions.of_shards(shards, "float32", 8, "digest", worker.activations.write_tokens(numbers))
    for shard in range(passed.shards):
        answers = worker.execute(Answer(passed, "asked", last + 1, shard, replay=(None,) * (last + 1)))
        found[f"answers {shard}"] = torch.tensor(answers.logs)
    tokens = tuple(map(tuple, torch.arange(24).reshape(2, 12).tolist()))
    return found | {"error": worker.execute(Compare(tokens, replay)).figures["error"]}


def test_what_the_host_waits_for_in_a_forward_pass(
    llama: Path, tmp_path: Path, emulated: EmulatedDevice | None
) -> None:
    """A micro-batch: the values of each moment, the sum of cosines, whether all of the block is finite, its end."""
    if emulated is None:
        pytest.skip("a real device does not say who waits for it")
    moments = tuple(Moment(point) for point in ("attention.in", "mlp.in", "down.in"))
    waits = []
    for size in (1, 5):
        setup = make_setup(llama, tmp_path / f"{size}", FLAT, shards=1, micro_batch=size, use_gpu=True)
        worker, unit = make_worker(setup), Forward("dense", 0, 0, moments=moments, cosine=True)
        unit = replace(unit, sums=Sums("pass", worker.execute(ChooseGrids(unit)).grids))
        emulated.waits.clear()
        emulated.uploads.clear()
        worker.execute(unit)
        waits.append(emulated.waits + emulated.uploads)
    many, one = waits
    assert {event: (count - one[event]) / 4 for event, count in many.items() if count > one[event]} == {
        "copy to the host in checks:require_finite": 3,
        "_local_scalar_dense in moments:cosine_sums": 1,
        "_local_scalar_dense in tapped_layer:checked": 1,
        "synchronize a stream in worker:_computing": 1,
    }
