"""Fixtures that every area may use: a real JuiceFS volume with two clients, mounted once per test run (and
worker of it). How long the randomised tests look, and what a run says at its end: only this file is read by the process
that talks to the terminal when others run the tests (`make test`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tools.juicefs.volume import Volume, why_not

# How much the randomised tests do. `default` is quick and always the same; `ci` draws new examples every time; a
# `campaign` goes on for hours (`make campaign`, with -m campaign). STRAWQ_PROFILE names another one.
_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile(
    "default", max_examples=120, stateful_step_count=50, deadline=None, derandomize=True, suppress_health_check=_QUIET
)
settings.register_profile(
    "ci", max_examples=500, stateful_step_count=50, deadline=None, print_blob=True, suppress_health_check=_QUIET
)
settings.register_profile(
    "campaign",
    max_examples=20_000,
    stateful_step_count=100,
    deadline=None,
    print_blob=True,
    suppress_health_check=_QUIET,
)


def pytest_configure(config: pytest.Config) -> None:
    asked = "campaign" if config.getoption("markexpr") == "campaign" else "default"
    settings.load_profile(os.environ.get("STRAWQ_PROFILE", asked))


SGLANG_URL_VARIABLE = "STRAWQ_SGLANG_URL"


def real_sglang_urls() -> list[str]:
    """URLs of running SGLang servers, separated by commas or spaces."""
    return os.environ.get(SGLANG_URL_VARIABLE, "").replace(",", " ").split()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seen = (report for reports in terminalreporter.stats.values() for report in reports)
    ran = (report.nodeid for report in seen if isinstance(report, pytest.TestReport))
    if not real_sglang_urls() and any(name.startswith("tests/sglang/contract/") for name in ran):
        terminalreporter.write_line(
            f"SGLang contract: ran against the embedded engine only; no real SGLang ({SGLANG_URL_VARIABLE} is not set; "
            "`make test-sglang` starts one)",
            yellow=True,
            bold=True,
        )


WORKERS_MAX = 4


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many workers `make test` divides the tests among: two for each core, since most of a test is waiting (for the
    disk, a process, the end of a lease). Beyond four, each only mounts one more JuiceFS. One file needs none."""
    if len(named := {Path(name.partition("::")[0]) for name in config.args}) == 1 and named.pop().is_file():
        return 0
    given = os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS")
    return int(given) if given else min(2 * len(os.sched_getaffinity(0)), WORKERS_MAX)


@pytest.fixture(scope="session")
def juicefs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Volume]:
    """A JuiceFS volume with clients `a` and `b`. Tests may mount further clients; all are stopped at the end."""
    reason = why_not()
    if reason is not None:
        if os.environ.get("STRAWQ_REQUIRE_JUICEFS") == "1":
            pytest.fail(f"STRAWQ_REQUIRE_JUICEFS=1, but JuiceFS cannot be mounted: {reason}")
        pytest.skip(f"JuiceFS cannot be mounted: {reason}")
    volume = Volume(tmp_path_factory.mktemp("juicefs"))
    try:
        volume.mount("a")
        volume.mount("b")
        yield volume
    finally:
        volume.close()


@pytest.fixture
def juicefs_pair(juicefs: Volume, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """One fresh directory as two hosts see it: its path below client `a` and below client `b`."""
    name = f"{request.node.name}-{os.urandom(4).hex()}".replace("/", "_").replace("[", "-").replace("]", "")
    mine = juicefs.clients["a"].path / name
    mine.mkdir()
    return mine, juicefs.clients["b"].path / name
