"""How much kernels take at once: sizes with which other modules plan."""

SHORT = 16
"""The most tokens of a prompt with a recurrent state that one kernel takes, in place of several for
whole chunks. As many may come behind a snapshot in the step that takes it."""

MAX_GUESSES = 7
"""Tokens that are guessed of a request at a time. With the next token they are eight rows, which
take hardly longer than one. A recurrent state keeps the inputs of as many."""

NUM_DRAFTS = 3
"""Tokens that a model's own head for several tokens drafts at a time."""

EXPERT_UNIT = 32
"""Kernels that read only the experts that are chosen take widths of whole units of this many."""
