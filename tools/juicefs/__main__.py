"""`python -m tools.juicefs DIR`: a fresh JuiceFS volume with two clients, DIR/a and DIR/b, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tools.juicefs.volume import Volume, why_not


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.juicefs", description=__doc__)
    parser.add_argument("directory", type=Path, help="a local directory; made if it is not there, kept at the end")
    parser.add_argument("options", nargs="*", help="further options of `juicefs mount`, after --")
    arguments = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"cannot mount JuiceFS: {reason}", file=sys.stderr)
        return 1
    directory: Path = arguments.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    # Blocked before the clients start, so that none of the two signals can fall between a mount and the wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    volume = Volume(directory)
    try:
        for name in ("a", "b"):
            print(volume.mount(name, *arguments.options).path, flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    finally:
        volume.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
