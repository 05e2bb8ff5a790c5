"""Which process is this, and is that one dead? Identity is the process on one kernel, never a name and never a number
alone."""

from __future__ import annotations

import os
import socket

from strawq.model import Session


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
