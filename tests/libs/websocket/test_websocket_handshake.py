"""Which requests become connections: paths of policies, pages of other sites, tokens in addresses."""

import pytest

from shoal.libs.websocket.handshake import HandshakeRules

HERE = "127.0.0.1:8765"


def find_status(
    path: str = "/",
    host: str = HERE,
    origin: str | None = None,
    others: tuple[str, ...] = (),
    policy: str = "",
    origins: tuple[str, ...] = ("https://game.example",),
    is_tls: bool = False,
) -> int:
    """The HTTP status of the answer."""
    problem = HandshakeRules(policy, origins, is_tls).find_problem(path, host, origin, others)
    return 101 if problem is None else int(problem[0])


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        (None, HERE, 101),  # a program
        ("https://game.example", HERE, 101),  # of gateway.origins
        ("https://game.example:444", HERE, 403),
        ("https://other.example", HERE, 403),
        ("http://127.0.0.1:8000", HERE, 101),  # a page of this machine, of another port
        ("http://localhost:8000", "localhost:8765", 101),
        ("http://localhost:8000", HERE, 101),
        ("http://[::1]:8000", HERE, 101),
        ("http://10.0.0.7:8000", "10.0.0.7:8765", 101),  # no other site has this address
        ("http://10.0.0.8:8000", "10.0.0.7:8765", 403),
        ("http://10.0.0.7:8000", HERE, 403),
        ("http://evil.example", "evil.example:8765", 403),  # its name was made to mean this machine
        ("http://localhost.evil.example", HERE, 403),
        ("null", HERE, 403),
        ("", HERE, 403),
        ("http://[", HERE, 403),
        ("http://127.0.0.1", "[", 403),
        ("http://", "", 403),
    ],
)
def test_pages_of_other_sites_are_rejected(origin: str | None, host: str, status: int) -> None:
    assert find_status(origin=origin, host=host) == status


def test_a_certificate_proves_the_name_of_an_address() -> None:
    assert find_status(origin="https://game.org", host="game.org:8765", is_tls=True) == 101
    assert find_status(origin="https://other.org", host="game.org:8765", is_tls=True) == 403


def test_a_page_opened_as_a_file_may_connect_where_null_is_listed() -> None:
    assert find_status(origin="null", origins=("null",)) == 101


def test_a_token_in_the_address_is_rejected_without_repeating_it() -> None:
    for path in ("/?token=secret", "/?a=1&token=", "/?access_token=secret"):
        problem = HandshakeRules("", (), False).find_problem(path, HERE, None, ())
        assert problem is not None
        assert (int(problem[0]), "secret" in problem[1], "hello" in problem[1]) == (400, False, True)
    assert find_status("/?version=3") == 101


def test_one_policy_is_at_the_root_and_its_name_and_several_at_their_names() -> None:
    assert [find_status(path, policy="pong") for path in ("/", "/pong", "/pong/", "", "/pong?a=1")] == [101] * 5
    assert find_status("/tennis", policy="pong") == 404
    several = {"policy": "left", "others": ("right", "goal keeper")}
    assert [find_status(path, **several) for path in ("/left", "/right", "/goal%20keeper")] == [101] * 3  # type: ignore[arg-type]
    problem = HandshakeRules("left", (), False).find_problem("/", HERE, None, ("right",))
    assert problem is not None
    assert problem[1].endswith("connect to /left or /right")
