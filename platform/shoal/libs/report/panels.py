"""The metrics that the report names of every run, and what libraries add for their kinds of runs."""

from __future__ import annotations

from shoal.extend.runs import MEAN_RETURN, PANELS, ReportPanels, RunKind
from shoal.plugins.find import load_reference
from shoal.plugins.library import collect_extensions

COMMON = ReportPanels(
    titles={
        MEAN_RETURN: "Mean return, last 100 episodes",
        "episode/return_std": "Spread of returns (standard deviation)",
        "episode/length": "Mean length of episodes (steps)",
        "episode/success_rate": "Share of episodes that reached their goal",
        "steps/per_s": "Environment steps a second",
        "learner/loss": "Learner loss",
        "learner/entropy": "Policy entropy",
        "learner/policy_lag": "Policy lag (versions)",
        "learner/clip_fraction": "Share of clipped steps",
        "learner/rho_clip_fraction": "Share of clipped importance weights",
        "learner/explained_variance": "Variance of returns that the value explains",
        "learner/q_value": "Mean of the values Q",
        "learner/td_error": "Error of the values Q",
        "learner/temperature": "Temperature of the policy",
        "learner/demonstration_weight": "Weight of demonstrations in the loss",
        "learner/demonstration_share": "Share of demonstrations in a sample",
        "learner/cloning_loss": "Cross entropy of what was shown",
        "queue/depth": "Queue depth (segments)",
        "endpoint/requests_per_s": "Endpoint requests a second",
        "train/loss": "Training loss",
        "train/learning_rate": "Learning rate",
        "samples/per_s": "Samples a second",
        "wait/data": "Share of time waiting for data",
        "wait/communication": "Share of time communicating",
        "flops/utilisation": "Share of the device's peak FLOP/s",
        "step/seconds": "Seconds a step",
        "steps/total": "Environment steps",
        "weights/version": "Weight version",
    },
    cards={
        "episode/success_rate": "success rate",
        "episode/length": "steps an episode",
        "steps/total": "environment steps",
        "steps/per_s": "steps a second",
        "weights/version": "weight version",
        "learner/policy_lag": "policy lag",
        "endpoint/requests_per_s": "requests a second",
        "train/step": "training steps",
        "train/epoch": "epochs",
        "samples/per_s": "samples a second",
        "wait/data": "waiting for data",
        "wait/communication": "waiting for peers",
    },
)


def find_panels(kind: RunKind) -> ReportPanels:
    """Those of every run, and those of the kind. Raises ValueError where the kind's cannot be imported."""
    reference = collect_extensions(PANELS).get(kind)
    if reference is None:
        return COMMON
    own: ReportPanels = load_reference(reference)
    return ReportPanels({**COMMON.titles, **own.titles}, {**COMMON.cards, **own.cards}, own.hidden, own.sections)
