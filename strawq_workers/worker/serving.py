"""Which policy version the engines serve, beside the one that is published.

The rule: a prefix is continued under the version that was published with the resume, unless an engine does not get
there in time. Then it is continued all the same, and its tokens are stamped with what the engine says: an engine that
lags is no reason to stand still, and no token is labelled with a version that did not make it. Versions that are no
numbers cannot be compared, and are not waited for.
"""

from __future__ import annotations

import asyncio
import logging

from strawq.errors import StrawqError
from strawq.model import UNVERSIONED, policy_number
from strawq_workers.sglang.fleet import Fleet

log = logging.getLogger("strawq.worker")

POLL_S = 0.05
POLL_MAX_S = 1.0


async def engines_behind(fleet: Fleet, version: str) -> dict[str, str]:
    """Engines that answer and report a lower number than `version`: URL to what they report."""
    wanted = policy_number(version)
    behind: dict[str, str] = {}
    for engine in fleet.engines if wanted != UNVERSIONED else ():
        if engine.state not in ("up", "held"):
            continue
        try:
            serves = await engine.weight_version()
        except StrawqError as error:
            log.info("%s does not say what it serves: %s", engine.url, error)
            continue
        if UNVERSIONED != policy_number(serves) < wanted:
            behind[engine.url] = serves
    return behind


async def wait_for_version(fleet: Fleet, version: str, limit_s: float) -> None:
    """Returns when no engine is behind `version`, or after `limit_s` seconds; both are said in the log."""
    clock = asyncio.get_running_loop().time
    end, delay, said = clock() + limit_s, POLL_S, False
    while behind := await engines_behind(fleet, version):
        names = ", ".join(f"{url} serves {serves}" for url, serves in behind.items())
        if clock() >= end:
            log.warning(
                "policy version %s is published, and after %g s %s: going on there, tokens are stamped with what made "
                "them", version, limit_s, names,
            )  # fmt: skip
            return
        if not said:
            log.warning("policy version %s is published, and %s: waiting up to %g s", version, names, limit_s)
            said = True
        await asyncio.sleep(min(delay, max(0.0, end - clock())))
        delay = min(2 * delay, POLL_MAX_S)
