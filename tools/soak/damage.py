"""Ways to damage a file, and edits of a finished checkpoint after which every digest fits again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pipeline.checkpoint.compression_record import RECORD_FILE, describe_bytes, encode_json, index_arguments, sealed
from stores.checkpoint import describe_shard, index_content, write_shard
from stores.headers import read_header
from stores.source import INDEX_FILE
from tests.end_to_end.jobs import Job

Damage = Callable[[bytes], bytes | None]  # None: the file is deleted
Entry = dict[str, Any]
EXTRA = "model.layers.0.mlp.extra.weight"


def flip(share: float) -> Damage:
    """Flip one bit, at a share of the length; in the last byte at 1."""

    def flipped(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[min(int(share * len(changed)), len(changed) - 1)] ^= 1
        return bytes(changed)

    return flipped


DAMAGES: dict[str, Damage] = {
    "first byte": flip(0.0),
    "a byte in front": flip(0.1),
    "middle byte": flip(0.5),
    "last byte": flip(1.0),
    "cut by one": lambda content: content[:-1],
    "cut to half": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "deleted": lambda content: None,
    "appended to": lambda content: content + b"\n",
    "zeros": lambda content: bytes(len(content)),
}
SAME_SIZE = (
    "first byte",
    "a byte in front",
    "middle byte",
    "last byte",
    "zeros",
)  # `verify` sees these, `run` does not


def damage(path: Path, change: Damage) -> bool:
    """Replace a file by changed bytes; hard links to it keep theirs. Return False if the change changes nothing."""
    before = path.read_bytes()
    after = change(before) if before else (None if change(b"x") is None else b"x")
    if after == before:
        return False
    replace(path, after)
    return True


def replace(path: Path, content: bytes | None) -> None:
    """Write a file again, so that hard links to the old one keep its bytes; None deletes it."""
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)


def copy_job(job: Job, root: Path) -> Job:
    """Copy a job with all its files, as hard links: `damage` never writes to a file in place."""
    copied = Job(root, job.source, job.text, job.changes)
    shutil.copytree(job.root, root, copy_function=os.link)
    copied.manifest.unlink()  # or writing the manifest would write to the other's
    return copied.write()


class Edited:
    """A checkpoint whose files are changed; `seal` makes all digests fit."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.compression: Entry = json.loads((output / RECORD_FILE).read_bytes())
        self.tensors: dict[str, Entry] = self.compression["tensors"]

    def put(self, shard: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write a shard with other tensors, and the entries that describe it."""
        (self.output / shard).unlink()
        write_shard(self.output, shard, tensors)
        for name in [name for name, entry in self.tensors.items() if entry["shard"] == shard and name not in tensors]:
            del self.tensors[name]
        self.describe(shard)

    def describe(self, shard: str) -> None:
        """Make the entries of a shard those of its file."""
        described = describe_shard(self.output, shard).as_json()
        self.compression["shards"][shard] = {key: described[key] for key in ("size", "sha256")}
        for name, entry in described["tensors"].items():
            self.tensors[name] = {"form": "dense", "origin": "copied", **self.tensors.get(name, {}), **entry}
            self.tensors[name]["shard"] = shard

    def edit_shard(self, name: str, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
        """Change the tensors of the shard that holds a tensor."""
        shard = self.tensors[name]["shard"]
        self.put(shard, edit(load_file(self.output / shard)))

    def change(self, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change one tensor."""
        self.edit_shard(name, lambda tensors: {**tensors, name: change(tensors[name])})

    def remove(self, name: str) -> None:
        """Remove a tensor from its shard and from the record."""
        self.edit_shard(name, lambda tensors: {key: value for key, value in tensors.items() if key != name})

    def config(self, change: Callable[[Entry], object]) -> None:
        """Change the config."""
        content = json.loads((self.output / "config.json").read_bytes())
        change(content)
        self.write("config.json", encode_json(content))

    def write(self, name: str, content: bytes) -> None:
        """Write a file, and its digest into the record."""
        replace(self.output / name, content)
        self.compression["files"][name] = describe_bytes(content)

    def first(self, accepts: Callable[[str, Entry], bool]) -> str:
        """Return the first tensor of a kind. Raises StopIteration if there is none."""
        return next(name for name, entry in sorted(self.tensors.items()) if accepts(name, entry))

    def seal(self, index: bool = True) -> None:
        """Write the index and the record."""
        if index:
            self.write(INDEX_FILE, index_content(*index_arguments(self.compression)))
        replace(self.output / RECORD_FILE, encode_json(sealed(self.compression)))


def _copied(_: str, entry: Entry) -> bool:
    return bool(entry["origin"] == "copied")


def _stored_form(_: str, entry: Entry) -> bool:
    return bool(entry["origin"] != "copied" and entry["form"] != "dense")


def _factor(_: str, entry: Entry) -> bool:
    return bool(entry["form"] != "dense" and entry["dtype"] != "U8")


def _factor_weight(name: str, entry: Entry) -> bool:
    return _factor(name, entry) and name.endswith("weight")


def _norm(name: str, entry: Entry) -> bool:
    return _copied(name, entry) and name.endswith("layernorm.weight")


def _noisy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * (1 + 0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))


def _grow_factors(edited: Edited) -> None:
    chosen = {name for name, entry in edited.tensors.items() if entry["origin"] != "copied"}
    edited.edit_shard(
        edited.first(_stored_form),
        lambda tensors: {n: t * 100 if n in chosen and t.is_floating_point() else t for n, t in tensors.items()},
    )


def _write_nan(edited: Edited) -> None:
    name = edited.first(_factor)
    path = edited.output / edited.tensors[name]["shard"]
    content, at = bytearray(path.read_bytes()), read_header(path.parent, path.name)[name]
    content[at.begin : at.begin + 4] = b"\xff\xff\xff\x7f"
    replace(path, bytes(content))
    edited.describe(path.name)


def _add(edited: Edited) -> None:
    shard = sorted(edited.compression["shards"])[0]
    edited.put(shard, {**load_file(edited.output / shard), EXTRA: torch.ones(3)})


def _add_unnamed(edited: Edited) -> None:
    _add(edited)
    del edited.tensors[EXTRA]


def _exchange(edited: Edited) -> None:
    """Exchange two tensors of equal shape across shards."""
    names = [name for name in sorted(edited.tensors) if name.endswith("input_layernorm.weight")]
    one, other = (load_file(edited.output / edited.tensors[name]["shard"])[name] for name in (names[0], names[-1]))
    edited.change(names[0], lambda _: other)
    edited.change(names[-1], lambda _: one)


def _point_elsewhere(edited: Edited) -> None:
    index = json.loads((edited.output / INDEX_FILE).read_bytes())
    name, shard = sorted(index["weight_map"].items())[0]
    index["weight_map"][name] = next(other for other in sorted(edited.compression["shards"]) if other != shard)
    edited.write(INDEX_FILE, (json.dumps(index, indent=2) + "\n").encode())


def _claim(edited: Edited) -> None:
    claimed = edited.compression["claimed"]
    claimed[edited.first(_norm)] = next(iter(claimed.values()))


def _change_rank(config: Entry) -> None:
    form = next(iter(config["forms"][0].values()))
    form.update({"rank": 1} if "rank" in form else {"ranks": [1, 1, 1]})


def _count(name: str, model: str, change: Callable[[int], int]) -> Callable[[Edited], None]:
    def edit_count(edited: Edited) -> None:
        counts = edited.compression["counts"][name]
        counts[model] = change(counts[model])

    return edit_count


EDITS: dict[str, Callable[[Edited], object]] = {
    "a copied tensor changed": lambda edited: edited.change(edited.first(_copied), lambda tensor: tensor + 1e-3),
    "factors of a shard times 100": _grow_factors,
    "out of reach: a factor changed by 10 %": lambda edited: edited.change(edited.first(_factor), _noisy),
    "a factor upside down": lambda edited: edited.change(edited.first(_factor_weight), lambda tensor: tensor.flip(0)),
    "NaN in a factor": _write_nan,
    "a factor one row shorter": lambda edited: edited.change(
        edited.first(_factor_weight), lambda tensor: tensor[:-1].contiguous()
    ),
    "the head transposed": lambda edited: edited.change(
        edited.first(lambda name, _: "lm_head" in name), lambda tensor: tensor.T.contiguous()
    ),
    "a factor in another dtype": lambda edited: edited.change(edited.first(_factor), lambda tensor: tensor.half()),
    "a factor missing everywhere": lambda edited: edited.remove(edited.first(_stored_form)),
    "a norm missing everywhere": lambda edited: edited.remove(edited.first(_norm)),
    "a tensor more": _add,
    "a tensor more, in no compression": _add_unnamed,
    "two tensors exchanged": _exchange,
    "the index points elsewhere": _point_elsewhere,
    "a copied tensor claimed": _claim,
    "claimed by an unknown method": lambda edited: edited.compression.update(
        claimed=dict.fromkeys(edited.compression["claimed"], "nobody")
    ),
    "a tensor's digest of another": lambda edited: edited.tensors[edited.first(_copied)].update(sha256="0" * 64),
    "decoder parameters off by one": _count("decoder_parameters", "compressed", lambda count: count - 1),
    "cache bytes halved": _count("cache_bytes_per_token", "compressed", lambda count: count // 2),
    "dense parameters off by one": _count("parameters", "dense", lambda count: count + 1),
    "a rank changed in the config": lambda edited: edited.config(_change_rank),
    "norm_eps changed in the config": lambda edited: edited.config(lambda config: config.update(norm_eps=0.5)),
    "no digest of a modelling file": lambda edited: edited.compression["files"].pop("layers_lamina.py"),
    "model.safetensors beside the index": lambda edited: replace(edited.output / "model.safetensors", b""),
    "adapter_config.json added": lambda edited: replace(edited.output / "adapter_config.json", b"{}"),
    "a shape that is a text": lambda edited: edited.tensors[edited.first(_copied)].update(shape="wide"),
    "a bit of a bitmap": lambda edited: edited.change(
        edited.first(lambda name, _: name.endswith(".mask")), lambda tensor: tensor ^ 1
    ),
    "a tokenizer changed": lambda edited: edited.write(
        "tokenizer.json", (edited.output / "tokenizer.json").read_bytes() + b"\n"
    ),
    "out of reach: a factor changed by 1e-6": lambda edited: edited.change(
        edited.first(_factor), lambda tensor: tensor * (1 + 1e-6)
    ),
}


def edit(output: Path, name: str) -> bool:
    """Make an edit of a checkpoint and seal it. Return False if the checkpoint holds nothing to be edited so."""
    edited = Edited(output)
    try:
        EDITS[name](edited)
    except StopIteration:
        return False
    edited.seal(index=name != "the index points elsewhere")
    return True
