"""The engines that serve compressed models, by the names that commands take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from manifests.records import LevelKind

Engine = Literal["transformers", "vllm", "llama.cpp"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
FAST_BITS = frozenset({8, 4})  # for which vLLM and llama.cpp have kernels
# The levels of codes for which they have kernels.
FAST_LEVELS: Mapping[Engine, frozenset[LevelKind]] = {
    "vllm": frozenset({"uniform"}),
    "llama.cpp": frozenset({"uniform", "iq4_nl"}),
}
