"""`/v1/embeddings`, `/score` and `/rerank`."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_api import MakeWorld, Web, World, make_world
from safetensors.numpy import save_file
from toy_tokenizers import byte_level

from weft.core.errors import ConfigError
from weft.serving.embedding import EmbeddingRule, embedding_rule

__all__ = ["make_world"]

RAW = EmbeddingRule(normalize=False)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """For requests that are refused, and so leave nothing behind."""
    folder = tmp_path_factory.mktemp("world")
    made = World(folder, byte_level(), max_prompts=3, strict_fields=True)
    yield made
    assert not made.engine.requests
    made.check()


async def embed(web: Web, **body: Any) -> Any:
    answer = await web.post("/v1/embeddings", {"model": "base", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids(text: str) -> list[int]:
    return byte_level().encode(text)


async def test_each_form_of_input_has_its_vectors(make_world: MakeWorld) -> None:
    world = make_world(embedding=RAW)
    web = Web(world)
    for given, prompts in (
        ("abc", [ids("abc")]),
        (["abc", "de"], [ids("abc"), ids("de")]),
        ([7, 8], [[7, 8]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
    ):
        answer = await embed(web, input=given)
        assert answer["object"] == "list" and answer["model"] == "base"
        assert [d["index"] for d in answer["data"]] == list(range(len(prompts)))
        found = [d["embedding"] for d in answer["data"]]
        assert found == [[len(p), p[0], p[-1], 0] for p in prompts]
        total = sum(map(len, prompts))
        assert answer["usage"] == {"prompt_tokens": total, "total_tokens": total}
    assert {request.pooling for request in world.engine.requests} == {"last"}


async def test_an_adapters_vectors_in_the_forms_that_clients_ask_for(make_world: MakeWorld) -> None:
    world = make_world(embedding=EmbeddingRule("mean"))
    web = Web(world)
    await web.load("own", world.adapter("own", "xy"))
    plain = (await embed(web, model="own", input="abc", normalize=False))["data"][0]
    last = ids("xy")[-1]
    assert plain["embedding"] == [5, ids("abc")[0], last, 0]
    (unit,) = (await embed(web, model="own", input="abc"))["data"]
    assert np.linalg.norm(unit["embedding"]) == pytest.approx(1)
    options = {"encoding_format": "base64", "dimensions": 2}
    (packed,) = (await embed(web, model="own", input="abc", **options))["data"]
    numbers = np.frombuffer(base64.b64decode(packed["embedding"]), "<f4")
    expected = np.array([5, ids("abc")[0]])
    assert numbers == pytest.approx(expected / np.linalg.norm(expected))
    answer = await embed(web, input="abcdef", truncate_prompt_tokens=2, normalize=False)
    assert answer["data"][0]["embedding"] == [2, ids("e")[0], ids("f")[0], 0]
    await web.unload("own")
    assert {request.pooling for request in world.engine.requests} == {"mean"}


async def test_pairs_are_scored_and_documents_ranked(make_world: MakeWorld) -> None:
    world = make_world()

    def cosine(a: str, b: str) -> float:
        one, other = ([len(ids(t)), ids(t)[0], ids(t)[-1]] for t in (a, b))
        return float(np.dot(one, other) / np.linalg.norm(one) / np.linalg.norm(other))

    web = Web(world)
    for path in ("/score", "/v1/score"):
        answer = await web.post(path, {"model": "base", "text_1": "q", "text_2": ["a~", "q"]})
        scores = [each["score"] for each in answer.json()["data"]]
        assert scores == pytest.approx([cosine("q", "a~"), 1])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        documents = ["a~", {"text": "q"}, "~"]
        body = {"model": "base", "query": "q", "documents": documents, "top_n": 2}
        results = (await web.post(path, body)).json()["results"]
        scores = [cosine("q", t) for t in ("a~", "q", "~")]
        order = sorted(range(3), key=lambda i: -scores[i])[:2]
        assert [each["index"] for each in results] == order
        assert results[0]["document"] == {"text": "q"}
        assert [each["relevance_score"] for each in results] == pytest.approx(
            [scores[i] for i in order]
        )
        bare = await web.post(path, body | {"return_documents": False})
        assert bare.json()["results"][0].keys() == {"index", "relevance_score"}
    assert len(world.engine.requests) == 2 * 3 + 3 * 2 * 4, "a query is computed once"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/embeddings", {}, 400, "input"),
        ("/v1/embeddings", {"input": ""}, 400, "input"),
        ("/v1/embeddings", {"input": []}, 400, "input"),
        ("/v1/embeddings", {"input": [[]]}, 400, "input"),
        ("/v1/embeddings", {"input": [-1]}, 400, "input"),
        ("/v1/embeddings", {"input": [10**9]}, 400, "input"),
        ("/v1/embeddings", {"input": ["x", ""]}, 400, "input[1]"),
        ("/v1/embeddings", {"input": [[5], [5], [-1]]}, 400, "input[2]"),
        ("/v1/embeddings", {"input": "x" * 65}, 400, "input"),
        ("/v1/completions", {"prompt": ["x", "x" * 65]}, 400, "prompt[1]"),
        ("/v1/embeddings", {"input": ["x"] * 4}, 400, "input"),
        ("/v1/embeddings", {"input": "x", "model": "nobody"}, 404, "model"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, 400, "dimensions"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, 400, "encoding_format"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 0}, 400, None),
        ("/v1/embeddings", {"input": "x", "nonsense": 1}, 400, "nonsense"),
        ("/v1/embeddings", {"input": "x", "embed_dtype": "fp8"}, 400, "embed_dtype"),
        ("/score", {"text_1": "x"}, 400, "text_2"),
        ("/score", {"text_1": ["x", "y"], "text_2": ["z"] * 3}, 400, "text_1"),
        ("/score", {"text_1": "x", "text_2": "x" * 65}, 400, "text_2"),
        ("/rerank", {"query": "x", "documents": []}, 400, "documents"),
        ("/rerank", {"query": "x" * 65, "documents": ["y"]}, 400, "query"),
        ("/rerank", {"query": "x", "documents": ["y", "y", ""]}, 400, "documents[2]"),
        ("/rerank", {"query": "x", "documents": [{"title": "y"}]}, 400, "documents[0].text"),
        ("/rerank", {"query": "x", "documents": ["y"], "max_tokens_per_doc": 9}, 400, None),
    ],
)
async def test_what_can_not_be_done_is_refused_by_name(
    shared: World, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    web = Web(shared)
    answer = await web.post(path, {"model": "base", **body})
    assert answer.status_code == status, answer.text
    assert param is None or answer.json()["error"]["param"] == param


async def test_more_dimensions_than_there_are_and_an_engine_that_fails(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    web = Web(world)
    answer = await web.post("/v1/embeddings", {"model": "base", "input": "x", "dimensions": 5})
    assert answer.json()["error"]["param"] == "dimensions", answer.text
    await web.load("own", world.adapter("own", "xy"))
    world.engine.fail_after = (0, ConfigError("it broke"))
    answer = await web.post("/v1/embeddings", {"model": "own", "input": ["x", "y"]})
    assert answer.status_code == 500
    await web.unload("own")


def classifier(world: World, name: str, weight: list[list[float]]) -> str:
    """A folder of an adapter whose head has these rows."""
    folder = Path(world.adapter(name, ""))
    (folder / "adapter_config.json").write_text('{"task_type": "SEQ_CLS", "peft_type": "LORA"}')
    score = {"base_model.model.score.weight": np.array(weight, np.float32)}
    save_file(score, folder / "adapter_model.safetensors")
    return str(folder)


async def test_an_adapter_that_was_trained_for_it_classifies(make_world: MakeWorld) -> None:
    """The fake's vector is the number of tokens, the first and the last one, and 0."""
    world = make_world()
    web = Web(world)
    weight = [[1.0, 0, 0, 0], [0, 0, 0.5, 0], [0, 0, 0, 1]]
    loaded = await web.load("judge", classifier(world, "judge", weight))
    assert loaded.status_code == 200, loaded.text
    extra = len(next(iter(world.engine.adapters.values())))
    last = next(iter(world.engine.adapters.values()))[-1]
    for path, given in (("/classify", ["ab", "c"]), ("/v1/classify", [[5, 6], [7]])):
        answer = await web.post(path, {"model": "judge", "input": given})
        assert answer.status_code == 200, answer.text
        for each, count in zip(answer.json()["data"], (2, 1), strict=True):
            powers = np.exp(np.array([count + extra, 0.5 * last, 0]) - (count + extra))
            assert each["probs"] == pytest.approx(powers / powers.sum(), rel=1e-5)
            assert each["label"] == f"LABEL_{powers.argmax()}" and each["num_classes"] == 3
    part = {"model": "base", "adapters": [{"name": "judge", "scale": 0.5}]}
    for path, body, param in (
        ("/v1/completions", {"model": "judge", "prompt": "a"}, "model"),
        ("/v1/completions", part | {"prompt": "a"}, "adapters"),
        ("/classify", part | {"input": "a"}, "adapters"),
        ("/score", {"model": "judge", "text_1": "a", "text_2": "b"}, "model"),
        ("/classify", {"model": "base", "input": "a"}, "model"),
    ):
        answer = await web.post(path, body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    await web.unload("judge")


async def test_one_label_scores_pairs(make_world: MakeWorld) -> None:
    world = make_world()
    web = Web(world)
    await web.load("judge", classifier(world, "judge", [[1e-3, 0, 0, 0]]))
    extra = len(next(iter(world.engine.adapters.values())))
    body = {"model": "judge", "query": "ab", "documents": ["c", "defg"]}
    results = (await web.post("/rerank", body)).json()["results"]
    assert [each["index"] for each in results] == [1, 0]
    for each, pair in zip(results, ("abdefg", "abc"), strict=True):
        logit = 1e-3 * (len(ids(pair)) + extra)
        assert each["relevance_score"] == pytest.approx(1 / (1 + np.exp(-logit)))
    await web.unload("judge")
    prompts = [request.prompt_ids for request in world.engine.requests]
    assert prompts == [ids("abc"), ids("abdefg")]


def test_the_models_folder_says_how_vectors_are_made(tmp_path: Path) -> None:
    def rule(modules: list[str] | None, pooling: dict[str, Any] | None) -> EmbeddingRule:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        (folder / "1_Pooling").mkdir(parents=True)
        if modules is not None:
            listed = [
                {"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": f"some.models.{kind}"}
                for i, kind in enumerate(modules)
            ]
            (folder / "modules.json").write_text(json.dumps(listed))
        if pooling is not None:
            (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        return embedding_rule(folder)

    whole, last = ["Transformer", "Pooling", "Normalize"], {"pooling_mode_lasttoken": True}
    assert rule(None, None) == EmbeddingRule("last", True)
    assert rule(whole, last) == EmbeddingRule("last", True)
    assert rule(whole[:2], last) == EmbeddingRule("last", False)
    off = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    assert rule(whole, off) == EmbeddingRule("mean", True)
    assert rule(None, {"pooling_mode": "lasttoken"}) == EmbeddingRule("last", True)
    for modules, pooling, why in (
        (whole, {"pooling_mode_max_tokens": True}, "max_tokens"),
        (whole, {**last, "pooling_mode_mean_tokens": True}, "mean_tokens"),
        (whole, {}, "none"),
        ([*whole, "Dense"], last, "Dense"),
    ):
        assert why in rule(modules, pooling).refused
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ConfigError):
        embedding_rule(tmp_path)
    (tmp_path / "modules.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError):
        embedding_rule(tmp_path)


async def test_a_model_whose_pooling_is_not_served_refuses_vectors_alone(
    make_world: MakeWorld,
) -> None:
    web = Web(make_world(embedding=EmbeddingRule(refused="its pooling is max_tokens")))
    answer = await web.post("/v1/embeddings", {"model": "base", "input": "x"})
    assert answer.status_code == 400 and "max_tokens" in answer.text
    assert answer.json()["error"]["param"] == "model"
    await web.complete()
