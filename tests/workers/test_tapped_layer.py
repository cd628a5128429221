"""One layer against transformers': every tap, the early end, and who is blamed for NaN."""

from __future__ import annotations

import pytest
import torch

from lamina import LaminaConfig
from manifests.errors import NumericsError
from pipeline.families.registry import geometry_of
from tests.workers.bench import FAMILIES, Reference, layer_names, make_setup, save_source
from workers.config import WorkerConfig
from workers.tapped_layer import TappedLayer

pytestmark = pytest.mark.sample(3)

LAYER = 1
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=(*FAMILIES, "qwen2-mixed-window", "llama-yarn-rope"))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[WorkerConfig, Reference]:
    directory = tmp_path_factory.mktemp("block")
    model = save_source(directory / "model", request.param)
    setup = make_setup(model, directory / "run")
    return setup, Reference(model, setup)


def make_block(
    setup: WorkerConfig, change: dict[str, float] | None = None, dtype: torch.dtype = torch.float32
) -> TappedLayer:
    config = LaminaConfig(**setup.config)
    prefix = setup.geometry.layers[LAYER].prefix
    tensors = {
        name.removeprefix(prefix): tensor.to(dtype)
        for name, tensor in setup.source.read(layer_names(setup, LAYER)).items()
    }
    for name, value in (change or {}).items():
        tensors[name] = torch.full_like(tensors[name], value)
    return TappedLayer(config, geometry_of(config.to_dict()).layers[LAYER], tensors, CPU)


def points_of(setup: WorkerConfig) -> list[str]:
    return [f"{role}.{side}" for role in setup.geometry.layers[LAYER].roles for side in ("in", "out")]


def seen_by(block: TappedLayer, points: list[str], reference: Reference, output: bool) -> dict[str, list[torch.Tensor]]:
    seen: dict[str, list[torch.Tensor]] = {point: [] for point in points}
    taps = [(point, seen[point].append) for point in points]
    block.run(reference.hidden_LMSD[LAYER], taps, output=output)
    return seen


def test_output_is_that_of_the_source(family: tuple[WorkerConfig, Reference]) -> None:
    setup, reference = family
    found = make_block(setup).run(reference.hidden_LMSD[LAYER])
    torch.testing.assert_close(found, reference.hidden_LMSD[LAYER + 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("output", [True, False])
def test_every_tap_sees_what_the_source_s_module_sees(family: tuple[WorkerConfig, Reference], output: bool) -> None:
    setup, reference = family
    seen = seen_by(make_block(setup), points_of(setup), reference, output)
    for point, values in seen.items():
        assert len(values) == 1, point
        expected = reference.at(LAYER, point)
        torch.testing.assert_close(values[0].reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.sample(3)
def test_a_tap_alone_or_with_any_other(family: tuple[WorkerConfig, Reference]) -> None:
    """Without an output the pass ends early, never before a tap was reached, whatever the order of modules is."""
    setup, reference = family
    block, points = make_block(setup), points_of(setup)
    for first in points:
        for second in points:
            seen = seen_by(block, list({first, second}), reference, output=False)
            assert all(len(values) == 1 for values in seen.values()), (first, second)


def test_shared_inputs_have_names(family: tuple[WorkerConfig, Reference]) -> None:
    setup, reference = family
    names = ["attention.in", "q.in", "mlp.in", "up.in"]
    seen = seen_by(make_block(setup), names, reference, output=True)
    assert torch.equal(seen["attention.in"][0], seen["q.in"][0])
    assert torch.equal(seen["mlp.in"][0], seen["up.in"][0])


def test_without_output_what_follows_the_last_tap_is_not_run(family: tuple[WorkerConfig, Reference]) -> None:
    setup, reference = family
    block = make_block(setup)
    ran: list[str] = []
    for role in setup.geometry.layers[LAYER].roles:
        block.module.role(role).register_forward_hook(lambda *_, role=role: ran.append(role))
    hidden = reference.hidden_LMSD[LAYER]
    assert block.run(hidden, [("down.in", lambda _: None)], output=False) is None
    assert "down" not in ran
    assert "up" in ran
    ran.clear()
    assert block.run(hidden, [("o.in", lambda _: None)], output=False) is None
    assert not {"o", "up", "down", "mlp_norm"} & set(ran)
    ran.clear()
    assert block.run(hidden, [("down.in", lambda _: None)]) is not None
    assert "down" in ran
    assert block.run(hidden, output=False) is None


def test_taps_are_gone_after_a_pass(family: tuple[WorkerConfig, Reference]) -> None:
    setup, reference = family
    block = make_block(setup)
    seen: list[torch.Tensor] = []
    block.run(reference.hidden_LMSD[LAYER], [("q.in", seen.append)], output=False)
    with pytest.raises(KeyError):
        block.run(reference.hidden_LMSD[LAYER], [("q.in", seen.append), ("v.out", lambda _: {}["missing"])])
    block.run(reference.hidden_LMSD[LAYER])
    assert len(seen) == 2


def test_the_first_module_that_overflows_is_blamed(family: tuple[WorkerConfig, Reference]) -> None:
    setup, reference = family
    modules = dict(setup.geometry.layers[LAYER].modules)
    for role, path in modules.items():
        block = make_block(setup, {f"{path}.weight": float("inf")})
        with pytest.raises(NumericsError) as raised:
            block.run(reference.hidden_LMSD[LAYER])
        assert f"layer {LAYER}: NaN or infinity first appears in the output of {path} (torch.float32)" in str(
            raised.value
        ), role
        assert "the model's own activations overflow" in str(raised.value)


def test_a_bad_input_is_not_blamed_on_the_layer(family: tuple[WorkerConfig, Reference]) -> None:
    setup, reference = family
    hidden = reference.hidden_LMSD[LAYER].clone()
    hidden[0, 0, 0] = float("nan")
    with pytest.raises(NumericsError, match="layer 1: its input holds NaN or infinity"):
        make_block(setup).run(hidden)


def test_missing_tensors_are_no_layer(family: tuple[WorkerConfig, Reference]) -> None:
    setup, _ = family
    with pytest.raises(RuntimeError, match="Missing key"):
        TappedLayer(LaminaConfig(**setup.config), setup.geometry.layers[LAYER], {}, CPU)
