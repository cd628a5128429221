"""`mla`: its claims and sizes, and what DeepSeek's class cannot say."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from manifests.errors import InputError
from manifests.methods import MLA
from pipeline.families.geometry import Geometry
from pipeline.families.latent import plain_pairs
from pipeline.families.latent_config import described_config, output_config
from pipeline.families.registry import geometry_of, standard_config
from pipeline.inputs.job_inputs import fit_methods
from pipeline.methods.mla import MLAMethod
from tests import factories
from tests.families.geometries import llama, manifest, other

CALIBRATION = {"text": {"files": ["text.txt"]}, "samples": 32, "sequence_length": 16}
ENTRY = {"method": "mla", "cache_keep": 0.5}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip


def made(**fields: Any) -> MLAMethod:
    return MLAMethod(MLA(**{**ENTRY, **fields}))


def group_of(geometry: Geometry, **fields: Any) -> Any:
    """The group of the first layer."""
    return next(iter(made(**fields).groups(geometry.layers[0])))


def test_sizes_of_a_model() -> None:
    geometry = llama("gqa")  # two heads of 16 for keys, and for values: 64 numbers, of D = 48
    (group, *_) = made().claims(geometry)
    assert group.roles == ("q", "k", "v")
    assert made().cache_target(geometry) == 6 * 32
    assert group_of(geometry).choices == [(p, m) for m in (1, 2) for p in range(2 * m, 16 * m + 1, 2 * m)]
    assert group_of(geometry, rope=8).choices == [(8, 1), (8, 2)]
    assert group_of(geometry, rope=20).choices == [(20, 2)]
    assert group_of(geometry, cache_keep=1.0).ranks[-1] == 48
    assert made().rank_variables(geometry)[0].cap == 32


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("opt", "no rotation; LayerNorms"),
        ("gptj", "rotation of neighbouring dimensions"),
        ("qwen2", "biases of q, k, v"),
        ("qwen3", "norms of queries and keys"),
        ("gemma2", "norms behind attention and MLP"),
        ("olmo2", "norms of queries and keys; norms behind attention and MLP"),
        ("granite", "scaled embeddings"),
        ("cohere", "LayerNorms"),
        ("mixtral", "mixtures of experts"),
        ("deepseek_v3", "attention that is latent already"),
        ("glm4", "rotation of neighbouring dimensions"),
        ("starcoder2", "MLPs without a gate"),
        ("smollm3", "layers without rotation"),
    ],
)
def test_what_the_class_cannot_say_is_refused_by_name(model_type: str, said: str) -> None:
    geometry = geometry_of(standard_config(factories.make_config(model_type).to_dict()))
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        made().claims(geometry)


def test_windows_and_other_rotations_are_refused() -> None:
    windows = factories.make_config("mistral", sliding_window=8).to_dict()
    with pytest.raises(ValueError, match="sliding windows"):
        made().claims(geometry_of(standard_config(windows)))
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match="rotation of type linear"):
        made().claims(llama("gqa", rope_parameters=rope))


def test_sizes_out_of_reach_are_refused() -> None:
    with pytest.raises(ValueError, match="rope: 34 is more than 32, the rotated dimensions of 2 key heads of 16"):
        made(rope=34).claims(llama("gqa"))
    with pytest.raises(ValueError, match="leaves 1, and the smallest latent with its rotated dimensions takes 3"):
        made(cache_keep=0.03).claims(llama("gqa"))
    for fields, said in (({"rope": 3}, "odd"), ({"layers": "last:2"}, "one size"), ({"refine": True}, "not trained")):
        with pytest.raises(ValidationError, match=said):
            MLA(**{**ENTRY, **fields})


@pytest.mark.parametrize("beside", [{"method": "flat_llm", "attention": False}, {"method": "lorc", "cache_keep": 0.5}])
def test_no_other_method_goes_along(beside: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{beside['method']}.*: OUTPUT of mla is an ordinary checkpoint"):
        fit_methods(manifest(ENTRY, beside, calibration=CALIBRATION), llama("gqa"))


def test_llama3_turns_its_first_frequencies_alone_by_powers() -> None:
    geometry = llama("gqa", rope_parameters=LLAMA3)
    frequencies = geometry.layers[0].frequencies
    assert 1 <= plain_pairs(frequencies) < len(frequencies) == 8
    choices = group_of(geometry).choices
    assert max(p for p, density in choices if density == 1) == 2 * plain_pairs(frequencies)


def test_the_config_is_of_the_class() -> None:
    standard = standard_config(factories.make_config("llama", num_hidden_layers=2).to_dict())
    forms = [{"q": {"form": "mla", "rank": 10, "rope": 4, "group": "attention"}}] * 2
    described = described_config(standard, forms)
    theta = standard["rope_parameters"]["rope_theta"]
    assert described["rope_parameters"]["rope_theta"] == pytest.approx(theta ** (4 / standard["head_dim"]))
    dense = described_config(standard, [{"q": {**layer["q"], "density": 2}} for layer in forms])
    assert dense["rope_parameters"]["rope_theta"] == pytest.approx(theta ** (2 / standard["head_dim"]))
    written = output_config(standard, forms, "float32")
    assert written["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (written["kv_lora_rank"], written["qk_rope_head_dim"], written["first_k_dense_replace"]) == (10, 4, 2)
    assert standard_config(written) == described
    assert other("opt").latent_faults
