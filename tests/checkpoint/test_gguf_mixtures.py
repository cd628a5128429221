"""Names, shapes, dtypes and sizes of a mixture in a GGUF file, against hand-written ones.

`tests/end_to_end/test_export_gguf.py` compares the numbers of whole files.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.checkpoint.gguf_mixtures import FileTensor, MixtureFile, neighbours_first
from pipeline.families.registry import checkpoint_config, standard_config
from stores.headers import TensorRecord
from tests import factories

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# D 48, V 320, four query heads and two of keys and values of 16 numbers; six experts of 24 channels.
MIXTRAL_LAYER = {
    "attn_norm.weight": (48,), "attn_q.weight": (64, 48), "attn_k.weight": (32, 48), "attn_v.weight": (32, 48),
    "attn_output.weight": (48, 64), "ffn_norm.weight": (48,), "ffn_gate_inp.weight": (6, 48),
    "ffn_gate_exps.weight": (6, 24, 48), "ffn_up_exps.weight": (6, 24, 48), "ffn_down_exps.weight": (6, 48, 24),
}  # fmt: skip
OUTER = {"token_embd.weight": (320, 48), "output_norm.weight": (48,), "output.weight": (320, 48)}
ARCHITECTURES = {"mixtral": "llama", "qwen3_moe": "qwen3moe", "deepseek_v3": "deepseek2"}


def file_of(
    family: str,
    dtype: str = "bfloat16",
    dtypes: Mapping[str, str] | None = None,
    forms: tuple[dict[str, Any], ...] = ({}, {}),
    **overrides: Any,
) -> MixtureFile:
    """Return the file of a checkpoint of two layers, of whose tensors those in `dtypes` alone exist."""
    config = factories.make_config(family, num_hidden_layers=2, **overrides).to_dict()
    described = checkpoint_config(standard_config(config), forms, dtype)
    tensors = {name: TensorRecord(name, own, (1,), "f", 0, 1) for name, own in (dtypes or {}).items()}
    checkpoint: Any = SimpleNamespace(tensors=tensors)
    return MixtureFile(checkpoint, described, ARCHITECTURES[family])


def shapes_of(file: MixtureFile) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in file.all}


def tensor_of(file: MixtureFile, name: str) -> FileTensor:
    (found,) = (tensor for tensor in file.all if tensor.name == name)
    return found


def test_the_tensors_of_mixtral() -> None:
    """The matrices of all experts of a layer are one tensor, expert by expert."""
    file = file_of("mixtral")
    assert shapes_of(file) == OUTER | {
        f"blk.{layer}.{name}": shape for layer in (0, 1) for name, shape in MIXTRAL_LAYER.items()
    }
    stacked = tensor_of(file, "blk.1.ffn_down_exps.weight")
    assert stacked.stacked
    assert stacked.keys == tuple(f"experts.{expert}.down.weight" for expert in range(6))
    assert not tensor_of(file, "blk.1.attn_q.weight").stacked


def test_a_tied_head_is_no_tensor() -> None:
    file = file_of("mixtral", tie_word_embeddings=True)
    assert {*file.outer} == {"model.embed_tokens.weight", "model.norm.weight"}
    assert "output.weight" not in shapes_of(file)


def test_layers_with_fewer_experts_that_are_narrower() -> None:
    """As `stock` keeps them: the router has a row for each of four experts, of 16 channels."""
    pruned = {f"experts.{expert}.{role}": 16 for expert in range(4) for role in ("gate", "up", "down")}
    forms = {"router": {"form": "router", "rank": 4}}
    forms |= {role: {"form": "pruned", "rank": rank} for role, rank in pruned.items()}
    file = file_of("mixtral", forms=(forms, forms))
    shapes = shapes_of(file)
    assert shapes["blk.0.ffn_gate_inp.weight"] == (4, 48)
    assert shapes["blk.0.ffn_gate_exps.weight"] == (4, 16, 48)
    assert shapes["blk.1.ffn_down_exps.weight"] == (4, 48, 16)
    written = Recorder.of(file)
    assert (written["expert_count"], written["feed_forward_length"]) == (4, 16)


def test_latent_attention_and_shared_experts() -> None:
    """Keys and values are read from a latent of 12 numbers; layer 0 has a dense MLP of 80 channels."""
    shapes = shapes_of(file_of("deepseek_v3", attention_bias=False))
    assert shapes["blk.0.attn_k_b.weight"] == (4, 12, 10)
    assert shapes["blk.0.attn_v_b.weight"] == (4, 14, 12)
    assert shapes["blk.0.attn_kv_a_mqa.weight"] == (12 + 6, 48)
    assert shapes["blk.0.attn_q_b.weight"] == (4 * (10 + 6), 20)
    assert shapes["blk.0.ffn_gate.weight"] == (80, 48)
    assert shapes["blk.1.ffn_gate_exps.weight"] == (6, 24, 48)
    assert shapes["blk.1.ffn_down_shexp.weight"] == (48, 24)
    assert shapes["blk.1.exp_probs_b.bias"] == (6,)
    assert not [name for name in shapes if name.startswith("blk.0.") and ("exp" in name or "inp" in name)]


@pytest.mark.parametrize(
    ("stored", "expected"),
    [("BF16", BF16), ("F16", F16), ("F32", F32), ("F64", F32)],
    ids=["bf16", "f16", "f32", "f64"],
)
def test_matrices_keep_the_dtypes_of_the_source(stored: str, expected: torch.dtype) -> None:
    """But float64, which the file does not know. Vectors and routers are float32."""
    path = "model.layers.0.self_attn.q_proj.weight"
    norm = "model.layers.0.input_layernorm.weight"
    file = file_of("mixtral", dtypes={path: stored, norm: "BF16"})
    assert tensor_of(file, "blk.0.attn_q.weight").dtype == expected
    assert tensor_of(file, "blk.1.attn_q.weight").dtype == BF16, "as the config says"
    assert tensor_of(file, "blk.0.attn_norm.weight").dtype == F32
    assert tensor_of(file, "blk.0.ffn_gate_inp.weight").dtype == F32
    assert file.outer["model.embed_tokens.weight"].dtype == BF16
    assert file.outer["model.norm.weight"].dtype == F32


@pytest.mark.parametrize(
    ("first", "second", "together"), [("BF16", "BF16", BF16), ("BF16", "F32", F32), ("BF16", "F16", F32)]
)
def test_experts_of_several_dtypes_have_one_that_holds_all(first: str, second: str, together: torch.dtype) -> None:
    """Neither of bfloat16 and float16 holds the numbers of the other."""
    path = "model.layers.1.block_sparse_moe.experts.{}.w2.weight"
    others = {path.format(expert): second for expert in range(1, 6)}
    file = file_of("mixtral", dtypes={path.format(0): first, **others})
    assert tensor_of(file, "blk.1.ffn_down_exps.weight").dtype == together


def test_rows_of_pairs_of_neighbours() -> None:
    """Two heads of four: pairs (0, 2) and (1, 3) of each head become neighbours."""
    rows_81 = torch.arange(8)[:, None]
    assert neighbours_first(rows_81, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert neighbours_first(rows_81, 4)[:, 0].tolist() == [*range(8)], "a head of one pair"
    assert neighbours_first(rows_81, 1)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert rows_81[:, 0].tolist() == [*range(8)]


def test_a_rotation_of_neighbours_is_that_of_halves() -> None:
    """The product of a rotated query and a rotated key is the same in either order of rows."""
    source = torch.Generator().manual_seed(0)
    query_d, key_d = (torch.randn(16, generator=source, dtype=torch.float64) for _ in range(2))
    angles_h = torch.randn(8, generator=source, dtype=torch.float64)

    def by_halves(x_d: Tensor, turns: int) -> Tensor:
        first_h, second_h = x_d.chunk(2)
        cos_h, sin_h = (turns * angles_h).cos(), (turns * angles_h).sin()
        return torch.cat([first_h * cos_h - second_h * sin_h, second_h * cos_h + first_h * sin_h])

    def by_neighbours(x_d: Tensor, turns: int) -> Tensor:
        first_h, second_h = x_d[0::2], x_d[1::2]
        cos_h, sin_h = (turns * angles_h).cos(), (turns * angles_h).sin()
        return torch.stack([first_h * cos_h - second_h * sin_h, second_h * cos_h + first_h * sin_h], 1).flatten()

    moved = [neighbours_first(x_d[:, None], 1)[:, 0] for x_d in (query_d, key_d)]
    product = by_neighbours(moved[0], 5) @ by_neighbours(moved[1], 2)
    assert product.item() == pytest.approx((by_halves(query_d, 5) @ by_halves(key_d, 2)).item())


@pytest.mark.parametrize(("family", "reordered"), [("mixtral", True), ("qwen3_moe", False)])
def test_queries_and_keys_are_reordered_for_the_architecture_of_llama_alone(family: str, reordered: bool) -> None:
    file = file_of(family)
    for role, heads in (("q", 4), ("k", 2)):
        rows = torch.arange(heads * 16)[:, None]
        expected = neighbours_first(rows, heads) if reordered else rows
        assert torch.equal(tensor_of(file, f"blk.1.attn_{role}.weight").arranged(rows), expected)
    values = torch.arange(32)[:, None]
    assert torch.equal(tensor_of(file, "blk.1.attn_v.weight").arranged(values), values)


def test_keys_and_values_of_a_latent() -> None:
    """The reader (heads x (10 keys + 14 values), 12): keys transposed head by head, values as they are."""
    file = file_of("deepseek_v3", attention_bias=False)
    weight = torch.arange(4 * 24 * 12).view(4 * 24, 12)
    keys, values = (tensor_of(file, f"blk.1.attn_{part}_b.weight").arranged(weight) for part in ("k", "v"))
    for head in range(4):
        for number in (0, 9):
            assert torch.equal(keys[head, :, number], weight[head * 24 + number])
        for number in (0, 13):
            assert torch.equal(values[head, number], weight[head * 24 + 10 + number])


class Recorder:
    """A writer that records the fields it is given."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("add_"), name
        return lambda value: self.fields.update({name.removeprefix("add_"): value})

    @classmethod
    def of(cls, file: MixtureFile) -> dict[str, Any]:
        pytest.importorskip("gguf")
        recorder = cls()
        file.add_sizes(recorder)
        return recorder.fields


COMMON = {
    "context_length": 256, "embedding_length": 48, "block_count": 2, "head_count": 4, "vocab_size": 320,
    "expert_count": 6, "expert_used_count": 2, "rope_freq_base": 10000.0,
}  # fmt: skip
HEADS = {"head_count_kv": 2, "key_length": 16, "value_length": 16, "rope_dimension_count": 16}


def test_the_sizes_of_mixtral() -> None:
    """Its experts have the width of an ordinary MLP, and its architecture no field for another one."""
    written = Recorder.of(
        file_of("mixtral", rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    )
    assert written == {**COMMON, **HEADS, "layer_norm_rms_eps": 1e-5, "feed_forward_length": 24}


def test_the_sizes_of_qwen3() -> None:
    written = Recorder.of(file_of("qwen3_moe"))
    assert {name: written[name] for name in (*COMMON, *HEADS)} == COMMON | HEADS
    assert (written["feed_forward_length"], written["expert_feed_forward_length"]) == (80, 24)
    assert {*written} - {*COMMON, *HEADS} == {
        "layer_norm_rms_eps", "feed_forward_length", "expert_feed_forward_length",
    }  # fmt: skip


@pytest.mark.parametrize("yarn", [False, True])
def test_the_sizes_of_deepseek(yarn: bool) -> None:
    """One head of keys, the latent with the rotated numbers; a dense layer first; the routing rule."""
    gguf = pytest.importorskip("gguf")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if yarn:
        rope |= {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7}
        rope |= {"original_max_position_embeddings": 64, "beta_fast": 16}
    fields = {"routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_shared_experts": 2}
    written = Recorder.of(file_of("deepseek_v3", attention_bias=False, rope_parameters=rope, **fields))
    assert {name: written[name] for name in COMMON} == COMMON
    latent = {
        "head_count_kv": 1, "key_length": 12 + 6, "value_length": 12, "key_length_mla": 10 + 6, "value_length_mla": 14,
        "kv_lora_rank": 12, "q_lora_rank": 20, "rope_dimension_count": 6,
    }  # fmt: skip
    routing = {
        "expert_feed_forward_length": 24, "feed_forward_length": 80, "leading_dense_block_count": 1,
        "expert_shared_count": 2, "expert_weights_scale": 2.5, "expert_weights_norm": True,
        "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID, "expert_group_count": 3, "expert_group_used_count": 2,
    }  # fmt: skip
    scaling = {
        "rope_scaling_type": gguf.RopeScalingType.YARN, "rope_scaling_factor": 4.0, "rope_scaling_orig_ctx_len": 64,
        "rope_scaling_yarn_beta_fast": 16.0, "rope_scaling_yarn_beta_slow": 1.0,
        "rope_scaling_yarn_log_mul": pytest.approx(0.07),
    }  # fmt: skip
    expected = COMMON | latent | routing | (scaling if yarn else {})
    assert {name: value for name, value in written.items() if name != "layer_norm_rms_eps"} == expected


def test_queries_without_a_latent_have_no_rank() -> None:
    written = Recorder.of(file_of("deepseek_v3", attention_bias=False, q_lora_rank=None))
    assert "q_lora_rank" not in written
