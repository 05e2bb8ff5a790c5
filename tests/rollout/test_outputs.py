import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from strawq_workers.rollout.outputs import RolloutFnEvalOutput, RolloutFnTrainOutput, eval_output, train_output
from strawq_workers.rollout.trainer import write_model


@dataclass
class Older:
    """As slime had it before batches could be references."""

    samples: list
    metrics: dict = None


@dataclass
class Evaluated:
    data: dict
    metrics: dict = None


def test_where_slime_is_installed_its_own_classes_are_answered(monkeypatch):
    types = ModuleType("slime.rollout.base_types")
    types.RolloutFnTrainOutput, types.RolloutFnEvalOutput = Older, Evaluated
    for name, module in (("slime", ModuleType("slime")), ("slime.rollout", ModuleType("r")), (types.__name__, types)):
        monkeypatch.setitem(sys.modules, name, module)
    assert train_output([[1]], {"a": 1}) == Older([[1]], {"a": 1})
    assert eval_output({"few": {}}, {}) == Evaluated({"few": {}}, {})


def test_without_slime_the_answers_have_its_fields():
    out = train_output([[1]], {"a": 1})
    assert isinstance(out, RolloutFnTrainOutput) and (out.on_accepted, out.sample_refs) == (None, None)
    assert isinstance(eval_output({}, {}), RolloutFnEvalOutput)


def test_the_reference_model_has_a_durable_name_before_the_queue_is_bound_to_it(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def note(fd):
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    write_model(tmp_path, 3, [])
    assert synced[-2:] == ["iter_0000003", tmp_path.name]
