"""A job that ended before its last layer keeps the layers that it entered, whatever is in their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.jobs import Job, file_digests
from tests.end_to_end.sources import make_source

MakeJob = Callable[..., Job]
DENSE: dict[str, Any] = {"calibration.propagate": "dense"}
EXPERTS: dict[str, Any] = {"budget": {"keep": 0.7, "scope": "experts"}, **DENSE}
WIDE = {"hidden_size": 64, "intermediate_size": 96}  # which groups of 32 divide
NARROW = {"method": "flat_llm", "attention": False, "uniform": True}
LATENT = {"method": "mla", "cache_keep": 0.5}
# Family, sizes, entries and other fields of the manifest. `make test` runs the first two.
CASES: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = {
    "rounded": ("llama", WIDE, [], {"quantize": {"bits": 3, "levels": "learned", "what": "all"}, "budget": None}),
    "rounded experts": (
        "mixtral", WIDE, [{"method": "loss_aware", "shapes": "stock"}], {**EXPERTS, "quantize": {"bits": 4}},
    ),
    "chosen bits": (
        "llama", WIDE, [{"method": "loss_aware"}], {**DENSE, "quantize": {"bits": "auto"}, "budget": {"bytes": 0.4}},
    ),
    "narrow heads": ("llama", {}, [{"method": "flat_llm", "query_key": "head_pca"}], {}),
    "latents": ("llama", {}, [{"method": "lorc", "cache_keep": 0.4, "allocation": "uniform"}], {"budget": None}),
    "cores": ("llama", {}, [{"method": "lestd", "target": "both", "sweeps": 1, "refine_sweeps": 0}], {}),
    "joint factors": ("qwen2", {}, [{"method": "joint_rank_k"}], {}),
    "pivoted rows": ("opt", {}, [{"method": "loss_aware"}], DENSE),
    "corrected": ("llama", {}, [{"method": "loss_aware", "correct": "output"}], DENSE),
    "another class": ("llama", {}, [LATENT, NARROW], DENSE),
    "free experts": ("mixtral", {}, [{"method": "loss_aware"}], EXPERTS),
    "fewer experts": ("qwen3_moe", {}, [{"method": "reap", "refit": True}], EXPERTS),
    "merged experts": ("qwen3_moe", {}, [{"method": "merge_experts"}], EXPERTS),
    "fused experts": ("gpt_oss", {}, [{"method": "loss_aware"}], EXPERTS),
    "latent attention": ("deepseek_v3", {}, [{"method": "loss_aware"}], DENSE),
    "hybrid": ("nemotron_h", {}, [NARROW], EXPERTS),
}  # fmt: skip


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("name", CASES)
def test_entered_layers_stay(name: str, tmp_path: Path, job: MakeJob) -> None:
    family, sizes, methods, fields = CASES[name]
    source = make_source(tmp_path / "source", family, layers=2, **sizes)
    made = job(source, methods=methods, **{**({} if methods else DENSE), **fields})
    ended = made.run()
    assert ended.code == 0, ended.err
    ledger, before = made.run_dir / "ledger", file_digests(made.output)
    *kept, last = sorted(ledger.glob("layer.*"))
    for entry in (last, *ledger.glob("complete.*")):
        entry.unlink()
    ended = made.run()
    assert ended.code == 0, ended.err
    assert "does not fit the job" not in ended.err
    assert sorted(ledger.glob("layer.*"))[:-1] == kept
    assert file_digests(made.output) == before
