"""The secret that all processes of a fleet share. Links between nodes are encrypted with it, and a
client without it gets no answer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from weft.core.errors import ConfigError
from weft.core.option_files import read_option_file

MIN_BYTES = 32
DOMAIN = "weft-fleet"


@dataclass(frozen=True, slots=True)
class FleetKey:
    """A CURVE key pair, which all nodes of a fleet share."""

    public: bytes
    secret: bytes = field(repr=False)

    def lock(self, socket: Any, server: bool) -> None:
        """Let a ZeroMQ socket talk only to sockets with the same key. A server's context also needs
        an authenticator that asks `callback`."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        if server:
            socket.curve_server = True
            socket.zap_domain = DOMAIN.encode()
        else:
            socket.curve_serverkey = self.public

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this public key may connect."""
        return key == self.public


def read_fleet_key(path: Path) -> FleetKey:
    """The key that a file's content makes: any 32 bytes or more that nobody can guess. Raises
    ConfigError."""
    named = f"--fleet-key {path}"
    content = read_option_file(path, named, "fleet_key").strip()
    if len(content) < MIN_BYTES:
        message = f"{named}: it must hold at least {MIN_BYTES} random bytes, such as"
        raise ConfigError(f"{message} those of: openssl rand -hex 32", "fleet_key")
    secret = z85.encode(hashlib.blake2b(content, digest_size=32, person=b"weft-fleet").digest())
    return FleetKey(zmq.curve_public(secret), secret)
