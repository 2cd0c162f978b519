"""What a campaign does to a run, and at which logical events: the same seed draws the same faults. Pure.

A fault strikes when a count of the run has come to a number: segments that its gateway has received, versions that its
learner has published, steps, checkpoints. So a replay strikes at the same events on a machine of another speed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import ConfigError, suggest

PAUSES_S = (1.0, 12.0)  # beyond the time in which a gateway and Ray miss a process
AT_ONCE = ("kill", "cut")
OF_PROCESSES = ("kill", "pause", "fill_disk", "fill_memory")
ACTOR_LINK, STORE = "actor_link", "store"  # links, by their roles
OF_LINKS = {ACTOR_LINK: ("partition", "slow", "cut"), STORE: ("partition", "slow", "errors")}
KINDS = tuple(dict.fromkeys([*OF_PROCESSES, *OF_LINKS[ACTOR_LINK], *OF_LINKS[STORE]]))


@dataclass(frozen=True)
class Fault:
    """One fault.

    kind:    of processes "kill" (SIGKILL), "pause" (SIGSTOP), "fill_disk", "fill_memory" (its limits); of links
             "partition", "slow", "cut", "errors" (see `FaultyLink`). All but "kill" and "cut" last `seconds`
    target:  a role of the run's processes (`ROLES`), of several the one that `choice` (0 to 1) names; or a link
    clock:   the count that says when, and `at` the number
    """

    kind: str
    target: str
    clock: str
    at: int
    choice: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind} {self.target}{lasting} at {self.clock} {self.at:,}"


@dataclass(frozen=True)
class Menu:
    """What can be done to runs of a kind.

    targets: roles of its processes
    gaps:    by clock, the least and the largest distance of two faults
    """

    targets: tuple[str, ...]
    gaps: Mapping[str, tuple[int, int]]


# The processes of a run, by what their command lines look like.
ROLES = {
    "gateway": r"^ray::GatewayWorker",
    "learner": r"^ray::LearnerWorker",
    "weights": r"^ray::WeightStoreWorker",
    "actor": r" -m shoal\.actor ",
    "replica": r"^ray::ServeReplica",
    "controller": r"^ray::ControllerWorker",
    "serve": r"^ray::ServeController",
    "proxy": r"/haproxy ",
    "rank": r"^ray::RayTrainWorker",
    "attempt": r"^ray::TrainController",
}
LOOP = Menu(
    ("gateway", "learner", "weights", "actor", "replica", "controller", "serve", "proxy"),
    {"segments": (100, 400), "versions": (10, 60)},
)
TRAINING = Menu(("rank", "attempt"), {"step": (20, 120), "checkpoints": (1, 3)})
SERVING = Menu(("replica", "controller", "serve", "proxy"), {"requests": (200, 1000)})


def require_known(kinds: Iterable[str], targets: Iterable[str]) -> None:
    """Raises ConfigError for what no campaign has."""
    for name, given, known in (("kind", kinds, KINDS), ("target", targets, (*ROLES, *OF_LINKS))):
        for each in given:
            if each not in known:
                raise ConfigError(name, each, f"is none of {', '.join(known)}", suggest(each, known))


def require_links(faults: Iterable[Fault], links: Iterable[str]) -> None:
    """Raises ConfigError for faults of links that there are not."""
    if missing := sorted({each.target for each in faults} & OF_LINKS.keys() - {*links}):
        remedy = "actor_link needs --actors, without gateway.port; store needs SHOAL_STORE with AWS_ENDPOINT_URL"
        raise ConfigError("target", missing[0], "is not there", remedy)


def draw_faults(
    seed: int,
    num_faults: int,
    menu: Menu,
    links: Sequence[str] = (),
    targets: Sequence[str] = (),
    kinds: Sequence[str] = (),
) -> list[Fault]:
    """Faults on each clock of the menu, in its order. Raises ConfigError.

    links: that there are, by their roles; targets, kinds: that may be drawn, none: all
    """
    require_known(kinds, targets)
    known = {target: OF_LINKS.get(target, OF_PROCESSES) for target in (*menu.targets, *links)}
    if missing := [each for each in targets if each not in known]:
        raise ConfigError("target", missing[0], f"is none of this run's: {', '.join(known)}")
    choices = {target: [kind for kind in known[target] if kind in (kinds or KINDS)] for target in targets or known}
    choices = {target: possible for target, possible in choices.items() if possible}
    if not choices:
        raise ConfigError("kind", ", ".join(kinds), f"is no fault of {', '.join(targets or known)}")
    rng = random.Random(seed)
    now = Counter[str]()
    faults: list[Fault] = []
    for _ in range(num_faults):
        clock = rng.choice(sorted(menu.gaps))
        now[clock] += rng.randint(*menu.gaps[clock])
        target = rng.choice([*choices])
        kind = rng.choice(choices[target])
        seconds = 0.0 if kind in AT_ONCE else round(rng.uniform(*PAUSES_S), 1)
        faults.append(Fault(kind, target, clock, now[clock], round(rng.random(), 3), seconds))
    return sorted(faults, key=lambda each: (each.clock, each.at))


def shrink(faults: Sequence[Fault], is_violated: Callable[[Sequence[Fault]], bool]) -> list[Fault]:
    """A list of faults of which none can be spared: delta debugging (Zeller and Hildebrandt 2002, ddmin).

    is_violated: whether these faults alone still show the violation
    """
    current = list(faults)
    num_parts = 2
    while len(current) > 1:
        size = -(-len(current) // num_parts)
        starts = range(0, len(current), size)
        parts = [current[start : start + size] for start in starts]
        rests = [_without(current, part) for part in parts] if num_parts > 2 else []
        smaller = next((each for each in [*parts, *rests] if is_violated(each)), None)
        if smaller is not None:
            num_parts = 2 if smaller in parts else max(2, num_parts - 1)
            current = smaller
        elif num_parts >= len(current):
            break
        else:
            num_parts = min(len(current), 2 * num_parts)
    return current


def _without(faults: Iterable[Fault], part: Sequence[Fault]) -> list[Fault]:
    return [each for each in faults if each not in part]
