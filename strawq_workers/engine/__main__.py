"""`python -m strawq_workers.engine`: the embedded engine without the rest of strawq's command line.

The rule: option names are SGLang's where SGLang has the option, so that a command line can be moved over.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

# Before numpy: the products are small, and a second BLAS thread only takes a core from the event loop.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from strawq.errors import StrawqError
from strawq_workers.engine.launch import run_engine
from strawq_workers.engine.options import EngineOptions


def parser() -> argparse.ArgumentParser:
    """The command line. Defaults are those of EngineOptions."""
    default = EngineOptions()
    made = argparse.ArgumentParser(
        prog="python -m strawq_workers.engine", description=__doc__.splitlines()[0] if __doc__ else None
    )
    made.add_argument("--host", default=default.host)
    made.add_argument("--port", type=int, default=default.port, help="0 takes any free port")
    made.add_argument("--model-path", default=default.model_path, help="a name to report; nothing is read from it")
    made.add_argument("--seed", type=int, default=default.seed)
    made.add_argument("--weight-version", default=default.weight_version)
    made.add_argument("--max-running-requests", type=int, default=default.max_running_requests)
    made.add_argument("--context-length", type=int, default=default.context_length)
    made.add_argument("--tokens-per-second", type=float, default=None, help="cap of each request")
    made.add_argument("--enable-return-routed-experts", action="store_true")
    made.add_argument("--incremental-streaming-output", action="store_true")
    made.add_argument("--skip-tokenizer-init", action="store_true")
    made.add_argument(
        "--output-topk", action="store_true", help="add the score-centering fields to every top_logprobs_num"
    )
    made.add_argument("--num-experts", type=int, default=default.num_experts)
    made.add_argument("--layers", dest="num_layers", type=int, default=default.num_layers)
    made.add_argument(
        "--top-k", dest="experts_per_token", type=int, default=default.experts_per_token, help="experts per token"
    )
    made.add_argument("--hidden-size", type=int, default=default.hidden_size)
    made.add_argument("--api-key", default=None)
    made.add_argument("--health-timeout-s", type=float, default=default.health_timeout_s)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal; the exit code."""
    given = vars(parser().parse_args(arguments))
    try:
        run_engine(EngineOptions(**given))
    except StrawqError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
