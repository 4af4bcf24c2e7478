"""What the documentation shows is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [(page, code) for page in PAGES for code in BLOCK.findall(page.read_text())]


@pytest.mark.parametrize(
    ("page", "code"), BLOCKS, ids=[f"{p.name}-{n}" for n, (p, _) in enumerate(BLOCKS)]
)
def test_python_block(
    page: Path, code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(code, str(page), "exec"), {})
    if page.name == "README.md":
        assert "tenalp" in capsys.readouterr().out


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
