"""Learning while agents, replicas, the gateway and the learner are killed, beside the same run without kills.

    python -m benchmarks.agents.kills [--quick]

The task of benchmarks.agents.letters in a run of `shoal run agents`, with an endpoint of two replicas that samples, and
64 agents in four processes. For five minutes SIGKILL ends one part each five seconds, of those that are there one that
was ended least; the seed decides between equals. Then the run goes on until the last 256 answers have the mean reward
of the other run's end. Each five seconds, and once it is over, the books are read: for each version of the weights
sampled = learned + open + queued + dropped(reason). Agents note what they are given, and ask an eighth of it again, up
to four seconds later. A step counts as one when the learner has it, also where a kill then undoes it: it goes on from
its checkpoint, of which there is one a second.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.agents.killed import Books, KilledRun, Killer, find_errors, follow_reward, read_books, read_lines
from benchmarks.agents.letters import CLIP, LEARNING_RATE, MAX_TOKENS, pretrain
from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.result import QUICK_RESULTS, Row, compare, options, write

START = QUICK_RESULTS / "agents_start"
TARGET = 0.45
KILL_S, KILLING_S, TIMEOUT_S, STEPS_BAR = 5.0, 300.0, 900.0, 1.3
NUM_PLAYERS, NUM_AGENTS, GROUP_S = 4, 16, 45.0
PARTS, QUIET = ("replica", "gateway", "learner"), "without kills"
WHAT = "agents elsewhere, parts killed"
FIELDS = {
    **{"name": "letters", "replicas": 2, "replica.num_cpus": 0.1, "learner.num_cpus": 0.1, "max_tokens": MAX_TOKENS},
    **{"length": 64, "algorithm.learning_rate": LEARNING_RATE, "algorithm.clip": CLIP, "sessions.group_s": GROUP_S},
    **{"learner.max_restarts": 1000, "learner.checkpoint_every_s": 1.0},
}


class Players:
    """The agents' processes, each begun anew with other tasks when it has ended."""

    def __init__(self, run: KilledRun, folder: Path, closing: ExitStack) -> None:
        self._run, self._folder, self._closing = run, folder, closing
        self._running: dict[int, Child] = {}
        self._num_started = 0

    def start(self) -> None:
        """Those that are not there."""
        for index in range(NUM_PLAYERS):
            if index not in self._running or self._running[index].process.poll() is not None:
                self._num_started += 1
                seed, log = self._num_started * 10_000, self._folder / f"answers-{self._num_started}"
                words = [self._run.url, "--log", str(log), "--agents", str(NUM_AGENTS), "--seed", str(seed)]
                environment = {"SHOAL_HOME": str(self._run.home)}
                player = Child(
                    [OUR_PYTHON, "-m", "benchmarks.agents.player", *words], self._folder, environment, goodbye_s=0.0
                )
                self._running[index] = player
                self._closing.callback(player.close)

    def find(self) -> list[int]:
        return [each.process.pid for each in self._running.values() if each.process.poll() is None]


def play(folder: Path, seed: int, target: float, killing_s: float) -> dict[str, Any]:
    """A run until the target, and what its books say."""
    errors, num_read = list[str](), 0
    with ExitStack() as closing:
        run = closing.enter_context(KilledRun(folder, model=pretrain(START), **FIELDS, **{"learner.seed": seed}))
        run.wait()
        players = Players(run, folder, closing)
        killer = Killer(seed, {"agents": players.find, **{part: partial(run.find, part) for part in PARTS}})
        began_s, is_reached = time.monotonic(), False
        while not is_reached or time.monotonic() - began_s < killing_s:
            players.start()
            time.sleep(KILL_S)
            run.require_running()
            part = killer.kill() if time.monotonic() - began_s < killing_s else ""
            books = read_books(run.folder)
            found, num_read = find_errors(books), num_read + 1
            errors += found
            curve = follow_reward(books) or [(0, 0.0)]
            is_reached = max(reward for _, reward in curve) >= target
            updates = int(re.findall(r"step (\d+)", "\n".join(["step 0", *run.child.output]))[-1])
            now_s, (last, reward) = time.monotonic() - began_s, curve[-1]
            said = f"{now_s:.0f} s: step {last}, {updates} updates, reward {reward:.3f}, killed: {part or '-'}"
            print(said, *found, flush=True)
            if now_s > TIMEOUT_S:
                break
        logs = sorted(folder.glob("answers-*"))
    books = read_books(run.folder)
    return {
        "steps": next((step for step, reward in curve if reward >= target), curve[-1][0]),
        "is_reached": is_reached,
        "updates": updates,
        "seconds": time.monotonic() - began_s,
        "kills": killer.num,
        "num_read": num_read + 1,
        "num_errors": len(errors) + len(find_errors(books)),
        "tokens": Counter({what: each.total() for what, each in books.counts.items()}),
        **compare_answers(books, read_lines(logs)),
    }


def compare_answers(books: Books, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What agents were given, beside what was recorded."""
    asked = Counter(line["ask"] for line in lines if "ask" in line)
    recorded = defaultdict[tuple[str, str], list[list[int]]](list)
    for session, turns in books.turns.items():
        for reply, turn in turns:
            recorded[session, reply].append(turn.tokens.tolist())
    given = {(line["answer"], line["id"]): line["tokens"] for line in lines if "answer" in line}
    again = [line["is_same"] for line in lines if "again" in line]
    return {
        "num_given": len(given),
        "num_lost": sum(recorded.get(key, [None])[0] != tokens for key, tokens in given.items()),
        "num_twice": sum(len(turns) > asked[session] for session, turns in books.turns.items())
        + sum(len(answers) > 1 for answers in recorded.values()),
        "num_again": len(again),
        "num_others": again.count(False),
    }


def make_rows(killed: list[dict[str, Any]], quiet: list[dict[str, Any]], target: float) -> list[Row]:
    def total(what: str) -> str:
        return f"of {sum(each[what] for each in killed):,}"

    def count(title: str, key: str, note: str = "") -> Row:
        return compare(
            f"{WHAT}: {title}", "", "lower", [each[key] for each in killed], bar=0, bar_kind="value", note=note
        )

    tokens, kills = (sum((Counter(each[key]) for each in killed), Counter[str]()) for key in ("tokens", "kills"))
    fates, dead = (", ".join(f"{name} {num:,}" for name, num in each.items()) for each in (tokens, kills))
    is_reached = all(each["is_reached"] for each in (*killed, *quiet))
    note = f"kills: {dead}" + ("" if is_reached else "; not all runs came to it: theirs are the steps until they ended")
    note += f"; of the learner's updates {killed[0]['updates']} were there at the end, others were undone"
    shares, undisturbed = (
        [100 * each["tokens"]["learned"] / each["tokens"]["sampled"] for each in side] for side in (killed, quiet)
    )
    steps, fewest = ([each["steps"] for each in side] for side in (killed, quiet))
    title = f"{WHAT}: steps until a mean reward of {target:g}"
    return [
        count("differences in the accounts", "num_errors", f"{total('num_read')} moments; tokens: {fates}"),
        count("answers recorded twice", "num_twice"),
        count("answers that agents were given, and that are not recorded so", "num_lost", total("num_given")),
        count("repeated requests with another answer", "num_others", total("num_again")),
        compare(title, "steps", "lower", steps, fewest, QUIET, STEPS_BAR, "ratio", note),
        compare(f"{WHAT}: sampled tokens that were learnt", "%", "higher", shares, undisturbed, QUIET),
    ]


def main() -> None:
    chosen = options(__doc__, runs=1)
    target, killing_s = (0.3, 45.0) if chosen.quick else (TARGET, KILLING_S)
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for seed in range(chosen.runs):
        for is_killed in found:
            with scratch() as folder:
                found[is_killed].append(play(folder, seed, target, killing_s if is_killed else 0.0))
            print({name: each for name, each in found[is_killed][-1].items() if each}, flush=True)
    write("agents_kills", make_rows(found[True], found[False], target), chosen.results)


if __name__ == "__main__":
    main()
