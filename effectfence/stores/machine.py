"""What the file ledger asks of the operating system, in one place that a test can take over.

`Machine` is handed to the store: its calls are the only ones that write, cut, sync or rename, and
the only ones that look at a clock. The functions beside it open files safely and know what a
ledger must not lie on.

Files opened through `open_file` are closed in a forked child at once, whatever thread forked: a
child that lived on with the descriptors would keep the parent's locks alive after its death.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

_NETWORK: Final = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda", "ceph", "glusterfs",
        "lustre", "beegfs", "gpfs", "pvfs2", "orangefs", "ocfs2", "gfs2", "9p", "davfs", "webdav",
        "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.s3fs", "fuse.rclone",
        "fuse.gcsfuse", "fuse.goofys", "fuse.juicefs", "fuse.davfs", "fuse.curlftpfs",
        "fuse.mount-s3", "fuse.blobfuse", "fuse.blobfuse2", "fuse.nfs", "fuse.smbnetfs",
    }
)  # fmt: skip
"""File systems on which other machines may hold locks of their own, or none."""


class Machine:
    """The operating system as it is."""

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        return os.write(descriptor, data)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def sync_data(self, descriptor: int) -> None:
        """What was written, and the size, are on the disk."""
        if sys.platform == "darwin":
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fdatasync(descriptor)

    def sync(self, descriptor: int) -> None:
        """The same, with everything else about the file; also for folders."""
        if sys.platform == "darwin":
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fsync(descriptor)

    def boot(self) -> str:
        """Names this boot and this clock: two readings are comparable if it is the same."""
        return _boot()

    def boottime(self) -> float:
        """Seconds on a clock that runs while the machine sleeps and nobody can set."""
        if sys.platform == "darwin":  # there this one runs on during sleep
            return time.clock_gettime(time.CLOCK_MONOTONIC)
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> str:
        """For people only."""
        now = datetime.datetime.now(datetime.UTC)
        return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _boot() -> str:
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        return ""
    with contextlib.suppress(OSError):  # a kernel without time namespaces
        boot += "/" + os.readlink("/proc/self/ns/time")
    return boot


# Descriptors --------------------------------------------------------------------------------------

_guard = threading.Lock()
_open: set[int] = set()
_in_child: list[Callable[[], None]] = []


def open_file(path: str, flags: int) -> int:
    """A descriptor of `path` itself, never of what a symbolic link there points to.

    With `O_CREAT` a file that is missing is made, 0600 whatever the umask says; one that is there
    is left as it is.
    """
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK  # a pipe keeps nobody
    if not flags & os.O_CREAT:
        return _registered(path, flags)
    while True:
        try:
            descriptor = _registered(path, flags | os.O_EXCL)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
        else:
            os.fchmod(descriptor, 0o600)
            return descriptor
        with contextlib.suppress(FileNotFoundError):
            return _registered(path, flags & ~os.O_CREAT)


def _registered(path: str, flags: int) -> int:
    with _guard:
        descriptor = os.open(path, flags, 0o600)
        _open.add(descriptor)
        return descriptor


def close_file(descriptor: int) -> None:
    """Close it, unless it is closed already (or was, by a fork)."""
    with _guard:
        if descriptor not in _open:
            return
        _open.discard(descriptor)
        os.close(descriptor)


def call_in_child(forget: Callable[[], None]) -> None:
    """Have `forget` called in every forked child, after the descriptors are closed."""
    _in_child.append(forget)


def _after_fork_in_child() -> None:
    global _guard
    _guard = threading.Lock()
    for descriptor in _open:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _open.clear()
    for forget in _in_child:
        forget()


os.register_at_fork(
    before=lambda: _guard.acquire(),
    after_in_parent=lambda: _guard.release(),
    after_in_child=_after_fork_in_child,
)


# Places -------------------------------------------------------------------------------------------


class Unsuitable(Exception):
    """One sentence on why a file or folder cannot hold a ledger."""


def check_name(path: str) -> None:
    """Before anything is made beside it: what stands there already, if anything, is a file."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise Unsuitable("it is not a regular file but a folder")


def make_folder(path: str, machine: Machine) -> None:
    """Create the folder, 0700, and what is missing above it, durably."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folder(parent, machine)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)
    sync_folder(parent, machine)


def sync_folder(path: str, machine: Machine) -> None:
    """The names in this folder are on the disk."""
    descriptor = open_file(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        machine.sync(descriptor)
    finally:
        close_file(descriptor)


def check_folder(path: str) -> None:
    """`Unsuitable` if others may replace what is in it, or if it is not on this machine."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        _, kind = _mount_of(descriptor)
    finally:
        os.close(descriptor)
    if kind in _NETWORK:
        raise Unsuitable(
            f"{path} is on a network file system ({kind}), where locks do not hold; "
            "put the ledger on a local disk, or use PostgreSQL or Redis"
        )
    writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if writable and not found.st_mode & stat.S_ISVTX:
        raise Unsuitable(f"others may write in {path}; mend it with `chmod go-w {path}`")
    if found.st_uid not in (0, os.geteuid()) and os.geteuid() != 0:
        raise Unsuitable(f"{path} belongs to another user (uid {found.st_uid})")


def check_regular(path: str, descriptor: int) -> os.stat_result:
    """`Unsuitable` unless this open file is a regular file."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise Unsuitable(f"{path} is not a regular file")
    return found


def check_file(path: str, descriptor: int) -> None:
    """`Unsuitable` unless this open file is a regular file of ours alone."""
    found = check_regular(path, descriptor)
    if found.st_nlink > 1:
        raise Unsuitable(f"{path} has {found.st_nlink} hard links; a ledger has one name")
    if found.st_uid != os.geteuid():
        raise Unsuitable(f"{path} belongs to another user (uid {found.st_uid})")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unsuitable(f"others may write to {path}; mend it with `chmod 600 {path}`")
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        mounted = _mount_of(descriptor)[0] != _mount_of(folder)[0]
    finally:
        os.close(folder)
    if mounted:
        raise Unsuitable(f"{path} is itself a mount point; mount the folder around it instead")


def explain(path: str, error: OSError) -> str:
    """One sentence about a file that could not be opened."""
    if error.errno in (errno.ELOOP, errno.EMLINK):
        return f"{path} is a symbolic link; name the file itself"
    if error.errno in (errno.EISDIR, errno.ENXIO, errno.ENODEV):
        return f"{path} is not a regular file"
    return f"{error.filename or path}: {error.strerror or error}"


def _mount_of(descriptor: int) -> tuple[str, str]:
    """The mount that an open file is on, and its kind; two empty texts where nobody can say."""
    try:
        with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as file:
            mount = next(line.split()[1] for line in file if line.startswith("mnt_id:"))
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                fields = line.split()
                if fields[0] == mount:
                    return mount, fields[fields.index("-") + 1]
    except (OSError, StopIteration, ValueError):
        return "", ""
    return mount, ""
