"""Whether vLLM binds its workers' threads on a CPU, by how many workers and memory nodes there are."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.utils import cpu_resource_utils

from lamina.engine_vllm.plugin import ARCHITECTURE, register
from lamina.engine_vllm.workers import BIND, NODES, LaminaVllmConfig


@pytest.mark.parametrize(
    ("workers", "nodes", "already", "bind"),
    [
        (2, 1, {}, "nobind"),
        (2, 2, {}, None),
        (1, 1, {}, None),
        (2, 1, {BIND: "0|1"}, "0|1"),
        (2, 1, {NODES: "1"}, None),
    ],
)
def test_threads_are_left_unbound_where_nodes_are_too_few(
    workers: int, nodes: int, already: dict[str, str], bind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", lambda: [*range(nodes)])
    monkeypatch.setattr(os, "environ", dict(already))
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(local_world_size=workers))
    LaminaVllmConfig.verify_and_update_config(config)
    assert os.environ.get(BIND) == bind


def test_the_plugin_registers_it() -> None:
    register()
    assert MODELS_CONFIG_MAP[ARCHITECTURE] is LaminaVllmConfig
