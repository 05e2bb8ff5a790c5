"""The command that is told to start a worker with starts one with just these options."""

import shlex

import msgspec
import pytest

from strawq.cli import main
from strawq.cli.work_command import work_command
from strawq.pool import Pool
from strawq_workers.worker.options import WorkerOptions

ENGINES = ("http://127.0.0.1:1", "http://127.0.0.1:2")
PLAIN = WorkerOptions(engines=ENGINES, lease_seconds=30.0, workers=0)
CHANGED = msgspec.structs.replace(
    PLAIN, samples=3, max_new_tokens=7, temperature=0.5, stop=("a b", "'"), stop_token_ids=(4, 5),
    partial_rollout=False, skip_special_tokens=False, logprobs=False, response_text=True, sampling_extra={"seed": 1},
    save_seconds=0.0, reward="own.reward:it", hook_args={"rollout_stop": ["x y"], "n": 1}, max_concurrent_samples=9,
    role="other", sample_hooks=("a:b", "c:d"), pause_policy="drain", top_k=3, api_key="secret", online_gc=True,
    max_staleness=2, batch_groups=4, worker_index=0,
)  # fmt: skip


@pytest.mark.parametrize("options", [PLAIN, CHANGED])
def test_the_command_has_the_options(tmp_path, monkeypatch, options):
    pool = tmp_path / "a pool"
    Pool.init(pool).close()
    got = []

    def run_worker(path, given):
        got.append((path, given))
        raise SystemExit(0)

    monkeypatch.setattr("strawq_workers.worker.process.run_worker", run_worker)
    words = shlex.split(work_command(str(pool), options))
    assert words[0] == "strawq"
    with pytest.raises(SystemExit):
        main(words[1:])
    assert got == [(str(pool), msgspec.structs.replace(options, api_key=PLAIN.api_key))], "a key is never shown"


def test_what_has_its_default_is_not_said():
    assert work_command("p", PLAIN) == f"strawq work p --engine {ENGINES[0]} --engine {ENGINES[1]} --queue rollout"
    assert "--hook-args" not in work_command("p", msgspec.structs.replace(PLAIN, hook_args={"n": 1}))
