"""Opens folders beneath a root that strangers may write to, and reads them by descriptor.

A path may lead to another file at each look. So it is followed part by part, each part is opened
in the folder before it, and everything later uses these descriptors instead of the path:

    /srv/adapters (the root)        "..", and links, lead to descriptors that are held already
      └─ acme                       or are opened in the same way, so that no step can leave the
           └─ bot  ── Folder        root, whatever is renamed or replaced meanwhile
                └─ adapter_config.json

A link may lead anywhere beneath the root. The kernel's openat2 with RESOLVE_BENEATH would refuse
absolute links, and links to a file outside of the folder, as in the cache of the Hugging Face hub;
and not every kernel has it.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import TypeVar

from weft.core.errors import AdapterNotFound, AdapterPathRefused, AdapterUnavailable, refuse_file

READ_S = 30.0
"""How long the files of a folder may take to be read, besides what their sizes allow."""
READ_BYTES_PER_S = 16 << 20
"""Each file extends the deadline by its size divided by this."""
MAX_LINKS = 40
"""Links that one path may lead over."""

_CHUNK = 16 << 20
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
"""O_NONBLOCK, because opening a FIFO that nobody writes to would wait for ever."""

Parts = tuple[str, ...]
"""The names on the way from "/" to a folder or a file."""
FolderState = tuple[tuple[int, ...], ...]
"""See `Folder.state`."""
Result = TypeVar("Result")


def at_home(path: str | Path) -> Path:
    """The path, where `~` or `~user` is a home folder, if there is such a user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def home_folder(variable: str, beneath: str) -> Path | None:
    """The folder that the variable names, or else this one in the user's home folder; None if there
    is neither."""
    try:
        return Path(os.environ.get(variable) or Path.home() / beneath)
    except RuntimeError:
        return None


class Deadline:
    """The time by which something must be read. It moves as the sizes of files become known."""

    def __init__(self, seconds: float = READ_S) -> None:
        self._at_s = time.monotonic() + seconds

    def extend(self, num_bytes: int) -> None:
        self._at_s += num_bytes / READ_BYTES_PER_S

    @property
    def left_s(self) -> float:
        return max(0.0, self._at_s - time.monotonic())

    def check(self) -> None:
        """Raise AdapterUnavailable if it has passed."""
        if not self.left_s:
            raise AdapterUnavailable("reading the adapter's files takes too long", "lora_path")


def read_aside(work: Callable[[Deadline], Result], seconds: float = READ_S) -> Result:
    """The result of `work`, or its error, from a thread of its own. If a disk or network does not
    answer by the deadline, AdapterUnavailable is raised, and the thread is left to itself."""
    deadline, ended = Deadline(seconds), Future[Result]()

    def run() -> None:
        try:
            ended.set_result(work(deadline))
        except BaseException as error:
            ended.set_exception(error)

    Thread(target=run, name="weft-reader", daemon=True).start()
    while True:
        try:
            return ended.result(deadline.left_s)
        except TimeoutError:
            deadline.check()


class Roots:
    """The folders within which paths must stay. "/" allows all."""

    def __init__(self, paths: Iterable[str] = ("/",)) -> None:
        """`paths` are absolute and free of links."""
        self.paths = tuple(paths)
        self._roots = frozenset(PurePosixPath(path).parts[1:] for path in self.paths)

    def holding(self, parts: Parts) -> Parts | None:
        """The innermost root that these names lie beneath."""
        above = (parts[:i] for i in range(len(parts), -1, -1))
        return next((each for each in above if each in self._roots), None)

    def check(self, parts: Parts) -> None:
        """Raise OSError (EXDEV) unless the names lie beneath a root."""
        if self.holding(parts) is None:
            raise OSError(errno.EXDEV, "it lies outside the folders that may be read")


class _Trail:
    """The descriptors on the way from "/" to where a path leads."""

    def __init__(self, roots: Roots, names: Parts, descriptors: list[int]) -> None:
        self._roots = roots
        self.names = list(names)
        self.descriptors = descriptors
        """The descriptor of "/", then one for each name; the last is the place that was reached."""
        self.opened: list[int] = []

    def follow(self, path: str, flags: int) -> None:
        """Go on along `path`, and open its last part with these flags. Raises OSError, and always
        EXDEV outside the roots, so that nobody learns what exists there."""
        todo, num_links = self._begin(path), 0
        while todo:
            part = todo.pop()
            if part == "..":
                if self.names:
                    self.names.pop()
                    self.descriptors.pop()
                continue
            try:
                link = self._step(part, _FOLDER if todo else flags, last=not todo)
            except OSError:
                self._roots.check((*self.names, part))
                raise
            if link is not None:
                num_links += 1
                if num_links > MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                todo += self._begin(link)
        self._roots.check(tuple(self.names))

    def _step(self, part: str, flags: int, last: bool) -> str | None:
        """Open the next part; if it is a link, only tell where it leads."""
        try:
            return os.readlink(part, dir_fd=self.descriptors[-1])
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: it is no link
                raise
        if last:
            self._roots.check((*self.names, part))
        descriptor = os.open(part, flags, dir_fd=self.descriptors[-1])
        self.opened.append(descriptor)
        self.descriptors.append(descriptor)
        self.names.append(part)
        return None

    def close(self) -> None:
        while self.opened:
            os.close(self.opened.pop())

    def _begin(self, path: str) -> list[str]:
        """The parts of a path, the last one first. An absolute path first goes back to "/"."""
        if path.startswith("/"):
            del self.names[:], self.descriptors[1:]
        return [part for part in reversed(path.split("/")) if part not in ("", ".")]


class Folder:
    """An open folder of an adapter. It stays the same one whatever happens to its path."""

    def __init__(self, path: str, roots: Roots | None = None) -> None:
        """Raises OSError: EXDEV if an absolute `path` leads out of the roots, ENOENT and others
        if there is no such folder."""
        roots = roots or Roots()
        self._trail = _Trail(roots, (), [])
        if not _is_a_name(path):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        top = os.open("/", _FOLDER)
        self._trail.opened.append(top)
        self._trail.descriptors.append(top)
        try:
            self._trail.follow(path, _FOLDER)
            status = os.fstat(self._descriptor)
        except BaseException:
            self.close()
            raise
        names = tuple(self._trail.names)
        self.path = "/" + "/".join(names)
        """Its path without links, as it was when it was opened."""
        self.root = "/" + "/".join(roots.holding(names) or ())
        """The root that holds it. Links of its files must stay beneath this one."""
        self.identity = status.st_dev, status.st_ino
        """The same for the same folder, wherever it is opened on this machine."""

    def read(
        self, name: str, max_bytes: int, deadline: Deadline | None = None
    ) -> memoryview | None:
        """The content of one of its files, in memory of its own; None if there is no such file.

        Raises AdapterPathRefused (a link that leaves the root), AdapterInvalid (not a regular file,
        too large), AdapterNotFound (it can't be read), AdapterUnavailable (it takes too long).
        """
        trail = self._trail_from_here()
        try:
            trail.follow(name, _FILE)
            return _content(trail.descriptors[-1], name, max_bytes, deadline or Deadline())
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.EXDEV:
                why = "is a link that leaves the allowed folders"
                raise AdapterPathRefused(f"{name} {why}", "lora_path") from None
            if error.errno in (errno.ENXIO, errno.ENODEV):
                refuse_file(name, "it is no regular file")
            raise AdapterNotFound(f"{name} can't be read: {error.strerror}", name) from None
        finally:
            trail.close()

    def names(self) -> list[str]:
        """The sorted names of all that lies in the folder; empty if it can't be listed."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            listed = os.open(".", flags, dir_fd=self._descriptor)
        except OSError:
            return []
        try:
            with os.scandir(listed) as entries:
                return sorted(entry.name for entry in entries)
        finally:
            os.close(listed)

    def state(self, names: Iterable[str]) -> FolderState:
        """Which of these files the folder has, and when each was changed: as long as this stays the
        same, so does their content. Raises OSError for a file that can't be opened."""
        return (self.identity, *map(self._state_of, names))

    def _state_of(self, name: str) -> tuple[int, ...]:
        trail = self._trail_from_here()
        try:
            trail.follow(name, _FILE)  # NFS may answer from memory unless a file is opened
            s = os.fstat(trail.descriptors[-1])
        except FileNotFoundError:
            return ()
        finally:
            trail.close()
        return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns

    def close(self) -> None:
        self._trail.close()

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _trail_from_here(self) -> _Trail:
        """A trail on which links must stay beneath the root."""
        return _Trail(Roots([self.root]), tuple(self._trail.names), [*self._trail.descriptors])

    @property
    def _descriptor(self) -> int:
        return self._trail.descriptors[-1]


def _content(descriptor: int, name: str, max_bytes: int, deadline: Deadline) -> memoryview:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        refuse_file(name, "it is no regular file")
    size = status.st_size
    if size > max_bytes:
        refuse_file(name, f"larger than any that is served here ({max_bytes} bytes)")
    deadline.extend(size)
    memory = mmap(-1, size + 1, MAP_PRIVATE | MAP_ANONYMOUS)
    if size > _CHUNK:
        with suppress(OSError):  # large pages are faster, where the kernel has them
            memory.madvise(MADV_HUGEPAGE)
    content, length = memoryview(memory), 0
    while count := os.readv(descriptor, [content[length : length + _CHUNK]]):
        length += count
        deadline.check()
    if length > size:
        refuse_file(name, "it grew while it was read")
    return content[:length]


def open_beneath(folder: Path, name: str) -> int:
    """A descriptor of the regular file of this name in a folder. Raises OSError: ELOOP or EINVAL if
    there is something else, such as a link or a pipe."""
    holder = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor = os.open(name, _FILE, dir_fd=holder)
    finally:
        os.close(holder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file")
    return descriptor


def _is_a_name(path: str) -> bool:
    """Whether there can be a file of this name."""
    try:
        return b"\0" not in os.fsencode(path)
    except ValueError:
        return False
