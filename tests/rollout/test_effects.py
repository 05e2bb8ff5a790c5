"""No flag is ignored in silence: it is obeyed, refused, or named with the reason, by one table."""

import itertools
import json
from types import SimpleNamespace

import pytest

from strawq.errors import BadInput
from strawq_workers.rollout.effects import ALWAYS, REPLAY, REPLAYED, ROWS, Run, without_effect
from strawq_workers.rollout.launch import FUNCTIONS, parser, read_flags
from strawq_workers.slime.flags import all_flags

DEFAULTS = vars(parser().parse_args([]))
FLAGS = {flag.name: flag for flag in all_flags()}
MODES = ("sync", "partial", "fully-async")
TRANSPORTS = ("object-store", "straw")
# What a row may ask for besides mode and transport.
NEEDED = (
    "save", "load", "save_interval", "prompt_data", "num_rollout", "partial_rollout", "rollout_shuffle",
    "apply_chat_template", "buffer_filter_path", "use_score_centering", "custom_rm_path", "eval_interval",
    "eval_prompt_data", "debug_rollout_only", "sglang_router_ip", "sglang_router_port", "rollout_engines",
    "rollout_function_path", "max_staleness", ("staleness_policy", "drop"),
)  # fmt: skip


def other_than_default(name):
    flag = FLAGS[name]
    if flag.choices:
        return next(choice for choice in flag.choices if choice != flag.default)
    value = {bool: True, json.loads: {"a": 1}, str: "own.x"}.get(flag.kind)
    value = flag.kind((flag.default or 0) + 3) if value is None else value
    return [value, value] if flag.many else [value] if flag.append else value


def run_with(mode, transport, engines, *names):
    given = {name: other_than_default(name) for name in names if not isinstance(name, tuple)}
    given.update(name for name in names if isinstance(name, tuple))
    args = SimpleNamespace(**{**DEFAULTS, "rollout_batch_size": 2, "rollout_data_transport": transport, **given})
    return Run(args, mode, engines)


def option(name):
    return "--" + name.replace("_", "-")


def every_run(*names):
    for mode, transport, engines in itertools.product(MODES, TRANSPORTS, (True, False)):
        yield run_with(mode, transport, engines, *names)
        for needed in itertools.chain(itertools.combinations(NEEDED, 1), itertools.combinations(NEEDED, 2)):
            yield run_with(mode, transport, engines, *names, *needed)


def said(run):
    """Reason -> the options that it is said of."""
    try:
        lines = without_effect(run)
    except BadInput as error:
        lines = [str(error)]
    return {why: options.split(", ") for options, _, why in (line.partition(": ") for line in lines)}


def test_every_flag_has_its_place():
    placed = {name for row in ROWS for name in row.flags}
    assert placed | ALWAYS == set(FLAGS)
    assert not placed & ALWAYS
    assert set(REPLAY.flags) | REPLAYED == set(FLAGS)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.flags[0]}-{row.why[:30]}" for row in ROWS])
def test_a_row_speaks_where_its_flags_are_not_obeyed_and_nowhere_else(row):
    for name in row.flags:
        obeyed, idle, told = 0, 0, 0
        for run in every_run(name):
            spoken = said(run)
            if any(not other.when(run) for other in ROWS if name in other.flags):
                idle += not row.when(run)
                told += option(name) in spoken.get(row.why, ())
            else:
                obeyed += 1
                assert not any(option(name) in options for options in spoken.values()), (name, run)
        assert told and told <= idle, name
        assert obeyed or row.why.startswith("checked only"), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_run_with_every_flag_at_its_default_says_nothing(mode, transport):
    assert said(run_with(mode, transport, True)) == {}


def test_on_archives_only_what_is_read_has_an_effect():
    run = run_with(
        "sync", "straw", True, "load_debug_rollout_data", "num_rollout", "save", "eval_interval", "ckpt_step"
    )
    assert said(run) == {
        REPLAY.why: ["--rollout-data-transport", "--eval-interval", "--save", "--ckpt-step"],
    }


def test_what_the_mode_sets_is_not_taken_for_the_users(caplog):
    args, mode = read_flags(["--rollout-batch-size", "2", "--num-rollout", "1"], "partial")
    assert (mode, args.partial_rollout, args.over_sampling_batch_size) == ("partial", True, 4)
    assert args.rollout_function_path == FUNCTIONS["partial"] and not caplog.text
    read_flags(
        ["--rollout-batch-size", "2", "--num-rollout", "1", "--rollout-workers", "2", "--rollout-seed", "1"], "sync"
    )
    (record,) = caplog.records
    assert record.message == (
        "without effect in this run: --rollout-workers: needs --mode fully-async with --rollout-data-transport straw; "
        "--rollout-seed: needs --rollout-shuffle"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rm-type", "math"], "--rm-type is slime's own reward: name a function with --custom-rm-path"),
        (["--multimodal-keys={}"], "--multimodal-keys is not supported by strawq's data sources: name a data source"),
        (["--sglang-mem-fraction-static", "0.8"], "is an engine's option: give it where the engine is started"),
        (
            ["--rollout-bach-size", "3", "--lr", "1"],
            "--rollout-bach-size did you mean --rollout-batch-size?; --lr; see",
        ),
        (["stray"], "unrecognized arguments: stray; see `strawq rollout --flags`"),
    ],
)
def test_flags_that_are_not_taken_are_refused_with_what_to_do_instead(words, says):
    with pytest.raises(BadInput) as caught:
        read_flags(["--rollout-batch-size", "2", *words], "")
    assert str(caught.value).startswith("unrecognized arguments: ") and says in str(caught.value)
