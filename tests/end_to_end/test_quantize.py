"""Jobs that store codes of a few bits: what is written, what transformers makes of it, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lamina import LaminaConfig, LaminaForCausalLM
from pipeline.kernels.packing import scaled, unpack
from tests.end_to_end.jobs import (
    Job,
    command,
    load,
    logits_of,
    read_tensors,
    relative_error,
    some_tokens,
)
from tests.end_to_end.sources import make_source

pytestmark = pytest.mark.usefixtures("inline")

MakeJob = Callable[..., Job]
SIZES = {"hidden_size": 64, "intermediate_size": 96}
FACTORS = [
    {"method": "flat_llm", "ranks": {"value": 8, "mlp": 64}, "allocation": "uniform"},
    {"method": "joint_rank_k", "mlp": False, "ranks": {"query_key": 32}, "weighting": "input"},
]
PLAIN = {"method": "loss_aware", "factors": "plain", "rank_multiple": 32}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose widths groups of 32 divide."""
    return make_source(tmp_path_factory.mktemp("wide"), "llama", **SIZES)


def rounding(bits: int, group: int | None = 32, **more: Any) -> dict[str, Any]:
    return {"quantize": {"bits": bits, "group": group, **more}, "calibration.propagate": "dense"}


def multiplied_out(output: Path) -> dict[str, torch.Tensor]:
    """Every tensor by the name that it has without rounding."""
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    tensors = read_tensors(output)
    for path in [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]:
        words, scales, shape = (tensors.pop(f"{path}.weight_{part}") for part in ("packed", "scale", "shape"))
        tensors[f"{path}.weight"] = scaled(unpack(words, group["weights"]["num_bits"], int(shape[1])), scales)
    return tensors


@pytest.mark.parametrize(
    ("methods", "bits"), [([], 8), ([], 4), ([], 3), (FACTORS, 4), ([PLAIN], 8)], ids=["8", "4", "3", "factors", "loss"]
)
def test_transformers_loads_what_was_meant(wide: Path, job: MakeJob, methods: list[Any], bits: int) -> None:
    pytest.importorskip("compressed_tensors")
    made = job(wide, methods=methods, budget={"keep": 0.8} if methods == [PLAIN] else None, **rounding(bits))
    divergence = made.run().json["held_out"]["divergence"]
    assert 0.0 < divergence < (1.0 if methods else {8: 0.01, 4: 0.5, 3: 1.5}[bits])
    model, ids = load(made.output), some_tokens(320)
    found = logits_of(model, ids)
    config = json.loads((made.output / "config.json").read_text())
    plain = load_plain(made.output, config)
    assert relative_error(found, logits_of(plain, ids)) < 1e-5
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False)
    for end in range(ids.shape[1], tokens.shape[1]):
        assert torch.equal(logits_of(model, tokens[:, :end])[:, -1].argmax(-1), tokens[:, end])
    verified = command("verify", str(made.output), "--source", str(wide), "--json")
    assert verified.code == 0, verified.out + verified.err


def load_plain(output: Path, config: dict[str, Any]) -> Any:
    """The checkpoint's own class with the weights multiplied out here, without compressed-tensors."""
    model = LaminaForCausalLM(LaminaConfig(**{k: v for k, v in config.items() if k != "quantization_config"}))
    missing, unexpected = model.load_state_dict(multiplied_out(output), strict=True)
    assert not missing
    assert not unexpected
    return model.eval()


def test_feedback_is_nearer_than_nearest(wide: Path, job: MakeJob) -> None:
    """On held-out text; the data-free job needs none and says nothing of it."""
    fed = job(wide, methods=[], budget=None, **rounding(4)).run().json["held_out"]["divergence"]
    nearest = job(wide, methods=[], budget=None, **rounding(4, feedback=False)).run().json
    assert fed < 0.7 * nearest["held_out"]["divergence"]
    free = job(wide, methods=[], budget=None, **{**rounding(4), "calibration": None})
    assert free.run().code == 0
