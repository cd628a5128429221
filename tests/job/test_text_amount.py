"""The amount of text: the point that is measured, the counts to compare, and which of them is enough."""

from __future__ import annotations

import pytest

from pipeline.job.text_amount import enough, parts_of, widest_point
from tests.families.geometries import llama, other


def test_the_widest_point_that_all_tokens_pass_is_measured() -> None:
    assert widest_point(llama().layers[0]) == "down.in"
    assert widest_point(llama(intermediate_size=16).layers[0]) == "mlp.in"
    mixture = other("mixtral").layers[0]
    assert not any(point == "down.in" for point in mixture.points)
    assert widest_point(mixture) == "mlp.in"


@pytest.mark.parametrize(
    ("errors", "samples"),
    [((1.0, 1.0, 1.0), 2), ((1.02, 1.005, 1.0), 4), ((2.0, 1.5, 1.0), 8), ((1.0101, 1.01, 1.0), 4)],
)
def test_the_fewest_samples_within_a_percent_are_enough(errors: tuple[float, ...], samples: int) -> None:
    assert parts_of(8) == (2, 4, 8)
    assert enough(parts_of(8), errors) == samples
