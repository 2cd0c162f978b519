"""Keys and rates over several whole replicas; no Ray, no socket."""

from __future__ import annotations

import asyncio

from serving.replica_set import ReplicaSet, ask, infer, register, until
from shoal.serve.spec.model_source import model_from_ref

TOKEN, ADA = "t0ken", "key-of-ada"
BURST, NUM_REPLICAS = 8, 2
KEYS = [{"name": "ada", "key": ADA, "models": ["linear"], "requests_per_s": 0.01, "burst": BURST}]


def test_replicas_know_the_keys_and_share_their_rates() -> None:
    register(aliases=("champion",))

    async def body() -> None:
        async with ReplicaSet(model_from_ref("linear@champion"), token=TOKEN, keys=KEYS) as endpoint:
            replicas = await endpoint.start(NUM_REPLICAS)
            await until(lambda: all(len(each._follower.peers) == NUM_REPLICAS - 1 for each in replicas))
            for replica in replicas:
                nobody = await infer(replica)
                assert (nobody.status, nobody.headers[b"www-authenticate"]) == (401, b'Bearer realm="shoal"')
                assert (await infer(replica, "other", authorization=f"Bearer {ADA}")).status == 403
                body = {"action": "rollback", "model": "linear"}
                for key, status in ((ADA, 403), (TOKEN, 409)):  # it was never another version
                    headers = {"authorization": f"Bearer {key}"}
                    assert (await ask(replica, "POST", "/shoal/v1/rollout", body, headers)).status == status
                answers = [await infer(replica, authorization=f"Bearer {ADA}") for _ in range(BURST)]
                statuses = [answer.status for answer in answers]
                assert statuses == [200] * (BURST // NUM_REPLICAS) + [429] * (BURST - BURST // NUM_REPLICAS)
                assert int(answers[-1].headers[b"retry-after"]) > 100
                assert "'ada'" in answers[-1].body["error"]

    asyncio.run(body())
