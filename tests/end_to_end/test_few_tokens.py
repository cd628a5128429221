"""Experts that fewer calibration tokens passed than they have channels. docs/methods.md#few-tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.jobs import Job, command, file_digests, load, logits_of, read_tensors, relative_error, some_tokens
from tests.end_to_end.sources import make_source
from tests.end_to_end.test_mixtures import DENSE, EXPERTS_ALONE, one_sided

MakeJob = Callable[..., Job]
pytestmark = pytest.mark.usefixtures("inline")
FEW = {**DENSE, "calibration.samples": 2, "calibration.sequence_length": 12, "calibration.micro_batch": 1}
WIDTH = 28  # more channels than the 24 tokens of FEW


def tokens_of_experts(made: Job, layer: int) -> dict[str, int]:
    """Return the tokens of the experts that not all tokens passed."""
    groups = made.ledger(f"layer/{layer:05d}")["groups"]
    return {name: report["tokens"] for name, report in groups.items() if "tokens" in report}


def forms_of(made: Job) -> list[dict[str, dict[str, Any]]]:
    forms: list[dict[str, dict[str, Any]]] = json.loads((made.output / "config.json").read_text())["forms"]
    return forms


@pytest.mark.parametrize("entry", [EXPERTS_ALONE, {"method": "flat_llm", "allocation": "loss"}])
def test_nothing_is_cut_at_a_keep_of_one(entry: dict[str, Any], tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", "qwen3_moe", layers=2, moe_intermediate_size=WIDTH)
    made = job(source, methods=[entry], **FEW, **{"budget.keep": 1.0})
    made.run().json  # noqa: B018 - asserts the exit code
    assert max(tokens_of_experts(made, 0).values()) < WIDTH
    cut = [form for forms in forms_of(made) for role, form in forms.items() if role.startswith("experts.")]
    assert all(form == {"form": "pruned", "rank": WIDTH} for form in cut)
    ids_BT = some_tokens(300)
    assert relative_error(logits_of(load(made.output), ids_BT), logits_of(load(source), ids_BT)) < 1e-5


def test_an_expert_that_no_token_passed_is_cut_little_at_nearly_the_full_size(tmp_path: Path, job: MakeJob) -> None:
    """Each token passes the same two of six experts."""
    source = one_sided(tmp_path / "source", moe_intermediate_size=WIDTH)
    made = job(source, methods=[EXPERTS_ALONE], **DENSE, **{"budget.keep": 0.99})
    made.run().json  # noqa: B018 - asserts the exit code
    before, after = read_tensors(source), read_tensors(made.output)
    for layer in range(2):
        unseen = tokens_of_experts(made, layer)
        assert [*unseen.values()] == [0] * 4
        for name in unseen:
            prefix = f"model.layers.{layer}.mlp.{name}."
            kept, dense = (
                sum(tensor.numel() for key, tensor in tensors.items() if key.startswith(prefix))
                for tensors in (after, before)
            )
            assert kept >= 0.97 * dense, (prefix, kept, dense)
    assert sum(tensor.numel() for tensor in after.values()) < sum(tensor.numel() for tensor in before.values())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("entry", "changes"),
    [
        (EXPERTS_ALONE, {}),
        ({"method": "flat_llm"}, {"calibration.propagate": "compressed"}),
        ({"method": "heapr", "refit": True}, {"statistics.keep": False}),
        ({"method": "svd_llm"}, {"statistics.keep": False}),
        (EXPERTS_ALONE, {"quantize": {"bits": "auto", "group": 32}, "budget": {"bytes": 0.7, "scope": "experts"}}),
    ],
)
def test_slices_of_experts_change_no_byte(
    entry: dict[str, Any], changes: dict[str, Any], tmp_path: Path, job: MakeJob
) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32} if "quantize" in changes else {}
    source = make_source(tmp_path / "source", "qwen3_moe", layers=2, **sizes)
    settings = {**FEW, **changes}
    whole, sliced = (job(source, methods=[entry], **settings, **{"workers.experts": n}) for n in (100, 2))
    whole.run().json  # noqa: B018 - asserts the exit code
    sliced.run().json  # noqa: B018
    assert file_digests(whole.output) == file_digests(sliced.output)


@pytest.mark.nightly
def test_a_run_directory_of_the_former_rule_is_refused_by_name(tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", "qwen3_moe", layers=2)
    made = job(source, methods=[EXPERTS_ALONE], **FEW)
    made.run().json  # noqa: B018 - asserts the exit code
    path = made.run_dir / "fingerprint.json"
    content = json.loads(path.read_text())
    del content["fields"]["experts_with_few_tokens"]
    from stores.run_directory import _digest

    path.write_text(json.dumps({**content, "sha256": _digest(content)}))
    ended = command("run", str(made.manifest))
    assert ended.code == 2
    assert "experts_with_few_tokens: (none) ->" in ended.err
