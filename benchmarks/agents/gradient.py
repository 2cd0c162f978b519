"""The gradient of a fixed batch by our loss, beside TRL's own code for it.

    python -m benchmarks.agents.gradient [--quick]

One Llama of 0.4 million parameters; prompts of 4 to 12 tokens and answers of 3 to 24, in groups of 2 to 5. Within some
answers stands a tool's result that was not sampled. What has sampled is another policy than the one that learns: its
log-probabilities differ by up to 0.3, so that ratios are clipped; RLOO's are the same, since TRL's ratio is that of
whole answers and ours that of tokens. Advantages are each side's own. TRL computes in float64, and in float32 as the
peer: |a - b| / |b| over all parameters. RLOO of TRL divides by answers and ours by tokens: the known factor is taken
out.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.agents.letters import CLIP, make_model, make_tokenizer
from benchmarks.children import TRL_PYTHON, Child, scratch
from benchmarks.result import Row, compare, options, write
from shoal.libs.agents.algorithm import TextPolicyGradient
from shoal.libs.agents.baselines import compute_advantages
from shoal.libs.agents.config import PolicyGradientTextConfig, describe_tokens
from shoal.libs.agents.sessions.groups import make_segment
from shoal.libs.agents.sessions.token_tree import TrainingSegment
from shoal.libs.agents.spec import AgentsSpec
from shoal.rl.experience.queue import ExperienceBatch

BAR, NOISE, TIMEOUT_S = 1e-5, 0.3, 600.0
SIZES = (2, 5, 3, 4)
# Each with the algorithm, whether answers have masked tokens, and how many answers TRL computes at once (0: all).
CASES = {
    "GRPO": ("grpo", False, 0),
    "GRPO, tools' results within answers": ("grpo", True, 0),
    "GRPO, in two parts": ("grpo", True, 7),
    "RLOO": ("rloo", False, 0),
    "RLOO, in two parts": ("rloo", False, 7),
}
Answer = dict[str, Any]


def make_rows(network: Any, algorithm: str, is_masked: bool) -> list[Answer]:
    """Answers of random tokens, with the log-probabilities of a policy that is near the network."""
    random = np.random.default_rng(0)
    rows: list[Answer] = []
    for group, size in enumerate(SIZES):
        prompt = random.integers(0, 256, random.integers(4, 12))
        for _ in range(size):
            answer = random.integers(0, 256, random.integers(8, 24))
            tokens = np.concatenate([prompt, answer])
            trains = np.arange(len(tokens)) >= len(prompt)
            if is_masked and random.random() < 0.6:
                begin = len(prompt) + random.integers(1, 4)
                trains[begin : begin + 3] = False
            with torch.no_grad():
                logits = network(input_ids=torch.from_numpy(tokens)[None]).logits[0, :-1].double()
            chosen = torch.from_numpy(tokens[1:])[:, None]
            log_pi = np.pad((logits.log_softmax(-1)).gather(-1, chosen)[:, 0].numpy(), (1, 0))
            noise = random.uniform(-NOISE, NOISE, len(tokens)) if algorithm == "grpo" else 0.0
            rows.append(
                {
                    "tokens": tokens.tolist(),
                    "trains": trains.astype(int).tolist(),
                    "logprobs": (log_pi + noise).astype(np.float32).tolist(),
                    "prompt": len(prompt),
                    "group": group,
                    "reward": float(random.uniform()),
                }
            )
    return rows


def make_batch(rows: list[Answer], config: PolicyGradientTextConfig) -> ExperienceBatch:
    """As a gateway makes it, of groups that are settled."""
    segments = []
    for _, members in groupby(rows, key=lambda row: row["group"]):
        answers = list(members)
        rewards = np.array([each["reward"] for each in answers], np.float32)
        for row, advantage in zip(answers, compute_advantages(rewards, config.baseline), strict=True):
            given = TrainingSegment(
                np.array(row["tokens"], np.int32),
                np.array(row["trains"], bool),
                np.array(row["logprobs"], np.float32),
                np.ones(len(row["tokens"]), np.int64),
                (0,),
            )
            segments.append(make_segment(given, row["reward"], float(advantage)))
    return ExperienceBatch.from_segments(0, segments)


def compute_ours(folder: Path, rows: list[Answer], algorithm: str, micro_batch: int) -> dict[str, torch.Tensor]:
    """The gradients that AdamW would take, before they are clipped."""
    num_tokens = sum(len(row["tokens"]) for row in rows)
    settings = {"name": algorithm, "max_grad_norm": 1e9, "minibatch_tokens": num_tokens // 2 if micro_batch else 4096}
    settings |= {"clip": CLIP} if algorithm == "grpo" else {}
    spec = AgentsSpec.parse({"model": str(folder), "algorithm": settings})
    learner = TextPolicyGradient(spec.make_rl_spec(), describe_tokens(len(make_tokenizer()), 64))
    learner._compute_gradients(learner.prepare(make_batch(rows, spec.text_algorithm)), learner.group)
    return {name: each.grad.double() for name, each in learner.model.named_parameters() if each.grad is not None}


def measure_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """|a - b| / |b| over all parameters, whose names may have another beginning."""
    pairs = []
    for name, each in theirs.items():
        (found,) = [mine for key, mine in ours.items() if key.endswith(name)]
        pairs.append((found.flatten(), each.flatten()))
    mine, other = (torch.cat(each) for each in zip(*pairs, strict=True))
    return float((mine - other).norm() / other.norm())


def main() -> None:
    chosen = options(__doc__, runs=1)
    torch.set_num_threads(1)
    rows: list[Row] = []
    with scratch() as folder:
        tokenizer = make_tokenizer()
        network = make_model(tokenizer)
        network.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        batches = {name: make_rows(network, algorithm, masked) for name, (algorithm, masked, _) in CASES.items()}
        for number, (name, (algorithm, _, micro_batch)) in enumerate(CASES.items()):
            batch = {"algorithm": algorithm, "micro_batch": micro_batch, "rows": batches[name]}
            (folder / f"{number}.json").write_text(json.dumps(batch))
        with Child([TRL_PYTHON, "-m", "benchmarks.peers.trl_grpo", "gradients", str(folder), str(folder / "model")],
                   folder) as peer:  # fmt: skip
            assert peer.wait(TIMEOUT_S) == 0, peer.last_words()
        for number, (name, (algorithm, _, micro_batch)) in enumerate(CASES.items()):
            answers = batches[name]
            ours = compute_ours(folder / "model", answers, algorithm, micro_batch)
            if algorithm == "rloo":
                factor = sum(sum(each["trains"]) for each in answers) / len(answers)
                ours = {key: each * factor for key, each in ours.items()}
            single, exact = (torch.load(folder / f"{number}.{name}.pt") for name in ("float32", "float64"))
            title = f"gradient of {name}: difference to TRL's in float64, relative"
            rows.append(
                compare(
                    title,
                    "",
                    "lower",
                    [measure_difference(ours, exact)],
                    [measure_difference(single, exact)],
                    "TRL in float32",
                    BAR,
                    "value",
                )
            )
    write("agents_gradient", rows, chosen.results)


if __name__ == "__main__":
    main()
