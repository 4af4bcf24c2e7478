"""A kind of adapter from outside, the example's VB-LoRA in one file, against `peft` itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from adapter_kinds import ATTENTION, FAMILIES, MLP, Kind, make_adapter, make_base
from engines import check_idle
from load_image import load_image
from peft import VBLoRAConfig

from weft import LLM, SamplingParams
from weft.checkpoint import kinds
from weft.checkpoint.examine import examine
from weft.checkpoint.read import read_adapter
from weft.core.errors import AdapterInvalid
from weft.core.folders import Folder
from weft.models.blueprint import target_table
from weft.models.config import load_model_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "adapter_kind"
STEPS, TOLERANCE = 8, 1e-3
OPTIONS = {
    "r": 3,
    "num_vectors": 7,
    "vector_length": 8,
    "topk": 2,
    "target_modules": [*ATTENTION, *MLP],
}


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the example was a package that is installed."""
    entry = EntryPoint("VBLORA", "vblora:KIND", kinds.ENTRY_POINT_GROUP)
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.setattr(kinds, "entry_points", lambda *, group: [entry])
    kinds.installed.cache_clear()
    yield
    kinds.installed.cache_clear()


@pytest.mark.usefixtures("_installed")
def test_a_kind_from_outside_is_served_exactly(tmp_path: Path) -> None:
    base = make_base(FAMILIES["llama"], tmp_path / "base")
    oracle = make_adapter(base, Kind(OPTIONS, config=VBLoRAConfig), tmp_path / "theirs")
    options = {"skip_tokenizer_init": True, "dtype": "float32", "num_blocks": 64, "block_size": 4}
    llm = LLM(tmp_path / "base", {"theirs": tmp_path / "theirs"}, num_threads=1, **options)
    try:
        params = SamplingParams(max_tokens=STEPS, temperature=0.0, logprobs=5)
        outputs = llm.generate([[3, 1, 4, 1, 5, 9, 2, 6]] * 2, params, ["theirs", None])
        for output, model in zip(outputs, (oracle, base), strict=True):
            ids = output.prompt_token_ids + output.token_ids
            with torch.inference_mode():
                want = model(input_ids=torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
            for step, entry in enumerate(output.logprobs or (), len(output.prompt_token_ids) - 1):
                assert want[step].max() - want[step, ids[step + 1]] < TOLERANCE
                for token, logprob in entry.top:
                    assert abs(want[step, token] - logprob) < TOLERANCE
        own, plain = (output.logprobs[0].top for output in outputs)
        assert max(abs(a - b) for (_, a), (_, b) in zip(own, plain, strict=True)) > 5 * TOLERANCE
        check_idle(llm)
    finally:
        llm.close()


@pytest.mark.usefixtures("_installed")
def test_it_is_checked_and_refused_as_built_in_kinds_are(tmp_path: Path) -> None:
    base = make_base(FAMILIES["llama"], tmp_path / "base")
    table = target_table(load_model_config(tmp_path / "base"))
    folder = tmp_path / "theirs"
    make_adapter(base, Kind(OPTIONS, config=VBLoRAConfig), folder)
    image = load_image(folder, table, torch.float32, 16)
    told = examine(read_adapter(Folder(str(folder)), table, 16), table, "float32", 16)
    assert told is not None and told.layout == image.layout and image.conversion_error == 0.0
    saved = json.loads((folder / "adapter_config.json").read_text())
    for change in ({"topk": 0}, {"vector_length": 5}, {"r": 17}, {"brand_new": 1}):
        (folder / "adapter_config.json").write_text(json.dumps(saved | change))
        with pytest.raises(AdapterInvalid) as caught:
            load_image(folder, table, torch.float32, 16)
        assert caught.value.param in (*change, "base_model.vblora_vector_bank")


def test_without_it_the_kind_is_unknown() -> None:
    with pytest.raises(AdapterInvalid, match="only LORA, ADALORA, VERA, LOHA, LOKR, IA3 are"):
        kinds.find_kind("VBLORA")


def test_built_in_kinds_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is installed is looked at for a built-in kind, or can take its place."""
    monkeypatch.setattr(kinds, "installed", lambda: pytest.fail("was looked at"))
    assert all(kinds.find_kind(name).peft_type == name for name in kinds._BUILT_IN)
