# mypy: allow-untyped-calls
# (transformers ships types, but its base classes' hooks carry no annotations)
"""config.json of a checkpoint for transformers: its Auto classes, the name of its architecture, tensor parallelism.

Imports only transformers' configurations: its modelling code takes seconds to import.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import transformers

from .block_lamina import MLP_ROLES, QKVO_ROLES, ROWWISE_ROLES, SINKS, in_base
from .layers_config_lamina import LayersConfig

# `auto_map` of config.json: the classes that transformers loads from the files beside the weights.
AUTO_MAP = {
    "AutoConfig": "configuration_lamina.LaminaConfig",
    "AutoModel": "modeling_lamina.LaminaModel",
    "AutoModelForCausalLM": "modeling_lamina.LaminaForCausalLM",
}


class LaminaConfig(LayersConfig):
    """config.json of a checkpoint, for the models in transformers and its Auto classes. Raises as LayersConfig.

    `on_create` is called at each creation. It registers the models, which code that uses only layers need not import.
    """

    _auto_class: ClassVar[str | None] = "AutoConfig"  # so that save_pretrained copies this file
    on_create: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        super().__post_init__(**kwargs)
        self.base_model_tp_plan = tensor_parallel_plan(self)  # type: ignore[misc]
        _publish_architecture()
        type(self).on_create()


@functools.cache
def _architecture() -> Any:
    from transformers import AutoModelForCausalLM, PreTrainedModel

    class ArchitectureByAutoMap(PreTrainedModel):
        """`transformers.LaminaForCausalLM`: loads the class that the checkpoint, or the installed package, names."""

        _supports_attention_backend = True  # vLLM requires it of the class of this name

        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            """Load as `AutoModelForCausalLM.from_pretrained` does."""
            return AutoModelForCausalLM.from_pretrained(*args, **kwargs)

    return ArchitectureByAutoMap


def _publish_architecture() -> None:
    """Set `transformers.LaminaForCausalLM`, in every module `transformers`: its processing_utils makes a second one.

    Some programs look `architectures` up in transformers and ignore `auto_map`: `transformers serve` and vLLM.
    """
    if "LaminaForCausalLM" in vars(sys.modules["transformers"]):
        return
    used = [vars(module).get("transformers") for module in [*sys.modules.values()] if isinstance(module, ModuleType)]
    for module in (transformers, sys.modules["transformers"], *used):
        if isinstance(module, ModuleType) and module.__name__ == "transformers":
            module.LaminaForCausalLM = _architecture()  # type: ignore[attr-defined]


def tensor_parallel_plan(config: LayersConfig) -> dict[str, str] | None:
    """Return transformers' plan: linears that write heads or MLP channels are cut by columns, their readers by rows.

    Of factors, the one with heads or channels on one side is cut: the second of a role that reads the hidden states,
    the first of a role that writes to them. The other is whole on every device. Attention and MLP are cut separately,
    each only if the same modules of all layers can be cut. None if neither can, and for tables of levels and
    stored formats.
    """
    if config.level_tables or config.stored_formats:
        return None
    prefix, modules = in_base(config.block["layers"]), config.block["modules"]
    plan: dict[str, str] = {}
    groups = (QKVO_ROLES, MLP_ROLES) if config.mixture is None else (QKVO_ROLES,)
    for roles in groups if SINKS not in modules else groups[1:]:  # each device would hold the sinks of all heads
        cuts: dict[str, str] = {}
        for role in (role for role in roles if role in modules):
            forms = (config.form_of(layer, role) for layer in range(config.num_hidden_layers))
            ways = {form.cut(role, spec, role in config.block["biases"]) for form, spec in forms}
            if len(ways) > 1 or None in ways:
                cuts.clear()
                break
            cuts[f"{prefix}.*.{modules[role]}{ways.pop()}"] = "rowwise" if role in ROWWISE_ROLES else "colwise"
        plan |= cuts
    return plan or None
