"""README.md of a checkpoint, for whoever finds it on a disk or on the hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def model_card(compression: Mapping[str, Any]) -> str:
    """README.md of the checkpoint."""
    counts, methods = compression["counts"], ", ".join(entry["method"] for entry in compression["manifest"]["methods"])
    parameters, decoder = counts["parameters"], counts["decoder_parameters"]
    stored, cache = counts["bytes"], counts["cache_bytes_per_token"]
    origin = f"Written by Lamina {compression['code_version']} from a {compression['source']['model_type']} model."
    return f"""---
library_name: transformers
tags: [lamina, compressed]
---
# {Path(compression["source"]["path"]).name}, compressed with {methods}

| | dense | compressed |
|---|---|---|
| stored numbers | {parameters["dense"]:,} | {parameters["compressed"]:,} |
| of these in decoder layers | {decoder["dense"]:,} | {decoder["compressed"]:,} |
| bytes | {stored["dense"]:,} | {stored["compressed"]:,} |
| cache bytes per token | {cache["dense"]:,} | {cache["compressed"]:,} |

Load it with transformers:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(PATH, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(PATH, trust_remote_code=True)
```

With the package `lamina` installed and imported, `trust_remote_code` is not needed. `compression.json` says of
every tensor how it is stored and which method it comes from. {origin}
"""
