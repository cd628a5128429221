"""Embedding and head compute the same as transformers' own model of the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.bench import FAMILIES, Reference, make_setup, save_source
from workers.embedding_and_head import embedding, head
from workers.layers import LayerReader


@pytest.mark.parametrize("name", FAMILIES)
def test_embedding_and_head_are_the_model_s(name: str, tmp_path: Path) -> None:
    source = save_source(tmp_path / "model", name)
    setup = make_setup(source, tmp_path / "run")
    reference = Reference(source, setup)
    layers = LayerReader(setup, torch.device("cpu"))
    first_MSD, last_MSD = reference.hidden_LMSD[0], reference.hidden_LMSD[-1]
    torch.testing.assert_close(embedding(layers)(reference.ids_MS), first_MSD, rtol=0.0, atol=0.0)
    logits_TV = head(layers)(last_MSD.flatten(0, 1))
    assert logits_TV.dtype == torch.float32
    torch.testing.assert_close(logits_TV, reference.logits_MSV.flatten(0, 1), rtol=1e-5, atol=1e-5)


def names_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tensors outside the layers that are read from now on."""
    read: list[str] = []
    outer = LayerReader.outer
    monkeypatch.setattr(
        LayerReader, "outer", lambda self, *names, **more: read.extend(names) or outer(self, *names, **more)
    )
    return read


def test_only_what_is_used_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding reads no head and the head no embedding, whatever their size."""
    setup = make_setup(save_source(tmp_path / "model"), tmp_path / "run")
    layers = LayerReader(setup, torch.device("cpu"))
    read = names_read(monkeypatch)
    embedding(layers)
    assert read == ["model.embed_tokens.weight"]
    read.clear()
    head(layers)
    assert sorted(read) == ["lm_head.weight", "model.norm.weight"]
    read.clear()
    head(layers)
    assert not read, "it is there"


def test_what_is_of_no_layer_is_read_once_while_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many shards come by; and it does not stay beside the layers between."""
    setup = make_setup(save_source(tmp_path / "model"), tmp_path / "run")
    layers = LayerReader(setup, torch.device("cpu"))
    read = names_read(monkeypatch)
    embedding(layers)
    for _ in range(3):
        layers.block(0, None)
        embedding(layers)
    assert read == ["model.embed_tokens.weight"]
    layers.block(1, None)
    assert layers.outside is None
    with torch.inference_mode():
        head(layers)
    assert not head(layers)(torch.zeros(1, setup.geometry.hidden, requires_grad=True)).isnan().any()
    assert sorted(read[1:]) == ["lm_head.weight", "model.norm.weight"]
    layers.release()
    assert layers.current is None
    assert layers.outside is None
