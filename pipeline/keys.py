"""Names of the ledger's entries. One function each, so that no key is spelled twice.

`dense/L` the dense pass through layer L, `gradient/L` the backward pass through it, `measured/L` what its weights tell,
`curves/L` what each size of its groups costs, `ranks`, `statistics/L` and `activations/L` of the walk, `layer/L` the
compressed layer.
"""

from __future__ import annotations

RANKS = "ranks"
HELD_OUT = "held_out"  # tokens beyond the calibration samples, and what leaves the dense model's last layer on them
HELD_OUT_SCORE = "held_out_score"  # of the compressed layers on these tokens
LAYER_KINDS = ("dense", "gradient", "measured", "curves", "statistics", "activations", "layer")


def dense_key(layer: int) -> str:
    """The dense pass through a layer: cosines, moments, hidden states."""
    return _layer_key("dense", layer)


def gradient_key(layer: int) -> str:
    """The backward pass through a layer: moments of gradients, gradients at its inputs."""
    return _layer_key("gradient", layer)


def measured_key(layer: int) -> str:
    """What a layer's dense weights tell."""
    return _layer_key("measured", layer)


def curves_key(layer: int) -> str:
    """The predicted loss of a layer's groups, by size."""
    return _layer_key("curves", layer)


def statistics_key(layer: int) -> str:
    """The moments of the walk behind compressed layers."""
    return _layer_key("statistics", layer)


def activations_key(layer: int) -> str:
    """The hidden states of the walk that enter a layer."""
    return _layer_key("activations", layer)


def layer_key(layer: int) -> str:
    """A compressed layer."""
    return _layer_key("layer", layer)


def _layer_key(kind: str, layer: int) -> str:
    assert kind in LAYER_KINDS
    return f"{kind}/{layer:05d}"
