"""Sizes of what kernels take at once, by which others plan."""

SHORT = 16
"""The most tokens of a prompt with a recurrent state that one kernel takes, in place of several for
whole chunks. As many may come behind a snapshot in the step that takes it."""

EXPERT_UNIT = 32
"""Kernels that read only the experts that are chosen take widths of whole units of this many."""
