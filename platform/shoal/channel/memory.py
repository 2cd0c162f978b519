"""Memory that processes of one host map: anonymous files (memfd, Linux), with no limit but the host's.

One process makes it, and tells others its address. They open it through /proc, and map it: nothing is sent or copied.
It is freed when the last process that has mapped it lets go of it, however each ends. Imports no torch: games map
weights.
"""

from __future__ import annotations

import mmap
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

IS_AVAILABLE = sys.platform == "linux" and hasattr(os, "memfd_create")


class MemoryAddress(NamedTuple):
    """Where memory is: a file descriptor of a process.

    inode: of the right file, since another file may have the number by now, or another container's process that of this
    boot:  the id of the process's host since it runs; "": of this host
    """

    pid: int
    fd: int
    inode: int
    size: int
    boot: str = ""

    @property
    def path(self) -> Path:
        """As which a process of the host opens it."""
        return Path(f"/proc/{self.pid}/fd/{self.fd}")


def get_boot_id() -> str:
    """The id of this host since it runs."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def create_memory(name: str, size: int) -> MemoryAddress:
    """Memory that all may write to. Others can open it until its maker closes the descriptor. Raises OSError."""
    fd = os.memfd_create(name)
    os.truncate(fd, size)
    return MemoryAddress(os.getpid(), fd, os.fstat(fd).st_ino, size, get_boot_id())


def share_content(name: str, content: bytes) -> MemoryAddress:
    """Sealed memory: its content never changes. Raises OSError."""
    import fcntl  # which Windows has not

    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    except OSError:
        os.close(fd)
        raise
    return MemoryAddress(os.getpid(), fd, os.fstat(fd).st_ino, len(content))


def map_memory(address: MemoryAddress, is_writable: bool = False) -> mmap.mmap | None:
    """The memory of another process; None where it cannot be opened, or is gone."""
    if address.boot not in ("", get_boot_id()):
        return None
    access = os.O_RDWR if is_writable else os.O_RDONLY
    # Another file may have the number by now, even a pipe: opening it must not wait.
    with suppress(OSError), open(os.open(address.path, access | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        result = os.fstat(file.fileno())
        if stat.S_ISREG(result.st_mode) and (result.st_ino, result.st_size) == (address.inode, address.size):
            if is_writable:
                return mmap.mmap(file.fileno(), address.size)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            return mmap.mmap(file.fileno(), address.size, flags=flags, prot=mmap.PROT_READ)
    return None
