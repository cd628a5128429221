"""The sample of variants that `make unit` runs."""

from __future__ import annotations

import itertools

from tests.sampling import at_night, covering


def test_each_value_of_each_parameter_occurs() -> None:
    families, methods, bits = ("llama", "opt", "gptj"), ("svd", "flat_llm"), (2.5, 4.5, 8.5, 16.5)
    product = list(itertools.product(families, methods, bits))
    variants = [dict(zip(("family", "method", "bits"), values, strict=True)) for values in product]
    sample = covering(variants)
    assert len(sample) == 4, "no more than the longest parameter has values"
    for axis, values in enumerate((families, methods, bits)):
        assert {product[position][axis] for position in sample} == set(values)


def test_one_parameter_keeps_all_its_values() -> None:
    assert covering([{"seed": object()} for _ in range(9)]) == list(range(9))


def test_of_long_grids_every_eighth_variant_runs_by_day() -> None:
    nights = [at_night(("tests", "serving", "test_a.py"), position) for position in range(16)]
    assert nights == [False, *[True] * 7] * 2
    assert not any(at_night(("tests", "kernels", "test_a.py"), position) for position in range(4))
    assert all(at_night(("tests", "end_to_end", "test_a.py"), position) for position in range(4))


def test_tests_without_parameters_stay() -> None:
    assert covering([]) == []
