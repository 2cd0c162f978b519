"""Rows as they are, through a whole replica: each version by its own encoder, errors by field, drift by column."""

import asyncio
import csv
import io
import re
from typing import Any

import msgspec
import pytest

from serving.replica_set import Asked, ask, serving_one
from serving.table_model import COLUMNS, ROW, register
from shoal.cli.display.serve_display import format_plain_lines
from shoal.client import EndpointStatus
from shoal.serve.protocol import prometheus
from shoal.serve.replica.replica import EndpointReplica
from shoal.serve.spec.model_options import GuardOptions

ANSWER = {"plan_name": "basic", "charge": 172.0, "share": {"no": 0.25, "yes": 0.75}}


async def ask_rows(replica: EndpointReplica, rows: object, path: str = "", **headers: str) -> Asked:
    return await ask(replica, "POST", f"/v2/models/charges{path}/rows", rows, **headers)


async def test_a_row_is_answered_by_an_object_and_a_list_by_a_list() -> None:
    register("basic", "plus", aliases=("champion",))
    async with serving_one("charges") as (_, replica):
        answer = await ask_rows(replica, ROW)
        assert (answer.status, answer.version, answer.body) == (200, 1, ANSWER)
        others = [{**ROW, "plan": "plus", "balance": 1}, {**ROW, "age": None, "plan": None, "active": 0}]
        answer = await ask_rows(replica, others)
        assert [each["charge"] for each in answer.body] == [1272.0, 50.0]
        assert answer.body[1]["plan_name"] == ""
        answer = await ask(replica, "GET", "/v2/models/charges")
        assert {each["name"]: each.get("kind") for each in answer.body["inputs"]} == COLUMNS
        # Columns as tensors: null is a gap, as in a row.
        data = {"age": [72.0], "plan": ["basic"], "since": [1748649600.0], "active": [1.0], "balance": [None]}
        tensors = [
            {"name": name, "datatype": "BYTES" if kind == "word" else "FP64", "shape": [1], "data": data[name]}
            for name, kind in COLUMNS.items()
        ]
        answer = await ask(replica, "POST", "/v2/models/charges/infer", {"inputs": tensors})
        assert {each["name"]: each["data"] for each in answer.body["outputs"]}["charge"] == [172.0]


async def test_a_row_of_a_file_is_a_row_of_a_request_whatever_client_has_read_it() -> None:
    register("basic", "plus", "3", aliases=("champion",))
    lines = (
        "\ufeffage;customer;plan;since;active;balance;größe\n 72 ;1;basic;31.05.2025;yes;n/a;\n?;2; 3;-;;-;x\n72;3\n"
    )
    [first, gaps, short] = csv.DictReader(io.StringIO(lines), delimiter=";")
    async with serving_one("charges") as (_, replica):
        answer = await ask_rows(replica, first)
        assert (answer.status, answer.body) == (200, ANSWER)
        assert answer.headers[b"shoal-ignored-fields"] == b"customer, gr%C3%B6%C3%9Fe"
        assert (await ask_rows(replica, gaps)).body["charge"] == 350.0
        for plan in (3, 3.0):
            assert (await ask_rows(replica, {**gaps, "plan": plan, "age": None})).body["charge"] == 350.0
        assert (await ask_rows(replica, {**short, None: ["more"]})).body["plan_name"] == ""
        assert b"shoal-ignored-fields" not in (await ask_rows(replica, ROW)).headers


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in ROW.items() if name != field}


BAD: dict[str, tuple[object, int, str, str]] = {
    "unknown word": ({**ROW, "plan": "gold"}, 422, "plan", "plan = 'gold'.*one of basic, plus"),
    "missing field": (without("since"), 422, "since", "since.*is missing.*null"),
    "a day that is none, in another form": ({**ROW, "since": "31.02.2025"}, 422, "since", "is no date"),
    "a date that is none": ({**ROW, "since": "31/05/2025"}, 422, "since", "31/05/2025.*is no date.*2025-05-31"),
    "a day that is none": ({**ROW, "since": "2025-02-30"}, 422, "since", "is no date"),
    "a word for a number": ({**ROW, "age": "old"}, 422, "age", "age = 'old'.*is no number"),
    "a number in another form": ({**ROW, "age": "1.024,5"}, 422, "age", "is no number"),
    "a truth for a number": ({**ROW, "age": True}, 422, "age", "is no number"),
    "a number beyond float64": ({**ROW, "age": 10**400}, 422, "age", "is no number"),
    "a list for a word": ({**ROW, "plan": []}, 422, "plan", "is no word.*quotes"),
    "a word for a truth": ({**ROW, "active": "maybe"}, 422, "active", "is no truth"),
    "a list for a truth": ({**ROW, "active": []}, 422, "active", "is no truth"),
    "the second row": ([ROW, {**ROW, "age": {}}], 422, "age", "row 1 is no number"),
    "no rows": ([], 422, "", "expected 1 to 64 rows, got 0"),
    "too many rows": ([ROW] * 65, 422, "", "expected 1 to 64 rows, got 65"),
    "no object": ([[72]], 422, "row", "is no object.*age, plan"),
    "no JSON": (None, 400, "", "not a row"),
}


async def test_each_bad_row_is_refused_with_its_field_and_no_other_request_with_it() -> None:
    register("basic", "plus", aliases=("champion",))
    async with serving_one("charges") as (_, replica):
        asked = [ask_rows(replica, rows) for rows, *_ in BAD.values()]
        *refused, good = await asyncio.gather(*asked, ask_rows(replica, ROW))
        assert (good.status, good.body) == (200, ANSWER)
        for (name, (_, status, field, words)), answer in zip(BAD.items(), refused, strict=True):
            assert (answer.status, answer.body.get("field", "")) == (status, field), (name, answer.body)
            assert re.search(words, answer.body["error"]), (name, answer.body)


async def test_every_version_encodes_by_itself_through_canary_promotion_and_rollback() -> None:
    register("basic", "plus", aliases=("champion",))
    register("plus", "basic", "gold")
    guard = GuardOptions(max_latency_ratio=1e9)
    async with serving_one("charges@1", model={"guard": guard}) as (endpoint, replica):
        await endpoint.administer("canary", "charges", version=2, percent=50)
        assert (await ask_rows(replica, ROW, "/versions/1")).body["charge"] == 172.0
        assert (await ask_rows(replica, ROW, "/versions/2")).body["charge"] == 272.0
        assert (await ask_rows(replica, ROW, shoal_track="candidate")).version == 2
        gold = {**ROW, "plan": "gold"}
        assert (await ask_rows(replica, gold, "/versions/2")).status == 200
        assert (await ask_rows(replica, gold, "/versions/1")).body["field"] == "plan"
        await endpoint.administer("promote", "charges")
        assert (await ask_rows(replica, gold)).body["charge"] == 372.0
        await endpoint.administer("rollback", "charges")
        assert (await ask_rows(replica, gold)).body["field"] == "plan"
        assert (await ask_rows(replica, ROW)).body == ANSWER


@pytest.mark.parametrize("memory", [None, 1 << 20])  # of an endpoint with models on demand
async def test_what_training_has_not_seen_is_counted_by_version_and_column(memory: int | None) -> None:
    register("basic", "plus", aliases=("champion",))
    async with serving_one("charges", memory=memory) as (endpoint, replica):
        await ask_rows(replica, [ROW, {**ROW, "age": 101}, {**ROW, "plan": None}])
        await ask_rows(replica, {**ROW, "plan": "gold"})
        counted = replica.report().models["charges"].counts
        assert counted is not None  # the examples of the warm-up, which are all gaps, do not count
        found = {"age": {"beyond": 1}, "balance": {"gap": 3}, "plan": {"gap": 1, "unknown": 1}}
        assert counted.versions[1].columns == found
        endpoint.controller.report(replica.report())
        status = msgspec.convert(endpoint.status.describe_endpoint(), EndpointStatus)
        assert status.models[0].versions[0].columns == found
        lines = "\n".join(format_plain_lines(status, ""))
        assert "charges@1: gaps, and what training has not seen: balance 3 gap, plan 1 unknown" in lines
        text = prometheus.render([replica.report()]).decode()
        labels = 'model="charges",version="1",column="age",what="beyond",replica="r1"'
        assert f"shoal_column_values_total{{{labels}}} 1\n" in text
