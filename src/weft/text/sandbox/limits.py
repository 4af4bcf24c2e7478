"""The limits of worker processes for texts."""

from __future__ import annotations

from enum import IntEnum


class WorkerKind(IntEnum):
    """What a worker can do, and so what must be imported before it is forked."""

    TEXTS = 0
    """Encode and decode."""
    CHATS = 1
    """Write conversations by templates too."""
    LOADS = 2
    """Make tokenizers of files, and so open some."""


CPU_S = 5.0
"""The CPU time for one text or conversation, in seconds."""
CPU_S_PER_CHAR = 5e-6
"""CPU seconds added for each character of a text for the base's own tokenizer."""
LOAD_CPU_S = 30.0
"""The CPU time for the files of one adapter, in seconds."""
WALL_FACTOR, WALL_S = 4.0, 10.0
"""The time by the clock may be this many times the CPU time, plus this much."""
MEMORY_BYTES = 2 << 30
"""How much memory a worker may take beyond what it was forked with."""
FILE_BYTES = 128 << 20
"""The largest file that may be written to load a tokenizer."""
MAX_ANSWER_BYTES = 128 << 20
"""A worker whose answer is larger is ended."""
MAX_TEXT_CHARS = 16 << 20
"""The longest text that a chat template may write."""
WORN_JOBS, WORN_BYTES = 1000, 1 << 30
"""A worker is replaced after so many jobs, or when it has once been as large as this."""
KEPT_TOKENIZERS = 4
"""How many tokenizers a worker keeps."""

NUM_WORKERS = 2
NUM_LOADERS = 2
IDLE_S = 60.0
"""A worker is ended after this long without work."""
MAX_WAITING = 256
"""How many texts of one author's adapters may wait for one tenant."""
MAX_WAIT_S = 10.0
"""How long these may wait; then they are refused."""
PENALTY = 10.0
"""After a worker had to be ended, texts of the same author and tenant are refused for so many times
as long as it had worked."""
MAX_TEMPLATE_BYTES = 1 << 20
"""How large the chat template of an adapter may be."""
