"""What Helm says of a chart and makes of it, as JSON: `python charts.py CHART VALUES...`.

It is a process of its own, as Helm's library is written in Go and brings threads and signal
handlers with it. Each of VALUES is a JSON object.
"""

from __future__ import annotations

import json
import sys

from helm_python.chart import Chart, lint

if __name__ == "__main__":
    path, *given = sys.argv[1:]
    with Chart.load(path) as chart:
        files = [chart.render(json.loads(v), name="weft", namespace="weft") for v in given]
    print(json.dumps({"lint": lint(path, strict=True, kube_version="v1.33.0"), "rendered": files}))
