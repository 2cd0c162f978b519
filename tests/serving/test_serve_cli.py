"""`shoal serve` against an endpoint of this process: what it sends, what it shows, and what it says when it cannot."""

import json
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import shoal.runs
from serving.fake_host import FakeHost, FakeModel
from serving.served_here import TOKEN, served
from shoal.cli.display import serve_display
from shoal.client import Client, ConfigError
from shoal.client.endpoint_status import EndpointStatus, ModelStatus, ReplicaStatus, RolloutEvent, VersionStatus
from shoal.errors import InferenceError
from typed import complaint, draw_plain, said

NOW_S = 1_700_000_000.0
FASHION = ModelStatus(
    "fashion",
    reason="version 2 is not served: too slow",
    source="fashion@champion",
    stable=3,
    candidate=4,
    versions=[
        VersionStatus(4, "candidate", 0.1, 1340, 2, 134.2, 0.0013, 0.0051, 900, 4),
        VersionStatus(3, "stable", 0.9, 123_456, 0, 1204.3, 0.0012, 0.0048),
    ],
    queued_rows=12,
    max_queued_rows=2048,
    batch_rows=11.2,
    max_batch_rows=32,
    refused=7,
    latency=[(1, 0.0205), (32, 0.036)],
)
LOADING = ModelStatus("syntax", state="LOADING", reason="warming up")
STATUS = EndpointStatus(
    "shop",
    time=NOW_S,
    started_at=NOW_S - 754,
    generation=7,
    window_s=10.0,
    grpc="127.0.0.1:9000",
    replicas=[ReplicaStatus("r-1", 11, 7), ReplicaStatus("r-2", 12, 6, True, "version 4 does not fit")],
    models=[FASHION, LOADING],
    events=[RolloutEvent(NOW_S - 9, "canary", "fashion", 4, "10 %", "administrator")],
)


class Host(FakeHost):
    """Says what an endpoint says of itself, and answers a change as its controller does."""

    async def status(self) -> dict[str, Any]:
        return dict(msgspec.to_builtins(STATUS))

    async def administer(self, change: Mapping[str, Any], *caller: object) -> dict[str, Any]:
        await super().administer(change, *caller)
        return dict(msgspec.to_builtins(FASHION))


@pytest.fixture(scope="module")
def host() -> Host:
    return Host(FakeModel("fashion"))


@pytest.fixture(scope="module")
def url(host: Host) -> Iterator[str]:
    with served(host) as (found, _):
        yield found


@pytest.fixture
def recorded(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The endpoint in the run record, as `shop`, and the token."""
    monkeypatch.setenv("SHOAL_TOKEN", TOKEN)
    with shoal.runs.create("serve", "", "the-run") as recorder:
        recorder.record_endpoint("shop", "inference", url, "ready")
        recorder.record_endpoint("gateway", "gateway", "tcp://127.0.0.1:1", "ready")
        yield url


def lines(line: str, *words: str) -> list[str]:
    return said(f"serve {line}", *words).strip().splitlines()


def test_status_of_an_endpoint_that_sleeps() -> None:
    status = EndpointStatus("shop", asleep=True)
    line = "shop: asleep at http://h, replicas none until the next request"
    assert serve_display.format_plain_lines(status, "http://h") == [line]
    assert "asleep" in drawn(status, 80)


@pytest.mark.parametrize(("source", "followed"), [("m@champion", True), ("m@3", False), ("m", False)])
def test_only_what_can_move_is_said_to_be_followed(source: str, followed: bool) -> None:
    status = EndpointStatus("shop", models=[ModelStatus("m", source=source, stable=3, versions=[VersionStatus(3)])])
    assert ("follows" in serve_display.format_plain_lines(status, "")[1]) is followed
    assert ("follows" in drawn(status, 80)) is followed


def test_an_endpoint_is_found_by_name_and_by_address(recorded: str) -> None:
    for word in ("shop", recorded):
        assert msgspec.json.decode(said(f"serve status {word} --json"), type=EndpointStatus) == STATUS


@pytest.mark.parametrize("options", ["", "--once", "--once --interval-s 0.1"])
def test_status_is_printed_once(recorded: str, options: str) -> None:
    assert said(f"serve status {options}").count("fashion@3") == 1


def test_status_follows_until_ctrl_c(recorded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([None, None])

    def sleep(seconds: float) -> None:
        if next(looks, "over") == "over":
            raise KeyboardInterrupt

    clock = SimpleNamespace(sleep=sleep, strftime=time.strftime, localtime=time.localtime)
    monkeypatch.setattr("shoal.cli.commands.serve.time", clock)  # others sleep too, and go on
    found = lines("status --follow")
    assert sum("fashion@3" in line for line in found) == 3


def test_looking_outlasts_an_endpoint_that_is_away(recorded: str, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the night in which its lines were to be kept."""
    answers = iter([EndpointStatus("shop"), InferenceError(503, "the controller is away"), EndpointStatus("again")])

    def status(client: Client) -> EndpointStatus:
        answer = next(answers, KeyboardInterrupt())
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(Client, "status", status)
    found = lines("status --interval-s 0.1")
    assert [line.partition(" ")[2].partition(" at ")[0] for line in found] == [
        "shop: ready",
        "the controller is away",
        "again: ready",
    ]


def drawn(status: EndpointStatus, width: int, note: str = "", url: str = "http://127.0.0.1:8000") -> str:
    return draw_plain(serve_display.render(status, url, note), width)


def test_the_picture_has_its_address_as_it_is() -> None:
    assert "http://[fe80::1]:8000" in drawn(STATUS, 120, url="http://[fe80::1]:8000")


def test_an_endpoint_that_says_little_is_shown_too() -> None:
    status = EndpointStatus("shop", models=[ModelStatus("m", versions=[VersionStatus(1)])])
    assert serve_display.format_plain_lines(status, "")[1].startswith(
        "m@1 loaded: share 0%, requests/s 0, p50 -, p99 -"
    )
    assert "1 loaded" in drawn(status, 80)


@pytest.mark.parametrize(
    ("line", "change"),
    [
        ("canary fashion@4", {"action": "canary", "version": "4", "percent": 10.0}),
        ("canary fashion --percent 20", {"action": "canary", "percent": 20.0}),
        ("canary fashion@candidate --percent 0", {"action": "canary", "version": "candidate", "percent": 0.0}),
        ("promote fashion", {"action": "promote"}),
        ("promote fashion@4", {"action": "promote", "version": "4"}),
        ("rollback fashion", {"action": "rollback", "from_version": 4}),
        (
            "rollback fashion --from 3 --reason shoes",
            {"action": "rollback", "from_version": 3, "reason": "shoes"},
        ),
        ("rollback fashion --to 412", {"action": "rollback", "version": 412}),
        ("shadow fashion@4 --percent 20", {"action": "shadow", "version": "4", "percent": 20.0}),
        ("delete --model fashion", {"action": "delete", "timeout_s": 60.0}),
        ("delete --model fashion --timeout-s 600", {"action": "delete", "timeout_s": 600.0}),
    ],
)
def test_changes_are_sent_as_they_were_asked_for(recorded: str, host: Host, line: str, change: dict[str, Any]) -> None:
    lines(line)
    assert host.changes[-1] == {"model": "fashion", **change}


@pytest.mark.parametrize(
    ("model", "left"),
    [
        (ModelStatus("fashion", stable=3), {"from_version": 3}),
        (ModelStatus("fashion", pinned=41), {"from_version": 41}),
        (ModelStatus("fashion", pinned=41, newest_percent=10.0), {}),  # the newest has not come yet
        (ModelStatus("fashion", pinned=41, newest_percent=10.0, candidate=57), {"from_version": 57}),
        (ModelStatus("fashion", versions=[VersionStatus(41, "stable", 1.0)]), {}),  # it follows a run
        (ModelStatus("another", stable=3), {}),
    ],
)
def test_a_rollback_says_what_it_leaves_where_that_does_not_change_by_itself(
    recorded: str, host: Host, monkeypatch: pytest.MonkeyPatch, model: ModelStatus, left: dict[str, int]
) -> None:
    monkeypatch.setattr(Client, "status", lambda client: EndpointStatus("shop", models=[model]))
    lines("rollback fashion")
    assert host.changes[-1] == {"action": "rollback", "model": "fashion", **left}


def test_a_rollback_says_what_the_alias_had_come_to_mean(
    recorded: str, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = ModelStatus("fashion", source="fashion@champion", stable=2, candidate=4)
    monkeypatch.setattr(Client, "status", lambda client: EndpointStatus("shop", models=[canary]))
    assert lines("rollback fashion")[1:] == ["fashion@champion had come to mean version 3, which is followed now"]


def test_a_model_is_added_to_an_endpoint_that_is_up(recorded: str, host: Host) -> None:
    lines("deploy fashion --into shop")
    assert host.changes[-1] == {"model": "fashion", "action": "deploy", "timeout_s": 120.0}
    lines("deploy fashion --into shop --timeout-s 600")
    assert host.changes[-1] == {"model": "fashion", "action": "deploy", "timeout_s": 600.0}


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ("deadline_s=0.1", {"options": {"deadline_s": 0.1}}),
        (
            "guard.min_requests=9 guard.metric=accuracy precision=bf16 --reason fast --timeout-s 9",
            {
                "options": {"guard": {"min_requests": 9, "metric": "accuracy"}, "precision": "bf16"},
                "reason": "fast",
                "timeout_s": 9.0,
            },
        ),
    ],
)
def test_options_are_sent_as_they_were_set(recorded: str, host: Host, options: str, change: dict[str, Any]) -> None:
    lines(f"set fashion {options}")
    assert host.changes[-1] == {"model": "fashion", "action": "set", "timeout_s": 120.0, **change}


def test_models_are_added_with_options_of_all_and_of_one(
    recorded: str, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = host.get_model("fashion")
    monkeypatch.setattr(host, "get_model", lambda name: there)
    options = "endpoint.model.deadline_s=0.1 endpoint.models.fashion.precision=bf16"
    lines(f"deploy fashion@3 text --into shop {options}")
    assert host.changes[-2:] == [
        {
            "model": "fashion@3", "action": "deploy", "timeout_s": 120.0,
            "options": {"deadline_s": 0.1, "precision": "bf16"},
        },
        {"model": "text", "action": "deploy", "timeout_s": 120.0, "options": {"deadline_s": 0.1}},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rollback fashion@3", "names a version, where the whole model is meant. write fashion"),
        ("canary nobody@3", "there is no model 'nobody'"),
        ("canary 'fash ion@3'", "is not a name"),
        ("status nothing", "there is no endpoint 'nothing': there is shop (http://127.0.0.1:"),
        ("status ftp://x", "is not the address of an endpoint"),
        ("deploy", "there is nothing to serve"),
        ("deploy nobody", "there is no model 'nobody'"),
        ("deploy nobody --into shop a=b", "a = 'b': no such field"),
        ("deploy m --into shop --port 5555", "port = 5555: is of an endpoint that is deployed anew"),
        (
            "deploy m --into shop --allow-origin '*'",
            "allow-origin = '[\"*\"]': is of an endpoint that is",
        ),
        ("set fashion deadlin_s=1", "deadlin_s = 1: no such field"),
        ("set fashion deadline_s", "is not of the form a.b=c"),
        ("set fashion@3 deadline_s=1", "names a version, where the whole model is meant"),
        ("deploy --into shop endpoint.model.deadline_s=1", "into = 'shop': needs a model"),
        ("deploy m --into shop endpoint.num_replicas=3", "'endpoint.num_replicas': is a field of an"),
        ("deploy m --into shop endpoint.models.n.finite=off", "'endpoint.models.n': is not among the"),
        ("deploy m --into shop models=n", "'models': is a field of an endpoint that is deployed anew"),
        ("deploy a.yaml b.yaml", "is a second file"),
        ("deploy a.yaml", "cannot be read"),
        ("deploy m endpoint.token=x", "set $SHOAL_TOKEN"),
        ("deploy m@1 m@2", "m is there twice"),
        ("delete URL", "is an address, and endpoints are ended by name"),
        ("delete", "no cluster is up"),
        ("simulate", "one of a model and --latency is needed"),
        ("simulate nobody", "is not served by shop. models: fashion, syntax"),
        ("simulate syntax", "has no measured forward yet"),
        ("simulate --latency 1=2", "is not ROWS:SECONDS"),
        ("simulate --latency 1:0.1,8:nan", "latency = '1:0.1,8:nan': rows and seconds must be above zero"),
    ],
)
def test_what_cannot_be_is_said_with_a_remedy(recorded: str, line: str, message: str) -> None:
    assert message in complaint(f"serve {line.replace('URL', recorded)}")


def test_without_an_endpoint_it_says_how_to_have_one() -> None:
    assert "no endpoint is up: `shoal serve deploy MODEL` starts one" in complaint("serve status")
    with shoal.runs.create("serve", "") as recorder:
        recorder.record_endpoint("gone", "inference", "http://127.0.0.1:1", "closed")
        assert "no endpoint is up" in complaint("serve status")
        recorder.record_endpoint("left", "inference", "http://127.0.0.1:1", "ready")
    assert "no endpoint is up" in complaint("serve status")  # whoever kept it up is no more


def test_of_several_endpoints_the_one_that_serves_the_model_is_meant(recorded: str) -> None:
    with shoal.runs.create("serve", "") as recorder:
        recorder.record_endpoint("other", "inference", "http://127.0.0.1:1", "ready")
        assert "several endpoints are up: give --endpoint NAME" in complaint("serve promote unserved")
        assert lines("promote fashion")
        recorder.record_endpoint("twin", "inference", recorded.replace("127.0.0.1", "localhost"), "ready")
        assert "several endpoints are up: give --endpoint NAME" in complaint("serve promote fashion")
        assert lines("promote fashion --endpoint shop")


def test_the_token_goes_to_no_other_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.client.discovery import token_for

    monkeypatch.setenv("SHOAL_TOKEN", TOKEN)
    assert token_for("http://127.0.0.1:8000") == token_for("http://[::1]:1") == token_for("http://localhost:2") == TOKEN
    assert token_for("http://example.com:8000") == token_for("http://10.0.0.7") == ""


@pytest.mark.parametrize(
    "word",
    [
        *("http://[::1", "http://localhost:abc", "http://h:80:90", "http://h:0", "http://h:65536", "http://[v1.a]:80"),
        *("http://a..b", "http://a b", "http://a\nb", "http://h?x", "http://h#@127.0.0.1", "http://\udcff", "ftp://h"),
        *("http://h\\@127.0.0.1", "http://" + 64 * "a", "::", ":80"),
    ],
)
def test_what_is_no_address_is_refused_wherever_it_is_asked_for(word: str) -> None:
    from shoal.client.discovery import find_endpoint, token_for

    for ask in (find_endpoint, token_for, Client):
        with pytest.raises(ConfigError, match="is not the address of an endpoint"):
            ask(word)


@pytest.mark.parametrize(
    ("word", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("[::1]:8000/", "http://[::1]:8000"),
        ("HTTP://LOCALHOST:8000", "HTTP://LOCALHOST:8000"),
        ("https://h.example/shoal//", "https://h.example/shoal"),
    ],
)
def test_an_address_may_be_short_or_have_a_path(word: str, url: str) -> None:
    from shoal.client.discovery import find_endpoint

    assert find_endpoint(word).url == url


def test_a_load_is_simulated_from_what_was_measured(recorded: str) -> None:
    rates, alone = "--rate 200 --rate 1000 --requests 2000 --json", "--latency 1:0.0205,32:0.036 --max-batch 32"
    given = f"{alone} --replicas 2"
    live = json.loads(said(f"serve simulate fashion {rates}"))
    assert json.loads(said(f"serve simulate {given} {rates}")) == live
    assert live["capacity_per_s"] == pytest.approx(2 * 32 / 0.036)
    low, high = live["loads"]
    assert 0.0205 < low["p50_s"] < high["p50_s"]
    assert (low["refused"], high["refused"]) == (0, 0)
    [load] = json.loads(said(f"serve simulate {alone} --rate 500 --requests 2000 --json"))["loads"]
    assert load["p50_s"] == high["p50_s"]
    table = lines(f"simulate {given} --deadline 0.1 --requests 500")
    assert "within 0.1 s" in table[0]
    assert len(table) == 1 + 6 + 1
    assert table[-1].startswith("forwards of 2 replicas take 1,778 requests/s")
    assert table[-1].endswith("what parsing and sending take comes on top")
    assert "guess" in lines("simulate --latency 1:0.001 --requests 100")[-1]
