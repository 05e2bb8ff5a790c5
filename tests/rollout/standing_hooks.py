"""Hooks that stand still and say so, for processes that are told to end meanwhile."""

import asyncio
import os
import time


def say(word):
    """A line, whole, whoever else says one."""
    os.write(2, f"{word}\n".encode())


def stand(word):
    say(word)
    while True:
        time.sleep(1000)


def in_a_thread(args, sample):
    stand("stands")


def one_in_a_thread(args, sample):
    return 1.0 if int(sample.prompt.split()[1]) != 4 else stand("stands")


async def on_the_loop(args, sample):
    stand("stands")


async def never_cancelled(args, sample):
    say("stands")
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            say("was cancelled")
