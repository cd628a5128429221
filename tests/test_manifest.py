"""Manifests: all faults are named at once; valid manifests survive writing and reading."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifests.calibration import Calibration
from manifests.errors import InputError
from manifests.loading import MAX_FILE_BYTES, dump_manifest, load_manifest, parse_manifest
from manifests.methods import FlatLLM
from manifests.schema import Budget, Manifest, completed
from manifests.strict_yaml import read_yaml, write_yaml
from manifests.sweep import load_sweep, parse_sweep

MINIMAL = """\
version: 1
model: {source: /m}
output: /o
run_dir: /r
methods: [{method: flat_llm}]
"""
DESIGN_EXAMPLE = """\
version: 1
model: {source: /models/Llama-2-70b-hf, revision: null}      # directory, hub id, s3://, gs://
output: /checkpoints/llama2-70b-keep80
run_dir: /scratch/llama2-70b-keep80                          # directory or bucket
seed: 0
budget: {keep: 0.8, scope: decoder}                          # decoder: parameters inside decoder layers; model: all
calibration:                                                  # not needed by data-free jobs
  text: {dataset: wikitext, name: wikitext-2-raw-v1, split: train}     # or {files: [a.txt, b.jsonl], field: text}
  samples: 256
  sequence_length: 4096
  shards: 16
  micro_batch: 1
  propagate: compressed                                       # compressed | dense
methods:
  - {method: flat_llm, layers: all, attention: true, mlp: true, allocation: importance, basis: context, weighting: output, selection: eliminate, query_key: none, ridge: 1.0}
  # {method: lorc, cache_keep: 0.6, allocation: progressive, weighting: none, skip_above: null}
workers: {min: 1, max: 8, cpus: 4, gpus: 1}
resume: {every: 1}
evaluation: {perplexity: {text: {files: [wiki.test.txt]}, window: 2048}, tasks: []}
"""  # noqa: E501 - word for word


def load(tmp_path: Path, text: str | bytes, *overrides: str) -> Manifest:
    path = tmp_path / "job.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_manifest(path, overrides)


def document(**fields: Any) -> dict[str, Any]:
    return {**read_yaml(MINIMAL), **fields}


def faults(**fields: Any) -> list[str]:
    """The lines of the error that a manifest with these fields gives."""
    with pytest.raises(InputError) as caught:
        parse_manifest(document(**fields))
    first, *lines = str(caught.value).splitlines()
    assert first == "manifest manifest:"
    return [line.strip() for line in lines]


def flat_llm(**fields: Any) -> dict[str, Any]:
    return {"methods": [{"method": "flat_llm", **fields}]}


def test_example_of_the_design(tmp_path: Path) -> None:
    manifest = load(tmp_path, DESIGN_EXAMPLE)
    assert manifest.model.source == "/models/Llama-2-70b-hf"
    assert manifest.budget == Budget(keep=0.8, scope="decoder")
    assert manifest.calibration is not None
    assert manifest.calibration.text.name == "wikitext-2-raw-v1"
    assert (manifest.calibration.samples, manifest.calibration.shards) == (256, 16)
    assert manifest.methods == (FlatLLM(method="flat_llm"),)  # what it spells out are the defaults
    assert (manifest.workers.max, manifest.workers.cpus, manifest.workers.gpus) == (8, 4, 1)
    assert manifest.evaluation.perplexity is not None
    assert manifest.evaluation.perplexity.text.files == ("wiki.test.txt",)


def test_several_calibration_texts_share_the_samples() -> None:
    texts = [{"files": ["a.txt"], "share": 0.9}, {"dataset": "b", "share": 0.1}]
    calibration = parse_manifest(document(calibration={"text": texts, "samples": 64})).calibration
    assert calibration is not None
    assert [(text.files or text.dataset, count) for text, count in calibration.texts] == [(("a.txt",), 58), ("b", 6)]
    one = parse_manifest(document(calibration={"text": {"dataset": "b"}, "samples": 64})).calibration
    assert one is not None
    assert [count for _, count in one.texts] == [64]


@pytest.mark.parametrize(
    ("fields", "shards"),
    [
        ({}, 16),
        ({"samples": 12}, 12),
        ({"samples": 17}, 16),
        ({"samples": "auto", "max_samples": 40}, 10),
        ({"samples": "auto", "max_samples": 80}, 16),
    ],
)
def test_few_samples_have_fewer_shards(fields: dict[str, Any], shards: int) -> None:
    calibration = Calibration.model_validate({"text": {"files": ["a"]}, **fields})
    assert calibration.shards == shards


def test_minimal_manifest(tmp_path: Path) -> None:
    manifest = load(tmp_path, MINIMAL)
    assert (manifest.seed, manifest.workers.max, manifest.resume.every) == (0, 1, 1)
    assert manifest.budget is None
    assert manifest.calibration is None


@pytest.mark.parametrize(
    ("fields", "field", "given", "allowed"),
    [
        ({"version": 2}, "version", "2", "version 1"),
        ({"version": 0}, "version", "0", "version 1"),
        ({"version": True}, "version", "True", "integer"),
        ({"version": 1.0}, "version", "1.0", "integer"),
        ({"version": "1"}, "version", "'1'", "integer"),
        ({"seed": -1}, "seed", "-1", "greater than or equal to 0"),
        ({"seed": 2**63}, "seed", str(2**63), "less than"),
        ({"output": ""}, "output", "''", "not blank"),
        ({"output": "a\0b"}, "output", r"'a\x00b'", "no control characters"),
        ({"output": 3}, "output", "3", "text"),
        ({"model": {"source": "  "}}, "model.source", "'  '", "not blank"),
        ({"model": "/m"}, "model", "'/m'", "a mapping of fields"),
        ({"model": {"source": "/m", "sorce": 1}}, "model.sorce", "1", "revision, source, trust_remote_code"),
        ({"budget": {"keep": 0}}, "budget.keep", "0", "greater than 0"),
        ({"budget": {"keep": 1.0001}}, "budget.keep", "1.0001", "less than or equal to 1"),
        ({"budget": {"keep": float("nan")}}, "budget.keep", "nan", "finite"),
        ({"budget": {"keep": float("-inf")}}, "budget.keep", "-inf", "finite"),
        ({"budget": {"keep": True}}, "budget.keep", "True", "number"),
        ({"budget": {"keep": "0.8"}}, "budget.keep", "'0.8'", "number"),
        ({"budget": {"keep": None}}, "budget", "None", "either `keep`, `bytes`, `max_loss` or `fit`"),
        ({"budget": {"fit": {"memory": "24", "context": 8}}}, "budget.fit.memory", "'24'", "an amount with a unit"),
        ({"budget": {"fit": {"memory": "8GB"}}}, "budget.fit.context", "missing", "missing"),
        ({"budget": {"keep": 0.5, "scope": "all"}}, "budget.scope", "'all'", "'decoder', 'model' or 'experts'"),
        ({"budget": [0.5]}, "budget", "[0.5]", "a mapping of fields"),
        (flat_llm(attention="yes"), "methods.0.attention", "'yes'", "true or false"),
        (flat_llm(attention=1), "methods.0.attention", "1", "true or false"),
        (flat_llm(basis="values"), "methods.0.basis", "'values'", "'value' or 'context'"),
        (flat_llm(ridge=0), "methods.0.ridge", "0", "greater than 0"),
        (flat_llm(ridge=float("inf")), "methods.0.ridge", "inf", "finite"),
        (flat_llm(rank_multiple=1.5), "methods.0.rank_multiple", "1.5", "integer"),
        (flat_llm(rigde=1), "methods.0.rigde", "1", "ridge"),
        (flat_llm(ranks={}), "methods.0.ranks", "{}", "at least one of value, mlp, query_key"),
        (flat_llm(ranks={"value": 8}, keep=0.5), "methods.0", "'keep': 0.5", "`ranks` or `keep`, not both"),
        (flat_llm(attention=False, mlp=False), "methods.0", "False", "claim nothing"),
        (flat_llm(layers="first:3"), "methods.0.layers", "'first:3'", "all, last:N, last:SHARE"),
        (flat_llm(layers="last:0"), "methods.0.layers", "'last:0'", "above 0"),
        (flat_llm(layers="last:1.5"), "methods.0.layers", "'last:1.5'", "last:SHARE"),
        (flat_llm(layers="all\n"), "methods.0.layers", r"'all\n'", "last:SHARE"),
        (flat_llm(layers=3), "methods.0.layers", "3", "a list of layer numbers"),
        (flat_llm(layers=[]), "methods.0.layers", "[]", "a list of layer numbers"),
        (flat_llm(layers=[0, -1]), "methods.0.layers", "[0, -1]", "layer numbers from 0"),
        (flat_llm(layers=[0, True]), "methods.0.layers", "[0, True]", "layer numbers from 0"),
        ({"methods": []}, "methods", "[]", "at least one method"),
        ({"quantize": {"bits": 5}}, "quantize.bits", "5", "8, 4, 3, 2 or 'auto'"),
        ({"quantize": {"bits": 4, "levels": "nf4"}}, "quantize.levels", "'nf4'", "'uniform', 'normal'"),
        ({"quantize": {"bits": 4, "group": 48}}, "quantize.group", "48", "32, 64 or 128"),
        ({"quantize": {"bits": 4, "symmetric": False}}, "quantize.symmetric", "False", "only symmetric"),
        ({"quantize": {"bits": 4, "skip": ["tail"]}}, "quantize.skip.0", "'tail'", "'q', 'k'"),
        (
            {"quantize": {"bits": 4, "skip": ["q", "k", "v", "o", "gate", "up", "down"]}},
            "quantize",
            "'skip'",
            "names every role",
        ),
        ({"methods": {"method": "flat_llm"}}, "methods", "{'method': 'flat_llm'}", "a list"),
        ({"methods": [{"method": "flat"}]}, "methods.0.method", "'flat'", "'flat_llm'"),
        ({"methods": ["flat_llm"]}, "methods.0", "'flat_llm'", "a mapping of fields"),
        ({"workers": {"min": 3, "max": 2}}, "workers", "'min': 3", "min: 3 is above max: 2"),
        ({"workers": {"gpus": 1.5}}, "workers", "1.5", "one GPU"),
        ({"workers": {"gpus": 2}}, "workers", "2", "one GPU"),
        ({"workers": {"cpus": 0}}, "workers.cpus", "0", "greater than 0"),
        ({"resume": {"every": 0}}, "resume.every", "0", "greater than 0, or auto"),
        ({"resume": {"every": "often"}}, "resume.every", "'often'", "greater than 0, or auto"),
        ({"resume": {"every": True}}, "resume.every", "True", "greater than 0, or auto"),
        (flat_llm(refine={"steps": 0}), "methods.0.refine.steps", "0", "greater than 0"),
        (flat_llm(refine={"tokens": "some"}), "methods.0.refine.tokens", "'some'", "above 0, or all"),
        (flat_llm(refine={"learning_rate": 2}), "methods.0.refine.learning_rate", "2", "below 1, or auto"),
        ({"environment": "HOME"}, "environment", "'HOME'", "a list"),
        ({"evaluation": {"tasks": "piqa"}}, "evaluation.tasks", "'piqa'", "a list"),
        ({"evaluation": {"tasks": ["piqa"], "fewshot": -1}}, "evaluation.fewshot", "-1", "greater than or equal to 0"),
        ({"evaluation": {"tasks": ["piqa"], "limit": 0}}, "evaluation.limit", "0", "greater than 0"),
        ({"evaluation": {"limit": 5, "fewshot": 0}}, "evaluation", "'limit': 5", "fewshot, limit: settings of `tasks`"),
        ({"calibration": {"text": {"files": "a.txt"}}}, "calibration.text.files", "'a.txt'", "a list"),
        ({"calibration": {"text": [{"files": ["a"], "share": 0.5}]}}, "calibration", "0.5", "add up to 0.5, not to 1"),
        ({"calibration": {"text": [{"files": ["a"]}]}}, "calibration.text.0.share", "", "missing"),
        (
            {"calibration": {"text": [{"files": ["a"], "share": 0.99}, {"dataset": "b", "share": 0.01}], "samples": 9}},
            "calibration",
            "0.01",
            "text.1.share: gives this text none of 9 samples",
        ),
        ({"calibration": {"text": {"files": ["a"]}, "gradient": {"samples": 300}}}, "calibration", "300", "than sampl"),
        ({"calibration": {"text": {"files": []}}}, "calibration.text", "[]", "either `files`"),
        ({"calibration": {"text": {"files": ["a"], "dataset": "b"}}}, "calibration.text", "'b'", "not both"),
        (
            {"calibration": {"text": {"files": ["a"]}, "samples": 2, "shards": 3}},
            "calibration", "'shards': 3", "more than samples: 2",
        ),
        ({"no_such": [1, 2]}, "no_such", "[1, 2]", "budget, calibration, environment, evaluation, heal, methods, mod"),
    ],
)  # fmt: skip
def test_fault_names_field_value_and_what_is_allowed(
    fields: dict[str, Any], field: str, given: str, allowed: str
) -> None:
    (line,) = faults(**fields)
    assert line.startswith(f"{field}: ")
    assert given in line
    assert allowed in line


def test_refinement_needs_text_and_one_setting() -> None:
    text = {"text": {"files": ["a"]}, "samples": 9, "shards": 3}
    (line,) = faults(**flat_llm(refine=True))
    assert line == "methods.0 (flat_llm).refine trains layers on calibration text; give calibration"
    (line,) = faults(**flat_llm(refine=True), calibration={**text, "propagate": "compressed"})
    assert "set calibration.propagate: dense" in line
    (line,) = faults(**flat_llm(refine=True), calibration={**text, "samples": 1, "shards": 1})
    assert "give calibration.samples: 2 or more" in line
    entries = [{"method": "flat_llm", "refine": True}, {"method": "lorc", "refine": {"steps": 9}}]
    (line,) = faults(methods=entries, calibration=text)
    assert line == "methods.1 (lorc).refine differs from that of methods.0; a layer is refined once"
    for off in (False, None):
        assert parse_manifest(document(**flat_llm(refine=off))).methods[0].refine is None
    refined = parse_manifest(document(**flat_llm(refine={"steps": 5}), calibration=text)).methods[0].refine
    assert refined is not None
    assert (refined.steps, refined.tokens, refined.learning_rate) == (5, "all", "auto")


def test_every_fault_is_reported_at_once() -> None:
    lines = faults(
        budget={"keep": 2}, workers={"min": 3, "max": 2}, bogus=1, output="", environment=["LAMINA_NOT_SET"],
        methods=[{"method": "flat_llm", "ridge": -1, "extra": {}}, {"method": "none"}],
    )  # fmt: skip
    assert {line.split(":")[0] for line in lines} == {
        "budget.keep", "workers", "bogus", "output", "environment",
        "methods.0.ridge", "methods.0.extra", "methods.1.method",
    }  # fmt: skip
    assert len(lines) == 8


def test_sweep_and_job_are_told_apart() -> None:
    with pytest.raises(InputError, match=r"with `points` it is a sweep: `python -m pipeline\.sweep` runs it"):
        parse_manifest(document(points=[]))
    with pytest.raises(InputError, match=r"without `points` it is one job: `python -m pipeline\.run` runs it"):
        parse_sweep(document())


def test_missing_fields_are_all_named() -> None:
    with pytest.raises(InputError) as caught:
        parse_manifest({})
    named = {line.strip().removesuffix(": missing") for line in str(caught.value).splitlines()[1:]}
    assert named == {"version", "model", "output", "run_dir", "methods"}


def test_long_values_are_cut() -> None:
    (line,) = faults(budget="x" * 10_000)
    assert len(line) < 200


def test_whole_numbers_stand_for_floats() -> None:
    manifest = parse_manifest(document(budget={"keep": 1}, **flat_llm(ridge=2)))
    assert manifest.budget == Budget(keep=1.0)
    assert manifest.methods[0].ridge == 2.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1e-6", 1e-6), ("-2E+3", -2000.0), ("1.5e3", 1500.0), (".5e1", 5.0), ("1.0e-6", 1e-6), ("3", 3), ("0.25", 0.25)],
)
def test_numbers_of_yaml(text: str, expected: float) -> None:
    assert read_yaml(text) == expected
    assert type(read_yaml(text)) is type(expected)


@pytest.mark.parametrize("text", ["2026-01-01", "e5", "1e", "1e5x", "'1e5'", "last:22", "1.2.3"])
def test_text_of_yaml(text: str) -> None:
    assert read_yaml(text) == text.strip("'")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- 1", "expected a mapping of fields, found list"),
        ("", "expected a mapping of fields, found NoneType"),
        ("just text", "expected a mapping of fields, found str"),
        ("{a: b: c}", "not YAML: .*line 1"),
        ("a: [1", "not YAML"),
        ("\ta: 1", "not YAML: .*tab|not YAML: .*cannot start any token"),
        ("a: 1\0", "not YAML"),
        ("a: 1\n---\nb: 2", "not YAML: expected a single document"),
        (MINIMAL + "seed: 1\nseed: 2\n", r"field 'seed' is given twice\s.*line 7"),
        (MINIMAL + "budget: {keep: 1, scope: model, keep: 0.5}", "field 'keep' is given twice"),
        (MINIMAL + "3: 1", "key 3: a field's name must be text"),
        (MINIMAL + "on: 1", "key on: a field's name must be text"),
        (MINIMAL + "null: 1", "key null: a field's name must be text"),
        (MINIMAL + "[1, 2]: 1", "key a collection: a field's name must be text"),
        ("a: &x 1\nb: *x", r"alias \*x: write the value out"),
        ("a: &x [*x]", r"alias \*x: write the value out"),
        ("base: &b {seed: 1}\n<<: *b", "alias|key <<"),
        ("<<: {seed: 1}", "key <<: a field's name must be text"),
        ("a: !!python/object/apply:os.system [id]", "only plain values are allowed"),
        ("a: !!bool perhaps", "only plain values are allowed"),
        ("a: " + "9" * 5000, "not YAML: Exceeds the limit"),
        ("[" * 20_000, "not YAML: nested too deep"),
        ("a: " + "{a: " * 40 + "1" + "}" * 40, "nested more than 32 deep"),
        (b"a: \xff\xfe", "cannot be read .*utf-8"),
        (b"#" * (MAX_FILE_BYTES + 1), f"more than {MAX_FILE_BYTES} bytes"),
    ],
)
def test_what_is_no_manifest(tmp_path: Path, text: str | bytes, expected: str) -> None:
    with pytest.raises(InputError, match=re.compile(expected, re.DOTALL)) as caught:
        load(tmp_path, text)
    assert str(tmp_path / "job.yaml") in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_thousand_million_laughs_take_no_time(tmp_path: Path) -> None:
    levels = ["l0: &l0 [ha, ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    levels += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 10)]
    started = time.monotonic()
    with pytest.raises(InputError, match="alias"):
        load(tmp_path, "\n".join(levels))
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("name", ["missing.yaml", "", "a\0b"])
def test_file_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_manifest(f"{tmp_path}/{name}")


def test_the_other_command_is_named_for_a_sweep_and_for_a_job(tmp_path: Path) -> None:
    path = tmp_path / "it.yaml"
    path.write_text(MINIMAL)
    with pytest.raises(InputError, match="no `points`; a manifest without them is one job, which the command `run`"):
        load_sweep(path)
    with pytest.raises(InputError, match="its `points` make it a sweep, which the command `sweep` runs"):
        load(tmp_path, MINIMAL + "points: []\n")


def test_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(InputError, match="more than"):
        load_manifest("/dev/zero")


def test_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    assert load(tmp_path, b"\xef\xbb\xbf" + MINIMAL.encode()) == load(tmp_path, MINIMAL)


def test_overrides(tmp_path: Path) -> None:
    manifest = load(
        tmp_path, MINIMAL,
        "budget.keep=6e-1", "methods.0.basis=value", "output=s3://bucket/x", "workers={max: 4}", "workers.min=2",
        "methods.0.layers=[0, 2]", "model.revision=main",
    )  # fmt: skip
    assert manifest.budget == Budget(keep=0.6)
    assert manifest.methods[0].basis == "value"
    assert manifest.methods[0].layers == (0, 2)
    assert manifest.output == "s3://bucket/x"
    assert (manifest.workers.min, manifest.workers.max) == (2, 4)
    assert manifest.model.revision == "main"


def test_override_fills_an_empty_block(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL + "budget:\n", "budget.keep=0.5").budget == Budget(keep=0.5)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("budget", "expected FIELD=VALUE"),
        ("=3", "expected FIELD=VALUE"),
        ("budget..keep=3", "expected FIELD=VALUE"),
        ("budget.keep=[", "the value is not YAML"),
        ("budget={keep: 1, keep: 0.5}", "'keep' is given twice"),
        ("model.source.path=x", "model.source is '/m', which has no fields"),
        ("methods.1.ridge=1", "'1' is not a position in a list of 1"),
        ("methods.-1.ridge=1", "'-1' is not a position in a list of 1"),
        ("methods.²=1", "'²' is not a position in a list of 1"),
        ("methods.first.ridge=1", "'first' is not a position in a list of 1"),
        ("budget.kept=0.5", "budget.kept: unknown field"),
        ("output=", "output: should be text"),
        (".".join("a" * 3000) + "=1", "nested more than"),
    ],
)
def test_wrong_override_is_named(tmp_path: Path, override: str, expected: str) -> None:
    with pytest.raises(InputError, match=re.escape(expected)):
        load(tmp_path, MINIMAL, override)


def test_environment_is_expanded_only_where_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_A", "/data")
    monkeypatch.setenv("LAMINA_B", "secret")
    paths = {"output": "${LAMINA_A}/o/${LAMINA_B}", "model": {"source": "${LAMINA_A}/m"}}
    manifest = parse_manifest(document(environment=["LAMINA_A"], **paths))
    assert "environment: []" in dump_manifest(manifest)  # it can be run where the variable is not set
    assert manifest.output == "/data/o/${LAMINA_B}"
    assert manifest.model.source == "/data/m"
    assert parse_manifest(document(**paths)).output == "${LAMINA_A}/o/${LAMINA_B}"


def test_expanded_values_are_not_expanded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_A", "${LAMINA_B}")
    monkeypatch.setenv("LAMINA_B", "secret")
    manifest = parse_manifest(document(environment=["LAMINA_A", "LAMINA_B"], output="${LAMINA_A}"))
    assert manifest.output == "${LAMINA_B}"


@pytest.mark.parametrize(
    ("layers", "num_layers", "expected"),
    [
        ("all", 3, (0, 1, 2)),
        ("last:2", 5, (3, 4)),
        ("last:22", 32, tuple(range(10, 32))),
        ("last:0.6875", 32, tuple(range(10, 32))),
        ("last:1.0", 4, (0, 1, 2, 3)),
        ("last:.5", 4, (2, 3)),
        ([3, 0, 3], 4, (0, 3)),
    ],
)
def test_chosen_layers(layers: str | list[int], num_layers: int, expected: tuple[int, ...]) -> None:
    entry = parse_manifest(document(**flat_llm(layers=layers))).methods[0]
    assert entry.chosen_layers(num_layers) == expected


@pytest.mark.parametrize("layers", ["last:5", "last:0.01", [0, 4]])
def test_layers_that_the_model_has_not(layers: str | list[int]) -> None:
    entry = parse_manifest(document(**flat_llm(layers=layers))).methods[0]
    with pytest.raises(ValueError, match="layers"):
        entry.chosen_layers(4)


@pytest.mark.parametrize("text", [MINIMAL, DESIGN_EXAMPLE])
def test_written_manifest_reads_the_same(tmp_path: Path, text: str) -> None:
    manifest = load(tmp_path, text, "methods.0.ridge=1e-6", "methods.0.layers=[1, 2]", "output='1e5'")
    written = dump_manifest(manifest)
    assert load(tmp_path, written) == manifest
    assert dump_manifest(load(tmp_path, written)) == written


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc1e-_ :", max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(PLAIN)
def test_anything_written_reads_the_same(value: Any) -> None:
    assert read_yaml(write_yaml(value)) == value


def test_manifest_is_frozen_and_input_untouched() -> None:
    given = document(budget={"keep": 0.5})
    before = write_yaml(given)
    manifest = parse_manifest(given)
    assert write_yaml(given) == before
    with pytest.raises(ValueError, match="frozen"):
        manifest.seed = 3  # type: ignore[misc]


def test_semantic_fields_are_those_that_change_the_output() -> None:
    base = parse_manifest(document(calibration={"text": {"files": ["a.txt"]}})).semantic()

    def changed(**fields: Any) -> bool:
        return parse_manifest(document(**{"calibration": {"text": {"files": ["a.txt"]}}, **fields})).semantic() != base

    assert changed(seed=1)
    assert changed(budget={"keep": 0.5})
    assert changed(workers={"cpus": 2})
    assert changed(calibration={"text": {"files": ["a.txt"]}, "samples": 128})
    assert changed(**flat_llm(ridge=2.0))
    assert not changed(output="/elsewhere", run_dir="/also", model={"source": "/moved"})
    assert not changed(workers={"min": 2, "max": 4})
    assert not changed(resume={"every": 5}, evaluation={"tasks": ["piqa"]})
    # The text counts by its token ids, which the fingerprint has beside these fields: a moved file changes nothing.
    assert not changed(calibration={"text": {"files": ["moved/a.txt"]}})


def test_rounds_of_older_manifests() -> None:
    """One round is all there is now; a stored fingerprint that says so fits a manifest that does not."""

    def loss_aware(**fields: Any) -> dict[str, Any]:
        return {"methods": [{"method": "loss_aware", **fields}], "calibration": {"text": {"files": ["a.txt"]}}}

    now = parse_manifest(document(**loss_aware()))
    assert parse_manifest(document(**loss_aware(rounds=1))) == now
    stored = now.semantic()
    assert completed({**stored, "methods": [{**stored["methods"][0], "rounds": 1}]}) == completed(stored)
    (line,) = faults(**loss_aware(rounds=2))
    assert "rounds: 2 is no longer supported; correct: output" in line


@pytest.mark.parametrize("given", [80, "80%", "80 %", 80.0])
@pytest.mark.parametrize("field", ["budget.keep", "budget.bytes", "methods.0.keep", "methods.0.cache_keep"])
def test_a_percentage_is_told_its_share(field: str, given: object) -> None:
    block, _, name = field.rpartition(".")
    entry = {"method": "lorc", name: given} if block == "methods.0" else {"method": "flat_llm"}
    budget = {"budget": {name: given}} if block == "budget" else {}
    places = {"version": 1, "model": {"source": "m"}, "output": "o", "run_dir": "r"}
    with pytest.raises(InputError, match=rf"{field}: should be a share above 0, and at most 1; for 80 % give 0\.8 "):
        parse_manifest({**places, "methods": [entry], **budget})


def test_the_percentage_of_a_point_and_of_a_text_is_told_its_share() -> None:
    places = {"version": 1, "model": {"source": "m"}, "output": "o", "run_dir": "r"}
    points = [{"methods": [{"method": "svd"}], "keep": [80]}]
    with pytest.raises(InputError, match=r"points\.0\.keep\.0: .* for 80 % give 0\.8"):
        parse_sweep({**places, "points": points})
    text = [{"files": ["a"], "share": 95}, {"files": ["b"], "share": 0.05}]
    with pytest.raises(InputError, match=r"text\.0\.share: .* for 95 % give 0\.95"):
        parse_manifest({**places, "methods": [{"method": "svd"}], "calibration": {"text": text}})
