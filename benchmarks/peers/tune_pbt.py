"""Ray Tune's PBT over LeNet on Fashion-MNIST: a trial a member, an actor each, checkpoints through storage.

    python -m benchmarks.peers.tune_pbt population SETTING      # a population: seconds, and the best member's accuracy
    python -m benchmarks.peers.tune_pbt exploit SETTING         # the seconds of one exploit

SETTING is JSON: members, rounds, steps, batch_size, score_samples, seed, storage. All members' actors live at once,
each with its share of the cores and one thread, so that a trial without a copy is neither saved nor restored for
want of room. A trial has the network, the batches' size, the augmentations and the space of our population.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray import tune
from ray.tune.schedulers import FIFOScheduler, PopulationBasedTraining
from torch import Tensor, nn

from benchmarks.talk import say
from shoal.cpu_count import count_usable_cores
from shoal.data.formats import Idx
from shoal.libs.population.augmentation import erase, flip, shift
from shoal.models.lenet import MEAN, STD, LeNet

FOLDER = Path("/usr/share/datasets/fashion-mnist")
AUGMENTATIONS = {"shift": shift, "flip": flip, "erase": erase}
SPACE = {
    "learning_rate": tune.loguniform(1e-3, 2e-1),
    "momentum": tune.uniform(0.5, 0.97),
    "shift": tune.uniform(0, 3),
    "flip": tune.uniform(0, 0.5),
    "erase": tune.uniform(0, 0.5),
}
EXPLOIT_ROUNDS, EXPLOIT_MEMBERS, EXPLOIT_QUANTILE = 20, 4, 0.5


class Clock(tune.Callback):
    """When each result came."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def on_trial_result(self, *_: Any, **__: Any) -> None:
        self.times_s.append(time.perf_counter())


class Member(tune.Trainable):
    """One member: `steps` updates an iteration, then its score."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.setting = config["setting"]
        torch.manual_seed(self.setting["seed"] * 1000 + hash(self.trial_id) % 1000)
        self.generator = torch.Generator().manual_seed(torch.initial_seed())
        self.model = LeNet().to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, fused=True)
        self.images, self.labels = load("train")
        self.test_images, self.test_labels = load("t10k")
        self.use(config)

    def use(self, config: dict[str, Any]) -> None:
        """Take these hyper-parameters."""
        self.strengths = {name: torch.tensor([float(config[name])]) for name in AUGMENTATIONS}
        for group in self.optimizer.param_groups:
            group["lr"], group["momentum"] = config["learning_rate"], config["momentum"]

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """The actor of a trial goes on as another one, which is faster than a new actor."""
        self.use(new_config)
        return True

    def step(self) -> dict[str, Any]:
        self.model.train()
        for _ in range(self.setting["steps"]):
            chosen = torch.randint(len(self.images), (self.setting["batch_size"],), generator=self.generator)
            images, labels = self.images[chosen][None], self.labels[chosen]
            for name, augment in AUGMENTATIONS.items():
                images = augment(images, self.strengths[name], [self.generator])
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(normalise(images[0])), labels).backward()
            self.optimizer.step()
        count = self.setting["score_samples"]
        return {"accuracy": self.score(count) if count else float(torch.rand(()))}

    @torch.no_grad()
    def score(self, count: int) -> float:
        """The accuracy on the first test images."""
        self.model.eval()
        outputs = [self.model(normalise(each)) for each in self.test_images[:count].split(500)]
        return float((torch.cat(outputs).argmax(-1) == self.test_labels[:count]).float().mean())

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, Path(checkpoint_dir, "state.pt"))

    def load_checkpoint(self, checkpoint_dir: str | None) -> None:
        assert checkpoint_dir is not None
        state = torch.load(Path(checkpoint_dir, "state.pt"))
        self.model.load_state_dict(state["model"])
        rates = [(group["lr"], group["momentum"]) for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, (rate, momentum) in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"], group["momentum"] = rate, momentum  # its own, not those that it copied


def load(part: str) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 28, 28] and labels int64 [N]."""
    files = [FOLDER / f"{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
    source = Idx(*files, scale=False)
    images, labels = source.batch(np.arange(len(source)))
    return torch.as_tensor(images), torch.as_tensor(labels)


def normalise(images: Tensor) -> Tensor:
    return ((images.unsqueeze(1).float() - MEAN) / STD).contiguous(memory_format=torch.channels_last)


def fit(setting: dict[str, Any], scheduler: Any, members: int, rounds: int) -> tuple[float, Any, float]:
    """Seconds from the tuner's start to its end, the results, and seconds from the first result to the last."""
    clock = Clock()
    share = math.floor(1000 * count_usable_cores() / members) / 1000
    tuner = tune.Tuner(
        tune.with_resources(Member, {"cpu": min(share, 1)}),
        param_space={**SPACE, "setting": setting},
        tune_config=tune.TuneConfig(
            metric="accuracy", mode="max", num_samples=members, scheduler=scheduler, reuse_actors=True
        ),
        run_config=tune.RunConfig(
            stop={"training_iteration": rounds}, storage_path=setting["storage"], verbose=0, callbacks=[clock],
            checkpoint_config=tune.CheckpointConfig(num_to_keep=4),
        ),
    )  # fmt: skip
    began_s = time.perf_counter()
    results = tuner.fit()
    return time.perf_counter() - began_s, results, clock.times_s[-1] - clock.times_s[0]


def make_scheduler(quantile: float = 0.25) -> PopulationBasedTraining:
    """As our population's `evolution=pbt`."""
    return PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=1,
        hyperparam_mutations=SPACE,
        quantile_fraction=quantile,
        resample_probability=0.25,
        perturbation_factors=(1.2, 0.8),
    )


def main() -> None:
    kind, setting = sys.argv[1], json.loads(sys.argv[2])
    ray.init(num_cpus=count_usable_cores(), include_dashboard=False, log_to_driver=False)
    if kind == "population":
        seconds, results, _ = fit(setting, make_scheduler(), setting["members"], setting["rounds"])
        say(seconds=seconds, accuracy=max(each.metrics["accuracy"] for each in results), errors=results.num_errors)
        return
    idle = {**setting, "steps": 0, "score_samples": 0}  # scores are drawn, so that somebody copies in each round
    _, _, plain_s = fit(idle, FIFOScheduler(), EXPLOIT_MEMBERS, EXPLOIT_ROUNDS)
    scheduler = make_scheduler(EXPLOIT_QUANTILE)
    _, _, evolved_s = fit(idle, scheduler, EXPLOIT_MEMBERS, EXPLOIT_ROUNDS)
    say(plain_s=plain_s, evolved_s=evolved_s, exploits=scheduler._num_perturbations)


if __name__ == "__main__":
    main()
