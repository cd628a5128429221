"""The run directory: usable or not, whose it is, and starting over."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from manifests.calibration import FORMER_LEAST_TOKENS
from manifests.entries import DenseEntry
from manifests.errors import InputError
from manifests.loading import parse_manifest
from manifests.quantize import DAMPING, FORMER_CONSTANTS, LEAST_CLIP
from manifests.records import LedgerKey
from manifests.schema import completed
from stores.run_directory import ENDED, FINGERPRINT, MANIFEST, STAGED, RunDirectory

KilledAnywhere = Callable[..., int]
FIELDS: dict[str, Any] = {"seed": 0, "manifest": {"budget": {"keep": 0.8}, "methods": [{"method": "a", "keep": None}]}}


def _at(run: RunDirectory, name: str = "") -> Path:
    return Path(run.storage.at(name))


def changed(**fields: Any) -> dict[str, Any]:
    return {**FIELDS, **fields}


def refused(run: RunDirectory, fields: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        run.check_fingerprint(fields)
    return str(caught.value)


def bound(run: RunDirectory, fields: dict[str, Any], fresh: bool = False) -> bool:
    """Makes it the job's; whether that starts from nothing."""
    standing = run.check_fingerprint(fields, fresh)
    run.bind(standing)
    return not standing.reuses_entries


def fill(run: RunDirectory, name: str) -> None:
    statistic = run.statistics.write(0, name, torch.ones(2, 3))
    hidden = run.activations.write("dense", 1, 0, torch.ones(1, 2, 3))
    run.ledger.commit("dense/00000", DenseEntry(cosine=(), statistics={"m": statistic}, activations=(hidden,)))
    (_at(run, STAGED) / f"layer-00000.{'0' * 32}.safetensors").write_bytes(b"data")


def test_layout(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a" / "run")
    run.prepare()
    run.prepare()
    assert sorted(path.name for path in _at(run).iterdir()) == ["ledger", "logs", "staged"]
    assert bound(run, FIELDS)
    fill(run, "m")
    with run.lock:
        pass
    _at(run, MANIFEST).write_text("")
    assert sorted(path.name for path in _at(run).iterdir()) == [
        "activations.zarr",
        "fingerprint.json",
        "ledger",
        "lock",
        "lock.json",
        "logs",
        "manifest.yaml",
        "staged",
        "statistics.zarr",
    ]


def test_an_address_of_no_known_kind_is_refused() -> None:
    with pytest.raises(InputError, match="ftp://host/run"):
        RunDirectory("ftp://host/run")


def test_a_disk_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 10**12 - 5 * 10**9, 5 * 10**9))
    RunDirectory(tmp_path / "run").prepare(need_bytes=4 * 10**9)
    with pytest.raises(InputError, match=r"5\.0 GB free, the job needs about 7\.5 GB"):
        RunDirectory(tmp_path / "run").prepare(need_bytes=7_500_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 7 * 10**5, 3 * 10**5))
    with pytest.raises(InputError, match=r"0\.3 MB free, the job needs about 1\.2 MB"):
        RunDirectory(tmp_path / "run").prepare(need_bytes=1_200_000)


@pytest.mark.parametrize(("code", "hint"), [(30, "read-only"), (13, "permissions"), (28, "full")])
def test_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, hint: str) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(InputError, match=hint) as caught:
        RunDirectory(tmp_path / "run").prepare()
    assert f"run_dir {tmp_path / 'run'} cannot be used" in str(caught.value)


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"")
    with pytest.raises(InputError, match="a file is in the way"):
        RunDirectory(tmp_path / "run").prepare()
    with pytest.raises(InputError, match="a file is in the way"):
        RunDirectory(tmp_path / "run" / "below").prepare()


def test_the_same_job_goes_on(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.prepare()
    assert bound(run, {**FIELDS, "shape": (1, 2)})
    fill(run, "m")
    assert not bound(RunDirectory(tmp_path), {"shape": [1, 2], **FIELDS})
    assert run.ledger.keys() == ["dense/00000"]


def test_another_job_is_refused_by_its_fields(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.prepare()
    bound(run, FIELDS)
    fill(run, "m")
    other = {"budget": {}, "methods": [{"method": "b" * 99, "keep": None}]}
    message = refused(run, changed(seed=1, manifest=other, x=2))
    lines = [line.strip() for line in message.splitlines()]
    assert "seed: 0 -> 1" in lines
    assert "manifest.budget.keep: 0.8 -> (none)" in lines
    assert any(line.startswith('manifest.methods.0.method: "a" -> "bbb') and line.endswith("...") for line in lines)
    assert "x: (none) -> 2" in lines
    assert not any("methods.0.keep" in line for line in lines)
    assert "--fresh" in message
    assert run.ledger.keys() == ["dense/00000"]


def test_a_start_without_work_is_nobody_s(tmp_path: Path) -> None:
    """Nothing is written until it is bound; what was bound and has no work is another's as soon as it binds."""
    run = RunDirectory(tmp_path)
    run.prepare()
    assert run.check_fingerprint(FIELDS).kind == "new"
    assert not _at(run, FINGERPRINT).exists()
    assert bound(run, FIELDS)
    run.ledger.commit(LedgerKey("hardware"), {"device": "CPU"})
    assert "seed: 0 -> 1" in refused(run, changed(seed=1))
    standing = run.check_fingerprint(changed(seed=1), before_work=["hardware"])
    assert (standing.kind, standing.differing) == ("new", ("seed",))
    assert json.loads(_at(run, FINGERPRINT).read_text())["fields"]["seed"] == 0
    run.bind(standing)
    assert run.ledger.keys() == []
    assert not bound(run, changed(seed=1))


def test_a_standing_changes_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.prepare()
    bound(run, FIELDS)
    fill(run, "m")
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    assert run.check_fingerprint(changed(seed=1), fresh=True).kind == "fresh"
    adapted = run.check_fingerprint(changed(seed=1), adaptable=lambda differing: differing == ["seed"])
    assert adapted.kind == "adapted"
    assert before == {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    undone = []
    run.bind(adapted, lambda: undone.append(run.ledger.retract("dense/00000")))
    assert (len(undone), run.ledger.keys()) == (1, [])
    assert not bound(run, changed(seed=1))


def test_work_of_nobody_is_refused(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.prepare()
    fill(run, "m")
    assert "no fingerprint.json" in refused(run, FIELDS)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', '{"version": 1, "fields": 3}'])
def test_a_damaged_fingerprint(tmp_path: Path, text: str) -> None:
    run = RunDirectory(tmp_path)
    run.prepare()
    _at(run, FINGERPRINT).write_text(text)
    message = refused(run, FIELDS)
    assert "damaged" in message
    assert "--fresh" in message


def test_a_flipped_bit_is_not_taken_for_another_job(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.prepare()
    bound(run, FIELDS)
    content = json.loads(_at(run, FINGERPRINT).read_text())
    content["fields"]["seed"] = 7
    _at(run, FINGERPRINT).write_text(json.dumps(content))
    message = refused(run, FIELDS)
    assert f"{_at(run, FINGERPRINT)}: damaged" in message
    assert "another job" not in message


def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.prepare()
    bound(run, FIELDS)
    _at(run, FINGERPRINT).write_text(json.dumps({**json.loads(_at(run, FINGERPRINT).read_text()), "version": 2}))
    assert "version 2" in refused(run, FIELDS)


def test_fresh_starts_over(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.prepare()
    bound(run, FIELDS)
    fill(run, "m")
    assert bound(run, changed(seed=1), fresh=True)
    assert run.ledger.keys() == []
    assert list(_at(run, STAGED).iterdir()) == []
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("c.")]
    assert not bound(run, changed(seed=1))
    fill(run, "m")
    assert "seed: 1 -> 0" in refused(run, FIELDS)


def test_killed_anywhere_starting_over(killed_anywhere: KilledAnywhere) -> None:
    def prepare(directory: Path) -> None:
        run = RunDirectory(directory)
        run.prepare()
        bound(run, FIELDS)
        fill(run, "m")

    def act(directory: Path) -> None:
        bound(RunDirectory(directory), changed(seed=1), fresh=True)

    owners = []

    def check(directory: Path) -> None:
        run = RunDirectory(directory)
        run.prepare()
        record = run.ledger.get("dense/00000")
        if record:  # what the ledger names is there
            assert torch.equal(run.statistics.read(record.statistics["m"]), torch.ones(2, 3))
            assert run.activations.open(record.activations[0]).read(0, 1).sum() == 6
            assert not bound(run, FIELDS)
        owner = json.loads(_at(run, FINGERPRINT).read_text())["fields"]["seed"]
        if owner == 1:
            assert not record
            assert not bound(run, changed(seed=1))
        assert bound(run, changed(seed=2), fresh=True)
        owners.append(owner)

    assert killed_anywhere(act, check, prepare) > 15
    assert list(dict.fromkeys(owners)) == [0, 1]


def semantic(
    quantize: dict[str, Any] | None = None, method: dict[str, Any] | None = None, **calibration: Any
) -> dict[str, Any]:
    text = {"text": {"files": ["a.txt"]}, "samples": 20}
    document = {"version": 1, "model": {"source": "m"}, "output": "o", "run_dir": "r", "budget": {"keep": 0.5}}
    document |= {"methods": [method or {"method": "flat_llm"}], "quantize": quantize}
    found = parse_manifest({**document, "calibration": {**text, **calibration}}).semantic()
    return {**found, "methods": [{**found["methods"][0], "rank_multiple": 1}]}  # as a fingerprint has it


def test_a_field_that_an_older_version_did_not_know_counts_as_its_default(tmp_path: Path) -> None:
    whole = semantic(gradient={"least_tokens": FORMER_LEAST_TOKENS})
    older = {**whole, "calibration": {name: v for name, v in whole["calibration"].items() if name != "gradient"}}
    assert older != whole
    run = RunDirectory(tmp_path / "run")
    run.prepare()
    assert bound(run, {"manifest": older})
    assert not bound(run, {"manifest": whole})
    fill(run, "m")
    assert "calibration.gradient.least_tokens: 16384 -> 65536" in refused(run, {"manifest": semantic()})
    assert "calibration.gradient.samples: null -> 3" in refused(run, {"manifest": semantic(gradient={"samples": 3})})


def test_ridges_of_an_older_version_are_those_that_it_had(tmp_path: Path) -> None:
    def corrected(**fields: Any) -> dict[str, Any]:
        return semantic(method={"method": "loss_aware", "correct": "output", **fields})

    older = corrected()
    del older["methods"][0]["correct_ridges"]
    run = RunDirectory(tmp_path / "run")
    run.prepare()
    assert bound(run, {"manifest": older})
    assert not bound(run, {"manifest": corrected(correct_ridges=[1e-3, 1e-4])})
    fill(run, "m")
    assert "methods.0.correct_ridges: [0.001, 0.0001] -> [0.1, 0.3]" in refused(run, {"manifest": corrected()})


@pytest.mark.parametrize("kept", [{}, {"correct_ridges": [0.1, 0.3]}])
def test_ridges_of_rounding_that_an_older_version_did_not_use(tmp_path: Path, kept: dict[str, Any]) -> None:
    """Neither a version without the field nor one with another default keeps a job from going on."""
    now = semantic(quantize={"bits": 4})
    given = {name: value for name, value in now["quantize"].items() if name != "correct_ridges"}
    run = RunDirectory(tmp_path / "run")
    run.prepare()
    assert bound(run, {"manifest": {**now, "quantize": {**given, **kept}}})
    assert not bound(run, {"manifest": now})


def test_ranks_of_an_older_version_are_multiples_of_one(tmp_path: Path) -> None:
    whole = semantic()
    (entry,) = whole["methods"]
    older = {**whole, "methods": [{name: value for name, value in entry.items() if name != "rank_multiple"}]}
    run = RunDirectory(tmp_path / "run")
    run.prepare()
    assert bound(run, {"manifest": older})
    assert not bound(run, {"manifest": whole})
    fill(run, "m")
    wide = {**whole, "methods": [{**entry, "rank_multiple": 16}]}
    assert "methods.0.rank_multiple: 1 -> 16" in refused(run, {"manifest": wide})


@pytest.mark.parametrize("feedback", [None, True, False])
def test_rounding_of_an_older_version_keeps_its_constants(tmp_path: Path, feedback: bool | None) -> None:
    """They are fields now, of other defaults. Rounding to nearest has none."""
    quantize = {"bits": 4, "feedback": feedback}
    whole = semantic(quantize)
    older = {
        **whole,
        "quantize": {name: v for name, v in whole["quantize"].items() if name not in FORMER_CONSTANTS},
    }
    run = RunDirectory(tmp_path / "run")
    run.prepare()
    assert bound(run, {"manifest": older})
    if feedback is False:
        assert not bound(run, {"manifest": whole})
        return
    assert not bound(run, {"manifest": semantic({**quantize, **FORMER_CONSTANTS})})
    assert bound(run, {"manifest": older}, fresh=True)
    fill(run, "m")
    refusal = refused(run, {"manifest": whole})
    assert f"quantize.damping: 0.01 -> {DAMPING}" in refusal
    assert f"quantize.least_clip: 0.875 -> {LEAST_CLIP}" in refusal
    assert "quantize.polish: 0 -> 1" in refusal


def test_null_feedback_of_an_older_version_is_one_sided(tmp_path: Path) -> None:
    """It could not mean both sides then."""
    whole = semantic({"bits": 4}, {"method": "loss_aware"})
    assert whole["quantize"]["feedback"] == "both"
    older = {**whole, "quantize": {**whole["quantize"], "feedback": None}}
    run = RunDirectory(tmp_path / "run")
    run.prepare()
    assert bound(run, {"manifest": older})
    assert not bound(run, {"manifest": semantic({"bits": 4, "feedback": True}, {"method": "loss_aware"})})
    fill(run, "m")
    refusal = refused(run, {"manifest": whole})
    assert 'quantize.feedback: true -> "both"' in refusal
    assert "feedback: true goes on with its work" in refusal


def test_a_multiple_that_depends_on_layers_is_none_and_no_other(tmp_path: Path) -> None:
    whole = semantic()
    (entry,) = whole["methods"]
    by_layer = {**whole, "methods": [{**entry, "rank_multiple": None}]}
    run = RunDirectory(tmp_path / "run")
    run.prepare()
    assert bound(run, {"manifest": by_layer})
    assert not bound(run, {"manifest": by_layer})
    fill(run, "m")
    assert "methods.0.rank_multiple: null -> 1" in refused(run, {"manifest": whole})


def test_samples_of_a_version_without_prefixes(tmp_path: Path) -> None:
    """The same samples go on; others are refused by the field's name, because the default has changed them."""
    now = semantic()
    before = {**now, "calibration": {name: value for name, value in now["calibration"].items() if name != "prefix"}}
    run = RunDirectory(tmp_path / "run")
    run.prepare()
    assert bound(run, {"manifest": before, "calibration_tokens": "a"})
    fill(run, "m")
    assert not bound(run, {"manifest": now, "calibration_tokens": "a"})
    text = refused(run, {"manifest": now, "calibration_tokens": "b"})
    assert 'manifest.calibration.prefix: (none) -> "tokenizer"' in text
    assert "an earlier version began this work" in text
    assert bound(run, {"manifest": now, "calibration_tokens": "a"}, fresh=True)
    fill(run, "m")
    other = {**now, "calibration": {**now["calibration"], "prefix": "none"}}
    assert "earlier version" not in refused(run, {"manifest": other, "calibration_tokens": "b"})


@pytest.mark.parametrize("strange", [None, [], {"methods": 3}, {"version": 1, "calibration": {"text": 1}}])
def test_a_manifest_that_no_version_wrote_is_compared_as_it_is(strange: object) -> None:
    assert completed(strange) is strange


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for name in ("manifest.yaml", "scale.json", "notes.txt"):
        (tmp_path / name).write_text("theirs")
    (tmp_path / "staged").mkdir()
    (tmp_path / "staged" / "a.pt").write_text("theirs")
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / ".DS_Store").write_text("")
    assert run.foreign_files() == ["manifest.yaml", "scale.json", "staged/a.pt"]
    with pytest.raises(InputError, match=r"other files .* manifest.yaml, scale.json, staged/a.pt; move them away"):
        run.prepare()
    assert sorted(os.listdir(tmp_path)) == ["ledger", "manifest.yaml", "notes.txt", "scale.json", "staged"]


def test_what_a_start_leaves_is_ours(tmp_path: Path) -> None:
    """Before a fingerprint there are folders and locks; a word to the owner of the lock may be there, too."""
    run = RunDirectory(tmp_path)
    run.prepare()
    with run.lock:
        run.request_workers(2, run.lock.token)
        assert run.foreign_files() == []
    assert run.foreign_files() == []
    _at(run, ENDED).write_text("{}")
    assert run.foreign_files() == [], "of a start that was refused"
    _at(run, MANIFEST).write_text("of a user who chose this folder meanwhile")
    assert run.foreign_files() == ["manifest.yaml"]


@pytest.mark.parametrize("damage", ["", "[]", '{"version": 9, "fields": {}}'])
def test_a_damaged_run_directory_is_still_ours(tmp_path: Path, damage: str) -> None:
    run = RunDirectory(tmp_path)
    run.prepare()
    with run.lock:
        bound(run, FIELDS)
        _at(run, MANIFEST).write_text("")
    _at(run, FINGERPRINT).write_text(damage)
    assert run.foreign_files() == []
    fill(run, "m")
    _at(run, FINGERPRINT).unlink()
    (tmp_path / "lock.json").unlink()
    assert run.foreign_files() == []


def test_starting_over_removes_only_what_was_staged(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.prepare()
    bound(run, FIELDS)
    fill(run, "m")
    (_at(run, STAGED) / "layer-notes.txt").write_text("theirs")
    assert bound(run, FIELDS, fresh=True)
    assert os.listdir(_at(run, STAGED)) == ["layer-notes.txt"]


@pytest.mark.parametrize("listed", [["LAMINA_A"], []])
def test_what_was_resolved_is_read_where_variables_are_not_set(
    listed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `status` does it on another machine; runs of before left the list of variables there."""
    monkeypatch.delenv("LAMINA_A", raising=False)
    job = {"version": 1, "model": {"source": "m"}, "output": "/data/out", "run_dir": "/data/run", "environment": listed}
    run_dir = RunDirectory(tmp_path)
    (tmp_path / "manifest.yaml").write_text(
        json.dumps({**job, "budget": {"keep": 0.5}, "methods": [{"method": "lorc"}]})
    )
    assert run_dir.read_output() == "/data/out"
    points = [{"methods": [{"method": "lorc"}]}]
    scored = {"perplexity": {"text": {"files": ["t.txt"]}, "window": 8}}
    sweep = {**job, "output": "/data/many", "keep": [0.5], "points": points, "evaluation": scored}
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep))
    assert run_dir.read_output() == "/data/many"
