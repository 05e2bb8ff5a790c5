import subprocess
import sys
import tempfile

import msgspec
import pytest

from strawq.errors import BadInput, TryAgain
from strawq_workers.demo import DemoSummary, demo_prompts, run_demo
from strawq_workers.narration import describe


@pytest.mark.slow
def test_the_demo_loses_nothing_and_shows_every_kind_of_trouble(tmp_path):
    said: list[str] = []
    summary = run_demo(tmp_path / "pool", batches=3, groups=4, say=said.append)
    assert summary.sound and summary.lost == summary.duplicates == 0
    assert summary.batches == 3 and summary.groups_accepted == 12
    assert summary.tokens_resumed > 0 and summary.leases_expired >= 1
    assert summary.prefixes_kept == summary.prefixes_saved > 0
    assert summary.policy_versions_seen == ["1", "2"] and summary.groups_of_two_versions >= 1
    assert any("is killed" in line for line in said) and (tmp_path / "pool" / "strawq.json").is_file()
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "groups"),
    [pytest.param(1, 1, marks=pytest.mark.campaign), (2, 2), pytest.param(1, 8, marks=pytest.mark.campaign)],
)
def test_a_small_demo_ends_and_shows_the_same(tmp_path, batches, groups):
    """It waited for a group in mid-generation where none was left, until its two minutes were over."""
    summary = run_demo(tmp_path / "pool", json=True, batches=batches, groups=groups)
    assert summary.sound and (summary.batches, summary.groups_accepted) == (batches, batches * groups)
    assert summary.tokens_resumed > 0 and summary.leases_expired >= 1 and summary.prefixes_saved > 0
    assert summary.policy_versions_seen == ["1", "2"] and summary.groups_of_two_versions >= 1
    assert "not shown" not in describe(summary)


def test_what_a_demo_could_not_show_is_said():
    shown = DemoSummary(
        groups_accepted=1, batches=1, tokens_accepted=9, tokens_generated=9, tokens_resumed=0, tokens_again=0,
        leases_expired=0, duplicates=0, lost=0, prefixes_saved=0, prefixes_kept=0, policy_versions_seen=["1"],
        groups_of_two_versions=0, staleness=[], pool="p", logs="p-logs", seconds=1.0,
    )  # fmt: skip
    said = describe(shown)
    assert "Nothing was lost." in said and "a takeover" in said and "a change of weights" in said
    assert "not shown" not in describe(msgspec.structs.replace(shown, leases_expired=1, groups_of_two_versions=1))


@pytest.mark.slow
def test_what_the_demo_says_to_remove_is_all_that_it_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (hint,) = (line for line in describe(run_demo(json=True, batches=1, groups=1)).splitlines() if "rm -rf" in line)
    assert list(tmp_path.iterdir())
    subprocess.run(["sh", "-c", hint.partition(":")[2]], check=True)
    assert list(tmp_path.iterdir()) == []


def test_a_demo_that_does_not_get_there_says_what_is_in_the_way_of_another_try(tmp_path, monkeypatch):
    def dies(*_):
        raise TryAgain("engine died (killed by SIGKILL)")

    monkeypatch.setattr("strawq_workers.demo._Demo.run", dies)
    pool = tmp_path / "a demo"
    with pytest.raises(TryAgain, match="engine died") as told:
        run_demo(pool, json=True)
    subprocess.run(["sh", "-c", str(told.value).split("`")[1]], check=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TryAgain):
        run_demo(pool, json=True)


def test_demo_prompts_are_distinct_and_counted():
    prompts = demo_prompts(60)
    assert len({prompt.group_id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == 60
    with pytest.raises(BadInput, match="1 to 60"):
        demo_prompts(61)


def test_a_directory_in_use_is_refused_by_name_as_a_program(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    done = subprocess.run(
        [sys.executable, "-m", "strawq_workers.demo", "--json", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 2 and "not empty" in done.stderr and not done.stdout
    assert (tmp_path / "mine.txt").read_text() == "x"
