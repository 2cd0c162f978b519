"""Texts that stream while replicas come and go, versions change and a replica is killed: none is cut, none is mixed.

    python -m benchmarks.serving.text_streams [--quick]

1. 32 streams at any time, from before the first to after the last of 20 events: replicas are added or removed, or a
   version is rolled out. A version writes one character, which names it, so each stream shows whether its spans are
   right.
2. `kill -9` of one of two replicas under 16 streams of a model that samples. Each must end with an event that names the
   replica, and be continued at the other with the tokens of a stream that was not cut.
3. 100 versions of a model that follows a run, in turns with as long without one, under 16 streams: spans, and the time
   between tokens. (That no step leaves a running answer out: `benchmarks.generation`.)
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import statistics
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
NUM_SWAPPED, SWAP_TOKENS, NUM_SWAPS, SWAP_S = 16, 120, 100, 0.2
TURN = 10  # swaps without a pause
PROMPT = "Once upon a time, "
SILENCE_S, START_S = 90.0, 300.0


# -- the endpoint, in a process


def make_weights(version: int, *, samples: bool = False) -> dict[str, Any]:
    """Of a decoder that writes the character of its version; or one that has opinions."""
    import torch

    from shoal.models.decoder import Decoder

    torch.manual_seed(0)
    decoder = Decoder(**SIZES)  # type: ignore[arg-type]
    *_, head = decoder
    with torch.no_grad():
        for each in decoder.parameters():
            each *= 4.0 if samples and each.ndim == 2 else 1.0
        if not samples:
            for parameter, value in ((head.norm.weight, 0.0), (head.norm.bias, 1.0), (head.output.weight, 0.0)):
                parameter.fill_(value)  # type: ignore[operator, union-attr]
            head.output.weight[version % 90] = 1.0  # type: ignore[union-attr, index]
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
    import functools

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
    registry.register("sampled", WeightSnapshot.of(1, make_weights(1, samples=True)), **more)
    publisher = RayWeightPublisher(store := start_weight_store("benchmark"))
    closing.callback(publisher.close)
    publisher.publish(WeightSnapshot.of(1, make_weights(1)))
    serve.RunTarget = functools.partial(serve.RunTarget, external_scaler_enabled=True)  # type: ignore[misc,assignment]
    text = {"text": {"slots": NUM_STREAMS, "tokenizer": "named@1"}, "warm_up": False}
    options = ModelOptions.model_validate(text)
    models = [model_from_ref("named@champion", options), model_from_ref("sampled@1", options)]
    models.append(EndpointModel("live", LiveModel(factory, signature, RayWeightSource(store)), options=options))
    endpoint = deploy(EndpointSpec.parse({"name": NAME, "num_cpus": 0.1, "model": text}), models)
    closing.callback(endpoint.close)
    say(url=endpoint.url)
    versions = Counter(named=1, live=1)
    for command in commands():
        if command["do"] == "scale":
            scale("replica", command["num_replicas"])
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

    def stream(self, model: str, num_tokens: int, key: str = "", **more: Any) -> Stream:
        """A stream until its end, whatever that is."""
        found = Stream()
        body = {"model": model, "prompt": PROMPT, "max_tokens": num_tokens, "stream": True, "temperature": 0, **more}
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
                child.ask(90.0, do="named")
            else:
                child.ask(90.0, do="scale", num_replicas=2 if number % 4 == 0 else 1)
        pause_until(begin_s + num_events * EVENT_S)

    streams = clients.keep_streaming("named", NUM_STREAMS, num_tokens, change)
    became = Counter(each.became for each in streams)
    problems = Counter(each.problem[:120] for each in streams if each.problem)
    versions = {version for each in streams for version, _ in each.spans}
    note = f"{dict(became)}; {len(versions)} versions; {dict(problems) or 'no errors'}"
    title = f"{num_events} scale events and roll-outs under {NUM_STREAMS} streams"
    return [
        compare(f"{title}: cut", "streams", "lower", [became["cut"]], bar=0.0, bar_kind="value", note=note),
        compare(f"{title}: wrong spans", "streams", "lower", [became["wrong spans"]], bar=0.0, bar_kind="value"),
    ]


def measure_kill(child: Child, clients: Clients) -> list[Row]:
    child.ask(90.0, do="scale", num_replicas=2)
    pause_until(time.monotonic() + 5.0)  # one that was removed may still end its streams
    ask: dict[str, Any] = {"model": "sampled", "num_tokens": KILL_TOKENS, "temperature": 1.0}
    whole = [clients.stream(key=f"k{number}", **ask) for number in range(NUM_KILLED)]
    victims = child.processes("ray::ServeReplica")
    with ThreadPoolExecutor(NUM_KILLED) as pool:
        running = [pool.submit(clients.stream, key=f"k{number}", **ask) for number in range(NUM_KILLED)]
        pause_until(time.monotonic() + 1.0)
        victims[0].kill()
        cut = [each.result() for each in running]
    begun = [(number, each) for number, each in enumerate(cut) if each.finish != "length"]
    named = sum("ends this stream: it has died" in each.problem for _, each in begun)
    wrong, took_s, problems = 0, list[float](), Counter[str]()
    for number, each in begun:
        sent_s = time.monotonic()
        rest = clients.stream(key=f"k{number}", **ask, given=each.given)
        problems[rest.problem[:120] or "none"] += 1
        took_s.append(rest.at_s[0] - sent_s if rest.at_s else SILENCE_S)
        wrong += each.text + rest.text != whole[number].text or rest.finish != "length"
    uncut = sum(each.text != whole[number].text for number, each in enumerate(cut) if each.finish == "length")
    note = f"{len(begun)} of {NUM_KILLED} streams, after {sorted(len(each.text) for _, each in begun)} tokens"
    title = "kill -9 of one of two replicas"
    value: dict[str, Any] = {"bar_kind": "value"}
    return [
        compare(f"{title}: streams that end without naming it", "streams", "lower", [len(begun) - named], bar=0.0,
                note=note, **value),
        compare(f"{title}: continued with other tokens", "streams", "lower", [wrong + uncut], bar=0.0,
                note=f"{uncut} of them were not cut; problems of the rest: {dict(problems)}", **value),
        compare(f"{title}: first token of the rest", "ms", "lower", [1e3 * statistics.median(took_s or [0.0])]),
    ]  # fmt: skip


def measure_swaps(child: Child, clients: Clients, num_swaps: int) -> list[Row]:
    child.ask(90.0, do="scale", num_replicas=1)
    moving: list[tuple[float, float]] = []

    def change() -> None:
        pause_until(time.monotonic() + 3.0)
        for _ in range(num_swaps // TURN):
            begin_s = time.monotonic()
            for number in range(TURN):
                pause_until(begin_s + number * SWAP_S)
                child.ask(60.0, do="live")
            pause_until(begin_s + TURN * SWAP_S)
            moving.append((begin_s, time.monotonic()))
            pause_until(moving[-1][1] + TURN * SWAP_S)

    streams = clients.keep_streaming("live", NUM_SWAPPED, SWAP_TOKENS, change, prompt=PROMPT * 10)
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for each in streams:
        for before_s, at_s in itertools.pairwise(each.at_s):
            if moving[0][0] <= at_s <= moving[-1][1]:
                gaps[any(begin_s <= at_s <= end_s for begin_s, end_s in moving)].append(at_s - before_s)
    became = Counter(each.became for each in streams)
    versions = {version for each in streams for version, _ in each.spans}
    switched = max(len(each.spans) for each in streams)
    note = f"{dict(became)}; {len(versions)} versions wrote, up to {switched} in a stream"
    p99, p50 = ({side: 1e3 * statistics.quantiles(some, n=100)[at] for side, some in gaps.items()} for at in (98, 49))
    title = f"{num_swaps} swaps under {NUM_SWAPPED} streams"
    about = f"{len(gaps[True])} gaps with swaps, {len(gaps[False])} without"
    return [
        compare(f"{title}: cut, or wrong spans", "streams", "lower", [len(streams) - became["whole"]], bar=0.0,
                bar_kind="value", note=note),
        compare(f"{title}: between tokens, median", "ms", "lower", [p50[True]], [p50[False]], "without swaps"),
        compare(f"{title}: between tokens, p99", "ms", "lower", [p99[True]], [p99[False]], "without swaps", 1.5,
                "ratio", about),
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
