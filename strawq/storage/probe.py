"""Whether a mount does what strawq needs: measured in seconds, on the mount itself.

The rule it keeps: the verdict rests on what the mount did, and on settings that were read from it, not on its name.
Everything is done in one directory of the probe's own (its name begins with a dot, so a pool does not list it), which
is removed at the end; what a killed probe has left is removed by the next one, and is no content of `directory`.

With a second client of the same volume (`peer`) it also measures what only two hosts can show: one winner between
them, absence that is fresh, how long removed and replaced files are seen, and whether locks exclude. Without a peer
these stay unknown, and the report says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import msgspec

from strawq.errors import BadInput
from strawq.storage import layout
from strawq.storage.exclusive import Primitive, link_exclusive, race, rename_exclusive
from strawq.storage.mounts import (
    Finding,
    JuiceFSSettings,
    MeasuredStorage,
    Mount,
    judge_mount,
    measured_storage,
    mount_of,
    read_juicefs_settings,
)
from strawq.storage.posix import PosixFiles
from strawq.storage.process import make_marked_directory

Verdict = Literal["fit", "fit_with_warnings", "unfit"]

WAIT_S_MAX = 5.0  # how long a peer may take to see a change before the probe gives up on it
ABSENCE_S_MAX = 0.25  # longer than any round trip: absence that lasts was answered from a cache
FREE_BYTES_MIN = 1 << 30
FREE_INODES_MIN = 10_000

_RACES = 20
_ROUNDS = 10
_RACERS = 4
_SAMPLE = b"strawq probe\n" * 315  # about one block


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict and what it rests on. `measured` holds numbers by name: times end in `_ms` or `_s`, sizes in
    `_bytes`; a value of None was not measured. `exclusive_create` is the primitive to use."""

    directory: str
    peer: str | None
    verdict: Verdict
    exclusive_create: Literal["link", "rename", "none"]
    reasons: list[str]
    warnings: list[str]
    notes: list[str]
    measured: dict[str, Any]
    mount: Mount
    juicefs: JuiceFSSettings | None
    storage: MeasuredStorage


class _Findings:
    def __init__(self) -> None:
        self.found: list[Finding] = []
        self.measured: dict[str, Any] = {}

    def add(self, weight: Literal["unfit", "warning", "note"], text: str) -> None:
        self.found.append(Finding(weight, text))

    def texts(self, weight: str) -> list[str]:
        return [finding.text for finding in self.found if finding.weight == weight]


def probe(
    directory: str | os.PathLike[str], peer: str | os.PathLike[str] | None = None, *, accept_writeback: bool = False
) -> ProbeReport:
    """Qualify `directory` for a pool. `peer` is the same directory seen through a second client (another mount of the
    volume).

    Raises `BadInput` if a directory is not there. What the mount cannot do is in the report, not an exception."""
    path = _existing(directory)
    peer_path = None if peer is None else _existing(peer)
    mount = mount_of(path)
    juicefs = read_juicefs_settings(mount.mount_point) if mount.is_juicefs else None
    findings = _Findings()
    findings.found += judge_mount(mount, juicefs, accept_writeback=accept_writeback)
    if peer_path is None:
        findings.add("note", "no second client was given (--peer): what other hosts see was not measured")
    else:
        _judge_peer(peer_path, accept_writeback, findings)
    _look_at_space(path, findings)
    chosen: Literal["link", "rename", "none"] = "none"
    try:
        with _scratch(path, findings) as name:
            chosen = _measure(path, peer_path, name, findings)
    except OSError as error:
        findings.add("unfit", f"writing in {path} failed: {error}; see that it is writable and has room")
    return ProbeReport(
        directory=path,
        peer=peer_path,
        verdict=_verdict(findings),
        exclusive_create=chosen,
        reasons=findings.texts("unfit"),
        warnings=findings.texts("warning"),
        notes=findings.texts("note"),
        measured=findings.measured,
        mount=mount,
        juicefs=juicefs,
        storage=measured_storage(mount, juicefs),
    )


def _judge_peer(peer: str, accept_writeback: bool, findings: _Findings) -> None:
    """The second client's own settings count as much: a pool is as fit as the least fit mount that uses it."""
    mount = mount_of(peer)
    settings = read_juicefs_settings(mount.mount_point) if mount.is_juicefs else None
    for finding in judge_mount(mount, settings, accept_writeback=accept_writeback):
        if finding.weight != "note":
            findings.add(finding.weight, f"peer: {finding.text}")


def _existing(directory: str | os.PathLike[str]) -> str:
    path = os.path.abspath(os.fspath(directory))
    if not os.path.isdir(path):
        raise BadInput(f"{path} is not a directory; create it first")
    return path


def _verdict(findings: _Findings) -> Verdict:
    if findings.texts("unfit"):
        return "unfit"
    return "fit_with_warnings" if findings.texts("warning") else "fit"


@contextlib.contextmanager
def _scratch(path: str, findings: _Findings) -> Iterator[str]:
    """A directory of the probe's own below `path`; yields its name."""
    name = make_marked_directory(path, layout.PROBES)
    own = os.path.join(path, name)
    try:
        yield name
    finally:
        try:
            _remove_tree(own)
        except OSError as error:
            findings.add("warning", f"{own} could not be removed ({error}); remove it by hand")


def _remove_tree(path: str) -> None:
    # Twice: an NFS client keeps a `.nfs*` name until the last descriptor of the removed file is closed, and ENOTEMPTY
    # passes.
    with contextlib.suppress(OSError):
        shutil.rmtree(path)
        return
    shutil.rmtree(path)


def _look_at_space(path: str, findings: _Findings) -> None:
    found = os.statvfs(path)
    free = found.f_bavail * found.f_frsize if found.f_blocks else None  # some file systems do not count them
    inodes = found.f_favail if found.f_files else None
    findings.measured.update(free_bytes=free, free_inodes=inodes)
    if free == 0 or inodes == 0:
        counted = [f"{count} {what}" for count, what in ((free, "bytes"), (inodes, "inodes")) if count is not None]
        findings.add("unfit", f"{path} is full ({', '.join(counted)} free); make room")
        return
    if free is not None and free < FREE_BYTES_MIN:
        findings.add("warning", f"only {free >> 20} MiB are free below {path}; make room")
    if inodes is not None and inodes < FREE_INODES_MIN:
        findings.add("warning", f"only {inodes} inodes are free below {path}; make room")


def _measure(path: str, peer: str | None, name: str, findings: _Findings) -> Literal["link", "rename", "none"]:
    files = PosixFiles(os.path.join(path, name))
    other = PosixFiles(os.path.join(peer, name)) if peer is not None else None
    try:
        if other is not None and not _is_same_directory(files, other, findings):
            other.close()
            other = None
        if not _look_at_sync(files, findings):
            return "none"
        working: list[Primitive] = []
        for primitive in ("link", "rename"):
            if _look_at_primitive(files, other or files, primitive, findings):
                working.append(primitive)
        if not working:
            text = "neither link nor renameat2(RENAME_NOREPLACE) creates a name exclusively; "
            findings.add("unfit", text + "use another file system")
            return "none"
        if "link" not in working:
            findings.add("warning", "hard links do not work; publishing goes by renameat2(RENAME_NOREPLACE)")
        _look_at_locks(files, other, findings)
        if other is not None:
            _look_at_visibility(files, other, working[0], findings)
        _look_at_cost(files, working[0], findings)
        return working[0]
    finally:
        files.close()
        if other is not None:
            other.close()


def _wait(look: Callable[[], bool]) -> float | None:
    """Seconds until `look()` is true; None if it is not within `WAIT_S_MAX`."""
    start = time.monotonic()
    while not look():
        if time.monotonic() - start > WAIT_S_MAX:
            return None
        time.sleep(0.001)
    return time.monotonic() - start


def _reads(files: PosixFiles, path: str, wanted: bytes | None) -> bool:
    """Whether `path` has the wanted content now; None: that it is not there."""
    try:
        return files.read(path) == wanted
    except FileNotFoundError:
        return wanted is None
    except OSError as error:
        if error.errno == errno.ESTALE:
            return wanted is None
        raise


def _is_same_directory(files: PosixFiles, other: PosixFiles, findings: _Findings) -> bool:
    files.stage("same", [files.root.encode()])
    if _wait(lambda: _reads(other, "same", files.root.encode())) is None:
        findings.add(
            "unfit",
            f"{os.path.dirname(other.root)} does not show what is written in {os.path.dirname(files.root)}; "
            "give --peer the same directory through a second client",
        )
        return False
    if os.stat(files.root).st_dev == os.stat(other.root).st_dev:
        findings.add("warning", "the peer is the same mount, not a second client; mount the volume again for --peer")
    return True


def _look_at_sync(files: PosixFiles, findings: _Findings) -> bool:
    try:
        files.stage("synced", [_SAMPLE])
    except OSError as error:
        findings.add("unfit", f"writing and syncing a file failed: {error}; the log needs fsync")
        return False
    try:
        files.sync_directory("")
    except OSError as error:
        findings.add("unfit", f"syncing a directory failed: {error}; the log needs fsync on directories")
        return False
    return True


def _look_at_primitive(files: PosixFiles, other: PosixFiles, primitive: Primitive, findings: _Findings) -> bool:
    """Whether it creates a name only once: one after the other, and in races between the clients (or threads of
    one)."""
    step = link_exclusive if primitive == "link" else rename_exclusive
    findings.measured[primitive] = False
    files.make_directory(primitive)
    racers = [files, other] if other is not files else [files] * _RACERS
    with contextlib.ExitStack() as stack:
        fds = []
        for client in racers:
            fds.append(os.open(os.path.join(client.root, primitive), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            stack.callback(os.close, fds[-1])
        for number in range(_RACES):
            contents = [f"{primitive} {number} {racer}".encode() for racer in range(len(racers))]
            for racer, client in enumerate(racers):
                client.stage(f"{primitive}/s{number}.{racer}", [contents[racer]])
            outcomes = race(step, fds, number)
            failed = [code for code in outcomes if code not in (0, errno.EEXIST)]
            if failed:
                findings.measured[f"{primitive}_error"] = errno.errorcode.get(failed[0], str(failed[0]))
                return False
            winners = [racer for racer, code in enumerate(outcomes) if code == 0]
            target = f"{primitive}/t{number}"
            if len(winners) != 1:
                findings.measured[f"{primitive}_error"] = f"{len(winners)} winners of one name"
                return False
            for racer, client in enumerate(racers):
                client.remove(f"{primitive}/s{number}.{racer}")
            # After the staged names are gone: links have been seen to lose their content with the first name.
            if not all(_reads(client, target, contents[winners[0]]) for client in racers):
                findings.measured[f"{primitive}_error"] = "the winner's content is not there"
                return False
    findings.measured[primitive] = True
    return True


def _look_at_locks(files: PosixFiles, other: PosixFiles | None, findings: _Findings) -> None:
    """Locks only cut contention, so whatever they do is never worse than a warning."""
    files.stage("lock", [b""])
    exclusive: bool | None = None
    try:
        exclusive = _excludes(os.path.join(files.root, "lock"), os.path.join((other or files).root, "lock"))
    except OSError as error:
        findings.measured["flock_error"] = errno.errorcode.get(error.errno or 0, str(error))
        findings.add("warning", f"flock does not work ({error.strerror}): commits stay right but contend more")
    else:
        if not exclusive:
            where = "two clients" if other is not None else "two openers"
            findings.add("warning", f"flock does not exclude {where}: commits contend more, but stay right; enable it")
    findings.measured["flock"] = exclusive


def _excludes(path: str, other: str) -> bool:
    with open(path, "rb") as first, open(other, "rb") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _look_at_visibility(files: PosixFiles, other: PosixFiles, primitive: Primitive, findings: _Findings) -> None:
    """What the second client sees after the first has published, removed, replaced."""
    measured = findings.measured
    files.primitive = primitive
    # A name that the peer never looked up must be there at once; that it is seen after an earlier look shows that
    # absence is not cached.
    for label, looked_before in (("fresh", False), ("absent_before", True)):
        worst = _appears_s(files, other, label, looked_before)
        measured[f"visible_{label}_s"] = worst
        if worst is None or worst > ABSENCE_S_MAX:
            kept = f"for {worst:.2f} s" if worst is not None else f"for more than {WAIT_S_MAX:g} s"
            findings.add(
                "unfit",
                f"the second client did not see a published name {kept}: absence is cached; "
                "turn negative lookup caching off",
            )
    measured["stale_removed_s"] = _stale_s(other, "fresh0", None, lambda: files.remove("fresh0"))
    files.replace("beat", b"1")
    if _wait(lambda: _reads(other, "beat", b"1")) is not None:
        measured["stale_replaced_s"] = _stale_s(other, "beat", b"2", lambda: files.replace("beat", b"2"))
    for name, what in (("stale_removed_s", "removed"), ("stale_replaced_s", "replaced")):
        if measured.get(name) is None:
            findings.add("warning", f"the peer sees {what} files for more than {WAIT_S_MAX:g} s; shorten its caches")


def _appears_s(files: PosixFiles, other: PosixFiles, label: str, looked_before: bool) -> float | None:
    """The longest that a published name took to appear to the other client, up to the first slow one; None: never."""
    worst = 0.0
    for number in range(_ROUNDS):
        path = f"{label}{number}"
        if looked_before and not _reads(other, path, None):
            raise OSError(errno.EIO, "a name that nobody made is there", path)
        files.stage("visible", [_SAMPLE])
        files.publish("visible", path)
        files.sync_directory("")
        files.remove("visible")
        took = _wait(partial(_reads, other, path, _SAMPLE))
        if took is None:
            return None
        worst = max(worst, took)
        if worst > ABSENCE_S_MAX:
            break
    return worst


def _stale_s(other: PosixFiles, path: str, wanted: bytes | None, change: Callable[[], object]) -> float | None:
    with contextlib.suppress(FileNotFoundError):
        other.read(path)  # what it has not looked at, it cannot remember
    change()
    return _wait(lambda: _reads(other, path, wanted))


def _look_at_cost(files: PosixFiles, primitive: Primitive, findings: _Findings) -> None:
    """Median time of each step of a commit."""
    files.primitive = primitive
    files.make_directory("cost")
    times: dict[str, list[float]] = {"stage": [], "publish": [], "sync_directory": [], "read": [], "absent": []}

    def timed(step: str, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        with contextlib.suppress(FileNotFoundError):
            call()
        times[step].append(time.perf_counter() - start)

    for number in range(_ROUNDS):
        staged, path = f"cost/s{number}", f"cost/t{number}"
        timed("absent", partial(files.size, path))
        timed("stage", partial(files.stage, staged, [_SAMPLE]))
        timed("publish", partial(files.publish, staged, path))
        timed("sync_directory", partial(files.sync_directory, "cost"))
        timed("read", partial(files.read, path))
        files.remove(staged)
    for step, seconds in times.items():
        findings.measured[f"{step}_ms"] = round(statistics.median(seconds) * 1000, 4)
