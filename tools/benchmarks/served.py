"""Compare real checkpoints as servers, vLLM and llama.cpp beside transformers: answers, tokens per second, memory.

    python -m tools.benchmarks.served dense int4 dense.gguf int4.gguf --tokenizer MODEL \\
        --vllm .engines/vllm/bin/python --llama-cpp .engines/llama-cpp [--new 32] [--repeats 3] \\
        [--context 256] [--sequences 32]

Folders run in transformers (in this environment) and in vLLM's OpenAI server, both in `--dtype`; files in llama.cpp's
server, in the numbers of the file, with a cache of float32 if the file's are, and of float16 otherwise. Each runs in a
process of its own, with one thread. Each server gets the same 20 questions at once, by the chat template of
`--tokenizer`, as token ids. `same` counts the answers all of whose tokens are the most likely ones of transformers (for
a file, of the folder before it), and names the largest difference of two logits where an answer left them: near zero,
the tokens were as good as tied. Standard error has all of them. `chat` is what OpenAI's chat endpoint did with
messages, streaming, stop words and log-probabilities. Tokens per second are those of decoding, per CPU-second of all
processes of a server (median of the turns), which other programs on the machine disturb least. `memory` is the peak of
these processes' proportional set size (PSS), read five times a second.
Requests with prompts that fill `--context` are among them, `--sequences` at once.
`predicted` is the sum of docs/plan.md#fit for the weights as the engine holds them, `--context` and `--sequences`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil
import torch

from lamina.processor_lamina import processor_flags
from manifests.engines import Engine
from manifests.fit import Fit
from pipeline.cost_model.serving_memory import ServingMemory, serving_memory
from pipeline.families.registry import geometry_of, standard_config
from tools.benchmarks.jobs import family_of

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
PROMPT = 40  # tokens of a prompt in transformers
REARRANGED = ("Q4_0", "IQ4_NL")  # types of which llama.cpp makes a second copy
BITS = {"float32": 32, "bfloat16": 16}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
QUESTIONS = (
    "What is the capital of France?", "Name three colours of the rainbow.", "How many days has a week?",
    "Write a sentence about the sea.", "What is two plus two?", "Who wrote Hamlet?", "What do bees make?",
    "Give me a word that rhymes with cat.", "What is water made of?", "Which planet is the largest?",
    "Translate 'good morning' to Spanish.", "Why is the sky blue?", "Write a Python function that adds two numbers.",
    "What is the opposite of hot?", "Name a fruit that is yellow.", "How do I boil an egg?",
    "What is a prime number?", "Reverse the list [1, 2, 3] in Python.", "Tell me a very short story.",
    "What is the largest ocean?",
)  # fmt: skip


# -- servers ----------------------------------------------------------------------------------------------------------


class Peak:
    """The most memory that a process and those that it started had together; what they share counts once."""

    def __init__(self, pid: int | None = None) -> None:
        self.bytes, self._stop = 0, threading.Event()
        if pid is not None:
            threading.Thread(target=self._watch, args=(psutil.Process(pid),), daemon=True).start()

    def _watch(self, process: psutil.Process) -> None:
        while not self._stop.wait(0.2):
            with suppress(psutil.Error):  # a process that ended meanwhile
                self.bytes = max(self.bytes, sum(each.memory_full_info().pss for each in family_of(process)))

    def end(self) -> None:
        """Watch no longer."""
        self._stop.set()


@dataclass(frozen=True)
class Server:
    """A running server. `family`: its own process and those that it started. `peak`: of their memory."""

    url: str
    model: str
    family: list[psutil.Process]
    peak: Peak = field(default_factory=lambda: Peak())

    def post(self, route: str, **body: Any) -> str:
        """Return the answer to a request, as text."""
        content = json.dumps({"model": self.model, "temperature": 0, **body}).encode()
        request = urllib.request.Request(f"{self.url}{route}", content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return str(answer.read().decode())

    def cpu_seconds(self) -> float:
        """Return those of all processes."""
        return sum(float(times.user + times.system) for times in (process.cpu_times() for process in self.family))

    def answers(self, prompts: Sequence[list[int]], new: int, ends: bool = False) -> list[list[int]]:
        """Return the greedy tokens of all prompts, sent at once; `ends`: answers may be shorter than `new`."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda ids: self._tokens(ids, new, ends), prompts))

    def _tokens(self, ids: list[int], new: int, ends: bool) -> list[int]:
        common = {"prompt": ids, "ignore_eos": not ends}
        if self.model == "llama.cpp":
            one = self.post("/completion", n_predict=new, return_tokens=True, cache_prompt=False, **common)
            return [*json.loads(one)["tokens"]]
        one = self.post("/v1/completions", max_tokens=new, return_token_ids=True, **common)
        return [*json.loads(one)["choices"][0]["token_ids"]]


@contextmanager
def running(command: list[str], url: str, model: str, environment: dict[str, str]) -> Iterator[Server]:
    """Yield a server once it answers, and end its processes."""
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **ONE_THREAD, **environment}, stdout=sys.stderr)
    peak = Peak(process.pid)
    try:
        deadline = time.monotonic() + 900
        while not _answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(command)}: did not start")
            time.sleep(1)
        yield Server(url, model, [*family_of(psutil.Process(process.pid))], peak)
    finally:
        peak.end()
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        _, alive = psutil.wait_procs(family, timeout=60)
        for each in alive:
            each.kill()
        process.wait(timeout=60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def vllm_command(folder: str, cache_bytes: int, options: Any) -> tuple[list[str], dict[str, str]]:
    """Return the command of vLLM's server, and its environment."""
    latent = json.loads(Path(folder, "config.json").read_text())["model_type"] == "deepseek_v3"
    given = {"model": folder, "served-model-name": "vllm", "dtype": options.dtype, "max-model-len": options.context,
             "port": options.port, "max-num-seqs": options.sequences, "kv-cache-memory-bytes": cache_bytes,
             "host": "127.0.0.1"}  # fmt: skip
    switches = ("--enforce-eager", "--no-enable-prefix-caching")
    command = [options.vllm, "-m", "vllm.entrypoints.openai.api_server", *switches]
    command += [f"--{name}={value}" for name, value in given.items()]
    if latent:  # vLLM's operator for CPUs rotates only the first head
        command.append('--compilation-config={"custom_ops": ["-rotary_embedding"]}')
    environment = {"PYTHONPATH": f"{ROOT / 'deploy' / 'serving'}", **({"VLLM_MLA_DISABLE": "1"} if latent else {})}
    return command, environment


def llama_command(path: str, options: Any) -> tuple[list[str], dict[str, str]]:
    """Return the command of llama.cpp's server, and its environment."""
    given = {"port": options.port, "sequences": options.sequences, "context": options.context}
    command = [sys.executable, "-m", "tools.benchmarks.llama_server", path]
    command += [f"--{name}={value}" for name, value in given.items()]
    return command + ["--float32-cache"] * in_float32(path), {"PYTHONPATH": f"{options.llama_cpp}:{ROOT}"}


def in_float32(path: str) -> bool:
    """Return True if the matrices of a GGUF file are of float32."""
    import gguf

    file_type = gguf.GGUFReader(path).fields["general.file_type"].contents()
    return bool(file_type == gguf.LlamaFileType.ALL_F32)


def held_bytes(path: str) -> int:
    """Return the bytes of a GGUF file, and those of the second copy that llama.cpp makes of matrices of 4 bits.

    Its kernels for CPUs (AVX2) read eight rows side by side. The file stays mapped.
    """
    import gguf

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    looked_up = "token_embd.weight" if "output.weight" in tensors else ""  # alone; else it is the head, too
    rearranged = (
        tensor.n_bytes
        for name, tensor in tensors.items()
        if tensor.tensor_type.name in REARRANGED and name != looked_up and tensor.shape[1] % 8 == 0
    )
    return Path(path).stat().st_size + int(sum(rearranged))


def held_by_vllm(folder: str, dtype: str, decoded: int) -> int:
    """Return the bytes of a checkpoint's weights in vLLM on a CPU: codes of 4 bits stay where it has a kernel for them
    (beside bfloat16, with AVX-512); others take as much as transformers' decoded ones."""
    config = json.loads(Path(folder, "config.json").read_text()).get("quantization_config")
    groups = config["config_groups"].values() if config else ()
    kept = dtype == "bfloat16" and "avx512f" in processor_flags()
    if not groups or not kept or any(group["weights"]["num_bits"] != 4 for group in groups):
        return decoded
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def question_ids(tokenizer: Any, question: str) -> list[int]:
    """Return a question by the chat template, as token ids."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return [*tokenizer(text, add_special_tokens=False).input_ids]


# -- measuring --------------------------------------------------------------------------------------------------------


def decoding_rate(seconds: Callable[[], float], answer: Callable[[int], Any], batch: int, options: Any) -> float:
    """Return decoded tokens per second: of `options.new` tokens behind a first one, whose seconds do not count."""
    rates: list[float] = []
    for _ in range(options.repeats):
        start = seconds()
        answer(1)
        middle = seconds()
        answer(options.new + 1)
        rates.append(batch * options.new / (seconds() - middle - (middle - start)))
    return statistics.median(rates)


def chat_faults(server: Server) -> list[str]:
    """Return what a client of OpenAI's chat endpoint would not expect."""
    ask = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 16}
    whole = json.loads(server.post("/v1/chat/completions", **ask, logprobs=True, top_logprobs=2))
    choice = whole["choices"][0]
    said, faults = choice["message"]["content"], []
    lines = server.post("/v1/chat/completions", **ask, stream=True).splitlines()
    parts = [json.loads(line[6:])["choices"] for line in lines if line.startswith("data: {")]
    streamed = "".join(part[0]["delta"].get("content") or "" for part in parts if part)
    if streamed != said or lines[-2:] not in (["data: [DONE]", ""], ["", "data: [DONE]"]):
        faults.append(f"streamed {streamed!r}, whole {said!r}")
    if "".join(token["token"] for token in choice["logprobs"]["content"])[: len(said)] != said:
        faults.append("log-probabilities of other tokens")
    word = said.split()[-1]
    stopped = json.loads(server.post("/v1/chat/completions", **ask, stop=[word]))["choices"][0]
    if stopped["finish_reason"] != "stop" or word in stopped["message"]["content"]:
        faults.append(f"not stopped at {word!r}: {stopped['message']['content']!r}")
    print(f"  {server.model}: {said!r}", file=sys.stderr)
    return faults


def of_server(server: Server, prompts: Sequence[list[int]], options: Any) -> dict[str, Any]:
    """Return the measurements of a server."""
    answers = server.answers(prompts, options.new, ends=True)
    faults = chat_faults(server)
    full = ([*islice(cycle(prompt), options.context - options.new)] for prompt in cycle(prompts))
    server.answers([*islice(full, options.sequences)], options.new)  # fills the cache, as the prediction has it
    batches = {count: [*islice(cycle(prompts), count)] for count in (1, options.sequences)}
    rates = [
        decoding_rate(server.cpu_seconds, partial(server.answers, batch), count, options)
        for count, batch in batches.items()
    ]
    shares = (f"{each.name()} {each.memory_full_info().pss / MIB:,.0f}" for each in server.family)
    print(f"  {server.model}, MiB of each process after the answers: {', '.join(shares)}", file=sys.stderr)
    return {"rates": rates, "memory": server.peak.bytes, "answers": answers, "chat": "; ".join(faults) or "ok"}


def load(folder: str, options: Any) -> Any:
    """Return the model in transformers."""
    from transformers import AutoModelForCausalLM

    import lamina  # noqa: F401  # registers its classes

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype)).eval()


def in_transformers(folder: str, options: Any) -> dict[str, Any]:
    """Return the rates of a model in this process, and the bytes of its weights as they are in memory."""
    model = load(folder, options)

    def answer(batch: int, new: int) -> None:
        ids = torch.full((batch, PROMPT), 9)
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)

    rates = [
        decoding_rate(time.process_time, lambda new, n=n: answer(n, new), n, options)  # type: ignore[misc]
        for n in (1, options.sequences)
    ]
    return {"rates": rates, "weights": sum(each.nbytes for each in (*model.parameters(), *model.buffers()))}


def of_transformers(folder: str, options: Any) -> dict[str, Any]:
    """Return the measurements of a model in a process of its own."""
    names = ("dtype", "new", "repeats", "sequences")
    command = [sys.executable, "-m", "tools.benchmarks.served", folder, "--alone"]
    command += [f"--{name}={getattr(options, name)}" for name in names]
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": f"{ROOT}:{ROOT / 'deploy' / 'serving'}"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    peak = Peak(process.pid)
    printed, _ = process.communicate()
    peak.end()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: ended with {process.returncode}")
    return {**json.loads(printed.splitlines()[-1]), "memory": peak.bytes, "chat": ""}


def agreement(model: Any, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> tuple[int, float]:
    """Return how many answers have the model's most likely tokens alone, and the largest gap of logits where the
    others left them."""
    same, gap = 0, 0.0
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        with torch.inference_mode():
            logits_TV = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
        short_T = logits_TV.amax(-1) - logits_TV[torch.arange(len(answer)), torch.tensor(answer)]
        left = [(position, float(value)) for position, value in enumerate(short_T) if value > 0]
        same += not left
        if left:
            position, first = left[0]
            gap = max(gap, first)
            print(f"  answer {number} leaves transformers' at token {position}, by {first:.3g}", file=sys.stderr)
    return same, gap


def serving(folder: str, engine: Engine, options: Any, cache_bits: int = 16) -> ServingMemory:
    """Return the memory beside the weights by docs/plan.md#fit. `cache_bits`: of a number in llama.cpp's cache."""
    config = json.loads(Path(folder, "config.json").read_text())
    config = config if config["model_type"] == "lamina" else standard_config(config)
    context = PROMPT + options.new + 1 if engine == "transformers" else options.context
    fit = Fit(memory=1, context=context, sequences=options.sequences, engine=engine, device="cpu")
    memory = serving_memory(fit, config, geometry_of(config, BITS[options.dtype]), ())
    if engine == "llama.cpp":
        memory = replace(memory, cache_bytes=memory.cache_bytes * cache_bits // 16)
    return memory


# -- the table --------------------------------------------------------------------------------------------------------


def row(path: str, engine: str, dtype: str, each: dict[str, Any], compared: tuple[int, float] | None) -> str:
    """Return the line of a measurement."""
    one, many = (f"{rate:,.1f}" for rate in each["rates"])
    same = "" if compared is None else f"{compared[0]} of {len(QUESTIONS)}"
    if compared and compared[0] < len(QUESTIONS):
        same += f" (gap {compared[1]:.2g})"
    memory, expected = each["memory"], each["predicted"]
    figures = (f"{memory / MIB:,.0f}", f"{expected / MIB:,.0f}", f"{expected / memory - 1:+.1%}")
    cells = (Path(path).name, engine, dtype, one, many, *figures)
    return f"| {' | '.join(cells)} | {same} | {each['chat']} |"


def placed(path: str) -> str:
    """Return a path as an absolute one, since children run in the root of the repository. A hub id stays."""
    return str(Path(path).absolute()) if path and Path(path).exists() else path


def main() -> None:
    """Print the table, or measure a model in transformers as a child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="+", type=placed, help="checkpoints, each before the GGUF files that were made of it"
    )
    parser.add_argument(
        "--tokenizer", type=placed, help="the model whose chat template asks the questions; default: the first"
    )
    parser.add_argument("--vllm", type=placed, help="the Python of an environment with vLLM; without it, not measured")
    parser.add_argument(
        "--llama-cpp", type=placed, default="", help="the folder of xllamacpp; default: this environment's"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--context", type=int, default=256, help="of a server: tokens of a sequence; default: 256")
    parser.add_argument("--sequences", type=int, default=32, help="at once; default: 32")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--port", type=int, default=8093)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(in_transformers(options.models[0], options)))
        return
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(options.tokenizer or options.models[0])
    prompts = [question_ids(tokenizer, text) for text in QUESTIONS]
    print(
        f"| model | engine | numbers | decode, 1 | decode, {options.sequences} "
        "| memory, MiB | predicted, MiB | off by | same | chat |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    model: Any = None
    folder, weights = "", 0
    engine: Engine
    url = f"http://127.0.0.1:{options.port}"
    for path in options.models:
        if path.endswith(".gguf"):
            command, environment = llama_command(path, options)
            with running(command, url, "llama.cpp", environment) as server:
                each = of_server(server, prompts, options)
            engine, dtype, held = "llama.cpp", "the file's", held_bytes(path)
            memory = serving(folder, engine, options, 32 if in_float32(path) else 16)
        else:
            folder, model = path, None
            each = of_transformers(path, options)
            weights = each["weights"]
            each["predicted"] = weights + serving(folder, "transformers", options).beside_weights
            print(row(path, "transformers", options.dtype, each, None), flush=True)
            model = load(path, options)
            if not options.vllm:
                continue
            memory = serving(folder, "vllm", options)
            command, environment = vllm_command(path, memory.cache_bytes, options)
            with running(command, url, "vllm", environment) as server:
                each = of_server(server, prompts, options)
            engine, dtype, held = "vllm", options.dtype, held_by_vllm(folder, options.dtype, weights)
        each["predicted"] = held + memory.beside_weights
        print(row(path, engine, dtype, each, agreement(model, prompts, each["answers"])), flush=True)


if __name__ == "__main__":
    main()
