"""What a process remembers of a pool is bounded in bytes, however long it lives and however large its objects are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from strawq import Pool, Prompt, payloads
from strawq.storage import objects
from strawq.storage.objects import ObjectStore
from strawq.storage.packs import plan_pack
from strawq.storage.records import TensorRef
from strawq.storage.tensors import PackReader
from tests.payloads.build import PackShelf
from tools.golden_pool import complete


def test_opened_objects_are_bounded_by_their_bytes(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "OPENED_BYTES", 300_000)
    with Pool.open(pool, background=False) as opened:
        queue = opened.queue()
        for number in range(8):
            queue.submit([Prompt(f"g{number}", np.array([1, 2, number], np.int32), payload=bytes(90_000))])
        for lease in queue.acquire(8):
            assert queue.open(lease).group.prompt.payload == bytes(90_000)
        kept = opened.payloads._opened
        assert 1 < len(kept) <= 3
        assert opened.payloads._opened_bytes == sum(size for _, size in kept.values()) <= 300_000


def test_one_object_above_the_bound_is_kept_and_makes_room_for_the_next(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "OPENED_BYTES", 1000)
    with Pool.open(pool, background=False) as opened:
        queue = opened.queue()
        for number in range(3):
            queue.submit([Prompt(f"g{number}", payload=bytes(2000))])
        for lease in queue.acquire(3):
            queue.open(lease)
            assert len(opened.payloads._opened) == 1


def test_directories_of_old_epochs_are_forgotten(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "DIRECTORIES_KNOWN", 4)
    with Pool.open(pool, background=False) as opened:
        for first in range(0, 60, 2):
            queue = opened.queue()
            queue.submit([Prompt(f"g{n}", np.array([1, 2, n], np.int32)) for n in range(first, first + 2)])
            complete(queue, 2)
            assert len(opened.objects._directories) <= 4
        assert len(list(pool.glob("objects/000001/*"))) > 4, "all of them were written to"


def test_the_object_cache_stays_within_its_bytes(monkeypatch: pytest.MonkeyPatch, pool: Path) -> None:
    monkeypatch.setattr(objects, "CACHE_BYTES", 1000)
    with Pool.open(pool, background=False) as opened:
        store: ObjectStore = opened.objects
        for number in range(10):
            store.remember(str(number), bytes(300))
        assert list(store._cache) == ["7", "8", "9"] and store._cached == 900
        store.remember("large", bytes(501))
        assert "large" not in store._cache


def test_pack_headers_are_counted_as_they_lie_in_memory() -> None:
    shelf = PackShelf()
    reader = PackReader(shelf, cache_bytes=40_000)  # type: ignore[arg-type]
    header_bytes = 0
    for number in range(40):
        plan = plan_pack([(f"{at}/beside", np.full((4, 4), number, np.int32)) for at in range(8)])
        path = shelf.put(plan)
        ref = TensorRef("beside", plan.digest, "3/beside", (4, 4), "int32", 0)
        assert np.all(reader.rows(path, ref)[:] == number)  # type: ignore[index]
        header_bytes = plan.header_bytes
    # Parsed, a header takes about four times its bytes.
    assert 1 < len(reader._headers) <= 40_000 // (4 * header_bytes)
    assert reader._held <= 40_000
