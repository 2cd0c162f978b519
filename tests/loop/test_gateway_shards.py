"""Several gateways of one policy: an actor moves to another one, and the experience of all is learnt once."""

import pytest

from rl_setting import TOKEN, segment, serving
from shoal.actor import ActorClient, client
from shoal.actor.connection import GatewayAddresses
from shoal.errors import ConfigError
from shoal.rl.experience.queue import BatchRequest
from shoal.rl.gateway.shards import ShardedExperience, merge_stats, require_separable
from shoal.rl.spec import RLSpec

SMALL = BatchRequest(1, 1, 1, 0.05)


def test_actors_are_spread_over_the_gateways_by_their_ids() -> None:
    text = "tcp://127.0.0.1:5001+tcp://127.0.0.1:5002"
    chosen = [GatewayAddresses(text, "", f"actor-{number}").get_next() for number in range(64)]
    assert 16 < chosen.count("tcp://127.0.0.1:5001") < 48
    assert chosen[7] == GatewayAddresses(text, "", "actor-7").get_next()
    with pytest.raises(ConfigError, match="is not an address"):
        GatewayAddresses("tcp://127.0.0.1:5001+tcp://127.0.0.1", "")


def test_an_actor_whose_gateway_is_gone_moves_and_no_segment_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last segment is on the books of the gateway that died before it said so."""
    monkeypatch.setattr(client, "_MOVE_S", 0.2)
    monkeypatch.setattr(client, "_HELLO_TIMEOUT_S", 0.5)
    with serving(timeout_s=2.0) as first, serving(timeout_s=2.0) as second:
        address = f"{first.address}+{second.address}"
        names = (f"actor-{number}" for number in range(100))
        of_first = next(name for name in names if GatewayAddresses(address, "", name).get_next() == first.address)
        moving = ActorClient(address, TOKEN, of_first, timeout_s=60)
        with moving:
            moving.send(segment())
            assert moving.drain(60)
            moving.send(segment())
            first.gateway.close()
            while moving.reconnects == 0:
                moving.send(segment())
            moving.send(segment())
            assert moving.drain(60)
            [there] = second.gateway.stats()["actors"]
            dropped = moving.drops["gateway_moved"]
            sent = moving._outbox.next_seq
        assert there["actor_id"] == moving.actor_id
        assert second.ledger.get_totals().dropped == {}  # nothing counts as lost with the first one's books
        assert second.ledger.get_totals().received == sent
        assert first.ledger.get_totals().received >= moving.acknowledged["accepted"] - sent >= 1
        assert dropped >= 1


def test_batches_come_from_whichever_gateway_has_one_and_are_settled_there() -> None:
    with serving() as first, serving() as second:
        both = ShardedExperience([first.queue, second.queue])
        assert both.take("learner", SMALL) is None
        for parts, num in ((first, 1), (second, 3)):
            for seq in range(num):
                assert parts.queue.put(("a", 1), seq, segment())
        for _ in range(3):
            batch = both.take("learner", BatchRequest(1, 1, 1, 0.5))
            assert batch is not None
            assert both.acknowledge(batch.lease_id, [None])
        both.close()  # with the fourth leased, perhaps
        consumed = [each.ledger.get_totals().consumed for each in (first, second)]
        dropped = [each.ledger.get_totals().dropped.total() for each in (first, second)]
        queued = [len(each.queue) for each in (first, second)]
        assert sum(consumed) == 3
        assert sum(dropped) + sum(queued) == 1
        assert consumed[0] + dropped[0] + queued[0] == 1


def test_the_counts_of_several_are_those_of_one() -> None:
    with serving() as first, serving() as second:
        for parts, num in ((first, 1), (second, 2)):
            with ActorClient(parts.address, TOKEN, f"of-{num}") as actor:
                for index in range(num):
                    actor.send(segment(4, terminated=True, episode_length=4, episode_return=float(10 * (num + index))))
                assert actor.drain(60)
        stats = [{**each.gateway.stats(), "address": each.address, "bound": ""} for each in (first, second)]
        assert merge_stats(stats[:1], None) == stats[0]
        merged = merge_stats(stats, 1e9)
        assert merged["steps"] == 12
        assert merged["segments"]["received"] == merged["queue_depth"] == 3
        assert merged["segments"]["balanced"] is True
        assert merged["mean_return"] == pytest.approx((10 + 20 + 30) / 3)
        assert {each["actor_id"] for each in merged["actors"]} == {"of-1", "of-2"}
        assert merged["address"] == f"{first.address}+{second.address}"
        assert merged["solved_s"] is None


@pytest.mark.parametrize(
    "word", ["algorithm.synchronous=true", "gateway.durable=store", "self_play.snapshot_every=100"]
)
def test_what_needs_one_gateway_is_refused(word: str) -> None:
    words = ["gateway.shards=2", word]
    with pytest.raises(ConfigError, match="cannot be above 1"):
        require_separable(RLSpec().override(words))
    require_separable(RLSpec().override(["gateway.shards=2"]))
