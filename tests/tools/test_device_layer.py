"""The benchmark of a large model's layer, narrow and on this CPU."""

from __future__ import annotations

import pytest

from tools.benchmarks.device_layer import main


@pytest.mark.slow
def test_it_goes_through_a_job_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each kind of work, of which every one took some time, and the plan's beside it."""
    assert main(["--device", "cpu", "--narrower", "128", "--samples", "1", "--propagate", "compressed"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    found = {row[0].strip(): row[1].strip() for row in rows[2:]}
    assert list(found) == [
        "importance", "grids", "statistics", "sums leave the device", "solve", "propagate", "a layer", "write",
    ]  # fmt: skip
    assert all(float(found[kind]) > 0 for kind in ("importance", "statistics", "propagate"))
    parts = [float(seconds) for kind, seconds in found.items() if kind not in ("a layer", "write")]
    assert float(found["a layer"]) == pytest.approx(sum(parts), abs=0.04)


def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        main([])
    assert "this machine has no CUDA device; --device cpu --narrower 32 tries the tool" in capsys.readouterr().err
