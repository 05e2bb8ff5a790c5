"""The launcher on a scripted cluster: who gets a worker, which share, and when it is over."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from strawq.errors import BadInput, EngineUnavailable, TryAgain
from strawq_workers.on_ray import launch
from strawq_workers.on_ray.actor import WorkerActor
from strawq_workers.on_ray.cluster import _check_address, connected
from strawq_workers.on_ray.launch import LOSSES_MAX, Launcher
from strawq_workers.on_ray.nodes import Ended, Failed, Lost, Node, Outcome, nodes_of
from strawq_workers.worker.options import WorkerOptions

A, B, C = Node("10.0.0.1", "aa"), Node("10.0.0.2", "bb"), Node("10.0.0.3", "cc")
OPTIONS = WorkerOptions(engines=("http://e",), concurrency=8, samples=2)


class Actor:
    def __init__(self, node: Node, options: WorkerOptions) -> None:
        self.node = node
        self.share = (options.workers, options.worker_index)
        self.state = "running"


class Script:
    """A cluster on which each turn does the next of `events`: a change of nodes, or the end of a worker."""

    def __init__(self, nodes: Sequence[Node], *events: Callable[[Script], Any]) -> None:
        self.alive = list(nodes)
        self.events = list(events)
        self.actors: list[Actor] = []
        self.ends: list[tuple[Actor, Outcome]] = []
        self.now = 0.0
        self.seen: list[dict[str, tuple[int, int]]] = []
        self.launcher = Launcher(self, OPTIONS, engines=1, clock=lambda: self.now)

    def running(self) -> dict[str, Actor]:
        return {actor.node.id: actor for actor in self.actors if actor.state == "running"}

    def end(self, node: Node, outcome: Outcome) -> None:
        actor = self.running()[node.id]
        actor.state = "over"
        self.ends.append((actor, outcome))

    def nodes(self) -> list[Node]:
        return sorted(self.alive)

    def start(self, node: Node, options: WorkerOptions) -> Actor:
        assert node.id not in self.running(), "two workers on one node"
        self.actors.append(Actor(node, options))
        return self.actors[-1]

    def outcomes(self, handles: Sequence[Actor], seconds: float) -> list[tuple[Actor, Outcome]]:
        self.now += seconds
        assert self.events, "the script is over and the launcher still runs"
        self.seen.append({node: actor.share for node, actor in sorted(self.running().items())})
        self.events.pop(0)(self)
        ends, self.ends = self.ends, []
        assert all(actor in handles for actor, _ in ends)
        return ends

    def divide(self, handle: Actor, workers: int, index: int) -> None:
        assert handle.state == "running"
        handle.share = (workers, index)

    def stop(self, handle: Actor) -> None:
        self.end(handle.node, ended("signal"))

    def kill(self, handle: Actor) -> None:
        handle.state = "killed"


def ended(reason: str = "sealed", accepted: int = 1) -> Ended:
    return Ended({"reason": reason, "counters": {"groups_accepted": accepted}})


def nothing(script: Script) -> None:
    pass


def lose(node: Node) -> Callable[[Script], None]:
    return lambda script: script.end(node, Lost("killed"))


def done(*nodes: Node) -> Callable[[Script], None]:
    return lambda script: [script.end(node, ended()) for node in nodes] and None


def test_alive_nodes_with_a_cpu_in_order_of_address_and_id() -> None:
    row = {"NodeManagerAddress": "10.0.0.2", "NodeID": "b", "Alive": True, "Resources": {"CPU": 4.0}}
    rows = [
        row,
        row | {"NodeID": "a"},
        row | {"NodeManagerAddress": "10.0.0.1", "NodeID": "z"},
        row | {"NodeID": "dead", "Alive": False},
        row | {"NodeID": "gpu", "Resources": {"GPU": 8.0}},
        row | {"NodeID": "none", "Resources": {"CPU": 0.0}},
    ]
    assert [(node.address, node.id) for node in nodes_of(rows)] == [
        ("10.0.0.1", "z"),
        ("10.0.0.2", "a"),
        ("10.0.0.2", "b"),
    ]


def test_each_node_gets_one_worker_and_its_share() -> None:
    script = Script([C, A, B], done(A, B, C))
    summary = script.launcher.run()
    assert script.seen == [{"aa": (3, 0), "bb": (3, 1), "cc": (3, 2)}]
    assert (summary.reason, summary.groups_accepted, summary.nodes, summary.exit_code) == ("sealed", 3, 3, 0)


def test_a_lost_node_divides_the_shares_anew_and_a_new_one_does_so_again() -> None:
    def node_a_dies(script: Script) -> None:
        script.alive.remove(A)
        script.end(A, Lost("node died"))

    script = Script([A, B], node_a_dies, nothing, lambda s: s.alive.append(C), done(B, C))
    summary = script.launcher.run()
    assert script.seen == [{"aa": (2, 0), "bb": (2, 1)}, {"bb": (1, 0)}, {"bb": (1, 0)}, {"bb": (2, 0), "cc": (2, 1)}]
    assert (summary.lost, summary.nodes, summary.exit_code) == (1, 3, 0)


def test_a_lost_worker_is_replaced_while_its_node_lives() -> None:
    script = Script([A, B], lose(A), nothing, done(A, B))
    script.launcher.run()
    assert script.seen == [{"aa": (2, 0), "bb": (2, 1)}, {"bb": (1, 0)}, {"aa": (2, 0), "bb": (2, 1)}]


def test_a_node_that_loses_one_worker_after_the_other_gets_no_more() -> None:
    def lose_if_there(script: Script) -> None:
        if script.running():
            script.end(A, Lost("out of memory"))

    script = Script([A], *[lose_if_there] * 60)
    with pytest.raises(TryAgain, match=r"all workers are lost: 10.0.0.1 .* out of memory"):
        script.launcher.run()
    assert len(script.actors) == LOSSES_MAX


def test_losses_far_apart_are_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SETTLED_S", 0.5)
    rounds = [step for _ in range(2 * LOSSES_MAX) for step in (nothing, lose(A), nothing)]
    script = Script([A], *rounds, done(A))
    assert script.launcher.run().lost == 2 * LOSSES_MAX


def test_all_nodes_lost_is_an_error_and_not_an_end() -> None:
    def everything_dies(script: Script) -> None:
        script.alive.clear()
        for node in (A, B):
            script.end(node, Lost("node died"))

    with pytest.raises(TryAgain, match="all workers are lost: the cluster has no alive node"):
        Script([A, B], everything_dies).launcher.run()


def test_a_worker_that_failed_is_not_started_again_and_the_others_go_on() -> None:
    failure = Failed("engine_unavailable", 4, "no engine of 1 is up")
    script = Script([A, B], lambda s: s.end(A, failure), nothing, done(B))
    summary = script.launcher.run()
    assert script.seen[1] == {"bb": (1, 0)}
    assert (summary.failed, summary.failures, summary.exit_code) == (1, ["no engine of 1 is up"], 4)


def test_when_all_have_failed_the_first_error_is_raised_as_what_it_was() -> None:
    def fail(script: Script) -> None:
        script.end(A, Failed("engine_unavailable", 4, "no engine of 1 is up"))
        script.end(B, Failed("bad_input", 2, "another"))

    with pytest.raises(EngineUnavailable, match=r"no worker is left.*no engine of 1 is up"):
        Script([A, B], fail).launcher.run()


def test_too_few_slots_for_the_nodes_are_refused_before_anything_starts() -> None:
    nodes = [Node(f"10.0.0.{i}", f"n{i}") for i in range(5)]
    script = Script(nodes)
    with pytest.raises(BadInput, match=r"C·E = 8 samples is less than W·G = 5·2 = 10"):
        script.launcher.run()
    assert script.actors == []


def test_nodes_that_come_when_all_slots_are_taken_wait_for_one() -> None:
    nodes = [Node(f"10.0.0.{i}", f"n{i}") for i in range(4)]
    late = Node("10.0.0.9", "n9")

    def one_dies(script: Script) -> None:
        script.alive.remove(nodes[0])
        script.end(nodes[0], Lost("node died"))

    script = Script(nodes, lambda s: s.alive.append(late), nothing, one_dies, done(*nodes[1:], late))
    assert script.launcher.run().nodes == 5
    assert "n9" not in script.seen[2] and script.seen[3]["n9"] == (4, 3)


def test_no_node_with_a_cpu_is_an_error() -> None:
    with pytest.raises(TryAgain, match="no alive node with a CPU"):
        Script([]).launcher.run()


def test_stop_reaches_every_worker_once_and_waits_for_their_summaries() -> None:
    script = Script([A, B], lambda s: s.launcher.stop(), nothing)
    summary = script.launcher.run()
    assert (summary.reason, len(summary.workers), summary.exit_code) == ("signal", 2, 0)


def test_an_error_of_the_launcher_leaves_no_worker_running() -> None:
    def fault(script: Script) -> None:
        raise RuntimeError("a fault")

    script = Script([A, B], fault)
    with pytest.raises(RuntimeError, match="a fault"):
        script.launcher.run()
    assert [actor.state for actor in script.actors] == ["killed", "killed"]


def test_no_worker_is_started_once_the_queue_is_used_up() -> None:
    script = Script([A, B], done(A), lose(B))
    assert script.launcher.run().reason == "sealed"
    assert len(script.actors) == 2


async def test_a_division_that_comes_before_the_worker_has_started_counts() -> None:
    actor = WorkerActor("/no/such/pool", msgspec.json.encode(OPTIONS))
    await actor.divide(3, 2)
    place = type("Place", (), {"options": OPTIONS, "changed": asyncio.Event()})()
    actor._started(type("Worker", (), {"place": place})())  # type: ignore[arg-type]
    assert (place.options.workers, place.options.worker_index) == (3, 2) and place.changed.is_set()
    await actor.divide(2, 0)
    assert (place.options.workers, place.options.worker_index) == (2, 0)


async def test_a_worker_that_cannot_start_answers_with_the_kind_of_its_error() -> None:
    actor = WorkerActor("/no/such/pool", msgspec.json.encode(OPTIONS))
    failed = msgspec.json.decode(await actor.run(), type=Failed)
    assert (failed.kind, failed.exit_code) == ("not_a_pool", 2)


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadInput, match=r"pip install 'strawq\[ray\]'"), connected("/no/pool"):
        pass


@pytest.mark.parametrize("address", ["ray://host:10001", "host", "host:port"])
def test_an_address_of_another_form_is_refused(address: str) -> None:
    with pytest.raises(BadInput, match="not of the form host:port"):
        _check_address(address)


def test_an_address_that_nobody_answers_at_is_named_at_once() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(TryAgain, match=f"no Ray cluster at 127.0.0.1:{port}"):
            _check_address(f"127.0.0.1:{port}")
