"""Runs from their start to their end, for libraries: the order of events of runs."""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.flows.actor_learner_spec import ONLY_POLICY, ActorLearnerSpec, is_loop_job
    from shoal.flows.evaluation import Evaluation, EvaluationSite, Evaluator
    from shoal.flows.local_run import MEAN_RETURN, LocalRun, require_local
    from shoal.flows.rl_metrics import ActorLearnerMetrics, HistorySampler, Rate
    from shoal.flows.rl_policy import describe_experience, describe_policy_model, inspect_environment
    from shoal.flows.run_flow import recorded_run
    from shoal.flows.serving_spec import ServingSpec
    from shoal.flows.training import RayBackend

__getattr__ = load_on_demand(__name__)
