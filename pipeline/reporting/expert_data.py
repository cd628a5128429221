"""The data of heat maps of mixtures, (layer, expert) -> value: routed tokens, kept width, predicted loss."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from pipeline.console.expert_groups import EXPERTS, expert_number
from pipeline.methods.experts.scores import TOKENS_BY_EXPERT
from pipeline.methods.method import read_task_key
from pipeline.methods.text_sources import BY_SOURCE
from pipeline.reporting.run_data import Data, Run, single

ByExpert: TypeAlias = dict[tuple[int, int], float]
LEAST = 1e-12  # nats: smaller losses have the colour of this one
NAMED = 5  # experts furthest from the text's own division, in a caption


def by_expert(quantity: str, run: Run) -> Data[ByExpert]:
    """Return `tokens`, `widths`, `losses` (predicted, of the chosen sizes), or a field of the reports."""
    if quantity == "losses":
        tasks = [(read_task_key(task), max(loss, LEAST)) for task, loss in run.chosen_losses.items()]
        values = {(task.layer, expert_number(task.group)): loss for task, loss in tasks}
        return single({(layer, number): loss for (layer, number), loss in values.items() if number is not None})
    found: ByExpert = {}
    for layer, group, report in _reports(run):
        found |= {(layer, number): value for number, value in _values(quantity, run, layer, group, report)}
    return single(found)


def _values(quantity: str, run: Run, layer: int, group: str, report: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
    """Yield (expert, value) by the report of one expert, or of all of a layer, of which removed ones have width 0."""
    number = expert_number(group)
    if group == EXPERTS and quantity == "widths":
        count = run.geometry.layers[layer].num_experts
        kept = {int(each) for each in report.get("experts", range(count))}
        for each in range(count):
            full = _full_width(run, layer, each)
            yield each, report.get("width", full) / full if full and each in kept else 0.0
    elif group == EXPERTS:
        yield from enumerate(report.get(TOKENS_BY_EXPERT if quantity == "tokens" else quantity, ()))
    elif number is not None and quantity == "widths" and (width := report["ranks"].get("width")) is not None:
        yield number, width / _full_width(run, layer, number)
    elif number is not None and quantity == "tokens" and isinstance(report.get("tokens"), int):
        yield number, report["tokens"]


def by_source(run: Run) -> Data[ByExpert]:
    """Return the share of each expert's tokens that come from each source of the text; nothing for one source."""
    tokens: defaultdict[str, ByExpert] = defaultdict(dict)
    for layer, group, report in _reports(run):
        for source, counts in report.get(BY_SOURCE, {}).items():
            number = expert_number(group)
            of_experts = enumerate(counts) if group == EXPERTS else [] if number is None else [(number, counts)]
            tokens[source] |= {(layer, number): count for number, count in of_experts}
    totals = Counter[tuple[int, int]]()
    for counts in tokens.values():
        totals.update(counts)
    data: Data[ByExpert] = []
    for source, counts in tokens.items():
        overall = sum(counts.values()) / max(1, totals.total())
        shares = {expert: count / totals[expert] for expert, count in counts.items() if totals[expert]}
        furthest = sorted(shares, key=lambda expert: -abs(shares[expert] - overall))[:NAMED]
        named = ", ".join(f"layer {layer} expert {number} {shares[layer, number]:.0%}" for layer, number in furthest)
        data.append((shares, {"source": source, "overall": f"{overall:.0%}", "furthest": named}))
    return data


def _reports(run: Run) -> Iterator[tuple[int, str, dict[str, Any]]]:
    for layer, entry in run.layers.items():
        for group, report in entry.groups.items():
            yield layer, group, report.as_json()


def _full_width(run: Run, layer: int, expert: int) -> int:
    return run.geometry.layers[layer].block(f"{EXPERTS}.{expert}").matrices[0].outputs
