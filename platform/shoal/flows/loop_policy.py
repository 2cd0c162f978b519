"""One policy of a run: the workers of its loop, their newest counts, and what has happened to them.

Called by `actor_learner`, which has one for each policy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

import shoal.runs
from shoal.atomic_file import make_folder
from shoal.cluster.admission import RunAdmission
from shoal.cluster.capacity import count_gpu_slots, gpus_by_host, require_cpus, require_gpus
from shoal.cluster.job_main import print_too
from shoal.cluster.run_queue import format_needs
from shoal.errors import RunError, StoreError
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_metrics import ActorLearnerMetrics, combine_policies, describe_rejections
from shoal.flows.rl_policy import describe_policy_model, list_actions, register_policy
from shoal.network_address import is_loopback
from shoal.registry import ModelVersion
from shoal.registry.champion import CHAMPION
from shoal.registry.model_code import ModelCode
from shoal.rl.gateway.game_settings import advance_settings, begin_settings, read_settings
from shoal.rl.gateway.opponent_pool import OpponentPool
from shoal.rl.gateway.state import GatewaySetting
from shoal.rl.ray_workers import ActorLearnerWorkers
from shoal.runs import RunRecorder
from shoal.runs.formatting import format_number
from shoal.runs.waits import print_line
from shoal.serve.on_ray.ownership import list_driver_endpoints
from shoal.serve.spec.model_source import EndpointModel, LiveModel
from shoal.store import open_store, store_variable
from shoal.weights import WeightSnapshot
from shoal.wire import ExperienceSpec
from shoal.wire.action_masks import find_choices

ADDRESS_NAME, WEBSOCKET_NAME = "gateway.address", "websocket.address"  # in the folder of a run, in the store
ACTORS_BACK_S = 60.0  # after a gateway has restarted, until it is recorded that no actor has come back
KEEP_S = 5.0  # between two versions that are kept
MIN_EPISODES = 100  # of the actors' mean return
BEST_RETURN, TRIAL_RETURN = "return/best_actions", "return/trial"  # metrics
MIN_SETTINGS_EPISODES = 20  # likewise, for a rule of the game's settings


class LoopPolicy:
    """A policy with its gateway and its learners. `name` is "" where it is the only one of its run.

    addresses: of its gateway, as its worker has them
    solved_s: when it reached its target, from the first segment; stays, though its gateway may restart
    tried_at: the learner's updates at its last trial
    trial_return: the mean return of the version that is registered, in its trial; None without one
    played:   metrics of the newest episodes through the endpoint
    retained: the weights at the actors' best mean return so far
    """

    def __init__(self, name: str, spec: ActorLearnerSpec, experience: ExperienceSpec, observation: np.ndarray) -> None:
        self.name = name
        self.spec = spec
        self.experience = experience
        self._first_observation = observation
        self._workers: ActorLearnerWorkers | None = None
        self._code: ModelCode | None = None
        self.gateway: dict[str, Any] = {}
        self.learner: dict[str, Any] = {}
        self.addresses: Mapping[str, Any] = {}
        self._stored: dict[str, str] = {}  # the addresses in the store, by name
        self._relayed: dict[str, str] = {}  # to which its gateway passes games on, by policy
        self._restarted_at: float | None = None  # its gateway, since which no actor has sent anything
        self._is_deserted = False  # for ACTORS_BACK_S
        self.solved_s: float | None = None
        self.tried_at = -spec.algorithm.updates_between_trials
        self.trial_return: float | None = None
        self.played: dict[str, float] = {}
        self.retained: WeightSnapshot | None = None
        self._retained_return, self._retained_at = -math.inf, -math.inf
        self._is_registered, self._checkpoint_failure = False, ""
        self._pids: dict[str, int] = {}
        self._replica_pids: set[int] = set()  # of the other learners
        self._metrics = ActorLearnerMetrics()
        self._folder, self._folder_name = Path(), ""  # of its files, and its name below that of all runs

    def start(self, run_id: str, folder: Path, token: str, keys: tuple[bytes, bytes] | None) -> EndpointModel:
        """Start the workers, with files in the run's folder or one of its own there; returns the model to serve."""
        self._folder_name = f"{run_id}/{self.name}" if self.name else run_id
        if self.name:
            run_id, folder = f"{run_id}.{self.name}", folder / self.name
            make_folder(folder)
        self._folder = folder
        OpponentPool.of_run(self.spec.self_play, folder)  # takes registered opponents out of this process's registry
        has_learnt = bool(self.spec.resume) and shoal.runs.load(self.spec.resume).num_versions() > 0
        begin_settings(folder)
        setting = GatewaySetting.of_run(
            self.spec,
            self.experience,
            folder,
            token,
            self._folder_name,
            run_id=run_id,
            target_return=self.spec.target_return,
            curve_keys=keys,
            policy=self.name or self.spec.model_name,
            settings={**self.spec.settings, **read_settings(folder)[0]},
        )
        setting.site.prepare()
        self._workers = workers = ActorLearnerWorkers(self.spec, setting, has_learnt)
        factory, signature = describe_policy_model(self.spec, self.experience)
        factory = factory.with_code()  # as it is now: what learns is registered, whatever is edited meanwhile
        self._code = factory.code
        model = LiveModel(
            factory.update({"action": "sampled" if self.spec.action == "sampled" else "best"}),
            signature,
            workers.make_weight_source(follows_hold=True),
            workers.make_episode_service() if self.spec.learn_from_endpoint else None,
        )
        return EndpointModel(self.spec.model_name, model)

    @property
    def has_started(self) -> bool:
        return self._workers is not None

    @property
    def workers(self) -> ActorLearnerWorkers:
        assert self._workers is not None
        return self._workers

    @property
    def address(self) -> str:
        """Of its gateway; empty until that has started."""
        return str(self.addresses.get("address", ""))

    @property
    def websocket(self) -> str:
        """The same for games; empty without one."""
        return str(self.addresses.get("websocket_address", ""))

    @property
    def mean_return(self) -> float:
        return float(self.gateway.get("mean_return", math.nan))

    @property
    def num_steps(self) -> int:
        """The steps of its agents, in its environments."""
        return int(self.gateway.get("steps", 0))

    @property
    def updates(self) -> int:
        return int(self.learner.get("updates", 0))

    @property
    def is_solved(self) -> bool:
        """Whether it has reached its target; one without any has not to."""
        return self.spec.target_return is None or self.solved_s is not None

    @property
    def has_experience(self) -> bool:
        """Whether an actor has sent any, good or bad."""
        return any(actor["steps"] or actor["invalid"] for actor in self.gateway.get("actors", []))

    @property
    def may_be_tried(self) -> bool:
        """Whether it is at its target now, as its actors act or by best actions, and the learner has moved on since
        the last trial."""
        target = self.spec.target_return
        if target is None or self.updates < self.tried_at + self.spec.algorithm.updates_between_trials:
            return target is None
        sampled = self.mean_return if self.is_solved else -math.inf  # of fewer episodes before
        return sampled >= target or self.played.get(BEST_RETURN, -math.inf) >= target

    @property
    def may_be_probed(self) -> bool:
        """Whether best actions may say more than the actors' mean return."""
        if self.name or self.spec.given or self.spec.self_play.is_on or self.gateway.get("episodes", 0) < MIN_EPISODES:
            return False
        return "best" in list_actions(self.spec, self.experience)

    @property
    def first_inputs(self) -> tuple[np.ndarray, np.ndarray | None]:
        """A first observation, and an action mask, if the policy has masks."""
        choices = find_choices(self.experience)
        return self._first_observation, np.ones(sum(choices), np.bool_) if choices else None

    def poll(self) -> list[tuple[str, dict[str, Any]]]:
        """Take the newest counts; returns what has happened, as events."""
        gateway, learner = self.workers.stats()
        known, known_address = self.updates, self.address  # of earlier incarnations, if these are others
        self.gateway, self.learner = gateway or self.gateway, learner or self.learner
        self.addresses = gateway or self.addresses
        self.solved_s = self.solved_s if self.solved_s is not None else self.gateway.get("solved_s")
        happened = [
            (f"{part}_restarted", {"pid": stats["pid"], "damaged_checkpoints": stats.get("damaged_checkpoints", [])})
            for part, stats in (("gateway", gateway), ("learner", learner))
            if stats and self._pids.get(part, stats["pid"]) != stats["pid"]
        ]
        for kind, details in happened:
            if kind == "gateway_restarted":
                self.relay_websockets(self._relayed)
                self._restarted_at = time.monotonic() if self.num_steps else self._restarted_at
            if kind == "learner_restarted":
                restored = self.learner["restored_updates"]  # it may have saved after it was last asked
                details |= {"updates": max(known, restored), "restored_updates": restored}
        if gateway and learner and len(self._pids) < 2 and learner.get("restored_updates"):  # of the run before
            happened.append(("restored", {"step": self.num_steps, "damaged": learner["damaged_checkpoints"]}))
        self._pids |= {part: stats["pid"] for part, stats in (("gateway", gateway), ("learner", learner)) if stats}
        pids = set(self.learner.get("replica_pids", []))
        happened += [("learner_lost", {"pid": pid}) for pid in sorted(self._replica_pids - pids)]
        happened += [("learner_joined", {"pid": pid}) for pid in sorted(pids - self._replica_pids)]
        self._replica_pids = pids
        failure = self.learner.get("checkpoint_failure", "")
        if failure and failure != self._checkpoint_failure:
            happened.append(("checkpoint_failed", {"step": self.learner["steps"], "error": failure}))
        self._checkpoint_failure = failure
        happened += self._watch_gateway(known_address)
        if gateway is not None:
            # Let the gateway tell the games what holds now.
            mean_return = (
                gateway["mean_return"] if gateway["episodes_in_window"] >= MIN_SETTINGS_EPISODES else -math.inf
            )
            sent = gateway["settings"]
            values = advance_settings(self._folder, self.spec.settings, self.spec.rules, mean_return, sent)
            if values != sent:
                self.workers.set_settings(values)
        return happened + [(kind, {"at": at, **details}) for at, kind, details in self.workers.take_events()]

    def wait_for_gateway(self) -> None:
        """Wait for its addresses. Raises ClusterError."""
        self.addresses = self.workers.wait_for_gateway()

    def relay_websockets(self, addresses: dict[str, str]) -> None:
        """Let its gateway pass games on to those of other policies, also after it has restarted. Raises
        ClusterError."""
        self._relayed = addresses
        if addresses:
            self.workers.relay_websockets(addresses)

    def store_address(self) -> str:
        """Write the gateway's addresses into `$SHOAL_STORE`, if that is set; later, where the store takes nothing now.
        Returns what actors are given: the address, and where it is stored."""
        if not store_variable() or is_loopback(self.spec.gateway.host):
            return self.address
        store, folder = open_store(), f"runs/{self._folder_name}"
        for name, address in self._list_stored().items():
            if address != self._stored.get(name):
                with suppress(StoreError):
                    store.write(f"{folder}/{name}", address.encode())
                    self._stored[name] = address
        return f"{self.address}|{store.url}/{folder}/{ADDRESS_NAME}"

    def _list_stored(self) -> dict[str, str]:
        path = f"/{quote(self.name)}" if self.name else ""
        return {ADDRESS_NAME: self.address, **({WEBSOCKET_NAME: self.websocket + path} if self.websocket else {})}

    def require_actors(self, run_id: str) -> None:
        """Raise RunError when the gateway has restarted, and no actor has come back since."""
        if self._is_deserted and self._restarted_at is not None:
            name, seconds = f" of {self.name}" if self.name else "", time.monotonic() - self._restarted_at
            problem = f"nothing was learnt for {seconds:.0f} s: the gateway{name} restarted, and no actor has come back"
            raise RunError(f"{problem}: connect the actors to {self.address}, and go on with resume={run_id}")

    def _watch_gateway(self, known_address: str) -> list[tuple[str, dict[str, Any]]]:
        """Events: it has moved, or no actor has come back to it."""
        happened: list[tuple[str, dict[str, Any]]] = []
        if known_address not in ("", self.address):
            happened.append(("gateway_moved", {"before": known_address, "address": self.address}))
        if self.has_experience:
            self._restarted_at, self._is_deserted = None, False
        if self._restarted_at is not None and not self._is_deserted:
            seconds = time.monotonic() - self._restarted_at
            if seconds >= ACTORS_BACK_S:
                self._is_deserted = True
                happened.append(("actors_missing", {"address": self.address, "seconds": seconds}))
        if self._stored != self._list_stored():
            self.store_address()
        return happened

    def keep_best(self) -> None:
        """Keep the newest weights, if the actors' mean return is the best so far and is of enough episodes."""
        is_due = time.monotonic() - self._retained_at >= KEEP_S and self.gateway.get("episodes", 0) >= MIN_EPISODES
        if not is_due or not self.mean_return > self._retained_return:
            return
        if (snapshot := self.workers.make_weight_source().latest()) is not None:
            self.retained = snapshot
            self._retained_return = self.mean_return
            self._retained_at = time.monotonic()

    def choose_best(self, newest: WeightSnapshot) -> WeightSnapshot:
        """The version to register without a trial: that of the best mean return, which the store then has again."""
        return newest if (retained := self._find_better()) is None else self.workers.republish(retained)

    def find_learnt(self) -> WeightSnapshot | None:
        """The same of a run that ends here: nothing is published. None where no episode has ended, so that no version
        is known to be any good."""
        if not self.has_started or not self.updates or not math.isfinite(self.mean_return):
            return None
        return self._find_better() or self.workers.make_weight_source().latest() or self.retained

    def _find_better(self) -> WeightSnapshot | None:
        """The retained version, where it returned more than the newest does."""
        if self.retained is None or self.mean_return >= self._retained_return or self.spec.self_play.is_on:
            return None  # also while KEEP_S has not passed, in which a policy may learn all that it can
        return self.retained

    def compute_metrics(self, num_requests: float) -> dict[str, float]:
        """num_requests: of the endpoint, so far"""
        return self._metrics.compute(self.gateway, self.learner, num_requests, time.time()) | self.played

    def register(self, snapshot: WeightSnapshot, recorder: RunRecorder, action: str) -> ModelVersion:
        """Register these weights, or with `action=average` the mixture of the pool, and record that."""
        pool = self.workers.load_pool() if self.spec.action == "average" else ()
        returns = self.gateway | ({} if self.trial_return is None else {"trial_return": self.trial_return})
        model = register_policy(self.spec, self.experience, snapshot, recorder.id, returns, action, pool, self._code)
        recorder.record_model(model.name, model.version, model.aliases, model.decision)
        self._is_registered = True
        return model

    def register_learnt(self, recorder: RunRecorder) -> None:
        """Register what it has learnt in a run that is stopped, as of one that misses its target: `champion` stays."""
        if not self._is_registered and (snapshot := self.find_learnt()) is not None:
            self.withhold_champion()
            action = list_actions(self.spec, self.experience)[0]
            print_line(f"registered {self.register(snapshot, recorder, action).ref}, as it was stopped")

    def withhold_champion(self) -> None:
        """Let the version that will be registered leave `champion` as it is."""
        self.spec = self.spec.update({"aliases": [alias for alias in self.spec.aliases or () if alias != CHAMPION]})

    def describe_progress(self) -> str:
        """One line of its gateway's counts."""
        stats = self.gateway
        mean = format_number(stats["mean_return"]) if math.isfinite(stats["mean_return"]) else "-"
        return (
            f"return {mean:>6} | {self.num_steps:9,} steps | {stats['episodes']:6,} episodes"
            f" | weights {stats['weights_version']:5} | queue {stats['queue_depth']:3}"
            f" | dropped {sum(stats['segments']['dropped'].values()):,}"
        )


def require_capacity(
    policies: Sequence[LoopPolicy], spec: ActorLearnerSpec, admission: RunAdmission, note: Callable[..., None]
) -> None:
    """Wait until all learners and replicas fit and it is the run's turn. Raises ConfigError where they never fit,
    NoCapacity when they have not fitted within `wait`. note: records an event"""
    learner = spec.learner
    num_learners = len(policies) * learner.replicas
    num_replicas = max(1, spec.endpoint.least_replicas)
    has_gpus = learner.device != "cpu" and count_gpu_slots(learner.num_gpus, gpus_by_host()) >= num_learners
    num_gpus = learner.num_gpus if learner.device == "cuda" or has_gpus else 0.0
    of_learner = {"CPU": learner.num_cpus, "GPU": num_gpus}
    bundles = [of_learner] * num_learners + [{"CPU": spec.endpoint.num_cpus}] * num_replicas
    fields = "learner.num_cpus, endpoint.num_cpus or endpoint.num_replicas"
    needs = {"CPU": sum(each["CPU"] for each in bundles), "GPU": num_gpus * num_learners}
    require_cpus(needs["CPU"], fields, bundles)
    if learner.device == "cuda":
        require_gpus(learner.num_gpus, num_learners, "learner.num_gpus or learner.replicas", of_learner)
    if learner.device == "auto" and not has_gpus:
        for each in policies:  # a learner would wait for a GPU without end
            each.spec = each.spec.update({"learner": {"device": "cpu"}})
    if not list_driver_endpoints().abandoned:  # otherwise `deploy` frees what those hold
        wait_s = spec.endpoint.wait if spec.wait is None else spec.wait
        admission.wait(bundles, f"learners and replicas need {format_needs(needs)}", wait_s, print_too(note))


def join_addresses(policies: Sequence[LoopPolicy]) -> tuple[str, str]:
    """Of all gateways, for actors; for games, of the first gateway, at which each of several policies has its path, or
    empty."""
    base = policies[0].websocket
    paths = [f"{base}/{quote(each.name)}" if each.name else base for each in policies] if base else []
    return ",".join(each.address for each in policies), ",".join(paths)


def describe_other_addresses(policies: Sequence[LoopPolicy]) -> dict[str, str]:
    """Further addresses, where there are any. Raises ClusterError.

    bound:     where the gateways listen, for actors of their own host, where `gateway.advertise` names another
               address for the others
    connect:   what actors are given, which says where the store has the present address
    websocket: for games
    """
    address, websocket = join_addresses(policies)
    bound, connect = "", ",".join(each.store_address() for each in policies)
    if policies[0].spec.gateway.advertise:
        bound = ",".join(each.addresses["bound"] for each in policies)
    found = {"bound": bound, "connect": connect, "websocket": websocket}
    return {name: each for name, each in found.items() if each not in ("", address)}


def announce_websocket(policies: Sequence[LoopPolicy], run_id: str) -> None:
    """Say where games join, and let the first gateway pass them on to those of the other policies. Raises
    ClusterError."""
    first, *others = policies
    first.relay_websockets({each.name: each.addresses["bound_websocket"] for each in others})
    shown = join_addresses(policies)[1].replace(",", "\n    ")
    print_line(f"run {run_id}: games join over WebSocket at\n    {shown}")


def close_gateways(policies: Sequence[LoopPolicy], recorder: RunRecorder, deadline: float) -> None:
    """End the actors' sessions, and record what became of all segments, of the gateways that say so in time."""
    for each in reversed(policies):  # the first one relays the games of the others
        stats = each.workers.close_gateway(max(0.0, deadline - time.monotonic()))
        if stats is not None:
            each.gateway = stats
            named = {"policy": each.name} if each.name else {}
            recorder.record_event("accounting", **named, **stats["segments"])
    metrics = combine_policies({each.name: each.compute_metrics(0) for each in policies if each.gateway})
    accounts = {name: each for name, each in metrics.items() if name.startswith(("segments/", "drops/", "queue/"))}
    if accounts:
        recorder.log(int(metrics["steps/total"]) + 2, accounts)


def format_mean_returns(policies: Sequence[LoopPolicy]) -> str:
    """As in `mean return 475`, or with the name of each."""
    returns = (f"{each.name} {format_number(each.mean_return)}".lstrip() for each in policies)
    return f"mean return {', '.join(returns)}"


def require_experience(policies: Sequence[LoopPolicy], spec: ActorLearnerSpec) -> None:
    """Raise RunError when a policy has learnt nothing, since all that actors sent was dropped."""
    for each in policies:
        if each.gateway and not each.num_steps and (reasons := describe_rejections(each.gateway)):
            name = f"{each.name} has " if each.name else ""
            problem = f"nothing to learn from after {spec.max_wall_s:.0f} s"
            raise RunError(f"{name}{problem}, for every segment was dropped ({reasons}): mend the actors")


def describe_missed_targets(
    policies: Sequence[LoopPolicy], spec: ActorLearnerSpec, failed_trial: str, run_id: str
) -> str:
    """What lacks of the targets when the time is over. Raises RunError where no episode has ended, so that no version
    is any good."""
    require_experience(policies, spec)
    missed = [each for each in policies if not each.is_solved or len(policies) == 1]
    for each in missed:
        each.require_actors(run_id)
    targets = ", ".join(filter(None, (f"{each.name} {each.spec.target_return}".strip() for each in missed)))
    has_ended = any(math.isfinite(each.mean_return) for each in missed)
    result = format_mean_returns(policies) if has_ended else "no episode has ended"
    tried, more = (f" ({failed_trial})", ", raise eval_episodes") if failed_trial else ("", "")
    field = "target_return" if len(policies) == 1 else "policies.NAME.target_return"
    problem = (
        f"{result} after {spec.max_wall_s:.0f} s, the target is {targets}{tried}: lower {field}{more}, or"
        f" go on with resume={run_id} and a longer max_wall_s"
    )
    if not has_ended:
        raise RunError(problem)
    return problem
