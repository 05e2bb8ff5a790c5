"""Between groups in memory and objects on disk: what is new becomes a publication, what is stored becomes a group
again.

A publication that is small and has no tensors rides inside the log entry that refers to it; any other is stored,
durably, before it is referred to. Imports pyarrow only when the first record is written or read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from strawq.core import events as e
from strawq.errors import BadInput, Damaged, Gone, StorageFailed
from strawq.handles import Held
from strawq.limits import INLINE_OBJECT_BYTES, OBJECT_BYTES, ROWS_PER_OBJECT
from strawq.model import ObjectRef, Slice, StoredObject
from strawq.storage import layout
from strawq.storage.clock import Clock
from strawq.storage.files import Buffer, Files
from strawq.storage.objects import ObjectStore

if TYPE_CHECKING:
    from strawq.rows import Rows
    from strawq.samples import Group, Prompt
    from strawq.storage.packs import PackPlan
    from strawq.storage.records import Publication, Records, TensorRef
    from strawq.storage.tensors import PackReader

T = TypeVar("T")
OPENED_OBJECTS, OPENED_BYTES = 256, 64 << 20
"""Record files that are kept opened: at most so many, and so much memory but for the one that was used last."""
_REPUBLISH_TRIES = 20


class Payloads:
    """Reads and writes the data of one pool's groups. Safe from many threads."""

    def __init__(
        self,
        files: Files,
        objects: ObjectStore,
        epoch: Callable[[], int],
        clock: Clock,
    ) -> None:
        self._files = files
        self._objects = objects
        self._epoch = epoch
        self._clock = clock
        self._lock = threading.Lock()
        self._opened: OrderedDict[str, tuple[Records, int]] = OrderedDict()
        self._opened_bytes = 0
        self._pack_reader: PackReader | None = None

    def split_prompts(self, prompts: Iterable[Prompt]) -> Iterator[Publication]:
        """Publications of at most `ROWS_PER_OBJECT` prompts and about `OBJECT_BYTES` each."""
        from strawq.storage.records import encode_prompts

        part: list[Prompt] = []
        size = 0
        for prompt in prompts:
            part.append(prompt)
            size += 200 + len(prompt.payload or b"") + len(prompt.text or "")
            size += 4 * len(prompt.tokens) if prompt.tokens is not None else 0
            if len(part) == ROWS_PER_OBJECT or size >= OBJECT_BYTES:
                yield encode_prompts(part)
                part, size = [], 0
        if part:
            yield encode_prompts(part)

    def stage_pack(self, pack: PackPlan) -> None:
        """Write the tensors of a publication that is still being encoded: its digest follows from the writing."""
        self._objects.stage_pack(pack)

    def publish(
        self, publications: Sequence[Publication], commit: Callable[[tuple[ObjectRef, ...], dict[str, Buffer]], T]
    ) -> T:
        """Store what must be stored and call `commit` with the references and the inline bytes. When garbage
        collection has closed the epoch in between, the objects are stored again in a young one: nothing refers to the
        old ones."""
        for _ in range(_REPUBLISH_TRIES):
            epoch = self._epoch()
            refs: list[ObjectRef] = []
            payloads: dict[str, Buffer] = {}
            for publication in publications:
                size = publication.records.nbytes
                if publication.pack is None and size <= INLINE_OBJECT_BYTES:
                    refs.append(ObjectRef(publication.digest, 0, size, publication.rows))
                    payloads[publication.digest] = publication.records
                else:
                    refs.append(
                        self._objects.publish(
                            publication.records, publication.digest, publication.rows, epoch, publication.pack
                        )
                    )
            answer = commit(tuple(refs), payloads)
            if not (isinstance(answer, e.Refusal) and answer.status == "epoch_closed"):
                for digest, data in payloads.items():
                    self._objects.remember(digest, bytes(data))
                return answer
        raise StorageFailed(
            f"garbage collection closed the epoch {_REPUBLISH_TRIES} times before this publication was committed"
        )

    def load(self, held: Held, task_id: str = "") -> Group:
        """The group as it is stored: its prompt and everything saved so far, checked. Tensors are read when they are
        touched. `Damaged` and `Gone` name the group, and the way to go on without it."""
        from strawq.storage.growth import fold
        from strawq.storage.records import decode_segments

        task = held.task
        rows: list[Any] = []
        try:
            prompt = self.prompt(held)
            for part in task.parts[1:]:
                rows.extend(decode_segments(self._records(held.objects, part), part.start, part.stop))
        except (Damaged, Gone) as error:
            raise type(error)(
                f"group {task.id}: {error}; restore the file from a copy, or go on without the group (`strawq "
                f"drop POOL --reason damaged {task.id}`, once no process has it in hand; `strawq verify POOL --full` "
                "names all such groups)"
            ) from error
        packs = {stored.ref.pack: stored.ref for stored in held.objects.values() if stored.ref.pack}
        return fold(task_id or task.id, prompt, rows, lambda ref: self._open_rows(ref, packs, task.id))

    def prompt(self, held: Held) -> Prompt:
        """The group's prompt alone."""
        from strawq.storage.records import decode_prompts

        part = held.task.parts[0]
        return decode_prompts(self._records(held.objects, part), part.start, part.stop)[0]

    def _open_rows(self, ref: TensorRef, packs: dict[str, ObjectRef], task: str) -> Rows:
        owner = packs.get(ref.pack)
        if owner is None:
            raise Damaged(f"tensor {ref.name} is in pack {ref.pack[:12]}, to which no object of task {task} refers")
        return self._packs().rows(layout.pack_file(owner.epoch, ref.pack), ref, f"task {task}")

    def verify_pack(self, path: str, digest: str) -> int:
        """Check every byte of a tensor file; returns its size. `Damaged` or `Gone` name it."""
        return self._packs().verify(path, digest)

    def _packs(self) -> PackReader:
        if self._pack_reader is None:
            from strawq.storage.tensors import PackReader

            self._pack_reader = PackReader(self._files, clock=self._clock)
        return self._pack_reader

    def _records(self, objects: dict[str, StoredObject], part: Slice) -> Records:
        from strawq.storage.records import open_records

        with self._lock:
            known = self._opened.get(part.object)
            if known is not None:
                self._opened.move_to_end(part.object)
                return known[0]
        stored = objects[part.object]
        data = self._objects.read(stored)
        path = layout.record_file(stored.ref.epoch, stored.ref.name) if stored.ref.epoch else layout.entry(stored.seq)
        records = open_records(data, path)
        self._keep_opened(part.object, records, len(data))
        return records

    def _keep_opened(self, digest: str, records: Records, size: int) -> None:
        with self._lock:
            if digest not in self._opened:
                self._opened_bytes += size
            self._opened[digest] = records, size
            while len(self._opened) > OPENED_OBJECTS or (self._opened_bytes > OPENED_BYTES and len(self._opened) > 1):
                self._opened_bytes -= self._opened.popitem(last=False)[1][1]


def require_prompts(prompts: Sequence[Prompt]) -> None:
    if not prompts:
        raise BadInput("there is no prompt to submit")
