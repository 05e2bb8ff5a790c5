"""Groups, saves and a place for packs, for the tests of payloads."""

import errno

import numpy as np

from strawq.model import VersionSpan
from strawq.samples import Group, Prompt, Sample, SegmentInfo, TopK, TopP
from strawq.storage.growth import Part, grow_group, load_group
from strawq.storage.records import encode_prompts, encode_segments, open_records
from strawq.storage.tensors import PackReader


class PackShelf:
    """The two reading calls of the Files port over bytes in a dictionary, with a count of what was read."""

    def __init__(self):
        self.content = {}
        self.reads = []
        self.failing = []

    def read_into(self, path, offset, buffer):
        self.reads.append((path, offset, buffer.nbytes))
        if self.failing:
            answer = self.failing.pop(0)
            if isinstance(answer, OSError):
                raise answer
            data = answer
        elif path in self.content:
            data = self.content[path]
        else:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        piece = data[offset : offset + buffer.nbytes]
        buffer[: len(piece)] = piece
        return len(piece)

    def size(self, path):
        if path not in self.content:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return len(self.content[path])

    def put(self, plan, path=""):
        path = path or f"packs/{plan.digest}.safetensors"
        self.content[path] = b"".join(plan.buffers)
        return path


class Saves:
    """One group's prompt and saves, as the queue keeps them: parts, oldest first."""

    def __init__(self, prompt, *, again=()):
        self.shelf = PackShelf()
        self.reader = PackReader(self.shelf, again=again)
        published = encode_prompts([prompt])
        self.parts = [Part(open_records(published.records, "prompts.arrow", digest=published.digest), 0, 1)]
        self.written = [published.records.nbytes]

    def save(self, old, new, **options):
        rows = grow_group(old, new, **options)
        if not rows:
            return None
        published = encode_segments([rows])
        path = self.shelf.put(published.pack) if published.pack else ""
        name = f"save{len(self.parts)}.arrow"
        records = open_records(bytes(published.records), name, digest=published.digest)
        self.parts.append(Part(records, 0, published.rows, path))
        self.written.append(published.records.nbytes + (published.pack.bytes if published.pack else 0))
        return published

    def load(self):
        return load_group("5-3", self.parts, self.reader)


def tokens(rng, count):
    """`count` new response tokens of one engine request: everything per token except r3 (see `routes`)."""
    return {
        "tokens": rng.integers(0, 150_000, count).astype(np.int32),
        "logprobs": (-rng.random(count)).astype(np.float32),
        "loss_mask": rng.integers(0, 2, count).astype(np.uint8),
        "segments": (SegmentInfo(0, count, {"temperature": 0.7, "top_p": 1.0}, "original"),) if count else (),
        "text": "é漢a" * count,
    }


def versions(count, version="3", last=""):
    return (VersionSpan(0, count, version, last),) if count else ()


def routes(rng, rows, *, experts=128, layers=3, top_k=2, dtype=np.int32):
    return rng.integers(0, experts, (rows, layers, top_k)).astype(dtype)


def top_k(rng, count, k=4):
    ids = rng.integers(0, 150_000, (count, k)).astype(np.int32)
    logprobs = (-rng.random((count, k))).astype(np.float32)
    logprobs[: count // 2, -1] = -np.inf
    return TopK(ids, logprobs)


def top_p(rng, count):
    sizes = rng.integers(0, 5, count)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    total = int(offsets[-1])
    return TopP(rng.integers(0, 300, total).astype(np.int32), (-rng.random(total)).astype(np.float32), offsets)


def sample(rng, index, prompt_length, count, *, version="3", sc="topk", first=True, **fields):
    """New tokens with r3, SC and a token tensor. `first` is whether the prompt's r3 rows come with them."""
    rows = prompt_length + count - 1 if first else count
    heads = {"topk": top_k, "topp": top_p}
    return Sample(
        index,
        versions=versions(count, version),
        r3=routes(rng, rows),
        sc=heads[sc](rng, count) if sc else None,
        token_tensors={"teacher": rng.random(count).astype(np.float64)},
        **{**tokens(rng, count), "status": "aborted", **fields},
    )


def group(*samples, prompt=None):
    return Group("5-3", prompt or Prompt("g", [1, 2, 3, 4]), samples)


def assert_same_rows(first, second):
    assert (first is None) == (second is None)
    if first is not None:
        first, second = np.asarray(first), np.asarray(second)
        assert first.dtype == second.dtype
        np.testing.assert_array_equal(first, second)


def assert_same(first, second):
    """Both samples mean the same, value by value and dtype by dtype; segments may be divided at saves."""
    for name in ("index", "versions", "status", "finish_reason", "reward", "text", "metadata", "payload"):
        assert getattr(first, name) == getattr(second, name), name
    for name in ("tokens", "logprobs", "loss_mask", "prompt_tokens", "r3"):
        assert_same_rows(getattr(first, name), getattr(second, name))
    assert type(first.sc) is type(second.sc)
    if first.sc is not None:
        assert_same_rows(first.sc.ids, second.sc.ids)
        assert_same_rows(first.sc.logprobs, second.sc.logprobs)
        assert_same_rows(getattr(first.sc, "offsets", None), getattr(second.sc, "offsets", None))
    for name in ("token_tensors", "tensors"):
        assert getattr(first, name).keys() == getattr(second, name).keys()
        for key, rows in getattr(first, name).items():
            assert_same_rows(rows, getattr(second, name)[key])
    assert sampling_of_tokens(first) == sampling_of_tokens(second)


def sampling_of_tokens(sample):
    marks = [None] * len(sample.tokens)
    for info in sample.segments:
        marks[info.start : info.end] = [(info.sampling, info.logprob_mode)] * (info.end - info.start)
    return marks
