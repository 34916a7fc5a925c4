"""Writable file system of a run: one tmpfs whose bytes and inodes the kernel bounds.

Bubblewrap bounds the bytes of a tmpfs but not its inodes, and an empty file costs the kernel about a KiB that
no process limit counts. So the process that becomes bubblewrap mounts it first, in its own user and mount
namespace, and bubblewrap binds its folders. It disappears with that process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

TMP, SHM = "/dev/shm/tmp", "/dev/shm/shm"
"""Two folders on it, visible only to the process that called `mount_scratch`."""
_PLACE = "/dev/shm"
_BYTES_PER_INODE = 8192
"""32 MiB hold 4096 files. ext4 reserves one inode per 16384 bytes (mke2fs.conf, inode_ratio)."""
_MS_NOSUID, _MS_NODEV = 2, 4
_PR_SET_DUMPABLE = 4
_libc = ctypes.CDLL(None, use_errno=True)


def mount_scratch(size_bytes: int, folders: Sequence[str] = (TMP, SHM)) -> None:
    """Mount the file system for this process and its children, and make folders directly on it.

    Call it between fork and exec, with the run's user id. Raises OSError if the kernel refuses.
    """
    user, group = os.geteuid(), os.getegid()
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise root owns /proc/self after a change of user
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    options = f"size={size_bytes},nr_inodes={max(16, size_bytes // _BYTES_PER_INODE)},mode=755"
    if _libc.mount(b"scratch", _PLACE.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), "mount", _PLACE)
    for folder in folders:
        os.mkdir(folder)
        os.chmod(folder, 0o1777)
