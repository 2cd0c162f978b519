"""Agents elsewhere talk to a language model, which learns from their rewards.

    shoal run agents model=./SmolLM2 env=reasoning_gym:chain_sum agents=8  # a cluster, the job and its own driver
    shoal run agents model=./SmolLM2                                       # drivers elsewhere open the sessions
    shoal run agents model=smollm2@champion algorithm=rloo target_reward=0.8
    ray job submit --working-dir . -- python jobs/agents.py model=...      # the same on a cluster that is up

An agent needs no code of ours: a stock client of OpenAI or Anthropic, with the base URL and the key of its session
(docs/agents.md). `python jobs/agents.py --help` lists the fields.
"""

from shoal.libs.agents.spec import AgentsSpec


def spec() -> AgentsSpec:
    """The recipe: GRPO, 8 groups of 8 sessions a step."""
    return AgentsSpec()


if __name__ == "__main__":
    from shoal.cluster.job_main import job_main
    from shoal.libs.agents.flow import run_agents
    from shoal.libs.agents.setting import check

    job_main(spec(), run_agents, job="agents", check=check)
