"""The host cache: images of adapters in memory, bounded in number, least recently used out."""

from __future__ import annotations

import threading
from collections import OrderedDict

from weft.checkpoint import AdapterImage


class HostCache:
    """Thread-safe. An image that was put out of the cache is read again from its folder."""

    def __init__(self, max_images: int) -> None:
        self._max_images = max_images
        self._images: OrderedDict[str, AdapterImage] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, digest: str) -> AdapterImage | None:
        with self._lock:
            image = self._images.get(digest)
            if image is not None:
                self._images.move_to_end(digest)
            return image

    def put(self, image: AdapterImage) -> None:
        with self._lock:
            self._images[image.digest] = image
            self._images.move_to_end(image.digest)
            while len(self._images) > self._max_images:
                self._images.popitem(last=False)

    def drop(self, digest: str) -> None:
        with self._lock:
            self._images.pop(digest, None)

    def digests(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._images)
