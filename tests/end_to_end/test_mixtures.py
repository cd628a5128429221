"""Whole jobs on mixtures of experts: every method, killed and resumed, few tokens."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests import factories
from tests.end_to_end.children import Child, Hook
from tests.end_to_end.clusters import head_node
from tests.end_to_end.jobs import (
    Job,
    MakeJob,
    command,
    file_digests,
    load,
    logits_of,
    read_tensors,
    relative_error,
    some_tokens,
)
from tests.end_to_end.sources import make_source
from tests.end_to_end.test_methods import decodes_as_it_prefills
from workers import cluster

inline = pytest.mark.usefixtures("inline")
FAMILIES = tuple(factories.MIXTURES)[:5]
LATER = tuple(factories.MIXTURES)[5:]
COPIED = (*factories.CHUNKED, "kimi_linear", "nemotron_h")  # whose attention is copied
DENSE = {"calibration.propagate": "dense"}
EXPERTS_ALONE = {"method": "loss_aware", "attention": False, "query_key": False}
ENTRIES: dict[str, list[dict[str, Any]]] = {
    "loss-aware": [{"method": "loss_aware"}],
    "flat": [{"method": "flat_llm"}],
    "flat-by-loss": [{"method": "flat_llm", "allocation": "loss"}],
    "joint": [{"method": "joint_rank_k", "query_key": "none", "mlp": True}],
    "lestd": [{"method": "lestd", "target": "mlp"}],
    "svd-llm": [{"method": "svd_llm"}],
    "magnitude": [{"method": "magnitude"}],
    "heapr-by-loss": [{"method": "heapr", "refit": True}],
}
LATENT_KEYS = {"lorc": [{"method": "lorc"}]}
FULL = ("loss_aware", "flat_llm", "svd", "svd_llm", "magnitude")


@pytest.mark.sample(2)
@inline
@pytest.mark.parametrize(
    ("name", "family"),
    [
        *((name, family) for i, name in enumerate(ENTRIES) for j, family in enumerate(FAMILIES) if (i + j) % 3 == 0),
        *(
            pytest.param(name, family, marks=() if i % len(LATER) == j and i < len(LATER) else pytest.mark.nightly)
            for i, name in enumerate(ENTRIES)
            for j, family in enumerate(LATER)
        ),
        ("lorc", "hunyuan_v1_moe"),  # whose keys are normed once they are read and rotated
    ],
)
def test_a_method_on_a_mixture(name: str, family: str, tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", family, layers=2)
    changes: dict[str, Any] = {"quantize": {"bits": 8, "group": None}} if name == "flat" else {}
    changes |= DENSE if "loss" in name else {}
    changes |= {"budget.keep": 0.9} if name in LATENT_KEYS else {}
    made = job(source, methods=(ENTRIES | LATENT_KEYS)[name], **changes)
    made.run().json  # noqa: B018 - asserts the exit code
    assert command("verify", str(made.output), "--source", str(source), "--bound", "10").code == 0
    decodes_as_it_prefills(load(made.output), source)
    untouched = [name for name in read_tensors(source) if re.search(r"(mlp|sparse_moe)\.(gate|router)\.", name)]
    assert untouched
    before, after = read_tensors(source), read_tensors(made.output)
    assert all(torch.equal(before[name], after[name]) for name in untouched), "a router is never changed"


@pytest.mark.sample(1)
@inline
@pytest.mark.parametrize(("method", "family"), [*zip(FULL, FAMILIES, strict=True), *zip(FULL, LATER, strict=False)])
def test_full_rank_is_the_source(method: str, family: str, tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", family, layers=2)
    made = job(source, methods=[{"method": method, "keep": 1.0}], budget=None, **DENSE)
    made.run().json  # noqa: B018 - asserts the exit code
    ids_BT = some_tokens(300)
    assert relative_error(logits_of(load(made.output), ids_BT), logits_of(load(source), ids_BT)) < 1e-5


@pytest.mark.nightly
@pytest.mark.usefixtures("shared_ray")
def test_the_numbers_of_workers_and_of_experts_they_hold_change_no_byte(tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", "qwen2_moe", layers=2)
    one, two = (
        job(source, methods=[{"method": "loss_aware"}], **DENSE, **{"workers.max": n, "workers.experts": experts})
        for n, experts in ((1, 100), (2, 2))
    )
    assert one.run().code == two.run().code == 0
    assert file_digests(one.output) == file_digests(two.output)


@pytest.mark.ray
@pytest.mark.nightly  # half a minute each
@pytest.mark.parametrize(
    ("entry", "propagate"),
    [
        ({"method": "loss_aware"}, "dense"),
        ({"method": "loss_aware", "shapes": "stock"}, "dense"),
        ({"method": "flat_llm"}, "compressed"),
    ],
)
def test_five_workers_change_no_byte(
    entry: dict[str, Any], propagate: str, tmp_path: Path, job: MakeJob, inline: None
) -> None:
    source = make_source(tmp_path / "source", "qwen3_moe", layers=2)
    settings = {"calibration.propagate": propagate, "calibration.shards": 6, "workers.experts": 2}
    one, *others = (job(source, methods=[entry], **settings, **{"workers.max": n, "workers.min": n}) for n in (1, 2, 5))
    assert one.run().code == 0
    with head_node(5, "--include-dashboard=false") as address:
        for made in others:
            arguments = [str(made.manifest), "--address", address]
            child = Child("run", arguments, made.root / "log", inline=False, prepare=cluster._listen_on_loopback)
            assert child.end(240) == 0, child.said
            assert file_digests(made.output) == file_digests(one.output)


@pytest.mark.nightly  # `test_damage.py` has a sample
@inline
def test_kills_change_no_byte(tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", "qwen3_moe", layers=2)
    whole, killed = (
        job(source, methods=[{"method": "loss_aware"}], **DENSE, **{"workers.experts": n}) for n in (100, 2)
    )
    assert whole.run().code == 0
    expected, runs = file_digests(whole.output), 0
    while True:
        child = Child("run", [str(killed.manifest)], killed.root / "log", Hook("commit", nth=4, after=runs % 2 == 1))
        runs += 1
        if (code := child.end()) == 0:
            break
        assert code == -signal.SIGKILL, child.said
    assert runs > 2
    assert file_digests(killed.output) == expected


SLICED = [
    ({"method": "flat_llm"}, "compressed", "deepseek_v3"),
    ({"method": "svd_llm"}, "dense", "deepseek_v3"),
    pytest.param({"method": "flat_llm", "attention": False}, "compressed", "nemotron_h", marks=pytest.mark.nightly),
    pytest.param(EXPERTS_ALONE, "dense", "nemotron_h", marks=pytest.mark.nightly),
]


@pytest.mark.sample(1)
@inline
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("entry", "propagate", "family"), SLICED)
def test_slices_of_experts_change_no_byte(
    entry: dict[str, Any], propagate: str, family: str, keep: bool, tmp_path: Path, job: MakeJob
) -> None:
    source = make_source(tmp_path / "source", family, layers=2)
    settings = {"calibration.propagate": propagate, "statistics.keep": keep}
    whole, sliced = (job(source, methods=[entry], **settings, **{"workers.experts": n}) for n in (100, 3))
    assert whole.run().code == sliced.run().code == 0
    assert file_digests(whole.output) == file_digests(sliced.output)


@inline
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("entry", "family"),
    [
        ({"method": "loss_aware", "shapes": "stock"}, "qwen3_moe"),
        ({"method": "merge_experts", "refit": True}, "gpt_oss"),  # with biases
        ({"method": "loss_aware", "shapes": "layer"}, "deepseek_v3"),
        ({"method": "reap", "refit": True}, "mixtral"),
        ({"method": "frequency"}, "qwen3_moe"),
    ],
)
def test_experts_that_are_chosen_together_are_read_one_at_a_time(
    entry: dict[str, Any], family: str, tmp_path: Path, job: MakeJob
) -> None:
    source = make_source(tmp_path / "source", family, layers=2)
    whole, sliced = (
        job(source, methods=[entry], **DENSE, **{"budget.scope": "experts", "workers.experts": n}) for n in (100, 1)
    )
    assert whole.run().code == sliced.run().code == 0
    assert file_digests(whole.output) == file_digests(sliced.output)


def one_sided(directory: Path, family: str = "qwen3_moe", **sizes: Any) -> Path:
    """A mixture whose router gives all experts one score, so that every token passes the same two."""
    source = make_source(directory, family, layers=2, **sizes)
    for shard in source.glob("*.safetensors"):
        tensors = load_file(shard)
        for name in tensors:
            if name.endswith("mlp.gate.weight"):
                tensors[name] = torch.zeros_like(tensors[name])
        save_file(tensors, shard, metadata={"format": "pt"})
    return source


@inline
def test_an_expert_without_tokens_is_named_and_cut_by_tokens_of_others(tmp_path: Path, job: MakeJob) -> None:
    source = one_sided(tmp_path / "source")
    made = job(source, methods=[EXPERTS_ALONE], **DENSE, **{"budget.keep": 0.8})
    made.run().json  # noqa: B018 - asserts the exit code
    written = json.loads((made.output / "config.json").read_text())
    assert str(made.ledger("layer/00000")).count("'unseen'") == 4
    log = next((made.run_dir / "logs").glob("*.log")).read_text()
    assert re.search(r"compress layer 0 committed \(experts: .*no tokens for (\d, ){3}\d", log)
    assert command("report", str(made.run_dir)).code == 0
    page = (made.run_dir / "report.html").read_text()
    for caption in ("Calibration tokens that the router sent", "Share of its channels", "chosen size of each expert"):
        assert caption in page
    stored = sum(tensor.numel() for tensor in read_tensors(made.output).values())
    whole = sum(tensor.numel() for tensor in read_tensors(source).values())
    outside = sum(tensor.numel() for name, tensor in read_tensors(source).items() if ".layers." not in name)
    assert any(written["forms"])
    assert stored - outside <= 0.8 * (whole - outside), "experts without tokens count within the budget"


@inline
def test_one_text_alone_for_a_small_budget_is_a_warning(tmp_path: Path, job: MakeJob) -> None:
    source, said = make_source(tmp_path / "source", "qwen3_moe", layers=2), "a single source decides which experts"
    made = job(source, methods=[EXPERTS_ALONE], **DENSE, budget={"keep": 0.6, "scope": "experts"})
    (warning,) = [warning for warning in made.run().json["warnings"] if said in warning]
    assert f"at a budget of 0.6: all tokens of every expert are of {made.text};" in warning
    assert warning in next((made.run_dir / "logs").glob("*.log")).read_text()
    assert command("report", str(made.run_dir)).code == 0
    assert f"<b>calibration.text: {said}" in (made.run_dir / "report.html").read_text()
    other = factories.write_text(tmp_path / "other.txt", 20_000, seed=5)
    two = {"files": [str(made.text), str(other)]}
    apart = [{"files": [file], "share": 0.5} for file in two["files"]]
    for changes in (
        {"calibration.text": two},
        {"calibration.text": apart},
        {"budget.keep": 0.7},
        {"methods": [{"method": "lorc"}]},
    ):
        changed = job(source, **({"methods": [EXPERTS_ALONE], "budget.keep": 0.6} | DENSE | changes)).write()
        assert said not in command("plan", str(changed.manifest)).out


@pytest.mark.sample(1)
@inline
@pytest.mark.parametrize(
    "entry",
    [EXPERTS_ALONE, {"method": "reap"}, {"method": "merge_experts"}, {"method": "loss_aware", "shapes": "layer"}],
)
def test_the_report_divides_tokens_of_experts_over_sources(
    entry: dict[str, Any], tmp_path: Path, job: MakeJob, text: Path
) -> None:
    """Of 12 samples, 9 are of one file, 2 of another, and 1 of the last; a token passes 2 of 6 experts."""
    source = make_source(tmp_path / "source", "qwen3_moe", layers=2)
    others = [factories.write_text(tmp_path / f"{name}.txt", 20_000, seed=5) for name in ("prose", "code")]
    counts = dict(zip(map(str, (text, *others)), (9, 2, 1), strict=True))
    texts = [{"files": [file], "share": count / 12} for file, count in counts.items()]
    budget = {"keep": 0.6, "scope": "experts"}
    made = job(
        source, methods=[entry], **DENSE, **{"calibration.text": texts, "calibration.samples": 12, "budget": budget}
    )
    made.run().json  # noqa: B018 - asserts the exit code
    for layer in made.compression()["layers"]:
        groups = {name: group for name, group in layer["groups"].items() if name.startswith("experts")}
        by_source = [group["tokens_by_source"] for group in groups.values()]
        for file, samples in counts.items():
            routed = sum(sum(each[file]) if "experts" in groups else each[file] for each in by_source)
            assert routed == samples * 24 * 2
        for group in groups.values():
            divided = [*map(sum, zip(*group["tokens_by_source"].values(), strict=True))] if "experts" in groups else []
            assert (
                divided == group["tokens_by_expert"]
                if divided
                else (sum(group["tokens_by_source"].values()) == group["tokens"])
            )
    assert command("report", str(made.run_dir)).code == 0
    page = (made.run_dir / "report.html").read_text()
    assert [
        f"come from {file}; of all sampled tokens, {count / 12:.0%} do" in page for file, count in counts.items()
    ] == [True] * 3
    assert re.search(r"The experts furthest from that: layer \d expert \d \d+%", page)
    assert "by source" not in page, "a table does not list a number for each expert"


@inline
def test_a_dense_export_is_the_source_s_own_class(tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", "qwen2_moe", layers=2)
    made = job(source, methods=[{"method": "flat_llm", "layers": [1]}])
    made.run().json  # noqa: B018 - asserts the exit code
    assert command("export", "--to", "dense", str(made.output), str(tmp_path / "dense")).code == 0
    ids_BT = some_tokens(300)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", experts_implementation="eager").eval()
    assert relative_error(logits_of(exported, ids_BT), logits_of(load(made.output), ids_BT)) < 1e-5
    refused = command("export", "--to", "stock", str(made.output), str(tmp_path / "stock"))
    assert refused.code == 2
    assert "mixtures of experts" in refused.err


@inline
def test_a_budget_of_experts_touches_nothing_else(tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", "qwen2_moe", layers=3)
    made = job(source, methods=[{"method": "loss_aware"}], **DENSE, budget={"keep": 0.5, "scope": "experts"})
    made.run().json  # noqa: B018 - asserts the exit code
    before, after = read_tensors(source), read_tensors(made.output)
    routed = {name for name in before if ".mlp.experts." in name}
    assert all(torch.equal(before[name], after[name]) for name in before if name not in routed)
    numbers = sum(tensor.numel() for name, tensor in after.items() if name not in before or name in routed)
    assert 0.45 < numbers / sum(before[name].numel() for name in routed) <= 0.5


@inline
@pytest.mark.nightly
def test_bits_are_chosen_for_experts_alone(tmp_path: Path, job: MakeJob) -> None:
    """Of attention, whose moments nobody needs, no curve is computed."""
    source = factories.make_model(tmp_path / "source", "mixtral", intermediate_size=32)
    budget = {"bytes": 0.5, "scope": "experts"}
    made = job(source, methods=[{"method": "loss_aware"}], budget=budget, quantize={"bits": "auto"}, **DENSE)
    made.run().json  # noqa: B018 - asserts the exit code
    before, after = read_tensors(source), read_tensors(made.output)
    assert all(torch.equal(before[name], after[name]) for name in before if "self_attn" in name)


@inline
def test_a_budget_of_experts_needs_experts(job: MakeJob) -> None:
    ended = job(budget={"keep": 0.5, "scope": "experts"}).run()
    assert ended.code == 2
    assert "budget.scope: experts: this llama model has none" in ended.err


@inline
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"methods": [{"method": "reap"}]}, "no chosen layer has a mixture of experts"),
        (
            {"methods": [{"method": "loss_aware", "shapes": "stock"}], **DENSE},
            "no chosen layer has a mixture of experts",
        ),
        ({"methods": [{"method": "reap", "refine": True}]}, "leave out refine"),
        ({"methods": [{"method": "loss_aware", "shapes": "layer", "correct": "output"}], **DENSE}, "leave out correct"),
    ],
)
def test_what_cannot_lose_experts_is_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path, job: MakeJob
) -> None:
    ended = job(make_source(tmp_path / "source", "llama", layers=2), **changes).run()
    assert ended.code == 2
    assert reason in ended.err


FEWER: dict[str, list[dict[str, Any]]] = {
    "reap": [{"method": "reap"}],
    "frequency": [{"method": "frequency", "refit": True}],
    "merge": [{"method": "merge_experts", "refit": True}],
    "layer": [{"method": "loss_aware", "shapes": "layer"}],
    "stock": [{"method": "loss_aware", "shapes": "stock"}],
}


def shows_experts(made: Job, name: str) -> None:
    """The ledger says what each dense expert saw and what it was ranked by, and the report draws it."""
    entries = [json.loads(path.read_text())["record"] for path in (made.run_dir / "ledger").glob("layer.*.json")]
    reports = [entry["groups"]["experts"] for entry in entries if "experts" in entry["groups"]]
    report = next(report for report in reports if not report.get("dense"))
    tokens = report["tokens_by_expert"]
    assert len(tokens) == 6
    assert sum(tokens) in (8 * 24, 2 * 8 * 24), "each token passes one expert or two"
    captions = ["Calibration tokens that the router sent", "Share of its channels"]
    if name in SCORED:
        field, caption = SCORED[name]
        gone = sorted({*range(6)} - {*report["experts"]})
        assert len(report[field]) == 6
        assert not gone or min(gone, key=report[field].__getitem__) == report[field].index(min(report[field])), (
            "the expert of least score goes first"
        )
        captions.append(caption)
    assert command("report", str(made.run_dir)).code == 0
    page = (made.run_dir / "report.html").read_text()
    assert not [caption for caption in captions if caption not in page]
    assert "by expert" not in page, "a table does not list a number for each expert"


SCORED = {
    "reap": ("saliency_by_expert", "Weighted output of each expert"),
    "layer": ("removal_loss_by_expert", "Predicted loss of removing each expert"),
    "stock": ("removal_loss_by_expert", "Predicted loss of removing each expert"),
}


@pytest.mark.sample(1)
@inline
@pytest.mark.parametrize(
    ("name", "family"),
    [
        *(("reap", "mixtral"), ("frequency", "qwen3_moe"), ("layer", "qwen2_moe"), ("stock", "mixtral")),
        ("merge", "mixtral"),
        ("stock", "gpt_oss"),
        ("stock", "deepseek_v3"),  # experts of 16 of 24 channels, and a shared one of 24, padded to two of 16
        *(
            pytest.param(name, family, marks=pytest.mark.nightly)
            for name in FEWER
            for family in (*LATER, *COPIED)
            if (name, family) != ("stock", "gpt_oss")
        ),
    ],
)
def test_fewer_experts(name: str, family: str, tmp_path: Path, job: MakeJob) -> None:
    pairs = family in (*COPIED[1:], "dots1", "solar_open")  # whose groups of two would keep both
    whole = {"n_group": 1, "topk_group": 1} if pairs else {}
    source = make_source(tmp_path / "source", family, layers=2, **whole)
    made = job(source, methods=FEWER[name], **DENSE, **{"budget.keep": 0.7, "budget.scope": "experts"})
    assert command("plan", str(made.manifest)).code == 0
    made.run().json  # noqa: B018 - asserts the exit code
    assert command("verify", str(made.output), "--source", str(source), "--bound", "10").code == 0
    decodes_as_it_prefills(load(made.output), source)
    forms = json.loads((made.output / "config.json").read_text())["forms"]
    counts = [layer["router"]["rank"] if "router" in layer else 6 for layer in forms if layer]
    assert counts
    assert name == "layer" or len(set(counts)) == 1
    shows_experts(made, name)
    before, after = read_tensors(source), read_tensors(made.output)
    for name_, rows_ED in after.items():
        if re.search(r"(mlp|sparse_moe|mixer)\.(gate|router)\.", name_):
            assert all(any(torch.equal(row, old) for old in before[name_]) for row in rows_ED), "rows of the source"
    ids_BT = some_tokens(300)
    for target in ("dense", "stock") if name != "layer" else ():
        assert command("export", "--to", target, str(made.output), str(tmp_path / target)).code == 0
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / target, experts_implementation="eager").eval()
        assert exported.config.num_local_experts == counts[0]
        assert relative_error(logits_of(exported, ids_BT), logits_of(load(made.output), ids_BT)) < 1e-5
