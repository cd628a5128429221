"""config.json gives every rounded module its scheme back."""

from __future__ import annotations

import pytest

from manifests.records import Scheme
from pipeline.rounding.schemes import rounded_modules, rounding_fields

EMBEDDING, UP, DOWN, HEAD = "embed_tokens", "layers.0.up_proj", "layers.0.down_proj", "lm_head"
LINEARS = (UP, DOWN, HEAD)
FOUR, EIGHT, ROWS = Scheme(bits=4, group=32), Scheme(bits=8, group=32), Scheme(bits=8, group=None)
TABLE = Scheme(bits=8, group=32, levels="learned")


@pytest.mark.parametrize(
    "rounded",
    [
        {},
        {UP: FOUR, DOWN: FOUR},
        {UP: FOUR, DOWN: EIGHT, HEAD: ROWS},
        {EMBEDDING: FOUR, UP: FOUR},
        {EMBEDDING: EIGHT, UP: FOUR},
        {EMBEDDING: TABLE, UP: EIGHT},  # EIGHT targets every Linear, and an embedding is none
        {EMBEDDING: TABLE, UP: EIGHT, DOWN: FOUR},
        {EMBEDDING: EIGHT, UP: EIGHT, DOWN: TABLE},
        {EMBEDDING: TABLE, UP: TABLE},
    ],
)
def test_the_schemes_are_those_that_were_written(rounded: dict[str, Scheme]) -> None:
    config = rounding_fields(rounded, LINEARS)
    assert rounded_modules(config, {*LINEARS, *rounded}) == rounded
    assert rounded_modules(config, [UP]) == {path: scheme for path, scheme in rounded.items() if path == UP}
