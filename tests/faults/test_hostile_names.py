"""Names and ids that are paths, look-alikes or rubbish: refused at every entry, and never a path on the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strawq.core import commands as c
from strawq.errors import BadInput, StrawqError
from strawq.history import follow_task
from strawq.pool import Pool
from strawq.samples import Prompt
from strawq.testing.crashes import content
from strawq.testing.scenes import Scene, build, image, prompts

HOSTILE = {
    "empty": "", "parent": "..", "above": "../x", "below": "a/b", "absolute": "/etc/passwd", "long": "x" * 300,
    "nul": "a\0b", "newline": "a\n", "hidden": ".x", "dash first": "-x", "space": "a b", "fullwidth": "ａ",
    "composed": "é", "decomposed": "e\u0301", "bidi": "a\u202eb", "surrogate": "a\ud800", "backslash": "a\\b",
}  # fmt: skip

ENTRIES: dict[str, Callable[[Pool, str], Any]] = {
    "queue": lambda pool, name: pool.queue(name),
    "new queue": lambda pool, name: pool.configure(name),
    "producer": lambda pool, name: pool.queue().submit(prompts(["x"]), producer=name or "..", cursor="1"),
    "consumer": lambda pool, name: pool.queue().take_batch(1, consumer=name),
    "checkpoint": lambda pool, name: pool.checkpoint(name),
    "dropped checkpoint": lambda pool, name: pool.drop_checkpoint(name),
    "rollback": lambda pool, name: pool.rollback(name),
    "branch": lambda pool, name: pool.rollback("first", branch=name or ".."),
    "dropped branch": lambda pool, name: pool.drop_branch(name),
    "session": lambda pool, name: pool.expire_session(name),
    "pin": lambda pool, name: pool.pin(name, []),
    "archive": lambda pool, name: pool.log.commit(c.KeepArchive(queue="rollout", name=name, tasks=("2-0",))),
    "dropped archive": lambda pool, name: pool.log.commit(c.DropArchive(name=name)),
    "task history": lambda pool, name: list(follow_task(pool, name)),
    "joined session": lambda pool, name: pool.log.commit(c.Join(session=_session(name))),
}
TEXTS = {"surrogate": "\ud800", "nul": "a\0b", "1MB": "x" * (1 << 20), "bidi": "\u202e\u2028"}
LOOKED_UP: dict[str, Callable[[Pool, str], Any]] = {
    "unpin": lambda pool, name: pool.unpin(name),
    "retried task": lambda pool, name: pool.queue().retry_failed([name]),
    "dropped task": lambda pool, name: pool.queue().drop_tasks([name], "why"),
    "cursor of": lambda pool, name: pool.queue().cursor(name),
}


def _session(name: str) -> Any:
    from strawq.model import Session

    return Session(name, host="h", pid=1)


@pytest.fixture(scope="module")
def scene() -> Scene:
    return build()


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_hostile_name_is_refused(scene: Scene, entry: str) -> None:
    pool = scene.world.twin().process()
    pool.keeper.require()
    before = image(pool)
    for name in HOSTILE.values():
        with pytest.raises(BadInput):
            ENTRIES[entry](pool, name)
    assert image(pool) == before


@pytest.mark.parametrize("entry", LOOKED_UP)
def test_a_hostile_name_finds_nothing(scene: Scene, entry: str) -> None:
    pool = scene.world.twin().process()
    pool.keeper.require()
    before = image(pool)
    for what, name in HOSTILE.items():
        if what == "surrogate" and entry != "cursor of":
            with pytest.raises(BadInput, match="surrogate"):
                LOOKED_UP[entry](pool, name)
        else:
            assert LOOKED_UP[entry](pool, name) in (None, (), "")
    assert image(pool) == before


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_request_id_is_refused_or_only_a_word(scene: Scene, what: str) -> None:
    world = scene.world.twin()
    pool, name = world.process(), HOSTILE[what]
    try:
        receipt = pool.queue().submit(prompts(["x"]), request_id=name)
    except BadInput:
        assert what in ("empty", "long", "nul", "newline", "bidi", "surrogate")
    else:
        assert pool.queue().submit(prompts(["x"]), request_id=name) == receipt
        assert not any(name in path for path, _ in content(world.memory) if len(name) > 3 or not name.isascii())


@pytest.mark.parametrize(
    "call",
    [
        lambda pool, text: pool.queue().submit(prompts(["x"]), producer="p", cursor=text),
        lambda pool, text: pool.queue().submit(prompts(["x"]), producer="p", expect=text),
        lambda pool, text: pool.checkpoint("new", {"note": text}),
        lambda pool, text: pool.checkpoint("new", None, {"model": text}),
        lambda pool, text: pool.checkpoint("new", None, {text: "digest"}),
        lambda pool, text: pool.rollback("first", {"model": text}),
        lambda pool, text: pool.pause(text),
        lambda pool, text: pool.publish_version(text),
        lambda pool, text: pool.resume(text),
        lambda pool, text: pool.expire_session(next(iter(pool.log.machine.state.sessions)), text),
        lambda pool, text: pool.queue().drop_tasks(["2-4"], text),
        lambda pool, text: pool.log.commit(c.KeepArchive(queue="rollout", name="n", tasks=("2-1",), metadata=text)),
        lambda pool, text: pool.queue().submit([Prompt(group_id=text, text="?")]),
        lambda pool, text: pool.queue().submit([Prompt(group_id="g", text=text, metadata={text: text})]),
    ],
    ids=["cursor", "expected-cursor", "metadata", "binding", "bound-name", "claimed-binding", "pause-reason", "version",
         "resumed-version", "expiry-reason", "drop-reason", "archive-metadata", "group-id", "prompt"],
)  # fmt: skip
@pytest.mark.parametrize(
    "text", ["\ud800", "a\0b", "x" * (1 << 20), "\u202e\u2028"], ids=["surrogate", "nul", "1MB", "bidi"]
)
def test_free_text_is_kept_or_refused_and_never_breaks_the_log(scene: Scene, call: Any, text: str) -> None:
    """Whatever is taken comes back from the log in a fresh process; whatever is not is an error of strawq."""
    world = scene.world.twin()
    pool = world.process()
    pool.queue()
    message = ""
    try:
        call(pool, text)
    except StrawqError as error:
        message = str(error)
    assert len(message) < 2000, "a message repeats no megabytes"
    assert image(world.process()) == image(pool)
    assert max(len(data) for path, data in content(world.memory) if path.startswith("log/")) < 200_000


@pytest.mark.parametrize("name", [name for what, name in HOSTILE.items() if what != "surrogate"])
def test_a_pool_takes_no_hostile_run_or_queue_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput):
        Pool.init(tmp_path / "pool", run_id=name)
    with pytest.raises(BadInput):
        Pool.init(tmp_path / "pool", queues=[name])
    assert not (tmp_path / "pool").exists()


def test_a_bad_command_in_a_group_commit_harms_no_other(scene: Scene) -> None:
    """The commands of all threads that wait go into one entry: one of them with rubbish in it is its own affair."""
    import threading

    pool = scene.world.twin().process()
    pool.inspect()
    answers: list[str] = []

    def good() -> None:
        answers.append(pool.configure(f"fine{threading.get_ident()}").name[:4])

    def bad() -> None:
        with pytest.raises(BadInput, match="surrogate"):
            pool.pause("\ud800")

    with pool.log._lead:  # so that all of them wait, and go together
        threads = [threading.Thread(target=act) for act in (good, bad, good, bad)]
        for thread in threads:
            thread.start()
        while len(pool.log._waiting) < 4:
            threading.Event().wait(0.001)
    for thread in threads:
        thread.join()
    assert answers == ["fine", "fine"]
