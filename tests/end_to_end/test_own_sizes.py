"""Sizes that entries say themselves, beside a budget that they exceed: refused by `plan` and `run`, with the share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.end_to_end.jobs import Job, command

MakeJob = Callable[..., Job]


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    ("entry", "budget"),
    [
        ({"method": "flat_llm", "keep": 0.9}, "keep"),
        ({"method": "flat_llm", "ranks": {"value": 12, "mlp": 70}}, "keep"),
        ({"method": "lorc", "cache_keep": 0.3}, "keep"),
        ({"method": "lestd", "keep": 0.7}, "bytes"),
    ],
    ids=["keep", "ranks", "cache_keep", "bytes"],
)
def test_the_share_that_is_said_is_what_is_stored(job: MakeJob, entry: dict[str, Any], budget: str) -> None:
    made = job(methods=[entry], budget={budget: 0.5})
    for ended in (command("plan", str(made.manifest), "--gpu", "H200"), made.run()):
        assert ended.code == 2, ended.out
        found = re.search(rf"budget\.{budget}: 0\.5 is out of reach: the stored tensors take (0\.\d+)", ended.err)
        assert found, ended.err
    assert not made.run_dir.exists()
    counts = job(methods=[entry], budget={budget: float(found[1])}).run().json["counts"]
    of = counts["decoder_parameters"]
    assert float(found[1]) - 0.02 < of["compressed"] / of["dense"] <= float(found[1])
