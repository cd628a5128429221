"""Round a model's linear modules by AutoRound. Runs in an environment of its own, which `tools.peers` makes.

python auto_round_signs.py CHECKPOINT WINDOWS OUTPUT STEPS BITS GROUP

WINDOWS: token ids (N, T) under the name `ids`. OUTPUT: the tensors of the decoder, multiplied out, float32.
"""

import sys

import torch
from auto_round import AutoRound
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(checkpoint: str, windows: str, output: str, steps: str, bits: str, group: str) -> None:
    """Round the model, and write its decoder."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = load_file(windows)["ids"]
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    rounded, _ = AutoRound(
        model,
        AutoTokenizer.from_pretrained(checkpoint),
        bits=int(bits),
        group_size=int(group),
        sym=True,
        iters=int(steps),
        nsamples=len(ids),
        seqlen=ids.shape[1],
        batch_size=4,
        dataset=DataLoader(rows, batch_size=4),
        device_map="cpu",
        amp=False,
    ).quantize()
    state = rounded.state_dict()
    names = {name for name, _ in rounded.named_parameters() if ".layers." in name}
    save_file({name: state[name].float().contiguous() for name in names}, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
