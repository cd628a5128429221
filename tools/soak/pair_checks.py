"""Check the output of a pair whose job ended well. Each check yields faults.

Legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.nn import functional

from manifests.calibration import Text
from manifests.evaluation import Perplexity
from pipeline.inputs.calibration import window_tokens
from stores.headers import DTYPES, TensorRecord, read_header
from tests.end_to_end.exports import as_llama
from tests.end_to_end.jobs import command, load, logits_of, relative_error
from tools.soak.pair_manifests import TEXT, at_full_rank
from tools.soak.pair_models import ModelSpec

EXACT = 2e-4  # relative, of logits that float32 products in another order give
REWRITTEN = {"float32": 2e-4, "float16": 0.05, "bfloat16": 0.3}  # likewise, of weights rounded to a dtype once more
GGUF_CODES = 0.02  # its scales are float16
TOKENS, BATCH, PADDED, WINDOW = 14, 2, 3, 8
TARGETS = ("dense", "stock", "gguf")
VERIFY_BOUND = "1000"
PLAIN = "plain"  # the folder of the model with the usual names of tensors
Tensors = dict[str, TensorRecord]


@dataclass(frozen=True)
class Played:
    """A pair in the working directory, which holds `model` and `output`; `document` is its manifest."""

    spec: ModelSpec
    document: dict[str, Any]
    summary: dict[str, Any]

    def token_ids(self) -> Tensor:
        """Draw token ids (B, T), none of them special."""
        length = min(TOKENS, self.spec.config["max_position_embeddings"] - PADDED)
        generator = torch.Generator().manual_seed(self.spec.seed)
        return torch.randint(2, self.spec.config["vocab_size"], (BATCH, length), generator=generator)


def faults_of(played: Played) -> Iterator[str]:
    """Yield all faults, with the check's name in front. A check that raises is a fault, too."""
    for check in CHECKS:
        try:
            yield from (f"{check.__name__}: {fault}" for fault in check(played))
        except Exception as error:
            message = " ".join(str(error).split())[:400]
            yield f"{check.__name__}: {type(error).__name__}: {message}"


def plan(_: Played) -> Iterator[str]:
    """`plan` accepts a manifest that `run` accepts."""
    ended = command("plan", "manifest.yaml", "--gpu", "H200", "--json")
    if ended.code not in (0, 2) or (ended.code == 2 and "does not fit" not in ended.out + ended.err):
        yield f"exit {ended.code}: {ended.err[-300:]}"


def stored_bytes(played: Played) -> Iterator[str]:
    """Files hold as many bytes and numbers as compression.json counts."""
    tensors, counts = _tensors(Path("output")), _counts()
    measured = (
        ("bytes", "compressed", sum(record.end - record.begin for record in tensors.values())),
        ("bytes", "dense", sum(record.end - record.begin for record in _tensors(Path("model")).values())),
        ("parameters", "compressed", sum(_numbers(record, played) for record in tensors.values())),
    )
    for quantity, model, stored in measured:
        if stored != counts[quantity][model]:
            yield f"files hold {stored} {quantity} ({model}), compression.json says {counts[quantity][model]}"


def budget(played: Played) -> Iterator[str]:
    """The stored total is at most the target."""
    limits = played.document.get("budget") or {}
    if "max_loss" in limits:
        divergence = played.summary["held_out"]["divergence"]
        if divergence > limits["max_loss"]:
            yield f"max_loss: {limits['max_loss']}: the output is {divergence} nats from the source"
        return
    unit = "bytes" if "bytes" in limits else "keep"
    if unit not in limits or (unit == "keep" and "quantize" in played.document):
        return  # numbers are counted before they are rounded
    dense, compressed = (_in_scope(path, limits.get("scope", "decoder"), unit, played) for path in (PLAIN, "output"))
    if compressed > limits[unit] * dense * (1 + 1e-12):  # 0.7 · 5200 is 3639.99… in binary
        yield f"{unit}: {limits[unit]}: {compressed} of {dense} are stored, {compressed / dense:.4f}"


def perplexity(_: Played) -> Iterator[str]:
    """`evaluate` measures the loss that transformers computes with OUTPUT."""
    measured = command("evaluate", "output", "--text", TEXT, "--window", str(WINDOW), "--json").json
    vocab = json.loads(Path("output/config.json").read_text())["vocab_size"]
    windows = window_tokens("output", Perplexity(text=Text(files=(TEXT,)), window=WINDOW), vocab)
    model, losses, tokens, first = _loaded("output"), 0.0, 0, max(1, len(windows.prefix))
    for ids_BT in windows.ids.long().split(32):
        logits_BTV, next_BT = logits_of(model, ids_BT)[:, first - 1 : -1].double(), ids_BT[:, first:]
        losses += functional.cross_entropy(logits_BTV.flatten(0, 1), next_BT.flatten(), reduction="sum").item()
        tokens += next_BT.numel()
    if measured["tokens"] != tokens or not math.isclose(measured["loss"], losses / tokens, rel_tol=1e-4):
        mine = f"{measured['loss']} over {measured['tokens']} tokens"
        yield f"evaluate says {mine}, transformers {losses / tokens} over {tokens}"


def cached_decoding(played: Played) -> Iterator[str]:
    """Decoding a batch token by token with a cache gives the logits of one prefill."""
    model, ids_BT = _loaded("output"), played.token_ids()
    expected_BTV, first = logits_of(model, ids_BT), ids_BT.shape[1] // 2
    with torch.no_grad():
        out = model(ids_BT[:, :first], use_cache=True)
        steps = [out.logits]
        for position in range(first, ids_BT.shape[1]):
            step_B1 = ids_BT[:, position : position + 1]
            out = model(step_B1, use_cache=True, past_key_values=out.past_key_values)
            steps.append(out.logits)
    yield from _differ(torch.cat(steps, dim=1), expected_BTV, EXACT)


def left_padding(played: Played) -> Iterator[str]:
    """Padding one row on the left changes neither its logits nor the other's."""
    model, ids_BT = _loaded("output"), played.token_ids()
    pad = played.spec.config["pad_token_id"]
    padded_BT = torch.full((BATCH, ids_BT.shape[1]), pad)
    padded_BT[0] = ids_BT[0]
    padded_BT[1, PADDED:] = ids_BT[1, :-PADDED]
    mask_BT = torch.ones_like(padded_BT)
    mask_BT[1, :PADDED] = 0
    positions_BT = (mask_BT.cumsum(-1) - 1).clamp_min(0)
    found_BTV = logits_of(model, padded_BT, attention_mask=mask_BT, position_ids=positions_BT)
    expected_BTV = logits_of(model, ids_BT)
    yield from _differ(found_BTV[0], expected_BTV[0], EXACT)
    yield from _differ(found_BTV[1, PADDED:], expected_BTV[1, :-PADDED], EXACT)


def verify(_: Played) -> Iterator[str]:
    """`verify --source` passes."""
    ended = command("verify", "output", "--source", "model", "--bound", VERIFY_BOUND)
    if ended.code != 0:
        faults = [line for line in ended.out.splitlines() if not line.strip().startswith("ok")]
        yield f"exit {ended.code}: {' '.join(faults)[:400]} {ended.err[-200:]}"


def exports(played: Played) -> Iterator[str]:
    """Every export gives the model's logits, or is refused, leaves nothing and is not on the card."""
    offered = dict(re.findall(r"--to (\w+)( --multiply-out)?", Path("output/README.md").read_text()))
    expected_BTV = logits_of(_loaded("output"), played.token_ids())
    for target in TARGETS:
        destination = Path(f"exported-{target}")
        options = offered.get(target, "").split()
        ended = command("export", "output", "--to", target, *options, str(destination), "--json")
        if ended.code == 0:
            if target == "gguf" and played.spec.is_mixture:
                continue  # `tests/end_to_end/test_export_gguf.py` reads them
            if target == "stock" and _needs_bitsandbytes(destination):
                continue
            try:
                found_BTV = logits_of(_exported(destination, target, played.spec.is_mixture), played.token_ids())
            except Exception as error:
                yield f"{target}: cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                continue
            tolerance = max(REWRITTEN[played.spec.dtype], GGUF_CODES if "quantize" in played.document else 0.0)
            yield from (f"{target}: {fault}" for fault in _differ(found_BTV, expected_BTV, tolerance))
            continue
        if ended.code != 2 or "wrong input: " not in ended.err:
            yield f"{target}: exit {ended.code}: {ended.err[-400:]}"
        if target in offered:
            yield f"{target}: the card offers it, but it is refused: {ended.err[-300:]}"
        if remains := [path.name for path in Path().glob(f"{destination}*")]:
            yield f"{target}: refused, and leaves {', '.join(remains)}"


def full_rank(played: Played) -> Iterator[str]:
    """The same job with nothing cut off and nothing rounded gives the source's logits."""
    document = at_full_rank(played.document, played.spec.width)
    if not document["methods"]:
        return
    Path("full.yaml").write_text(yaml.safe_dump(document))
    ended = command("run", "full.yaml", "--json")
    if ended.code == 2 and "wrong input: " in ended.err:
        return  # some methods need a budget to decide
    if ended.code != 0:
        yield f"exit {ended.code}: {ended.err[-400:]}"
        return
    tolerance = {**REWRITTEN, "float32": 2e-3}[played.spec.dtype]
    full, source = (logits_of(_loaded(path), played.token_ids()) for path in ("full", "model"))
    yield from _differ(full, source, tolerance)


CHECKS: tuple[Callable[[Played], Iterator[str]], ...] = (
    plan, stored_bytes, budget, perplexity, cached_decoding, left_padding, verify, exports, full_rank,
)  # fmt: skip


def _differ(logits: Tensor, expected: Tensor, tolerance: float) -> Iterator[str]:
    error = relative_error(logits, expected)
    if not error <= tolerance:
        yield f"logits differ by {error:.3g} of the largest, {tolerance} is allowed"


def _loaded(path: str) -> Any:
    return load(Path(path), dtype=torch.float32)


def _exported(destination: Path, target: str, is_mixture: bool) -> Any:
    """Load an export by the source's own class, without our code."""
    if target != "gguf":
        options = {"experts_implementation": "eager"} if is_mixture else {}  # others want rows of whole 16 bytes
        return load(destination, dtype=torch.float32, trust_remote_code=False, **options)
    import gguf

    reader = gguf.GGUFReader(destination)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in reader.tensors
    }
    rope = json.loads(Path("model/config.json").read_text())["rope_parameters"]
    return as_llama(fields, tensors, rope)


def _needs_bitsandbytes(destination: Path) -> bool:
    """Return True for an export in NF4 where transformers has no package to load it."""
    stored = json.loads((destination / "config.json").read_text()).get("quantization_config", {})
    return stored.get("quant_method") == "bitsandbytes" and find_spec("bitsandbytes") is None


def _tensors(folder: Path) -> Tensors:
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    return {name: record for shard in shards for name, record in read_header(folder, shard).items()}


def _counts() -> dict[str, Any]:
    counts: dict[str, Any] = json.loads(Path("output/compression.json").read_text())["counts"]
    return counts


def _numbers(record: TensorRecord, played: Played) -> int:
    """Count numbers as docs/formats.md does: indices and codes by their bytes, in numbers of the checkpoint's dtype."""
    size = math.prod(record.shape)
    if DTYPES[record.dtype].is_floating_point:
        return size
    itemsize: int = getattr(torch, played.spec.dtype).itemsize
    return math.ceil((record.end - record.begin) / itemsize)


def _in_scope(folder: str, scope: str, unit: str, played: Played) -> int:
    layers = json.loads(Path("output/config.json").read_text())["block"]["layers"]
    prefix = "" if scope == "model" else f"{layers}."
    records = [record for name, record in _tensors(Path(folder)).items() if name.startswith(prefix)]
    if unit == "bytes":
        return sum(record.end - record.begin for record in records)
    return sum(_numbers(record, played) for record in records)
