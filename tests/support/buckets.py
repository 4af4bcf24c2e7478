"""An S3 server in this process, and buckets in it."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import Request, urlopen

_names = itertools.count()


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of a server that keeps buckets in memory. While it runs, the environment says
    how to reach it, for this process and those that it starts."""
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield settings["AWS_ENDPOINT"]
    finally:
        server.stop()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def new_bucket() -> str:
    """The URI of a prefix in a new bucket of the server that runs."""
    name = f"bucket-{os.getpid()}-{next(_names)}"
    urlopen(Request(f"{os.environ['AWS_ENDPOINT']}/{name}", method="PUT"), timeout=10).close()
    return f"s3://{name}/fleet/one"
