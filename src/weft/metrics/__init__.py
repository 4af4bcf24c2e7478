"""What a server tells of itself: metrics in Prometheus' text format, logs, traces."""

from weft.metrics.metrics import CONTENT_TYPE, Metrics
from weft.metrics.record import RequestRecord

__all__ = ["CONTENT_TYPE", "Metrics", "RequestRecord"]
