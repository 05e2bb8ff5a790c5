"""The state machine as the commit log drives it: decide, apply tentatively, undo or keep, dump and load."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from strawq.core.apply import apply
from strawq.core.apply_lifetime import Where
from strawq.core.commands import AnyCommand
from strawq.core.decide import Answer, answered, decide
from strawq.core.events import AnyEvent, Refusal
from strawq.core.image import dump_state, load_state
from strawq.core.state import State
from strawq.errors import Damaged

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)


class Machine:
    """Holds one state. Not safe for threads: the log serialises its use."""

    def __init__(self) -> None:
        self.state = State()

    @property
    def seq(self) -> int:
        return self.state.seq

    @property
    def trims(self) -> int:
        return self.state.meta.trims

    @property
    def forgotten_seq(self) -> int:
        return self.state.branch.meta.forgotten_seq

    def decide(self, command: AnyCommand) -> Answer:
        return decide(self.state, command)

    def is_new(self, answer: Answer, command: AnyCommand) -> bool:
        """Whether the answer is an event that has yet to be logged."""
        return not isinstance(answer, Refusal) and answered(self.state, command) is not answer

    def answered(self, command: AnyCommand) -> AnyEvent | None:
        return answered(self.state, command)

    def encode(self, event: AnyEvent) -> bytes:
        return _encoder.encode(event)

    def decode(self, seq: int, events: Sequence[msgspec.Raw]) -> list[AnyEvent]:
        try:
            return [_decoder.decode(raw) for raw in events]
        except msgspec.MsgspecError as error:
            raise Damaged(
                f"log entry {seq} holds an event that this version does not know ({error}); use a newer strawq"
            ) from error

    def apply(self, event: AnyEvent, seq: int, where: Where) -> None:
        apply(self.state, event, seq, where)

    def mark(self) -> int:
        return self.state.journal.mark()

    def undo(self, mark: int = 0) -> None:
        self.state.journal.undo(mark)

    def keep(self, seq: int) -> None:
        """What was applied since the last `keep` is entry `seq`: it can no longer be undone."""
        self.state.seq = seq
        self.state.journal.clear()

    def dump(self) -> bytes:
        return dump_state(self.state)

    def load(self, data: bytes | memoryview, seq: int) -> None:
        self.state = load_state(data, seq)

    def reset(self) -> None:
        self.state = State()
