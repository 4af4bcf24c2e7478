"""Records, ids, configuration, the error tree and protocols. Standard library only."""

import sys

if sys.platform != "linux":  # told here, before a module misses what only Linux has
    raise ImportError(
        f"Weft runs on Linux, and this is {sys.platform}: run it in a container or a virtual"
        " machine with Linux, such as WSL 2"
    )
