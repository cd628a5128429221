"""One ratio for every layer."""


def equal_ratios(layers: int, mean_ratio: float) -> list[float]:
    """`layers` times `mean_ratio`. Raises ValueError unless 0 < mean_ratio <= 1 and there is a layer."""
    if not 0.0 < mean_ratio <= 1.0:
        raise ValueError(f"mean ratio must be within (0, 1], not {mean_ratio}")
    if layers < 1:
        raise ValueError(f"at least one layer is needed, not {layers}")
    return [mean_ratio] * layers
