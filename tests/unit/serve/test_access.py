"""Who may call an endpoint: keys, models, rates; and that nothing shows a key."""

import pickle
import time
from datetime import UTC, date, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from shoal.errors import ConfigError, InferenceError
from shoal.serve.messages.auth_failures import AuthFailure
from shoal.serve.protocol.access import AccessControl
from shoal.serve.spec.api_key import ADMINISTRATOR, ANYONE, ApiKey, hash_bytes
from shoal.serve.spec.endpoint import EndpointSpec

TOKEN = "the-token"
KEY = "key-of-ada"
OTHER = "key-of-bob"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def hash_key(key: str) -> str:
    return f"sha256:{hash_bytes(key.encode()).hex()}"


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


def api_key(name: str, key: str, models: tuple[str, ...] = (), rate: float | None = None, burst: int = 10) -> ApiKey:
    return ApiKey(name=name, key=SecretStr(key), models=list(models), requests_per_s=rate, burst=burst)


def refusal(
    access: AccessControl, authorization: bytes, model: str | None = None, administrator: bool = False
) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        access.admit(authorization, model, administrator=administrator)
    return caught.value


def ask_until_refused(access: AccessControl) -> float:
    """When to come again, in seconds."""
    with pytest.raises(InferenceError) as caught:  # noqa: PT012
        while True:
            access.admit(bearer(KEY))
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


@pytest.mark.parametrize(
    ("token", "keys", "authorization", "model", "administrator", "expected"),
    [
        (None, [], b"", "any", True, ANYONE),
        (TOKEN, [KEY], bearer(TOKEN), "m", True, ADMINISTRATOR),
        *((TOKEN, [KEY], f"{scheme} {KEY}".encode(), "m", False, "ada") for scheme in ("Bearer", "bearer", "BEARER")),
        (TOKEN, [KEY], bearer(KEY), None, False, "ada"),  # what belongs to no model
        (TOKEN, [KEY], bearer(KEY), None, True, 403),
        (TOKEN, [KEY], bearer(KEY), "o", False, 403),
        (None, [KEY], b"", None, False, 401),
        (None, [KEY], bearer(KEY), None, True, 403),
    ],
)
def test_a_token_is_the_administrators_and_a_key_is_for_its_holder_and_models(
    token: str | None,
    keys: list[str],
    authorization: bytes,
    model: str | None,
    administrator: bool,
    expected: str | int,
) -> None:
    access = AccessControl(token, [api_key("ada", each, models=("m", "n")) for each in keys])
    if isinstance(expected, str):
        assert access.admit(authorization, model, administrator=administrator).name == expected
    else:
        assert refusal(access, authorization, model, administrator).status == expected


@pytest.mark.parametrize(
    "authorization",
    [b"", b"Bearer", b"Bearer ", bearer("wrong"), KEY.encode(), b"Basic " + KEY.encode(), b"Bearer \xff\xfe",
     bearer(KEY[:-1]), bearer(KEY + "x"), bearer(hash_key(KEY))],
)  # fmt: skip
def test_whoever_shows_no_known_key_is_refused(authorization: bytes) -> None:
    error = refusal(AccessControl(TOKEN, [api_key("ada", KEY)]), authorization)
    assert error.status == 401
    assert "Bearer" in str(error)


def test_a_spec_may_hold_the_hash_of_a_key() -> None:
    assert AccessControl(None, [api_key("ada", hash_key(KEY))]).admit(bearer(KEY)).name == "ada"
    written = hash_key(KEY).upper().replace("SHA256", "sha256")  # as some programs print it
    access = AccessControl(None, [api_key("ada", written)])
    assert access.admit(bearer(KEY)).name == "ada"
    assert refusal(access, bearer(written)).status == 401


@pytest.mark.parametrize("is_known", [False, True])  # to the cache of headers, before it expires
def test_a_key_is_unknown_from_the_second_at_which_it_expires(is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    key = ApiKey.parse({"name": "ada", "key": KEY, "expires": "2027-01-31"})
    border_s = datetime(2027, 1, 31, tzinfo=UTC).timestamp()
    access = AccessControl(TOKEN, [key, api_key("bob", OTHER)])
    monkeypatch.setattr(time, "time", lambda: border_s - 0.001)
    if is_known:
        assert access.admit(bearer(KEY), "m").name == "ada"
    monkeypatch.setattr(time, "time", lambda: border_s)
    error = refusal(access, bearer(KEY), "m")
    assert (error.status, str(error)) == (
        401,
        "the key 'ada' has expired at 2027-01-31T00:00:00+00:00: another is required",
    )
    with pytest.raises(InferenceError, match="has expired"):
        access.require_known_key(bearer(KEY))
    assert [access.admit(bearer(each)).name for each in (OTHER, TOKEN)] == ["bob", ADMINISTRATOR]
    assert access.counts()["ada"] == {"expired": 2} | ({"admitted": 1} if is_known else {})
    assert (access.get_auth_failures()[0].by, access.get_auth_failures()[0].status) == ("ada", 401)


def test_the_end_of_a_key_is_a_date_a_time_or_a_duration_and_stays_where_it_was() -> None:
    def parse(expires: object) -> ApiKey:
        return ApiKey.parse({"name": "ada", "key": KEY, "expires": expires})

    for expires, written in [
        (None, "null"),
        (date(2027, 1, 31), '"2027-01-31T00:00:00Z"'),  # as YAML reads it
        (datetime(2027, 1, 31, 7, tzinfo=UTC), '"2027-01-31T07:00:00Z"'),
        ("2027-01-31T18:00+01:00", '"2027-01-31T18:00:00+01:00"'),
    ]:
        assert f'"expires":{written}' in parse(expires).model_dump_json()
    before_s = time.time()
    first = parse("30d")
    assert first.expires is not None
    assert before_s - 1 <= first.expires.timestamp() - 30 * 86_400 <= time.time()
    assert parse(first.model_dump(mode="json")["expires"]).expires == parse(first.expires).expires == first.expires
    assert parse("20270131").expires == parse("2027-01-31").expires
    for wrong in ("soon", "", [30], 30):
        with pytest.raises(ConfigError, match="expires = "):
            parse(wrong)


@pytest.mark.parametrize("written", ["sha256:zz", hash_key(KEY)[:-1], hash_key(KEY) + "0", "SHA256:"])
def test_what_should_be_a_hash_and_is_none_is_no_key_by_itself(written: str) -> None:
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        ApiKey.parse({"name": "ada", "key": written})


def test_a_key_over_its_rate_hears_when_to_come_again() -> None:
    clock = Clock()
    access = AccessControl(None, [api_key("ada", KEY, rate=2.0, burst=3)], clock=clock)
    for _ in range(3):
        access.admit(bearer(KEY))
    error = refusal(access, bearer(KEY))
    assert (error.status, error.retry_after_s) == (429, 0.5)
    clock.now_s += 0.25
    assert refusal(access, bearer(KEY)).retry_after_s == 0.25
    clock.now_s += 0.25
    access.admit(bearer(KEY))
    assert refusal(access, bearer(KEY)).status == 429


def test_tokens_of_texts_are_admitted_by_the_minute_and_owed_ones_are_waited_for() -> None:
    clock = Clock()
    key = ApiKey(name="ada", key=SecretStr(KEY), input_tokens_per_min=600, output_tokens_per_min=60)
    access = AccessControl(None, [key], clock=clock, replicas=lambda: 2)  # 5 and 0.5 a second here
    caller = access.admit(bearer(KEY))

    def wait_for(num_input: int) -> float | None:
        with pytest.raises(InferenceError) as caught:
            access.admit_tokens(caller, num_input)
        assert caught.value.status == 429
        return caught.value.retry_after_s

    read, written = access.admit_tokens(caller, 1000)  # above a minute's worth: all of it
    read.add(1000)
    assert wait_for(1) == pytest.approx((700 + 1) / 5)
    clock.now_s += 141
    access.admit_tokens(caller, 1)
    for _ in range(40):  # an answer is not cut, and the next one waits
        written.add()
    assert wait_for(1) == pytest.approx((40 - 30) / 0.5)
    clock.now_s += 20
    access.admit_tokens(caller, 1)
    assert access.count_tokens() == {"ada": {"input": 1000, "output": 40}}
    assert access.counts()["ada"]["limited"] == 2


def test_what_a_key_may_not_do_costs_it_nothing() -> None:
    access = AccessControl(None, [api_key("ada", KEY, models=("m",), rate=1.0, burst=1)], clock=Clock())
    assert refusal(access, bearer(KEY), "other").status == 403
    access.admit(bearer(KEY), "m")


@given(
    num_replicas=st.integers(1, 9),
    rate=st.floats(0.5, 100.0),
    burst=st.integers(1, 40),
    steps_s=st.lists(st.floats(0.0, 2.0), max_size=12),
)
def test_all_replicas_together_keep_to_the_rate_and_give_all_of_it(
    num_replicas: int, rate: float, burst: int, steps_s: list[float]
) -> None:
    """The module's bound, against callers who ask every replica until it refuses."""
    clock = Clock()
    key = api_key("ada", KEY, rate=rate, burst=burst)
    replicas = [AccessControl(None, [key], replicas=lambda: num_replicas, clock=clock) for _ in range(num_replicas)]
    admitted = 0
    for step_s in [0.0, *steps_s]:
        clock.now_s += step_s
        for access in replicas:
            before = access.counts().get("ada", {}).get("admitted", 0)
            wait_s = ask_until_refused(access)
            admitted += access.counts()["ada"].get("admitted", 0) - before
            assert 0.0 < wait_s <= num_replicas / rate + 1e-6
    elapsed_s = sum(steps_s)
    assert admitted <= rate * elapsed_s + max(burst, num_replicas) + 1e-6
    if all(step_s * rate <= burst - num_replicas for step_s in steps_s):  # no bucket overflows
        assert admitted >= rate * elapsed_s + burst - num_replicas - 1e-6


def test_fewer_replicas_have_larger_shares() -> None:
    clock, num_replicas = Clock(), 4
    access = AccessControl(None, [api_key("ada", KEY, rate=4.0, burst=4)], replicas=lambda: num_replicas, clock=clock)
    access.admit(bearer(KEY))
    assert refusal(access, bearer(KEY)).retry_after_s == 1.0
    num_replicas = 1
    assert refusal(access, bearer(KEY)).retry_after_s == 0.25


def test_names_and_keys_are_unique() -> None:
    with pytest.raises(ConfigError, match="is taken"):
        AccessControl(None, [api_key("ada", KEY), api_key("ada", OTHER)])
    with pytest.raises(ConfigError, match="is taken"):
        AccessControl(None, [api_key(ADMINISTRATOR, KEY)])
    for same in (KEY, hash_key(KEY)):
        with pytest.raises(ConfigError, match="same key as 'ada'") as caught:
            AccessControl(None, [api_key("ada", KEY), api_key("bob", same)])
        assert KEY not in str(caught.value)
    with pytest.raises(ConfigError, match="same key as 'administrator'"):
        AccessControl(KEY, [api_key("ada", KEY)])


@pytest.mark.parametrize("token", ["", " "])
def test_an_empty_token_opens_nothing(token: str) -> None:
    with pytest.raises(ConfigError, match=r"token = .*is empty"):
        AccessControl(token, [])


def test_counts_are_by_name() -> None:
    access = AccessControl(TOKEN, [api_key("ada", KEY, models=("m",), rate=1.0, burst=1)], clock=Clock())
    access.admit(bearer(KEY), "m")
    access.admit(bearer(TOKEN))
    for authorization, model in [(b"", None), (bearer("x"), None), (bearer(KEY), "m"), (bearer(KEY), "o")]:
        refusal(access, authorization, model)
    assert access.counts() == {
        "": {"unknown": 2},
        "ada": {"admitted": 1, "limited": 1, "forbidden": 1},
        ADMINISTRATOR: {"admitted": 1},
    }


def test_no_key_is_kept_or_shown() -> None:
    access = AccessControl(TOKEN, [api_key("ada", KEY)])
    access.admit(bearer(KEY))
    kept = pickle.dumps({**vars(access), "_replicas": None, "_clock": None})
    errors = " ".join(str(refusal(access, bearer(KEY + "x"), "m")) for _ in range(2))
    for secret in (KEY, TOKEN):
        assert secret.encode() not in kept
        assert secret not in errors
        assert secret not in repr(vars(access))


SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "values",
    [
        {"token": f"{SECRET} with blanks"},
        {"token": [SECRET]},
        {"token": SECRET, "scale": {"max": 3}, "num_replicas": 2},
        {"nmae": "x", "token": SECRET},
        {"keys": SECRET},
        {"keys": [SECRET]},
        {"keys": {"name": "ada", "key": SECRET}},
        {"keys": [{"key": SECRET}]},
        {"keys": [{"name": "ada", "key": SECRET, "burst": 0}]},
        {"keys": [{"name": "ada", "key": SECRET, "no_such": 1}]},
        {"keys": [{"name": "ada", "key": f"{SECRET}\n"}]},
        {"keys": [{"name": "ada", "key": SECRET}, {"name": "bob", "key": SECRET}]},
        {"keys": [{"name": "administrator", "key": SECRET}]},
        {"token": SECRET, "keys": [{"name": "ada", "key": SECRET}]},
    ],
)
def test_no_complaint_about_a_spec_shows_a_secret(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        EndpointSpec.parse({"name": "digits", **values})
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value.value)


def test_refusals_are_kept_by_key_with_the_last_of_them() -> None:
    access = AccessControl(TOKEN, [api_key("ada", KEY, models=("m",))])
    for number in range(3):
        for shown in (b"", bearer(OTHER)):
            with pytest.raises(InferenceError):
                access.admit(shown, f"m{number}", origin=b"10.0.0.%d" % number)
    with pytest.raises(InferenceError):
        access.admit(bearer(KEY), administrator=True, origin=b"\xff" * 1000)
    access.admit(bearer(KEY), "m", origin=b"elsewhere")
    unknown, ada = access.get_auth_failures()
    assert (unknown.by, unknown.status, unknown.count) == ("", 401, 6)
    assert (unknown.origin, unknown.model) == ("10.0.0.2", "m2")
    assert (ada.by, ada.status, ada.count, ada.model) == ("ada", 403, 1, "")
    assert ada.origin == "\xff" * 300
    with pytest.raises(InferenceError):
        access.admit(bearer(KEY), "n" * 10_000)
    assert access.get_auth_failures()[1] == AuthFailure("ada", 403, 2, "", "n" * 300)


def test_calls_over_their_rate_and_of_anyone_are_no_refusals() -> None:
    access = AccessControl(None, [api_key("ada", KEY, rate=1.0, burst=1)])
    ask_until_refused(access)
    assert access.get_auth_failures() == ()
