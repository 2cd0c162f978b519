"""vLLM behind the interface of `SlotEngine`: its kernels and models, with versions, stop texts and limits of ours.

vLLM runs in a process of its own (`vllm_process`), in an environment that has it. Here are the texts of the answers, so
that characters, stop texts and offsets are the same with both engines; vLLM samples, and applies grammars.

| queue                   | capacity     | beyond it       | who empties it | close()               |
|-------------------------|--------------|-----------------|----------------|-----------------------|
| of answers without a    | `max_queued` | 429             | vLLM           | the process is killed |
| token                   |              |                 |                |                       |
| of messages from vLLM   | unbounded    | its own slots   | `step`         | -                     |

A process that dies, or that sends nothing for SILENT_S, fails the next `step` with InferenceError 503. Decision 106.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.errors import ConfigError, ConnectionLost, InferenceError
from shoal.extend.sync import ChannelListener
from shoal.libs.language import vllm_process
from shoal.libs.language.engine.admission import QueueAdmission
from shoal.libs.language.engine.answer import AnswerState, make_answers
from shoal.libs.language.engine.request import (
    MAX_TOP_LOGPROBS,
    FinishReason,
    Limits,
    Observation,
    Sampling,
    TextRequest,
    TokenEvent,
    TokenIds,
    check_request,
)
from shoal.libs.language.engine.sampling import Sampled
from shoal.libs.language.engine.text import remember

OPEN_S = 1800.0  # for reading a large model, and compiling it
SILENT_S = 300.0  # after which a process hangs: reading a version may take minutes
WAIT_S = 0.1
_MIN_CACHE_BYTES = 2**28
PROGRAM = "import sys; sys.path.append({root!r}); from {module} import main; main()"
_ROOT = Path(vllm_process.__file__).parents[3]
_PREFIX = "base_model.model."  # of peft's names
_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
logger = logging.getLogger(__name__)


class VllmLink:
    """The process, and what has come from it. `problem`: why nothing more comes.

    python:  of the environment with vLLM
    options: of vLLM's EngineArgs
    changed: called, in a thread of its own, when something has come
    """

    def __init__(
        self, python: str, version: int | str, folder: Path, options: Mapping[str, Any], changed: Callable[[], None]
    ) -> None:
        self.problem = ""
        self._folder = folder
        self._changed = changed
        self._received: list[tuple[Any, ...]] = []
        self._arrival = threading.Condition()
        self._sending = threading.Lock()  # the event loop, steps and the saver send
        program = PROGRAM.format(root=str(_ROOT), module=vllm_process.__name__)
        command = [python or sys.executable, "-c", program]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=_environment())
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError("text.engine_python", python, f"cannot be started: {error.strerror}") from None
        listener = ChannelListener("127.0.0.1")
        try:
            host, port, secret = listener.address
            address = {"host": host, "port": port, "secret": secret.hex(), "folder": str(folder)}
            assert self._process.stdin is not None
            with suppress(BrokenPipeError), self._process.stdin as stdin:  # it has ended: see below
                stdin.write(json.dumps({**address, "version": version, "options": dict(options)}).encode() + b"\n")
            while (channel := listener.accept(WAIT_S)) is None:
                if self._process.poll() is not None:
                    raise ConfigError("text.engine_python", python, "has started no vLLM: see its output above")
            self._channel = channel
            try:
                kind, *said = channel.receive(OPEN_S)
            except ConnectionLost as error:
                raise InferenceError(503, f"vLLM has ended while it opened a model: {error}", 1.0) from None
            if kind == "failed":
                raise ConfigError("text.engine", "vllm", f"has not opened the model: {said[0]}")
        except BaseException:
            self.close()
            raise
        finally:
            listener.close()
        threading.Thread(target=self._read, name="vllm", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_news(self) -> bool:
        return bool(self._received or self.problem)

    def send(self, *message: object) -> None:
        with self._sending, suppress(ConnectionLost):  # the thread has noticed it as well
            self._channel.send(message)

    def take(self, timeout_s: float) -> list[tuple[Any, ...]]:
        """What has come. Raises InferenceError 503 after the last message of a process that has ended."""
        with self._arrival:
            self._arrival.wait_for(lambda: self.has_news, timeout_s)
            received, self._received = self._received, []
        if self.problem and not received:
            raise InferenceError(503, self.problem, retry_after_s=1.0)
        return received

    def close(self) -> None:
        """Kill the process, with those that it has started. Idempotent."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self) -> None:
        try:
            while True:
                message = self._channel.receive(SILENT_S)
                if message[0] != "alive":
                    with self._arrival:
                        self._received.append(message)
                        self._arrival.notify_all()
                    self._changed()
        except ConnectionLost as error:
            self.close()
            with self._arrival:
                self.problem = f"the process of vLLM, {self.pid}, has ended or hung: {error}"
                self._arrival.notify_all()
            self._changed()


class SavedAdapter(NamedTuple):
    """number: of vLLM's"""

    version: int | str
    number: int
    folder: Path


class VllmEngine:
    """See `SlotEngine`, whose methods it has. `last_step`: tokens, seconds and versions of the last step.

    module:  a causal model of transformers
    python:  of the environment with vLLM; "": this one
    changed: called, in any thread, when `step` has something to do
    more:    further options of vLLM's EngineArgs

    Raises ConfigError for a model that vLLM does not open.
    """

    def __init__(
        self,
        module: nn.Module,
        version: int | str,
        tokenizer: Any,
        stop_tokens: TokenIds,
        slots: int,
        length: int,
        python: str = "",
        changed: Callable[[], None] = lambda: None,
        more: Mapping[str, Any] | None = None,
        max_queued: int = 256,
        max_queued_tokens: int = 65_536,
    ) -> None:
        if not hasattr(module, "save_pretrained"):
            raise ConfigError("text.engine", "vllm", "needs a model of transformers", "use slots")
        opened: Any = module  # of transformers
        self._module = opened
        self._expected = {name: tensor.shape for name, tensor in module.state_dict().items()}
        self._limits = Limits(self._module.config.vocab_size, length, max_queued, has_text=True)
        self._decode = remember(tokenizer.decode)
        self._stop_tokens = frozenset(stop_tokens)
        self._end_tokens = frozenset([tokenizer.eos_token_id]) - {None}  # with which vLLM ends what a grammar completes
        self._slots = slots
        self._admission = QueueAdmission(max_queued, max_queued_tokens, slots, slots)
        self._numbers = itertools.count(1)
        self._random = random.Random()
        self._totals = Counter[str]()
        self._answers: dict[str, AnswerState] = {}  # by the name that vLLM has for them
        self._versions: dict[str, int | str] = {}  # of answers with an adapter: that of the adapter
        self._adapters: dict[str, SavedAdapter] = {}
        self._cancelled: set[int] = set()
        self._version: int | str = version
        self._pending: int | str | None = None
        self.last_step = 0, 0.0, 0
        self._lock = threading.Lock()  # of the answers, and of those that are cancelled
        folder = Path(tempfile.mkdtemp(prefix="shoal-vllm-"))
        self._folder = folder
        self._saver = ThreadPoolExecutor(1, "vllm-weights")
        opened = self._save(module, version)
        tokenizer.save_pretrained(opened)
        dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
        sizes = {"max_num_seqs": slots, "max_model_len": length, "max_logprobs": MAX_TOP_LOGPROBS}
        options = {"model": str(opened), "dtype": dtype, **sizes, **(more or {})}
        # On a GPU vLLM takes what there is.
        options["cpu_cache_bytes"] = max(_MIN_CACHE_BYTES, slots * length * _count_token_bytes(module))
        self._link = VllmLink(python, version, folder, options, changed)
        self.close = weakref.finalize(self, self._link.close)  # kills the process; idempotent

    @property
    def length(self) -> int:
        return self._limits.length

    @property
    def pid(self) -> int:
        """Of vLLM's process."""
        return self._link.pid

    @property
    def has_work(self) -> bool:
        return bool(self._link.has_news or self._cancelled)

    def submit(self, request: TextRequest) -> int:
        return self.queue(self.prepare(request))

    def prepare(self, request: TextRequest) -> list[AnswerState]:
        check_request(request, self._limits)
        sampling = request.sampling
        own = Sampling(temperature=1.0, seed=sampling.seed)
        refused = {
            "swap": request.swap not in (None, "continue") and request.swap,
            "behaviour": request.behaviour and sampling.temperature != 0.0 and sampling != own,
        }
        for name, value in refused.items():
            if value:
                raise ConfigError(name, value, "is not for text.engine=vllm", "use slots, or leave it out")
        if request.adapter and request.adapter not in self._adapters:
            raise ConfigError("adapter", request.adapter, "is unknown", f"known: {', '.join(sorted(self._adapters))}")
        stops = self._stop_tokens if request.stop_tokens is None else frozenset(request.stop_tokens)
        if request.grammar is not None:
            request = replace(request, stop_tokens=tuple(stops | self._end_tokens))
        room = self._limits.length - len(request.prompt)
        seed = sampling.seed if sampling.seed is not None else self._random.getrandbits(62)
        return make_answers(request, min(request.max_tokens or room, room), seed, self._stop_tokens, self._decode)

    def queue(self, answers: list[AnswerState]) -> int:
        request = answers[0].request
        self._admission.admit(request, answers[0].max_tokens)
        fields: dict[str, Any] = {name: getattr(request.sampling, name) for name in _PARAMETERS}
        fields["max_tokens"] = answers[0].max_tokens - len(request.given)
        fields["logprobs"] = request.top_logprobs
        fields["stop_token_ids"] = sorted(answers[0].stop_tokens)
        fields["logit_bias"] = dict(request.sampling.logit_bias) or None
        adapter = self._adapters[request.adapter] if request.adapter else None
        with self._lock:
            number = next(self._numbers)
            for index, answer in enumerate(answers):
                answer.number = number
                self._answers[f"{number}-{index}"] = answer
                if adapter is not None:
                    self._versions[f"{number}-{index}"] = adapter.version
        for index, answer in enumerate(answers):
            if request.sampling.seed is not None:
                fields["seed"] = (answer.seed + index) % 2**62
            prompt = [*request.prompt, *request.given]
            lora = None if adapter is None else (request.adapter, adapter.number, str(adapter.folder))
            self._link.send("add", f"{number}-{index}", prompt, dict(fields), request.grammar, lora, request.priority)
        return number

    def cancel(self, number: int) -> None:
        with self._lock:
            self._cancelled.add(number)

    def set_weights(
        self, version: int | str, weights: nn.Module | Mapping[str, Tensor], adapter: str = "", scale: float = 1.0
    ) -> None:
        """As `SlotEngine.set_weights`. Running answers wait while vLLM reads the weights, and go on with them once
        their caches were filled again. Weights that vLLM cannot read leave the version before."""
        state = weights.state_dict() if isinstance(weights, nn.Module) else weights
        if adapter:
            self._adapters[adapter] = self._save_adapter(version, state, scale)
            return
        if {name: tensor.shape for name, tensor in state.items()} != self._expected:
            raise ConfigError("weights", version, "do not fit the model of this engine")
        self._adapters = {}  # they leave with their base
        self._pending = version
        self._saver.submit(self._replace, version, dict(state))

    def remove_adapter(self, name: str) -> None:
        """Refuse new answers with an adapter; its own go on. Unknown names are ignored."""
        self._adapters.pop(name, None)

    def observe(self) -> Observation:
        with self._lock:
            answers = list(self._answers.values())
        running = [each for each in answers if each.spans]
        used = sum(len(each.known) for each in running)
        return Observation(
            running=len(running),
            queued=self._admission.queued,
            queued_tokens=self._admission.queued_tokens,
            cells_used=used / (self._slots * self._limits.length),
            versions=Counter(each.spans[-1][0] for each in running),
            current=self._version,
            pending=self._pending,
            step_s=self._admission.step_s(self._slots),
            prompt_tokens=self._totals["prompt_tokens"],
            shared_tokens=0,
            new_tokens=self._totals["new_tokens"],
            refilled_tokens=0,
            preempted=0,
        )

    def list_step_times(self) -> list[tuple[int, float]]:
        return self._admission.list_step_times()

    def step(self) -> list[TokenEvent]:
        """What vLLM has computed since the last step; waits a moment for it. Raises InferenceError 503."""
        events = list(self._end_early())
        for kind, *said in self._link.take(0.0 if events else WAIT_S):
            if kind == "tokens":
                events += self._take_all(*said)
            elif kind == "swapped":
                for name in said:
                    events += self._refuse(name, "the adapter went with its base", "swapped")
            elif kind == "refused":
                events += self._refuse(*said)
            else:
                self._note_loaded(*said)
        return events

    # ---------------------------------------------------------------- inside

    def _save(self, module: Any, version: int | str, state: Mapping[str, Tensor] | None = None) -> Path:
        folder = self._folder / f"{version}-{self._random.getrandbits(32):x}"
        module.save_pretrained(folder, state_dict=None if state is None else dict(state))
        return folder

    def _save_adapter(self, version: int | str, state: Mapping[str, Tensor], scale: float) -> SavedAdapter:
        """In peft's layout."""
        number = next(self._numbers)
        folder = self._folder / f"adapter-{number}"
        folder.mkdir()
        named = {_PREFIX + name.removeprefix(_PREFIX): tensor.contiguous() for name, tensor in state.items()}
        rank = max(tensor.shape[0] for name, tensor in named.items() if ".lora_A." in name)
        layers = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in named})
        about = {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "target_modules": layers}
        (folder / "adapter_config.json").write_text(json.dumps({**about, "task_type": "CAUSAL_LM", "bias": "none"}))
        save_file(named, folder / "adapter_model.safetensors")
        return SavedAdapter(version, number, folder)

    def _replace(self, version: int | str, state: Mapping[str, Tensor]) -> None:
        if version == self._pending:  # else a newer one has come meanwhile
            try:
                self._link.send("load", version, str(self._save(self._module, version, state)))
            except OSError as error:
                self._note_loaded(version, str(error))

    def _note_loaded(self, version: int | str, problem: str) -> None:
        self._pending = None if self._pending == version else self._pending
        if problem:
            logger.error("vLLM goes on with version %s, as %s cannot be loaded: %s", self._version, version, problem)
        else:
            self._version = version

    def _end_early(self) -> Iterator[TokenEvent]:
        """Answers that were cancelled, or are late."""
        now_s = time.monotonic()
        with self._lock:
            answers = list(self._answers.items())
            cancelled, self._cancelled = self._cancelled, set()
        for name, answer in answers:
            if answer.number in cancelled or answer.is_late(now_s):
                self._link.send("abort", name)
                yield self._end(name, answer, "cancelled" if answer.number in cancelled else "deadline")

    def _take_all(self, version: int | str, seconds: float, answers: Iterable[tuple[Any, ...]]) -> Iterator[TokenEvent]:
        num_tokens = 0
        for name, tokens, logprobs, tops, finish in answers:
            num_tokens += len(tokens)
            yield from self._take(name, list(zip(tokens, logprobs, tops, strict=True)), version, finish)
        if num_tokens:
            self.last_step = num_tokens, seconds, 1
            with self._lock:
                remaining = [each.max_tokens - each.num_new for each in self._answers.values() if each.spans]
            self._admission.observe_step(num_tokens, seconds, time.monotonic(), remaining)

    def _take(
        self, name: str, chosen: list[tuple[int, float, Any]], version: int | str, finish: str | None
    ) -> Iterator[TokenEvent]:
        answer = self._answers.get(name)
        if answer is None:  # it was cancelled, or has met its stop text
            return
        request, version = answer.request, self._versions.get(name, version)
        if not answer.spans and chosen:
            self._admission.leave(1, answer.num_waiting)
            self._totals["prompt_tokens"] += len(request.prompt)
        behaviour = 0.0 if request.behaviour and not request.sampling.temperature else None
        for number, (token, logprob, top) in enumerate(chosen, 1):
            event = answer.take(Sampled(token, logprob, top[: request.top_logprobs], behaviour), version)
            self._totals["new_tokens"] += 1
            end = answer.find_end(token)
            if end is None and finish is not None and number == len(chosen):
                end = "stop" if finish == "stop" else "error"  # a grammar is complete, or vLLM gives up
            if end is not None:
                if finish is None:
                    self._link.send("abort", name)
                yield self._end(name, answer, end, "vLLM has ended it" if end == "error" else "", event)
                return
            yield event
        if finish is not None:
            yield self._end(name, answer, "error", f"vLLM has ended it: {finish}")

    def _refuse(self, name: str, problem: str, finish: FinishReason = "error") -> Iterator[TokenEvent]:
        if (answer := self._answers.get(name)) is not None:
            yield self._end(name, answer, finish, problem)

    def _end(
        self, name: str, answer: AnswerState, finish: FinishReason, problem: str = "", event: TokenEvent | None = None
    ) -> TokenEvent:
        with self._lock:
            del self._answers[name]
            version = self._versions.pop(name, self._version)
        if not answer.spans:
            self._admission.leave(1, answer.num_waiting)
        if finish in ("stop", "length"):
            self._admission.observe_end(answer.num_new / answer.max_tokens)
        last = TokenEvent(answer.number, answer.index, version=version)
        return answer.end(event or last, finish, problem)


def _count_token_bytes(module: Any) -> int:
    """Of a cache, for each token."""
    config = module.config.get_text_config()
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * num_heads * head_size * next(module.parameters()).element_size())


def _environment() -> dict[str, str]:
    """vLLM's environment has packages of its own."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
