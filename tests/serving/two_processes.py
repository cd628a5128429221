"""Loads a checkpoint sharded over processes, and compares its numbers with the whole checkpoint's. torchrun runs it.

The first process prints JSON: the largest difference of logits, the greedy tokens' equality, and the shapes of sharded
weights on this process.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.distributed import DistributedConfig

from lamina import LaminaForCausalLM


def main(folders: list[str]) -> None:
    for folder in folders:  # transformers 5.15 knows no `tp_plan="auto"`
        model: Any = LaminaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
        expected = load_file(Path(folder) / "expected.safetensors")
        with torch.no_grad():
            logits = model(expected["ids"]).logits
        tokens = model.generate(expected["ids"], max_new_tokens=8, do_sample=False, eos_token_id=None)
        local = {name: getattr(p, "to_local", lambda p=p: p)() for name, p in model.named_parameters()}
        said = {
            "folder": folder,
            "difference": (logits - expected["logits"]).abs().amax().item(),
            "same_tokens": torch.equal(tokens, expected["tokens"]),
            "shapes": {name: list(p.shape) for name, p in local.items() if "layers.0." in name or "h.0." in name},
        }
        if torch.distributed.get_rank() == 0:
            print("RESULT " + json.dumps(said), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
