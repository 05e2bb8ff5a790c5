"""Verbs that need no pool of yours: the embedded engine, and the demonstration."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from strawq.cli.app import verb
from strawq.cli.output import Answer, print_json


@verb("engine")
def engine(
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free port.")] = 0,
    model_path: Annotated[
        str, typer.Option("--model-path", help="A name to report; nothing is read from it.")
    ] = "strawq-engine",
    seed: Annotated[int, typer.Option("--seed", help="Of the weights.")] = 0,
    weight_version: Annotated[str, typer.Option("--weight-version", help="Policy version to start with.")] = "default",
    max_running_requests: Annotated[
        int, typer.Option("--max-running-requests", help="Requests computed at once.")
    ] = 64,
    context_length: Annotated[int, typer.Option("--context-length", help="Tokens of prompt and answer.")] = 4096,
    tokens_per_second: Annotated[
        float | None, typer.Option("--tokens-per-second", show_default="no cap", help="Cap of each request.")
    ] = None,
    enable_return_routed_experts: Annotated[
        bool, typer.Option("--enable-return-routed-experts", help="Answer requests for R3 routes.")
    ] = False,
    incremental_streaming_output: Annotated[
        bool, typer.Option("--incremental-streaming-output", help="Stream chunks hold new tokens only.")
    ] = False,
    skip_tokenizer_init: Annotated[
        bool, typer.Option("--skip-tokenizer-init", help="Take and give token ids only.")
    ] = False,
    output_topk: Annotated[
        bool, typer.Option("--output-topk", help="Add the score-centering fields to every top_logprobs_num.")
    ] = False,
    num_experts: Annotated[int, typer.Option("--num-experts", help="Experts of a layer.")] = 8,
    num_layers: Annotated[int, typer.Option("--layers", help="Layers of the model.")] = 2,
    experts_per_token: Annotated[int, typer.Option("--top-k", help="Experts of a token.")] = 2,
    hidden_size: Annotated[int, typer.Option("--hidden-size", help="Width of the model.")] = 32,
    api_key: Annotated[str, typer.Option("--api-key", show_default=False, help="Ask for this bearer token.")] = "",
    health_timeout_s: Annotated[
        float, typer.Option("--health-timeout-s", help="How long /health waits on a paused engine.")
    ] = 20.0,
    as_json: bool = False,
) -> Answer:
    """Serve a stand-in engine for development.

    It speaks SGLang's protocol over a small untrained model. The first line on stdout is its URL (with --json an
    object that holds it). It serves until SIGTERM or Ctrl-C. Use SGLang for real rollouts.
    """
    # Before numpy: the products are small, and a second BLAS thread only takes a core from the event loop.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from strawq_workers.engine.launch import announce, run_engine
    from strawq_workers.engine.options import EngineOptions

    options = EngineOptions(
        host=host,
        port=port,
        model_path=model_path,
        seed=seed,
        weight_version=weight_version,
        max_running_requests=max_running_requests,
        context_length=context_length,
        tokens_per_second=tokens_per_second,
        enable_return_routed_experts=enable_return_routed_experts,
        incremental_streaming_output=incremental_streaming_output,
        skip_tokenizer_init=skip_tokenizer_init,
        output_topk=output_topk,
        num_experts=num_experts,
        num_layers=num_layers,
        experts_per_token=experts_per_token,
        hidden_size=hidden_size,
        api_key=api_key or None,
        health_timeout_s=health_timeout_s,
    )
    run_engine(options, (lambda url: print_json({"url": url, "pid": os.getpid()})) if as_json else announce)
    return Answer(None)


@verb("demo")
def demo(
    directory: Annotated[
        str, typer.Option("--dir", metavar="DIR", show_default="a temporary one", help="New directory for the pool.")
    ] = "",
    batches: Annotated[int, typer.Option("--batches", min=1, help="Batches to train on.")] = 3,
    groups: Annotated[int, typer.Option("--groups", min=1, help="Groups of a batch.")] = 8,
    as_json: bool = False,
) -> Answer:
    """Run a small real rollout, kill a worker, audit the rest.

    Exit code 1 if the audit finds a loss or a duplicate. The pool is kept: look into it with `strawq inspect DIR`.
    """
    from strawq_workers.demo import run_demo
    from strawq_workers.narration import describe

    summary = run_demo(directory or None, as_json, batches=batches, groups=groups)
    return Answer(summary, describe(summary), 0 if summary.sound else 1)
