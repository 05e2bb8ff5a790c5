"""One job of `test_whole_job` as a process: `python job_process.py <JSON of what to do>`. It does its rollouts,
writes what they delivered, says `done`, and waits to be killed."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from stand_in import Engine, Manager, flat, job_args

from strawq_workers.slime import arguments


def plain(value: Any) -> Any:
    return None if value is None else np.asarray(value).tolist()


def told(samples: list[Any]) -> list[dict[str, Any]]:
    return [
        {
            "group": sample.group_index,
            "index": sample.index,
            "tokens": plain(sample.tokens),
            "length": sample.response_length,
            "log_probs": plain(sample.rollout_log_probs),
            "loss_mask": plain(sample.loss_mask),
            "routes": plain(sample.rollout_routed_experts),
            "ids": plain(sample.rollout_topk_token_ids),
            "heads": plain(sample.rollout_topk_log_probs),
        }
        for sample in flat(samples)
    ]


class Hanging(Engine):
    """Group 1 always waits for the abort of its rollout; from rollout `hang` on nobody answers."""

    def __init__(self, hang: int | None, **options: Any) -> None:
        super().__init__(waits=lambda sample: sample.group_index == 1 and hang is not None, **options)
        self.hang, self.rollout_id = hang, -1

    async def generate(self, args: Any, sample: Any, aborted: Any) -> None:
        if self.rollout_id == self.hang:
            print("hanging", flush=True)
            await aborted.wait()
            raise SystemExit("nobody ends this rollout")
        await super().generate(args, sample, aborted)


def full_length() -> None:
    """The flags have no ignore_eos, and the test counts tokens."""
    usual = arguments.worker_options

    def worker_options(args: Any, engines: Any) -> Any:
        return msgspec.structs.replace(usual(args, engines), ignore_eos=True)

    arguments.worker_options = worker_options


def main(todo: dict[str, Any]) -> None:
    full_length()
    engine = Hanging(todo.get("hang"), version=todo.get("version", "1"))
    args = job_args(Path(todo["root"]), engine=engine, **todo["flags"])
    manager = Manager(args)
    manager.load(todo["after"])
    done = []
    for rollout_id in todo["rollouts"]:
        engine.rollout_id = rollout_id
        done.append(told(manager.generate(rollout_id)))
        if rollout_id == todo.get("save"):
            manager.save(rollout_id)
    result = {"rollouts": done, "requests": engine.requests}
    Path(todo["report"]).write_text(json.dumps(result))
    print("done", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
