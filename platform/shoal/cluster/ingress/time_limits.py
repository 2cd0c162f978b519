"""How long each part of an endpoint waits, in one place: each part outlasts the one that it waits for.

`tests/unit/serve/test_time_limits.py` checks the order, with that of the client (`shoal.client`). Imports nothing: the
program that writes HAProxy's configuration reads it, too.
"""

# A forward that takes longer hangs: its replica is replaced. The default of `EndpointSpec.hang_s`.
HANG_S = 60.0
# HAProxy waits so long at most for an answer, or for its next bytes: then the client gets 504. See `get_answer_s`.
ANSWER_S = 60.0
# While an endpoint is asleep, HAProxy holds a request so long: then the client gets 503, to come again.
HOLD_S = 60.0
# A client that neither sends nor reads is disconnected.
CLIENT_SILENCE_S = 30.0
# The longest silence of a gRPC stream.
STREAM_SILENCE_S = 600.0
# A change of the endpoint: longer than it may ask for, so that the endpoint reports the timeout.
CHANGE_S = 3800.0
# A replica that is stopped finishes its requests. The default of `EndpointSpec.drain_s`.
DRAIN_S = 70.0
# A request is sent again so often when replicas die.
NUM_RETRIES = 3
# The port of a replica that has ended is not given to another: a displaced HAProxy may still send a request again.
PORT_QUARANTINE_S = 300.0
# Every change of the replicas displaces HAProxy's process by a new one, and the displaced one ends with its last
# answer. All answers end by the limits above, and a stream may take as long as it speaks: so this is no limit, but
# about the most that HAProxy can count (23 days).
HARD_STOP_S = 2_000_000.0


def get_answer_s(hang_s: float) -> float:
    """How long HAProxy waits for an endpoint's answer: a request whose forward hangs has its 504 before the replica is
    killed, so it is not sent again and hangs no other replica."""
    return min(hang_s, ANSWER_S)
