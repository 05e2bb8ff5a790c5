"""Local workers by themselves: what is left when one of them cannot be started, and which are not started again."""

import errno
import time

import pytest

from strawq_workers.processes import Child, Children
from strawq_workers.rollout.local_workers import LocalWorkers
from strawq_workers.rollout.station import RolloutFailed
from strawq_workers.worker.options import WorkerOptions


def test_a_worker_that_cannot_be_started_leaves_none_of_the_others(tmp_path, monkeypatch):
    started: list[Child] = []
    start = Children.start

    def start_one(self, name, arguments, stdin=None, own_session=False):
        if started:
            raise OSError(errno.EAGAIN, "no more processes")
        started.append(start(self, name, ["-c", "import signal; signal.pause()"]))
        return started[0]

    monkeypatch.setattr(Children, "start", start_one)
    with pytest.raises(OSError, match="no more processes"):
        LocalWorkers(str(tmp_path), WorkerOptions(engines=("http://localhost:1",)), 2)
    assert started[0].poll() is not None
    assert not started[0].log.exists()


REFUSES = "import sys; print('a line\\nerror: no such\\nhook', file=sys.stderr); sys.exit(2)"
DIES = "import sys; sys.exit(1)"
WORKS = "import signal; signal.pause()"


@pytest.fixture
def started(monkeypatch):
    """Workers that run these programs in place of their own, in order; those that were started."""
    programs, found = [], []
    start = Children.start

    def start_one(self, name, arguments, stdin=None, own_session=False):
        found.append(start(self, name, ["-c", programs[len(found)]]))
        return found[-1]

    monkeypatch.setattr(Children, "start", start_one)

    def workers(*words, count):
        programs.extend(words)
        made.append(LocalWorkers("/nowhere", WorkerOptions(engines=("http://localhost:1",)), count))
        return made[-1], found

    made = []
    yield workers
    for one in made:
        one.close()


def test_a_worker_whose_input_is_bad_is_not_started_again_and_its_reason_is_the_rollouts(started):
    workers, children = started(REFUSES, DIES, REFUSES, count=2)
    children[0].wait(10)
    children[1].wait(10)
    workers.look()  # the other one may be started again
    assert workers.given_up() == ""
    while len(children) < 3:
        workers.look()
        time.sleep(0.01)
    children[2].wait(10)
    for _ in range(2):
        workers.look()
        with pytest.raises(RolloutFailed, match=r"worker 0 has ended: no such hook$"):
            workers.given_up()
    assert len(children) == 3 and workers.restarts == 1


def test_the_others_go_on_when_the_input_of_one_was_bad(started, caplog):
    workers, children = started(REFUSES, WORKS, count=2)
    children[0].wait(10)
    workers.look()
    workers.look()
    assert workers.pids == [children[1].pid] and workers.given_up() == ""
    assert "worker 0 has ended, and is not started again: no such hook" in caplog.text
