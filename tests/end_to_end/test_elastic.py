"""Ray nodes of this host that join, leave and die, and see different folders."""

from __future__ import annotations

import math
import os
import pickle
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray._private import node as ray_node
from ray.cluster_utils import Cluster

import pipeline.scale
import workers.pool
import workers.pools
from manifests.schema import Workers
from pipeline.units.units import Forward, Unit
from stores.run_directory import RunDirectory
from tests import factories
from tests.end_to_end.children import Child
from tests.end_to_end.clusters import ENVIRONMENT, OBJECTS, head_node, loopback, private_node
from tests.end_to_end.jobs import Job, MakeJob, command, file_digests
from workers import cluster as cluster_module
from workers.cluster import why_unplaceable
from workers.config import WorkerConfig
from workers.in_process_pool import InProcessPool
from workers.pool import RayPool

LAYERS = 3  # of the fixture `llama`
WAIT_S = 60.0


class Directed(RayPool):
    """Does something to the cluster when a layer has got its first shard, in the middle of a run."""

    cluster: Cluster
    machines: list[Any]
    scenes: Mapping[Any, Callable[[Directed], None]]

    def __init__(self, setup: Any, *rest: Any) -> None:
        self.run_dir = RunDirectory(setup.run_dir).place
        self.played: set[tuple[str, int]] = set()
        super().__init__(setup, *rest)

    def wait(self) -> tuple[Unit, Any]:
        unit, result = super().wait()
        place = (unit.lineage, unit.layer) if isinstance(unit, Forward) else None
        if place in self.scenes and place not in self.played:
            self.played.add(place)
            self.scenes[place](self)
        return unit, result

    @property
    def nodes(self) -> list[list[str]]:
        """One of each worker, which all have the address of this machine."""
        return [[member.name] for member in self._ready()]

    def await_size(self, size: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.size != size:
            assert time.monotonic() < deadline, f"{self.size} workers instead of {size}"
            self._dispatch()
            self._step(0.2)


def three_join(pool: Directed) -> None:
    """Three nodes, and as many workers, asked for as an operator does it."""
    deadline = time.monotonic() + WAIT_S
    while (reason := why_unplaceable(Workers(cpus=64))) is None:  # until Ray's monitor has reported
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert "none of the 2 nodes has them" in reason
    for _ in range(3):
        pool.machines.append(pool.cluster.add_node(num_cpus=1, object_store_memory=OBJECTS))
    assert pipeline.scale.main([str(pool.run_dir), "--workers", "4"]) == 0
    pool.await_size(4)


def all_join(pool: Directed) -> None:
    """While an autoscaler is there, no worker is too large to wait for."""
    assert why_unplaceable(Workers(cpus=64)) is None
    pool.await_size(3)


def a_node_dies(pool: Directed) -> None:
    """With its worker, the hidden states there and what they were summed to: SIGKILL to all its processes."""
    raylets = {psutil.Process(pid).ppid(): pid for pid in (m.where["pid"] for m in pool.members if m.shards)}
    victim = next(node for node in pool.machines if node.all_processes["raylet"][0].process.pid in raylets)
    worker = raylets[victim.all_processes["raylet"][0].process.pid]
    pool.machines.remove(victim)
    pool.cluster.remove_node(victim, allow_graceful=False)
    os.kill(worker, signal.SIGKILL)  # it outlives its raylet a while


def two_leave(pool: Directed) -> None:
    assert pipeline.scale.main([str(pool.run_dir), "--workers", "2"]) == 0
    pool.await_size(2)


def a_worker_dies(pool: Directed) -> None:
    os.kill(next(member for member in pool.members if member.shards).where["pid"], signal.SIGKILL)


SCENES: dict[Any, Callable[[Directed], None]] = {
    ("dense", 0): three_join,
    ("dense", 1): a_node_dies,
    ("compressed", 0): two_leave,
    ("compressed", 1): a_worker_dies,
}
SOLVED_IN_PASS: dict[Any, Callable[[Directed], None]] = {
    ("dense", 0): three_join,
    ("dense", 6): a_node_dies,
    ("dense", 8): a_worker_dies,
}


class Node(cluster_module._BareNode):
    """A node with the autoscaler's monitor, whose report the job reads, but without agents, which take seconds each."""

    absent = tuple(cluster_module.AGENTS)
    start_monitor = ray_node.Node.start_monitor


def direct(scenes: dict[Any, Callable[[Directed], None]] = SCENES) -> None:
    """In the child: a cluster whose head does no work, with one node beside it."""
    os.environ.update(ENVIRONMENT)
    cluster_module._listen_on_loopback()
    ray_node.Node = Node  # type: ignore[misc]
    Directed.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": OBJECTS})
    Directed.machines = [Directed.cluster.add_node(num_cpus=1, object_store_memory=OBJECTS)]
    Directed.scenes = scenes
    workers.pool.RayPool = Directed  # type: ignore[misc]
    os.environ["RAY_ADDRESS"] = Directed.cluster.address


def direct_dense() -> None:
    """The same, for a dense pass in which layers are solved."""
    direct(SOLVED_IN_PASS)


def direct_autoscaler() -> None:
    """In the child: it will have been joined by as many workers as may be, and send two away."""
    cluster_module._listen_on_loopback()
    Directed.scenes = {("dense", 0): all_join, ("compressed", 0): two_leave}
    workers.pool.RayPool = Directed  # type: ignore[misc]


@pytest.mark.ray
@pytest.mark.nightly
def test_the_autoscaler_adds_nodes(job: MakeJob, inline: None) -> None:
    """From none to `workers.max`: Ray's autoscaler starts a node for every worker that has no place."""
    settings = {"calibration.samples": 16, "calibration.shards": 8, "workers": {"min": 1, "max": 3}}
    made, alone = job(**settings), job(**{**settings, "workers": {"max": 1}})
    assert alone.run().code == 0
    with head_node(0, "--include-dashboard=false", most_nodes=3) as address:
        arguments = [str(made.manifest), "--address", address]
        child = Child("run", arguments, made.root / "log", inline=False, prepare=direct_autoscaler)
        assert child.end(240) == 0, child.said
    assert file_digests(made.output) == file_digests(alone.output)
    assert "is dismissed: the job needs only 2" in child.said


@pytest.mark.ray
def test_nodes_join_leave_and_die(job: MakeJob, inline: None) -> None:
    settings = {
        "calibration.samples": 16,
        "calibration.shards": 8,
        "workers": {"min": 1, "max": 1},
    }
    made, alone = job(**settings), job(**settings)
    assert alone.run().code == 0
    child = Child("run", [str(made.manifest)], made.root / "log", inline=False, prepare=direct)
    assert child.end(240) == 0, child.said
    assert file_digests(made.output) == file_digests(alone.output)
    assert sum(map(int, re.findall(r": (\d) workers? died \(", child.said))) == 2
    assert "is dismissed: the job needs only 2" in child.said


@pytest.mark.ray
@pytest.mark.nightly
def test_a_node_dies_with_the_sums_of_layers_in_hand(job: MakeJob, inline: None, tmp_path: Path) -> None:
    """Four workers: by the seventh layer those of the first four are being solved, or are."""
    source = factories.make_model(tmp_path / "deep", num_hidden_layers=10)
    settings = {
        "calibration.samples": 16,
        "calibration.shards": 8,
        "calibration.propagate": "dense",
        "methods": [{"method": "flat_llm", "allocation": "uniform"}],
        "statistics.keep": False,
        "workers": {"min": 1, "max": 1},
    }
    made, alone = job(source, **settings), job(source, **settings)
    assert alone.run().code == 0
    child = Child("run", [str(made.manifest)], made.root / "log", inline=False, prepare=direct_dense)
    assert child.end(240) == 0, child.said
    assert file_digests(made.output) == file_digests(alone.output)
    assert sum(map(int, re.findall(r": (\d) workers? died \(", child.said))) == 2


@pytest.mark.ray
def test_nobody_to_scale(job: MakeJob, inline: None, tmp_path: Path) -> None:
    made = job()
    assert made.run().code == 0
    for arguments, message in (
        ([str(made.run_dir), "--workers", "2"], "no job is running here"),
        ([str(made.run_dir), "--workers", "0"], "a job needs at least one"),
        ([str(tmp_path / "nowhere"), "--workers", "2"], "no run directory"),
    ):
        ended = command("scale", *arguments)
        assert (ended.code, message in ended.err) == (2, True), ended
    assert not (tmp_path / "nowhere").exists()


WINDOW = 40


@pytest.fixture
def shared(tmp_path: Path, llama: Path) -> Path:
    """What all nodes see: the model, and where the job works. The texts are the driver's alone."""
    folder = tmp_path / "shared"
    shutil.copytree(llama, folder / "model")
    return folder


class ElsewherePool(InProcessPool):
    """A worker to which a setup has travelled, and which finds nothing in the folder that evaluation made."""

    folder: Path

    def __init__(self, setup: WorkerConfig, *rest: Any) -> None:
        setup = pickle.loads(pickle.dumps(setup))
        super().__init__(setup if setup.manifest else replace(setup, run_dir=self.folder), *rest)


def test_evaluation_brings_its_tokens(
    tmp_path: Path, job: Callable[..., Job], inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a private temporary folder comes to, without a cluster: `run` and `evaluate` score the same."""
    scored = factories.write_text(tmp_path / "scored.txt", 6_000, seed=9)
    settings = {
        "workers": {"max": 1, "activation_memory_gb": 1e-6},
        "evaluation": {"perplexity": {"text": {"files": [str(scored)]}, "window": WINDOW}},
    }
    alone, made = job(**settings), job(**settings)
    expected = _losses(alone.run().json["evaluation"])
    ElsewherePool.folder = tmp_path / "elsewhere"
    monkeypatch.setattr(workers.pools, "InProcessPool", ElsewherePool)
    assert _losses(made.run().json["evaluation"]) == expected
    options = ("--text", str(scored), "--window", str(WINDOW), "--json")
    assert command("evaluate", str(made.output), *options).json["loss"] in expected


@pytest.mark.nightly
@pytest.mark.ray
def test_run_and_evaluate(shared: Path, text: Path, tmp_path: Path, job: Callable[..., Job], inline: None) -> None:
    """Evaluation's tokens lay in the driver's temporary folder: all workers \"died\" when the layers were done.

    The job goes forth and back through the model, and is scored on held-out text, too.
    """
    scored = factories.write_text(tmp_path / "scored.txt", 6_000, seed=9)
    settings = {
        "calibration.shards": 4,
        "calibration.propagate": "dense",
        "methods": [{"method": "loss_aware"}],
        "workers": {"min": 2, "max": 2, "activation_memory_gb": 1e-6},  # hidden states are spilled
        "evaluation": {"perplexity": {"text": {"files": [str(scored)]}, "window": WINDOW}},
    }
    alone = job(shared / "model", **{**settings, "workers": {"max": 1, "activation_memory_gb": 1e-6}})
    expected = alone.run().json["evaluation"]
    made = Job(shared / "job", shared / "model", text, settings).write()
    with (
        head_node(0, "--include-dashboard=false") as address,
        private_node(address, 1, shared),
        private_node(address, 1, shared),
    ):
        run = Child(
            "run",
            [str(made.manifest), "--address", address, "--json"],
            made.root / "log",
            inline=False,
            prepare=loopback,
        )
        assert run.end(240) == 0, run.said
        arguments = [str(made.output), "--text", str(scored), "--window", str(WINDOW)]
        arguments += ["--address", address, "--workers", "1", "--json"]
        evaluate = Child("evaluate", arguments, made.root / "evaluate.log", inline=False, prepare=loopback)
        assert evaluate.end(240) == 0, evaluate.said
    assert " died" not in run.said
    assert file_digests(made.output) == file_digests(alone.output)
    found = command("status", str(made.run_dir), "--json").json["summary"]["evaluation"]
    assert found == expected
    (loss,) = _losses(found)
    assert f'"loss": {loss}' in evaluate.said
    assert math.isfinite(loss)
    assert not list(made.run_dir.glob("evaluation-*"))


def _losses(found: object) -> list[float]:
    """Every `loss` in nested results."""
    if isinstance(found, dict):
        own = [found["loss"]] if isinstance(found.get("loss"), float) else []
        return own + [loss for value in found.values() for loss in _losses(value)]
    return []
