"""From a prompt to the engine's request, and from a folder to a served adapter, without HTTP.

The HTTP application and the Python API both use this one path.
"""

from weft.serving.intake import Intake, Language, Pinned
from weft.serving.publisher import DirectExecutor, LoopExecutor, Publisher

__all__ = ["DirectExecutor", "Intake", "Language", "LoopExecutor", "Pinned", "Publisher"]
