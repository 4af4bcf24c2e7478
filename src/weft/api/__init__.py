"""The OpenAI-compatible HTTP side. Talks to an EngineClient, never to the engine itself."""

from weft.api.app import create_app
from weft.api.settings import ApiSettings

__all__ = ["ApiSettings", "create_app"]
