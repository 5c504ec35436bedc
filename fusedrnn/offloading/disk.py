"""Files that offloaded buffers go to: they have no name, so that whatever ends the process leaves nothing behind."""

import contextlib
import ctypes
import errno
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Sequence

BLOCK = 4096
"""Bytes by which ranges of a file are aligned, so that none shares a page with another."""
_BEHIND = 8 << 20
"""Bytes written that the system may still have in memory."""
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_LIBC = ctypes.CDLL(None, use_errno=True)
_START, _FINISH = 2, 1 | 2 | 4
"""Flags of sync_file_range(2): begin to write dirty pages; wait for what is being written, write, and wait again."""


class Extent:
    """A file of a fixed size, without a name.

    The system keeps neither what was written to it nor what was read from it, so that a machine's memory is not filled
    by way of its page cache: writing waits, `_BEHIND` bytes later, until the disk has the data. Each method is called
    by one thread at a time.

    Args:
        folder: Folder in whose file system it is.
        nbytes: Its size.

    Raises:
        OSError: If there is no room.
    """

    def __init__(self, folder: str | os.PathLike[str], nbytes: int):
        self._folder = os.fspath(folder)
        self._fd = _nameless(self._folder)
        weakref.finalize(self, os.close, self._fd)
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            os.ftruncate(self._fd, nbytes)
        # Read from its end to its beginning, so that reading ahead of it serves nobody.
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._behind: deque[tuple[int, int]] = deque()
        self._lost: OSError | None = None

    def write(self, start: int, address: int, nbytes: int) -> None:
        """Write memory to the file.

        Raises:
            OSError: If not all of it could be written.
        """
        self._whole(os.pwritev, "writing", start, address, nbytes)
        _sync(self._fd, start, nbytes, _START)
        self._behind.append((start, nbytes))
        while sum(size for _, size in self._behind) > _BEHIND:
            first, size = self._behind.popleft()
            try:
                _sync(self._fd, first, size, _FINISH)
            except OSError as error:
                # Written long ago, as it seemed: nobody knows what is lost of all that the file has.
                self._lost = error
                raise
            self._forget(first, size)

    def read(self, start: int, address: int, nbytes: int) -> None:
        """Read into memory; what fails is tried once more.

        Raises:
            OSError: If not all of it could be read.
        """
        if self._lost is not None:
            raise self._lost
        try:
            self._whole(os.preadv, "reading", start, address, nbytes)
        except OSError:
            self._whole(os.preadv, "reading", start, address, nbytes)
        self._forget(start, nbytes)

    def _whole(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        word: str,
        start: int,
        address: int,
        nbytes: int,
    ) -> None:
        """Call until all bytes have been read or written."""
        memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        done = 0
        while done < nbytes:
            try:
                moved = call(self._fd, [memory[done:]], start + done)
            except OSError as error:
                raise self._error(error.errno or errno.EIO, word, start, nbytes) from error
            if moved == 0:
                raise self._error(errno.EIO, word, start, nbytes)
            done += moved

    def _error(self, number: int, word: str, start: int, nbytes: int) -> OSError:
        text = f"{os.strerror(number)} while {word} {nbytes} bytes at {start} of a file without a name in"
        return OSError(number, text, self._folder)

    def _forget(self, start: int, nbytes: int) -> None:
        """Let the system drop the pages of a range, or leave them where it does not know how."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._fd, start, -(-nbytes // BLOCK) * BLOCK, os.POSIX_FADV_DONTNEED)


def new_extent(folder: str | os.PathLike[str], nbytes: int) -> Extent | None:
    """Return a file of `nbytes`, or None where there is no room for it."""
    try:
        return Extent(folder, nbytes)
    except OSError:
        return None


def _nameless(folder: str) -> int:
    """Return the descriptor of a new file that nobody else can find."""
    with contextlib.suppress(OSError, AttributeError):
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fd, path = tempfile.mkstemp(prefix="fusedrnn-", dir=folder)
    os.unlink(path)
    return fd


def _sync(fd: int, start: int, nbytes: int, flags: int) -> None:
    """Let the system write a range to the disk."""
    call = getattr(_LIBC, "sync_file_range", None)
    if call is None or call(fd, ctypes.c_int64(start), ctypes.c_int64(nbytes), ctypes.c_uint(flags)) == 0:
        return
    number = ctypes.get_errno()
    if number not in (*_UNSUPPORTED, errno.ESPIPE):
        raise OSError(number, os.strerror(number))
