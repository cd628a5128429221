"""Runs for reports, without a run directory."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from pipeline.families.registry import geometry_of, standard_config
from pipeline.methods.registry import build_methods, claim_tasks
from pipeline.reporting.run_data import Run
from tests import factories
from tests.families.geometries import llama, manifest

MIXTURE = geometry_of(standard_config(factories.make_config("mixtral", num_hidden_layers=2).to_dict()))
Reports = Mapping[int, Mapping[str, Mapping[str, Any]]]  # layer -> group -> report


def run_of(reports: Reports | None = None, geometry: Any = None, refined: Any = None, **fields: Any) -> Run:
    """Return a run with these reports, refined layers, and fields, computed ones among them."""

    def entry(groups: Mapping[str, Mapping[str, Any]]) -> Any:
        shown = {name: SimpleNamespace(as_json=lambda report=report: report) for name, report in groups.items()}
        return SimpleNamespace(groups=shown, refined=SimpleNamespace(**refined) if refined else None)

    layers = {layer: entry(groups) for layer, groups in (reports or {}).items()}
    cached = {name: fields.pop(name) for name in ("caps",) if name in fields}
    run = Run(
        "run", "done", None, manifest(keep=0.5), "", {"dtype": "float32"}, **{"commits": (), "layers": layers, **fields}
    )
    geometry = geometry or llama()
    tasks = claim_tasks(build_methods(run.manifest), geometry)
    vars(run).update(geometry=geometry, tasks=tasks, **cached)  # cached
    return run
