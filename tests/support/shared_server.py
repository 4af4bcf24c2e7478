"""The one `weft serve` that the tests of several files share: those that `tests/conftest.py` keeps
together. They leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import Server, serving
from tiny import ADAPTERS, long_base

KEY = "secret"
LATE = next(iter(ADAPTERS))
"""The one example that is not loaded at the start."""
MODELS = ["base", *(name for name in ADAPTERS if name != LATE)]
TEMPLATE = """\
{{ bos_token }}{% if tools and messages[0].role == 'system' %}<|system|>{{ tools | tojson }}<|end|>\
{% endif %}{% for m in messages %}{{ '<|' + m.role + '|>' }}\
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\
{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\
<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It serves `MODELS` to those who have the `KEY`. Its base takes long prompts and gives long
    answers, and its template shows tools and reasoning."""
    root = tmp_path_factory.mktemp("root")
    model = long_base(root / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with serving(root, model=model, adapters=MODELS[1:], api_key=KEY) as running:
        yield running
