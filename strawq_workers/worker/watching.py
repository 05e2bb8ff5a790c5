"""What goes on in the pool around the work: other branches, lost sessions, pauses.

The rule: a lease that is not ours any more is let go within a second, without a report; the work goes on with the new
session and the new branch. A pause keeps every lease and burns no attempt: it is acknowledged when, by the worker's
policy, its engines' work has stopped and prefixes are saved. After a resume with a new version, nothing is sent before
the engines serve it, or `version_wait_s` is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from strawq.errors import BadInput, StrawqError
from strawq.model import UNVERSIONED, policy_number
from strawq_workers.worker.group import GroupRun
from strawq_workers.worker.place import Place, first_of
from strawq_workers.worker.reporting import words
from strawq_workers.worker.serving import wait_for_version
from strawq_workers.worker.source import Around

log = logging.getLogger("strawq.worker")

LOOK_SECONDS_MAX = 0.4
RETRY_S = 1.0
LONG_PAUSE_S = 60.0


class Watcher:
    """Looks around until cancelled. Belongs to the worker's event loop."""

    def __init__(self, place: Place, runs: Callable[[], Iterable[GroupRun]]) -> None:
        self.place = place
        self.runs = runs
        self.paused = False
        self.look_now = asyncio.Event()
        self.peers: tuple[str, ...] = ()
        """Live sessions of this worker's role, in the order they joined."""
        self._looked = False
        self._opening: asyncio.Task[None] | None = None
        self._settling: asyncio.Task[int] | None = None
        self._quiescing: asyncio.Task[None] | None = None
        self._acknowledged = False
        self._paused_at = 0.0
        self._told = False
        self._said: set[str] = set()
        self._own: set[str] = set()
        self._gone: set[str] = set()
        """Sessions that were this worker's, and those of them that have ended without it."""
        self._seconds = min(LOOK_SECONDS_MAX, place.options.lease_seconds / 4)

    async def run(self) -> None:
        try:
            while True:
                await first_of(self.look_now, timeout=self._seconds)
                self.look_now.clear()
                # What is leased while the pool is looked at, the look may not know of.
                held, session = list(self.runs()), self.place.queue.session
                try:
                    around = await self.place.queue.look()
                except (StrawqError, OSError) as error:
                    log.warning("the pool cannot be read just now: %s", error)
                    continue
                self._let_go(around, held, session)
                before = self.place.admission.free_groups(), self.peers
                self._take(around)
                if before != (self.place.admission.free_groups(), self.peers):
                    self.place.changed.set()
                await self._follow_pause(around)
                self._settle_unconfirmed()
        finally:
            begun = [task for task in (self._quiescing, self._opening, self._settling) if task is not None]
            for task in begun:
                task.cancel()
            await asyncio.gather(*begun, return_exceptions=True)

    async def before_admission(self) -> None:
        """Looks once more where admission has to be right now: before the first lease, for a share among live sessions
        that ours is not counted in yet, and while the pool's unconsumed groups are bounded."""
        place = self.place
        live = place.options.workers == 0
        counted = not live or place.queue.session in self.peers
        if self._looked and counted and place.admission.limits.window_groups is None:
            return
        try:
            if live and place.queue.pool is not None:
                await place.queue.run(place.queue.pool.keeper.require)
            self._take(await place.queue.look())
        except (StrawqError, OSError) as error:
            log.warning("the pool cannot be read just now: %s", error)

    def _take(self, around: Around) -> None:
        place = self.place
        self._looked = True
        self.peers = around.peers.get(place.options.role, ())
        place.served = around.policy_version
        self._ages_known(around.policy_version)
        place.admission.observe(around.ready, max(0, around.leased - place.admission.in_flight_groups), around.begun)

    def _ages_known(self, served: str) -> None:
        """A budget that cannot be kept is said, not passed over: behind a version that is a word nothing has an age."""
        unknown = served not in ("", "default") and policy_number(served) == UNVERSIONED
        if unknown and self.place.options.max_staleness >= 0:
            self._once(f"policy version {served} is no number: no group has an age, and --max-staleness bounds nothing")

    def _settle_unconfirmed(self) -> None:
        if len(self.place.unconfirmed) and (self._settling is None or self._settling.done()):
            self._settling = asyncio.ensure_future(self.place.unconfirmed.settle())
            self._settling.add_done_callback(lambda _: self.place.changed.set())

    # -- leases -------------------------------------------------------------------------------------------------

    def _let_go(self, around: Around, held: Sequence[GroupRun], session: str) -> None:
        self._own |= {session, *(run.lease.session for run in held)} - {""}
        gone = self._own - around.sessions - self._gone
        self.place.counters.sessions_lost += len(gone)
        self._gone |= gone
        for run in held:
            lease = run.lease
            if run.lost:
                continue
            if lease.branch != around.branch:
                self.place.counters.branches_left += self._once(
                    f"the pool went from branch {lease.branch} to {around.branch}: its groups are dropped, their "
                    "requests aborted; going on with new work"
                )
                run.lose(f"branch {around.branch} is active")
            elif lease.session not in around.sessions:
                run.lose(f"session {lease.session} has ended")

    def _once(self, text: str) -> bool:
        """Warns of what has not been said before; whether it had not."""
        if new := text not in self._said:
            self._said.add(text)
            log.warning("%s", text)
        return new

    # -- pause --------------------------------------------------------------------------------------------------

    async def _follow_pause(self, around: Around) -> None:
        if around.pause is None:
            if self.paused:
                await self._resume(around)
            return
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        if not self.paused:
            self.paused, self._acknowledged = True, False
            self.place.counters.pauses += 1
            self.place.admission.pause()
            log.info("admission is paused (%s); policy %s", around.pause.reason, self.place.options.pause_policy)
            self._paused_at, self._told = asyncio.get_running_loop().time(), False
            self._begin()
        elif self._acknowledged and self.place.queue.session not in around.pause.acknowledged:
            # Another pause has followed the first between two looks, or this is another session of ours.
            self._acknowledged = False
            self._begin()
        self._tell(around.pause.reason)

    def _tell(self, reason: str) -> None:
        """A trainer's pauses are short, and no news. One that stands when the worker comes, or that lasts, is."""
        pool, counters = self.place.queue.pool, self.place.counters
        lasts = asyncio.get_running_loop().time() - self._paused_at >= LONG_PAUSE_S
        if pool is None or self._told or not (lasts or not counters.groups_leased):
            return
        self._told = True
        log.warning(
            "the pool is paused (%s): nothing is leased until `strawq resume %s`",
            " ".join(reason.split()) or "no reason given",
            pool.path,
        )

    def _begin(self) -> None:
        if self._quiescing is None or self._quiescing.done():
            self._quiescing = asyncio.ensure_future(self._quiesce())
            self._quiescing.add_done_callback(self._quiesced)

    async def _quiesce(self) -> None:
        policy = self.place.options.pause_policy
        while True:
            try:
                if policy == "abort":
                    self.place.hold.close()
                    await asyncio.gather(*(run.settle() for run in self.runs()))
                elif policy == "drain":
                    while list(self.runs()):
                        self.place.changed.clear()
                        await first_of(self.place.changed, timeout=self._seconds)
                else:
                    await self.place.fleet.pause("in_place")
                await self.place.queue.acknowledge_pause()
                self._acknowledged = True
                log.info("pause acknowledged: %s", _STOPPED[policy])
                return
            except BadInput as error:
                log.error("the pause cannot be obeyed: %s", words(error))
                self.place.stop("pause", error)
                return
            except StrawqError as error:
                log.warning("the pause is not acknowledged yet: %s", words(error))
                await asyncio.sleep(RETRY_S)

    def _quiesced(self, task: asyncio.Task[None]) -> None:
        """A fault of ours ends the worker: one that never acknowledges would hold the trainer up."""
        if not task.cancelled() and task.exception() is not None:
            self.place.stop("fault", task.exception())

    async def _resume(self, around: Around) -> None:
        if self._quiescing is not None:
            self._quiescing.cancel()
            await asyncio.gather(self._quiescing, return_exceptions=True)
            self._quiescing = None
        if self._opening is None:
            self._opening = asyncio.ensure_future(
                wait_for_version(self.place.fleet, around.policy_version, self.place.options.version_wait_s)
            )
            self._opening.add_done_callback(lambda _: self.look_now.set())
            await asyncio.sleep(0)
        if not self._opening.done():
            await asyncio.wait({self._opening}, timeout=self._seconds)
            if not self._opening.done():
                return  # the next look asks again, and sees another pause meanwhile
        self._opening.result()
        if self.place.options.pause_policy == "in_place":
            try:
                await self.place.fleet.resume()
            except StrawqError as error:
                log.warning("engines do not go on yet: %s", words(error))
                return  # the next look tries again
        self.paused, self._opening = False, None
        self.place.hold.open()
        self.place.admission.resume()
        self.place.changed.set()
        level, self._told = logging.WARNING if self._told else logging.INFO, False
        log.log(level, "resumed at policy version %s", around.policy_version or "(none)")


_STOPPED = {
    "abort": "requests ended, prefixes saved",
    "drain": "all groups in hand are handed in",
    "in_place": "engines are frozen with their requests",
}
