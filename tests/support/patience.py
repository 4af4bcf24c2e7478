"""How long tests wait."""

PATIENCE_S = 240.0
"""How long a test waits for what comes within a second or a few on an idle machine, such as a
server's start: others may want the processor too."""
