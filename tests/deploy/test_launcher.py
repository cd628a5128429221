"""deploy/ray, as `ray up` reads it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import ray.scripts.scripts
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

LAUNCHER = Path(__file__).resolve().parents[2] / "deploy" / "ray"
SCHEMA = json.loads(Path(ray.__file__).with_name("autoscaler").joinpath("ray-schema.json").read_text())
FILES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(LAUNCHER.glob("*.yaml"))}


def check(config: dict[str, Any]) -> dict[str, Any]:
    """What Ray makes of it, defaults filled in. Raises jsonschema.ValidationError and what else Ray raises."""
    prepared: dict[str, Any] = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


@pytest.mark.parametrize("name", ["aws", "machines"])
def test_ray_takes_it(name: str) -> None:
    prepared = check(FILES[name])
    jsonschema.validate(prepared, SCHEMA)
    assert prepared["head_node_type"] in prepared["available_node_types"]


def _unknown_field(config: dict[str, Any]) -> None:
    config["idle_timeout"] = 5


def _no_provider(config: dict[str, Any]) -> None:
    del config["provider"]


def _text_for_number(config: dict[str, Any]) -> None:
    config["available_node_types"]["spot"]["max_workers"] = "16"


def _no_resources(config: dict[str, Any]) -> None:
    del config["available_node_types"]["on-demand"]["node_config"]


def _misspelled_type(config: dict[str, Any]) -> None:
    config["available_node_types"]["spot"]["label"] = {}


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (_unknown_field, "'idle_timeout' was unexpected"),
        (_no_provider, "'provider' is a required property|provider"),
        (_text_for_number, "'16' is not of type 'integer'"),
        (_no_resources, "'node_config' is a required property|node_config"),
        (_misspelled_type, "'label' was unexpected"),
    ],
)
def test_planted_errors_are_told(plant: Callable[[dict[str, Any]], None], told: str) -> None:
    wrong = copy.deepcopy(FILES["aws"])
    plant(wrong)
    with pytest.raises((jsonschema.ValidationError, KeyError, TypeError), match=told):
        check(wrong)


@pytest.mark.parametrize("name", FILES)
def test_ray_start_knows_its_options(name: str) -> None:
    known = {option for parameter in ray.scripts.scripts.start.params for option in parameter.opts}
    commands = [*FILES[name]["head_start_ray_commands"], *FILES[name]["worker_start_ray_commands"]]
    started = [command for command in commands if "ray start" in command]
    assert len(started) == 2
    for command in started:
        assert set(re.findall(r"--[a-z-]+", command)) <= known


def test_spot_nodes_come_first() -> None:
    types = FILES["aws"]["available_node_types"]
    assert types["spot"]["priority"] > types["on-demand"]["priority"]
    spot, other = types["spot"]["node_config"], types["on-demand"]["node_config"]
    assert spot == other | {"InstanceMarketOptions": {"MarketType": "spot"}}
