"""What every source of a stream does, whatever is behind it: files, a broker, a database."""

from collections.abc import Callable, Sequence

from shoal.libs.stream.messages import Message
from shoal.sources.source import StreamSource, StreamState
from waiting import wait_for


def check_source(make_source: Callable[[], StreamSource], expected: Sequence[Message]) -> None:
    """The source has the `expected` messages of one publisher, four at least, none of which was committed."""

    def open_after(count: int) -> StreamSource:
        source = make_source()
        assert source.num_delivered == 0
        source.open(StreamState(0, {expected[count - 1].publisher: expected[count - 1].sequence} if count else {}))
        return source

    def poll(source: StreamSource, count: int) -> list[Message]:
        found: list[Message] = []

        def has_all() -> bool:
            while (size := min(2, count - len(found))) and (messages := source.poll(size, 0.1).messages):
                assert len(messages) <= size
                found.extend(messages)
            return len(found) == count

        wait_for(has_all, what=f"{count} messages")
        assert source.num_delivered == count
        return found

    first = open_after(0)
    assert poll(first, 4) == expected[:4]
    first.commit(StreamState(2, {expected[1].publisher: expected[1].sequence}))
    first.close()
    first.close()
    assert first.poll(1, 0.0).messages == []
    second = open_after(2)  # what was polled and not committed comes again, in its order
    assert poll(second, len(expected) - 2) == expected[2:]
    second.commit(StreamState(second.num_delivered, {expected[-1].publisher: expected[-1].sequence}))
    second.close()
    third = open_after(len(expected))
    assert third.poll(1, 0.1).messages == []
    third.close()
