import subprocess
import sys

import pytest

from strawq.errors import BadInput
from strawq_workers.demo import demo_prompts, run_demo


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
