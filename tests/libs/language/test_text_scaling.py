"""Replicas by tokens: what a replica's texts tell the policy, with a simulated clock."""

from types import SimpleNamespace
from typing import Any

from shoal.libs.language.served.text_statistics import TextStatistics
from shoal.serve.scaling import EndpointLoad, LoadMeter, ScalePolicy, decode, encode
from shoal.serve.spec.scale import ScaleSpec

STEPS = [(1, 0.01), (16, 0.02), (144, 0.05)]  # tokens, seconds: 800 tokens a second in 16 slots


def decide(num_texts: int, num_prompt: int, num_new: int, queued_tokens: int = 0, seconds: int = 30) -> int:
    """Replicas after so long, of which each second one replica wrote so many texts."""
    engine: Any = SimpleNamespace(
        observe=lambda: SimpleNamespace(queued_tokens=queued_tokens, queued=queued_tokens // 100),
        list_step_times=lambda: STEPS,
    )
    statistics, meter = TextStatistics(slots=16), LoadMeter(lambda: 0.0)
    policy, replicas = ScalePolicy(ScaleSpec(max=8), objective_s=0.2), 1
    for now_s in range(seconds):
        load = decode(encode(meter.measure({"tiny streams": statistics.measure_load([engine])})))
        replicas = policy.decide(EndpointLoad(float(now_s), {"a": load}, replicas, replicas)).replicas
        for _ in range(num_texts):
            statistics.count_prompt(num_prompt, engine)
            for number in range(num_new):
                statistics.count_token(0.02, is_first=number == 0)
    return replicas


def test_replicas_follow_tokens_and_not_requests() -> None:
    assert decide(num_texts=10, num_prompt=20, num_new=10) == 1
    assert decide(num_texts=10, num_prompt=20, num_new=75) == 2, "as many requests, and as much as a replica can write"
    assert decide(num_texts=100, num_prompt=5, num_new=1) == 1, "many requests of a token"
    assert decide(num_texts=10, num_prompt=600, num_new=1) == 4, "prompts by what they cost: 2.1 s each second"
    assert decide(num_texts=10, num_prompt=20, num_new=75, queued_tokens=20_000) == 3, "and those that wait"
