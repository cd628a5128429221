"""Describes the machines that a job could use: this one, or the nodes of a Ray cluster."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from manifests.errors import InputError
from manifests.schema import Workers
from workers.hardware import machine_cores

MOST_THREADS = 8  # of a worker with a GPU
MOST_WORKERS = 8  # on a node without GPUs


@dataclass(frozen=True)
class Node:
    """The resources of a machine."""

    cores: int
    gpus: int
    memory_bytes: float

    def room(self, cpus: int, gpus: int, worker_bytes: float) -> int:
        """Return how many workers with these resources fit."""
        by_gpu = self.gpus // gpus if gpus else self.cores
        return int(min(self.cores // cpus, by_gpu, self.memory_bytes // max(1.0, worker_bytes)))


def this_machine(driver_bytes: int = 0) -> list[Node]:
    """Return this machine as the only node, without the memory of the driver, which runs here, too."""
    from workers.cluster import machine_bytes  # and Ray

    return [Node(machine_cores(), torch.cuda.device_count(), machine_bytes() - driver_bytes)]


def cluster_nodes(address: str, timeout_s: float) -> list[Node]:
    """Return the nodes of a Ray cluster. Raises InputError if none answers or it has no cores."""
    from workers.cluster import connect, live_nodes  # and Ray

    connect(address, Workers(), timeout_s, threading.Event().is_set)
    nodes = [
        Node(int(resources.get("CPU", 0)), int(resources.get("GPU", 0)), resources.get("memory", 0.0))
        for resources in live_nodes()
    ]
    with_cores = [node for node in nodes if node.cores]
    if not with_cores:
        raise InputError(f"--address {address}: none of its {len(nodes)} nodes offers CPUs to Ray")
    return with_gpus if (with_gpus := [node for node in with_cores if node.gpus]) else with_cores


def worker_sizes(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Return (cpus, gpus) of a worker to try: first many small ones on each node, last a large one."""
    cores = min(node.cores for node in nodes)
    if all(node.gpus for node in nodes):
        return [(max(1, min(MOST_THREADS, min(node.cores // node.gpus for node in nodes))), 1)]
    sizes, count = [], min(MOST_WORKERS, cores)
    while count:
        sizes.append((cores // count, 0))
        count //= 2
    return sizes
