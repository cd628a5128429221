"""Lamina checkpoints without `trust_remote_code`: `import lamina` makes transformers' Auto classes know them.

transformers looks for no plugins by itself, so the import is needed once per process, before `from_pretrained`.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from lamina.modeling_lamina import LaminaConfig, LaminaForCausalLM, LaminaModel

__all__ = ["LaminaConfig", "LaminaForCausalLM", "LaminaModel", "register"]


def register() -> None:
    """Register the classes; safe to call again (vLLM calls it once in each of its processes)."""
    AutoConfig.register("lamina", LaminaConfig, exist_ok=True)
    AutoModel.register(LaminaConfig, LaminaModel, exist_ok=True)
    AutoModelForCausalLM.register(LaminaConfig, LaminaForCausalLM, exist_ok=True)


register()
