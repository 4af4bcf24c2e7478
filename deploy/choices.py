"""For which choices `deploy/kubernetes/` has manifests; `render.py` writes them."""

from __future__ import annotations

from typing import Any

CHOICES: dict[str, dict[str, Any]] = {
    "weft.yaml": {"registry": {"uri": "s3://models/weft"}, "fleetKeySecret": "weft-fleet"},
    "weft-keda.yaml": {
        "fleetKeySecret": "weft-fleet",
        "registry": {"uri": "s3://models/weft"},
        "podMonitor": {"enabled": True},
        "autoscaling": {"kind": "keda"},
    },
}
