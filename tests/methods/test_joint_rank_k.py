"""What a solve holds at its peak, as a multiple of the weights: at 70B's shape a copy in float64 is 4 GB."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from manifests.methods import JointRankK
from pipeline.methods.joint_rank_k import JointRankKMethod
from tests.families.geometries import llama
from workers.memory import map_large_tensors, peak_bytes

map_large_tensors()
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
method = JointRankKMethod(JointRankK(method="joint_rank_k", query_key="none"))
weights = {
    f"{role}.weight": torch.empty(32768, 512, dtype=torch.bfloat16).normal_(generator=generator)
    for role in ("gate", "up")
}


def solve(rows, rank):
    (group,) = method.groups(llama("mha", hidden_size=512, intermediate_size=rows).layers[0])
    assert group.with_data({key: weight[:rows] for key, weight in weights.items()}).solve({"mlp": rank}).forms


solve(600, 8)
before = peak_bytes()
solve(32768, 352)
print((peak_bytes() - before) / sum(weight.nbytes for weight in weights.values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a process's own peak is in /proc")
@pytest.mark.slow
def test_joint_rank_k_copies_no_weight() -> None:
    """A bfloat16 stack of 64 MiB: its factors in float32 are 1.4 times that, one float64 copy of a weight 2 times."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert float(ended.stdout) < 2.3
