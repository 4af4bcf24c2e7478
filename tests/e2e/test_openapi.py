"""`/openapi.json` against the server: whatever is sent, it answers, and as it says it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from http_api import World
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.python.asgi import shutdown_lifespans
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from toy_tokenizers import byte_level

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
SOME = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("openapi"), byte_level())
    yield made
    shutdown_lifespans()
    made.check()


@pytest.mark.parametrize("num_examples", [2, pytest.param(50, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_route_answers_as_described(
    world: World, mode: GenerationMode, num_examples: int
) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", world.app)
    # The characters are the same as UTF-8's, which hypothesis would take 2 s to find.
    schema.config.generation.codec = None
    tried = [_try(found.ok(), mode, num_examples) for found in schema.get_all_operations()]
    assert sum(tried) > num_examples * (12 if mode is GenerationMode.POSITIVE else 6)


def _try(operation: Any, mode: GenerationMode, num_examples: int) -> int:
    """Send what the description allows, or what it forbids. The number of requests."""
    if mode is GenerationMode.NEGATIVE and not operation.body:
        return 0
    num_sent = 0

    @settings(SOME, max_examples=num_examples)
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "base"  # any other is 404, and tells nothing
        case.call_and_validate(checks=CHECKS)

    send()
    return num_sent


def test_every_body_and_error_is_described(world: World) -> None:
    paths = world.app.openapi()["paths"]
    assert len(paths) > 12
    for name in ("chat/completions", "completions", "messages", "responses"):
        answers = paths[f"/v1/{name}"]["post"]["responses"]["200"]["content"]
        assert answers.keys() == {"application/json", "text/event-stream"}
    for path, item in paths.items():
        for method, operation in item.items():
            assert {"200", "4XX", "5XX"} <= set(operation["responses"]), path
            assert method != "post" or operation["requestBody"]["required"], path
