"""vLLM in a process of its own: steps it, and sends what each step gave. Started by `engine/vllm_engine`.

Runs in an environment that has vLLM (0.32 or newer), and need not have what Shoal has besides. It ends with the process
that started it, and takes along those that vLLM has started. Messages are tuples: the name of a method here and its
arguments one way, `tokens`, `refused`, `swapped` and `loaded` the other. While nothing is computed it sends `alive`.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.errors import ConnectionLost
from shoal.extend.sync import Channel, ChannelAddress, connect

ALIVE_S = 2.0
STARTED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
_GRAMMARS = {"json_schema": "json", "regex": "regex", "lark": "grammar", "choice": "choice"}


class VllmProcess:
    """options: of vLLM's EngineArgs, whose `model` is a folder in the layout of Hugging Face, and `cpu_cache_bytes`"""

    def __init__(self, channel: Channel, version: int | str, options: dict[str, Any]) -> None:
        from vllm import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        self._channel = channel
        self._version = version
        self._folder = options["model"]
        self._adapted: set[str] = set()  # answers with an adapter
        # The output of a step is of the weights that computed it: asynchronous scheduling gives it one step later.
        fixed = {"async_scheduling": False, "scheduling_policy": "priority", "disable_log_stats": True}
        structured = {"backend": "guidance"}  # which has Lark
        cache_bytes = options.pop("cpu_cache_bytes")
        if current_platform.is_cpu():
            options.setdefault("kv_cache_memory_bytes", cache_bytes)
        arguments: Any = {**fixed, "structured_outputs_config": structured, **options}
        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))

    def run(self, inbox: queue.SimpleQueue[tuple[Any, ...]]) -> None:
        while True:
            is_busy = self._engine.has_unfinished_requests()
            try:
                while True:
                    name, *arguments = inbox.get(block=not is_busy, timeout=ALIVE_S)
                    getattr(self, name)(*arguments)
                    is_busy = True
            except queue.Empty:
                if not self._engine.has_unfinished_requests():
                    self._channel.send(("alive",))
            if self._engine.has_unfinished_requests():
                self._step()

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        fields: Mapping[str, Any],
        grammar: tuple[str, Any] | None,
        adapter: tuple[str, int, str] | None,
        priority: int,
    ) -> None:
        """fields: of SamplingParams; adapter: its name, number and folder"""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        try:
            structured: Any = None if grammar is None else {_GRAMMARS[grammar[0]]: grammar[1]}
            params = SamplingParams(
                **fields,
                structured_outputs=None if structured is None else StructuredOutputsParams(**structured),
                output_kind=RequestOutputKind.DELTA,
                detokenize=False,
                ignore_eos=True,  # the stop tokens have it
            )
            lora = None if adapter is None else LoRARequest(*adapter)
            if adapter is not None:
                self._adapted.add(name)
            prompts = {"prompt_token_ids": list(prompt)}
            self._engine.add_request(name, prompts, params, lora_request=lora, priority=-priority)
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises is an answer to this request
            self._channel.send(("refused", name, f"{type(error).__name__}: {error}"))

    def abort(self, *names: str) -> None:
        self._adapted.difference_update(names)
        self._engine.abort_request(list(names))

    def load(self, version: int | str, folder: str) -> None:
        """Compute with the weights in a folder from the next step on, or with those before where they cannot be
        loaded. Caches are filled again; answers with an adapter end."""
        problem = ""
        if self._adapted:
            names = list(self._adapted)
            self.abort(*names)
            self._channel.send(("swapped", *names))
        try:
            self._reload(folder)
        except Exception as error:  # noqa: BLE001 - some tensors may be new already: load all of the version before
            problem = f"{type(error).__name__}: {error}"
            self._reload(self._folder)
            shutil.rmtree(folder, ignore_errors=True)
        else:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._version, self._folder = version, folder
        self._channel.send(("loaded", version, problem))

    def _reload(self, folder: str) -> None:
        self._engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def _step(self) -> None:
        begin_s = time.monotonic()
        answers = []
        for output in self._engine.step():
            [answer] = output.outputs
            logprobs, tops = [], []
            for token, known in zip(answer.token_ids, answer.logprobs or (), strict=True):
                logprobs.append(known[token].logprob)
                ranked = sorted((each.rank, other, each.logprob) for other, each in known.items())
                tops.append(tuple((other, logprob) for _, other, logprob in ranked))
            if answer.finish_reason is not None:
                self._adapted.discard(output.request_id)
            answers.append((output.request_id, list(answer.token_ids), logprobs, tops, answer.finish_reason))
        self._channel.send(("tokens", self._version, time.monotonic() - begin_s, answers))


def main() -> None:
    """Read the address of the other process, and the options of the engine, from standard input."""
    os.environ.update(STARTED)
    given = json.loads(sys.stdin.readline())
    channel = connect(ChannelAddress(given["host"], given["port"], bytes.fromhex(given["secret"])))
    inbox = queue.SimpleQueue[tuple[Any, ...]]()

    def read() -> None:
        try:
            while True:
                inbox.put(channel.receive())
        except ConnectionLost:
            shutil.rmtree(given["folder"], ignore_errors=True)
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    try:
        process = VllmProcess(channel, given["version"], given["options"])
    except Exception as error:
        channel.send(("failed", f"{type(error).__name__}: {error}"))
        raise
    channel.send(("ready",))
    process.run(inbox)
