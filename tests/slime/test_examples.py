"""The examples of docs/slime.md, run as they stand there, and the tables of that page held against the code."""

import asyncio
import contextlib
import importlib
import itertools
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from strawq import Pool, Prompt
from strawq.samples import Group
from strawq_workers.engine.launch import running_engine
from strawq_workers.engine.options import EngineOptions
from strawq_workers.engine.vocabulary import decode_tokens
from strawq_workers.slime.flags import all_flags
from strawq_workers.worker import WorkerOptions, WorkerSummary, work

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "slime.md").read_text()
WAIT_S = 40.0


def section(title: str) -> str:
    """What stands under a heading, up to the next one of its level or above."""
    found = re.search(rf"^(#+) {re.escape(title)}$", PAGE, re.MULTILINE)
    assert found is not None, title
    rest = PAGE[found.end() :]
    following = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: following.start()] if following else rest


@pytest.fixture
def example(tmp_path: Path, monkeypatch: Any) -> Any:
    """The example under a heading, as a module of the name that its dotted path has there."""

    def load(title: str) -> tuple[str, ModuleType]:
        text = section(title)
        block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
        path = re.search(r"-path ([a-z_]+)\.([a-z_]+)`", text)
        assert block is not None
        assert path is not None
        (tmp_path / "code").mkdir(exist_ok=True)
        (tmp_path / "code" / f"{path[1]}.py").write_text(block[1])
        monkeypatch.syspath_prepend(str(tmp_path / "code"))
        monkeypatch.delitem(sys.modules, path[1], raising=False)
        return f"{path[1]}.{path[2]}", importlib.import_module(path[1])

    return load


class Run:
    """A pool, an embedded engine, and workers."""

    def __init__(self, pool: Pool, url: str) -> None:
        self.pool, self.url = pool, url

    def submit(self, count: int, **fields: Any) -> None:
        queue = self.pool.queue()
        queue.submit([Prompt(group_id=str(at), text=f"{at} + 1 =", label=str(at + 1), **fields) for at in range(count)])
        queue.seal()

    async def work(self, stop: asyncio.Event | None = None, **options: Any) -> WorkerSummary:
        usual: dict[str, Any] = {"engines": (self.url,), "samples": 2, "max_new_tokens": 40, "concurrency": 16,
                                 "engine_timeout_s": 20.0, "save_seconds": 0.0}  # fmt: skip
        given = WorkerOptions(**{**usual, **options})
        return await asyncio.wait_for(work(Path(self.pool.path), given, stop=stop), WAIT_S)

    def groups(self, stage: str) -> list[Group]:
        found: list[Group] = []
        from strawq.handles import Held

        def look(machine: Any) -> list[Held]:
            state = machine.state
            tasks = [task for task in state.branch.queues["rollout"].tasks.values() if task.stage == stage]
            return [Held(task, {part.object: state.objects[part.object] for part in task.parts}) for task in tasks]

        found += [self.pool.payloads.load(held) for held in self.pool.log.refresh(look)]
        return found


@contextlib.asynccontextmanager
async def running(tmp_path: Path, **engine: Any) -> AsyncIterator[Run]:
    pool = await asyncio.to_thread(Pool.init, tmp_path / "pool")
    try:
        async with running_engine(EngineOptions(weight_version="1", **engine)) as (url, _):
            yield Run(pool, url)
    finally:
        await asyncio.to_thread(pool.close)


async def test_the_reward_scores_answers_and_keeps_its_metadata(example: Any, tmp_path: Path) -> None:
    path, module = example("A reward for mathematics")
    for response, label, wanted in (
        ("so 1,234 it is", "1234", 1.0), ("3 then 4", "3", 0.0), ("none", "0", 0.0), ("-2.50", "-2.5", 1.0),
    ):  # fmt: skip
        sample = SimpleNamespace(response=response, label=label, metadata={})
        assert module.reward(None, sample) == wanted
    async with running(tmp_path) as run:
        run.submit(4)
        await run.work(reward=path)
        for group in run.groups("ready"):
            for sample in group.samples:
                text = decode_tokens(sample.tokens.tolist(), skip_special=True, final=True)
                view = SimpleNamespace(response=text, label=group.prompt.label, metadata={})
                assert sample.reward == module.reward(None, view)
                assert sample.metadata == view.metadata
        assert len(run.groups("ready")) == 4


async def test_the_filter_drops_with_its_reasons_and_keeps_the_rest(
    example: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    path, module = example("A filter")
    scores = ModuleType("scores_of_examples")
    scores.score = lambda args, sample: float(sample.index == 0 or sample.group_index == "0")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "scores_of_examples", scores)
    async with running(tmp_path) as run:
        run.submit(3)
        # With no token but the stop token allowed to end it, an answer ends by the limit or at once.
        summary = await run.work(
            reward="scores_of_examples:score",
            dynamic_filter=path,
            stop_token_ids=tuple(range(3, 260)),
            max_new_tokens=8,
        )
        assert [group.prompt.group_id for group in run.groups("ready")] == ["1", "2"]
        assert summary.drop_reasons == {"one_reward": 1}
    args = SimpleNamespace(reward_key=None)
    cut = SimpleNamespace(status="truncated")
    assert module.keep_mixed(args, [cut]).reason == "truncated"


async def test_the_agent_squares_numbers_and_goes_on_where_it_was(
    example: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    path, module = example("An agent with a tool, which goes on where it was")
    stop, tokenize = asyncio.Event(), module.tokenize

    def stops_the_worker(answer: str) -> list[int]:
        stop.set()
        ids: list[int] = tokenize(answer)
        return ids

    async with running(tmp_path, enable_return_routed_experts=True) as run:
        run.submit(2)
        options = {"generate": path, "max_new_tokens": 120, "routed_experts": True, "ignore_eos": True, "samples": 4}
        monkeypatch.setattr(module, "tokenize", stops_the_worker)
        first = await run.work(stop, **options)
        monkeypatch.setattr(module, "tokenize", tokenize)
        before = {group.prompt.group_id: group for group in run.groups("partial")}
        assert any(sample.metadata.get("calls") for group in before.values() for sample in group.samples)
        second = await run.work(**options)
        assert first.counters.groups_accepted + second.counters.groups_accepted == 2
        groups = run.groups("ready")
    assert len(groups) == 2
    for group in groups:
        prefixes = {sample.index: sample for sample in getattr(before.get(group.prompt.group_id), "samples", ())}
        for sample in group.samples:
            assert sample.status == "completed"
            check_calls(sample)
            prefix = prefixes.get(sample.index)
            if prefix is not None:
                assert sample.tokens[: len(prefix.tokens)].tolist() == prefix.tokens.tolist()


def check_calls(sample: Any) -> None:
    """Each tool answer is the square of the last number before it; only its tokens are masked."""
    runs: list[tuple[bool, list[int]]] = []
    for token, trained in zip(sample.tokens.tolist(), sample.loss_mask.tolist(), strict=True):
        if not runs or runs[-1][0] != bool(trained):
            runs.append((bool(trained), []))
        runs[-1][1].append(token)
    texts = [(trained, decode_tokens(tokens, skip_special=True, final=True)) for trained, tokens in runs]
    answers = [text for trained, text in texts if not trained]
    assert len(answers) == sample.metadata.get("calls", 0) <= 3
    for (_, turn), (trained, answer) in itertools.pairwise(texts):
        if not trained:
            assert answer == f"[{int(re.findall(r'[0-9]+', turn)[-1]) ** 2}]"
    assert len(sample.r3[:]) == len(sample.prompt_tokens) + len(sample.tokens) - 1


def test_the_table_of_flags_says_what_the_parser_has() -> None:
    told: dict[str, tuple[str, str]] = {}
    for cells in rows(section("Flags")):
        for option, default in re.findall(r"`(--[a-z-]+)`([^,]*)", cells[0]):
            assert option not in told, f"{option} stands twice"
            told[option] = (cells[1], default.strip())
    wanted = {
        flag.option: (flag.relation, "" if flag.default is None or flag.default is False else str(flag.default))
        for flag in all_flags()
    }
    assert told == wanted


def rows(text: str) -> list[list[str]]:
    """The cells of each row of a table, without its head."""
    lines = [line.strip().strip("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split(" | ")] for line in lines if "---" not in line][1:]


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", section("slime's own tests"))
    assert len(named) > 100
    missing = []
    for file, name in named:
        path = ROOT / "tests" / file
        if not path.is_file() or not re.search(rf"^(async )?def {name}\(", path.read_text(), re.MULTILINE):
            missing.append(f"{file}::{name}")
    assert not missing


def test_every_behaviour_is_covered_or_has_a_reason_why_not() -> None:
    for cells in rows(section("slime's own tests")):
        if cells[0] != "there":
            assert "::test_" in cells[1] or re.match(r"not applicable: \S", cells[1]), cells
