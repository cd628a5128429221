"""Lamina checkpoints without `trust_remote_code`: `import lamina` makes transformers' Auto classes know them.

transformers looks for no plugins by itself, so the import is needed once per process, before `from_pretrained`.
"""

from pathlib import Path

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from lamina.configuration_lamina import LaminaConfig, publish_architecture
from lamina.modeling_lamina import LaminaForCausalLM, LaminaModel

__all__ = ["MODELLING_FILES", "LaminaConfig", "LaminaForCausalLM", "LaminaModel", "modelling_source", "register"]

# What travels with a checkpoint: the modules of this package that transformers loads with `trust_remote_code`.
MODELLING_FILES = (
    "block_lamina.py",
    "checking_lamina.py",
    "configuration_lamina.py",
    "conversion_lamina.py",
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
    """Register the classes; safe to call again (vLLM calls it once in each of its processes)."""
    publish_architecture()
    AutoConfig.register("lamina", LaminaConfig, exist_ok=True)
    AutoModel.register(LaminaConfig, LaminaModel, exist_ok=True)
    AutoModelForCausalLM.register(LaminaConfig, LaminaForCausalLM, exist_ok=True)


register()
