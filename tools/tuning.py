"""How far is a model from itself when its matrices are rounded with other constants? For choosing them on real models.

python -m tools.tuning CHECKPOINT --text PASSAGES.json:0-820 --score TEST.txt PASSAGES.json:838- --cache FOLDER \
    bits=3 bits=3,damping=0.01,least_clip=0.875,polish=0 bits=3,levels=normal bits=3,feedback=both

Each argument is a block `quantize` of a manifest. Moments of inputs, gradients at outputs (for `feedback=both` alone)
and the dense model's final states are computed once and cached. Results are appended to FOLDER/results.jsonl, and
blocks that have a result there are skipped, so that a killed run goes on. Each matrix is rounded by the product's
`round_solution` and the moments of the dense model. Printed: the Kullback-Leibler divergence, in nats per token, on
each scored text. Use one FOLDER for each model, text, number of windows and choice of layers. For dense models of
transformers whose projections are named as Llama's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from manifests.quantize import Quantize
from pipeline.families.blocks import Matrix
from pipeline.methods.method import Moment, Solution
from pipeline.rounding.outputs import outputs_moment
from pipeline.rounding.solutions import multiplied, round_solution

READS = {"q": "attention.in", "k": "attention.in", "v": "attention.in", "o": "o.in"}
READS |= {"gate": "mlp.in", "up": "mlp.in", "down": "down.in"}
LEADERS = ("q", "o", "gate", "down")  # one role for each point
Modules = Mapping[tuple[int, str], nn.Linear]
HEAD_TOKENS = 256  # at a time, whose logits are in memory
STEP_TOKENS = 1024  # of a forward pass
STRIDE = 2  # every second position is scored
FIRST = 8  # position of a window that is scored


def passages(place: str) -> str:
    """Return the text of FILE.txt, of a JSON list FILE.json or FILE.json:FROM-TO of passages, or of the rows of
    FILE.jsonl, whose fields are parts of a document."""
    name, _, span = place.partition(":")
    if name.endswith(".jsonl"):
        return "\n".join("".join(json.loads(line).values()) for line in Path(name).read_text().splitlines())
    if not name.endswith(".json"):
        return Path(name).read_text()
    first, _, last = span.partition("-")
    listed = json.loads(Path(name).read_text())
    return "\n".join(listed[int(first or 0) : int(last) if last else None])


def windows(tokenizer: Any, place: str, count: int, length: int, start_token: int | None) -> Tensor:
    """Return the first `count` windows of a text's token ids, each behind the start token, if any."""
    body = length - (start_token is not None)
    ids = tokenizer(passages(place), add_special_tokens=False)["input_ids"][: count * body]
    if len(ids) < count * body:
        raise SystemExit(f"{place}: {len(ids)} tokens, where {count} windows of {body} are needed")
    cut = torch.tensor(ids).view(count, body)
    return cut if start_token is None else torch.cat((torch.full((count, 1), start_token), cut), dim=1)


def steps(ids: Tensor) -> Iterator[Tensor]:
    """Yield the windows of one forward pass."""
    yield from ids.split(max(1, STEP_TOKENS // ids.shape[1]))


def linears(model: Any, every: int = 1) -> dict[tuple[int, str], nn.Linear]:
    """Map layer and role to the projection, for the first of each `every` layers."""
    found = {}
    for number, layer in enumerate(model.model.layers):
        for name, module in layer.named_modules() if number % every == 0 else ():
            if (role := name.rpartition(".")[2].removesuffix("_proj")) in READS:
                found[number, role] = module
    return found


def input_moments(model: Any, modules: Modules, ids: Tensor) -> dict[str, Tensor]:
    """Return Σ x xᵀ at each point that these projections read, float32."""
    sums: dict[str, Tensor] = {}

    def hook(key: str, module: nn.Module, values: tuple[Tensor, ...]) -> None:
        _add(sums, key, values[0])

    handles = [
        module.register_forward_pre_hook(partial(hook, f"{layer}.{READS[role]}"))
        for (layer, role), module in modules.items()
        if role in LEADERS
    ]
    with torch.no_grad():
        for part in steps(ids):
            model.model(part, use_cache=False)
    for handle in handles:
        handle.remove()
    return sums


def output_gradients(model: Any, modules: Modules, ids: Tensor) -> dict[str, Tensor]:
    """Return the mean of g gᵀ at the outputs of each projection, with labels drawn from the model, float32."""
    sums: dict[str, Tensor] = {}

    def hook(key: str, module: nn.Module, at_inputs: Any, at_outputs: Any) -> None:
        _add(sums, key, at_outputs[0], 1.0 / ids.numel())

    handles = [
        module.register_full_backward_hook(partial(hook, f"{layer}.{role}"))
        for (layer, role), module in modules.items()
    ]
    torch.manual_seed(0)
    for part in steps(ids):
        entered = model.get_input_embeddings()(part).detach().requires_grad_()
        states = model.model(inputs_embeds=entered, use_cache=False).last_hidden_state
        states.backward(_pulled(model, states.detach()))
    for handle in handles:
        handle.remove()
    return sums


def _add(sums: dict[str, Tensor], key: str, values: Tensor, weight: float = 1.0) -> None:
    """Add the second moment of some values to a sum."""
    rows = values.flatten(0, 1)
    sums.setdefault(key, torch.zeros(rows.shape[1], rows.shape[1])).addmm_(rows.T, rows, alpha=weight)


def _pulled(model: Any, states: Tensor) -> Tensor:
    """Return the gradient of −log p(drawn label) at the final states."""
    pulled = torch.empty_like(states)
    for rows, into in zip(
        states.flatten(0, 1).split(HEAD_TOKENS), pulled.flatten(0, 1).split(HEAD_TOKENS), strict=True
    ):
        chances = model.lm_head(rows).softmax(-1)
        chances[torch.arange(len(rows)), torch.multinomial(chances, 1)[:, 0]] -= 1.0
        into.copy_(chances @ model.lm_head.weight)
    return pulled


def final_states(model: Any, ids: Tensor) -> Tensor:
    """Return the final states at the scored positions."""
    with torch.no_grad():
        states = [model.model(part, use_cache=False).last_hidden_state[:, FIRST::STRIDE] for part in steps(ids)]
    return torch.cat([each.flatten(0, 1) for each in states])


def divergence(model: Any, dense: Tensor, states: Tensor) -> float:
    """Return KL(dense ‖ rounded), nats per token."""
    total = 0.0
    with torch.no_grad():
        for before, after in zip(dense.split(HEAD_TOKENS), states.split(HEAD_TOKENS), strict=True):
            sure, now = (model.lm_head(rows).log_softmax(-1) for rows in (before, after))
            total += float((sure.exp() * (sure - now)).sum())
    return total / len(dense)


def cached(path: Path, compute: Any) -> None:
    """Write what `compute` returns, unless the file is there."""
    if not path.exists():
        save_file({key: tensor.contiguous() for key, tensor in compute().items()}, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)


def round_layer(
    layer: int, weights: Mapping[str, Tensor], quantize: Quantize, inputs: Any, gradients: Any
) -> dict[str, Tensor]:
    """Return the rounded weight of each role of a layer."""
    moments = {Moment(point): inputs.get_tensor(f"{layer}.{point}")[None] for point in set(READS.values())}
    outputs: dict[str, Moment] = {}
    for role, weight_OI in weights.items():
        if gradients is not None:
            matrix = Matrix(role, len(weight_OI), weight_OI.shape[1], bias=False, reads=READS[role])
            outputs[role] = moment = outputs_moment(matrix)
            size = matrix.outputs // moment.groups
            whole_OO = gradients.get_tensor(f"{layer}.{role}")
            starts = range(0, matrix.outputs, size)
            moments[moment] = torch.stack([whole_OO[at : at + size, at : at + size] for at in starts])
    stored = {f"{role}.weight": weight for role, weight in weights.items()}
    assert quantize.bits != "auto"
    solution = Solution(stored, {})
    rounded = round_solution(solution, quantize, quantize.bits, moments, stored, READS, outputs=outputs)
    return {roles[0]: values for roles, values in multiplied(solution, rounded.rounded).items()}


def parsed(block: str) -> Quantize:
    """Return the settings of an argument `field=value,...`."""
    pairs = (pair.partition("=")[::2] for pair in block.split(","))
    return Quantize.model_validate_json(json.dumps({name: _value(text) for name, text in pairs}))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class Bench:
    """A model, its calibration windows, and the dense model's final states on the scored texts, cached in a folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.folder: Path = options.cache
        self.folder.mkdir(parents=True, exist_ok=True)
        model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32)
        self.model = model.eval().requires_grad_(False)
        self.modules = linears(self.model, options.every)
        tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)

        def cut(place: str, count: int, length: int) -> Tensor:
            return windows(tokenizer, place, count, length, options.start_token)

        self.text = cut(options.text, options.windows, options.length)
        self.scored = {place: cut(place, options.scored_windows, options.scored_length) for place in options.score}
        self.inputs, self.gradients, dense = (
            self.folder / f"{name}.safetensors" for name in ("inputs", "gradients", "dense")
        )
        cached(self.inputs, lambda: input_moments(self.model, self.modules, self.text))
        cached(dense, lambda: {place: final_states(self.model, ids) for place, ids in self.scored.items()})
        self.dense = load_file(dense)

    def results(self) -> list[dict[str, Any]]:
        """Return what has been recorded."""
        path = self.folder / "results.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def record(self, name: str, **figures: Any) -> None:
        """Score the model as it is now, then print and append a line."""
        lost = {
            place: divergence(self.model, self.dense[place], final_states(self.model, ids))
            for place, ids in self.scored.items()
        }
        line = json.dumps({"name": name, "divergence": lost, **figures})
        print(line, flush=True)
        with (self.folder / "results.jsonl").open("a") as file:
            file.write(line + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute the statistics that are not cached, and score each block."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("blocks", nargs="+", metavar="FIELD=VALUE,...", help="a block `quantize` of a manifest")
    parser.add_argument("--gradient-windows", type=int, default=16)
    options = parser.parse_args(arguments)
    settings = {block: parsed(block) for block in options.blocks}
    bench = Bench(options)
    done = {line["name"] for line in bench.results()}
    modules = bench.modules
    if any(quantize.feedback == "both" for quantize in settings.values()):
        cached(bench.gradients, lambda: output_gradients(bench.model, modules, bench.text[: options.gradient_windows]))
    stored = {key: module.weight.data.to(torch.bfloat16) for key, module in modules.items()}
    for block, quantize in settings.items():
        if block in done:
            continue
        begun = time.monotonic()
        with safe_open(bench.inputs, "pt") as inputs, torch.no_grad():
            gradients = safe_open(bench.gradients, "pt") if quantize.feedback == "both" else None
            for layer in sorted({number for number, _ in modules}):
                weights = {role: weight for (number, role), weight in stored.items() if number == layer}
                for role, values in round_layer(layer, weights, quantize, inputs, gradients).items():
                    modules[layer, role].weight.data.copy_(values)
        bench.record(block, rounding_seconds=round(time.monotonic() - begun, 1))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `Bench` needs."""
    parser.add_argument("checkpoint", help="a Hugging Face folder")
    parser.add_argument(
        "--text", required=True, help="calibration: FILE.txt, FILE.jsonl, or FILE.json:FROM-TO of passages"
    )
    parser.add_argument("--score", nargs="+", required=True, metavar="TEXT", help="texts whose windows are scored")
    parser.add_argument("--cache", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="round one layer in N, for a large model")
    parser.add_argument("--start-token", type=int, help="id that begins each window (Gemma's <bos>: 2)")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--scored-windows", type=int, default=4)
    parser.add_argument("--scored-length", type=int, default=512)


if __name__ == "__main__":
    main()
