"""Agents elsewhere beside TRL: the gradient, learning, and what the gateway takes: `python -m benchmarks.agents.X`.

Kills of all parts of a run (`kills`), and agents of frameworks (`frameworks`), are read by `killed`.

`letters` has the task and the model of both sides, `run` a run of ours as a child, `client` agents with a stock client;
TRL's side is `benchmarks.peers.trl_grpo`.
"""
