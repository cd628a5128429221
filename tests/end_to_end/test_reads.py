"""The bytes that a job reads from the source, beside its plan."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, DynamicCache

from stores.disk import Disk, DiskFile
from tests import factories
from tests.end_to_end.jobs import MakeJob, command, load, logits_of, relative_error, some_tokens
from tests.end_to_end.sources import make_source

SIZES = {"hidden_size": 128, "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes of weights and moments that this process reads, by the folder that they are in."""
    counted: Counter[str] = Counter()

    def count(path: Path, amount: int) -> int:
        folder = next((each for each in ("statistics.zarr", "staged", "source") if each in path.parts), "")
        counted[folder] += amount if folder == "statistics.zarr" or path.suffix == ".safetensors" else 0
        return amount

    whole, part, into = Disk.read, DiskFile.read, DiskFile.read_into

    def read_whole(disk: Disk, name: str, *of: Any, **more: Any) -> Any:
        data = whole(disk, name, *of, **more)
        count(disk.root / name, len(data or b""))
        return data

    def read_part(file: DiskFile, begin: int, end: int) -> bytes:
        data = part(file, begin, end)
        count(file._path, len(data))
        return data

    monkeypatch.setattr(Disk, "read", read_whole)
    monkeypatch.setattr(DiskFile, "read", read_part)
    monkeypatch.setattr(DiskFile, "read_into", lambda file, *of: count(file._path, into(file, *of)))
    return counted


@pytest.mark.sample(1)
@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    "entry",
    [
        {"method": "flat_llm", "attention": False, "allocation": "uniform"},
        {"method": "loss_aware"},
        {"method": "loss_aware", "shapes": "stock"},
        {"method": "loss_aware", "shapes": "layer"},
        {"method": "reap", "refit": True},
    ],
)
def test_a_mixture_reads_what_its_plan_says(
    entry: dict[str, Any], read: Counter[str], tmp_path: Path, job: MakeJob
) -> None:
    source = make_source(tmp_path / "source", "qwen3_moe", layers=2, **SIZES)
    read.clear()
    # Enough for every expert: those with few tokens read a sample of the layer's inputs, too.
    sizes = {"samples": 64, "sequence_length": 128, "shards": 4, "micro_batch": 4, "propagate": "dense"}
    changes = {f"calibration.{name}": value for name, value in sizes.items()}
    made = job(
        source, methods=[entry], **changes, **{"workers.experts": 4, "budget": {"keep": 0.8, "scope": "experts"}}
    )
    plan = made.run().json["plan"]
    assert sum(plan["read_phases"].values()) == plan["read_bytes"]
    assert sum(read.values()) == pytest.approx(plan["read_bytes"], rel=0.1)


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
