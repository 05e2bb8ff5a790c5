"""`strawq rollout` in each mode, with both transports, on local storage and on a JuiceFS mount."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import rollout_hooks as hooks
from scene import SLOW, once

from strawq import Pool
from strawq.cli import main
from strawq_workers.rollout import launch
from strawq_workers.rollout.settings import options_of
from strawq_workers.worker.hooks import hook_args, with_least_hook_args

MODES = pytest.mark.parametrize("mode", ["sync", "partial", "fully-async"])


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("STRAWQ_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"input": f"prompt {row}"}) + "\n" for row in range(1000)))
    return file


@pytest.fixture
def rollout(capsys, prompts):
    """`strawq rollout --json` with small numbers; its answer."""

    def call(*words, code=0):
        usual = [
            "--prompt-data", prompts, "--rollout-batch-size", 3, "--n-samples-per-prompt", 2, "--num-rollout", 3,
            "--rollout-max-response-len", 16, "--sglang-server-concurrency", 16, "--rollout-queue-lease-seconds", 20,
        ]  # fmt: skip
        capsys.readouterr()
        ended = main(["rollout", "--json", *map(str, usual), *map(str, words)])
        told = capsys.readouterr()
        assert "Traceback" not in told.out + told.err and told.out.count("\n") == 1
        assert ended == code, told
        return json.loads(told.out)

    return call


def trained_once(told, mode):
    """Three whole batches, no group in two of them, versions one after the other."""
    assert told["mode"] == mode and not told["data_ended"] and len(told["rollouts"]) == 3
    prompts = [number for batch in told["rollouts"] for number in batch["prompts"]]
    assert len(prompts) == len(set(prompts)) == 9
    assert [batch["version"] for batch in told["rollouts"]] == ["1", "2", "3"]
    assert all(batch["groups"] == 3 and batch["tokens"] == 3 * 2 * 16 for batch in told["rollouts"])
    return prompts


def nothing_held(pool, prompts):
    """Every prompt that was submitted is somewhere, and nobody holds one."""
    with Pool.open(pool) as opened:
        counts = opened.queue().counts()
        assert counts.trained == len(prompts) and counts.in_batch == counts.failed == 0
        assert counts.fresh_leased == counts.partial_leased == 0
        waiting = counts.fresh_pending + counts.partial_pending + counts.ready
        assert counts.total == counts.trained + waiting
        assert opened.inspect().sessions == []


def workers(mode):
    return ["--rollout-workers", 1] if mode == "fully-async" else []


@MODES
def test_three_rollouts_on_a_pool(rollout, engine, tmp_path, mode):
    told = rollout(
        "--mode", mode, "--rollout-data-transport", "straw", "--rollout-data-dir", tmp_path / "pool",
        "--engine", engine.url, *workers(mode),
    )  # fmt: skip
    nothing_held(tmp_path / "pool", trained_once(told, mode))
    assert engine.running() == 0


@MODES
def test_three_rollouts_in_memory(rollout, engine, mode):
    told = rollout("--mode", mode, "--rollout-data-transport", "object-store", "--engine", engine.url)
    trained_once(told, mode)
    assert engine.running() == 0


@pytest.mark.juicefs
@MODES
def test_three_rollouts_on_a_juicefs_mount(rollout, engine, juicefs_pair, mode):
    pool = juicefs_pair[0] / "pool"
    told = rollout(
        "--mode", mode, "--rollout-data-transport", "straw", "--rollout-data-dir", pool, "--engine", engine.url,
        "--rollout-storage-profile", "juicefs", *workers(mode),
    )  # fmt: skip
    nothing_held(juicefs_pair[1] / "pool", trained_once(told, mode))


@pytest.mark.parametrize("engine", [SLOW], indirect=True)
@pytest.mark.parametrize("transport", ["straw", "object-store"])
def test_partial_rollouts_go_on_from_tokens_that_were_there(rollout, engine, tmp_path, transport):
    hooks.gate["second"] = once(lambda: engine.running() == 6)
    hooks.gate["ready"] = lambda: engine.generated() > 6 * 60 + 6 * 4
    told = rollout(
        "--mode", "partial", "--rollout-data-transport", transport, "--rollout-data-dir", tmp_path / "pool",
        "--engine", engine.url, "--rollout-max-response-len", 60, "--custom-rm-path", "rollout_hooks.when_ready",
        "--rollout-tokenize-path", "rollout_hooks.first_three_first",
    )  # fmt: skip
    hooks.gate["ready"] = lambda: True
    resumed = [batch["metrics"]["worker/tokens_resumed"] for batch in told["rollouts"]]
    assert resumed[0] == 0 and resumed[1] > 0
    assert all(batch["tokens"] == 3 * 2 * 60 and batch["reward_mean"] == 1.0 for batch in told["rollouts"])


def test_a_run_goes_on_from_its_checkpoint_and_back_to_an_earlier_one(rollout, engine, tmp_path):
    save = tmp_path / "save"
    flags = ["--rollout-data-transport", "straw", "--save", save, "--save-interval", 1, "--engine", engine.url]
    first = rollout(*flags)
    assert [batch["saved"] for batch in first["rollouts"]] == [True] * 3
    on = rollout(*flags, "--load", save, "--num-rollout", 5)
    assert on["start_rollout_id"] == 3 and [batch["version"] for batch in on["rollouts"]] == ["4", "5"]
    back = rollout(*flags, "--load", save, "--ckpt-step", 0)
    assert back["start_rollout_id"] == 1 and back["resumed"] == "rolled back"
    # What was trained after the checkpoint is trained again, on the line that starts there.
    assert back["rollouts"][0]["prompts"] == first["rollouts"][1]["prompts"]
    assert engine.running() == 0


def test_checkpoints_that_a_run_does_not_go_on_from_are_not_overwritten(rollout, engine, tmp_path):
    save = tmp_path / "save"
    flags = ["--engine", engine.url, "--save-interval", 1, "--save", save]
    rollout(*flags)
    kept = {path: path.read_bytes() for path in save.rglob("*") if path.is_file()}
    pool = ["--rollout-data-transport", "straw", "--rollout-data-dir", tmp_path / "pool"]
    for words in ([], ["--start-rollout-id", 1], ["--load", tmp_path / "other"], pool):
        told = rollout(*flags, *words, code=2)
        assert f"--save {save} holds checkpoints" in told["error"]["message"]
        assert "which this run would overwrite" in told["error"]["message"]
    assert kept == {path: path.read_bytes() for path in kept}
    assert rollout(*flags, "--load", save, "--ckpt-step", 0)["start_rollout_id"] == 1  # it says where it goes on


def test_a_step_that_was_not_saved_is_named_with_those_that_were(rollout, engine, tmp_path):
    save = tmp_path / "save"
    flags = ["--engine", engine.url, "--load", save]
    assert rollout(*flags)["resumed"] == "new"
    again = rollout(*flags, "--start-rollout-id", 1)
    assert (again["start_rollout_id"], again["resumed"]) == (1, "new")
    told = rollout(*flags, "--ckpt-step", 7, code=2)
    assert "--ckpt-step 7" in told["error"]["message"] and "(there are: none)" in told["error"]["message"]
    rollout("--engine", engine.url, "--save", save, "--save-interval", 1)
    told = rollout(*flags, "--ckpt-step", 7, code=2)
    assert "(there are: 0, 1, 2)" in told["error"]["message"]
    told = rollout(*flags, "--start-rollout-id", 8, "--num-rollout", 9, code=2)
    assert "has the states after rollouts 0, 1, 2" in told["error"]["message"]
    assert "--ckpt-step" in rollout("--engine", engine.url, "--ckpt-step", 1, code=2)["error"]["message"]


def test_a_directory_that_cannot_be_written_any_more_is_the_storages_fault(rollout, engine, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("strawq_workers.rollout.trainer.replace_file", full)
    told = rollout("--engine", engine.url, "--save", tmp_path / "save", "--save-interval", 1, code=6)
    assert f"--save {tmp_path / 'save'} cannot be written: No space left" in told["error"]["message"]


def test_evaluations_are_told_with_their_rollout(rollout, engine, prompts, tmp_path):
    told = rollout(
        "--rollout-data-transport", "straw", "--rollout-data-dir", tmp_path / "pool", "--engine", engine.url,
        "--eval-interval", 2, "--eval-prompt-data", "few", f"{prompts}@[0:4]", "--custom-rm-path", "rollout_hooks.one",
    )  # fmt: skip
    assert [batch["evaluation"] is not None for batch in told["rollouts"]] == [False, True, False]
    assert told["rollouts"][1]["evaluation"]["eval/few"] == 1.0


@pytest.mark.parametrize("transport", ["straw", "object-store"])
def test_a_rewards_number_is_the_one_that_the_key_names(rollout, engine, prompts, tmp_path, transport):
    flags = [
        "--rollout-data-transport", transport, "--rollout-data-dir", tmp_path / "pool", "--engine", engine.url,
        "--custom-rm-path", "rollout_hooks.two_numbers", "--num-rollout", 1, "--eval-interval", 1,
        "--eval-prompt-data", "few", f"{prompts}@[0:2]",
    ]  # fmt: skip
    missing = rollout(*flags, "--reward-key", "nope", code=2)["error"]["message"]
    assert re.fullmatch(
        r"--reward-key nope: the reward of sample \d+ has no such entry \(there are: right, brief\)", missing
    )
    kept = f"{tmp_path}/{{rollout_id}}"
    (batch,) = rollout(*flags, "--reward-key", "brief", "--save-debug-rollout-data", kept)["rollouts"]
    assert (batch["reward_mean"], batch["evaluation"]["eval/few"]) == (0.25, 0.25)
    (again,) = rollout("--load-debug-rollout-data", kept, "--reward-key", "right", "--num-rollout", 1)["rollouts"]
    assert again["reward_mean"] == 1.0
    flags[3] = tmp_path / "other"
    missing = rollout(*flags, "--reward-key", "brief", "--eval-reward-key", "best", code=2)["error"]["message"]
    assert missing.startswith("--eval-reward-key best: the reward of sample") and "right, brief" in missing


def test_a_key_for_rewards_that_are_numbers_is_refused(rollout, engine):
    flags = ["--engine", engine.url, "--custom-rm-path", "rollout_hooks.one", "--reward-key", "right"]
    assert "is 1.0, no object: leave the flag out" in rollout(*flags, code=2)["error"]["message"]


@pytest.mark.parametrize("transport", ["straw", "object-store"])
def test_engines_that_pause_in_place_keep_their_requests_over_new_weights(rollout, engine, tmp_path, transport):
    told = rollout(
        "--rollout-data-transport", transport, "--rollout-data-dir", tmp_path / "pool", "--engine", engine.url,
        "--flush-cache-interval", 2, "--partial-rollout", *workers("fully-async"),
    )  # fmt: skip
    trained_once(told, "fully-async")
    assert sum(batch["metrics"]["rollout/aborts"] for batch in told["rollouts"]) == 0


def test_a_rollout_function_of_the_users_own_is_called(rollout, engine):
    told = rollout("--engine", engine.url, "--rollout-function-path", "rollout_hooks.my_rollout")
    trained_once(told, "sync")
    assert all(batch["metrics"]["mine"] == batch["rollout_id"] for batch in told["rollouts"])
    told = rollout("--engine", engine.url, "--rollout-function-path", "rollout_hooks.nothing", code=2)
    assert "rollout_hooks.nothing" in told["error"]["message"]


def test_without_training_no_version_and_no_checkpoint_is_made(rollout, engine, tmp_path):
    told = rollout("--engine", engine.url, "--debug-rollout-only", "--save", tmp_path / "save", "--save-interval", 1)
    assert [batch["version"] for batch in told["rollouts"]] == [""] * 3
    assert not any(batch["saved"] for batch in told["rollouts"]) and not (tmp_path / "save").exists()


def test_archives_of_a_run_are_trained_on_without_an_engine(rollout, engine, tmp_path):
    where = f"{tmp_path}/kept/{{rollout_id}}"
    made = rollout(
        "--rollout-data-transport", "straw", "--rollout-data-dir", tmp_path / "pool", "--engine", engine.url,
        "--save-debug-rollout-data", where, "--custom-rm-path", "rollout_hooks.number_of",
    )  # fmt: skip
    generated = engine.generated()
    again = rollout("--load-debug-rollout-data", where)
    for name in ("prompts", "tokens", "reward_mean", "groups", "samples"):
        assert [batch[name] for batch in again["rollouts"]] == [batch[name] for batch in made["rollouts"]]
    part = rollout("--load-debug-rollout-data", where, "--load-debug-rollout-data-subsample", 0.4)
    assert [batch["groups"] for batch in part["rollouts"]] == [1, 1, 1] and engine.generated() == generated
    told = rollout(
        "--rollout-data-transport", "straw", "--rollout-data-dir", tmp_path / "other", "--engine", engine.url,
        "--save-debug-rollout-data", where, code=2,
    )  # fmt: skip
    assert "holds an archive already" in told["error"]["message"] and engine.generated() == generated
    assert "must contain {rollout_id}" in rollout("--load-debug-rollout-data", "/x", code=2)["error"]["message"]


def test_a_checkpoint_of_a_background_worker_has_what_was_in_its_hands(rollout, engine, tmp_path):
    save = tmp_path / "save"
    flags = [
        "--mode", "fully-async", "--rollout-data-transport", "object-store", "--save", save, "--save-interval", 3,
        "--engine", engine.url,
    ]  # fmt: skip
    first = rollout(*flags)
    on = rollout(*flags, "--load", save, "--num-rollout", 12)
    assert on["start_rollout_id"] == 3
    numbers = [number for told in (first, on) for batch in told["rollouts"] for number in batch["prompts"]]
    # 36 groups of prompts in order: none twice, and none left out behind the last that was begun.
    assert len(set(numbers)) == 36 and max(numbers) < 36 + 8 + 8


def test_an_embedded_engine_on_a_pool_has_a_worker_without_being_asked(capsys, prompts, tmp_path):
    save = tmp_path / "save"
    words = [
        "--mode", "fully-async", "--rollout-data-transport", "straw", "--save", save, "--embedded-engine",
        "--prompt-data", prompts, "--rollout-batch-size", 2, "--num-rollout", 1, "--rollout-max-response-len", 8,
    ]  # fmt: skip
    assert main(["rollout", *map(str, words)]) == 0
    told = capsys.readouterr().err
    assert f"fully-async rollouts, groups in the pool {save}/rollout_data, engines http://" in told
    assert "no worker is there" not in told


def test_workers_that_are_to_be_started_elsewhere_are_asked_for_at_once(engine, prompts, tmp_path, capsys):
    words = [
        "--mode", "fully-async", "--rollout-data-transport", "straw", "--rollout-data-dir", tmp_path / "pool",
        "--engine", engine.url, "--prompt-data", prompts, "--rollout-batch-size", 2, "--num-rollout", 1,
        "--rollout-max-response-len", 9, "--rollout-worker-wait-seconds", 0,
    ]  # fmt: skip
    assert main(["rollout", *map(str, words)]) == 4
    told = capsys.readouterr().err
    assert f"no worker is there yet: start one or more with `strawq work {tmp_path}/pool --engine {engine.url} " in told
    assert "--max-new-tokens 9" in told


def test_the_command_that_starts_a_worker_elsewhere_is_short_and_right_in_any_directory(
    engine, prompts, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    flags = [
        "--rollout-data-transport", "straw", "--save", "save", "--save-interval", 2, "--prompt-data",
        f"{prompts.name}@[0:9]", "--rollout-batch-size", 2, "--num-rollout", 1,
        "--custom-rm-path", "rollout_hooks.one", "--rollout-worker-wait-seconds", 0,
    ]  # fmt: skip
    flags = [str(word) for word in flags]
    assert main(["rollout", "--mode", "fully-async", "--engine", engine.url, *flags]) == 4
    command = shlex.split(re.search(r"start one or more with `(.*?)`, or let", capsys.readouterr().err)[1])
    assert command[:3] == ["strawq", "work", f"{tmp_path}/save/rollout_data"]
    known = json.loads(command[command.index("--hook-args") + 1])
    assert known["save"] == f"{tmp_path}/save" and known["prompt_data"] == f"{prompts}@[0:9]"
    assert "rollout_seed" not in known and "custom_rm_path" not in known and len(" ".join(command)) < 900
    # A worker's functions find the flags that are not named as well.
    args, _ = launch.read_flags(flags, "fully-async", engines=True)
    args.rollout_engines = [engine.url]
    options = options_of(args)
    assert vars(hook_args(with_least_hook_args(options))) == vars(hook_args(options))
    assert hook_args(options).rollout_seed == 42 and hook_args(options).eval_interval is None


def test_prompts_are_asked_for_where_nothing_makes_them(capsys):
    few = ["rollout", "--embedded-engine", "--rollout-batch-size", "2", "--num-rollout", "1"]
    assert main(few) == 2
    assert "--prompt-data is required" in capsys.readouterr().err
    assert main([*few, "--rollout-max-response-len", "4", "--rollout-tokenize-path", "rollout_hooks.two_ids"]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--embedded-engine", "--mode", "sync", "--partial-rollout"], "--partial-rollout: --mode sync is without it"),
        (["--embedded-engine", "--save-interval", 1], "--save-interval: needs --save"),
        (["--embedded-engine", "--eval-interval", 1], "--eval-interval: needs --eval-prompt-data"),
        (
            ["--embedded-engine", "--eval-interval", 1, "--eval-prompt-data", "few", "/nowhere.jsonl"],
            "/nowhere.jsonl cannot be read: [Errno 2] No such file or directory: '/nowhere.jsonl'; check --eval-prompt",
        ),
        (["--rollout-bach-size", 3], "unrecognized arguments: --rollout-bach-size"),
        (["--engine", "http://127.0.0.1:9", "--embedded-engine"], "--embedded-engine starts an engine"),
        ([], "no engine: name one with --engine URL"),
        (["--embedded-engine", "--rollout-data-transport", "straw"], "requires --rollout-data-dir or --save"),
        (["--embedded-engine", "--over-sampling-batch-size", 1], "less than --rollout-batch-size"),
        (["--embedded-engine", "--mode", "sync", "--rollout-function-path", "a.b"], "leave one of them out"),
        (["--debug-train-only"], "say what to train on"),
        (["--embedded-engine", "--prompt-data", "/nowhere.jsonl"], "; check --prompt-data"),
        (
            ["--embedded-engine", "--mode", "fully-async", "--rollout-data-transport", "straw", "--rollout-data-dir",
             "/tmp/nowhere", "--eval-interval", 1],
            "distributed fully-async rollout doesn't support evaluation mode",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_obeyed_is_refused_in_one_line(rollout, words, says):
    told = rollout(*words, code=2)
    assert says in told["error"]["message"]


@pytest.mark.parametrize(
    "flag",
    ["--custom-rm-path", "--custom-generate-function-path", "--dynamic-sampling-filter-path", "--eval-function-path",
     "--rollout-sample-filter-path", "--rollout-sample-hook-path", "--rollout-tokenize-path", "--data-source-path",
     "--rollout-function-path", "--buffer-filter-path"],
)  # fmt: skip
def test_a_function_that_is_not_there_is_named_by_its_flag_before_anything_starts(rollout, monkeypatch, flag):
    monkeypatch.setattr(launch, "_start_engine", pytest.fail)
    told = rollout("--embedded-engine", flag, "rollout_hooks.one", flag, "rollout_hooks.nothing", code=2)
    assert told["error"]["message"] == f"{flag} rollout_hooks.nothing: module 'rollout_hooks' has no 'nothing'"
    told = rollout("--embedded-engine", flag, "no_such_module.one", code=2)
    assert told["error"]["message"].startswith(f"{flag} no_such_module.one: cannot import 'no_such_module': No module")


def test_a_module_that_raises_when_it_is_imported_is_the_users(rollout, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("def one(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    told = rollout("--embedded-engine", "--custom-rm-path", "broken_module.one", code=2)
    assert "cannot import 'broken_module': SyntaxError: " in told["error"]["message"]


@pytest.mark.parametrize("mode", ["sync", "fully-async"])
def test_functions_are_found_in_the_working_directory_by_trainer_and_workers(
    rollout, engine, tmp_path, monkeypatch, mode
):
    here = tmp_path / "here"
    here.mkdir()
    (here / f"module_in_{mode[:4]}.py").write_text("def half(args, sample):\n    return 0.5\n")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    told = rollout(
        "--mode", mode, "--rollout-data-transport", "straw", "--rollout-data-dir", tmp_path / "pool", "--engine",
        engine.url, *workers(mode), "--custom-rm-path", f"module_in_{mode[:4]}.half", "--num-rollout", 1,
    )  # fmt: skip
    assert told["rollouts"][0]["reward_mean"] == 0.5


def test_a_worker_finds_functions_in_the_working_directory_too(tmp_path, monkeypatch, capsys):
    (tmp_path / "module_of_a_worker.py").write_text("")
    Pool.init(tmp_path / "pool").close()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert main(["work", "pool", "--engine", "http://127.0.0.1:9", "--reward", "module_of_a_worker.half"]) == 2
    assert "module 'module_of_a_worker' has no 'half'" in capsys.readouterr().err


def test_an_engine_that_does_not_answer_is_exit_code_4(rollout, tmp_path):
    flags = ["--rollout-data-transport", "straw", "--rollout-data-dir", tmp_path / "pool"]
    told = rollout(*flags, "--engine", "http://127.0.0.1:9", code=4)
    assert "127.0.0.1:9" in told["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_gives_everything_back_and_the_next_run_goes_on(prompts, tmp_path, number):
    pool, save = tmp_path / "pool", tmp_path / "save"
    flags = [
        "--rollout-data-transport", "straw", "--rollout-data-dir", pool, "--save", save, "--save-interval", 1,
        "--rollout-queue-lease-seconds", 20, "--prompt-data", prompts, "--rollout-batch-size", 3,
        "--n-samples-per-prompt", 2, "--mode", "partial",
    ]  # fmt: skip
    words = [
        sys.executable, "-m", "strawq", "rollout", "--json", "--embedded-engine", "--rollout-max-response-len", "200",
        *map(str, flags),
    ]  # fmt: skip
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*words, "--num-rollout", "1000"], start_new_session=True, **pipes)
    try:
        for line in process.stderr:
            if "rollout 1:" in line:
                break
        # As a terminal does it: every process of the group is told.
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[number], said
    assert "Traceback" not in said
    with Pool.open(pool) as opened:
        counts = opened.queue().counts()
        assert counts.fresh_leased == counts.partial_leased == 0 and opened.inspect().sessions == []
        trained = opened.queue().counts().trained // 3
    on = subprocess.run([*words, "--load", str(save), "--num-rollout", str(trained + 2)], timeout=60, **pipes)
    assert on.returncode == 0 and json.loads(on.stdout)["start_rollout_id"] in (trained, trained + 1), on
