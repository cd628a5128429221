"""Rounded weights: codes of every number of bits, and levels in tables."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lamina import LaminaConfig, LaminaForCausalLM, checking_lamina
from lamina.levels_lamina import TableEmbedding, TableLinear
from pipeline.kernels.levels import normal_levels
from pipeline.kernels.packing import scaled, unpack
from pipeline.rounding.schemes import FIELD, TABLES, packed_modules, rounded_modules, unpacked_weights
from tests.end_to_end.jobs import (
    MakeJob,
    command,
    file_digests,
    load,
    logits_of,
    read_tensors,
    relative_error,
    some_tokens,
    weight_digests,
)
from tests.end_to_end.sources import make_source

pytestmark = pytest.mark.usefixtures("inline")

SIZES = {"hidden_size": 64, "intermediate_size": 96}
FACTORS = [
    {"method": "flat_llm", "ranks": {"value": 8, "mlp": 64}, "allocation": "uniform"},
    {"method": "joint_rank_k", "mlp": False, "ranks": {"query_key": 32}, "weighting": "input"},
]
PLAIN = {"method": "loss_aware", "factors": "plain", "rank_multiple": 32}


def rounding(bits: int | str, group: int | None = 32, **more: Any) -> dict[str, Any]:
    return {"quantize": {"bits": bits, "group": group, **more}, "calibration.propagate": "dense"}


def multiplied_out(output: Path) -> dict[str, torch.Tensor]:
    """Every tensor by the name that it has without rounding."""
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    bits: dict[str, int] = {}
    for group in config["config_groups"].values():
        assert group["format"] == "pack-quantized"  # by which compressed-tensors before 0.20 reads tables, too
        bits |= dict.fromkeys(group["targets"], group["weights"]["num_bits"])
    tensors = read_tensors(output)
    for path in [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]:
        words, scales, shape = (tensors.pop(f"{path}.weight_{part}") for part in ("packed", "scale", "shape"))
        codes = unpack(words, bits.get(path) or bits["Linear"], int(shape[1]))
        tensors[f"{path}.weight"] = scaled(codes, scales)
    return tensors


@pytest.mark.sample(2)
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


def test_three_bits_need_a_newer_package(wide: Path, job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older ones load them and fail in the first forward pass, or read other codes."""
    pytest.importorskip("compressed_tensors")
    made = job(wide, methods=[], budget=None, **rounding(3), calibration=None)
    assert made.run().code == 0
    monkeypatch.setattr(checking_lamina, "version", lambda name: {"compressed-tensors": "0.17.0"}[name])
    with pytest.raises(ImportError, match=r"weights of 3 bits need compressed-tensors 0\.20 or newer"):
        load(made.output)


def load_plain(output: Path, config: dict[str, Any]) -> Any:
    """The checkpoint's own class with the weights multiplied out here, without compressed-tensors."""
    model = LaminaForCausalLM(LaminaConfig(**{k: v for k, v in config.items() if k != "quantization_config"}))
    missing, unexpected = model.load_state_dict(multiplied_out(output), strict=True)
    assert not missing
    assert not unexpected
    return model.eval()


def test_feedback_is_nearer_than_nearest(wide: Path, job: MakeJob) -> None:
    """Of the dense model's layers, on text; to nearest takes none."""
    fed, nearest, free = (
        job(wide, methods=[], budget=None, **{**rounding(4), **changes})
        for changes in ({}, {"quantize.feedback": False}, {"calibration": None})
    )
    ends = [made.run() for made in (fed, nearest, free)]
    assert [ended.code for ended in ends] == [0, 0, 0]
    assert ["every number goes to the nearest code" in ended.err for ended in ends] == [False, False, True]
    assert file_digests(nearest.output).items() >= weight_digests(free.output).items()
    ids = torch.tensor(fed.compression()["compared"]["tokens"])
    dense = hidden_states(AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval(), ids)
    first = []
    for made in (fed, nearest):
        config = json.loads((made.output / "config.json").read_text())
        first.append(relative_error(hidden_states(load_plain(made.output, config), ids), dense))
    assert first[0] < 0.9 * first[1]


@pytest.mark.parametrize("methods", [[], FACTORS], ids=["alone", "factors"])
def test_feedback_on_both_sides(wide: Path, job: MakeJob, methods: list[Any]) -> None:
    """By the gradients at their outputs; of first factors and of value heads in a basis there are none."""
    made = job(wide, methods=methods, budget=None, **rounding(4, feedback="both"))
    assert made.run().code == 0
    verified = command("verify", str(made.output), "--source", str(wide), "--json")
    assert verified.code == 0, verified.out + verified.err
    groups = [group for layer in made.compression()["layers"] for group in layer["groups"].values()]
    assert not any("nearest" in group for group in groups)
    one_sided = {path for group in groups for path in group.get("one_sided", ())}
    assert one_sided == ({"q.first", "v"} if methods else set())
    before = file_digests(made.output)
    for entry in (made.run_dir / "ledger").glob("layer.00001.*"):
        entry.unlink()
    assert made.run().code == 0
    assert file_digests(made.output) == before


def hidden_states(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """What leaves the first layer."""
    with torch.no_grad():
        states: torch.Tensor = model.model(ids, output_hidden_states=True).hidden_states[1]
    return states


def test_a_killed_job_goes_on_and_one_of_other_bits_reuses_the_pass(wide: Path, job: MakeJob) -> None:
    """The same bytes whether solved at once, from the ledger, or from the statistics of a job of other bits."""
    whole = job(wide, methods=[], budget=None, **rounding(4, what="all"))
    assert whole.run().code == 0
    reported = command("report", str(whole.run_dir))  # of groups outside the layers, too
    assert reported.code == 0, reported.err
    again = job(wide, methods=[], budget=None, **rounding(8, what="all"))
    assert again.run().code == 0
    for entry in (again.run_dir / "ledger").glob("layer.00001.*"):
        entry.unlink()
    again.changes = {**again.changes, **rounding(4, what="all")}
    found = again.run().json
    assert found["seconds_saved"] > 0.0
    assert file_digests(again.output) == file_digests(whole.output)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"calibration": None, "quantize.feedback": True}, "quantize.feedback: true needs calibration"),
        ({"calibration": None, "quantize.feedback": "both"}, "quantize.feedback: both needs calibration"),
        ({"quantize.feedback": "both", "calibration.propagate": "compressed"}, "set calibration.propagate: dense, not"),
        (
            {"quantize.feedback": "both", "methods": [{**PLAIN, "correct": "output", "keep": 0.8}]},
            "methods.0 (loss_aware) rounds behind its corrected or trained layers",
        ),
        ({"quantize.correct": "output", "calibration": None}, "quantize.correct: output passes calibration text"),
        (
            {"quantize.correct": "output", "calibration.propagate": "compressed"},
            "give calibration, with propagate: dense",
        ),
        ({"quantize.correct": "output", "quantize.feedback": False}, "leave out feedback: false, or correct"),
        ({"quantize.correct": "output", "quantize.bits": "auto"}, "correct: output needs given bits"),
        (
            {"quantize.correct": "output", "methods": [{**PLAIN, "keep": 0.8}]},
            "the methods claim all matrices that it would correct",
        ),
        ({"model.source": "thin"}, "has less than 16 in common with what is read: q reads 40 numbers, k reads"),
        ({"model.source": "tied", "quantize.what": "all"}, "quantize.what: all: this model ties its head"),
        ({"quantize.bits": 5}, "quantize.bits: should be 8, 4, 3, 2 or 'auto'"),
        ({"quantize.symmetric": False}, "only symmetric codes are stored"),
        ({"methods": [{"method": "lestd", "keep": 0.8}]}, "methods.0 (lestd) stores a sparse core"),
        ({"methods": [{"method": "flat_llm", "ranks": {"mlp": 40}}]}, "methods.0.ranks.mlp: groups of 32"),
        ({"methods": [{"method": "flat_llm", "ranks": {"value": 2}}]}, "heads of 2 are 8 numbers that o reads"),
        ({"methods": [{"method": "flat_llm", "keep": 0.8, "rank_multiple": 24}]}, "budget.multiple: 96 would"),
        ({"budget": {"keep": 0.8}}, "methods: [] removes no numbers"),
    ],
)
@pytest.mark.usefixtures("no_ray")
def test_what_cannot_be_rounded_is_refused(
    wide: Path, job: MakeJob, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    others = {"thin": {"hidden_size": 40}, "tied": {**SIZES, "tie_word_embeddings": True}}
    own = others.get(changes.get("model.source", ""))
    source = wide if own is None else make_source(tmp_path / "other", "llama", 1, **own)
    changes = {name: value for name, value in changes.items() if name != "model.source"}
    ended = job(source, **{"methods": [], "budget": None, **rounding(4), **changes}).run()
    assert ended.code == 2
    assert says in ended.err, ended.err


def test_widths_that_groups_do_not_divide(job: MakeJob, tmp_path: Path) -> None:
    """Groups of what they have in common, and the job says so; the others as they were asked for."""
    source = make_source(tmp_path / "odd", "llama", 1, hidden_size=64, intermediate_size=112)
    made = job(source, methods=[], budget=None, **rounding(4))
    ended = made.run()
    assert (
        "does not divide the 112 numbers that down reads; its groups, where it stays that wide, are of 16" in ended.err
    )
    config = json.loads((made.output / "config.json").read_text())["quantization_config"]
    groups = {group["weights"]["group_size"]: group["targets"] for group in config["config_groups"].values()}
    assert groups[16] == ["model.layers.0.mlp.down_proj"]
    assert sorted(groups) == [16, 32]
    if find_spec("compressed_tensors"):
        ids = some_tokens(320)
        plain = load_plain(made.output, json.loads((made.output / "config.json").read_text()))
        assert relative_error(logits_of(load(made.output), ids), logits_of(plain, ids)) < 1e-5


@pytest.mark.parametrize("methods", [[{"method": "loss_aware"}], [{"method": "flat_llm"}]], ids=["loss", "flat"])
def test_a_budget_of_bytes_is_kept(wide: Path, job: MakeJob, methods: list[Any]) -> None:
    """By the bytes of the files; groups leave few sizes to choose from in so small a model."""
    made = job(wide, methods=methods, budget={"bytes": 0.14}, **rounding(4))
    assert made.run().code == 0

    def layer_bytes(directory: Path) -> int:
        return sum(t.nbytes for name, t in read_tensors(directory).items() if name.startswith("model.layers."))

    assert 0.1 < layer_bytes(made.output) / layer_bytes(wide) <= 0.14


@pytest.mark.skipif(not find_spec("compressed_tensors"), reason="transformers reads codes by compressed-tensors")
def test_a_head_that_transformers_names_otherwise_is_no_code(tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", "gpt_neox", layers=2)
    made = job(source, methods=[], budget=None, **rounding(4))
    assert made.run().code == 0
    assert command("export", str(made.output), "--to", "stock", str(tmp_path / "stock")).code == 0
    ids = some_tokens(320)
    assert relative_error(logits_of(load(tmp_path / "stock"), ids), logits_of(load(made.output), ids)) < 1e-5


@pytest.mark.parametrize("methods", [[], FACTORS], ids=["none", "factors"])
def test_exports(wide: Path, job: MakeJob, methods: list[Any]) -> None:
    """`dense` has the weights multiplied out; `stock` keeps the codes of what is whole or pruned."""
    made = job(wide, methods=methods, budget=None, **rounding(4))
    assert made.run().code == 0
    config, ids = json.loads((made.output / "config.json").read_text()), some_tokens(320)
    meant = logits_of(load_plain(made.output, config), ids)
    dense, stock = made.root / "dense", made.root / "stock"
    for target, directory in (("dense", dense), ("stock", stock)):
        ended = command("export", str(made.output), "--to", target, str(directory), "--json")
        assert ended.code == 0, ended.err
    assert not any("packed" in name for name in read_tensors(dense))
    assert relative_error(logits_of(load(dense), ids), meant) < 1e-5
    packed = {name.rsplit(".", 2)[-2] for name in read_tensors(stock) if name.endswith("packed")}
    mlp = {"gate_proj", "up_proj", "down_proj"}
    assert packed == (mlp if methods else mlp | {"q_proj", "k_proj", "v_proj", "o_proj"})
    written = json.loads((stock / "config.json").read_text())
    assert written["model_type"] == "llama"
    assert ("model.layers.0.self_attn.v_proj" in written["quantization_config"]["ignore"]) == bool(methods)
    if find_spec("compressed_tensors"):
        assert relative_error(logits_of(load(stock), ids), meant) < 1e-5


def test_bits_are_chosen_where_a_role_is_skipped(wide: Path, job: MakeJob) -> None:
    """LoRC's values change `o`, whose inputs nobody sums where it is skipped."""
    made = job(
        wide, methods=[{"method": "lorc", "allocation": "loss"}], budget={"bytes": 0.6}, **rounding("auto", skip=["o"])
    )
    made.run().json  # noqa: B018 - asserts the exit code
    assert not [name for name in read_tensors(made.output) if "o_proj.weight_packed" in name]
    assert command("verify", str(made.output), "--source", str(wide), "--json").code == 0


@pytest.mark.parametrize("methods", [[], [{"method": "loss_aware"}]], ids=["none", "loss"])
def test_bits_are_chosen_with_ranks(wide: Path, job: MakeJob, methods: list[Any]) -> None:
    """Within the bytes; where sizes leave a choice, parts differ. transformers reads the mixture."""
    made = job(wide, methods=methods, budget={"bytes": 0.18}, **rounding("auto"))
    assert made.run().code == 0, made.run().err
    layers = [tensor.nbytes for name, tensor in read_tensors(made.output).items() if name.startswith("model.layers.")]
    dense = [tensor.nbytes for name, tensor in read_tensors(wide).items() if name.startswith("model.layers.")]
    assert 0.15 < sum(layers) / sum(dense) <= 0.18
    config = json.loads((made.output / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"].values()
    assert len({group["weights"]["num_bits"] for group in groups}) > 1
    chosen = [found["ranks"]["bits"] for layer in made.compression()["layers"] for found in layer["groups"].values()]
    assert {group["weights"]["num_bits"] for group in groups} == set(chosen)
    assert command("verify", str(made.output), "--source", str(wide), "--json").code == 0
    if find_spec("compressed_tensors"):
        ids = some_tokens(320)
        assert relative_error(logits_of(load(made.output), ids), logits_of(load_plain(made.output, config), ids)) < 1e-5


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"budget": {"keep": 0.5}}, "quantize.bits: auto chooses within a size; give budget.bytes"),
        ({"calibration": None}, "quantize.bits: auto follows predicted loss"),
        ({"calibration.propagate": "compressed"}, "calibration with propagate: dense"),
        ({"quantize.group": None}, "counts a scale for each group"),
        ({"methods": [{"method": "flat_llm"}]}, "methods.0 (flat_llm) needs allocation: loss"),
        ({"budget": {"bytes": 0.05}}, "reachable is"),
    ],
)
@pytest.mark.usefixtures("no_ray")
def test_bits_that_cannot_be_chosen(wide: Path, job: MakeJob, changes: dict[str, Any], says: str) -> None:
    base = {"methods": [], "budget": {"bytes": 0.2}, **rounding("auto")}
    ended = job(wide, **{**base, **changes}).run()
    assert (ended.code, says in ended.err) == (2, True), ended.err


@pytest.mark.parametrize("bits", [4, "auto"])
def test_embeddings_and_head_too(wide: Path, job: MakeJob, bits: int | str) -> None:
    """`what: all`: transformers loads them, `verify` and exports follow; the budget of the whole model counts them."""
    budget = {"bytes": 0.24, "scope": "model"} if bits == "auto" else {"bytes": 0.5, "scope": "model"}
    made = job(wide, methods=[], budget=budget, **rounding(bits, what="all"))
    ended = made.run()
    assert ended.code == 0, ended.err
    assert 0.0 < ended.json["held_out"]["divergence"] < 0.5
    tensors, config = read_tensors(made.output), json.loads((made.output / "config.json").read_text())
    assert {name.partition(".weight_")[0] for name in tensors if name.endswith("_packed")} >= {
        "model.embed_tokens",
        "lm_head",
    }
    stored, dense = (sum(tensor.nbytes for tensor in read_tensors(place).values()) for place in (made.output, wide))
    assert stored / dense <= budget["bytes"]
    groups = made.compression()["layers"][-1]["groups"]
    assert 0.0 < groups["head"]["rounding_error"] < 0.1
    assert "nearest" not in groups["head"]
    verified = command("verify", str(made.output), "--source", str(wide), "--json")
    assert verified.code == 0, verified.out + verified.err
    ids = some_tokens(320)
    meant = logits_of(load_plain(made.output, config), ids)
    for target in ("dense", "stock"):
        assert command("export", str(made.output), "--to", target, str(made.root / target)).code == 0
    assert "lm_head.weight" in read_tensors(made.root / "stock")
    assert relative_error(logits_of(load(made.root / "dense"), ids), meant) < 1e-5
    if find_spec("compressed_tensors"):
        assert relative_error(logits_of(load(made.output), ids), meant) < 1e-5
        assert relative_error(logits_of(load(made.root / "stock"), ids), meant) < 1e-5


@pytest.mark.nightly
def test_corrections_make_up_for_rounding(wide: Path, job: MakeJob) -> None:
    """What the codes of a part leave is missing where the next is solved; `verify` computes the same."""
    asked = {**rounding(3, what="all"), "budget": {"keep": 0.8}, "calibration.samples": 48}  # fewer: noise
    corrected, plain = (job(wide, methods=[{**PLAIN, "correct": correct}], **asked) for correct in ("output", "none"))
    lost = [made.run().json["held_out"]["divergence"] for made in (corrected, plain)]
    assert lost[0] < 0.98 * lost[1]
    layers = corrected.compression()["layers"]
    assert all(found["rounding_error"] > 0.0 for layer in layers for found in layer["groups"].values())
    assert not any("nearest" in found for layer in layers for found in layer["groups"].values())
    names = read_tensors(corrected.output)
    assert not any(name.endswith("_proj.weight") for name in names)
    assert {name for name in names if name.endswith("_packed")} == {
        name for name in read_tensors(plain.output) if name.endswith("_packed")
    }
    assert command("verify", str(corrected.output), "--source", str(wide), "--json").code == 0


def test_rounded_layers_are_corrected_without_a_method(wide: Path, job: MakeJob) -> None:
    """Every matrix is fitted behind the rounded ones before it. No pass sums moments before this walk."""
    asked = {"budget": None, "calibration.samples": 48, "evaluation": {}}
    corrected, plain = (
        job(wide, methods=[], **asked, **rounding(3, correct=correct)) for correct in ("output", "none")
    )
    runs = [made.run() for made in (corrected, plain)]
    lost = [ended.json["held_out"]["divergence"] for ended in runs]
    assert lost[0] < 0.95 * lost[1]
    few = "with fewer than 4, corrections were not measured"
    assert not any(few in ended.err for ended in runs)
    short = job(wide, methods=[], **{**asked, "calibration.samples": 4}, **rounding(3, correct="output"))
    assert few in command("plan", str(short.manifest)).out
    assert not [*(corrected.run_dir / "ledger").glob("dense.*")]
    groups = corrected.compression()["layers"][1]["groups"].values()
    assert not any("nearest" in found for found in groups)
    assert read_tensors(corrected.output).keys() == read_tensors(plain.output).keys()
    assert command("verify", str(corrected.output), "--source", str(wide), "--json").code == 0
    before = file_digests(corrected.output)
    for entry in (corrected.run_dir / "ledger").glob("layer.00001.*"):
        entry.unlink()
    assert corrected.run().code == 0
    assert file_digests(corrected.output) == before


SKIPPED = {
    "keys alone": [{"method": "lorc", "allocation": "loss"}],
    "queries with keys": [{"method": "joint_rank_k", "mlp": False, "allocation": "loss"}],
}


@pytest.mark.parametrize("methods", SKIPPED.values(), ids=SKIPPED)
def test_bits_are_chosen_where_keys_are_skipped(wide: Path, job: MakeJob, methods: list[Any]) -> None:
    made = job(wide, methods=methods, budget={"bytes": 0.7}, **rounding("auto", skip=["k"]))
    ended = made.run("--debug")
    assert ended.code == 0, ended.err
    assert not [name for name in read_tensors(made.output) if "k_proj" in name and name.endswith("weight_packed")]
    assert command("verify", str(made.output), "--source", str(wide), "--json").code == 0


def on_levels(bits: int | str, levels: str, **more: Any) -> dict[str, Any]:
    return {"quantize": {"bits": bits, "levels": levels, **more}, "calibration.propagate": "dense", "budget": None}


def config_of(output: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((output / "config.json").read_text())
    return config


def plain_model(output: Path) -> Any:
    """The checkpoint's own class with unrounded weights, which are multiplied out here."""
    config, tensors = config_of(output), read_tensors(output)
    weights = unpacked_weights(tensors, rounded_modules(config, packed_modules(tensors)))
    fields = {name: value for name, value in config.items() if name not in (FIELD, TABLES)}
    model = LaminaForCausalLM(LaminaConfig(**fields))
    model.load_state_dict(weights, strict=True)
    return model.eval()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("methods", "bits", "levels", "more"),
    [
        ([], 4, "normal", {}),
        ([], 3, "learned", {"what": "all"}),
        ([PLAIN], 2, "learned", {"skip": ["v"]}),
        ([{"method": "loss_aware", "correct": "output"}], 4, "learned", {"what": "all"}),
        ([], 8, "normal", {"group": None}),
        ([], 4, "learned", {"feedback": False}),
    ],
    ids=["4", "3", "2", "corrected", "8", "nearest"],
)
def test_transformers_loads_levels_as_meant(
    wide: Path, job: MakeJob, methods: list[Any], bits: int, levels: str, more: dict[str, Any]
) -> None:
    budget = {"keep": 0.8} if methods else None
    made = job(wide, methods=methods, **{**on_levels(bits, levels, **more), "budget": budget})
    held_out = made.run().json["held_out"]
    assert held_out is None if more.get("feedback") is False else 0.0 < held_out["divergence"] < 1.0
    config, model, ids = config_of(made.output), load(made.output), some_tokens(320)
    assert FIELD not in config
    kinds = {type(module) for module in model.modules()} & {TableLinear, TableEmbedding}
    assert kinds == ({TableLinear, TableEmbedding} if more.get("what") else {TableLinear})
    assert {scheme["levels"] for scheme in config[TABLES].values()} == {levels}
    assert not any(path.endswith("v_proj") for path in config[TABLES]) or "skip" not in more
    logits = logits_of(model, ids)
    assert relative_error(logits, logits_of(plain_model(made.output), ids)) < 1e-5
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
    for end in range(ids.shape[1], tokens.shape[1]):
        assert torch.equal(logits_of(model, tokens[:, :end])[:, -1].argmax(-1), tokens[:, end])
    verified = command("verify", str(made.output), "--source", str(wide), "--json")
    assert verified.code == 0, verified.out + verified.err
    if levels == "normal":
        tables = [tensor for name, tensor in read_tensors(made.output).items() if name.endswith("weight_levels")]
        assert all(torch.equal(table, normal_levels(bits).to(table.dtype)) for table in tables)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_counts_tables(dtype: torch.dtype, tmp_path: Path, job: MakeJob) -> None:
    """In the checkpoint's dtype."""
    source = make_source(tmp_path / "source", "llama", layers=2, dtype=dtype, **SIZES)
    made = job(source, methods=[], **on_levels(4, "learned", what="all"))
    planned = command("plan", str(made.write().manifest), "--json")
    assert planned.code == 0, planned.err
    assert made.run().code == 0
    stored = sum(tensor.nbytes for tensor in read_tensors(made.output).values())
    assert json.loads(planned.out)["output_bytes"] == stored


def test_exports_of_levels(wide: Path, job: MakeJob) -> None:
    """Multiplied out, `stock` and `dense` give the same logits; `stock` and `gguf` refuse tables unless asked."""
    made = job(wide, methods=[], **on_levels(4, "learned", what="all"))
    assert made.run().code == 0
    meant, ids = plain_model(made.output), some_tokens(320)
    for target in ("stock", "gguf"):
        refused = command("export", str(made.output), "--to", target, str(made.root / "refused"))
        assert refused.code == 2, refused.err
        assert "learned levels (quantize.levels) of" in refused.err
        assert "--multiply-out" in refused.err
    for target, more in (("dense", ()), ("stock", ("--multiply-out",))):
        assert command("export", str(made.output), "--to", target, *more, str(made.root / target)).code == 0
        model = AutoModelForCausalLM.from_pretrained(made.root / target, dtype=torch.float32).eval()
        assert relative_error(logits_of(model, ids), logits_of(meant, ids)) < 1e-5


def test_normal_levels_of_four_bits_are_exported_as_nf4(wide: Path, job: MakeJob) -> None:
    """Read by hand as bitsandbytes does: the high half of a byte first, an absmax for each block of the flat weight."""
    made = job(wide, methods=[], **on_levels(4, "normal", skip=["v"]))
    assert made.run().code == 0
    stock = made.root / "stock"
    assert command("export", str(made.output), "--to", "stock", str(stock)).code == 0
    tensors, ours = read_tensors(stock), plain_model(made.output).state_dict()
    quantization = config_of(stock)["quantization_config"]
    assert "model.layers.0.self_attn.v_proj" in quantization["llm_int8_skip_modules"]
    for name in [name.removesuffix(".absmax") for name in tensors if name.endswith(".absmax")]:
        state = json.loads(bytes(tensors[f"{name}.quant_state.bitsandbytes__nf4"].tolist()))
        packed = tensors[name].flatten()
        levels = tensors[f"{name}.quant_map"][torch.stack((packed >> 4, packed & 15), dim=1).flatten().long()]
        weight = levels.unflatten(0, (-1, state["blocksize"])) * tensors[f"{name}.absmax"][:, None]
        meant = ours[name]
        assert relative_error(weight.reshape(state["shape"]), meant) < 0.004  # levels are stored in bfloat16
        del ours[name]
    assert not [name for name in ours if name.endswith(("q_proj.weight", "down_proj.weight"))]
    if find_spec("bitsandbytes"):
        ids = some_tokens(320)
        logits = logits_of(AutoModelForCausalLM.from_pretrained(stock, dtype=torch.float32).eval(), ids)
        assert relative_error(logits, logits_of(plain_model(made.output), ids)) < 0.02


def test_kinds_are_chosen_by_error(wide: Path, job: MakeJob) -> None:
    """Codes of uniform levels stay in the layout that engines have kernels for."""
    made = job(wide, methods=[], **on_levels(8, "auto"))
    assert made.run().code == 0
    config = config_of(made.output)
    kinds = {scheme["levels"] for scheme in config.get(TABLES, {}).values()}
    assert "normal" not in kinds  # of so many levels they are the worst
    assert FIELD in config or kinds == {"learned"}
    assert command("verify", str(made.output), "--source", str(wide), "--json").code == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("levels", ["learned", "auto"])
@pytest.mark.nightly
def test_bits_of_levels_are_chosen_with_ranks(wide: Path, job: MakeJob, levels: str) -> None:
    """Within the bytes, tables counted."""
    made = job(wide, methods=[{"method": "loss_aware"}], **{**on_levels("auto", levels), "budget": {"bytes": 0.19}})
    assert made.run().code == 0, made.run().err
    layers, dense = (
        sum(tensor.nbytes for name, tensor in read_tensors(place).items() if name.startswith("model.layers."))
        for place in (made.output, wide)
    )
    assert 0.15 < layers / dense <= 0.19
    assert command("verify", str(made.output), "--source", str(wide), "--json").code == 0


def test_a_killed_job_goes_on_with_the_same_bytes(wide: Path, job: MakeJob) -> None:
    whole = job(wide, methods=[], **on_levels(3, "learned"))
    assert whole.run().code == 0
    again = job(wide, methods=[], **on_levels(3, "uniform"))
    assert again.run().code == 0
    for entry in (again.run_dir / "ledger").glob("layer.00001.*"):
        entry.unlink()
    again.changes = {**again.changes, **on_levels(3, "learned")}
    assert again.run().json["seconds_saved"] > 0.0
    assert file_digests(again.output) == file_digests(whole.output)
