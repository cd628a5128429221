"""Feedback of outputs: sections, and matrices that keep some of their outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.families.blocks import Matrix
from pipeline.kernels.two_sided import output_feedback
from pipeline.methods.method import Solution
from pipeline.rounding.outputs import feedback_of_outputs, outputs_moment


def gradients(sections: int, size: int) -> Tensor:
    values = torch.randn(sections, 4 * size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return values.mT @ values


@pytest.mark.parametrize(
    ("outputs", "sections"), [(576, 1), (1024, 1), (1536, 2), (4864, 8), (11008, 16), (1031, 1031)]
)
def test_sections_are_equal_and_of_1024_outputs_at_most(outputs: int, sections: int) -> None:
    moment = outputs_moment(Matrix("gate", outputs, 64, bias=False, reads="mlp.in", feeds="down.in"))
    assert (moment.point, moment.kind, moment.heads, moment.groups) == ("gate.out", "gradient", sections, sections)
    assert outputs % sections == 0
    assert outputs // sections <= 1024


def test_a_writer_reads_the_gradients_in_the_stream() -> None:
    assert outputs_moment(Matrix("down", 64, 96, bias=False, reads="down.in", feeds="out")).point == "out"
    assert outputs_moment(Matrix("o", 64, 64, bias=False, reads="o.in", feeds="o.out")).point == "o.out"


def test_kept_outputs_have_their_part_of_each_section() -> None:
    moment, kept = gradients(3, 4), torch.tensor([0, 2, 3, 9, 11])
    solution = Solution({}, {}, outputs={"up": kept})
    found = feedback_of_outputs("up", 5, solution, moment)
    assert found is not None
    assert [len(section.order) for section in found] == [3, 2]
    for section, expected in zip(
        found, (moment[0][[0, 2, 3]][:, [0, 2, 3]], moment[2][[1, 3]][:, [1, 3]]), strict=True
    ):
        assert torch.equal(section.share.triu(1), output_feedback(expected).share.triu(1))


def test_rows_that_are_no_outputs_have_none() -> None:
    moment = gradients(2, 4)
    assert feedback_of_outputs("v", 6, Solution({}, {}), moment) is None
    turned = Solution({}, {}, outputs={"v": torch.tensor([3, 1])})
    assert feedback_of_outputs("v", 2, turned, moment) is None
