"""Lamina checkpoints without `trust_remote_code`: `import lamina` makes transformers' Auto classes know them.

transformers looks for no plugins by itself, so the import is needed once per process, before `from_pretrained`.
The models' classes are imported, which takes seconds, when one is asked for or a LaminaConfig is made; the Auto
classes, which take half of one, when somebody else imports them.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lamina.configuration_lamina import LaminaConfig, LayersConfig

if TYPE_CHECKING:
    from lamina.modeling_lamina import LaminaForCausalLM, LaminaModel

__all__ = [
    "MODELLING_FILES",
    "LaminaConfig",
    "LaminaForCausalLM",
    "LaminaModel",
    "LayersConfig",
    "modelling_source",
    "register",
]

# What travels with a checkpoint: the modules of this package that transformers loads with `trust_remote_code`.
MODELLING_FILES = (
    "activation_lamina.py",
    "block_lamina.py",
    "checking_lamina.py",
    "configuration_lamina.py",
    "conversion_lamina.py",
    "decoder_layer_lamina.py",
    "factored_lamina.py",
    "form_lamina.py",
    "forms_lamina.py",
    "inputs_lamina.py",
    "latent_attention_lamina.py",
    "layers_lamina.py",
    "modeling_lamina.py",
    "processor_lamina.py",
    "rotary_lamina.py",
    "tucker_lamina.py",
)


def modelling_source(name: str) -> bytes:
    """The content of one of MODELLING_FILES."""
    return Path(__file__).with_name(name).read_bytes()


def register() -> None:
    """Registers the classes; safe to call again (vLLM calls it once in each of its processes)."""
    LaminaConfig.when_made = staticmethod(_register_models)
    if (found := sys.modules.get(_AutoConfigs.module)) is not None:
        _register_config(found)
    elif not any(isinstance(finder, _AutoConfigs) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AutoConfigs())


def _register_config(auto: ModuleType) -> None:
    auto.AutoConfig.register("lamina", LaminaConfig, exist_ok=True)


class _AutoConfigs(MetaPathFinder):
    """Finds transformers' Auto classes of configs once, as they are found without it; they then know ours, too."""

    module = "transformers.models.auto.configuration_auto"

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """None for every other module."""
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
    """The Auto classes have a config before they look for its model."""
    from transformers import AutoModel, AutoModelForCausalLM

    from lamina.modeling_lamina import LaminaForCausalLM, LaminaModel

    AutoModel.register(LaminaConfig, LaminaModel, exist_ok=True)
    AutoModelForCausalLM.register(LaminaConfig, LaminaForCausalLM, exist_ok=True)


def __getattr__(name: str) -> Any:
    if name in ("LaminaForCausalLM", "LaminaModel"):
        from lamina import modeling_lamina

        return getattr(modeling_lamina, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
