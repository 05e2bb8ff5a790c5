"""An engine that answers every request with 40 MB of routes: `python heavy_engine.py PROMPT_TOKENS`. Prints its URL.

It computes nothing: its own work must not be what is measured."""

import asyncio
import base64
import json
import sys

import numpy as np
from aiohttp import web

LAYERS, TOPK, OUTPUT = 48, 8, 2
RID = "the id of the request"
IDLE = {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}
MODEL = {
    "model_path": "heavy", "weight_version": "1", "vocab_size": 1000, "num_hidden_layers": LAYERS,
    "num_experts_per_tok": TOPK, "num_experts": 128, "context_length": 1 << 20,
}  # fmt: skip


async def serve(prompt_tokens: int) -> None:
    rows = np.random.default_rng(0).integers(0, 128, (prompt_tokens + OUTPUT - 1) * LAYERS * TOPK, dtype=np.int32)
    routes = base64.b64encode(rows.tobytes()).decode()
    meta = {
        "id": RID, "finish_reason": {"type": "length"}, "completion_tokens": OUTPUT, "prompt_tokens": prompt_tokens,
        "weight_version": "1", "weight_versions": [{"version": "1", "start": 0, "end": OUTPUT}],
        "output_token_logprobs": [[-0.5, 5, None], [-0.25, 6, None]], "routed_experts": routes,
    }  # fmt: skip
    whole = json.dumps({"output_ids": [5, 6], "meta_info": meta}).encode()
    before, _, after = whole.partition(RID.encode())

    async def generate(request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        return web.Response(body=before + rid.encode() + after, content_type="application/json")

    def fixed(answer: object):
        async def handle(_request: web.Request) -> web.Response:
            return web.json_response(answer)

        return handle

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", generate)
    app.router.add_post("/abort_request", fixed({}))
    app.router.add_get("/ready", fixed({}))
    app.router.add_get("/model_info", fixed(MODEL))
    app.router.add_get("/server_info", fixed({"enable_return_routed_experts": True}))
    app.router.add_get("/v1/models", fixed({"data": [MODEL]}))
    app.router.add_get("/v1/loads", fixed(IDLE))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
