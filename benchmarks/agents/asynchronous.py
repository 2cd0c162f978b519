"""Sampling while the learner learns, beside both in turns: how much of the possible gain a run has.

    python -m benchmarks.agents.asynchronous [--runs N] [--quick]

The task of benchmarks.agents.learning, in process; gateway and learner are Ray workers. With `max_version_lag=0` a step
is sampled, then learnt: S + L seconds, of which L is the learner's own time of an update. With 1 both work at once, at
best max(S, L). The number is the gain over that: the ratio of the times of a step to (S + L) / max(S, L). Sides take
turns; the first steps are left out.
"""

from __future__ import annotations

from benchmarks.agents.learning import START, TIMEOUT_S, measure_step_s, say_found
from benchmarks.agents.letters import pretrain
from benchmarks.agents.run import make_spec, run_child
from benchmarks.children import scratch
from benchmarks.result import compare, options, write

NUM_STEPS, BAR = 40, 0.85


def main() -> None:
    chosen = options(__doc__, runs=3)
    gains: list[float] = []
    step_s: dict[int, list[float]] = {0: [], 1: []}
    learn_s: list[float] = []
    pretrain(START)
    with scratch() as folder:
        for seed in range(chosen.runs):
            for lag in step_s:
                asked = {"steps": 8 if chosen.quick else NUM_STEPS, "timeout_s": TIMEOUT_S}
                found = run_child("within", make_spec(START, max_version_lag=lag), folder, seed, **asked)
                say_found(f"max_version_lag={lag}", seed, found)
                step_s[lag].append(measure_step_s(found))
                if lag == 0:
                    learn_s.append(found["update_s"])
            both_s = step_s[0][-1]
            gains.append(max(learn_s[-1], both_s - learn_s[-1]) / step_s[1][-1])
    sampling = [both - learning for both, learning in zip(step_s[0], learn_s, strict=True)]
    note = "S {:.2f} s, L {:.2f} s".format(*(sorted(each)[len(each) // 2] for each in (sampling, learn_s)))
    rows = [
        compare("gain of learning while sampling, of what is possible", "", "higher", gains, bar=BAR, bar_kind="value",
                note=note),
        compare("a step, sampled while the one before is learnt", "s", "lower", step_s[1], step_s[0], "in turns"),
    ]  # fmt: skip
    write("agents_asynchronous", rows, chosen.results)


if __name__ == "__main__":
    main()
