"""Hooks that stand still and say so, for processes that are told to end meanwhile."""

import asyncio
import sys
import time


def stand(word):
    print(word, file=sys.stderr, flush=True)
    while True:
        time.sleep(1000)


def in_a_thread(args, sample):
    stand("stands")


def one_in_a_thread(args, sample):
    return 1.0 if int(sample.prompt.split()[1]) != 4 else stand("stands")


async def on_the_loop(args, sample):
    stand("stands")


async def never_cancelled(args, sample):
    print("stands", file=sys.stderr, flush=True)
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            print("was cancelled", file=sys.stderr, flush=True)
