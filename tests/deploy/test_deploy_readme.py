"""deploy/README.md: its commands exist with the options it gives, its names and figures are those of files and plan."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import ray.dashboard.modules.job.cli
import ray.scripts.scripts
import yaml

from pipeline.plan import main as plan
from tests.published import write_hollow_checkpoint

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
LINES = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
OURS = sorted({part for line in LINES for part in re.findall(r"python -m (pipeline\.\w+)", line)})
SOURCES = "".join(
    path.read_text(encoding="utf-8")
    for folder in ("manifests", "pipeline", "stores", "workers")
    for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("module", OURS)
def test_commands_of_ours(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT.joinpath(*module.split("."))
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"{module}.__main__" if path.is_dir() else module).main(["--help"])
    assert ended.value.code == 0
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    for line in LINES:
        if f"-m {module} " in line:
            words = shlex.split(line.partition(f"-m {module} ")[2], comments=True)
            assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize(
    ("start", "command"),
    [
        ("ray start ", ray.scripts.scripts.start),
        ("ray job submit ", ray.dashboard.modules.job.cli.submit),
        ("ray up ", ray.scripts.scripts.up),
        ("ray down ", ray.scripts.scripts.down),
        ("ray dashboard ", ray.scripts.scripts.dashboard),
    ],
)
def test_commands_of_ray(start: str, command: Any) -> None:
    lines = [line for line in LINES if line.startswith(start)]
    assert lines
    known = {option for parameter in command.params for option in parameter.opts}
    for line in lines:
        given = shlex.split(line.removeprefix(start).partition(" -- ")[0], comments=True)
        assert {word.partition("=")[0] for word in given if word.startswith("--")} <= known


def test_files_are_there() -> None:
    named = re.findall(r"(?:deploy|manifests)/[\w./-]+\.\w+|`((?:docker|kuberay|ray|grafana)/[\w.]+)`", README)
    assert len(named) > 10
    for path in re.findall(r"(?<!lamina/)(?:deploy|manifests)/[\w./-]+\.\w+", README):
        assert (ROOT / path).is_file(), path
    for path in re.findall(r"`((?:docker|kuberay|ray|grafana)/[\w.]+)`", README):
        assert (ROOT / "deploy" / path).is_file(), path


def test_names_are_the_resources() -> None:
    job, cluster = (
        yaml.safe_load((ROOT / "deploy/kuberay" / f"{name}.yaml").read_text()) for name in ("rayjob", "raycluster")
    )
    assert f"kubectl get rayjob {job['metadata']['name']} " in README
    assert f"kubectl logs --follow job/{job['metadata']['name']}\n" in README
    assert f"service/{cluster['metadata']['name']}-head-svc " in README
    assert f"kubectl get secret {cluster['metadata']['name']} " in README


def test_ports_of_a_second_cluster_are_free() -> None:
    """None of those it gives is the first's."""
    second = next(line for line in LINES if "--dashboard-agent-listen-port" in line)
    given = {name: int(port) for name, port in re.findall(r"--((?:[a-z]+-)*port)=(\d+)", second)}
    defaults = {
        parameter.opts[0].removeprefix("--"): parameter.default for parameter in ray.scripts.scripts.start.params
    }
    taken = {defaults["dashboard-port"], defaults["dashboard-agent-listen-port"], 6379, 10001}
    taken |= set(range(defaults["min-worker-port"], defaults["max-worker-port"] + 1))
    assert {"port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port"} <= given.keys()
    assert not taken & {*given.values(), *range(given["min-worker-port"], given["max-worker-port"] + 1)}


def test_messages_of_the_table_are_in_the_code() -> None:
    """Every message of the table that is ours stands in the code."""
    seen = re.findall(r"^\| `([^`]+)`", README.partition("| message | cause | remedy |")[2], flags=re.MULTILINE)
    assert len(seen) > 8
    for message in seen:
        for part in re.split(r"\bN\b|\b0\b|…", message):
            assert part.strip(" ;:()") in SOURCES, part


@pytest.mark.slow
def test_figures_are_the_plan_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_hollow_checkpoint(tmp_path / "model", "meta-llama/Llama-2-70b-hf")
    command = [
        str(ROOT / "manifests" / "llama2-70b.yaml"),
        "--set",
        f"model.source={model}",
        "--tflops",
        "100",
        "--json",
    ]
    assert plan(command) == 0
    gib = {name: value / 2**30 for name, value in json.loads(capsys.readouterr().out).items() if "bytes" in name}
    told = " ".join(README.split())
    assert f"{gib['read_bytes']:.0f} GiB read from a source of {gib['source_bytes']:.0f}" in told
    assert f"{gib['worker_device_bytes']:.1f} GiB on a worker's GPU and {gib['worker_host_bytes']:.1f}" in told
    assert f"{gib['driver_peak_bytes']:.1f} GiB in the driver" in told
    assert f"{gib['run_dir_bytes']:,.0f} GiB in `run_dir`, {gib['output_bytes']:.0f} GiB of output" in told
    assert f"`object_store_bytes` (70B: {gib['object_store_bytes']:.0f} GiB" in told
