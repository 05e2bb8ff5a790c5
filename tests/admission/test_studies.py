"""The studies: what breaks when the simulation is not what it says, or its figures leave the published ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.studies import dynamic_sampling, refill

ROOT = Path(__file__).resolve().parents[2]


def step_by_step(decode: refill.Decode, lengths: list[int], late: list[tuple[float, int]]) -> tuple[list[float], int]:
    """One engine, one step at a time: ends of the samples, and tokens made. `late` join at (time, length)."""
    now, made, ends = 0.0, 0, []
    running = [(length, 0) for length in lengths]
    late = sorted(late)
    while running or late:
        if not running:
            now = max(now, late[0][0])
        while late and late[0][0] <= now:
            running.append((late.pop(0)[1], 0))
        now += decode.weights_s + decode.context_s * sum(have for _, have in running)
        made += len(running)
        running = [(length, have + 1) for length, have in running]
        ends += [now for length, have in running if have == length]
        running = [(length, have) for length, have in running if have < length]
    return ends, made


def test_engines_that_jump_over_steps_end_where_single_steps_end() -> None:
    decode = refill.Decode(0.004, 0.00003)
    late = [(0.0305, 17), (0.0306, 3), (0.35, 40), (9.0, 5)]
    expected, made = step_by_step(decode, [10, 10, 64], late)
    engine = refill.Engine(decode)
    engine.waiting = [(length, index, "first") for index, length in enumerate((10, 10, 64))]
    arrivals, ends, at_s, steps = [*late], [], 0.0, 0
    while engine.load or arrivals:
        at_s, steps = engine.next_event(at_s) if engine.load else (float("inf"), 0)
        if arrivals and arrivals[0][0] <= at_s:
            at_s, length = arrivals.pop(0)
            engine.waiting.append((length, 0, f"late-{len(arrivals)}"))
            continue
        ends += [at_s] * len(engine.advance(at_s, steps))
    assert ends == pytest.approx(expected)
    assert engine.generated == made == 10 + 10 + 64 + 17 + 3 + 40 + 5


def test_the_two_speed_parameters_give_back_the_waves_they_were_solved_from() -> None:
    equal, uneven = refill.Case(lengths=refill.EQUAL), refill.Case(lengths=refill.UNEVEN)
    decode = refill.calibrate(equal, 21.82, uneven, 73.99)
    assert decode.weights_s > 0 and decode.context_s > 0
    steps, context = refill._wave(equal)
    assert decode.weights_s * steps + decode.context_s * context == pytest.approx(21.82)
    run = refill.Simulation(equal, decode, sample_level=False).run()
    assert run.mean_interval_s == pytest.approx(21.82)


@pytest.mark.parametrize("engines_stop", [False, True])
def test_sample_admission_gives_the_published_gain_and_loses_no_token(engines_stop: bool) -> None:
    result = refill.study(engines_stop)
    assert result["tokens_lost"] == 0
    assert result["mean_interval_change"] == pytest.approx(-0.647, abs=0.05)
    assert result["total_change"] <= -0.381
    assert result["total_change_with_constant"] == pytest.approx(-0.381, abs=0.05)
    assert abs(result["control_change"]) <= 0.01
    low, high = result["range_over_placements"]["mean_interval_change"]
    assert low < -0.55 and high < -0.55, "the gain must not hang on where the long answers fall"
    for name, tokens in (("uneven", 3_014_656), ("equal", 4_194_304)):
        for run in result["runs"][name].values():
            assert run["generated"] == run["delivered"] == tokens
            assert run["groups_delivered"] == 128


def test_the_window_is_never_exceeded_and_group_admission_holds_sixteen() -> None:
    decode = refill.Decode(0.004, 0.00005)
    for sample_level, most in ((False, 16), (True, 48)):
        simulation = refill.Simulation(refill.Case(lengths=refill.UNEVEN), decode, sample_level=sample_level)
        seen = []
        admit = simulation._admit

        def watched(now_s: float, admit=admit, simulation=simulation, seen=seen) -> None:  # type: ignore[no-untyped-def]
            admit(now_s)
            seen.append(
                (simulation.admission.in_flight_groups, len(simulation.ready), simulation.admission.held_samples)
            )

        simulation._admit = watched  # type: ignore[method-assign]
        simulation.run()
        assert max(in_flight for in_flight, _, _ in seen) == most
        assert max(in_flight + ready for in_flight, ready, _ in seen) <= 48
        assert max(held for _, _, held in seen) <= 128


def test_the_published_case_of_dynamic_sampling() -> None:
    result = dynamic_sampling.study(rollouts=40)
    assert result["in_flight_after"] == [0, 0, 0]
    assert result["generated_per_24_kept"] <= 31
    assert result["lost"] == 0
    assert result["published_case"]["exact top-up"]["generated_per_24_kept"] == 31
    assert result["published_case"]["whole batch"]["generated_per_24_kept"] == 48
    assert result["published_case"]["whole batch"]["lost_worth_keeping"] == 12
    assert sum(result["published_case"]["whole batch"]["in_flight_after"]) > 0


def test_over_a_long_run_surplus_costs_nothing_and_engines_do_not_idle() -> None:
    result = dynamic_sampling.study(rollouts=100)
    assert result["idle_ours"] < result["idle_exact_topup"]
    for tail in result["long_runs"].values():
        ours, exact = tail["strawq"], tail["exact top-up"]
        assert ours["idle_share"] < exact["idle_share"]
        assert ours["time"] < exact["time"]
        assert ours["generated_per_24_kept"] <= 32
        assert (ours["lost"], exact["lost"], ours["in_flight_after_max"]) == (0, 0, 0)
        assert ours["surplus_at_end"] < 2 * 8


def test_a_slow_group_is_kept_as_often_as_a_quick_one() -> None:
    """Whoever finishes first fills the batch, but whoever is late is in a later one: the judged are the started."""
    case = dynamic_sampling.Case(target=8, engines=8, rollouts=200, duration=dynamic_sampling.uneven_time)
    rollouts = dynamic_sampling.Rollouts(case, max_surplus=None)
    outcome = rollouts.run()
    waiting = set(rollouts.ready) | set(rollouts.partial)
    assert rollouts.judged | waiting == set(range(outcome.started))
    assert len(waiting) < 16 and min(waiting) > outcome.started - 40, "an old group was left behind"
    assert outcome.latest <= 6


@pytest.mark.parametrize(
    ("study", "keys"),
    [
        ("refill.py", {"mean_interval_change", "total_change", "control_change", "tokens_lost"}),
        (
            "dynamic_sampling.py",
            {"in_flight_after", "generated_per_24_kept", "lost", "idle_exact_topup", "idle_ours"},
        ),
    ],
)
def test_a_study_runs_from_a_plain_checkout_and_prints_json(study: str, keys: set[str], tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "studies" / study), "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True, timeout=120)
    assert keys <= set(json.loads(answer.stdout))
    shown = subprocess.run(command[:-1], capture_output=True, text=True, cwd=tmp_path, check=True, timeout=120)
    assert "published" in shown.stdout
