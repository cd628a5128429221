"""`python -m tools.benchmarks.ray_start`: the cost of the agent for runtime environments in a local Ray.

A job's local Ray starts without it. Each turn starts one as `run` does, and one as `run` does if a hook asks for a
runtime environment, and measures the seconds until Ray runs and until a first process answers, the CPU seconds of Ray's
processes, and the memory of its servers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from tools.benchmarks.jobs import environment, print_table

HOOK = "tools.benchmarks.ray_start.asked_environment"
ONE = "from tools.benchmarks.ray_start import measured; measured()"
SERVERS = ("gcs_server", "raylet", "RuntimeEnvAgent", "runtime_env/agent", "cat")
FIGURES = {
    "start_s": "Ray runs, s",
    "answer_s": "a process answers, s",
    "cpu_s": "CPU of Ray's processes by then, s",
    "servers_mib": "servers, MiB",
}


def asked_environment(_: Any) -> dict[str, Any]:
    """Return a small runtime environment, as a hook does."""
    return {"env_vars": {"ASKED": "1"}}


def measured() -> None:
    """Start a local Ray, and print the figures as JSON."""
    import psutil
    import ray

    from manifests.schema import Workers
    from workers.cluster import connect

    began = time.monotonic()
    connect(None, Workers())
    start_s = time.monotonic() - began
    ray.get(ray.remote(num_cpus=0)(lambda: None).remote())
    answer_s = time.monotonic() - began
    processes = psutil.Process().children(recursive=True)
    cpu_s = sum(times.user + times.system for times in (process.cpu_times() for process in processes))
    servers_mib = sum(process.memory_full_info().uss for process in processes if _is_server(process)) / 2**20
    print(json.dumps({"start_s": start_s, "answer_s": answer_s, "cpu_s": cpu_s, "servers_mib": servers_mib}))


def _is_server(process: Any) -> bool:
    words = process.cmdline()
    return bool(words) and any(name in " ".join(words[:3]) for name in SERVERS)


def main() -> int:
    """Run the command and return the exit code."""
    options = argparse.ArgumentParser(prog="python -m tools.benchmarks.ray_start", description=__doc__)
    options.add_argument("--turns", type=int, default=5)
    turns = options.parse_args().turns
    found: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for _ in range(turns):
        for kind, hook in (("without", {}), ("with", {"RAY_RUNTIME_ENV_HOOK": HOOK})):
            ended = subprocess.run(
                [sys.executable, "-c", ONE],
                env={**environment(), **hook},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found[kind].append(json.loads(ended.stdout.splitlines()[-1]))
    rows = []
    for figure, title in FIGURES.items():
        values = {kind: [turn[figure] for turn in turns_of] for kind, turns_of in found.items()}
        ratios = [more / less for less, more in zip(values["without"], values["with"], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append((title, *(f"{statistics.median(each):.1f}" for each in values.values()), spread))
    print(f"medians of {turns} turns, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    print_table(("", "without the agent", "with it", "ratio by turn"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
