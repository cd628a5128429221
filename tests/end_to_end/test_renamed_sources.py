"""Sources under other names of tensors: every command does with them what it does with the family's usual files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.end_to_end.jobs import Job, command, load, logits_of, read_tensors, relative_error, some_tokens
from tests.end_to_end.sources import make_source
from tests.renamed_models import HEAD, IN_MEMORY, INSIDE, NEITHER, NO_PREFIX, rename

MakeJob = Callable[..., Job]
FLAT: dict[str, Any] = {"methods": [{"method": "flat_llm"}]}
EXPERTS: dict[str, Any] = {"methods": [{"method": "loss_aware", "attention": False}], "calibration.propagate": "dense"}
CASES: dict[str, tuple[str, str, bool, dict[str, Any]]] = {
    "llama without model": ("llama", NO_PREFIX, False, FLAT),
    "tied llama, head alone": ("llama", HEAD, True, {**FLAT, "quantize": {"bits": 8, "group": None}}),
    "experts in memory": ("qwen3_moe", IN_MEMORY, False, EXPERTS),
    "opt with decoder": ("opt", NO_PREFIX, False, FLAT),
    "gpt_neox with lm_head": ("gpt_neox", NEITHER, False, FLAT),
    "mixtral in memory": ("mixtral", NEITHER, False, EXPERTS),
    "decoder of a whole": ("qwen3_5_text", INSIDE, False, EXPERTS),
    "convolutions in memory": ("kimi_linear", IN_MEMORY, False, EXPERTS),
}


def exported(made: Job, target: str, folder: Path) -> dict[str, torch.Tensor] | None:
    """Return the tensors of an export; None if it is refused."""
    return read_tensors(folder) if command("export", str(made.output), "--to", target, str(folder)).code == 0 else None


@pytest.mark.sample(2)
@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("case", CASES)
def test_the_result_is_that_of_the_usual_files(case: str, tmp_path: Path, job: MakeJob, scored: Path) -> None:
    family, naming, tied, changes = CASES[case]
    plain = make_source(tmp_path / "plain", family, tie_word_embeddings=tied)
    renamed = rename(plain, tmp_path / "renamed", naming, AutoModelForCausalLM.from_pretrained(plain))
    usual, other = job(plain, **changes), job(renamed, **changes)
    first, second = usual.run().json, other.run().json
    assert first["counts"] == second["counts"]
    before, after = read_tensors(usual.output), read_tensors(other.output)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (usual.output / "config.json").read_bytes() == (other.output / "config.json").read_bytes()
    assert command("plan", str(other.manifest)).code == 0
    verified = command("verify", str(other.output), "--source", str(renamed), "--bound", "10")
    assert verified.code == 0, verified.out
    options = ["--text", str(scored), "--window", "40", "--json"]
    losses = [command("evaluate", str(path), *options).json["loss"] for path in (plain, renamed, other.output)]
    assert losses[0] == losses[1] != losses[2]
    model = load(other.output)
    head, embed = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head.data_ptr() == embed.data_ptr()) == tied
    for target in ("dense", "stock"):
        wanted, found = (exported(made, target, made.root / target) for made in (usual, other))
        assert (wanted is None) == (found is None)
        if wanted and found:
            assert all(torch.equal(wanted[name], found[name]) for name in wanted | found)
            ids_BT = some_tokens(300)
            assert relative_error(logits_of(load(other.root / target), ids_BT), logits_of(model, ids_BT)) < 1e-4
