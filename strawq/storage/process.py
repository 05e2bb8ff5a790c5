"""Which process is this, and is that one dead? Identity is the process on one kernel, never a name and never a number
alone. What a process leaves where others find it has a mark of it in its name."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket

from blake3 import blake3

from strawq.model import Session

LEFT_S = 3600.0  # marked directories are used for seconds: older ones are of dead processes, wherever they ran


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Start time of a process in clock ticks since boot, so that a reused pid is another process; empty if there is
    none."""
    stat = _read(f"/proc/{pid}/stat")
    fields = stat.rpartition(")")[2].split()
    return "" if len(fields) < 20 or fields[0] in "ZX" else fields[19]


def this_process(session: str, role: str, lease_seconds: float) -> Session:
    pid = os.getpid()
    return Session(
        id=session,
        host=socket.gethostname(),
        pid=pid,
        role=role,
        boot=_read("/proc/sys/kernel/random/boot_id"),
        pid_namespace=_pid_namespace(),
        pid_started=_started(pid),
        lease_seconds=lease_seconds,
    )


def known_dead(session: Session) -> bool:
    """True only if the session's process ran on this kernel, in this pid namespace, and is gone. False means: not
    known."""
    if not (session.boot and session.pid_namespace and session.pid_started):
        return False
    if session.boot != _read("/proc/sys/kernel/random/boot_id") or session.pid_namespace != _pid_namespace():
        return False
    return _started(session.pid) != session.pid_started


def make_marked_directory(path: str, prefix: str) -> str:
    """Make a directory in `path` for a few seconds of this process, and return its name: `prefix`, then a mark of the
    process. What dead processes have left under such names is removed; what may be a live one's stays."""
    name = f"{prefix}{_kernel()}-{os.getpid()}-{_started(os.getpid())}-{secrets.token_hex(6)}"
    os.mkdir(os.path.join(path, name), 0o700)
    now = os.stat(os.path.join(path, name)).st_mtime  # by the clock that stamps the others too
    for other in os.listdir(path):
        left = os.path.join(path, other)
        with contextlib.suppress(OSError):
            if other.startswith(prefix) and (_is_dead(other[len(prefix) :]) or now - os.stat(left).st_mtime > LEFT_S):
                shutil.rmtree(left)
    return name


def _kernel() -> str:
    """This kernel and pid namespace in short; empty if nobody can say."""
    boot, namespace = _read("/proc/sys/kernel/random/boot_id"), _pid_namespace()
    return blake3(f"{boot} {namespace}".encode()).hexdigest()[:12] if boot and namespace else ""


def _is_dead(mark: str) -> bool:
    kernel, pid, began = [*mark.split("-"), "", "", ""][:3]
    return bool(kernel and pid.isdecimal() and began) and kernel == _kernel() and _started(int(pid)) != began
