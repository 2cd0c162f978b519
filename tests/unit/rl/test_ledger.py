"""The account book: received = consumed + queued + dropped after every operation, and after a crash at any of them."""

import sqlite3
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from abandoned_ledgers import ledgers_may_stay_open  # noqa: F401
from shoal.errors import LedgerUnwritable
from shoal.rl.experience.segment_ledger import Ledger
from shoal.wire import DropReason

pytestmark = pytest.mark.usefixtures("ledgers_may_stay_open")
A, B = ("a", 1), ("b", 7)
STALE = DropReason.STALE_CONSUMPTION


def test_a_segment_moves_from_received_to_queued_to_consumed() -> None:
    ledger = Ledger()
    for seq in range(3):
        ledger.record_received(A, seq)
    ledger.record_received(B, 0, DropReason.NON_FINITE)
    lease = ledger.open_lease("learner", [A, A])
    assert ledger.get_account(A).queued == 3  # a leased segment has not left the books
    assert ledger.acknowledge(lease, [None, STALE])
    assert (ledger.get_account(A).consumed, ledger.get_account(A).queued) == (1, 1)
    assert ledger.get_totals().to_dict() == {
        "received": 4,
        "consumed": 1,
        "queued": 1,
        "duplicates": 0,
        "dropped": {"stale_consumption": 1, "non_finite": 1},
        "balanced": True,
    }


def test_a_lease_is_settled_once_and_saying_it_again_is_no_mistake(tmp_path: Path) -> None:
    """The answer to a settlement may be lost with the gateway that gave it: the learner then asks again."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.record_received(A, 0)
    lease = ledger.open_lease("learner", [A])
    assert ledger.acknowledge(lease, [None])
    assert ledger.acknowledge(lease, [None])
    assert Ledger(tmp_path / "ledger.sqlite").acknowledge(lease, [None])
    assert ledger.get_account(A).consumed == 1
    assert ledger.revoke_open_leases("another") == 0
    revoked = ledger.open_lease("learner", [])
    ledger.revoke_open_leases("another")
    assert not ledger.acknowledge(revoked, [])


def test_a_lease_of_a_gateway_whose_ledger_is_lost_does_not_end_the_learner() -> None:
    assert Ledger().acknowledge(57, [None, None])


def test_the_leases_of_an_earlier_learner_are_dropped_with_a_reason_and_cannot_be_settled() -> None:
    ledger = Ledger()
    ledger.record_received(A, 0)
    dead = ledger.open_lease("learner 1", [A])
    assert ledger.revoke_open_leases("learner 2") == 1
    assert ledger.get_account(A).dropped == {"learner_crash": 1}
    assert not ledger.acknowledge(dead, [None])


def test_a_lease_whose_answer_was_lost_is_counted_when_the_learner_asks_again() -> None:
    ledger = Ledger()
    ledger.record_received(A, 0)
    ledger.open_lease("learner", [A])
    assert ledger.revoke_open_leases("learner") == 1
    assert ledger.get_account(A).dropped == {"lease_lost": 1}
    assert ledger.get_account(A).queued == 0


def test_a_lease_number_is_never_used_twice(tmp_path: Path) -> None:
    before = Ledger(tmp_path / "ledger.sqlite")
    before.record_received(A, 0)
    lease = before.open_lease("learner 1", [A])
    before.revoke_open_leases("learner 2")
    before.commit()
    assert Ledger(tmp_path / "ledger.sqlite").open_lease("learner 2", []) > lease


def test_a_lease_that_a_lost_gateway_has_not_logged_keeps_its_number() -> None:
    """The learner names it: otherwise the next one, with the same number, would be counted as learnt when its answer is
    lost."""
    ledger = Ledger()
    for seq in range(2):
        ledger.record_received(("a", 1), seq)
    ledger.acknowledge_seen("learner", 7, [])
    lease = ledger.open_lease("learner", [("a", 1)])
    assert lease == 8
    ledger.acknowledge_seen("learner", 7, [])  # its answer was lost: the learner knows of none after the seventh
    assert ledger.revoke_open_leases("learner") == 1
    assert ledger.get_totals().dropped == Counter({DropReason.LEASE_LOST: 1})


def test_what_was_queued_in_a_gateway_that_died_is_dropped_and_what_was_leased_can_be_settled(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    before = Ledger(path)
    for seq in range(5):
        before.record_received(A, seq)
    lease = before.open_lease("learner", [A, A])  # commits
    after = Ledger(path)  # the first one is never closed: its process was killed
    assert after.get_account(A).next_seq == 5
    assert after.get_account(A).dropped == {"gateway_crash": 3}
    assert after.get_account(A).queued == 2
    assert after.acknowledge(lease, [None, STALE])
    assert after.get_totals().to_dict()["dropped"] == {"gateway_crash": 3, "stale_consumption": 1}
    assert after.get_totals().is_balanced
    assert after.open_lease("learner", [A]) > lease


def test_what_was_not_committed_was_not_acknowledged_and_is_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    before = Ledger(path)
    before.record_received(A, 0)
    before.commit()
    before.record_received(A, 1)
    assert Ledger(path).get_account(A).next_seq == 1


def test_close_is_idempotent_and_commits(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.record_received(A, 0, DropReason.INVALID_FRAMES)
    ledger.close()
    ledger.close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as connection:
        rows = connection.execute("SELECT received FROM accounts").fetchall()
    assert rows == [(1,)]


def test_incarnations_are_accounts_of_their_own() -> None:
    ledger = Ledger()
    assert ledger.newest_incarnation("a") is None
    ledger.record_received(("a", 3), 0)
    ledger.record_received(("a", 12), 0)
    assert ledger.newest_incarnation("a") == 12
    assert ledger.get_account(("a", 12)).next_seq == 1


class Books(RuleBasedStateMachine):
    """Any sequence of operations and crashes."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.ledger = Ledger(Path(self.folder.name) / "ledger.sqlite")
        self.leases: list[tuple[int, int]] = []
        self.queue: list[tuple[str, int]] = []

    def teardown(self) -> None:
        self.ledger.close()
        self.folder.cleanup()

    @rule(key=st.sampled_from([A, B]), reason=st.sampled_from([None, *DropReason]))
    def admit(self, key: tuple[str, int], reason: DropReason | None) -> None:
        self.ledger.record_received(key, self.ledger.get_account(key).next_seq, reason)
        if reason is None:
            self.queue.append(key)

    @rule(count=st.integers(0, 3))
    def lease(self, count: int) -> None:
        taken, self.queue = self.queue[:count], self.queue[count:]
        self.leases.append((self.ledger.open_lease("one", taken), len(taken)))

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        if self.leases:
            lease, count = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
            fates = st.sampled_from([None, *DropReason])
            assert self.ledger.acknowledge(lease, data.draw(st.lists(fates, min_size=count, max_size=count)))

    @rule()
    def another_learner(self) -> None:
        self.ledger.revoke_open_leases("another")
        self.leases = []

    @rule(commit=st.booleans())
    def crash(self, commit: bool) -> None:
        if commit:
            self.ledger.commit()
        self.ledger = Ledger(Path(self.folder.name) / "ledger.sqlite")
        self.queue = []

    @rule()
    def shut_down(self) -> None:
        self.ledger.drop_queued(self.queue, DropReason.SHUTDOWN)
        self.queue = []

    @invariant()
    def balanced(self) -> None:
        for account in self.ledger.get_accounts().values():
            assert account.is_balanced
            assert account.queued >= 0
        leased = sum(count for _, count in self.leases)
        totals = self.ledger.get_totals()
        assert totals.queued == len(self.queue) + leased
        accounts = self.ledger.get_accounts().values()
        for count in ("received", "consumed", "queued", "duplicates"):
            assert getattr(totals, count) == sum(getattr(account, count) for account in accounts)
        assert +totals.dropped == sum((account.dropped for account in accounts), Counter())


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def full(ledger: Ledger) -> None:
    """The disk takes nothing more: SQLite says so by itself."""
    ledger._database.execute(f"PRAGMA max_page_count = {ledger._database.execute('PRAGMA page_count').fetchone()[0]}")


def with_room(ledger: Ledger) -> None:
    ledger._database.execute("PRAGMA max_page_count = 1000000")


def more_than_a_page_holds(ledger: Ledger) -> None:
    for number in range(400):
        ledger.record_received((f"{number}" * 20, 1), 0)


def test_while_the_disk_is_full_nothing_is_lost_and_nothing_is_said(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    ledger.record_received(A, 0)
    ledger.record_received(A, 1)
    lease = ledger.open_lease("learner", [A])
    full(ledger)
    more_than_a_page_holds(ledger)
    for _ in range(2):
        with pytest.raises(LedgerUnwritable, match="full"):
            ledger.commit()
    with pytest.raises(LedgerUnwritable):
        ledger.open_lease("learner", [A])
    for _ in range(2):
        with pytest.raises(LedgerUnwritable):
            ledger.acknowledge(lease, [None])
    with_room(ledger)
    assert ledger.acknowledge(lease, [None])
    del ledger  # as a process ends that is killed
    after = Ledger(path)
    assert (after.get_account(A).consumed, after.get_account(A).received) == (1, 2)
    assert after.get_totals().received == 402
    assert after.get_totals().is_balanced
