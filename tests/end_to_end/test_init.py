"""`init` writes a manifest that `plan` and `run` accept as it is; wrong inputs end with exit code 2 and a remedy."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from manifests.fit import Fit, memory_text
from manifests.loading import load_manifest
from pipeline.cost_model.serving_memory import serving_memory
from pipeline.families.registry import geometry_of, standard_config
from tests import factories
from tests.encoders import encode_model
from tests.end_to_end.jobs import Ended, command, edit_json, without_ray

Init = Callable[..., Ended]


@pytest.fixture
def init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Init:
    """Runs `init` in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: command("init", *map(str, arguments))


def test_the_manifest_is_planned_and_run_as_it_is(init: Init, llama: Path, text: Path, tmp_path: Path) -> None:
    written = init(llama, "--text", text, "--keep", "0.6")
    assert written.code == 0, written.err
    fits, size, time, disk, serves, last = written.out.splitlines()
    assert fits.startswith("fits   ")
    assert "before, at most" in size
    assert time.startswith("time   about ")
    assert "for the run directory" in disk
    assert serves == "serves transformers, vLLM with Lamina's serving package, llama.cpp after `export --to gguf`"
    assert last == "Wrote job.yaml; run it with: python -m pipeline.run job.yaml"
    manifest = load_manifest("job.yaml")
    assert manifest.methods[0].model_dump()["correct"] == "output"
    assert manifest.calibration is not None
    assert manifest.evaluation.perplexity is not None
    assert manifest.calibration.texts[0][0].end == manifest.evaluation.perplexity.text.begin == 0.8
    assert command("plan", "job.yaml").code == 0
    with without_ray():
        summary = command("run", "job.yaml", "--set", "workers.max=1", "--set", "model.accept_loss=true", "--json").json
    assert {*summary["evaluation"]} == {"dense", "perplexity"}
    assert (tmp_path / manifest.output / "model.safetensors.index.json").exists()


@pytest.mark.nightly
def test_lamina_names_commands_as_it_was_called(
    init: Init, llama: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lamina init` names `lamina run`, and a finished job that is run again names `lamina verify`."""
    monkeypatch.setattr(sys, "argv", ["lamina init"])
    written = init(llama, "--text", text)
    assert written.out.splitlines()[-1] == "Wrote job.yaml; run it with: lamina run job.yaml"
    assert f"lamina init {llama} --text {text}" in Path("job.yaml").read_text()
    monkeypatch.setattr(sys, "argv", ["lamina run"])
    with without_ray():
        first, again = (
            command("run", "job.yaml", "--set", "workers.max=1", "--set", "model.accept_loss=true") for _ in range(2)
        )
    assert [first.code, again.code] == [0, 0]
    assert "nothing to do (`lamina verify` reads every byte)" in again.out
    assert "python -m pipeline" not in "".join((written.out, first.out, first.err, again.out, again.err))


def test_a_source_in_a_stored_format_shrinks_by_the_usual_goal(init: Init, text: Path, tmp_path: Path) -> None:
    """Four of five numbers of an fp8 model take more bytes in 16 bits than all do in 8."""
    source, _ = encode_model(factories.make_model(tmp_path / "dense"), tmp_path, "fp8 blocks")
    usual = init(source, "--text", text, "-o", "usual.yaml")
    assert usual.code == 0, usual.err
    assert "budget: {bytes: 0.8}" in Path("usual.yaml").read_text()
    kept = init(source, "--text", text, "--keep", "0.8", "-o", "kept.yaml")
    sizes = [line for each in (usual, kept) for line in each.out.splitlines() if line.startswith("size ")]
    shares = [float(line.partition("(")[2].partition(")")[0]) for line in sizes]
    assert shares[0] < 1 < shares[1]
    assert ["no smaller: `--bytes 0.8`" in line for line in sizes] == [False, True]
    assert command("plan", "usual.yaml").code == 0


@pytest.mark.parametrize(
    ("goal", "budget", "expected"),
    [
        ((), "{keep: 0.8}", "- {method: loss_aware, correct: output}"),
        (("--bytes", "0.25"), "{bytes: 0.25}", "quantize: {bits: auto}"),
        (("--max-loss", "0.02"), "{max_loss: 0.02}", "methods: [{method: loss_aware}]"),
    ],
)
def test_goals(goal: tuple[str, ...], budget: str, expected: str, init: Init, llama: Path, text: Path) -> None:
    printed = init(llama, "--text", text, *goal, "-o", "other.yaml", "--json").json
    assert printed["plan"]["fits"]
    written = Path("other.yaml").read_text()
    assert f"budget: {budget}" in written
    assert expected in written
    assert ("with compressed-tensors" in printed["engines"][0]) == ("--bytes" in goal)


def test_an_engine_is_asked_for(init: Init, llama: Path, text: Path, tmp_path: Path) -> None:
    """`plan` says of any manifest which engines take the output, and what they do not keep."""
    factors, widths = "less   llama.cpp: factors of attention are multiplied out; narrower MLPs stay", "flat_llm"
    asked = init(llama, "--text", text, "--for", "llama.cpp")
    assert (factors in asked.out, widths in Path("job.yaml").read_text()) == (False, True)
    assert factors in init(llama, "--text", text, "--for", "vllm", "--force").out
    assert factors in command("plan", "job.yaml").out
    bits = command("plan", "job.yaml", "--set", "quantize={bits: 3}", "--json").json["engines"]
    assert "less   vllm: has no kernel for 3 bits, which are multiplied out" in bits
    codes = command("plan", "job.yaml", "--set", "quantize={bits: 4}", "--set", "methods=[]", "--set", "budget=null")
    assert "serves transformers with compressed-tensors" in codes.out
    assert factors not in codes.out
    assert "less   vllm: multiplies codes out on a CPU, except 4 bits" in codes.out
    tables = init(llama, "--text", text, "--for", "llama.cpp", "--bytes", "0.3", "--force").out
    assert "serves transformers, vLLM with Lamina's serving package, llama.cpp after `export --to gguf`\n" in tables
    assert "less   vllm: has no kernel for iq4_nl levels, which are multiplied out" in tables
    assert "less   llama.cpp: rows of 48 and 80 numbers are no whole blocks of 32, and multiplied out\n" in tables
    normal = command("plan", "job.yaml", "--set", "quantize={bits: 4, levels: normal}").out
    assert "llama.cpp after `export --to gguf --multiply-out`" in normal
    source = factories.make_model(tmp_path / "neox", "gpt_neox")
    refused = init(source, "--text", text, "--for", "llama.cpp", "-o", "other.yaml")
    assert refused.code == 2
    assert "--for llama.cpp: it will not load the output: a gpt_neox model; known are llama, mistral" in refused.err
    assert not Path("other.yaml").exists()


def test_a_memory_is_asked_for(init: Init, text: Path, tmp_path: Path) -> None:
    """`init` chooses what fits and says what its neighbours need; the manifest is planned as it is."""
    model, served = factories.make_model(tmp_path / "model"), ("--context", "64", "--sequences", "2", "--on", "cpu")
    refused = init(model, "--text", text, "--fits", "1MB", *served)
    assert (refused.code, "--fits 1MB are too little for transformers on a CPU" in refused.err) == (2, True)
    assert refused.err.strip().endswith("or give a shorter --context or fewer --sequences")
    whole = init(model, "--text", text, "--fits", "24GB", *served)
    assert (whole.code, "the model fits as it is" in whole.err) == (2, True)
    assert not Path("job.yaml").exists()
    num_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    config = standard_config(json.loads((model / "config.json").read_text()))
    fit = Fit(memory=1, context=64, sequences=2, device="cpu")
    memory = serving_memory(fit, config, geometry_of(config, 32), ()).beside_weights + round(0.9 * num_bytes)
    asked = init(model, "--text", text, "--fits", memory, *served)
    assert asked.code == 0, asked.err
    lines = asked.out.splitlines()
    (at,) = (place for place, line in enumerate(lines) if line.startswith("chose  8 bits: weights "))
    assert lines[at + 1].startswith("next   better: the model as it is, from ")
    assert "; cheaper: 4 bits, from " in lines[at + 1]
    assert lines[at + 2].startswith("time   about ")
    assert f"fit: {{memory: {memory_text(memory)}, context: 64, sequences: 2" in Path("job.yaml").read_text()
    planned = command("plan", "job.yaml", "--tflops", "1")
    assert "serves in weights " in planned.out
    serving = command("plan", "job.yaml", "--tflops", "1", "--json").json["serving"]
    parts = (serving[name] for name in ("weights", "cache", "activations", "overhead"))
    assert sum(parts) == serving["total"] <= serving["memory"] == memory


def test_widths_that_no_group_fits_stay_unrounded(init: Init, text: Path, tmp_path: Path) -> None:
    odd = factories.make_model(tmp_path / "odd", intermediate_size=84)
    assert init(odd, "--text", text, "--bytes", "0.4").code == 0
    assert "quantize: {bits: auto, skip: [down]}" in Path("job.yaml").read_text()


def test_an_existing_file_is_overwritten_by_force_alone(init: Init, llama: Path, text: Path) -> None:
    Path("job.yaml").write_text("mine")
    refused = init(llama, "--text", text)
    assert (refused.code, "exists already" in refused.err) == (2, True)
    assert Path("job.yaml").read_text() == "mine"
    assert init(llama, "--text", text, "--force").code == 0
    assert load_manifest("job.yaml").budget is not None


def test_wrong_inputs(init: Init, llama: Path, text: Path, tmp_path: Path) -> None:
    other = shutil.copytree(llama, tmp_path / "bert")
    edit_json(other / "config.json", model_type="bert")
    short = factories.write_text(tmp_path / "short.txt", 500)
    (tmp_path / "folder").mkdir()
    for arguments, message in (
        ((), "give a model and --text FILE"),
        ((llama,), "give a model and --text FILE"),
        ((tmp_path / "none", "--text", text), f"{tmp_path / 'none'}"),
        ((llama, "--text", "none.txt"), "text file none.txt: missing"),
        ((llama, "--text", short), "with a fifth held out for the evaluation, calibration needs about"),
        ((other, "--text", text), "'bert'"),
        ((llama, "--text", text, "--keep", "80"), "--keep 80: expected a share above 0"),
        ((llama, "--text", text, "--bytes", "0"), "--bytes 0: expected a share above 0"),
        ((llama, "--text", text, "--max-loss", "-1"), "--max-loss -1: expected nats per token"),
        ((llama, "--text", text, "--keep", "0.01"), "budget"),
        ((llama, "--text", text, "--fits", "24GB"), "give --context TOKENS"),
        ((llama, "--text", text, "--fits", "24", "--context", "8"), "give a unit, such as 24GB"),
        ((llama, "--text", text, "--fits", "24GB", "--context", "99999"), "--context 99999 is longer than the model's"),
        ((llama, "--text", text, "--context", "8"), "say what --fits MEMORY should hold"),
        ((llama, "--text", text, "-o", "none/job.yaml"), "no folder none"),
        ((llama, "--text", text, "-o", "folder"), "is a folder"),
    ):
        ended = init(*arguments)
        assert (ended.code, message in ended.err) == (2, True), (arguments, ended)
        assert not Path("job.yaml").exists()


def test_shipped_manifests(init: Init) -> None:
    lines = init("--list").out.splitlines()
    paths = [Path(line.partition("  ")[0]) for line in lines]
    assert {"quickstart.yaml", "llama3-70b.yaml", "compare.yaml"} <= {path.name for path in paths}
    assert all(path.is_file() and line.partition("  ")[2] for path, line in zip(paths, lines, strict=True))
