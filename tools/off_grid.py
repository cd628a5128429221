"""Take a model's weights off the grid of the file that they were read from, for comparing roundings fairly.

python -m tools.off_grid CHECKPOINT FOLDER [--bits 4] [--group 32]

Weights that were multiplied out of codes lie on the grid of these codes, and whoever rounds them to as many bits finds
the grid again. Each projection of the decoder gets even noise of one step of such a grid: (max − min) / (2^bits − 1) of
each group of columns. FOLDER is compared with itself, so that what the noise costs does not matter.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PROJECTION = re.compile(r"layers\..*_proj\.weight")


def noisy(weight_OI: Tensor, bits: int, group: int, generator: torch.Generator) -> Tensor:
    """Return a matrix with even noise of one step of each group of columns."""
    groups_OSg = weight_OI.float().unflatten(1, (-1, group))
    steps_OS1 = (groups_OSg.amax(-1, keepdim=True) - groups_OSg.amin(-1, keepdim=True)) / (2**bits - 1)
    noise_OSg = torch.rand(groups_OSg.shape, generator=generator) - 0.5
    moved_OI: Tensor = (groups_OSg + steps_OS1 * noise_OSg).flatten(1).to(weight_OI.dtype)
    return moved_OI


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the noisy model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a Hugging Face folder")
    parser.add_argument("folder", type=Path, help="of the noisy model; must not exist")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=32)
    options = parser.parse_args(arguments)
    generator = torch.Generator().manual_seed(0)
    shutil.copytree(options.checkpoint, options.folder)
    for path in sorted(options.folder.glob("*.safetensors")):
        tensors = load_file(path)
        for name in sorted(filter(PROJECTION.search, tensors)):
            tensors[name] = noisy(tensors[name], options.bits, options.group, generator)
        path.chmod(0o644)
        save_file(tensors, path, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
