"""Ctrl-C and SIGTERM, for a process that is a command.

The rule: the first signal ends the work in good order. If that takes long, a line says that it waits, and for
`IN_ORDER_S` at most; a second signal leaves it `AT_ONCE_S`. Then the process ends, whatever its threads do. Nothing is
raised into the ending, so it has no traceback.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

Number = signal.Signals

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAY_S = 2.0
IN_ORDER_S = 90.0
"""Local workers and whatever else ends have less than that."""
AT_ONCE_S = 1.0
LOOK_S = 0.05

_pipes: set[int] = set()


class Handlers:
    """Handlers of both signals. `first` is called with the first one, by the handler itself, and may raise; `say` with
    a line; `last` with the number before the process is ended by force, in a thread of its own."""

    def __init__(self, first: Callable[[Number], None], say: Callable[[str], None], last: Callable[[Number], None]):
        self.first = first
        self.say = say
        self.last = last
        self.in_order_s = IN_ORDER_S
        self.came: Number | None = None
        """The first signal."""
        self._again: Number | None = None
        self._over = False
        self._told = self._told_before = -1
        self._before: dict[Number, Any] = {}

    def install(self, *, over: bool = False) -> None:
        """Only the main thread may. A handler that is there stays, unless `over`, and unless it is one of these."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            before = signal.getsignal(number)
            usual = before in (signal.SIG_DFL, signal.default_int_handler) or isinstance(_owner(before), Handlers)
            if not (usual or over):
                continue
            signal.signal(number, self._on_signal)
            if _owner(before) is not self:
                self._before[number] = before
        if self._told < 0:
            heard, self._told = os.pipe()
            os.set_blocking(self._told, False)
            _pipes.add(self._told)
            self._told_before = signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
            _thread.start_new_thread(self._listen, (heard,))

    def remove(self) -> None:
        """The work has ended; put back what was there. After a signal they stay: a second one may still come."""
        self._over = True
        if self.came is not None:
            atexit.register(_ignore)
            return
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._told >= 0:
            signal.set_wakeup_fd(self._told_before)
            os.write(self._told, bytes(1))
            os.close(self._told)
            _pipes.discard(self._told)
            self._told = -1

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.came is None:
            self.came = Number(number)
            # A thread of `threading` is not safe to start here: the code that was interrupted may hold its lock.
            _thread.start_new_thread(self._wait, ())
            self.first(self.came)

    def _listen(self, heard: int) -> None:
        """Hears what comes, also while the main thread stands where no handler runs. It may stand so because another
        thread, or nobody, was interrupted: then it is sent the signal itself."""
        main, seen = threading.main_thread().ident or 0, False
        while number := os.read(heard, 1)[0]:
            if number not in SIGNALS or _owner(signal.getsignal(number)) is not self:
                continue
            if seen:
                self._again = Number(number)
                self._end(self._again, "a second signal")
            seen = True
            time.sleep(LOOK_S)
            while self.came is None:
                signal.pthread_kill(main, number)
                os.read(heard, 1)
                time.sleep(LOOK_S)
        os.close(heard)

    def _wait(self) -> None:
        assert self.came is not None
        time.sleep(SAY_S)
        if not self._over and self._again is None:
            self.say(
                f"{self.came.name}: waiting for what is under way (hooks, requests, storage) for "
                f"{self.in_order_s:g} s at "
                "most; a second signal ends it at once"
            )
        time.sleep(self.in_order_s - SAY_S)
        if not self._over and self._again is None:
            self._end(self.came, f"not ended {self.in_order_s:g} s after the signal")

    def _end(self, number: Number, why: str) -> None:
        _thread.start_new_thread(_end_without_words, (number,))
        self.say(f"{why} ({number.name}): ending at once; leases that are not given back by then expire")
        time.sleep(AT_ONCE_S)
        self.last(number)
        os._exit(128 + number)


def _end_without_words(number: Number) -> None:
    """Whoever should read the words may not."""
    time.sleep(2 * AT_ONCE_S)
    os._exit(128 + number)


def _ignore() -> None:
    """No thread is waited for any more. The interpreter would put the system's own handlers back, which kill."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _owner(handler: Any) -> Any:
    return getattr(handler, "__self__", None)


def _forget() -> None:
    """In a fork: what it hears is not for its parent."""
    told = signal.set_wakeup_fd(-1)
    if told not in _pipes:
        signal.set_wakeup_fd(told)


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def first_signal(
    does: Callable[[Number], None], say: Callable[[str], None], in_order_s: float = IN_ORDER_S
) -> Iterator[None]:
    """What the first signal does inside the block, in the main thread, and how long that may take: handlers that are
    there get another `first`; where there are none, they are made for the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    there = _owner(signal.getsignal(signal.SIGTERM))
    handlers = there if isinstance(there, Handlers) else Handlers(does, say, lambda number: None)
    before, handlers.first, handlers.in_order_s = handlers.first, does, in_order_s
    handlers.install(over=True)
    try:
        yield
    finally:
        handlers.first = before
        if handlers is not there:
            handlers.remove()
