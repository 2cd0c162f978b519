"""Texts that stream while replicas come and go, versions change and a replica is killed: none is cut, none is mixed.

    python -m benchmarks.serving.text_streams [--quick]

1. 32 streams at any time, from before the first to after the last of 20 events: replicas are added or removed, a
   version is rolled out or rolled back. A version writes one character, which names it, so each stream shows whether
   its spans are right.
2. `kill -9` of one of two replicas under 16 streams that are sampled, half of them by a `deterministic` model. Each
   must end with an event that names the replica, and be continued at the other; with `deterministic`, by the tokens of
   a stream that was not cut. Else rounding may decide between two tokens.
3. 100 versions of a model that follows a run, two a second, in turns with half as long without one, under 16 streams
   with prompts of 20 to 200 tokens: spans, the time between tokens, and the replica's processor time. (That no step
   leaves a running answer out: `benchmarks.generation`.)
"""

from __future__ import annotations

import functools
import http.client
import itertools
import json
import os
import random
import statistics
import string
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.children import OUR_PYTHON, Child, pause_until, scratch
from benchmarks.result import Row, compare, options, write
from benchmarks.serving.scaled import NAME, scale
from benchmarks.talk import commands, say

SIZES = {"num_tokens": 256, "context": 2048, "width": 256, "depth": 4, "heads": 4}
NUM_STREAMS, STREAM_TOKENS, NUM_EVENTS, EVENT_S = 32, 600, 20, 3.5
NUM_KILLED, KILL_TOKENS = 16, 300
NUM_SWAPPED, SWAP_TOKENS, NUM_SWAPS, SWAP_S, SETTLE_S = 16, 120, 100, 0.5, 1.5
TURN = 10  # swaps, and then half as long without one
PROMPT = "Once upon a time, "
SILENCE_S, START_S = 90.0, 300.0


# -- the endpoint, in a process


def make_weights(version: int) -> dict[str, Any]:
    """Of a decoder that writes the character of its version."""
    state = dict(make_state(samples=False))
    head = state["head.output.weight"] = state["head.output.weight"] * 0
    head[version % 90] = 1.0
    return state


@functools.cache
def make_state(samples: bool) -> dict[str, Any]:
    """Of a decoder that has opinions, or of one that writes what its last layer says."""
    import torch

    from shoal.models.decoder import Decoder

    torch.manual_seed(0)
    decoder = Decoder(**SIZES)  # type: ignore[arg-type]
    *_, head = decoder
    with torch.no_grad():
        for each in decoder.parameters():
            each *= 4.0 if samples and each.ndim == 2 else 1.0
        if not samples:
            for parameter, value in ((head.norm.weight, 0.0), (head.norm.bias, 1.0)):
                parameter.fill_(value)  # type: ignore[operator, union-attr]
    return {name: each.detach().numpy() for name, each in decoder.state_dict().items()}


def name_version(version: int) -> str:
    return chr(33 + version % 90)


def make_tokenizer(folder: str) -> dict[str, bytes]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # the first is "!"
    inner = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(folder)
    return {each.name: each.read_bytes() for each in Path(folder).iterdir()}


def serve(closing: ExitStack) -> None:
    from shoal.cluster.embedded_cluster import start_cluster

    cluster = closing.enter_context(start_cluster(num_cpus=8))
    os.environ.update(cluster.environment)  # before anything imports Ray
    import ray
    from ray import serve

    from shoal.cluster.job_main import connect
    from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
    from shoal.serve.on_ray.deployment import deploy
    from shoal.serve.spec.endpoint import EndpointSpec
    from shoal.serve.spec.model_options import ModelOptions
    from shoal.serve.spec.model_source import EndpointModel, LiveModel, model_from_ref
    from shoal.weights import WeightSnapshot
    from shoal.weights.ray_weight_store import RayWeightPublisher, RayWeightSource, start_weight_store

    connect()
    closing.callback(ray.shutdown)
    factory = ModelFactory(factory="shoal.models.decoder:Decoder", kwargs=SIZES)
    signature = Signature(
        inputs=[TensorSignature(name="ids", datatype="INT64", shape=[-1, -1])],
        outputs=[TensorSignature(name="logits", datatype="FP32", shape=[-1, -1, 256])],
    )
    files = make_tokenizer(closing.enter_context(tempfile.TemporaryDirectory()))
    more: Mapping[str, Any] = {"model": factory, "signature": signature, "files": files}
    registry = Registry()
    registry.register("named", WeightSnapshot.of(1, make_weights(1)), aliases=("champion",), **more)
    for name in ("sampled", "exact"):
        registry.register(name, WeightSnapshot.of(1, make_state(samples=True)), **more)
    publisher = RayWeightPublisher(store := start_weight_store("benchmark"))
    closing.callback(publisher.close)
    publisher.publish(WeightSnapshot.of(1, make_weights(1)))
    serve.RunTarget = functools.partial(serve.RunTarget, external_scaler_enabled=True)  # type: ignore[misc,assignment]
    text: dict[str, Any] = {"text": {"slots": NUM_STREAMS, "tokenizer": "named@1"}, "warm_up": False}
    options = ModelOptions.model_validate(text)
    exact = ModelOptions.model_validate({**text, "text": {**text["text"], "deterministic": True}})
    models = [model_from_ref("named@champion", options), model_from_ref("sampled@1", options)]
    models.append(model_from_ref("exact@1", exact))
    models.append(EndpointModel("live", LiveModel(factory, signature, RayWeightSource(store)), options=options))
    endpoint = deploy(EndpointSpec.parse({"name": NAME, "num_cpus": 0.1, "model": text}), models)
    closing.callback(endpoint.close)
    say(url=endpoint.url)
    versions = Counter(named=1, live=1)
    for command in commands():
        if command["do"] == "scale":
            scale("replica", command["num_replicas"])
        elif command["do"] == "back":
            registry.rollback("named")
        else:
            versions[command["do"]] += 1
            version = versions[command["do"]]
            weights = WeightSnapshot.of(version, make_weights(version))
            if command["do"] == "named":
                registry.register("named", weights, aliases=("champion",), **more)
            else:
                publisher.publish(weights)
        say(done=True)


# -- its clients


@dataclass
class Stream:
    """What came of one stream. at_s: of each event"""

    text: str = ""
    finish: str = ""
    problem: str = ""
    spans: list[list[int]] = field(default_factory=list)
    given: list[Any] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)

    @property
    def became(self) -> str:
        if self.finish != "length":
            return "cut"
        expected = "".join(name_version(version) * num for version, num in self.spans)
        return "whole" if self.text == expected else "wrong spans"


class Clients:
    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)

    def stream(
        self, model: str, num_tokens: int, key: str = "", prompt: Callable[[], str] = lambda: PROMPT, **more: Any
    ) -> Stream:
        """A stream until its end, whatever that is."""
        found = Stream()
        body = {"model": model, "prompt": prompt(), "max_tokens": num_tokens, "stream": True, "temperature": 0, **more}
        connection = http.client.HTTPConnection(str(self._url.netloc), timeout=SILENCE_S)
        with closing(connection):
            try:
                headers = {"idempotency-key": key} if key else {}
                connection.request("POST", f"{self._url.path}/v1/completions", json.dumps(body), headers)
                response = connection.getresponse()
                if response.status != 200:
                    found.problem = f"{response.status}: {response.read()[:200]!r}"
                    return found
                for line in response:
                    if line.startswith(b"data: {"):
                        self._take(found, json.loads(line[6:]))
            except (OSError, http.client.HTTPException) as error:
                found.problem = f"{type(error).__name__}: {error}"
        return found

    def _take(self, found: Stream, frame: dict[str, Any]) -> None:
        if "error" in frame:
            found.problem = frame["error"]["message"]
            return
        (choice,) = frame["choices"]
        found.at_s.append(time.monotonic())
        found.text += choice["text"]
        found.given += frame.get("shoal", {}).get("given", [])
        if choice["finish_reason"]:
            found.finish, found.spans = choice["finish_reason"], choice["shoal"]["spans"]

    def keep_streaming(
        self, model: str, num: int, num_tokens: int, during: Callable[[], None], **more: Any
    ) -> list[Stream]:
        """So many streams at any time until `during` has returned; then they end."""
        is_over = threading.Event()

        def run() -> list[Stream]:
            found = [self.stream(model, num_tokens, **more)]
            while not is_over.is_set():
                found.append(self.stream(model, num_tokens, **more))
            return found

        with ThreadPoolExecutor(num) as pool:
            running = [pool.submit(run) for _ in range(num)]
            try:
                during()
            finally:
                is_over.set()
            return list(itertools.chain(*(each.result() for each in running)))


def measure_events(child: Child, clients: Clients, num_events: int, num_tokens: int) -> list[Row]:
    def change() -> None:
        begin_s = time.monotonic() + 2.0
        for number in range(num_events):
            pause_until(begin_s + number * EVENT_S)
            if number % 2:
                child.ask(90.0, do="back" if number % 6 == 5 else "named")
            else:
                child.ask(90.0, do="scale", num_replicas=2 if number % 4 == 0 else 1)
        pause_until(begin_s + num_events * EVENT_S)

    streams = clients.keep_streaming("named", NUM_STREAMS, num_tokens, change)
    became = Counter(each.became for each in streams)
    problems = Counter(each.problem[:120] for each in streams if each.problem)
    versions = {version for each in streams for version, _ in each.spans}
    note = f"{dict(became)}; {len(versions)} versions; {dict(problems) or 'no errors'}"
    title = f"{num_events} scale events, roll-outs and roll-backs under {NUM_STREAMS} streams"
    return [
        compare(f"{title}: cut", "streams", "lower", [became["cut"]], bar=0.0, bar_kind="value", note=note),
        compare(f"{title}: wrong spans", "streams", "lower", [became["wrong spans"]], bar=0.0, bar_kind="value"),
    ]


def measure_kill(child: Child, clients: Clients) -> list[Row]:
    child.ask(90.0, do="scale", num_replicas=2)
    pause_until(time.monotonic() + 5.0)  # one that was removed may still end its streams
    asks: list[dict[str, Any]] = [
        {"model": ("sampled", "exact")[number % 2], "num_tokens": KILL_TOKENS, "temperature": 1.0, "key": f"k{number}"}
        for number in range(NUM_KILLED)
    ]
    with ThreadPoolExecutor(NUM_KILLED) as pool:
        whole = list(pool.map(lambda ask: clients.stream(**ask), asks))
        victims = child.processes("ray::ServeReplica")
        running = [pool.submit(clients.stream, **ask) for ask in asks]
        pause_until(time.monotonic() + 1.0)
        victims[0].kill()
        cut = [each.result() for each in running]
    begun = [(number, each) for number, each in enumerate(cut) if each.finish != "length"]
    named = sum("ends this stream: it has died" in each.problem for _, each in begun)
    took_s, problems, other = list[float](), Counter[str](), Counter[str]()
    for number, each in enumerate(cut):
        text, finish = each.text, each.finish
        if finish != "length":
            sent_s = time.monotonic()
            rest = clients.stream(**asks[number], given=each.given)
            problems[rest.problem[:120] or "none"] += 1
            took_s.append(rest.at_s[0] - sent_s if rest.at_s else SILENCE_S)
            text, finish = text + rest.text, rest.finish
        other[asks[number]["model"]] += text != whole[number].text or finish != "length"
    note = f"{len(begun)} of {NUM_KILLED} streams, after {sorted(len(each.text) for _, each in begun)} tokens"
    title = "kill -9 of one of two replicas"
    value: dict[str, Any] = {"bar_kind": "value"}
    return [
        compare(f"{title}: streams that end without naming it", "streams", "lower", [len(begun) - named], bar=0.0,
                note=note, **value),
        compare(f"{title}: other tokens, deterministic", "streams", "lower", [other["exact"]], bar=0.0,
                note=f"problems of the rest: {dict(problems)}", **value),
        compare(f"{title}: other tokens, where rounding may decide", "streams", "lower", [other["sampled"]]),
        compare(f"{title}: first token of the rest", "ms", "lower", [1e3 * statistics.median(took_s or [0.0])]),
    ]  # fmt: skip


def measure_swaps(child: Child, clients: Clients, num_swaps: int) -> list[Row]:
    child.ask(90.0, do="scale", num_replicas=1)
    pause_until(time.monotonic() + 3.0)
    (replica,) = child.processes("ray::ServeReplica")
    chance = random.Random(0)
    turns: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    used_s: dict[bool, float] = {True: 0.0, False: 0.0}  # by the replica

    def draw_prompt() -> str:
        return "".join(chance.choices(string.ascii_letters, k=chance.randint(20, 200)))

    def spend(is_moving: bool) -> None:
        begin_s, before_s = time.monotonic(), sum(replica.cpu_times()[:2])
        num_pauses = TURN if is_moving else TURN // 2
        for number in range(num_pauses):
            pause_until(begin_s + number * SWAP_S)
            if is_moving:
                child.ask(60.0, do="live")
        pause_until(begin_s + num_pauses * SWAP_S)
        used_s[is_moving] += sum(replica.cpu_times()[:2]) - before_s
        turns[is_moving].append((begin_s, time.monotonic()))

    def change() -> None:
        pause_until(time.monotonic() + SETTLE_S)
        for _ in range(num_swaps // TURN):
            spend(True)
            pause_until(time.monotonic() + SETTLE_S)  # running answers go over to the last one
            spend(False)

    streams = clients.keep_streaming("live", NUM_SWAPPED, SWAP_TOKENS, change, prompt=draw_prompt)
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for each in streams:
        for before_s, at_s in itertools.pairwise(each.at_s):
            for side, some in turns.items():
                gaps[side] += [at_s - before_s] * any(begin_s <= at_s <= end_s for begin_s, end_s in some)
    became = Counter(each.became for each in streams)
    versions = {version for each in streams for version, _ in each.spans}
    switched = max(len(each.spans) for each in streams)
    note = f"{dict(became)}; {len(versions)} versions wrote, up to {switched} in a stream"
    cuts = {side: statistics.quantiles(some, n=100) for side, some in gaps.items()}
    cost = {side: 1e3 * used_s[side] / len(some) for side, some in gaps.items()}
    title, about = f"{num_swaps} swaps under {NUM_SWAPPED} streams", "without swaps"
    gap = f"{title}: between tokens"
    noted = f"{len(gaps[True])} gaps with swaps, {len(gaps[False])} without"
    return [
        compare(f"{title}: cut, or wrong spans", "streams", "lower", [len(streams) - became["whole"]], bar=0.0,
                bar_kind="value", note=note),
        compare(f"{gap}, median", "ms", "lower", [1e3 * cuts[True][49]], [1e3 * cuts[False][49]], about),
        compare(f"{gap}, p99", "ms", "lower", [1e3 * cuts[True][98]], [1e3 * cuts[False][98]], about, 1.5, "ratio",
                noted),
        compare(f"{title}: processor time of a token", "ms", "lower", [cost[True]], [cost[False]], about),
    ]  # fmt: skip


def main() -> None:
    chosen = options(__doc__, runs=1)
    with scratch() as folder:
        words = [OUR_PYTHON, "-m", __spec__.name, "serve"]
        with Child(words, folder, {"SHOAL_HOME": str(folder / "home")}, folder / "r", goodbye_s=30.0) as child:
            clients = Clients(child.answer(START_S)["url"])
            extent = (4, STREAM_TOKENS // 4) if chosen.quick else (NUM_EVENTS, STREAM_TOKENS)
            rows = measure_events(child, clients, *extent)
            rows += measure_kill(child, clients)
            rows += measure_swaps(child, clients, 20 if chosen.quick else NUM_SWAPS)
    write("serving_text_streams", rows, chosen.results)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        with ExitStack() as closing_all:
            serve(closing_all)
    else:
        main()
