"""Sizes of what kernels compute at once, which other modules need for their plans."""

SHORT = 16
"""For recurrent states: the most tokens of a prompt that a single kernel computes; longer chunks
take several kernels. As many tokens may follow a snapshot in the step that takes it."""

MAX_GUESSES = 7
"""The most tokens that are guessed for a request at a time. With the last token they are eight
rows, which take hardly longer than one. A recurrent state keeps the inputs of as many."""

NUM_DRAFTS = 3
"""How many tokens a model's own multi-token prediction head drafts at a time."""

EXPERT_UNIT = 32
"""Kernels that read only the chosen experts need widths that are multiples of this."""
