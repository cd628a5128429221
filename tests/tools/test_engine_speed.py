"""The table of the engines' speed: rates, and engines that fail."""

import argparse
from pathlib import Path

from tools.benchmarks import engine_speed


def test_a_rate_is_the_median_with_half_of_the_range() -> None:
    assert engine_speed.rate(100, [2.0, 1.0, 4.0]) == "50.0 ± 75%"
    assert engine_speed.rate(10, [3.0]) == "3.33 ± 0%"
    assert engine_speed.rate(12_345, [1.0]) == "12,345 ± 0%"


def test_the_last_error_has_no_rank_before_it() -> None:
    stderr = '[rank0]:   File "a.py", line 1\n[rank0]: NotImplementedError: not for Float\n\nsome warning\n'
    assert engine_speed.last_error(stderr) == "NotImplementedError: not for Float"


def test_without_an_exception_the_last_line_counts() -> None:
    assert engine_speed.last_error("killed\n\n") == "killed"
    assert engine_speed.last_error("") == "no message"


def test_a_failed_process_gives_its_error(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '[rank0]: ValueError: broken' >&2\nexit 1\n")
    python.chmod(0o755)
    options = argparse.Namespace(context=4, new=2, repeats=1, batches=[1])
    result = engine_speed.measured(str(python), "vllm", tmp_path, options, "float32")
    assert result == "ValueError: broken"


def test_a_row_keeps_at_most_its_share_of_a_layer() -> None:
    dense = engine_speed.layer_numbers({})
    assert 0.57 <= engine_speed.layer_numbers(engine_speed.forms_of("loss_aware", 0.6)) / dense <= 0.6
