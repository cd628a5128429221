"""The text that a healing trains on, and the windows held out of it.

Legend: M trained windows, K held-out windows, S tokens of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

import torch

from manifests.calibration import Text
from manifests.errors import InputError
from manifests.schema import Manifest
from pipeline.families.foreign import sequence_limit
from pipeline.inputs.calibration import check_ids, draw_calibration, prefix_ids
from pipeline.inputs.job_inputs import Inputs
from pipeline.units.sharding import held_out_windows
from stores.corpus import count_tokens, draw_samples, load_tokenizer, read_documents
from stores.text_rows import NOTHING_READ, Reading, ReadText

DATA_FREE_LENGTH = 2048  # of the windows of a job without calibration


@dataclass(frozen=True)
class HealingTokens:
    """Token ids (int64) of trained (M, S) and of held-out windows (K, S), which begin with the ids `prefix`.

    `names`: the text, for the card. `read`: of a text that is not the calibration's.
    """

    trained: torch.Tensor
    held_out: torch.Tensor
    prefix: tuple[int, ...]
    names: tuple[str, ...]
    read: ReadText = NOTHING_READ

    @property
    def windows(self) -> torch.Tensor:
        """Return all windows (M + K, S), the held-out ones last."""
        return torch.cat([self.trained, self.held_out])


def read_healing_text(inputs: Inputs) -> HealingTokens | None:
    """Read `heal.text`, or the calibration text of a job that compresses without it; None if there is neither, or for a
    job that has read its calibration samples anyway.

    Raises InputError: fewer tokens than `heal.tokens` and the held-out windows need.
    """
    manifest, calibration = inputs.manifest, inputs.manifest.calibration
    if manifest.heal is None:
        return None
    if (text := manifest.heal.text) is None:
        if inputs.needs_calibration or calibration is None:
            return None
        drawn = draw_calibration(inputs, calibration)
        held_out = drawn.held_out if len(drawn.held_out) else None
        return replace(calibration_as_text(manifest, drawn.samples, held_out, drawn.prefix), read=drawn.read)
    tokenizer = load_tokenizer(inputs.source.storage, manifest.model.trust_remote_code)
    length = calibration.sequence_length if calibration else min(DATA_FREE_LENGTH, sequence_limit(inputs.config)[1])
    prefix = prefix_ids(calibration.prefix if calibration else "tokenizer", tokenizer)
    room = length - len(prefix)
    wanted = None if manifest.heal.tokens is None else max(1, manifest.heal.tokens // length)
    most = 2**62 if wanted is None else (wanted + held_out_windows(wanted, wanted, length)) * room
    count = count_tokens(read_documents(text, tokenizer), tokenizer, most)
    trained, spared = _split(manifest, count // room, wanted, length, count)
    readings: list[Reading] = []
    documents = read_documents(text, tokenizer, readings)
    windows = draw_samples([documents], tokenizer, trained, spared, length, manifest.seed, prefix)
    read = ReadText(tuple(readings), windows.tokens)
    tokens = HealingTokens(windows.samples, windows.held_out, prefix, _names([text]), read)
    check_ids(tokens.windows, inputs.geometry.vocab, tokenizer, [text])
    return tokens


def calibration_as_text(
    manifest: Manifest, samples: torch.Tensor, held_out: torch.Tensor | None, prefix: tuple[int, ...]
) -> HealingTokens:
    """Return the windows of a healing on the calibration samples: `heal.tokens` of them, evenly spread.

    The job's held-out windows are held out; if its text has none, a tenth of the samples are.

    Raises InputError: `heal.tokens` is more than the samples have.
    """
    assert manifest.heal is not None
    assert manifest.calibration is not None
    windows, length = samples.shape
    wanted = None if manifest.heal.tokens is None else max(1, manifest.heal.tokens // length)
    if held_out is None:
        trained, held = _split(manifest, windows, wanted, length, windows * length)
        every = torch.arange(held) * windows // held
        is_held = torch.zeros(windows, dtype=torch.bool).index_fill(0, every, True)
        samples, held_out = samples[~is_held][:trained], samples[is_held]
    elif wanted is not None:
        if wanted > windows:
            raise InputError(_too_few(manifest, wanted * length, windows * length))
        samples = samples[torch.arange(wanted) * windows // wanted]
    return HealingTokens(samples, held_out, prefix, _names([text for text, _ in manifest.calibration.texts]))


def _split(manifest: Manifest, windows: int, wanted: int | None, length: int, tokens: int) -> tuple[int, int]:
    """Return the numbers of trained and of held-out windows. Raises InputError if the text has too few."""
    held_out = held_out_windows(wanted or windows, wanted or windows, length) if windows else 1
    trained = windows - held_out if wanted is None else wanted
    held_out = min(held_out, windows - trained)
    if trained < 1 or held_out < 1:
        raise InputError(_too_few(manifest, (max(trained, 1) + 1) * length, tokens))
    return trained, held_out


def _too_few(manifest: Manifest, needed: int, tokens: int) -> str:
    assert manifest.heal is not None
    field = "heal.text" if manifest.heal.tokens is None else f"heal.tokens: {manifest.heal.tokens}"
    return (
        f"{field}: the text has {tokens:,} tokens, and healing needs at least {needed:,}, those of a window that is "
        "held out included; give more text in heal.text, or lower heal.tokens"
    )


def _names(texts: Sequence[Text]) -> tuple[str, ...]:
    """Return the names of the files without their folders, or of datasets."""
    names = (PurePosixPath(name).name if text.files else name for text in texts for name in text.sources)
    return tuple(dict.fromkeys(names))
