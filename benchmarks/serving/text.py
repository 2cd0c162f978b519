"""Text through an endpoint, streamed over HTTP, beside the engine alone, static batches, and others' servers.

    python -m benchmarks.serving.text [--runs N] [--quick] [--only PEER ...]

Two models: a byte-level Llama of 1.8 million parameters and SmolLM2-135M in float32 (shorter texts, fewer requests).
Prompts of 20 to 200 tokens and answers of 10 to 120, greedy, one thread. Requests arrive by a Poisson process at 1.2
times what static batches of 16 take. What counts is the processor time of all of a server's processes; the client's
does not. Latencies: the same arrivals at half the load that the engine takes, in turns. Then 20 streams at any time,
alone and with 180 more connections open.

Static batches take what has arrived, up to 16 in order of arrival, and compute until the longest of their answers ends;
the answers are decoded to text at once. Like the engine alone they run in this process, without HTTP.

`transformers serve` and openvino-genai (SmolLM2, all at once, without HTTP, weights in float16; it informs only) come
from an environment of their own, `.venv-text`: transformers[serving] 5.23.0 with torch 2.13.0, and gguf, and
openvino-genai 2026.4.1.0. PyPI has no wheel of llama-cpp-python.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import transformers
from torch import nn

from benchmarks.children import OUR_PYTHON, ROOT, Child, pause_until, scratch
from benchmarks.generation import GGUF, SLOTS, read_cpu_s, run_static, train_bytes
from benchmarks.result import Row, compare, options, write
from shoal.cluster.ports import find_free_port
from shoal.libs.hf.source import find_folder
from shoal.libs.hf.transfer import pull
from shoal.libs.language.engine import SlotEngine, TextRequest

TEXT_PYTHON = str(ROOT / ".venv-text" / "bin" / "python")
OURS, SERVE, ALONE, STATIC = "ours", "transformers serve", "the engine alone", "static batches of 16"
GENAI = "openvino-genai"
ARRIVING, AT_ONCE = "arriving at 1.2 times what static batches take", "all at once"
LENGTH, START_S, ANSWER_S = 512, 120.0, 120.0
OVERLOAD, HALF = 1.2, 0.5
OPEN, ACTIVE = 200, 20
Job = tuple[str, int]  # a text, and the tokens of its answer


@dataclass(frozen=True)
class Workload:
    """A model as a folder, and what is asked of it. `prompts`: texts; `lengths`: tokens of their answers."""

    name: str
    folder: Path
    tokenizer: Any
    texts: Sequence[str]
    num: int
    shorter: int

    def make_jobs(self, seed: int) -> list[Job]:
        """Texts with 20 to 200 tokens, and 10 to 120 tokens to write."""
        chance = random.Random(seed)
        jobs = []
        for text in chance.sample(self.texts, self.num):
            tokens = self.tokenizer.encode(text)[: chance.randint(20, 200) // self.shorter]
            jobs.append((self.tokenizer.decode(tokens), chance.randint(10, 120) // self.shorter))
        return jobs


@dataclass
class Stream:
    """When the tokens of one answer came, in seconds since it was due."""

    due_s: float
    at_s: list[float] = field(default_factory=list)
    num_tokens: int = 0


@dataclass
class Outcome:
    streams: list[Stream]
    cpu_s: float

    @property
    def rate(self) -> float:
        return sum(each.num_tokens for each in self.streams) / self.cpu_s

    @property
    def first_ms(self) -> list[float]:
        return [1e3 * (each.at_s[0] - each.due_s) for each in self.streams if each.at_s]

    @property
    def between_ms(self) -> list[float]:
        return [1e3 * (b - a) for each in self.streams for a, b in zip(each.at_s, each.at_s[1:], strict=False)]


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def list_arrivals(num: int, per_s: float, seed: int) -> list[float]:
    chance, at_s, arrivals = random.Random(seed), 0.0, []
    for _ in range(num):
        arrivals.append(at_s)
        at_s += chance.expovariate(per_s)
    return arrivals


# ---------------------------------------------------------------- the sides


def run_engine(module: nn.Module, tokenizer: Any, jobs: list[Job], arrivals: list[float]) -> Outcome:
    """The engine alone, in this process; events have text, as those that an endpoint sends."""
    engine = SlotEngine(module, tokenizer=tokenizer, slots=SLOTS, length=LENGTH)
    engine.run([TextRequest((5, 6, 7), max_tokens=2)])  # makes the cache
    requests = [TextRequest(tuple(tokenizer.encode(text)), max_tokens=num) for text, num in jobs]
    waiting = list(zip(arrivals, requests, strict=True))
    streams: dict[int, Stream] = {}
    before_s, begin_s = read_cpu_s(), time.monotonic()
    while waiting or engine.has_work:
        while waiting and begin_s + waiting[0][0] <= time.monotonic():
            due_s, request = waiting.pop(0)
            streams[engine.submit(request)] = Stream(begin_s + due_s)
        if not engine.has_work:
            pause_until(begin_s + waiting[0][0])
            continue
        events = engine.step()
        now_s = time.monotonic()
        for event in events:
            streams[event.request].num_tokens += 1
            if event.text:  # an endpoint sends no event for a part of a character
                streams[event.request].at_s.append(now_s)
    return Outcome(list(streams.values()), read_cpu_s() - before_s)


def run_batches(module: nn.Module, tokenizer: Any, jobs: list[Job], arrivals: list[float]) -> Outcome:
    """Static batches, in this process. All tokens of an answer come when its batch ends."""
    prompts = [(tokenizer.encode(text), num) for text, num in jobs]
    streams: list[Stream] = []
    before_s, begin_s = read_cpu_s(), time.monotonic()
    while (done := len(streams)) < len(jobs):
        pause_until(begin_s + arrivals[done])
        now_s = time.monotonic() - begin_s
        num = sum(at_s <= now_s for at_s in arrivals[done : done + SLOTS])
        answers, _ = run_static(module, prompts[done : done + num])
        texts = tokenizer.batch_decode(answers)
        assert all(texts)
        end_s = time.monotonic()
        for due_s, tokens in zip(arrivals[done : done + num], answers, strict=True):
            streams.append(Stream(begin_s + due_s, [end_s] * len(tokens), len(tokens)))
    return Outcome(streams, read_cpu_s() - before_s)


async def ask(url: str, model: str, text: str, num: int, due_s: float) -> Stream:
    """One streamed completion over a connection of its own."""
    stream = Stream(due_s)
    parts = urlsplit(url)
    body = json.dumps({"model": model, "prompt": text, "max_tokens": num, "temperature": 0.0, "stream": True}).encode()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    status = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in status, status + await reader.read()
    async for line in reader:
        if line.startswith(b"data: {"):
            [choice] = json.loads(line[6:])["choices"] or [{}]
            if choice.get("text"):
                stream.at_s.append(time.monotonic())
            if choice.get("finish_reason"):
                assert choice["finish_reason"] == "length", choice
    writer.close()
    stream.num_tokens = num
    return stream


def run_server(server: Server, jobs: list[Job], arrivals: list[float]) -> Outcome:
    """All requests, each when it is due."""

    async def drive() -> list[Stream]:
        begin_s = time.monotonic()

        async def later(job: tuple[str, int], due_s: float) -> Stream:
            await asyncio.sleep(begin_s + due_s - time.monotonic())
            return await ask(server.url, server.model, *job, begin_s + due_s)

        async with asyncio.timeout(ANSWER_S):
            return await asyncio.gather(*map(later, jobs, arrivals))

    before_s = server.child.cpu_s()
    return Outcome(asyncio.run(drive()), server.child.cpu_s() - before_s)


@dataclass(frozen=True)
class Server:
    child: Child
    url: str
    model: str


@contextmanager
def serve_ours(load: Workload, folder: Path) -> Iterator[Server]:
    text = {"slots": SLOTS, "length": LENGTH}
    words = [OUR_PYTHON, "-m", "benchmarks.ours.replica_start", load.name, json.dumps({"text": text, "warm_up": False})]
    with Child(words, folder, goodbye_s=0.0) as child:
        url = child.answer(START_S)["url"]
        yield _warm(Server(child, url, load.name))


@contextmanager
def serve_transformers(load: Workload, folder: Path) -> Iterator[Server]:
    port = find_free_port()
    words = [TEXT_PYTHON, "-m", "transformers.cli.transformers", "serve", str(load.folder), "--port", str(port)]
    words += ["--continuous-batching", "--device", "cpu", "--dtype", "float32", "--log-level", "error"]
    words += ["--cb-num-blocks", "48", "--cb-max-batch-tokens", str(SLOTS + 240)]
    with Child(words, folder, {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, goodbye_s=0.0) as child:
        yield _warm(Server(child, f"http://127.0.0.1:{port}", str(load.folder)))


def measure_openvino(load: Workload, folder: Path, runs: int) -> list[float]:
    """Tokens per processor second of openvino-genai, all requests at once."""
    words = [TEXT_PYTHON, "-m", "benchmarks.peers.openvino_text", str(GGUF), str(folder), str(SLOTS)]
    rates = []
    with Child(words, folder, {"OMP_NUM_THREADS": "1"}) as child:
        child.answer(START_S)
        for run in range(runs + 1):  # the first one warms it
            texts, lengths = zip(*load.make_jobs(1000 + run - 1), strict=True)
            before_s = child.cpu_s()
            child.ask(ANSWER_S, texts=texts, lengths=lengths)
            rates.append(sum(lengths) / (child.cpu_s() - before_s))
            print(f"{load.name}, {AT_ONCE}, {GENAI}: {rates[-1]:.0f} tokens per processor second", flush=True)
    return rates[1:]


def _warm(server: Server) -> Server:
    """Return once it answers."""
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            asyncio.run(ask(server.url, server.model, "Once upon a time", 4, time.monotonic()))
            return server
        except OSError:
            if time.monotonic() > deadline_s:
                raise TimeoutError(server.child.last_words()) from None
            time.sleep(0.2)


# ---------------------------------------------------------------- the tables


def measure_rates(load: Workload, module: nn.Module, ours: Server, peer: Server | None, runs: int) -> list[Row]:
    """Tokens per processor second: as requests arrive, and when all are there at once."""
    rates: dict[tuple[str, str], list[float]] = {}

    def take_turns(how: str, run: int, jobs: list[Job], at_s: list[float]) -> None:
        for side in (STATIC, ALONE, OURS, SERVE) if run % 2 else (SERVE, OURS, ALONE, STATIC):
            if side in (STATIC, ALONE):
                found = (run_batches if side == STATIC else run_engine)(module, load.tokenizer, jobs, at_s)
            elif side == OURS:
                found = run_server(ours, jobs, at_s)
            elif peer is not None and how == ARRIVING:
                found = run_server(peer, jobs, at_s)
            else:
                continue
            rates.setdefault((how, side), []).append(found.rate)
            print(f"{load.name}, {how}, {side}: {found.rate:.0f} tokens per processor second", flush=True)

    for run in range(runs):
        jobs = load.make_jobs(1000 + run)
        take_turns(AT_ONCE, run, jobs, [0.0] * len(jobs))
        jobs = load.make_jobs(run)
        per_s = OVERLOAD * rates[AT_ONCE, STATIC][-1] * len(jobs) / sum(num for _, num in jobs)
        take_turns(ARRIVING, run, jobs, list_arrivals(len(jobs), per_s, run))
    # An engine computes for as long as it has a request: in a second of its processor it then writes what arrives in
    # that second, 1.2 times what static batches write, unless it is so fast that it waits for requests. What it could
    # write shows where all are there at once.
    title, note = f"text, {load.name}", f"tokens per processor second; {load.num} requests over HTTP; one thread"
    bars = {ALONE: 0.95, STATIC: 1.5, SERVE: 1.2}
    return [
        compare(f"{title}, {how}", "tokens/s", "higher", rates[how, OURS], found, side, bars[side], "ratio", note)
        for (how, side), found in rates.items()
        if side != OURS
    ]


def measure_latencies(load: Workload, module: nn.Module, server: Server, runs: int) -> list[Row]:
    """At half the load that the engine takes, in turns with the engine alone."""
    first: dict[bool, list[float]] = {True: [], False: []}
    between: dict[bool, list[float]] = {True: [], False: []}
    jobs = load.make_jobs(2000)
    full_s = run_engine(module, load.tokenizer, jobs, [0.0] * len(jobs)).cpu_s
    for run in range(runs):
        jobs = load.make_jobs(2001 + run)  # not what a slot of the server still holds
        arrivals = list_arrivals(len(jobs), HALF * len(jobs) / full_s, run)
        for is_ours in (True, False) if run % 2 else (False, True):
            found = run_server(server, jobs, arrivals) if is_ours else run_engine(
                module, load.tokenizer, jobs, arrivals
            )  # fmt: skip
            first[is_ours].append(percentile(found.first_ms, 99))
            between[is_ours].append(percentile(found.between_ms, 99))
    note = f"{load.num} requests a run at {HALF} of what the engine takes; wall-clock, client on the same machine"
    return [
        compare(f"{title} p99, {load.name}", "ms", "lower", times[True], times[False], ALONE, bar, "ratio", note)
        for title, times, bar in (("first token", first, 1.2), ("between tokens", between, 1.1))
    ]


def measure_connections(load: Workload, server: Server, runs: int) -> list[Row]:
    """20 streams at any time, alone, and with 180 more open connections that have been answered once."""
    first: dict[bool, list[float]] = {True: [], False: []}
    memory: dict[bool, list[float]] = {True: [], False: []}
    seeds = itertools.count(3000)

    async def drive(num_idle: int) -> tuple[list[float], float]:
        idle = [await _open_idle(server) for _ in range(num_idle)]
        todo, streams = load.make_jobs(next(seeds)), list[Stream]()

        async def repeat() -> None:
            while todo:
                streams.append(await ask(server.url, server.model, *todo.pop(), time.monotonic()))

        async with asyncio.timeout(ANSWER_S):
            await asyncio.gather(*[repeat() for _ in range(ACTIVE)])
        used = server.child.memory_bytes() / 2**20
        for writer in idle:
            writer.close()
        return Outcome(streams, 1.0).first_ms, used

    asyncio.run(drive(0))  # a first one, so that memory has grown to what the load takes
    for run in range(runs):
        for is_open in (True, False) if run % 2 else (False, True):
            found, used = asyncio.run(drive(OPEN - ACTIVE if is_open else 0))
            first[is_open].append(percentile(found, 99))
            memory[is_open].append(used)
    note = f"{ACTIVE} streams at any time; {OPEN} connections, and {ACTIVE} alone"
    title = f"{OPEN} connections open, {ACTIVE} active, {load.name}"
    few = f"{ACTIVE} alone"
    return [
        compare(f"{title}: first token p99", "ms", "lower", first[True], first[False], few, 2.0, "ratio", note),
        compare(f"{title}: memory", "MiB", "lower", memory[True], memory[False], few, 1.05, "ratio", note),
    ]


async def _open_idle(server: Server) -> asyncio.StreamWriter:
    parts = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
    return writer


# ---------------------------------------------------------------- models


def save_bytes(folder: Path, steps: int) -> Workload:
    """The model of bytes as a folder of Hugging Face, without a token that ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.save_pretrained(folder)
    model = train_bytes(steps)
    model.config.eos_token_id = model.config.bos_token_id = None  # type: ignore[union-attr]
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None  # type: ignore[union-attr]
    model.save_pretrained(folder)  # type: ignore[operator]
    return Workload("bytes", folder, tokenizer, _read_texts(), 64, 1)


def save_smollm2(folder: Path) -> Workload:
    """SmolLM2-135M, without a token that ends a text."""
    shutil.copytree(find_folder(str(GGUF)), folder)
    for path in folder.glob("*config.json"):
        values = json.loads(path.read_text()) | {"eos_token_id": None, "eos_token": None}
        path.write_text(json.dumps(values))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return Workload("smollm2", folder, tokenizer, _read_texts(), 32, 3)


def _read_texts() -> list[str]:
    """Pieces of the documentation."""
    text = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    text = text.encode("ascii", "ignore").decode()
    return [text[begin : begin + 1200] for begin in range(0, len(text) - 1200, 1200)]


def main() -> None:
    chosen = options(__doc__, runs=2, only=[SERVE, GENAI])
    torch.set_num_threads(1)
    rows = []
    with scratch() as folder:
        os.environ["SHOAL_HOME"] = str(folder / "home")
        loads = [save_bytes(folder / "bytes", 10 if chosen.quick else 120), save_smollm2(folder / "smollm2")]
        for saved in loads:
            load = replace(saved, num=saved.num // 8) if chosen.quick else saved
            pull(str(load.folder), load.name, dtype="float32")
            module = transformers.AutoModelForCausalLM.from_pretrained(load.folder, dtype=torch.float32).eval()
            is_small = load.shorter == 1
            with ExitStack() as servers:
                ours = servers.enter_context(serve_ours(load, folder))
                peer = servers.enter_context(serve_transformers(load, folder)) if SERVE in chosen.only else None
                rows += measure_rates(load, module, ours, peer, chosen.runs if is_small else 1)
                rows += measure_latencies(load, module, ours, chosen.runs)
                if is_small:
                    rows += measure_connections(load, ours, chosen.runs)
            if not is_small and GENAI in chosen.only:
                written = next(row for row in rows if row.name == f"text, {load.name}, {AT_ONCE}")
                found = measure_openvino(load, folder, 1)
                note = "its weights in float16, without HTTP; the same requests"
                values = written.runs["ours"]["values"]
                rows.append(compare(written.name, "tokens/s", "higher", values, found, GENAI, note=note))
    write("serving_text", rows, chosen.results)


if __name__ == "__main__":
    main()
