"""An unknown model is described by the family whose tensors have the same names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from pipeline.inputs.unknown import describe_unknown
from stores.headers import TensorRecord
from stores.source import SourceCheckpoint


def describe(shapes: dict[str, tuple[int, ...]], **config: Any) -> str:
    tensors = {name: TensorRecord(name, "F32", shape, "model.safetensors", 0, 0) for name, shape in shapes.items()}
    return describe_unknown(cast(SourceCheckpoint, SimpleNamespace(config=config, tensors=tensors)))


def layer(number: int) -> dict[str, tuple[int, ...]]:
    inside = {
        "self_attn.q_proj.weight": (8, 8), "self_attn.k_proj.weight": (4, 8), "self_attn.v_proj.weight": (4, 8),
        "self_attn.o_proj.weight": (8, 8), "mlp.up_proj.weight": (8, 12), "mlp.down_proj.weight": (8, 12),
        "mlp.gate_proj.weight": (12, 8), "strange.weight": (3,),
    }  # fmt: skip
    return {f"model.layers.{number}.{name}": shape for name, shape in inside.items()}


def test_blocks_are_those_of_a_known_family() -> None:
    said = describe(
        {"embed.weight": (5, 8)} | layer(0) | layer(1), architectures=["NewForCausalLM"], hidden_size=8
    ).splitlines()
    assert said[0].startswith("architectures: NewForCausalLM; 17 tensors of ")
    assert said[1].strip() == "layers: 2, at model.layers"
    text = "\n".join(said)
    assert "q self_attn.q_proj.weight [8, 8]" in text
    assert "up mlp.up_proj.weight [8, 12] (transposed)" in text
    assert "like no family's: strange.weight [3]" in text


def test_kinds_of_layers_are_described_apart() -> None:
    other = {"model.layers.1.mixer.weight": (8, 8)}
    text = describe(layer(0) | other, hidden_size=8)
    assert "1 of 2 layers, as layer 0:" in text
    assert "1 of 2 layers, as layer 1:" in text
    assert "mixer.weight [8, 8]" in text


def test_of_many_tensors_that_no_family_has_eight_are_named() -> None:
    strange = {f"model.layers.0.strange.{letter}": (3,) for letter in "abcdefghij"}
    assert "like no family's: strange.a [3], " in describe(strange)
    assert describe(strange).splitlines()[2].endswith(", strange.h [3] and 2 more")
    strange.popitem()
    strange.popitem()
    assert " more" not in describe(strange)


def test_a_model_without_numbered_layers() -> None:
    assert "no tensors are numbered as layers are" in describe({"weight": (2, 2)})
