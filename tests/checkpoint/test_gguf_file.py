"""Names, sizes, dtypes and blocks of a dense model in a GGUF file, against hand-written ones.

`tests/end_to_end/test_export_gguf.py` compares the logits of whole files.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lamina import LayersConfig
from manifests.errors import InputError
from manifests.records import Scheme
from pipeline.checkpoint import gguf_file
from pipeline.checkpoint.gguf_codes import CodedExperts, CodedMatrix, coded_tensor, unchanged
from pipeline.checkpoint.gguf_file import (
    _add_description,
    _add_sizes,
    _coded_tensors,
    _file_dtypes,
    _file_names,
    _frequency_factors,
    _shapes,
    _write,
    export_gguf,
)
from pipeline.checkpoint.gguf_mixtures import neighbours_first
from pipeline.checkpoint.targets import mlp_widths
from pipeline.families.registry import checkpoint_config, standard_config
from pipeline.kernels.packing import pack
from pipeline.rounding.schemes import packed_tensors, quantization_config
from stores.headers import TensorRecord
from tests import factories
from tests.checkpoint.test_gguf_mixtures import Recorder


def config_of(
    forms: Sequence[dict[str, Any]] = ({}, {}),
    dtype: str = "bfloat16",
    more: dict[str, Any] | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Return config.json of a checkpoint of two layers: D 48, N 80, four query heads, two of keys and values of 16."""
    source = factories.make_config("llama", num_hidden_layers=2, **overrides).to_dict()
    return {**checkpoint_config(standard_config(source), forms, dtype), **(more or {})}


def pruned(width: int) -> dict[str, Any]:
    return {role: {"form": "pruned", "rank": width} for role in ("gate", "up", "down")}


def checkpoint_of(tensors: dict[str, Any]) -> Any:
    """Return a checkpoint that holds these tensors: headers by name, and numbers that are read."""
    names = {torch.int32: "I32", torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64"}
    records = {
        name: TensorRecord(name, names[tensor.dtype], tuple(tensor.shape), "f", 0, 1)
        for name, tensor in tensors.items()
    }
    return SimpleNamespace(tensors=records, read=lambda wanted: {name: tensors[name] for name in wanted})


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    described = LayersConfig(**config)
    return dict(_shapes(config, described, mlp_widths(described)))


LAYER = [
    ("attn_norm", (48,)), ("attn_q", (64, 48)), ("attn_k", (32, 48)), ("attn_v", (32, 48)), ("attn_output", (48, 64)),
    ("ffn_norm", (48,)), ("ffn_gate", (80, 48)), ("ffn_up", (80, 48)), ("ffn_down", (48, 80)),
]  # fmt: skip


def test_tensors_in_the_order_of_the_file() -> None:
    """Factors are multiplied out: matrices of attention have the model's shapes at any rank."""
    low = {"form": "low_rank", "rank": 5}
    for forms in (({}, {}), ({"q": low, "v": low}, {"gate": low})):
        assert [*shapes_of(config_of(forms)).items()] == [
            ("token_embd.weight", (320, 48)), ("output_norm.weight", (48,)), ("output.weight", (320, 48)),
            *[(f"blk.{layer}.{name}.weight", shape) for layer in (0, 1) for name, shape in LAYER],
        ]  # fmt: skip


def test_mlps_keep_their_widths() -> None:
    shapes = shapes_of(config_of(({}, pruned(33))))
    assert [shapes[f"blk.{layer}.ffn_{name}.weight"] for layer in (0, 1) for name in ("gate", "up", "down")] == [
        (80, 48), (80, 48), (48, 80), (33, 48), (33, 48), (48, 33),
    ]  # fmt: skip


def test_a_tied_head_is_no_tensor() -> None:
    assert [*shapes_of(config_of(tie_word_embeddings=True))][:3] == [
        "token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight",
    ]  # fmt: skip


@pytest.mark.parametrize("factor", [None, 4.0])
def test_frequencies_are_divided_by_their_factors(factor: float | None) -> None:
    """A linear scaling divides all eight by one factor; without scaling there is no tensor."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if factor is not None:
        rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": factor}
    config = config_of(rope_parameters=rope)
    factors = _frequency_factors(LayersConfig(**config))
    shapes = shapes_of(config)
    if factor is None:
        assert factors is None
        assert "rope_freqs.weight" not in shapes
    else:
        assert factors is not None
        assert factors.tolist() == pytest.approx([factor] * 8)
        assert shapes["rope_freqs.weight"] == (8,)


def sizes_of(config: dict[str, Any], width: Any) -> dict[str, Any]:
    recorder = Recorder()
    _add_sizes(recorder, LayersConfig(**config), width)
    return recorder.fields


def test_sizes() -> None:
    config = config_of(rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    assert sizes_of(config, 80) == {
        "context_length": 256, "embedding_length": 48, "block_count": 2, "feed_forward_length": 80, "head_count": 4,
        "head_count_kv": 2, "key_length": 16, "value_length": 16, "rope_dimension_count": 16,
        "rope_freq_base": 500000.0, "layer_norm_rms_eps": 1e-5, "vocab_size": 320,
    }  # fmt: skip


def test_widths_by_layer_make_lists_of_heads() -> None:
    """llama.cpp's `deci` reads all of them layer by layer."""
    sizes = sizes_of(config_of(), [80, 33])
    assert (sizes["feed_forward_length"], sizes["head_count"], sizes["head_count_kv"]) == ([80, 33], [4, 4], [2, 2])


def test_dtypes() -> None:
    """Those of the source, by the stored tensor, by `source_dtypes`, or by the config; float64 becomes float32."""
    path = "model.layers.0.self_attn"
    stored = {f"{path}.q_proj.weight": torch.zeros(1), f"{path}.k_proj.weight": torch.zeros(1, dtype=torch.float64)}
    config = config_of(more={"source_dtypes": {f"{path}.v_proj.weight": "float16"}})
    dtypes = _file_dtypes(checkpoint_of(stored), config)
    assert dtypes["blk.0.attn_q.weight"] == dtypes["blk.0.attn_k.weight"] == torch.float32
    assert dtypes["blk.0.attn_v.weight"] == torch.float16
    assert dtypes["blk.1.attn_v.weight"] == dtypes["token_embd.weight"] == torch.bfloat16
    assert "blk.0.attn_norm.weight" not in dtypes, "vectors are float32"


def half(number: float) -> bytes:
    """Return the two bytes of a float16."""
    return struct.pack("<e", number)


def matrix_tensors(path: str, bits: int, group: int | None, rows: int = 4, columns: int = 32) -> dict[str, Any]:
    """Return packed tensors whose row r holds the code r - 2, with a scale of r + 1."""
    codes = torch.arange(rows)[:, None].expand(rows, columns).contiguous().to(torch.int8) - 2
    groups = 1 if group is None else columns // group
    scales = (torch.arange(rows)[:, None] + 1.0).expand(rows, groups).contiguous()
    assert pack(codes, bits).shape[0] == rows
    return packed_tensors(path, codes, scales, Scheme(bits=bits, group=group))


def test_eight_bits_are_written_as_they_are() -> None:
    """A block of 32 codes begins with its scale."""
    matrix = CodedMatrix("p", Scheme(bits=8, group=None), "Q8_0", (4, 32))
    stored = matrix.read(checkpoint_of(matrix_tensors("p", 8, None)))
    assert bytes(stored[0].tolist()) == half(1.0) + bytes([254] * 32)
    assert bytes(stored[3].tolist()) == half(4.0) + bytes([1] * 32)


def test_four_bits_share_bytes() -> None:
    """Two codes plus 8 in each of sixteen bytes: row 0 holds -2, so that every byte is 0x66."""
    matrix = CodedMatrix("p", Scheme(bits=4, group=32), "Q4_0", (4, 32))
    stored = matrix.read(checkpoint_of(matrix_tensors("p", 4, 32)))
    assert bytes(stored[0].tolist()) == half(1.0) + bytes([0x66] * 16)
    assert bytes(stored[3].tolist()) == half(4.0) + bytes([0x99] * 16)


@pytest.mark.parametrize(("heads", "order"), [(None, [0, 1, 2, 3]), (1, [0, 2, 1, 3]), (2, [0, 1, 2, 3])])
def test_rows_of_codes_and_scales_are_reordered_together(heads: int | None, order: list[int]) -> None:
    """One head of four rows has two pairs; two heads of two rows have one pair each."""
    arranged = unchanged if heads is None else partial(neighbours_first, heads=heads)
    matrix = CodedMatrix("p", Scheme(bits=8, group=32), "Q8_0", (4, 32), arranged)
    stored = matrix.read(checkpoint_of(matrix_tensors("p", 8, 32)))
    assert [bytes(row.tolist()) for row in stored] == [half(row + 1.0) + bytes([(row - 2) % 256] * 32) for row in order]


def test_experts_are_one_tensor_of_one_kind_and_shape() -> None:
    tensors = matrix_tensors("a", 8, 32) | matrix_tensors("b", 8, 32)
    coded = {path: CodedMatrix(path, Scheme(bits=8, group=32), "Q8_0", (4, 32)) for path in "ab"}
    found = coded_tensor(coded, ("b", "a"), (2, 4, 32))
    assert isinstance(found, CodedExperts)
    assert (found.kind, [matrix.path for matrix in found.matrices]) == ("Q8_0", ["b", "a"])
    assert torch.equal(found.read(checkpoint_of(tensors)), torch.stack([coded["b"].read(checkpoint_of(tensors))] * 2))
    assert coded_tensor(coded, ("a",), (4, 32)) == coded["a"]
    for paths, shape in ((("a", "c"), (2, 4, 32)), (("a", "b"), (2, 8, 32)), (("a",), (2, 2, 32)), ((), (4, 32))):
        assert coded_tensor(coded, paths, shape) is None, (paths, shape)
    for change in ({"kind": "Q4_0"}, {"shape": (2, 32)}):
        assert coded_tensor({**coded, "b": replace(coded["b"], **change)}, ("a", "b"), (2, 4, 32)) is None, change


def heads_of(matrix: Any) -> int | None:
    """Return the number of heads whose rows a matrix reorders, if any."""
    return None if matrix.arranged is unchanged else int(matrix.arranged.keywords["heads"])


def test_matrices_whose_codes_are_kept() -> None:
    """Those of 8 and 4 bits that are stored whole; factors and others are multiplied out.

    A matrix of 48 columns has no whole blocks of 32, a factor no place in the file, and narrow heads another shape.
    """
    prefix = "model.layers.0"
    paths = {
        f"{prefix}.self_attn.o_proj": (48, 64), f"{prefix}.self_attn.q_proj": (64, 48),
        f"{prefix}.mlp.down_proj": (48, 64), f"{prefix}.self_attn.v_proj.first": (16, 64), "lm_head": (320, 64),
        "model.layers.1.self_attn.v_proj": (16, 64),
    }  # fmt: skip
    tensors: dict[str, Any] = {}
    for path, (rows, columns) in paths.items():
        tensors |= matrix_tensors(path, 4, 16 if columns == 48 else 32, rows % 8, columns)
    rounded = {path: Scheme(bits=4, group=16 if columns == 48 else 32) for path, (_, columns) in paths.items()}
    forms = ({"v": {"form": "low_rank", "rank": 16}, **pruned(64)}, {"v": {"form": "head_pca", "rank": 8}})
    config = config_of(forms, more={"quantization_config": quantization_config(rounded, rounded)})
    matrices = _coded_tensors(checkpoint_of(tensors), config)
    assert {*matrices} == {"blk.0.attn_output.weight", "blk.0.ffn_down.weight", "output.weight"}
    assert {matrix.kind for matrix in matrices.values()} == {"Q4_0"}
    assert {heads_of(matrix) for matrix in matrices.values()} == {None}


def test_heads_of_kept_queries_and_keys() -> None:
    wide = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    names = [f"model.layers.1.self_attn.{role}_proj" for role in "qkv"]
    tensors: dict[str, Any] = {}
    for path in names:
        tensors |= matrix_tensors(path, 8, None, 4, 64)
    rounded = dict.fromkeys(names, Scheme(bits=8, group=None))
    config = config_of(more={"quantization_config": quantization_config(rounded, rounded)}, **wide)
    matrices = _coded_tensors(checkpoint_of(tensors), config)
    assert {name: heads_of(matrix) for name, matrix in matrices.items()} == {
        "blk.1.attn_q.weight": 4, "blk.1.attn_k.weight": 2, "blk.1.attn_v.weight": None,
    }  # fmt: skip


def test_names_of_modules() -> None:
    names = _file_names(config_of())
    assert len(names) == 2 + 2 * 7
    assert names["model.embed_tokens"] == "token_embd.weight"
    assert names["lm_head"] == "output.weight"
    assert names["model.layers.1.mlp.down_proj"] == "blk.1.ffn_down.weight"


class FileWriter(Recorder):
    """Records fields, tensor infos and the order of writing."""

    arch = "llama"

    def __init__(self) -> None:
        super().__init__()
        self.infos: list[tuple[Any, ...]] = []
        self.data: list[bytes] = []
        self.steps: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("write_") or name == "close":
            return lambda *of: self.steps.append(name)
        return super().__getattr__(name)

    def add_tensor_info(self, name: str, shape: Any, dtype: Any, num_bytes: int, raw_dtype: Any) -> None:
        self.infos.append((name, shape, num_bytes, raw_dtype.name))

    def write_tensor_data(self, data: Any) -> None:
        self.data.append(data.tobytes())


@pytest.fixture
def contents(monkeypatch: pytest.MonkeyPatch) -> FileWriter:
    """A file of a bfloat16 matrix (2, 3), a vector of 2, and a matrix (4, 32) of eight-bit codes."""
    pytest.importorskip("gguf")
    writer = FileWriter()
    shapes = [("a", (2, 3)), ("b", (2,)), ("c", (4, 32))]
    tensors = [torch.ones(2, 3, dtype=torch.float64), torch.tensor([1.0, 2.0]), torch.zeros(4, 32)]
    rounded = {"c": CodedMatrix("p", Scheme(bits=8, group=None), "Q8_0", (4, 32))}
    found = (shapes, {"a": torch.bfloat16}, rounded, writer, iter(tensors))
    monkeypatch.setattr(gguf_file, "_contents", lambda *of: found)
    return writer


def test_a_file_is_written_tensor_by_tensor(contents: FileWriter) -> None:
    """Infos have the bytes of rows. Numbers are counted before rounding, kinds are those of matrices."""
    kinds: list[Any] = []
    checkpoint = checkpoint_of(matrix_tensors("p", 8, None))
    said = _write(checkpoint, {}, Path("f"), lambda writer, of: kinds.extend(of), print)
    assert said == {"parameters": 6 + 2 + 128, "architecture": "llama"}
    assert contents.infos == [
        ("a", (2, 6), 12, "BF16"), ("b", (8,), 8, "F32"), ("c", (4, 34), 136, "Q8_0"),
    ]  # fmt: skip
    assert kinds == ["BF16", "Q8_0"]
    assert contents.data[0] == bytes.fromhex("803f") * 6
    assert contents.data[1] == struct.pack("<2f", 1.0, 2.0)
    assert contents.data[2][:34] == half(1.0) + bytes([254] * 32)
    assert [*map(len, contents.data)] == [num_bytes for _, _, num_bytes, _ in contents.infos]
    assert contents.steps == ["write_header_to_file", "write_kv_data_to_file", "write_ti_data_to_file", "close"]


def test_a_file_is_closed_if_its_tensors_cannot_be_read(contents: FileWriter) -> None:
    with pytest.raises(KeyError):
        _write(checkpoint_of({}), {}, Path("f"), lambda *of: None, print)
    assert contents.steps[-1] == "close"


@pytest.mark.parametrize(
    ("kinds", "number", "codes"),
    [
        (["F32", "F32", "BF16"], 0, False),
        (["BF16", "F32", "BF16"], 32, False),
        (["F16"], 1, False),
        (["Q4_0", "BF16", "Q4_0"], 2, True),
        (["Q8_0", "BF16", "BF16"], 32, True),
        (["Q8_0"], 7, True),
    ],
)
def test_the_file_type_is_that_of_most_matrices(kinds: list[str], number: int, codes: bool) -> None:
    """llama.cpp's numbers. The version of quantization is written beside any codes."""
    gguf = pytest.importorskip("gguf")
    recorder = Recorder()
    _add_description("/models/out-keep80", checkpoint_of({}), {"vocab_size": 3}, None, recorder, kinds)
    expected = {"name": "out-keep80", "file_type": number, "tokenizer_model": "no_vocab"}
    version = {"quantization_version": gguf.GGML_QUANT_VERSION} if codes else {}
    assert recorder.fields == expected | version


def test_a_place_that_is_no_file_of_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is read of the model."""
    monkeypatch.setattr(gguf_file.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(gguf_file, "compressed_checkpoint", lambda *of: (checkpoint_of({}), config_of()))
    for place in (str(tmp_path / "absent" / "model.gguf"), "s3://bucket/model.gguf"):
        with pytest.raises(InputError, match="its folder is not a directory of this machine"):
            export_gguf("out", place, print)
    (tmp_path / "link.gguf").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="exists already; give a new file"):
        export_gguf("out", str(tmp_path / "link.gguf"), print)
