"""What a server tells of itself: metrics in Prometheus' text format, logs, traces."""

from weft.metrics.logs import RequestRecord
from weft.metrics.metrics import CONTENT_TYPE, Metrics, RegistryView

__all__ = ["CONTENT_TYPE", "Metrics", "RegistryView", "RequestRecord"]
