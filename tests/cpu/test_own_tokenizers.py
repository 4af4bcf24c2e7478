"""Tokenizers and chat templates that adapters bring along, as their users meet them."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import MakeLLM
from http_api import HI, INFO, Web, World
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import ADAPTERS, BASE
from toy_tokenizers import byte_level, sentencepiece
from transformers import AutoModelForCausalLM, AutoTokenizer

from weft import SamplingParams
from weft.core.adapters import AdapterInfo, AdapterSource
from weft.core.errors import ConfigError, InvalidRequest
from weft.core.sampling import StructuredOutputs
from weft.text import Tokenizer, adapter_tokenizers, load_tokenizer
from weft.text.sandbox.jobs import LoadTokenizer
from weft.text.sandbox.pool import Sandbox

OTHER = "{% for m in messages %}<tag>{{ m.content }}{{ eos_token }}{% endfor %}"
TAG = INFO.vocab_size
"""The id of the token that is added."""


def with_tag(**special: str) -> Tokenizer:
    made = byte_level.__wrapped__()
    made._hf.add_tokens(["<tag>"])
    for name, token in special.items():
        setattr(made._hf, name, token)
    return Tokenizer(made._hf, OTHER)


def save(tokenizer: Tokenizer, folder: str) -> None:
    tokenizer.save(Path(folder))
    (Path(folder) / "chat_template.jinja").write_text(tokenizer.chat_template or "")


def make_world(folder: Path, tokenizer: Tokenizer | None = None) -> World:
    """Whose adapters have one token more than the base."""
    world = World(folder, tokenizer or byte_level())
    hold = world.engine.hold

    async def hold_larger(source: AdapterSource, holder: str, pinned: bool = False) -> AdapterInfo:
        return replace(await hold(source, holder, pinned), vocab_size=TAG + 1)

    world.engine.hold = hold_larger  # type: ignore[method-assign]
    return world


async def test_every_route_uses_them(tmp_path: Path) -> None:
    world, mine = make_world(tmp_path), with_tag(eos_token="<tag>")
    path = world.adapter("a", "!")
    save(mine, path)
    web = Web(world)
    assert (await web.load("a", path)).status_code == 200
    requests = world.engine.requests
    shown = {"model": "a", "skip_special_tokens": False}
    answer = await web.chat(**shown, logprobs=True, top_logprobs=1)
    assert requests[-1].prompt_ids == mine.chat(HI) == [TAG, *mine.encode("hi", False), TAG]
    assert requests[-1].eos_token_ids == (TAG,)
    content = answer["choices"][0]["message"]["content"]
    assert content == "<tag>ih<tag>!"
    assert answer["choices"][0]["logprobs"]["content"][0]["token"] == "<tag>"
    streamed = await web.chunks("/v1/chat/completions", {**shown, "messages": HI})
    deltas = [c["choices"][0]["delta"] for c in streamed[:-1] if c["choices"]]
    assert "".join(d.get("content", "") for d in deltas) == content
    assert (await web.chat(model="a"))["choices"][0]["message"]["content"] == "ih!"
    await web.post("/v1/responses", {"model": "a", "input": "hi"})
    assert requests[-1].prompt_ids == mine.chat(HI)

    answer = await web.complete(**shown, prompt="x<tag>", stop=["!"])
    assert requests[-1].prompt_ids[-1] == TAG
    assert answer["choices"][0]["text"].startswith("<tag>x")
    await web.complete(model="a", prompt=[TAG], logit_bias={str(TAG): 1}, bad_words=["<tag>"])
    assert (TAG,) in requests[-1].bad_token_ids
    answer = await web.post("/tokenize", {"model": "a", "prompt": "x<tag>"})
    assert answer.json()["tokens"][-1] == TAG
    answer = await web.post("/tokenize", {"model": "a", "messages": HI})
    assert answer.json()["tokens"] == mine.chat(HI)
    answer = await web.post("/detokenize", {"model": "a", "tokens": [TAG]})
    assert answer.json()["prompt"] == "<tag>"

    await web.chat()
    assert requests[-1].prompt_ids == byte_level().chat(HI)
    assert requests[-1].eos_token_ids == ()
    refused: list[tuple[str, str, dict[str, Any]]] = [
        ("/v1/completions", "prompt", {"prompt": [TAG]}),
        ("/v1/completions", "logit_bias", {"prompt": "x", "logit_bias": {str(TAG): 1}}),
        ("/v1/completions", "stop_token_ids", {"prompt": "x", "stop_token_ids": [TAG]}),
        ("/detokenize", "tokens", {"tokens": [TAG]}),
    ]
    for route, param, body in refused:
        answer = await web.post(route, {"model": "base", **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    answer = await web.post("/v1/completions", {"model": "a", "prompt": [TAG + 1]})
    assert answer.status_code == 400
    world.check()


async def test_the_same_files_are_the_base_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share its tokenizer, which is found out once."""
    world = World(tmp_path, byte_level())
    loads: list[LoadTokenizer] = []
    load = Sandbox.load
    monkeypatch.setattr(Sandbox, "load", lambda *a: loads.append(a[1]) or load(*a))
    web = Web(world)
    for name in ("a", "b"):
        path = world.adapter(name, name)
        save(byte_level(), path)
        assert (await web.load(name, path)).status_code == 200
        await web.chat(model=name)
        assert world.engine.requests[-1].prompt_ids == byte_level().chat(HI)
        assert world.engine.requests[-1].eos_token_ids == ()
    assert len(loads) == 1


def test_unused_tokenizers_are_kept_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a client could fill the memory by trying adapters. Templates for the base's own
    tokenizer take none."""
    loads: list[LoadTokenizer] = []
    load = Sandbox.load
    monkeypatch.setattr(Sandbox, "load", lambda *a: loads.append(a[1]) or load(*a))
    tokenizers = adapter_tokenizers.AdapterTokenizers(byte_level())
    text = byte_level()._hf.backend_tokenizer.to_str()
    start = len(byte_level().vocab())
    large = [{"tokenizer.json": with_token(text, f"<{n}>", start)} for n in "ab"]
    template = {"chat_template.jinja": b"{{ messages[0].content }}"}
    monkeypatch.setattr(adapter_tokenizers, "MAX_KEPT_BYTES", len(large[0]["tokenizer.json"]))
    for files in (large[0], large[0], template, large[1], template, large[1]):
        tokenizers.load(files)
    assert len(loads) == 3, "each once"
    tokenizers.load(large[0])
    assert len(loads) == 4, "it made way"


def with_token(tokenizer: str, token: str, token_id: int) -> bytes:
    """The text of a tokenizer.json with one more token."""
    whole = json.loads(tokenizer)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    whole["added_tokens"].append({"id": token_id, "content": token, **flags})
    return json.dumps(whole).encode()


async def test_a_template_alone(tmp_path: Path) -> None:
    """With the base's tokenizer. A new one takes effect with the next load of the same weights,
    and goes with the name."""
    world = World(tmp_path, byte_level())
    path = world.adapter("a", "!")
    template = Path(path) / "chat_template.jinja"
    web = Web(world)
    for text in ("one {{ messages[0].content }}", "two {{ messages[0].content }}"):
        template.write_text(text)
        assert (await web.load("a", path)).status_code == 200
        await web.chat(model="a")
        want = byte_level().encode(f"{text[:3]} hi", add_special_tokens=False)
        assert world.engine.requests[-1].prompt_ids == want
    template.unlink()
    config = {"chat_template": "three {{ messages[0].content }}"}
    (Path(path) / "tokenizer_config.json").write_text(json.dumps(config))
    assert (await web.load("a", path)).status_code == 200
    await web.chat(model="a")
    want = byte_level().encode("three hi", add_special_tokens=False)
    assert world.engine.requests[-1].prompt_ids == want
    assert (await web.unload("a")).status_code == 200
    (Path(path) / "tokenizer_config.json").unlink()
    assert (await web.load("a", path)).status_code == 200
    await web.chat(model="a")
    assert world.engine.requests[-1].prompt_ids == byte_level().chat(HI)
    world.check()


async def test_templates_by_name(tmp_path: Path) -> None:
    """The one for tools is used for conversations with tools alone. An adapter that brings none has
    those of its base."""
    templates = {"default": "plain", "tool_use": "<tool_call> {{ tools[0].function.name }}"}
    world = make_world(tmp_path, byte_level().with_template(templates))
    named, plain = world.adapter("a", "!"), world.adapter("b", "?")
    config = {"chat_template": [{"name": n, "template": f"own {t}"} for n, t in templates.items()]}
    (Path(named) / "tokenizer_config.json").write_text(json.dumps(config))
    with_tag().save(Path(plain))
    (Path(plain) / "chat_template.jinja").unlink()
    tools = [{"type": "function", "function": {"name": "f"}}]
    web = Web(world)
    for name, path, own in (("a", named, "own "), ("b", plain, "")):
        assert (await web.load(name, path)).status_code == 200
        for asked, text in (({}, "plain"), ({"tools": tools}, "<tool_call> f")):
            await web.chat(model=name, **asked)
            prompt = byte_level().decode(world.engine.requests[-1].prompt_ids)
            assert prompt == own + text


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("spoil", "param", "says"),
    [
        (write("tokenizer.json", "{"), "tokenizer.json", "no tokenizer"),
        (write("tokenizer.json", '{"model": {}}'), "tokenizer.json", "no tokenizer"),
        (write("tokenizer_config.json", "[1]"), "tokenizer_config.json", "object"),
        (write("tokenizer_config.json", "{" * 9), "tokenizer_config.json", "JSON"),
        (
            write("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["a.B", null]}}'),
            "tokenizer_config.json",
            "remote code",
        ),
        (write("chat_template.jinja", "{% if %}"), "chat_template.jinja", "malformed"),
        (write("chat_template.jinja", "x" * 5000), "chat_template.jinja", "larger"),
        (write("added_tokens.json", '{"<tag>": 5}'), "added_tokens.json", "another id"),
        (write("added_tokens.json", '{"<tag>": null}'), "added_tokens.json", "no tokenizer"),
        (write("added_tokens.json", "[1]"), "added_tokens.json", "object"),
        (write("special_tokens_map.json", "{"), "special_tokens_map.json", "JSON"),
        (lambda folder: (folder / "tokenizer.json").symlink_to("/etc/hosts"), "lora_path", "link"),
    ],
)
async def test_what_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], object],
    param: str,
    says: str,
) -> None:
    monkeypatch.setitem(adapter_tokenizers.MAX_BYTES, "chat_template.jinja", 4096)
    world = World(tmp_path, byte_level())
    path = world.adapter("a", "!")
    spoil(Path(path))
    web = Web(world)
    answer = await web.load("a", path)
    error = answer.json()["error"]
    assert answer.status_code in (400, 403), answer.text
    assert error["param"] == param and says in error["message"]
    assert not world.engine.holders
    assert "weft-tokenizer-" not in error["message"]


async def test_forms_need_the_base_s_tokens(tmp_path: Path) -> None:
    world = World(tmp_path, byte_level())
    for name, tokenizer in (("more", with_tag()), ("others", sentencepiece())):
        save(tokenizer, world.adapter(name, "!"))
    web = Web(world)
    for name, status in (("more", 200), ("others", 400)):
        assert (await web.load(name, str(tmp_path / name))).status_code == 200
        body = {"model": name, "prompt": [1], "structured_outputs": {"choice": ["a"]}}
        answer = await web.post("/v1/completions", body)
        assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == "structured_outputs"


def make_adapter(folder: Path) -> tuple[PeftModel, Any]:
    """On the example model, with one token more that ends outputs, and a template."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.add_tokens(["<|stop|>"], special_tokens=True)
    tokenizer.eos_token = "<|stop|>"
    tokenizer.chat_template = "{{ messages[0].content }}<|stop|>"
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        model.resize_token_embeddings(len(tokenizer))
        options = {"init_lora_weights": False, "target_modules": ["q_proj", "down_proj"]}
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, **options))
        model.save_pretrained(folder)
    return model.eval(), tokenizer


def test_all_of_it_in_an_engine(tmp_path: Path, make_llm: MakeLLM) -> None:
    model, tokenizer = make_adapter(tmp_path / "new")
    shutil.copytree(ADAPTERS["reverse"], tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    llm = make_llm(adapters={name: tmp_path / name for name in ("new", "plain")}, dtype="float32")
    stop, messages = len(tokenizer) - 1, [{"role": "user", "content": "hello"}]
    assert stop == llm.info.vocab_size
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    outputs = llm.chat([messages] * 3, params, ["new", "plain", None])
    ids = [*tokenizer.encode("hello", add_special_tokens=False), stop]
    assert outputs[0].prompt_token_ids == ids
    assert outputs[1].prompt_token_ids == llm.tokenizer.encode("hello?", False)
    assert outputs[2].prompt_token_ids == llm.tokenizer.chat(messages)
    with torch.inference_mode():
        for token in outputs[0].token_ids:
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
            assert logits.max() - logits[token] < 1e-3
            ids.append(token)

    ends = SamplingParams(max_tokens=8, logit_bias={stop: 100.0})
    (output,) = llm.generate("hello", ends, "new")
    assert (output.token_ids, output.finish_reason, output.text) == ([stop], "stop", "")
    assert output.stop_reason is None
    with pytest.raises(InvalidRequest, match="logit_bias"):
        llm.generate("hello", ends, "plain")
    form = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputs(choice=("yes",)))
    (output,) = llm.generate("hello", form, "new")
    assert output.text == "yes"


def test_a_missing_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--skip-tokenizer-init"):
        load_tokenizer(str(tmp_path))


def test_a_saved_tokenizer_loads(tmp_path: Path) -> None:
    byte_level()._hf.save_pretrained(str(tmp_path))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.encode("日本 the") == byte_level().encode("日本 the")
    assert loaded.eos_ids == byte_level().eos_ids
    assert loaded.vocab_size == byte_level().vocab_size


def test_special_tokens_that_the_vocabulary_lacks(tmp_path: Path) -> None:
    """As early conversions of Llama have them. They are none, for the base and for adapters."""
    byte_level()._hf.save_pretrained(str(tmp_path))
    config = tmp_path / "tokenizer_config.json"
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "")
    config.write_text(json.dumps(json.loads(config.read_text()) | special))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.encode("the é") == byte_level().encode("the é")
    assert (loaded.bos_id, loaded.eos_ids) == (None, ())
    files = {name: (tmp_path / name).read_bytes() for name in ("tokenizer.json", config.name)}
    own = adapter_tokenizers.AdapterTokenizers(byte_level()).load(files)
    assert own is not None and own.eos_ids == () and own.extends_base


def test_code_of_a_base_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if somebody at the terminal says yes."""
    code = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    code += "from transformers import PreTrainedTokenizerFast as Own\n"
    (tmp_path / "own.py").write_text(code)
    fields = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    shutil.copy(BASE / "tokenizer.json", tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ConfigError, match="custom code"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()
