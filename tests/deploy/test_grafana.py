"""deploy/grafana: expressions that parse, over metrics that exist; alerts that fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from workers.metrics import OF_THE_POOL, OF_WORKERS

promql_parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed")

GRAFANA = Path(__file__).resolve().parents[2] / "deploy" / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboard.json").read_text())
ALERTS = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
OF_RAY = Path(ray.__file__).parent / "dashboard/modules/metrics/dashboards/default_dashboard_panels.py"
OF_KUBERAY = {"kuberay_job_deployment_status"}


def known_names() -> set[str]:
    """What a scrape can hold: Lamina's, those that Ray's own dashboard shows, the operator's."""
    ours = {f"ray_{metric.name}" for metric in (*OF_WORKERS, *OF_THE_POOL)}
    ours |= {
        f"ray_{metric.name}_{part}"
        for metric in OF_WORKERS
        if metric.kind == "Histogram"
        for part in ("bucket", "sum", "count")
    }
    return ours | set(re.findall(r"ray_[a-z_]+", OF_RAY.read_text())) | OF_KUBERAY


def known_labels(name: str) -> set[str] | None:
    """Of a metric of ours; None for the others."""
    for metric in (*OF_WORKERS, *OF_THE_POOL):
        if re.fullmatch(f"ray_{metric.name}(_bucket|_sum|_count)?", name):
            return {"run", "le", "WorkerId", *metric.tags}
    return None


def parse(expression: str) -> Any:
    """As Prometheus gets it, Grafana's variables filled in. Raises ValueError."""
    return promql_parser.parse(expression.replace("$__rate_interval", "5m").replace("$run", ".*"))


def faults(expression: str) -> list[str]:
    """What is wrong with the names and labels of an expression that parses."""
    found = []
    for selector in selectors(parse(expression)):
        if selector.name not in known_names():
            found.append(f"{selector.name}: no such metric")
        labels = known_labels(selector.name)
        if labels is not None:
            used = {matcher.name for matcher in selector.matchers.matchers}
            used |= set(re.findall(r"by \(([^)]*)\)", expression)[0].split(", ")) if "by (" in expression else set()
            found += [f"{selector.name}: no label {label}" for label in sorted(used - labels)]
    return found


def selectors(node: Any) -> Iterator[Any]:
    """Every series that an expression reads."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    children = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "vector_selector")]
    for child in (*children, *(getattr(node, "args", None) or ())):
        if child is not None:
            yield from selectors(child)


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *(rule["expr"] for rule in RULES)])
def test_expressions(expression: str) -> None:
    assert list(selectors(parse(expression)))
    assert faults(expression) == []


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("sum by (run) (rate(ray_lamina_unit_total[5m]))", "ray_lamina_unit_total: no such metric"),
        ('max(ray_lamina_workers{stat="ready"})', "ray_lamina_workers: no label stat"),
        ("sum by (layer) (ray_lamina_phase_progress)", "ray_lamina_phase_progress: no label layer"),
        ("histogram_quantile(0.5, rate(ray_lamina_unit_seconds_buckets[5m]))", "ray_lamina_unit_seconds_buckets"),
    ],
)
def test_planted_errors_are_told(expression: str, told: str) -> None:
    assert told in faults(expression)[0]


@pytest.mark.parametrize("expression", ["sum by run (x)", "rate(x)[5m]", "x{y=}", "sum(x"])
def test_what_does_not_parse_is_told(expression: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the parser's words
        parse(expression)


def test_alerts_say_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) == 8
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "action"}


def test_alerts_fire(tmp_path: Path) -> None:
    """By Prometheus' own tool, on made-up series."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    shutil.copy(GRAFANA / "alerts.yaml", tmp_path)
    shutil.copy(Path(__file__).with_name("alerts_test.yaml"), tmp_path)
    done = subprocess.run(
        [tool, "test", "rules", "alerts_test.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rules = tmp_path / "alerts.yaml"
    rules.write_text(rules.read_text().replace("units_total[30m])) == 0", "units_total[30m])) == 1"))
    done = subprocess.run(
        [tool, "test", "rules", "alerts_test.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "LaminaNoProgress" in done.stdout + done.stderr


def test_the_dashboard_hangs_together() -> None:
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "run"}
    identifiers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(identifiers)) == len(identifiers)
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters) > 0
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables | {"__rate_interval"}
            grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
            if grouped:
                assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= set(grouped[0].split(", "))


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    for place in places:
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)


def test_every_metric_of_ours_is_shown() -> None:
    shown = " ".join(EXPRESSIONS)
    assert [metric.name for metric in (*OF_WORKERS, *OF_THE_POOL) if f"ray_{metric.name}" not in shown] == []
