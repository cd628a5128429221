"""Putting a finished journal together as a checkpoint: real files, layers made by a worker in this process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lamina import MODELLING_FILES
from manifests.entries import GroupReport, LayerEntry
from manifests.errors import CorruptError, InUseError
from manifests.schema import Manifest
from pipeline.checkpoint import assembling
from pipeline.checkpoint.assembling import Assembler, plan_shards
from pipeline.checkpoint.layer_checks import LayerChecks
from pipeline.driver.ledger_keys import layer_key
from pipeline.inputs.job_inputs import Inputs, read_inputs
from stores.disk import Disk
from stores.durable import partial_path
from stores.ledger import Ledger
from stores.source import INDEX_FILE
from tests.failing_disk import flip
from tests.families.geometries import manifest
from tests.workers.bench import LOW, make_setup, make_worker, save_source, solve_layer

CLAIMED = [0, 2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_source(tmp_path_factory.mktemp("source") / "model", shard_size="20KB")
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    (directory / "LICENSE").write_text("theirs", encoding="utf-8")
    (directory / "notes.txt").write_text("not ours to copy", encoding="utf-8")
    return directory


class Finished:
    """A run directory in which layers 0 and 2 of three are computed."""

    def __init__(self, model: Path, root: Path) -> None:
        entry = {"layers": CLAIMED, "ranks": {"value": LOW["value"], "mlp": LOW["mlp"]}}
        setup = make_setup(model, root / "run", entry)
        worker = make_worker(setup)
        self.ledger = Ledger(root / "run" / "ledger")
        for layer in CLAIMED:
            staged, reports = solve_layer(worker, layer, LOW)
            groups = {name: GroupReport(**{"method": 0, "ranks": LOW, **report}) for name, report in reports.items()}
            self.ledger.commit(layer_key(layer), LayerEntry(staged=staged, forms=staged.forms, groups=groups))
        document = manifest(entry).model_dump()
        document |= {"model": {"source": str(model)}, "output": str(root / "out"), "run_dir": str(root / "run")}
        document["calibration"] = {"text": {"files": ("text.txt",)}, "sequence_length": 16}
        self.inputs: Inputs = read_inputs(Manifest.model_validate(document))
        self.run_dir, self.output = root / "run", root / "out"

    def assembler(self) -> Assembler:
        return Assembler(self.inputs, self.ledger, self.run_dir, self.inputs.source.file_digests({}))

    def assemble(self, replaceable: frozenset[str] = frozenset()) -> dict[str, Any]:
        return self.assembler().run(replaceable)

    def staged(self, layer: int) -> Path:
        entry = self.ledger.get(f"layer/{layer:05d}")
        assert entry is not None
        return self.run_dir / entry.staged.path

    def tensors(self) -> dict[str, torch.Tensor]:
        index = json.loads((self.output / INDEX_FILE).read_text(encoding="utf-8"))
        files = {file: load_file(self.output / file) for file in set(index["weight_map"].values())}
        found = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
        assert {name: file for file, tensors in files.items() for name in tensors} == index["weight_map"]
        return found


@pytest.fixture
def finished(model: Path, tmp_path: Path) -> Finished:
    return Finished(model, tmp_path)


def test_shards_are_the_claimed_layers_and_what_is_left_of_the_source(finished: Finished) -> None:
    plans = plan_shards(finished.inputs)
    assert [plan.layer for plan in plans[:2]] == CLAIMED
    assert [plan.name for plan in plans] == [
        f"model-{n:05d}-of-{len(plans):05d}.safetensors" for n in range(1, len(plans) + 1)
    ]
    rest = [name for plan in plans[2:] for name in plan.tensors]
    claimed = tuple(f"model.layers.{layer}." for layer in CLAIMED)
    assert sorted(rest) == sorted(name for name in finished.inputs.source.tensors if not name.startswith(claimed))
    assert {plan.whole for plan in plans[2:]} == {True, False}
    for plan in plans[2:]:
        records = finished.inputs.source.tensors
        held = {name for name, record in records.items() if Path(record.file).name == plan.source_file}
        assert plan.whole == (held == set(plan.tensors))


@pytest.mark.slow
def test_what_is_copied_is_bit_for_bit_and_what_is_claimed_is_there(finished: Finished) -> None:
    compression = finished.assemble()
    written, source = finished.tensors(), finished.inputs.source
    assert set(written) == set(compression["tensors"]) == set(source.tensors)
    for name, tensor in source.read(source.tensors).items():
        entry = compression["tensors"][name]
        changed = entry["origin"] == "flat_llm"
        assert changed == (name.startswith(("model.layers.0.", "model.layers.2.")) and any(
            part in name for part in ("v_proj", "o_proj", "mlp.")
        ))  # fmt: skip
        assert changed or torch.equal(written[name], tensor)
        assert entry["form"] == ("head_pca" if changed and "self_attn" in name else "pruned" if changed else "dense")
        assert entry["shape"] == list(written[name].shape)


def test_files_are_linked_where_they_can_be(finished: Finished) -> None:
    finished.assemble()
    for plan in plan_shards(finished.inputs):
        if plan.layer is not None:
            assert (finished.output / plan.name).samefile(finished.staged(plan.layer))
        elif plan.whole:
            assert plan.source_file is not None
            assert (finished.output / plan.name).samefile(Path(finished.inputs.source.place) / plan.source_file)


def test_counts_are_those_of_the_files(finished: Finished) -> None:
    counts = finished.assemble()["counts"]
    written, geometry = finished.tensors(), finished.inputs.geometry
    layer = geometry.layers[0]
    numbers = {name: tensor.numel() for name, tensor in written.items()}
    assert counts["parameters"] == {"dense": geometry.model_numbers(), "compressed": sum(numbers.values())}
    assert counts["decoder_parameters"] == {
        "dense": 3 * layer.numbers(),
        "compressed": sum(number for name, number in numbers.items() if ".layers." in name),
    }
    assert counts["bytes"] == {"dense": 4 * geometry.model_numbers(), "compressed": 4 * sum(numbers.values())}
    cached = 3 * layer.attention.kv_heads * layer.attention.head_dim + layer.attention.kv_heads * (
        2 * LOW["value"] + layer.attention.head_dim
    )
    assert counts["cache_bytes_per_token"] == {
        "dense": 4 * 3 * 2 * layer.attention.kv_heads * layer.attention.head_dim,
        "compressed": 4 * cached,
    }
    index = json.loads((finished.output / INDEX_FILE).read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == counts["bytes"]["compressed"]


def test_config_and_companions(finished: Finished) -> None:
    compression = finished.assemble()
    config = json.loads((finished.output / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "lamina"
    assert config["dtype"] == "float32"
    assert config["forms"][1] == {}
    assert config["forms"][0]["v"] == {"form": "head_pca", "rank": LOW["value"]}
    assert compression["layers"][1] == {"groups": {}, "forms": {}}
    assert compression["layers"][2]["groups"]["mlp"]["ranks"] == LOW
    names = {path.name for path in finished.output.iterdir()}
    assert {"tokenizer.json", "LICENSE", *MODELLING_FILES, "README.md", "compression.json", INDEX_FILE} <= names
    assert "notes.txt" not in names
    stored = json.loads((finished.output / "compression.json").read_text(encoding="utf-8"))
    assert stored == json.loads(json.dumps(compression))
    card = (finished.output / "README.md").read_text(encoding="utf-8")
    assert f"{compression['counts']['parameters']['compressed']:,}" in card


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_again_gives_the_same_bytes(finished: Finished) -> None:
    finished.assemble()
    before = contents(finished.output)
    earlier = {"model-00009-of-00042.safetensors", "vocab.txt"}
    for name in earlier:
        (finished.output / name).write_bytes(b"of an earlier job")
    partial_path(finished.output / "model-00001.safetensors").write_bytes(b"of a killed run")
    finished.assemble(frozenset({*earlier, "config.json"}))
    assert contents(finished.output) == before


def test_every_name_is_known_before_it_is_written(finished: Finished) -> None:
    names = finished.assembler().names()
    finished.assemble()
    assert names == {path.name for path in finished.output.iterdir()}


def test_what_was_damaged_in_output_is_put_right(finished: Finished) -> None:
    finished.assemble()
    before = contents(finished.output)
    part = next(plan for plan in plan_shards(finished.inputs) if plan.layer is None and not plan.whole)
    flip(finished.output / part.name)
    (finished.output / part.name).with_suffix(".txt").write_text("a stranger's file stays", encoding="utf-8")
    (finished.output / "model-00009-of-00042.safetensors").write_bytes(b"a stranger's")
    finished.assemble()
    after = contents(finished.output)
    assert after.pop(Path(part.name).with_suffix(".txt").name)
    assert after.pop("model-00009-of-00042.safetensors") == b"a stranger's"
    assert after == before


@pytest.mark.slow
def test_the_index_is_the_last_thing_written(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory without it is not a checkpoint: so it goes first when there is an old one, and comes last."""
    finished.assemble()
    seen: list[set[str]] = []

    def refuse(*_: Any) -> None:
        seen.append({path.name for path in finished.output.iterdir()})
        raise KeyboardInterrupt

    real = assembling.write_index
    monkeypatch.setattr(assembling, "write_index", refuse)
    with pytest.raises(KeyboardInterrupt):
        finished.assemble()
    assert not (finished.output / INDEX_FILE).exists()
    monkeypatch.setattr(assembling, "write_index", real)
    finished.assemble()
    assert {path.name for path in finished.output.iterdir()} == seen[0] | {INDEX_FILE}


@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_damaged_layers_are_taken_back(finished: Finished, damage: Any) -> None:
    """Whether they were there when the checks began or are entered meanwhile; what is made anew is checked anew."""
    path, whole, entry = finished.staged(2), finished.staged(2).read_bytes(), finished.ledger.get("layer/00002")
    assert entry is not None
    damage(path)
    for entered_later in (False, True):
        if entered_later:
            finished.ledger.retract("layer/00002")
        with LayerChecks(finished.ledger, Disk(finished.run_dir), 3) as checks:
            if entered_later:
                checks.commit(layer_key(2), entry)
            found = checks.damaged()
            assert found.keys() == {"layer/00002"}
            assert str(path) in found["layer/00002"]
            assert checks.get(layer_key(2)) is None, "it must be made again"
            assert checks.get(layer_key(0)) is not None
            assert checks.damaged() == {}
            path.write_bytes(whole)
            checks.commit(layer_key(2), entry)
            assert checks.damaged() == {}
        damage(path)
        finished.ledger.commit(layer_key(2), entry)


def test_a_layer_that_was_never_entered(finished: Finished) -> None:
    finished.ledger.retract("layer/00000")
    with pytest.raises(CorruptError, match="no longer holds layer 0"):
        finished.assemble()
    assert not (finished.output / INDEX_FILE).exists()


def test_a_ledger_that_vanishes_in_between(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with its mount, after the shards were placed: a config without the forms would be wrong."""
    real = Assembler._record

    def vanish(self: Assembler, *arguments: Any) -> dict[str, Any]:
        finished.ledger.clear()
        return real(self, *arguments)

    monkeypatch.setattr(Assembler, "_record", vanish)
    with pytest.raises(CorruptError, match="was a mount lost"):
        finished.assemble()
    assert not (finished.output / INDEX_FILE).exists()


def test_nothing_is_published_by_one_who_lost_the_run_directory(finished: Finished) -> None:
    def lost() -> None:
        raise InUseError("the lock was lost")

    files = finished.inputs.source.file_digests({})
    with pytest.raises(InUseError):
        Assembler(finished.inputs, finished.ledger, finished.run_dir, files, lost).run()
    assert not (finished.output / INDEX_FILE).exists()


def test_free_space_is_found_before_the_directory_is_made(tmp_path: Path) -> None:
    assert Disk(tmp_path / "a" / "b" / "c").free_bytes() > 0
    assert math.isclose(Disk(tmp_path / "a").free_bytes(), Disk(tmp_path).free_bytes(), rel_tol=0.2)
