"""Jobs with `correct: output` on mixtures: every kind of router, workers, a kill, and what has no corrections."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import Job, file_digests, load, logits_of, relative_error, some_tokens
from tests.end_to_end.sources import make_source
from tests.end_to_end.test_methods import decodes_as_it_prefills

MakeJob = Callable[..., Job]
CORRECTED: dict[str, Any] = {
    "methods": [{"method": "loss_aware", "correct": "output"}],
    "calibration.propagate": "dense",
}
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "granitemoe", "gpt_oss", "nemotron_h", "kimi_linear")


@pytest.mark.sample(1)
@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("family", FAMILIES)
def test_corrected_experts(family: str, tmp_path: Path, job: MakeJob) -> None:
    """At full size they are the source's."""
    source = make_source(tmp_path / "source", family, layers=2)
    whole, cut = job(source, **CORRECTED, **{"budget.keep": 1.0}), job(source, **CORRECTED)
    for made in (whole, cut):
        made.run().json  # noqa: B018 - asserts the exit code
    ids_BT = some_tokens(300)
    dense_BTV, whole_BTV, cut_BTV = (logits_of(load(path), ids_BT) for path in (source, whole.output, cut.output))
    # deepseek_v3: heads of 14 values read a latent of 12 numbers, so that a basis of 13 loses nothing but its damping.
    assert relative_error(whole_BTV, dense_BTV) < (1e-4 if family == "deepseek_v3" else 1e-5)
    assert 0 < relative_error(cut_BTV, dense_BTV) < 1.3
    decodes_as_it_prefills(load(cut.output), source)


@pytest.mark.nightly
@pytest.mark.usefixtures("shared_ray")
def test_workers_and_kills_change_no_byte(tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", "qwen3_moe", layers=2)
    quantize = {"quantize": {"bits": 8, "group": None}}
    one, many, killed = (job(source, **CORRECTED, **quantize, **{"workers.max": n}) for n in (1, 3, 1))
    assert one.run().code == many.run().code == 0
    child = Child("run", [str(killed.manifest)], killed.root / "log", Hook("commit", nth=8))
    assert child.end() == -signal.SIGKILL, child.said
    assert killed.run().code == 0
    assert file_digests(one.output) == file_digests(many.output) == file_digests(killed.output)


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("mixtral", {"workers.experts": 4}, "layer 0 has 6, and a worker holds 4: set workers.experts: 6"),
        ("llama4_text", {}, "`correct: output` does not support layer 1, whose router weighs the inputs"),
    ],
)
def test_what_has_no_corrections_is_refused(
    family: str, changes: dict[str, Any], reason: str, tmp_path: Path, job: MakeJob
) -> None:
    ended = job(make_source(tmp_path / "source", family, layers=2), **CORRECTED, **changes).run()
    assert ended.code == 2
    assert reason in " ".join(ended.err.split())
