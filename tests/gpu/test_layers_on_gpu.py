"""Layers on a GPU, or the emulated one: read ahead, converted there, and what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stores import source
from stores.formats import decode
from stores.headers import TensorRecord
from tests.emulated_device import EmulatedDevice
from tests.encoders import encode_model
from tests.workers.bench import make_setup, save_source
from workers.layers import LayerReader

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_layer_that_was_read_ahead_computes_what_it_does_on_a_cpu(
    stored: torch.dtype, threads: int, tmp_path: Path
) -> None:
    setup = replace(
        make_setup(save_source(tmp_path / "model", "llama-gqa", stored), tmp_path / "run"), dtype=torch.float32
    )
    hidden_BSD = torch.randn(2, 7, setup.geometry.hidden, generator=torch.Generator().manual_seed(0))
    expected = LayerReader(setup, torch.device("cpu")).block(1, None).run(hidden_BSD)
    reader = LayerReader(replace(setup, threads=threads), torch.device("cuda"))
    reader.read_ahead(1)
    assert reader.ahead is not None
    tensors = reader.ahead[1].result()
    assert all(tensor.is_cuda and tensor.dtype == stored for tensor in tensors.values())
    found = reader.block(1, None).run(hidden_BSD.cuda())
    assert found is not None
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_the_next_layer_is_on_the_device_when_this_one_is_done(tmp_path: Path, emulated: EmulatedDevice | None) -> None:
    """The host waits for no copy of it."""
    setup = make_setup(save_source(tmp_path / "model", "llama-gqa", torch.bfloat16), tmp_path / "run")
    reader = LayerReader(replace(setup, dtype=torch.bfloat16), torch.device("cuda"))
    reader.block(0, None)
    reader.read_ahead(1)
    assert reader.ahead is not None
    coming = reader.ahead[1].result()
    if emulated is not None:
        assert not emulated.uploads
        emulated.waits.clear()
    state = reader.block(1, None).module.state_dict()
    if emulated is not None:
        assert not emulated.waits
        assert not emulated.uploads
    assert {tensor.data_ptr() for tensor in coming.values()} == {tensor.data_ptr() for tensor in state.values()}


def test_a_layer_that_was_read_ahead_in_vain(tmp_path: Path) -> None:
    """Another is asked for, and it is let go of."""
    setup = make_setup(save_source(tmp_path / "model"), tmp_path / "run")
    hidden_BSD = torch.randn(2, 7, setup.geometry.hidden, generator=torch.Generator().manual_seed(0)).cuda()
    reader = LayerReader(setup, torch.device("cuda"))
    reader.read_ahead(1)
    expected = LayerReader(setup, torch.device("cuda")).block(0, None).run(hidden_BSD)
    assert torch.equal(reader.block(0, None).run(hidden_BSD), expected)
    reader.read_ahead(0)
    assert torch.equal(
        reader.block(1, None).run(hidden_BSD), LayerReader(setup, torch.device("cuda")).block(1, None).run(hidden_BSD)
    )


@pytest.mark.parametrize("kind", ["fp8 ragged", "float"])
def test_stored_weights_are_decoded_on_the_device(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read ahead or not; the numbers are a CPU's."""
    encoded, _ = encode_model(save_source(tmp_path / "model", "llama-gqa", torch.bfloat16), tmp_path, kind)
    setup = make_setup(encoded, tmp_path / "run")
    setup = replace(setup, source=setup.source.with_weights())
    expected = LayerReader(setup, torch.device("cpu")).block(1, None).module.state_dict()
    decoded_on: set[str] = set()

    def watched(record: TensorRecord, parts: Mapping[str, Tensor]) -> Tensor:
        decoded_on.update(part.device.type for part in parts.values())
        return decode(record, parts)

    monkeypatch.setattr(source, "decode", watched)
    reader = LayerReader(setup, torch.device("cuda"))
    reader.read_ahead(1)
    for state in (reader.block(1, None).module.state_dict(), reader.block(1, None).module.state_dict()):
        assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in state.items())
        reader.release_layer()
    assert decoded_on == {"cuda"}
