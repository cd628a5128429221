"""Learning rates of a healing: relative to the tensors, by their kind and by the model's width."""

from __future__ import annotations

import pytest
import torch

from manifests.entries import HealingCurve, HealingEntry
from pipeline.healing.training import BASE_RATE, FEW, LATENTS, Schedule, default_rate, tensor_rates
from pipeline.job.student_training import schedule_as_begun


def test_a_rate_follows_the_magnitude_and_the_kind_of_a_tensor() -> None:
    matrix, scales = torch.tensor([[0.3, -0.1], [0.0, 0.4]]), torch.tensor([[0.02], [-0.04]])
    trained = {
        "up.rows.weight": matrix,
        "down.weight": 10 * matrix,
        "gate.weight_scale": scales,
        "norm.weight": torch.tensor([2.0, 4.0]),
        "q.bias": torch.zeros(3),
        "gate.weight_levels": torch.tensor([-1.0, 0.0, 1.0]),
        "gate.weight_packed": matrix,
    }
    expected = {
        "up.rows.weight": 0.2,
        "down.weight": 2.0,
        "gate.weight_scale": FEW * 0.03,
        "norm.weight": FEW * 3.0,
        "q.bias": FEW * 0.03,
        "gate.weight_levels": FEW * 2 / 3,
        "gate.weight_packed": LATENTS * 0.2,
    }
    assert tensor_rates(trained) == pytest.approx(expected)
    assert tensor_rates(trained, few=3.0)["norm.weight"] == pytest.approx(9.0)


def test_zeros_alone_have_a_rate() -> None:
    assert tensor_rates({"q.bias": torch.zeros(3)}) == {"q.bias": FEW}


def test_the_default_rate_falls_with_the_width() -> None:
    assert default_rate(576) == BASE_RATE
    assert default_rate(4 * 576) == pytest.approx(BASE_RATE / 2)


def test_a_healing_that_has_begun_keeps_its_rates() -> None:
    schedule = Schedule(windows=80, per_step=1, epochs=1, peak=BASE_RATE, seed=0, relative=True)
    earlier = HealingEntry(of="0" * 64, step=3, folder="healing/step-000003", curve=HealingCurve(), relative=True)
    kept = schedule_as_begun(schedule, earlier)
    assert (kept.per_step, kept.peak, kept.few) == (1, BASE_RATE, 20.0), "a version that entered none of the three"
    chosen = earlier.model_copy(update={"per_step": 2, "peak": 1e-4, "few": 3.0})
    kept = schedule_as_begun(schedule, chosen)
    assert (kept.per_step, kept.peak, kept.few) == (2, 1e-4, 3.0)
