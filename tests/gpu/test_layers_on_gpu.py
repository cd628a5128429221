"""Layers on a GPU, or the emulated one: read ahead into pinned memory, converted there, and what they compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.workers.bench import make_setup, save_source
from workers.layers import LayerReader

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_layer_that_was_read_ahead_computes_what_it_does_on_a_cpu(stored: torch.dtype, tmp_path: Path) -> None:
    setup = replace(
        make_setup(save_source(tmp_path / "model", "llama-gqa", stored), tmp_path / "run"), dtype=torch.float32
    )
    hidden_BSD = torch.randn(2, 7, setup.geometry.hidden, generator=torch.Generator().manual_seed(0))
    expected = LayerReader(setup, torch.device("cpu")).block(1, None).run(hidden_BSD)
    reader = LayerReader(setup, torch.device("cuda"))
    reader.read_ahead(1)
    assert reader.ahead is not None
    tensors = reader.ahead[1].result()
    assert all(tensor.is_pinned() and tensor.dtype == stored for tensor in tensors.values())
    found = reader.block(1, None).run(hidden_BSD.cuda())
    assert found is not None
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
