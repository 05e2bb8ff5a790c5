"""For generate functions: the worker's engines, turn by turn.

The rule: a function that asks through `generate` needs to know nothing of pauses, weight updates, prefixes and routes:
the worker holds and ends its requests, adds their tokens to the sample with everything that covers them, and saves them
when a turn ends.

```python
from strawq_workers.agents import generate

async def solve(args, sample, sampling_params):
    while True:
        turn = await generate(args, sample, sampling_params)
        call = tool_call_in(turn.text)
        if turn.finish != "stop" or call is None:
            return sample
        answer = await tool(call)
        sample.append_response_tokens(args, tokens=tokenizer.encode(answer), text=answer, trainable=False)
```

`sample` is of slime's shape (`HookSample`). `generate` sets its status from how the turn ended: `completed` for a stop,
`truncated` at a limit, `aborted` when the worker has to stop; the function returns the sample then. What it needs to go
on later it keeps in `sample.metadata` (JSON values). A call of the function on a sample with a response goes on with
it: the first `generate` finishes a turn that was cut off, and gives one that had ended again, if neither tokens nor
metadata have been added since.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strawq.errors import BadInput
from strawq_workers.worker.turns import GenerationStopped, Turn, Turns
from strawq_workers.worker.views import HookSample, Status

__all__ = ["GenerationStopped", "HookSample", "Status", "Turn", "generate"]


async def generate(args: Any, sample: HookSample, sampling_params: Mapping[str, Any] | None = None) -> Turn:
    """Let an engine go on with `sample`: its tokens are the input, the answer is added to it.

    `sampling_params`: SGLang's names, on top of the worker's options; `max_new_tokens` bounds this turn, and the
    sample's own budget bounds it too. Raises `BadInput` for a sample that no generate function was given, `Misaligned`
    if what covers the tokens does not line up, `EngineUnavailable`, and `GenerationStopped` when the worker has said
    `abort` before; a function that swallows the first ones still fails its attempt."""
    del args  # the signature is that of slime's own generate
    turns = sample.turns
    if not isinstance(turns, Turns):
        raise BadInput("generate is for the sample that a generate function of a worker was given")
    return await turns.generate(sample, sampling_params)
