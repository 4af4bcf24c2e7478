"""The tables of limits in the documentation say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft.api import bodies, http, reading, schemas
from weft.api.settings import ApiSettings
from weft.cli import connections
from weft.core import folders, option_files, sampling
from weft.grammar import check, grammars, matcher
from weft.serving import quotas
from weft.text import adapter_tokenizer, adapter_tokenizers
from weft.text.sandbox import limits as sandbox

DOCS = Path(__file__).parents[2] / "docs"
MI = 1 << 20
OPEN = ApiSettings(("base",))
FORMS = grammars.LIMITS

SECURITY = {
    "text or conversation in a worker process": [
        f"{sandbox.CPU_S:g} s of CPU",
        f"{sandbox.CPU_S_PER_CHAR * 1e6:g} s more for each million",
    ],
    "memory of such a process": [f"{sandbox.MEMORY_BYTES >> 30} GiB"],
    "text that a chat template writes": [f"{sandbox.MAX_TEXT_CHARS // MI} Mi"],
    "tokenizer of an adapter": [
        f"{sandbox.LOAD_CPU_S:g} s of CPU",
        f"{sandbox.FILE_BYTES // MI} MiB",
        f"{adapter_tokenizer.MAX_TOKENS // MI} Mi tokens",
    ],
    "tokenizers that are kept though no adapter uses them": [
        f"{adapter_tokenizers.MAX_KEPT}, with",
        f"{adapter_tokenizers.MAX_KEPT_BYTES // MI} MiB of files",
    ],
    "texts of one adapter's author": [f"{sandbox.MAX_WAITING}, for {sandbox.MAX_WAIT_S:g} s"],
    "a form, compiled": [
        f"{check.MAX_BYTES >> 10} KiB",
        f"{FORMS.cpu_s:g} s of CPU, {FORMS.wall_s:g} s by the clock",
        f"{FORMS.memory_bytes >> 30} GiB",
        f"{grammars.MAX_AT_ONCE} at a time, {grammars.MAX_AT_ONCE_EACH} of one tenant",
    ],
    "what may follow in a form": [
        f"{matcher.STEP_S * 1e3:g} ms on average, {matcher.MASK_S:g} s at most"
    ],
    "loads of adapters side by side": [
        f"{quotas.MAX_LOADS}, of one tenant {quotas.MAX_LOADS * 3 // 4}",
        f"429 where {quotas.MAX_WAITING} wait",
    ],
    "time to read an adapter's folder": [
        f"{folders.READ_S:g} s, and 1 s for each {folders.READ_BYTES_PER_S // MI} MiB"
    ],
    "requests open, seats": ["`caps` of a tenant"],
    "a tenants' file": [f"{option_files.MAX_FILE_BYTES // MI} MiB"],
}
API = {
    "bytes of a body": [f"{OPEN.max_body_bytes // MI} MiB"],
    "objects, lists, fields and strings": [
        f"{reading.MAX_OBJECTS:,}, {reading.MAX_ARRAYS:,}, {reading.MAX_MEMBERS:,} and"
        f" {reading.MAX_STRINGS:,}"
    ],
    "messages or items": [f"{bodies.MAX_MESSAGES}"],
    "tools": [f"{bodies.MAX_TOOLS}"],
    "prompts of a completion": [f"{schemas.MAX_PROMPTS}"],
    "choices": [f"{OPEN.max_choices}"],
    "characters of a tool's name": bodies.FUNCTION_NAME[-5:-2].split(),
    "`stop` strings": [f"{sampling.MAX_STOP_STRINGS}, {schemas.MAX_STOP_IDS}"],
    "`bad_words`": [
        f"{sampling.MAX_BAD_WORDS}, {schemas.MAX_LOGIT_BIASES}, {schemas.MAX_ALLOWED_IDS:,}"
    ],
    "prompts x `n` x (`logprobs` + 1)": [f"{OPEN.max_step_logprobs}"],
    "tokens of prompts x `n`": [f"{OPEN.max_prompt_logprobs:,}"],
}
CONNECTIONS = {
    "to send the head": [f"{connections.HEAD_TIMEOUT_S:g} s"],
    "to send its body": [f"{reading.BODY_TIMEOUT_S:g} s, then 408"],
    "without a request": [f"{connections.KEEP_ALIVE_S} s"],
    "for a client that does not read": [f"{http.READER_TIMEOUT_S:g} s"],
    "open files": ["ulimit -Hn"],
    "connections in all": [f"less {connections.RESERVED_FILES}", "at least half"],
    "connections of one address": ["half of these"],
}
TABLES = {
    ("security.md", "Limits"): SECURITY,
    ("api.md", "Limits"): API,
    ("operations.md", "Connections"): CONNECTIONS,
}


@pytest.mark.parametrize(("page", "heading"), TABLES)
def test_the_table_says_what_holds(page: str, heading: str) -> None:
    """And has no row that nobody compares."""
    text = (DOCS / page).read_text()
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    _, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    expected = TABLES[page, heading]
    for row, (begin, limits) in zip(rows, expected.items(), strict=True):
        assert row.removeprefix("| ").startswith(begin)
        for limit in limits:
            assert re.search(rf"(?<![\w.,]){re.escape(limit)}(?![\d.,]*\d)", row), (row, limit)


def test_the_rest_is_said_in_sentences() -> None:
    text = (DOCS / "operations.md").read_text()
    assert f"{connections.SPARE} more are taken" in text
    limits = connections.METRICS_LIMITS
    assert f"port takes {limits.in_all} connections, {limits.per_address} of one" in text
