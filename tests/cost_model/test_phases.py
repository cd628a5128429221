"""Seconds of single phases. The simulator's tests compare whole jobs (tests/tools/test_simulator.py)."""

from __future__ import annotations

from dataclasses import replace

from pipeline.cost_model.rates import NOMINAL_CPU
from pipeline.cost_model.solve_work import solve_seconds
from pipeline.methods.work import Work


def test_eigenproblems_have_a_rate_of_their_own() -> None:
    solve = Work(10.0, 10.0, vectors=2.0, moved=7.0)
    rates = replace(NOMINAL_CPU, double=10.0, eigen=2.0, factors=5.0, memory=3.5)
    assert solve_seconds(solve, rates) == 1.0 + 10.0 + 2.0 + 2.0
