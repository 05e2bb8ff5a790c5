"""Many groups through one pool, with processes killed all the time: does anything grow?

    python -m tools.soak [--root DIR] [--groups 200000] [--json]

One submitter, workers, one trainer; each is killed at random and started again, but for one worker, whose memory and
commits are measured. Garbage is collected every few seconds in the workers, three checkpoints are kept. For each tenth
of the groups the largest of everything is kept: files and bytes of each directory, memory, time per commit. At the end
every byte is verified, and every group must have been trained exactly once. The exit code is 1 if that is not so.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from strawq.garbage import SEEN_WAIT_SECONDS, STAGING_LOOK_SECONDS, collect_garbage
from strawq.limits import TRIM_ENTRIES
from strawq.model import QueueConfig
from strawq.pool import DEFAULT_QUEUE, Pool
from strawq.storage.mounts import mount_of
from strawq.trimming import trim_log
from strawq.verification import verify
from strawq.version import VERSION
from tools.soaking.gauges import Busiest, Look, Tenth, Written, look, newest_entry, summed
from tools.soaking.roles import CHECKPOINTS_KEPT, LEASE_SECONDS, Life, Read, Timed, start

TENTHS = 10
TICK_SECONDS = 0.01
END_SECONDS = 120.0
_NEVER = 1_000_000


class Settings(msgspec.Struct, frozen=True):
    """`look_seconds` lies between two looks at the directories, `kill_every` (seconds) between two kills on average.
    `keep_entries` are the newest log entries that trimming leaves."""

    root: str
    groups: int = 200_000
    workers: int = 2
    gc_seconds: float = 3.0
    kill_every: float = 2.0
    look_seconds: float = 1.0
    keep_entries: int = TRIM_ENTRIES
    seed: int = 0
    keep: bool = False


class Soaked(msgspec.Struct, frozen=True):
    """What a soak measured and found; `ok` if it found nothing. `growth` is the largest value of the last tenth by that
    of the first. `written_max` are the most log entries that were written between two trims, `busiest` those that were
    written in as long as an interval and a turn of upkeep may take. `end` is the pool when all work was done and
    collected."""

    ok: bool
    groups: int
    seconds: float
    kills: int
    lives: int
    log_entries: int
    trims: int
    written_max: int
    busiest: int
    epochs: int
    tenths: tuple[Tenth, ...]
    growth: dict[str, float]
    end: Look
    findings: tuple[str, ...]
    conditions: dict[str, str]
    settings: Settings


@dataclass
class Company:
    """The processes of a soak."""

    settings: Settings
    root: str
    notes: str
    chance: random.Random
    running: dict[int, str] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    lives: int = 0
    kills: int = 0
    died: list[str] = field(default_factory=list)
    steady: int = 0
    written: Written = field(default_factory=Written)
    busiest: Busiest = field(init=False)

    def __post_init__(self) -> None:
        # The longest interval, what a turn may wait, and a look at both ends.
        settings, turn = self.settings, SEEN_WAIT_SECONDS + STAGING_LOOK_SECONDS
        self.busiest = Busiest(1.25 * settings.gc_seconds + turn + 2 * settings.look_seconds)

    def start(self, role: str) -> int:
        settings = self.settings
        life = Life(
            next(self.numbers),
            role,
            self.root,
            self.notes,
            settings.groups,
            settings.gc_seconds,
            settings.keep_entries,
        )
        pid = start(life)
        self.running[pid] = role
        self.lives += 1
        return pid

    def reap(self) -> list[str]:
        """Roles of those that were killed since; whoever ended well has no more to do."""
        killed = []
        for pid in list(self.running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            role = self.running.pop(pid)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                self.kills += 1
                killed.append(role)
            elif status:
                self.died.append(f"a {role} ended by itself with status {status}; see {self.notes}")
        return killed

    def kill_one(self) -> None:
        """One that is alone is spared: killed before it has seen that its predecessor is dead, it would never end."""
        able = [pid for pid in self.running if pid != self.steady]
        if len(able) > 1:
            os.kill(self.chance.choice(able), signal.SIGKILL)

    def kill_all(self) -> None:
        for pid in self.running:
            os.kill(pid, signal.SIGKILL)
        for pid in self.running:
            os.waitpid(pid, 0)
        self.running.clear()


def soak(settings: Settings, say: bool = False) -> Soaked:
    """The whole run, in a new directory below `settings.root`, which is removed if nothing was found."""
    root = tempfile.mkdtemp(prefix="strawq-soak-", dir=settings.root)
    notes = tempfile.mkdtemp(prefix="strawq-soak-notes-")
    config = QueueConfig(max_attempts=_NEVER, max_expirations=_NEVER)
    Pool.init(root, run_id="soak", queues={DEFAULT_QUEUE: config}).close()
    company = Company(settings, root, notes, random.Random(settings.seed))
    begun = time.monotonic()
    try:
        tenths = _run(company, say)
        soaked = _audit(company, tenths, begun)
    except KeyboardInterrupt:
        # Interrupted: that is no finding, and nobody will look.
        company.kill_all()
        shutil.rmtree(root)
        shutil.rmtree(notes)
        raise
    finally:
        company.kill_all()
    if soaked.ok and not settings.keep:
        shutil.rmtree(root)
        shutil.rmtree(notes)
    return soaked


def _run(company: Company, say: bool) -> list[Tenth]:
    """Until all groups are trained. No pool is open here while processes are started: children are forks."""
    settings = company.settings
    for role in ("submitter", "trainer", *["worker"] * settings.workers):
        company.start(role)
    company.steady = company.start("steady")
    tenths: list[Tenth] = []
    looks: list[Look] = []
    times = _Tail(company)
    trained = _Trained(company)
    since = now = time.monotonic()
    kill_at, look_at = now + settings.kill_every, now
    while company.running:
        for role in company.reap():
            company.start(role)
        now = time.monotonic()
        if now >= kill_at:
            company.kill_one()
            kill_at = now + settings.kill_every * company.chance.uniform(0.5, 1.5)
        if now >= look_at:
            head = newest_entry(company.root)  # first: a trim must not be younger than the look that misses it
            looks.append(look(company.root, company.steady if company.steady in company.running else 0))
            company.written.see(looks[-1].floor_files, head)
            company.busiest.see(now, head)
            look_at = now + settings.look_seconds
            done = trained.count()
            while len(tenths) < TENTHS - 1 and looks and done >= settings.groups * (len(tenths) + 1) // TENTHS:
                tenths.append(summed(done, now - since, looks, times.read()))
                since, looks = now, looks[-1:]
                if say:
                    print(msgspec.json.encode(tenths[-1]).decode(), file=sys.stderr, flush=True)
        time.sleep(TICK_SECONDS)
    looks = [seen for seen in looks if seen.rss_kb] or looks
    tenths.append(summed(trained.count(), now - since, looks, times.read()))
    return tenths


class _Tail:
    """Reads what the worker that is never killed has written since the last time."""

    def __init__(self, company: Company) -> None:
        self._paths = Path(company.notes)
        self._offset = 0

    def read(self) -> list[float]:
        (path,) = self._paths.glob("*-steady.notes")
        with open(path, "rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0] + b"\n"
        self._offset += len(whole) if len(whole) > 1 else 0
        decoder = msgspec.json.Decoder(Timed)
        return [decoder.decode(line).ms for line in whole.split(b"\n") if line]


class _Trained:
    """Counts the groups that trainers have read, from what they wrote since the last time."""

    def __init__(self, company: Company) -> None:
        self._notes = Path(company.notes)
        self._offsets: Counter[Path] = Counter()
        self._batches: dict[str, int] = {}

    def count(self) -> int:
        decoder = msgspec.json.Decoder(Read)
        for path in self._notes.glob("*-trainer.notes"):
            with open(path, "rb") as file:
                file.seek(self._offsets[path])
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offsets[path] += len(whole) + len(newline)
            for line in whole.split(b"\n"):
                if line:
                    read = decoder.decode(line)
                    self._batches[read.batch] = len(read.groups)
        return sum(self._batches.values())


def account(notes: Path, groups: int) -> list[str]:
    """Which groups were not trained exactly once. Of each batch its last delivery counts: an earlier one was read by a
    trainer that died before it finished the batch."""
    last: dict[str, Read] = {}
    decoder = msgspec.json.Decoder(Read)
    for path in notes.glob("*-trainer.notes"):
        for line in path.read_bytes().split(b"\n")[:-1]:
            read = decoder.decode(line)
            if read.batch not in last or read.delivery > last[read.batch].delivery:
                last[read.batch] = read
    trained = Counter(group for read in last.values() for group in read.groups)
    missing = [group for group in range(groups) if not trained[group]]
    found = [f"group {group} was trained {count} times" for group, count in trained.items() if count > 1]
    found += [f"group {group} was never submitted" for group in trained if not 0 <= group < groups]
    return found + ([f"{len(missing)} groups were never trained: {missing[:10]} ..."] if missing else [])


def _audit(company: Company, tenths: Sequence[Tenth], begun: float) -> Soaked:
    settings, found = company.settings, list(company.died)
    with Pool.open(company.root, role="soak audit", lease_seconds=LEASE_SECONDS) as pool:
        _await_the_dead(pool)
        for _ in range(2):
            collect_garbage(pool)
        trim_log(pool, keep_entries=settings.keep_entries)
        found += [f"{finding.what}: {finding.problem}" for finding in verify(pool, full=True).findings]
        counts = pool.queue().counts()
        if (counts.total, counts.trained) != (settings.groups, settings.groups):
            found.append(f"the pool counts {counts.total} groups and {counts.trained} trained, not {settings.groups}")
        found += account(Path(company.notes), settings.groups)
        if len(pool.checkpoints()) > CHECKPOINTS_KEPT:
            found.append(f"{len(pool.checkpoints())} checkpoints are kept")
        head, trims, epochs = pool.log.refresh(
            lambda machine: (machine.seq, machine.trims, machine.state.meta.closed_epoch)
        )
        end = look(company.root)
    return Soaked(
        ok=not found,
        groups=settings.groups,
        seconds=round(time.monotonic() - begun, 1),
        kills=company.kills,
        lives=company.lives,
        log_entries=head,
        trims=trims,
        written_max=company.written.most,
        busiest=company.busiest.most,
        epochs=epochs,
        tenths=tuple(tenths),
        growth=_growth(tenths),
        end=end,
        findings=tuple(found[:50]),
        conditions=_conditions(company.root),
        settings=settings,
    )


def _await_the_dead(pool: Pool) -> None:
    pool.keeper.require()
    end = time.monotonic() + END_SECONDS
    while any(session.id != pool.keeper.current for session in pool.inspect().sessions):
        if time.monotonic() > end:
            raise TimeoutError("sessions of processes that are gone are still live")
        time.sleep(0.1)


def _growth(tenths: Sequence[Tenth]) -> dict[str, float]:
    first, last = tenths[0], tenths[-1]
    pairs = {name: (getattr(first.largest, name), getattr(last.largest, name)) for name in Look.__struct_fields__}
    pairs |= {name: (getattr(first, name), getattr(last, name)) for name in ("commit_p50_ms", "commit_p99_ms")}
    return {name: round(after / before, 2) for name, (before, after) in pairs.items() if before}


def _conditions(root: str) -> dict[str, str]:
    return {
        "strawq": VERSION,
        "python": platform.python_version(),
        "file_system": mount_of(root).fs_type,
        "processors": str(os.cpu_count()),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def _table(soaked: Soaked) -> str:
    names = (*Look.__struct_fields__, "commit_p50_ms", "commit_p99_ms")

    def value(tenth: Tenth, name: str) -> float:
        found: float = getattr(tenth, name) if name.startswith("commit") else getattr(tenth.largest, name)
        return found

    first, last = soaked.tenths[0], soaked.tenths[-1]
    middle = soaked.tenths[len(soaked.tenths) // 2]
    lines = [f"{'largest in a tenth':20}{'first':>14}{'middle':>14}{'last':>14}{'last/first':>12}"]
    for name in names:
        cells = "".join(f"{value(tenth, name):14,.10g}" for tenth in (first, middle, last))
        lines.append(f"{name:20}{cells}{soaked.growth.get(name, 0):12}")
    lines.append(
        f"{soaked.groups} groups in {soaked.seconds} s, {soaked.kills} kills, {soaked.log_entries} log entries, "
        f"{soaked.trims} trims ({soaked.written_max} entries between two at most, {soaked.busiest} in one "
        f"interval and turn), {soaked.epochs} epochs"
    )
    return "\n".join([*lines, *soaked.findings])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--root", default=tempfile.gettempdir(), help="directory in which the pool is made")
    parser.add_argument("--groups", type=int, default=200_000)
    parser.add_argument("--workers", type=int, default=2, help="besides the one that is never killed")
    parser.add_argument("--gc-seconds", type=float, default=3.0, help="between two collections in a worker")
    parser.add_argument("--kill-every", type=float, default=2.0, help="seconds, on average")
    parser.add_argument("--look-seconds", type=float, default=1.0)
    parser.add_argument("--keep-entries", type=int, default=TRIM_ENTRIES, help="log entries that trimming leaves")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="leave the pool there")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    given = vars(parser.parse_args(arguments))
    as_json = given.pop("json")
    soaked = soak(Settings(**given), say=not as_json)
    print(msgspec.json.encode(soaked).decode() if as_json else _table(soaked))
    return 0 if soaked.ok else 1


if __name__ == "__main__":
    sys.exit(main())
