"""What strangers do to the files that they hand in."""

from __future__ import annotations

import os
from pathlib import Path


def becomes(path: Path, what: str) -> None:
    """Put something else in the place of a file, at once."""
    new = path.with_name("new")
    match what:
        case "link":
            new.symlink_to(path.parents[2] / "outside/bot" / path.name)
        case "absolute link inside":
            new.symlink_to(path.parents[1] / "other" / path.name)
        case "FIFO":
            os.mkfifo(new)
        case "folder":
            path.unlink()
            new.mkdir()
        case "text":
            new.write_text("mine")
        case "device":
            new.symlink_to("/dev/zero")
    new.replace(path)
