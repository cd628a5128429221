"""`cache_keep` is a share of what the dense model caches, whatever the ratio of heads to hidden size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, DynamicCache

from tests import factories
from tests.end_to_end.jobs import Job, command, load, logits_of, relative_error, some_tokens

MakeJob = Callable[..., Job]


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(("cache_keep", "share"), [(0.15, 24 / 160), (0.5, 48 / 160)])
def test_heads_wider_than_the_hidden_size(cache_keep: float, share: float, tmp_path: Path, job: MakeJob) -> None:
    """G·d = 160 at D = 48, as Qwen3 has it: 0.15 is 24 numbers; 0.5 would be 80, and 48 are exact."""
    source = factories.make_model(tmp_path / "source", num_key_value_heads=4, head_dim=40)
    made = job(source, methods=[{"method": "lorc", "cache_keep": cache_keep, "allocation": "uniform"}], budget=None)
    plan = command("plan", str(made.manifest), "--json", "--tflops", "1").json
    ended = made.run()
    cache = ended.json["counts"]["cache_bytes_per_token"]
    assert cache["compressed"] == pytest.approx(share * cache["dense"])
    ids_BT = some_tokens(320)
    packed, dense = load(made.output), AutoModelForCausalLM.from_pretrained(source).eval()
    error = relative_error(logits_of(packed, ids_BT), logits_of(dense, ids_BT))
    filled = packed(ids_BT, past_key_values=DynamicCache(config=packed.config)).past_key_values
    held = sum(tensor.numel() for layer in filled.layers for tensor in (layer.keys, layer.values))
    assert held * 4 == ids_BT.numel() * cache["compressed"]
    said = "methods.0 (lorc): cache_keep: 0.5 is not reached"
    if cache_keep == 0.5:
        assert error < 1e-4
        assert said in plan["remarks"][0]
        assert said in (made.run_dir / "logs").glob("*.log").__next__().read_text()
    else:
        assert error > 1e-3
        assert not [remark for remark in plan["remarks"] if "is not reached" in remark]
