"""An engine that costs next to nothing, for measuring what reads it: SGLang's increments, made beforehand.

    python -m tools.benchmarks.overhead_engine STREAMS TOKENS STEP_MS SPREAD [CPU]

The rule: like an engine, it makes one token for each running stream in each step, and writes it at once; a step takes
`STEP_MS`, or as long as the writes take. The first step waits until `STREAMS` requests are there, so that all run
together; with SPREAD their beginnings, and so their ends, are spread over so many steps. Frames are those of SGLang
0.5 with `--incremental-streaming-output` and log-probs, about 590 bytes each; only the request id is put in. Its
first line on stdout is its URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import Any

INFO: dict[str, Any] = {
    "/ready": {},
    "/model_info": {"model_path": "stub", "weight_version": "1", "vocab_size": 151936},
    "/server_info": {"incremental_streaming_output": True},
    "/v1/loads": {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "queues": {"waiting": 0}}]},
    "/abort_request": {},
}
RID = "0" * 32


def frames(tokens: int, prompt: int) -> list[bytes]:
    """The stream of one request, a chunk of HTTP for each token; the request id is `RID`."""
    made = []
    for number in range(1, tokens + 1):
        token, logprob, last = 1000 + 7919 * number % 150_000, -0.1 - (number % 97) / 13.7, number == tokens
        meta: dict[str, Any] = {
            "id": RID,
            "finish_reason": {"type": "length", "length": tokens} if last else None,
            "prompt_tokens": prompt,
            "weight_version": "1",
            "num_retractions": 0,
            "storage_prefetch_wait": 0.0,
            "storage_staging_wait": 0.0,
            "forward_entry_time": 1795953592.90892,
            "prefill_finished_time": 1795953592.9257553,
            "queue_time": 0.0005580540000664769,
            "input_token_logprobs": [],
            "output_token_logprobs": [[logprob, token, None]],
            "output_token_logprobs_length": number,
            "reasoning_tokens": 0,
            "completion_tokens": number,
            "cached_tokens": 4,
        }
        if last:
            meta["weight_versions"] = [{"version": "1", "start": 0, "end": tokens}]
        meta |= {"cached_tokens_details": {"device": 4, "host": 0}, "dp_rank": None}
        meta |= {"response_sent_to_client_ts": 1795953592.928387}
        chunk = {"text": " word", "output_ids": [token], "meta_info": meta}
        payload = b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
        made.append(_chunk(payload + b"data: [DONE]\n\n" if last else payload))
    return made


def _chunk(payload: bytes) -> bytes:
    return f"{len(payload):x}\r\n".encode() + payload + b"\r\n"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


class Engine:
    def __init__(self, streams: int, tokens: int, step_s: float, spread: int) -> None:
        self.streams, self.step_s, self.spread = streams, step_s, spread
        self.frames = frames(tokens, 8)
        self.waiting: list[tuple[asyncio.StreamWriter, bytes]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.split("\r\n")
                length = next((int(x.split(":")[1]) for x in lines if x.lower().startswith("content-length")), 0)
                body = await reader.readexactly(length)
                path = lines[0].split()[1].partition("?")[0]
                if path == "/generate":
                    self.waiting.append((writer, str(json.loads(body)["rid"]).encode()))
                    if len(self.waiting) == self.streams:
                        running, self.waiting = self.waiting, []
                        self.running = asyncio.ensure_future(self.generate(running))
                    continue
                found = INFO.get(path)
                answer = json.dumps(found or {"detail": "Not Found"}).encode()
                status = "404 Not Found" if found is None else "200 OK"
                head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(answer)}\r\n\r\n"
                writer.write(head.encode() + answer)
        writer.close()

    async def generate(self, running: list[tuple[asyncio.StreamWriter, bytes]]) -> None:
        clock = asyncio.get_running_loop().time
        # SGLang's frames repeat the id; it is put in here for the last one only, where it is checked.
        lasts = [self.frames[-1].replace(RID.encode(), rid) for _, rid in running]
        streams = [
            (writer.transport.write, number * self.spread // len(running), last + b"0\r\n\r\n")
            for number, ((writer, _), last) in enumerate(zip(running, lasts, strict=True))
        ]
        for write, _, _ in streams:
            write(HEAD)
        due, frames = clock(), self.frames
        end = len(frames) - 1
        for step in range(len(frames) + self.spread):
            for write, start, last in streams:
                at = step - start
                if 0 <= at < end:
                    write(frames[at])
                elif at == end:
                    write(last)
            due += self.step_s
            await asyncio.sleep(max(0.0, due - clock()))


async def main() -> None:
    streams, tokens, step_ms, spread = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    if len(sys.argv) > 5:
        os.sched_setaffinity(0, {int(sys.argv[5])})
    engine = Engine(streams, tokens, step_ms / 1000, spread)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, backlog=2 * streams)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
