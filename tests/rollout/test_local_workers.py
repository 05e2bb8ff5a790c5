"""Local workers by themselves: what is left when one of them cannot be started."""

import errno

import pytest

from strawq_workers.processes import Child, Children
from strawq_workers.rollout.local_workers import LocalWorkers
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
