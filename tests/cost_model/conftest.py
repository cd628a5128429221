"""Runs `plan` on manifests that a test writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.plan import main


@pytest.fixture
def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Return `planned(*options, config=…, **blocks)`: the plan as JSON, or the message of a wrong input.

    The job keeps 0.8 by `flat_llm`, with these blocks of the manifest in addition. `config`: of a Llama, planned for in
    place of a source.
    """

    def plan(*options: str, config: Mapping[str, Any] | None = None, **blocks: Any) -> Any:
        path, shape = tmp_path / "job.yaml", tmp_path / "config.json"
        places = {"output": str(tmp_path / "out"), "run_dir": str(tmp_path / "run")}
        job = {"version": 1, "model": {"source": "nowhere"}, **places, "methods": [{"method": "flat_llm"}]}
        path.write_text(json.dumps({**job, "budget": {"keep": 0.8}, **blocks}))
        if config is not None:
            shape.write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16", **config}))
            options = ("--config", str(shape), *options)
        code, printed = main([str(path), "--json", *options]), capsys.readouterr()
        assert code in (0, 2)
        return json.loads(printed.out) if code == 0 else printed.err

    return plan
