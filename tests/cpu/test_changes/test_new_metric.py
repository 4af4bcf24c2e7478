"""A figure of the engine becomes a metric by a row of the table."""

from __future__ import annotations

from pathlib import Path

import pytest
from http_api import Web, World
from toy_tokenizers import byte_level

from weft.metrics import metrics


async def test_a_metric_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ("weft:batch_rows", "Requests in the running batch.", "num_running")
    monkeypatch.setattr(metrics, "_GAUGES", (*metrics._GAUGES, row))
    text = (await Web(World(tmp_path, byte_level())).get("/metrics")).text
    assert "# HELP weft:batch_rows Requests in the running batch." in text
    assert "# TYPE weft:batch_rows gauge" in text
    assert "\nweft:batch_rows 0" in text
