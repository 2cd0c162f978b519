"""LeNets as `jax.jit(jax.vmap(step))`: the strongest installable way of stacking them, in the environment of JAX.

    python -m benchmarks.peers.jax_members MEMBERS BATCH ORDER

SGD with momentum; JAX's default threads. Nothing here imports torch.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.talk import commands, say

SHAPES = {
    "conv1": ((6, 1, 5, 5), 6), "conv2": ((16, 6, 5, 5), 16), "linear1": ((400, 120), 120),
    "linear2": ((120, 84), 84), "output": ((84, 10), 10),
}  # fmt: skip
MOMENTUM = 0.9


def convolve(images: Any, layer: Any, padding: int) -> Any:
    paddings = [(padding, padding)] * 2
    maps = jax.lax.conv_general_dilated(
        images, layer["weight"], (1, 1), paddings, dimension_numbers=("NCHW", "OIHW", "NCHW")
    ) + layer["bias"].reshape(1, -1, 1, 1)
    pooled = jax.lax.reduce_window(maps, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return jax.nn.relu(pooled)


def compute_loss(weights: Any, images: Any, classes: Any) -> Any:
    hidden = convolve(convolve(images, weights["conv1"], 2), weights["conv2"], 0).reshape(images.shape[0], -1)
    for name in ("linear1", "linear2"):
        hidden = jax.nn.relu(hidden @ weights[name]["weight"] + weights[name]["bias"])
    logits = jax.nn.log_softmax(hidden @ weights["output"]["weight"] + weights["output"]["bias"])
    return -jnp.take_along_axis(logits, classes[:, None], 1).mean()


def step(weights: Any, velocity: Any, rate: Any, images: Any, classes: Any) -> Any:
    loss, gradients = jax.value_and_grad(compute_loss)(weights, images, classes)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradients)
    return jax.tree.map(lambda w, v: w - rate * v, weights, velocity), velocity, loss


def main(members: int, batch_size: int, order: str) -> None:
    key = jax.random.key(0)
    weights = {
        name: {"weight": jax.random.normal(key, (members, *shape)) * 0.05, "bias": jnp.zeros((members, bias))}
        for name, (shape, bias) in SHAPES.items()
    }
    velocity, rates = jax.tree.map(jnp.zeros_like, weights), jnp.linspace(0.005, 0.01, members)
    size = (members, batch_size) if order == "own" else (batch_size,)
    images, classes = jax.random.normal(key, (*size, 1, 28, 28)), jax.random.randint(key, size, 0, 10)
    dim = 0 if order == "own" else None
    train = jax.jit(jax.vmap(step, (0, 0, 0, dim, dim)), donate_argnums=(0, 1))
    weights, velocity, loss = train(weights, velocity, rates, images, classes)
    loss.block_until_ready()
    say(ready=True)
    for command in commands():
        began_s = time.perf_counter()
        for _ in range(command["steps"]):
            weights, velocity, loss = train(weights, velocity, rates, images, classes)
        loss.block_until_ready()
        say(seconds=time.perf_counter() - began_s)


if __name__ == "__main__":
    members, batch_size, order = sys.argv[1:]
    main(int(members), int(batch_size), order)
