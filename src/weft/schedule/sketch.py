"""A small sketch of the prefixes in a cache, by which requests find the engine that has them.

Of a sequence's chain of blocks, the sketch has only the blocks at some depths, each about half as
deep again as the one before:

    block    1  2  3  4  .  6  .  8  .  .  .  12  .  .  .  16 ...
    sketch   x  x  x  x     x     x            x            x

So a prefix of 256 blocks has 16 keys, and is known to two thirds of its length or better.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from weft.core.load import MAX_PREFIXES

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""The depths, in blocks, of the prefixes in a sketch."""
INDICES = frozenset(depth - 1 for depth in DEPTHS)


def _short(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


class PrefixSketch:
    """The keys of the cached prefixes that were most recently registered or found."""

    def __init__(self, max_keys: int = MAX_PREFIXES) -> None:
        self._max_keys = max_keys
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        """Those used last at the end."""

    def use(self, index: int, key: bytes) -> None:
        """Note that the block `index` of a sequence, with this key, was registered or found."""
        if index in INDICES:
            self._keys[key] = None
            self._keys.move_to_end(key)
            if len(self._keys) > self._max_keys:
                self._keys.popitem(last=False)

    def found(self, keys: Sequence[bytes]) -> None:
        """Note that the first blocks of a sequence, with these keys, were found."""
        for depth in DEPTHS:
            if depth > len(keys):
                break
            self.use(depth - 1, keys[depth - 1])

    def drop(self, key: bytes) -> None:
        """Forget the block with this key, as it lost its content."""
        self._keys.pop(key, None)

    @property
    def keys(self) -> frozenset[int]:
        return frozenset(map(_short, self._keys))


def prefix_keys(
    key_of: Callable[[int], bytes], num_tokens: int, block_size: int
) -> list[tuple[int, int]]:
    """`(number of tokens, key)` of each prefix of a request that sketches have, the shortest first.
    At least one token is left to compute. `key_of(n)`: the key of the n-th block."""
    most = (num_tokens - 1) // block_size
    return [(depth * block_size, _short(key_of(depth))) for depth in DEPTHS if depth <= most]
