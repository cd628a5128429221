"""Lamina checkpoints without `trust_remote_code`: `import lamina` makes transformers' Auto classes know them.

transformers looks for no plugins by itself, so the import is needed once per process, before `from_pretrained`.
The models' classes are imported, which takes seconds, when one is asked for or a LaminaConfig is made.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

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
    "rotary_lamina.py",
    "tucker_lamina.py",
)


def modelling_source(name: str) -> bytes:
    """The content of one of MODELLING_FILES."""
    return Path(__file__).with_name(name).read_bytes()


def register() -> None:
    """Registers the classes; safe to call again (vLLM calls it once in each of its processes)."""
    AutoConfig.register("lamina", LaminaConfig, exist_ok=True)
    LaminaConfig.when_made = staticmethod(_register_models)


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
