"""What routers and controllers of other projects send is answered as they read it.

Their exchanges lie in `tests/support/exchanges/`. They were written by hand from the sources that
each file names: what is sent, and what of the answer is read.
"""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_api import MakeWorld, Web, make_world
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["make_world"]

EXCHANGES = sorted((Path(__file__).parents[1] / "support/exchanges").glob("*.json"))
KINDS = {"gauges": "gauge", "counters": "counter", "histograms": "histogram"}


@pytest.mark.parametrize("path", EXCHANGES, ids=lambda path: path.stem)
async def test_what_others_read(path: Path, make_world: MakeWorld) -> None:
    world = make_world(api_keys=())
    folder = world.adapter("new", "abc")
    web = Web(world)
    assert (await web.load("sql", world.adapter("sql", "x"))).status_code == 200
    for step in json.loads(path.read_text().replace("{folder}", folder))["steps"]:
        send = step["send"]
        answer = await web.http.request(
            send["method"], send["path"], headers=send.get("headers"), json=send.get("body")
        )
        assert answer.status_code in step["status"], answer.text
        if send["path"] == "/metrics":
            check_metrics(step, answer.text)
        elif step.get("stream_ends_with_usage"):
            *_, last, done = [e for e in answer.text.split("\n\n") if e]
            assert done == "data: [DONE]"
            assert json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"]
        else:
            check_json(step, answer)
    await web.unload("sql")


def check_metrics(step: dict[str, Any], text: str) -> None:
    families = list(text_string_to_metric_families(text))
    kinds = {family.name: family.type for family in families}
    for field, kind in KINDS.items():
        for name in step.get(field, ()):
            # Parsers leave out the suffix that each counter has.
            assert kinds[name.removesuffix("_total")] == kind, name
    samples = [sample for family in families for sample in family.samples]
    for name, wanted in step.get("labels", {}).items():
        found = [sample.labels for sample in samples if sample.name == name]
        assert found, name
        for label, form in wanted.items():
            assert all(form != "integer" or labels[label].isdecimal() for labels in found)
            assert all(label in labels for labels in found), label
    for name in step.get("one_series", ()):
        assert sum(sample.name == name for sample in samples) == 1


def check_json(step: dict[str, Any], answer: httpx.Response) -> None:
    if {"lists", "lacks", "cards"} & step.keys():
        cards = {card["id"]: card for card in answer.json()["data"]}
        assert set(step.get("lists", ())) <= cards.keys()
        assert not set(step.get("lacks", ())) & cards.keys()
        for name, fields in step.get("cards", {}).items():
            assert fields.items() <= cards[name].items()
    for place, wanted in step.get("fields", {}).items():
        value = reduce(lambda part, key: part[key], place.split("."), answer.json())
        assert value == wanted if wanted is not None else value is not None
