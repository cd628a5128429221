"""Load Lamina checkpoints without `trust_remote_code`: `import lamina` registers them with transformers' Auto classes.

transformers has no plugins, so each process must import this before `from_pretrained`. Slow imports are deferred: the
model classes (seconds) until one is used or a LaminaConfig is created, the Auto classes (half a second) until another
module imports them.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lamina.configuration_lamina import LaminaConfig
from lamina.layers_config_lamina import LayersConfig

if TYPE_CHECKING:
    from lamina.modeling_lamina import LaminaForCausalLM, LaminaModel
    from lamina.wrapper_lamina import LaminaForImageTextToText

__all__ = [
    "MODELLING_FILES",
    "LaminaConfig",
    "LaminaForCausalLM",
    "LaminaForImageTextToText",
    "LaminaModel",
    "LayersConfig",
    "modelling_source",
    "register",
]

# The modules that are copied into a checkpoint, where transformers loads them with `trust_remote_code`.
MODELLING_FILES = (
    "activation_lamina.py",
    "attention_lamina.py",
    "block_lamina.py",
    "checking_lamina.py",
    "configuration_lamina.py",
    "conversion_lamina.py",
    "decoder_layer_lamina.py",
    "embedding_lamina.py",
    "factored_lamina.py",
    "foreign_lamina.py",
    "form_lamina.py",
    "forms_lamina.py",
    "inputs_lamina.py",
    "latent_attention_lamina.py",
    "layers_config_lamina.py",
    "layers_lamina.py",
    "levels_lamina.py",
    "mixture_lamina.py",
    "modeling_lamina.py",
    "norms_lamina.py",
    "processor_lamina.py",
    "rotary_lamina.py",
    "stored_lamina.py",
    "tucker_lamina.py",
    "vllm_lamina.py",
    "wrapper_lamina.py",
)


def modelling_source(name: str) -> bytes:
    """Return the content of one of MODELLING_FILES."""
    return Path(__file__).with_name(name).read_bytes()


def register() -> None:
    """Register the classes. Safe to call again: vLLM does so in each of its processes."""
    LaminaConfig.on_create = staticmethod(_register_models)
    if (auto := sys.modules.get(_AutoConfigs.module)) is not None:
        _register_config(auto)
    elif not any(isinstance(finder, _AutoConfigs) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AutoConfigs())


def _register_config(auto: ModuleType) -> None:
    auto.AutoConfig.register("lamina", LaminaConfig, exist_ok=True)


class _AutoConfigs(MetaPathFinder):
    """Registers LaminaConfig as soon as another module imports transformers' Auto classes of configs."""

    module = "transformers.models.auto.configuration_auto"

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return the usual spec of that module, which then also registers; None for every other module."""
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec: ModuleSpec | None = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register_config(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register_models() -> None:
    """Register the models: the Auto classes look for a model only after they have its config."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    from lamina.modeling_lamina import LaminaForCausalLM, LaminaModel
    from lamina.wrapper_lamina import LaminaForImageTextToText

    AutoModel.register(LaminaConfig, LaminaModel, exist_ok=True)
    AutoModelForCausalLM.register(LaminaConfig, LaminaForCausalLM, exist_ok=True)
    AutoModelForImageTextToText.register(LaminaConfig, LaminaForImageTextToText, exist_ok=True)


def __getattr__(name: str) -> Any:
    if name in ("LaminaForCausalLM", "LaminaModel"):
        from lamina import modeling_lamina

        return getattr(modeling_lamina, name)
    if name == "LaminaForImageTextToText":
        from lamina import wrapper_lamina

        return wrapper_lamina.LaminaForImageTextToText
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
