"""docs/models.md says what is served."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import models_page

from weft.models.families import FAMILIES
from weft.text.tools import TOOL_FORMATS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_is_current() -> None:
    """If not: python tests/support/models_page.py > docs/models.md"""
    assert PAGE.read_text() == models_page.page()


def test_each_architecture_is_in_one_row() -> None:
    rows = Counter(name for row in models_page.ROWS for name in row.all_architectures)
    assert rows == Counter(list(FAMILIES))


def test_tool_formats_are_those_that_there_are() -> None:
    named = {name.strip("`") for row in models_page.ROWS for name in row.tools.split(", ") if name}
    assert named == set(TOOL_FORMATS)
