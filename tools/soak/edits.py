"""Edits of a finished checkpoint after which every digest fits again, as a careless or hostile hand would make them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pipeline.checkpoint.compression_record import RECORD_FILE, describe_bytes, encode_json, index_arguments, sealed
from stores.checkpoint import describe_shard, index_content, write_shard
from stores.headers import read_header
from stores.source import INDEX_FILE


class Edited:
    """A checkpoint whose files are changed; `seal` makes all digests fit."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.compression: dict[str, Any] = json.loads((output / RECORD_FILE).read_bytes())

    def shard(self, name: str) -> dict[str, torch.Tensor]:
        with safe_open(self.output / name, "pt") as file:
            return {tensor: file.get_tensor(tensor) for tensor in file.keys()}  # noqa: SIM118 - no mapping

    def put(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """A shard with other tensors, and entries that describe it."""
        path = self.output / name
        path.unlink()
        write_shard(path.parent, path.name, tensors)
        described = describe_shard(path.parent, path.name).as_json()
        self.compression["shards"][name] = {key: described[key] for key in ("size", "sha256")}
        for tensor in [t for t, entry in self.compression["tensors"].items() if entry["shard"] == name]:
            if tensor not in described["tensors"]:
                del self.compression["tensors"][tensor]
        for tensor, found in described["tensors"].items():
            base = {"form": "dense", "origin": "copied"}
            self.compression["tensors"][tensor] = {**base, **self.compression["tensors"].get(tensor, {}), **found}
            self.compression["tensors"][tensor]["shard"] = name

    def change(self, tensor: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        name = self.compression["tensors"][tensor]["shard"]
        tensors = self.shard(name)
        self.put(name, {**tensors, tensor: change(tensors[tensor])})

    def config(self, change: Callable[[dict[str, Any]], object]) -> None:
        content = json.loads((self.output / "config.json").read_bytes())
        change(content)
        self.write("config.json", encode_json(content))

    def write(self, name: str, content: bytes) -> None:
        (self.output / name).unlink(missing_ok=True)
        (self.output / name).write_bytes(content)
        self.compression["files"][name] = describe_bytes(content)

    def first(self, copied: bool, ends: str = "") -> str:
        """The name of a tensor that was copied, or that a method made."""
        names = [
            name
            for name, entry in sorted(self.compression["tensors"].items())
            if (entry["origin"] == "copied") is copied and name.endswith(ends) and (copied or entry["form"] != "dense")
        ]
        return names[0]

    def seal(self, index: bool = True) -> None:
        if index:
            self.write(INDEX_FILE, index_content(*index_arguments(self.compression)))
        (self.output / RECORD_FILE).unlink()
        (self.output / RECORD_FILE).write_bytes(encode_json(sealed(self.compression)))


def _copied_changed(made: Edited) -> None:
    made.change(made.first(copied=True), lambda tensor: tensor + 1e-3)


def _factors_grown(made: Edited) -> None:
    name = made.compression["tensors"][made.first(copied=False)]["shard"]
    factors = {t for t, entry in made.compression["tensors"].items() if entry["origin"] != "copied"}
    tensors = made.shard(name)
    chosen = {t: value * 100 for t, value in tensors.items() if t in factors and value.is_floating_point()}
    made.put(name, {**tensors, **chosen})


def _factor_nudged(made: Edited) -> None:
    name = next(n for n in sorted(made.compression["tensors"]) if _is_float_factor(made, n))
    made.change(name, lambda tensor: tensor * (1 + 1e-6))


def _factor_changed(made: Edited) -> None:
    """By 10 %, at random."""
    generator = torch.Generator().manual_seed(0)
    name = next(n for n in sorted(made.compression["tensors"]) if _is_float_factor(made, n))
    made.change(name, lambda tensor: tensor * (1 + 0.1 * torch.randn(tensor.shape, generator=generator)))


def _is_float_factor(made: Edited, name: str) -> bool:
    entry = made.compression["tensors"][name]
    return entry["form"] != "dense" and entry["dtype"] != "U8"


def _rows_exchanged(made: Edited) -> None:
    name = next(n for n in sorted(made.compression["tensors"]) if _is_float_factor(made, n) and n.endswith("weight"))
    made.change(name, lambda tensor: tensor.flip(0))


def _factor_nan(made: Edited) -> None:
    name = next(n for n in sorted(made.compression["tensors"]) if _is_float_factor(made, n))
    path = made.output / made.compression["tensors"][name]["shard"]
    content = bytearray(path.read_bytes())
    at = read_header(path.parent, path.name)[name]
    content[at.begin : at.begin + 4] = b"\xff\xff\xff\x7f"
    path.unlink()
    path.write_bytes(content)
    described = describe_shard(path.parent, path.name).as_json()
    made.compression["shards"][path.name] = {key: described[key] for key in ("size", "sha256")}
    made.compression["tensors"][name].update(described["tensors"][name])


def _shape(made: Edited) -> None:
    name = next(n for n in sorted(made.compression["tensors"]) if _is_float_factor(made, n) and n.endswith("weight"))
    made.change(name, lambda tensor: tensor[:-1].contiguous())


def _transposed(made: Edited) -> None:
    name = next(n for n in sorted(made.compression["tensors"]) if "lm_head" in n)
    made.change(name, lambda tensor: tensor.T.contiguous())


def _dtype(made: Edited) -> None:
    name = next(n for n in sorted(made.compression["tensors"]) if _is_float_factor(made, n))
    made.change(name, lambda tensor: tensor.to(torch.float16))


def _missing(made: Edited) -> None:
    name = made.first(copied=False)
    shard = made.compression["tensors"][name]["shard"]
    made.put(shard, {t: value for t, value in made.shard(shard).items() if t != name})


def _missing_copied(made: Edited) -> None:
    name = next(n for n in sorted(made.compression["tensors"]) if n.endswith("layernorm.weight"))
    shard = made.compression["tensors"][name]["shard"]
    made.put(shard, {t: value for t, value in made.shard(shard).items() if t != name})


def _extra(made: Edited) -> None:
    shard = sorted(made.compression["shards"])[0]
    made.put(shard, {**made.shard(shard), "model.layers.0.mlp.extra.weight": torch.ones(3)})


def _extra_unnamed(made: Edited) -> None:
    _extra(made)
    del made.compression["tensors"]["model.layers.0.mlp.extra.weight"]


def _moved(made: Edited) -> None:
    """Two tensors of equal shape exchanged, across shards."""
    names = [n for n in sorted(made.compression["tensors"]) if n.endswith("input_layernorm.weight")]
    one, other = names[0], names[-1]
    shards = [made.compression["tensors"][name]["shard"] for name in (one, other)]
    values = [made.shard(shard)[name] for shard, name in zip(shards, (one, other), strict=True)]
    made.put(shards[0], {**made.shard(shards[0]), one: values[1]})
    made.put(shards[1], {**made.shard(shards[1]), other: values[0]})


def _index_elsewhere(made: Edited) -> None:
    index = json.loads((made.output / INDEX_FILE).read_bytes())
    name = sorted(index["weight_map"])[0]
    index["weight_map"][name] = next(s for s in sorted(made.compression["shards"]) if s != index["weight_map"][name])
    made.write(INDEX_FILE, (json.dumps(index, indent=2) + "\n").encode())


def _claimed(made: Edited) -> None:
    """A copied tensor is said to be a method's."""
    name = made.first(copied=True, ends="layernorm.weight")
    made.compression["claimed"][name] = next(iter(made.compression["claimed"].values()))


def _method(made: Edited) -> None:
    made.compression["claimed"] = dict.fromkeys(made.compression["claimed"], "nobody")


def _tensor_digest(made: Edited) -> None:
    made.compression["tensors"][made.first(copied=True)]["sha256"] = "0" * 64


def _counts(made: Edited) -> None:
    made.compression["counts"]["decoder_parameters"]["compressed"] -= 1


def _cache(made: Edited) -> None:
    made.compression["counts"]["cache_bytes_per_token"]["compressed"] //= 2


def _dense_count(made: Edited) -> None:
    made.compression["counts"]["parameters"]["dense"] += 1


def _rank(made: Edited) -> None:
    def change(config: dict[str, Any]) -> None:
        form = next(iter(config["forms"][0].values()))
        form["rank" if "rank" in form else "ranks"] = 1 if "rank" in form else [1, 1, 1]

    made.config(change)


def _epsilon(made: Edited) -> None:
    made.config(lambda config: config.update(norm_eps=0.5))


def _no_digest(made: Edited) -> None:
    del made.compression["files"]["layers_lamina.py"]


def _extra_file(made: Edited) -> None:
    (made.output / "model.safetensors").write_bytes(b"")


def _extra_adapter(made: Edited) -> None:
    (made.output / "adapter_config.json").write_text("{}")


def _broken_type(made: Edited) -> None:
    made.compression["tensors"][made.first(copied=True)]["shape"] = "wide"


def _bitmap(made: Edited) -> None:
    name = next(n for n in sorted(made.compression["tensors"]) if n.endswith(".mask"))
    made.change(name, lambda tensor: tensor ^ 1)


def _tokenizer(made: Edited) -> None:
    content = (made.output / "tokenizer.json").read_bytes()
    made.write("tokenizer.json", content + b"\n")


EDITS: dict[str, Callable[[Edited], None]] = {
    "a copied tensor changed": _copied_changed,
    "factors of a shard times 100": _factors_grown,
    "out of reach: a factor changed by 10 %": _factor_changed,
    "a factor upside down": _rows_exchanged,
    "NaN in a factor": _factor_nan,
    "a factor one row shorter": _shape,
    "the head transposed": _transposed,
    "a factor in another dtype": _dtype,
    "a factor missing everywhere": _missing,
    "a norm missing everywhere": _missing_copied,
    "a tensor more": _extra,
    "a tensor more, in no compression": _extra_unnamed,
    "two tensors exchanged": _moved,
    "the index points elsewhere": _index_elsewhere,
    "a copied tensor claimed": _claimed,
    "claimed by an unknown method": _method,
    "a tensor's digest of another": _tensor_digest,
    "decoder parameters off by one": _counts,
    "cache bytes halved": _cache,
    "dense parameters off by one": _dense_count,
    "a rank changed in the config": _rank,
    "norm_eps changed in the config": _epsilon,
    "no digest of a modelling file": _no_digest,
    "model.safetensors beside the index": _extra_file,
    "adapter_config.json added": _extra_adapter,
    "a shape that is a text": _broken_type,
    "a bit of a bitmap": _bitmap,
    "a tokenizer changed": _tokenizer,
    "out of reach: a factor changed by 1e-6": _factor_nudged,
}


def edit(output: Path, name: str) -> bool:
    """Makes an edit of a checkpoint and seals it; False when it holds nothing to be edited so."""
    made = Edited(output)
    try:
        EDITS[name](made)
    except StopIteration:
        return False
    made.seal(index=name != "the index points elsewhere")
    return True
