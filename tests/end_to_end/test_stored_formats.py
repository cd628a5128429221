"""Sources whose weights are stored in formats of other tools: decoded as they are read, kept where nothing changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import factories
from tests.encoders import ENCODERS, encode_model
from tests.end_to_end.jobs import Job, command, load, logits_of, read_tensors, relative_error, some_tokens

pytestmark = pytest.mark.usefixtures("inline")
MakeJob = Callable[..., Job]
ATTENTION: dict[str, Any] = {"methods": [{"method": "flat_llm", "layers": [0, 1], "mlp": False}], "budget.keep": 0.9}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Path]]:
    """A model in a format and decoded again, written once."""
    written: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(kind: str, family: str = "llama") -> tuple[Path, Path]:
        if (kind, family) not in written:
            folder = tmp_path_factory.mktemp("formats")
            source = factories.make_model(folder / "source", family)
            written[kind, family] = encode_model(source, folder, kind)
        return written[kind, family]

    return make


def check_pair(encoded: Path, decoded: Path, job: MakeJob, **changes: Any) -> Job:
    """A job on the encoded model stores what it changes as one on the decoded model, and the rest as the source."""
    ran, plain = job(encoded, **changes), job(decoded, **changes)
    for each in (ran, plain):
        ended = each.run()
        assert ended.code == 0, ended.err
    output, expected, source = read_tensors(ran.output), read_tensors(plain.output), read_tensors(encoded)
    for name, tensor in output.items():
        same = source if name in source and name not in expected or tensor.element_size() == 1 else expected
        same = source if name.endswith(("weight_scale", "weight_scale_inv")) else same
        assert torch.equal(tensor.view(torch.uint8), same[name].view(torch.uint8)), name
    verified = command("verify", str(ran.output), "--source", str(encoded))
    assert verified.code == 0, verified.out + verified.err
    return ran


@pytest.mark.parametrize("kind", ENCODERS)
def test_untouched_weights_stay_as_they_are(kind: str, job: MakeJob, models: Any) -> None:
    encoded, decoded = models(kind)
    ran = check_pair(encoded, decoded, job, **ATTENTION)
    config = json.loads((ran.output / "config.json").read_text())
    (group,) = config["stored_formats"]
    kept = group["modules"]
    assert len([path for path in kept if ".2." in path]) == 7
    assert len([path for path in kept if "mlp" in path]) == 9
    ids = some_tokens(config["vocab_size"])
    mine, plain = load(ran.output), load(ran.output.parents[1] / "job-1" / "output")
    assert torch.equal(logits_of(mine, ids), logits_of(plain, ids))
