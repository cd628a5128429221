"""The number of experts of a model, which vLLM needs before it builds the model."""

from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase


class ExpertCounts(ModelArchConfigConvertorBase):  # type: ignore[misc]  # types are checked without vLLM
    """Reads config.json for vLLM, with the largest number of experts of any layer."""

    def get_num_experts(self) -> int:
        """Return the largest number of experts of a layer; 0 for a model without mixtures."""
        config = self.hf_config
        mixtures = map(config.layer_mixture, range(config.num_hidden_layers))
        return max((mixture.experts for mixture in mixtures if mixture is not None), default=0)
