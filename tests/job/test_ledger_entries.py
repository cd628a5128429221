"""Entries that do not fit a job, or each other, are retracted before anything builds on them; all others stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from lamina.stored_lamina import StoredFormat
from manifests.entries import (
    ActivationsEntry,
    CompleteEntry,
    CurvesEntry,
    DenseEntry,
    GradientEntry,
    LayerEntry,
    MeasuredEntry,
    RanksEntry,
    StatisticsEntry,
)
from manifests.records import ArrayRecord, Curve, FormSpec, Scheme, StagedRecord, TensorDescription
from pipeline.driver.job_spec import Job
from pipeline.driver.ledger_keys import (
    COMPLETE,
    RANKS,
    activations_key,
    curves_key,
    dense_key,
    gradient_key,
    layer_key,
    measured_key,
    statistics_key,
)
from pipeline.families.registry import geometry_of, standard_config
from pipeline.job.ledger_entries import check_entries
from pipeline.rounding.schemes import packed_shapes
from stores.headers import TensorRecord
from stores.ledger import Ledger
from tests import factories
from tests.driver.simulation import make_gradient_job, make_job, make_tasks, measures
from tests.memory_storage import Memory

SHA = "0" * 64
CONFIG = standard_config(factories.make_config("llama", num_hidden_layers=2).to_dict())
LAYERS = geometry_of(CONFIG).layers
PRUNED = {role: FormSpec(form="pruned", rank=33) for role in ("gate", "up", "down")}
NARROW = {"mlp.gate_proj": (33, 48), "mlp.up_proj": (33, 48), "mlp.down_proj": (48, 33)}
SUMMARY: dict[str, Any] = {
    "layers": [],
    "counts": {},
    "seconds": {"phases": {}, "total": 1.0, "units": {}},
    "peak_bytes": {"workers": {}, "driver": 1},
    "evaluation": {},
    "output": "out",
}


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(Memory())


def job_of(**settings: Any) -> Job:
    return make_job(make_tasks(range(2)), num_layers=2, **settings)


def array(number: int = 0) -> ArrayRecord:
    return ArrayRecord(
        version=1, path=f"array/{number:032}", shape=(1,), dtype="uint8", chunks=(1,), symmetric=False,
        metadata_sha256=SHA, checksums=(),
    )  # fmt: skip


def dense_shapes(layer: int) -> dict[str, tuple[int, ...]]:
    return dict(LAYERS[layer].tensors().values())


def layer_entry(
    layer: int,
    changes: Mapping[str, tuple[int, ...] | None] | None = None,
    forms: Mapping[str, FormSpec] | None = None,
    rounded: Mapping[str, Scheme] | None = None,
) -> LayerEntry:
    """Return the entry of a layer whose file holds the tensors of the dense layer, but for `changes` of shapes."""
    shapes: dict[str, tuple[int, ...] | None] = {**dense_shapes(layer), **(changes or {})}
    shapes = {**packed_shapes({name: shape for name, shape in shapes.items() if shape is not None}, rounded or {})}
    tensors = {
        name: TensorDescription(dtype="BF16", shape=shape, sha256=SHA) for name, shape in shapes.items() if shape
    }
    staged = StagedRecord(path=f"staged/layer-{layer:05d}.{0:032}.safetensors", size=1, sha256=SHA, tensors=tensors)
    return LayerEntry(staged=staged, forms=forms or {}, groups={}, rounded=rounded or {})


def narrow(layer: int) -> dict[str, tuple[int, ...] | None]:
    return {f"model.layers.{layer}.{path}.weight": shape for path, shape in NARROW.items()}


def test_entries_that_fit_stay(ledger: Ledger, said: list[str]) -> None:
    job = job_of(shards=3, importance_shards=(0, 2), gradient_shards=(1,))
    dense = DenseEntry(cosine=((1.0, 2), (1.0, 2)), statistics={}, activations=(array(),) * 3)
    ledger.commit(dense_key(0), dense)
    ledger.commit(dense_key(1), dense.model_copy(update={"activations": None, "inputs": (None, array(), None)}))
    ledger.commit(gradient_key(1), GradientEntry(statistics={}, activations=(array(),)))
    ledger.commit(statistics_key(0), StatisticsEntry(statistics={"any": array()}))
    ledger.commit(activations_key(1), ActivationsEntry(activations=(array(),) * 3))
    ledger.commit(layer_key(0), layer_entry(0))
    ledger.commit(layer_key(1), layer_entry(1, narrow(1), PRUNED))
    importance = {0: 0.25, 1: 0.75}
    ledger.commit(RANKS, RanksEntry(ranks=ranks_of(job, importance), importance={"0": 0.25, "1": 0.75}))
    ledger.commit(COMPLETE, CompleteEntry(output="out", contract_sha256=SHA, summary=SUMMARY))
    before = ledger.keys()
    check_entries(ledger, job, CONFIG, {})
    assert (ledger.keys(), said) == (before, [])


def ranks_of(job: Job, importance: Mapping[int, float]) -> dict[str, dict[str, int]]:
    return {task.key: {"rank": 1 + round(1000 * importance[task.layer])} for task in job.tasks}


def test_an_empty_ledger(ledger: Ledger, said: list[str]) -> None:
    check_entries(ledger, job_of(), CONFIG, {})
    assert (ledger.keys(), said) == ([], [])


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"cosine": ((1.0, 2),)}, "cosine: not one sum and count for each shard"),
        ({"cosine": ((1.0, 2), (1.0, 0))}, "cosine: not one sum and count for each shard"),
        ({"activations": (array(),) * 3}, "activations: 3 of 2 shards"),
        ({"inputs": (array(), None)}, "inputs: of shards (0,), not (1,)"),
        ({"inputs": (None, array(), None)}, "inputs: of shards (1,), not (1,)"),
    ],
)
def test_a_dense_pass_of_other_shards(changes: dict[str, Any], fault: str, ledger: Ledger, said: list[str]) -> None:
    job = job_of(shards=2, gradient_shards=(1,))
    whole = DenseEntry(cosine=((1.0, 2), (1.0, 2)), statistics={}, activations=(array(),) * 2)
    ledger.commit(dense_key(0), whole.model_copy(update=changes))
    ledger.commit(dense_key(1), whole)
    check_entries(ledger, job, CONFIG, {})
    assert ledger.keys() == [dense_key(1)]
    (message,) = said
    assert message.startswith(f"ledger entry dense/00000 does not fit the job ({fault}")
    assert message.endswith("retracted, its work is done again")


@pytest.mark.parametrize("count", [1, 3])
def test_a_pass_for_importance_stores_the_hidden_states_of_its_shards_or_of_all(count: int, ledger: Ledger) -> None:
    """Those of two of three shards are neither."""
    job = job_of(shards=3, importance_shards=(1,))
    entry = DenseEntry(cosine=((1.0, 2),), statistics={}, activations=(array(),) * count)
    ledger.commit(dense_key(0), entry)
    ledger.commit(dense_key(1), entry.model_copy(update={"activations": (array(),) * 2}))
    check_entries(ledger, job, CONFIG, {})
    assert ledger.keys() == [dense_key(0)]


def test_hidden_states_and_gradients_of_other_shards(ledger: Ledger, said: list[str]) -> None:
    """Gradients are those of the shards of the backward pass, hidden states those of all."""
    job = job_of(shards=2, gradient_shards=(1,))
    for key, entry in ((activations_key(0), ActivationsEntry), (gradient_key(0), GradientEntry)):
        fields: dict[str, Any] = {"statistics": {}} if entry is GradientEntry else {}
        ledger.commit(key, entry(activations=(array(),), **fields))
        ledger.commit(type(key)(key.replace("00000", "00001")), entry(activations=(array(),) * 2, **fields))
    ledger.commit(gradient_key(2), GradientEntry(statistics={}))
    check_entries(ledger, job, CONFIG, {})
    assert ledger.keys() == [activations_key(1), gradient_key(0), gradient_key(2)]
    assert "activations: 1 of 2 shards" in said[0]
    assert "activations: 2 of 1 shards" in said[1]


@pytest.mark.parametrize(
    ("changes", "forms", "fault"),
    [
        ({}, PRUNED, "of other shapes: mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight"),
        (narrow(1), {}, "of other shapes: mlp.gate_proj.weight"),
        ({"model.layers.1.input_layernorm.weight": None}, {}, "of other shapes: input_layernorm.weight"),
        ({"model.layers.1.self_attn.k_proj.weight": (48, 32)}, {}, "of other shapes: self_attn.k_proj.weight"),
        ({}, {"gate": FormSpec(form="unheard")}, "forms: "),
        ({}, {"q": FormSpec(form="pruned", rank=3)}, "forms: "),
    ],
    ids=["wide", "narrow", "missing", "transposed", "unknown form", "form of another role"],
)
def test_a_layer_whose_file_is_not_that_of_its_forms(
    changes: dict[str, Any], forms: dict[str, FormSpec], fault: str, ledger: Ledger, said: list[str]
) -> None:
    ledger.commit(layer_key(0), layer_entry(0))
    ledger.commit(layer_key(1), layer_entry(1, changes, forms))
    check_entries(ledger, job_of(), CONFIG, {})
    assert ledger.keys() == [layer_key(0)]
    (message,) = said
    assert fault in message


def test_a_layer_that_the_model_does_not_have(ledger: Ledger) -> None:
    entry = layer_entry(1)
    ledger.commit(layer_key(2), entry)
    check_entries(ledger, job_of(), CONFIG, {})
    assert ledger.keys() == []


@pytest.mark.parametrize("levels", ["uniform", "learned"])
def test_a_rounded_layer_has_packed_tensors(levels: Any, ledger: Ledger, said: list[str]) -> None:
    """Words, scales and shapes in place of each rounded weight; those of other bits do not fit."""
    scheme = Scheme(bits=4, group=16, levels=levels)
    paths = [f"model.layers.0.{path}" for path in ("self_attn.q_proj", "mlp.down_proj")]
    whole = layer_entry(0, rounded=dict.fromkeys(paths, scheme))
    assert f"{paths[0]}.weight" not in whole.staged.tensors
    ledger.commit(layer_key(0), whole)
    other = replace_rounded(whole, dict.fromkeys(paths, scheme.model_copy(update={"bits": 8})))
    check_entries(ledger, job_of(), CONFIG, {})
    assert (ledger.keys(), said) == ([layer_key(0)], [])
    ledger.commit(layer_key(0), other)
    check_entries(ledger, job_of(), CONFIG, {})
    assert ledger.keys() == []
    assert "self_attn.q_proj.weight_packed" in said[0]


def replace_rounded(entry: LayerEntry, rounded: Mapping[str, Scheme]) -> LayerEntry:
    return entry.model_copy(update={"rounded": rounded})


def stored_weight(path: str, shape: tuple[int, int]) -> TensorRecord:
    """Return a weight of four bits in the layout of compressed-tensors: eight codes in a word of 32 bits."""
    form = StoredFormat("packed", "bfloat16", "int32", "bfloat16", bits=4, block=(1, 16))
    parts = {
        "weight_packed": ("I32", (shape[0], shape[1] // 8)),
        "weight_scale": ("BF16", (shape[0], shape[1] // 16)),
        "weight_shape": ("I64", (2,)),
    }
    records = {part: TensorRecord(f"{path}.{part}", dtype, size, "f", 0, 8) for part, (dtype, size) in parts.items()}
    return TensorRecord(f"{path}.weight", "BF16", shape, "f", 0, 8, form=form, parts=tuple(records.items()))


@pytest.mark.parametrize("damage", [False, True])
def test_a_copied_weight_keeps_the_source_s_format(damage: bool, ledger: Ledger, said: list[str]) -> None:
    """Its parts are in the layer's file, in their own shapes."""
    path = "model.layers.0.self_attn.q_proj"
    weight = stored_weight(path, (64, 48))
    parts = {at.name: at.shape for at in weight.stored}
    if damage:
        parts[f"{path}.weight_scale"] = (64, 4)
    ledger.commit(layer_key(0), layer_entry(0, {f"{path}.weight": None, **parts}))
    check_entries(ledger, job_of(), CONFIG, {weight.name: weight})
    assert ledger.keys() == ([] if damage else [layer_key(0)])
    assert len(said) == damage


def test_a_changed_weight_leaves_the_source_s_format(ledger: Ledger, said: list[str]) -> None:
    """It is stored under its own name, without the scales of the format."""
    path = "model.layers.0.self_attn.q_proj"
    codes = TensorRecord(f"{path}.weight", "F8_E4M3", (64, 48), "f", 0, 8)
    scales = TensorRecord(f"{path}.weight_scale", "BF16", (64, 1), "f", 0, 8)
    form = StoredFormat("float", "bfloat16", "float8_e4m3fn", "bfloat16")
    weight = TensorRecord(
        f"{path}.weight", "BF16", (64, 48), "f", 0, 8, form=form, parts=(("weight", codes), ("weight_scale", scales))
    )
    ledger.commit(layer_key(0), layer_entry(0))
    check_entries(ledger, job_of(), CONFIG, {weight.name: weight})
    assert (ledger.keys(), said) == ([layer_key(0)], [])


def test_a_summary_that_cannot_be_printed(ledger: Ledger, said: list[str]) -> None:
    ledger.commit(COMPLETE, CompleteEntry(output="out", contract_sha256=SHA, summary={**SUMMARY, "peak_bytes": 3}))
    check_entries(ledger, job_of(), CONFIG, {})
    assert ledger.keys() == []
    assert "ledger entry complete does not fit the job (summary: TypeError" in said[0]


def test_ranks_that_do_not_follow_from_their_importance(ledger: Ledger, said: list[str]) -> None:
    job = job_of()
    ranks = ranks_of(job, {0: 0.25, 1: 0.75})
    ledger.commit(RANKS, RanksEntry(ranks=ranks, importance={"0": 0.25, "1": 0.7}))
    check_entries(ledger, job, CONFIG, {})
    assert ledger.keys() == []
    assert said == [
        "ledger entry ranks does not fit the job (these ranks do not follow from its scores): retracted, its work is "
        "done again"
    ]


Commit = Callable[[Ledger], None]


def commit_measured(value: Any) -> Commit:
    return lambda ledger: ledger.commit(measured_key(1), MeasuredEntry(measured={"1/1/first": value}))


@pytest.mark.parametrize(("value", "kept"), [({"number": 4}, True), ({"number": 5}, False)])
def test_ranks_follow_measurements(value: Any, kept: bool, ledger: Ledger) -> None:
    job = job_of(scores=frozenset(), measures=measures([1])[:1])
    commit_measured(value)(ledger)
    ledger.commit(RANKS, RanksEntry(ranks={task.key: {"rank": 5} for task in job.tasks}, importance={}))
    check_entries(ledger, job, CONFIG, {})
    assert ledger.keys() == [measured_key(1), *[RANKS] * kept]


def test_scores_from_which_no_ranks_follow_go_with_the_ranks(ledger: Ledger, said: list[str]) -> None:
    """The measurements and curves of every layer, because any of them may be of the wrong kind."""
    job = replace(make_gradient_job(range(2)), measures=measures([1])[:1])
    curve = Curve(ranks={"rank": (1,)}, numbers=(1,), cache=(0,), loss=(0.0,))
    commit_measured("a word")(ledger)
    ledger.commit(curves_key(0), CurvesEntry(curves={"0/0/loss-mlp": curve}))
    ledger.commit(RANKS, RanksEntry(ranks={task.key: {"rank": 1} for task in job.tasks}, importance={}))
    ledger.commit(statistics_key(0), StatisticsEntry(statistics={}))
    check_entries(ledger, job, CONFIG, {})
    assert ledger.keys() == [statistics_key(0)]
    assert "no ranks follow from it: " in said[0]


def test_importance_of_no_layer(ledger: Ledger) -> None:
    """A key that is no number, as no job writes it."""
    job = job_of()
    ledger.commit(RANKS, RanksEntry(ranks=ranks_of(job, {0: 0.0, 1: 0.0}), importance={"first": 0.5}))
    check_entries(ledger, job, CONFIG, {})
    assert ledger.keys() == []
