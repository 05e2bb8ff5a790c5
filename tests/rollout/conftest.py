import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Hooks are named by dotted path, so their module must be importable by name.
sys.path.insert(0, str(Path(__file__).parent))

from scene import EngineThread, MemoryScene, StrawScene

from strawq_workers.rollout import close_rollouts
from strawq_workers.slime import arguments
from strawq_workers.slime.straw_source import StrawDataSource

PROMPTS = 1000


@pytest.fixture
def engine(request):
    thread = EngineThread(**getattr(request, "param", {}))
    yield thread
    close_rollouts()
    thread.close()


@pytest.fixture(autouse=True)
def answers_of_full_length(monkeypatch):
    """The flags have no ignore_eos, and tests count tokens."""
    usual = arguments.worker_options

    def worker_options(args, engines):
        return msgspec.structs.replace(
            usual(args, engines), ignore_eos=True, engine_timeout_s=3.0, abort_timeout_s=10.0
        )

    monkeypatch.setattr(arguments, "worker_options", worker_options)


@pytest.fixture
def args_of(engine, tmp_path):
    """Flags as the parser has them, with small numbers."""
    usual = vars(arguments.add_rollout_arguments(argparse.ArgumentParser()).parse_args([]))

    def make(**changes):
        small = {
            "rollout_engines": [engine.url],
            "rollout_batch_size": 3,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 16,
            "sglang_server_concurrency": 16,
            "rollout_save_seconds": 0.0,
            "rollout_queue_lease_seconds": 20.0,
            "rollout_data_dir": str(tmp_path / "pool"),
            "num_rollout": 3,
            "rollout_function_path": "strawq_workers.slime.generate_rollout",
        }
        return SimpleNamespace(**{**usual, **small, **changes})

    return make


@pytest.fixture
def source_of(args_of, tmp_path):
    """A data source of either transport, with what tests ask of it."""
    opened = []

    def make(transport, prompts=PROMPTS, **flags):
        if transport == "object-store":
            return MemoryScene(args_of, prompts)
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(json.dumps({"input": f"prompt {row}"}) + "\n" for row in range(prompts)))
        flags = {"rollout_data_transport": "straw", "prompt_data": str(file), **flags}
        data = StrawDataSource(args_of(**flags))
        data.load(None)
        opened.append(data)
        return StrawScene(lambda **changes: args_of(**{**flags, **changes}), data)

    yield make
    close_rollouts()
    for data in opened:
        data.close()
