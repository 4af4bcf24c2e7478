"""Counters, histograms and gauges, in Prometheus' text format."""

from weft.metrics.metrics import CONTENT_TYPE, Metrics

__all__ = ["CONTENT_TYPE", "Metrics"]
