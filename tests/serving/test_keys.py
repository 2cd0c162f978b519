"""Keys and rates over several whole replicas; no Ray, no socket."""

from __future__ import annotations

import asyncio

from serving.replica_set import Asked, ReplicaSet, ask, infer, register, until
from shoal.serve.replica.replica import EndpointReplica
from shoal.serve.spec.model_source import model_from_ref

TOKEN, ADA = "t0ken", "key-of-ada"
BURST, NUM_REPLICAS = 8, 2
KEYS = [{"name": "ada", "key": ADA, "models": ["linear"], "requests_per_s": 0.01, "burst": BURST}]


async def change(replica: EndpointReplica, key: str) -> Asked:
    body = {"action": "rollback", "model": "linear"}
    return await ask(replica, "POST", "/shoal/v1/rollout", body, {"authorization": f"Bearer {key}"})


def test_who_may_do_what() -> None:
    register(aliases=("champion",))

    async def body() -> None:
        async with ReplicaSet(model_from_ref("linear@champion"), token=TOKEN, keys=KEYS) as endpoint:
            [replica] = await endpoint.start()
            assert (await ask(replica, "GET", "/v2/health/ready")).status == 200
            nobody = await infer(replica)
            assert (nobody.status, nobody.headers[b"www-authenticate"]) == (401, b'Bearer realm="shoal"')
            assert (await infer(replica, authorization=f"Bearer {ADA}")).status == 200
            assert (await infer(replica, "other", authorization=f"Bearer {ADA}")).status == 403
            assert (await change(replica, ADA)).status == 403
            assert (await change(replica, TOKEN)).status == 409  # it was never another version
            assert (await ask(replica, "GET", "/metrics")).status == 401

    asyncio.run(body())


def test_replicas_share_a_rate() -> None:
    register(aliases=("champion",))

    async def body() -> None:
        async with ReplicaSet(model_from_ref("linear@champion"), token=TOKEN, keys=KEYS) as endpoint:
            replicas = await endpoint.start(NUM_REPLICAS)
            await until(lambda: all(len(each._follower.peers) == NUM_REPLICAS - 1 for each in replicas))
            for replica in replicas:
                answers = [await infer(replica, authorization=f"Bearer {ADA}") for _ in range(BURST)]
                statuses = [answer.status for answer in answers]
                assert statuses == [200] * (BURST // NUM_REPLICAS) + [429] * (BURST - BURST // NUM_REPLICAS)
                assert int(answers[-1].headers[b"retry-after"]) > 100
                assert "'ada'" in answers[-1].body["error"]

    asyncio.run(body())
