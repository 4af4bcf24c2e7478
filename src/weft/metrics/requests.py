"""Histograms of requests that have ended, with one value for each, under vLLM's names."""

from __future__ import annotations

from weft.metrics.exposition import Bounds, Exposition, Histogram, Labels
from weft.metrics.logs import RequestRecord

_SECONDS = Bounds(0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = Bounds(*(digit * 10.0**power for power in range(6) for digit in (1, 2, 5)))
_FIGURES = {
    "vllm:request_prefill_time_seconds": ("From the first step to the first token.", _SECONDS),
    "vllm:request_decode_time_seconds": ("From the first token to the last one.", _SECONDS),
    "vllm:request_inference_time_seconds": ("From the first step to the last token.", _SECONDS),
    "vllm:request_prompt_tokens": ("Tokens of the prompt, cached ones included.", _TOKENS),
    "vllm:request_generation_tokens": ("Tokens of the answer.", _TOKENS),
}


class RequestHistograms:
    """For one event loop."""

    def __init__(self) -> None:
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in _FIGURES.items()}

    def ended(self, record: RequestRecord) -> None:
        """Count a request that has ended. Times are counted if it got a token."""
        first_s, last_s = record.first_token_s, record.last_token_s
        values = {
            "vllm:request_prompt_tokens": float(record.num_prompt_tokens),
            "vllm:request_generation_tokens": float(record.num_output_tokens),
        }
        if first_s is not None and last_s is not None:
            step_s = min(record.queue_s or 0.0, first_s)
            values["vllm:request_prefill_time_seconds"] = first_s - step_s
            values["vllm:request_decode_time_seconds"] = last_s - first_s
            values["vllm:request_inference_time_seconds"] = last_s - step_s
        for name, value in values.items():
            self._histograms[name].observe(value)

    def add(self, out: Exposition, given: Labels) -> None:
        """Add them to a scrape, with these labels."""
        for name, histogram in self._histograms.items():
            out.histogram(name, _FIGURES[name][0], [(given, histogram)])
