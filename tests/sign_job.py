"""A job of the loop: actors learn to tell the sign of a number. For sweeps of it; nothing runs it by itself."""

from shoal.flows.actor_learner_spec import ActorLearnerSpec


def spec() -> ActorLearnerSpec:
    """Small batches, so that a second is enough to learn something."""
    return ActorLearnerSpec.parse(
        {
            "env": "sign_game:SignGame",
            "hidden": [16],
            "segment_length": 16,
            "learner": {"batch_steps": 64, "max_batch_steps": 64, "take_timeout_s": 0.1},
            "algorithm": {"name": "impala", "learning_rate": 0.02, "entropy_cost": 0.001},
            "target_return": 7.5,
        }
    )
