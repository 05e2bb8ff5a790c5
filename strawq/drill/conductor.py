"""Starts the processes of a drill, kills and freezes them by a seeded schedule, starts others in their place; then
lets work end in peace and audits.

The rule: signals are counted as the kernel reports them, and every child that was started here is ended here, or dies
with this process. Nothing is touched but a new directory below the one that was named.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from strawq.drill.audit import Account, fold_history, settle
from strawq.drill.points import POINTS
from strawq.drill.troupe import Running, Settings, Troupe
from strawq.errors import BadInput
from strawq.garbage import collect_garbage
from strawq.limits import LEASE_SECONDS_MIN
from strawq.model import QueueConfig
from strawq.pool import DEFAULT_QUEUE, Pool
from strawq.storage import layout
from strawq.storage.mounts import mount_of
from strawq.verification import verify

LEASE_SECONDS, LEASE_SECONDS_NETWORK = 1.0, 3.0
"""On a network mount a heartbeat is seen by another client up to a second late."""
STOPS_PER_KILL = 0.15
TICK_SECONDS = 0.005
BEGIN_SECONDS = 30.0
END_SECONDS = 60.0
FINISH_SECONDS = 240.0
FINDINGS_SHOWN = 50
_NEVER = 1_000_000

Progress = Callable[[str], None]


class Drilled(msgspec.Struct, frozen=True):
    """What a drill found. `points` counts the named moments that were struck. `pool` is empty if it was removed."""

    groups: int
    kills: int
    stops: int
    lost: int
    duplicated: int
    stale_commits: int
    leaked_leases: int
    staging_left: int
    ok: bool
    prompts: int
    entries: int
    lives: int
    seconds: float
    seed: int
    points: dict[str, int]
    findings: tuple[str, ...]
    pool: str
    ledgers: str


def run_drill(settings: Settings, progress: Progress = lambda _: None) -> Drilled:
    """The whole drill. `BadInput` if the directories will not do; `TryAgain` if a process does not end."""
    _require_sense(settings)
    network = bool(settings.peer) or mount_of(settings.directory).fs_type.startswith(("fuse", "nfs"))
    lease = settings.lease_seconds or (LEASE_SECONDS_NETWORK if network else LEASE_SECONDS)
    roots = _make_roots(settings)
    ledgers = Path(tempfile.mkdtemp(prefix="strawq-drill-"))
    config = QueueConfig(max_attempts=_NEVER, max_expirations=_NEVER)
    Pool.init(roots[0], run_id="drill", queues={DEFAULT_QUEUE: config}).close()
    troupe = Troupe(settings, roots, ledgers, lease, random.Random(settings.seed))
    started = time.monotonic()
    try:
        watcher = troupe.start("watcher", 0, strikeable=False)
        _chaos(troupe, progress)
        progress("finishing the work")
        _finish(troupe)
        progress("auditing")
        drilled = _audit(troupe, watcher, started)
    except Exception:
        raise  # What went wrong can be looked at.
    except BaseException:
        # Interrupted: that is no finding, and nobody will look.
        troupe.kill_all()
        _remove(roots[0], ledgers)
        raise
    finally:
        troupe.kill_all()
    if drilled.ok and not settings.keep:
        _remove(roots[0], ledgers)
        drilled = msgspec.structs.replace(drilled, pool="", ledgers="")
    return drilled


def _remove(root: str, ledgers: Path) -> None:
    for path in (root, ledgers):
        shutil.rmtree(path)


def _require_sense(settings: Settings) -> None:
    times = (settings.minutes, settings.kill_every, settings.stop_every or 1.0, settings.lease_seconds or 1.0)
    if settings.workers < 1 or not all(0 < number < math.inf for number in times):
        raise BadInput("a drill has at least one worker, and its times are above zero")
    if settings.lease_seconds and settings.lease_seconds < LEASE_SECONDS_MIN:
        raise BadInput(f"a lease of {settings.lease_seconds:g} s is too short; at least {LEASE_SECONDS_MIN} s")
    for name in filter(None, (settings.directory, settings.peer)):
        if not os.path.isdir(name):
            raise BadInput(f"{name} is not a directory; name one on the mount that the drill is for")


def _make_roots(settings: Settings) -> tuple[str, str]:
    """A new directory, as each side sees it."""
    try:
        root = tempfile.mkdtemp(prefix="strawq-drill-", dir=os.path.abspath(settings.directory))
    except OSError as error:
        raise BadInput(f"nothing can be made in {settings.directory}: {error.strerror}") from error
    if not settings.peer:
        return root, root
    other = os.path.join(os.path.abspath(settings.peer), os.path.basename(root))
    if not os.path.isdir(other):
        os.rmdir(root)
        raise BadInput(f"{settings.peer} does not show what is made in {settings.directory}: they are not one volume")
    return root, other


def _chaos(troupe: Troupe, progress: Progress) -> None:
    settings, chance = troupe.settings, troupe.chance
    parts = ["submitter", "trainer", "cleaner", "cleaner", *["worker"] * settings.workers, "trainer"]
    for at, role in enumerate(parts):
        troupe.start(role, at % 2)
    _begin(troupe)
    stop_every = settings.stop_every or settings.kill_every / STOPS_PER_KILL
    start = now = time.monotonic()
    end = start + settings.minutes * 60
    kill_at, stop_at = start + settings.kill_every, start + stop_every
    while now < end:
        troupe.replace_the_dead()
        if now >= kill_at:
            troupe.strike(signal.SIGKILL)
            kill_at = now + settings.kill_every * chance.uniform(0.5, 1.5)
        if now >= stop_at:
            troupe.strike(signal.SIGSTOP)
            stop_at = now + stop_every * chance.uniform(0.5, 1.5)
        progress(f"{now - start:.0f} of {end - start:.0f} s, {troupe.kills} killed, {troupe.stops} stopped")
        time.sleep(TICK_SECONDS)
        now = time.monotonic()


def _begin(troupe: Troupe) -> None:
    """Nobody is struck from outside before there is something to lose: on a busy machine that takes a moment."""
    end = time.monotonic() + BEGIN_SECONDS
    while time.monotonic() < end:
        troupe.replace_the_dead()
        if any(ledger.stat().st_size for ledger in troupe.ledgers.glob("*-submitter.ledger")):
            return
        time.sleep(TICK_SECONDS)


def _finish(troupe: Troupe) -> None:
    """Nobody is struck any more. Those that stood still go on with what they believe they hold, and end; others finish
    all work. The groups are kept by a checkpoint until they have been audited."""
    troupe.end([child for child in troupe.running if child.strikeable], END_SECONDS)
    with Pool.open(troupe.roots[0], lease_seconds=troupe.lease_seconds) as pool:
        pool.queue().seal()
    workers = [troupe.start("worker", at % 2, strikeable=False, finishing=True) for at in range(2)]
    troupe.end(workers, FINISH_SECONDS, ask=False)
    with Pool.open(troupe.roots[0], lease_seconds=troupe.lease_seconds) as pool:
        pool.checkpoint("drill")
    trainers = [troupe.start("trainer", at, strikeable=False, finishing=True) for at in range(2)]
    troupe.end(trainers, FINISH_SECONDS, ask=False)


def _audit(troupe: Troupe, watcher: Running, started: float) -> Drilled:
    with Pool.open(troupe.roots[0], role="drill audit", lease_seconds=troupe.lease_seconds) as pool:
        leaked = _await_the_dead(pool, 4 * troupe.lease_seconds + 5)
        damage = [
            f"{found.what}: {found.problem}" for found in verify(pool, full=True).findings if _matters(found.what)
        ]
        pool.drop_checkpoint("drill")
        for _ in range(2):
            collect_garbage(pool)
        damage += [f"{found.what}: {found.problem}" for found in verify(pool).findings]
        staging = [name for name in pool.files.names(layout.STAGING) if not name.startswith(pool.instance)]
        counts = pool.queue().counts()
    troupe.end([watcher], END_SECONDS)
    account = fold_history(watcher.life.path("history"))
    settle(account, troupe.ledgers)
    _compare_counts(account, counts.total, counts.trained, counts.dropped)
    found = [*account.lost, *account.duplicated, *account.stale, *account.other, *damage, *troupe.died]
    found += [f"session {name} of a process that is gone still holds {held}" for name, held in leaked.items()]
    found += [f"staging file {name} is left" for name in staging]
    return Drilled(
        groups=len(account.accepted),
        kills=troupe.kills,
        stops=troupe.stops,
        lost=len(account.lost),
        duplicated=len(account.duplicated),
        stale_commits=len(account.stale),
        leaked_leases=sum(leaked.values()),
        staging_left=len(staging),
        ok=not found,
        prompts=account.prompts,
        entries=account.seq,
        lives=troupe.lives,
        seconds=round(time.monotonic() - started, 1),
        seed=troupe.settings.seed,
        points=_points(troupe.ledgers),
        findings=tuple(found[:FINDINGS_SHOWN]),
        pool=troupe.roots[0],
        ledgers=str(troupe.ledgers),
    )


def _matters(what: str) -> bool:
    """Before garbage is collected, the killed have left staging files: that is no finding yet."""
    return what != f"{layout.STAGING}/"


def _await_the_dead(pool: Pool, seconds: float) -> dict[str, int]:
    """Until every other session has been expired; those that were not, with what they hold."""
    pool.keeper.require()
    end = time.monotonic() + seconds
    while True:
        others = [session for session in pool.inspect().sessions if session.id != pool.keeper.current]
        if not others or time.monotonic() > end:
            return {session.id: max(1, session.leases + session.batches) for session in others}
        time.sleep(0.05)


def _compare_counts(account: Account, total: int, trained: int, dropped: int) -> None:
    ends = Counter(account.ended.values())
    if (total, trained, dropped) != (account.prompts, ends["trained"], ends["dropped"]):
        account.other.append(
            f"the pool counts {total} prompts, {trained} trained, {dropped} dropped; its history says "
            f"{account.prompts}, {ends['trained']}, {ends['dropped']}"
        )


def _points(ledgers: Path) -> dict[str, int]:
    struck = Counter(
        line.partition("\t")[2] for path in ledgers.glob("*.mark") for line in path.read_text("utf-8").splitlines()
    )
    return {name: struck[name] for name in POINTS}
