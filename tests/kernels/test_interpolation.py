"""Linear interpolation, against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.kernels.interpolation import interpolate


@pytest.mark.parametrize("nodes", [[2.0], [0.0, 4.0], [1.0, 2.5, 2.75, 9.0]])
def test_it_is_that_of_numpy_at_nodes_between_and_beyond(nodes: list[float]) -> None:
    values_n32 = torch.randn(len(nodes), 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    places_p = torch.tensor([-1.0, *nodes, 0.5, 1.75, 2.6, 8.99, 20.0])
    found_p6 = interpolate(nodes, values_n32, places_p).flatten(1)
    for column in range(6):
        expected_p = np.interp(places_p.numpy(), nodes, values_n32.flatten(1)[:, column].numpy())
        torch.testing.assert_close(found_p6[:, column], torch.from_numpy(expected_p))


def test_whole_numbers_as_nodes_and_places() -> None:
    found = interpolate([0, 10], torch.tensor([1.0, 3.0]), torch.arange(0, 11, 5))
    assert found.tolist() == [1.0, 2.0, 3.0]
