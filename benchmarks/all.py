"""Run every benchmark, one after the other, each in a process of its own; one that fails does not stop the rest.

python -m benchmarks.all            # some three hours; results in benchmarks/results
python -m benchmarks.all --quick    # one short run of each, to see that they work
"""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.children import ROOT

NAMES = (
    *("time_to_solve", "champion_promise", "experience", "weights", "algorithms", "learning_anywhere", "actor_cost"),
    *(
        "self_play",
        "version_lag",
        "publish_latency",
        "remote_inference",
        "gateway_durable",
        "idle_sessions",
        "thousand_actors",
        "simulated_cluster",
        "host_loss",
    ),
    *("steady_lag", "mixed_policies", "load", "tables", "messy_tables", "websocket", "browser", "godot", "films"),
    *("agents_in_one_message", "console", "console_hostile", "first_minute"),
    *(
        "training_step",
        "fsdp_bf16",
        "training_start",
        "sweep",
        "checkpoint",
        "checkpoint_store",
        "tracking",
        "run_metrics",
        "input",
        "fashion_mnist",
        "pipeline",
        "cost",
        "tree_recipe",
        "finetune",
        "finetune_fsdp",
    ),
    *("lightning_modules", "trees", "trees.compiled", "asynchronous", "sync_accuracy", "pull_push", "hogwild"),
    *("population", "population_pbt", "som", "recommender", "optimise"),
    *("agents.gradient", "agents.logprobs", "agents.gateway", "agents.learning", "agents.asynchronous", "agents.kills"),
    *("agents.frameworks", "agents.deltas", "chaos.campaigns", "chaos.flawed", "head_killed", "upgrade"),
    *(
        "failing_starts",
        "sync_bytes",
        "straggler_and_kills",
        "elastic_pause",
        "plan_order",
        "large_plan",
        "stream",
    ),
    *("serving.small", "serving.binary", "serving.bodies", "serving.simulated"),
    *("serving.admission", "serving.real", "serving.swaps", "serving.soak", "serving.seen"),
    *(
        "serving.changes",
        "serving.scale_events",
        "serving.autoscaling",
        "serving.from_zero",
        "serving.before",
        "serving.many_models",
        "serving.million",
        "export_start",
        "game_runtimes",
        "store",
    ),
)


def main(words: list[str]) -> int:
    """Exit status 1 when one failed."""
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    failed: list[str] = []
    for name in NAMES:
        print(f"== {name}", flush=True)
        started_s = time.monotonic()
        status = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *words], cwd=ROOT, check=False).returncode
        verdict = "done" if status == 0 else f"FAILED with status {status}"
        print(f"== {name}: {verdict} after {time.monotonic() - started_s:.0f} s\n", flush=True)
        failed += [name] if status else []
    if failed:
        print(f"failed: {', '.join(failed)}; their earlier results stay as they were", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
