import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Hooks are named by dotted path, so their module must be importable by name.
sys.path.insert(0, str(Path(__file__).parent))

import standins
from scene import EngineThread, MemoryScene, StrawScene

from strawq import Pool
from strawq_workers.rollout import close_rollouts

if find_spec("strawq_workers.slime.codec") is None:
    sys.modules["strawq_workers.slime.codec"] = standins.module(
        "codec", standins.prompt_of, standins.group_of, standins.samples_of
    )
if find_spec("strawq_workers.slime.arguments") is None:
    sys.modules["strawq_workers.slime.arguments"] = standins.module("arguments", standins.worker_options)


@pytest.fixture
def engine(request):
    thread = EngineThread(**getattr(request, "param", {}))
    yield thread
    close_rollouts()
    thread.close()


@pytest.fixture
def args_of(engine):
    def make(**changes):
        usual = {
            "rollout_engines": [engine.url],
            "rollout_batch_size": 3,
            "over_sampling_batch_size": None,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 16,
            "sglang_server_concurrency": 16,
            "partial_rollout": False,
            "custom_rm_path": None,
            "dynamic_sampling_filter_path": None,
        }
        return SimpleNamespace(**{**usual, **changes})

    return make


@pytest.fixture
def source_of(args_of, tmp_path):
    """A data source of either transport, with what tests ask of it."""
    opened = []

    def make(transport, prompts=1000):
        if transport == "object-store":
            return MemoryScene(args_of, prompts)
        opened.append(standins.StrawStandIn(Pool.init(tmp_path / "pool", lease_seconds=20.0), prompts, 2))
        return StrawScene(args_of, opened[-1])

    yield make
    close_rollouts()
    for data in opened:
        data.close()
