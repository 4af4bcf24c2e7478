"""Writes `deploy/kubernetes/`: what the chart makes of `choices.py`, for clusters without Helm.

pip install helm-python-sdk
python deploy/render.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from choices import CHOICES
from helm_python.chart import Chart

HERE = Path(__file__).parent


def rendered(values: dict[str, Any]) -> str:
    """All manifests of one release named `weft`, as one file."""
    with Chart.load(HERE / "helm/weft") as chart:
        files = chart.render(values, name="weft", namespace="weft")
    texts = [text for path, text in sorted(files.items()) if path.endswith(".yaml")]
    head = "# Made from deploy/helm/weft by deploy/render.py, for the namespace `weft`.\n"
    return head + "---\n".join(text.lstrip() for text in texts if text.strip())


if __name__ == "__main__":
    for name, values in CHOICES.items():
        (HERE / "kubernetes" / name).write_text(rendered(values))
