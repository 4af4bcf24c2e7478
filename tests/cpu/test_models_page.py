"""docs/models.md says what is served."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import get_args

import models_page

from weft.cli.formats import ReasoningParser, ToolCallParser
from weft.models.families import FAMILIES
from weft.text.reasoning import REASONING
from weft.text.tools import TOOL_FORMATS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
API = PAGE.with_name("api.md")


def test_the_page_is_current() -> None:
    """If not: python tests/support/models_page.py > docs/models.md"""
    assert PAGE.read_text() == models_page.page()


def test_each_architecture_is_in_one_row() -> None:
    rows = Counter(name for row in models_page.ROWS for name in row.all_architectures)
    assert rows == Counter(list(FAMILIES))


def test_tool_formats_are_those_that_there_are() -> None:
    named = {name.strip("`") for row in models_page.ROWS for name in row.tools.split(", ") if name}
    assert named <= set(TOOL_FORMATS)
    tools = API.read_text().partition("## Tools\n")[2].partition("## Reasoning\n")
    assert re.findall(r"^\| `(\w+)` \|", tools[0], re.MULTILINE) == list(TOOL_FORMATS)
    assert get_args(ToolCallParser) == ("auto", "none", *TOOL_FORMATS)


def test_formats_of_reasoning_are_those_that_there_are() -> None:
    table = API.read_text().partition("## Reasoning\n")[2].partition("## Responses\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", "".join(rows))) == set(REASONING)
    assert get_args(ReasoningParser) == ("auto", "none", *REASONING)
