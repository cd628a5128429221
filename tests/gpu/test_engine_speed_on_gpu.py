"""The benchmark of engines runs transformers on the device, and counts the model's tensors there."""

import argparse
from pathlib import Path

import pytest

from tools.benchmarks import engine_speed

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
TINY = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32,
}  # fmt: skip


@pytest.mark.parametrize("row", ["dense", "loss_aware"])
def test_transformers_answers_on_the_device(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_speed, "SIZES", engine_speed.SIZES | TINY)
    folder = engine_speed.write_checkpoint(tmp_path / row, row, layers=1, keep=0.6, stock=False)
    options = argparse.Namespace(child=folder, dtype="bfloat16", batches=[1, 2], context=4, new=3, repeats=2)
    results = dict(engine_speed.in_transformers(options))
    assert set(results) == {1, 2}
    for result in results.values():
        assert len(result["prefill"]) == len(result["decode"]) == 2
        assert 0 < result["bytes"] < 2 * 1_000_000
        assert result["cache"] == 2 * 2 * 32 * 2  # keys and values of two heads of 32, in bfloat16
