"""The model card of a checkpoint, its README.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.checkpoint.engines import engine_table


def model_card(compression: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the README.md of a checkpoint with this compression.json and this config.json."""
    counts, treatment = compression["counts"], _treatment(compression["manifest"])
    parameters, decoder = counts["parameters"], counts["decoder_parameters"]
    stored, cache = counts["bytes"], counts["cache_bytes_per_token"]
    origin = f"Written by Lamina {compression['code_version']} from a {compression['source']['model_type']} model."
    return f"""---
library_name: transformers
tags: [lamina, compressed]
---
# {Path(compression["source"]["path"]).name}, {treatment}

| | dense | compressed |
|---|---|---|
| stored numbers | {parameters["dense"]:,} | {parameters["compressed"]:,} |
| of these in decoder layers | {decoder["dense"]:,} | {decoder["compressed"]:,} |
| bytes | {stored["dense"]:,} | {stored["compressed"]:,} |
| cache bytes per token | {cache["dense"]:,} | {cache["compressed"]:,} |
{_healed(compression.get("healed"))}
{_loading(config)} `compression.json` lists the form and the method of every tensor.
{origin}{_left_out(compression["source"].get("left_out", ()))}

{engine_table(config, cache["compressed"] / cache["dense"])}

{_decoding(compression["decoding"])}{_latents(compression)}"""


def _healed(figures: Mapping[str, Any] | None) -> str:
    """Describe the healing; empty without one."""
    if figures is None:
        return ""
    times = "once" if figures["epochs"] == 1 else f"{figures['epochs']} times"
    return f"""
Healed: trained as a whole against the dense model, {times} on {figures["tokens"]:,} tokens of
{", ".join(figures["text"])}. On {figures["held_out_tokens"]:,} other tokens of this text, its divergence from the dense
model fell from {figures["before"]:.4f} to {figures["after"]:.4f} nats per token.
"""


def _loading(config: Mapping[str, Any]) -> str:
    """Explain how to load the checkpoint: with Lamina's code, or with transformers alone for an ordinary class."""
    ordinary = config["model_type"] != "lamina"
    trust = "" if ordinary else ", trust_remote_code=True"
    example = f"""Load it with transformers:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(PATH{trust})
tokenizer = AutoTokenizer.from_pretrained(PATH{trust})
```
"""
    if ordinary:
        return f"{example}\nIt is an ordinary {config['model_type']} model, and needs none of Lamina's code."
    return f"""{example}
Lamina's serving package loads it without `trust_remote_code`: `pip install CHECKOUT/deploy/serving`, where CHECKOUT is
a checkout of Lamina, or a wheel that `pip wheel --no-deps CHECKOUT/deploy/serving` builds there; then `import lamina`.
The package is not published: a project called `lamina` on a package index is a different one."""


def _left_out(tensors: Sequence[str]) -> str:
    """Name the source's tensors that the checkpoint lacks; empty if there are none."""
    if not tensors:
        return ""
    return f"\nIt lacks the source's layers that predict further tokens: {len(tensors)} tensors, `{tensors[0]}` first."


def _treatment(manifest: Mapping[str, Any]) -> str:
    names, rounding = [entry["method"] for entry in manifest["methods"]], manifest.get("quantize")
    parts = [f"compressed with {', '.join(names)}"] if names else []
    if any(entry.get("refine") for entry in manifest["methods"]):
        parts.append("refined layer by layer")
    if rounding:
        bits = "chosen bits" if rounding["bits"] == "auto" else f"{rounding['bits']} bits"
        levels = {"uniform": "", "auto": " with chosen levels"}.get(
            kind := rounding.get("levels", "uniform"), f" with {kind} levels"
        )
        parts.append(f"rounded to {bits}{levels}")
    return ", ".join(parts)


def _decoding(costs: Mapping[str, Mapping[str, int]]) -> str:
    dense, compressed = costs["dense"], costs["compressed"]
    rows = {
        "numbers of weights read, once for all sequences": "weights",
        "products per token": "products",
        "numbers read for each cached token": "cached",
        "products for each cached token": "cached_products",
    }
    lines = [f"| {title} | {dense[name]:,} | {compressed[name]:,} |" for title, name in rows.items()]
    table = "\n".join(["| a decoding step in the modelling code | dense | compressed |", "|---|---|---|", *lines])
    even = (cost["weights"] // cost["cached"] for cost in (dense, compressed))
    return f"""{table}

With one sequence, a step reads as many numbers of the cache as of the weights
from {next(even):,} cached tokens on (dense), or from {next(even):,} (compressed).
"""


def _latents(compression: Mapping[str, Any]) -> str:
    """Describe the cost of latent keys, and the devices on which they are faster; empty without latent keys."""
    keys = [layer["forms"].get("k", {}) for layer in compression["layers"]]
    if not (ranks := [form["rank"] for form in keys if form.get("form") == "latent"]):
        return ""
    itemsize = compression["counts"]["cache_bytes_per_token"]["dense"] / compression["decoding"]["dense"]["cached"]
    return f"""
Each step computes the keys from latents of {min(ranks)} to {max(ranks)} numbers per token and layer. This is faster
than reading keys if the device computes more than {max(ranks) / itemsize:,.0f} operations per byte that it reads (a GPU
about 300, a CPU 10). On other devices a step is slower, especially in long contexts. The cache is smaller on every
device, so that more or longer sequences fit. On a CPU that multiplies half precision more slowly than float32,
transformers computes keys and attention in float32.
"""
