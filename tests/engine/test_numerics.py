"""What the model computes: against a slow reference, across batching, resumption, retraction and weight versions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strawq_workers.engine.decoder import Decoder
from strawq_workers.engine.generate import GenerateBody, specs_of
from strawq_workers.engine.model import (
    EOS_BIAS_PER_TOKEN,
    HEADS,
    ModelConfig,
    Weights,
    draw_weights,
    log_softmax,
    rotary_table,
)
from strawq_workers.engine.options import EngineOptions
from strawq_workers.engine.request import Request
from strawq_workers.engine.sampling import SamplingParams, keep_mask, sample, uniform
from strawq_workers.engine.scheduler import Scheduler, WeightUpdate
from strawq_workers.engine.vocabulary import EOS_ID, VOCAB_SIZE, decode_tokens, encode_text

TOKENS = np.array(encode_text("The quick brown fox jumps over the lazy dog, again and again."), dtype=np.int32)


def norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)


def reference(weights: Weights, config: ModelConfig, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, V] and routes [T, layers, k], one token, head and expert at a time."""
    cos, sin = rotary_table(config)
    d, size, half = config.hidden, config.head_dim, config.head_dim // 2
    x = weights.embed[tokens].copy()
    routes = np.zeros((len(tokens), config.layers, config.experts_per_token), dtype=np.int32)

    def rotated(vector: np.ndarray, position: int) -> np.ndarray:
        a, b = vector[:half], vector[half:]
        c, s = cos[position], sin[position]
        return np.concatenate([a * c - b * s, a * s + b * c])

    for index, layer in enumerate(weights.layers):
        qkv = norm(x) @ layer.qkv
        mixed = np.zeros_like(x)
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            q, k, v = (qkv[:, i * d : (i + 1) * d][:, part] for i in range(3))
            for t in range(len(tokens)):
                query = rotated(q[t], t)
                scores = np.array([query @ rotated(k[u], u) / np.sqrt(size) for u in range(t + 1)])
                weight = np.exp(scores - scores.max())
                mixed[t, part] = (weight / weight.sum()) @ v[: t + 1]
        x = x + mixed @ layer.out
        h = norm(x)
        for t in range(len(tokens)):
            router = h[t] @ layer.router
            chosen = sorted(range(config.num_experts), key=lambda e: -router[e])[: config.experts_per_token]
            routes[t, index] = chosen
            gates = np.exp(router[chosen] - router[chosen].max())
            gates /= gates.sum()
            for gate, expert in zip(gates, chosen, strict=True):
                part = slice(expert * config.expert_hidden, (expert + 1) * config.expert_hidden)
                up = h[t] @ layer.up[:, part]
                x[t] += gate * ((up / (1 + np.exp(-up))) @ layer.down[part])
    logits = norm(x) @ weights.head * 1.6 + weights.bias
    logits[:, EOS_ID] += EOS_BIAS_PER_TOKEN * np.arange(len(tokens))
    return logits, routes


@pytest.mark.parametrize("experts", [8, 11])
def test_prefill_is_attention_and_the_top_k_of_the_router(experts: int) -> None:
    config = ModelConfig(num_experts=experts, experts_per_token=3)
    decoder = Decoder(config, 5, "v1")
    hidden, routes = decoder.extend(0, TOKENS, 0)
    logits, expected = reference(decoder.weights, config, TOKENS)
    np.testing.assert_allclose(decoder.logits(hidden, np.arange(len(TOKENS))), logits, atol=1e-9)
    np.testing.assert_array_equal(routes, expected)
    assert routes.dtype == np.int32


def test_cached_decoding_in_a_ragged_batch_equals_one_full_forward() -> None:
    decoder = Decoder(ModelConfig(), 0, "default")
    full, full_routes = decoder.extend(0, TOKENS, 0)
    starts = [1, 9, 30]
    for slot, start in enumerate(starts):
        cut = (start + 1) // 2
        decoder.extend(slot, TOKENS[:cut], 0)
        if cut < start:
            decoder.extend(slot, TOKENS[cut:start], cut)
    for ahead in range(len(TOKENS) - max(starts)):
        # Every third step leaves slot 0 out, so that both ways of reading the cache are used.
        slots = [1, 2] if ahead % 3 == 2 else [0, 1, 2]
        positions = np.array([starts[s] for s in slots])
        hidden, routes = decoder.decode(slots, TOKENS[positions], positions)
        np.testing.assert_allclose(hidden, full[positions], atol=1e-10)
        np.testing.assert_array_equal(routes, full_routes[positions])
        for slot in slots:
            starts[slot] += 1


def test_a_moved_slot_decodes_on() -> None:
    decoder = Decoder(ModelConfig(), 0, "default")
    full, _ = decoder.extend(0, TOKENS, 0)
    decoder.extend(3, TOKENS[:20], 0)
    decoder.move(3, 1, 20)
    hidden, _ = decoder.decode([1], TOKENS[20:21], np.array([20]))
    np.testing.assert_allclose(hidden[0], full[20], atol=1e-10)


def test_weights_are_a_function_of_seed_and_version() -> None:
    config = ModelConfig()
    one, again = draw_weights(config, 3, "7"), draw_weights(config, 3, "7")
    np.testing.assert_array_equal(one.embed, again.embed)
    np.testing.assert_array_equal(one.layers[1].down, again.layers[1].down)
    other_version, other_seed = draw_weights(config, 3, "8"), draw_weights(config, 4, "7")
    moved = np.linalg.norm(one.embed - other_version.embed) / np.linalg.norm(one.embed)
    assert 0.01 < moved < 0.2
    assert np.linalg.norm(one.embed - other_seed.embed) / np.linalg.norm(one.embed) > 1


# --- through the scheduler --------------------------------------------------------------------------------------------


def scheduler_of(**options: Any) -> Scheduler:
    return Scheduler(EngineOptions(enable_return_routed_experts=True, **options))


def submit(scheduler: Scheduler, prompt: list[int], **params: Any) -> Request:
    wanted = {key: params.pop(key) for key in ("top_logprobs_num", "rid", "logprob_start_len") if key in params}
    body = GenerateBody(
        input_ids=list(prompt), sampling_params=params, return_logprob=True, return_routed_experts=True, **wanted
    )
    return scheduler.submit(specs_of(body, scheduler.options), 0.0)[0]


def run(scheduler: Scheduler, *requests: Request) -> None:
    for _ in range(20_000):
        if all(request.closed for request in requests):
            return
        scheduler.step(0.0)
    raise AssertionError("the requests did not end")


def output(request: Request) -> list[int]:
    return request.tokens[request.prompt_length :]


def live_routes(request: Request) -> np.ndarray:
    return request.routes[: len(request.tokens) - 1]


PROMPT = encode_text("What is 12 + 30? ")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompt_and_prefix_continue_as_if_uninterrupted(temperature: float) -> None:
    params: dict[str, Any] = {"temperature": temperature, "sampling_seed": 99, "ignore_eos": True}
    whole_engine = scheduler_of()
    whole = submit(whole_engine, PROMPT, max_new_tokens=80, **params)
    run(whole_engine, whole)
    for cut in (1, 15, 79):
        resumed_engine = scheduler_of()
        others = [submit(resumed_engine, encode_text(f"other {i}"), max_new_tokens=100) for i in range(5)]
        rest = submit(resumed_engine, PROMPT + output(whole)[:cut], max_new_tokens=80 - cut, **params)
        run(resumed_engine, rest, *others)
        assert output(rest) == output(whole)[cut:]
        np.testing.assert_allclose(rest.logprobs, whole.logprobs[cut:], atol=1e-9)
        np.testing.assert_array_equal(live_routes(rest), live_routes(whole))


def test_a_cached_prefix_changes_nothing_but_the_count() -> None:
    scheduler = scheduler_of()
    first = submit(scheduler, PROMPT, max_new_tokens=30, temperature=0, ignore_eos=True)
    run(scheduler, first)
    again = submit(scheduler, PROMPT, max_new_tokens=30, temperature=0, ignore_eos=True)
    longer = submit(scheduler, PROMPT + output(first)[:20], max_new_tokens=10, temperature=0, ignore_eos=True)
    run(scheduler, again, longer)
    assert (first.cached, again.cached, longer.cached) == (0, len(PROMPT) - 1, len(PROMPT) + 19)
    assert output(again) == output(first)
    assert output(longer) == output(first)[20:]
    np.testing.assert_array_equal(live_routes(again), live_routes(first))
    np.testing.assert_array_equal(live_routes(longer), live_routes(first))
    assert scheduler.flush()
    after = submit(scheduler, PROMPT, max_new_tokens=2)
    run(scheduler, after)
    assert after.cached == 0


def test_logprobs_are_of_the_full_distribution_whatever_the_sampler_does() -> None:
    scheduler = scheduler_of()
    requests = [
        submit(scheduler, PROMPT, max_new_tokens=12, top_logprobs_num=VOCAB_SIZE, ignore_eos=True, **params)
        for params in ({}, {"temperature": 0.3}, {"top_k": 2}, {"top_p": 0.5, "min_p": 0.1}, {"temperature": 0})
    ]
    run(scheduler, *requests)
    for request in requests:
        for token, logprob, ids, row in zip(
            output(request), request.logprobs, request.top.ids, request.top.logprobs, strict=True
        ):
            assert np.exp(row).sum() == pytest.approx(1.0, abs=1e-9)
            assert np.all(np.diff(row) <= 0)
            assert sorted(ids.tolist()) == list(range(VOCAB_SIZE))
            assert logprob == row[ids.tolist().index(token)]
    # The first token's distribution is the same for all, and is the model's own.
    decoder = Decoder(scheduler.config, 0, "default")
    hidden, _ = decoder.extend(0, np.array(PROMPT, dtype=np.int32), 0)
    own = log_softmax(decoder.logits(hidden[-1:], np.array([len(PROMPT) - 1])))[0]
    for request in requests:
        np.testing.assert_allclose(request.top.logprobs[0], own[request.top.ids[0]], atol=1e-9)


def test_input_logprobs_are_those_that_sampling_would_have_given() -> None:
    scheduler = scheduler_of()
    first = submit(scheduler, PROMPT, max_new_tokens=20, ignore_eos=True)
    run(scheduler, first)
    for start in (0, 4, len(PROMPT)):
        scored = submit(scheduler, first.tokens, max_new_tokens=1, logprob_start_len=start)
        run(scheduler, scored)
        assert len(scored.input_logprobs) == len(first.tokens) - 1 - start
        np.testing.assert_allclose(scored.input_logprobs[-19:], first.logprobs[1:], atol=1e-9)


def test_a_long_prompt_is_prefilled_in_pieces_while_others_decode() -> None:
    scheduler = scheduler_of()
    short = submit(scheduler, PROMPT, max_new_tokens=50, ignore_eos=True)
    scheduler.step(0.0)
    long = submit(
        scheduler, TOKENS.tolist() * 20, max_new_tokens=2, temperature=0, ignore_eos=True, logprob_start_len=0
    )
    scheduler.step(0.0)
    assert short.output_length == 2 and long.output_length == 0 and 0 < long.computed < long.prompt_length
    run(scheduler, short, long)
    whole = Decoder(scheduler.config, 0, "default")
    hidden, routes = whole.extend(0, np.array(long.tokens[:-1], dtype=np.int32), 0)
    np.testing.assert_array_equal(live_routes(long), routes)
    rows = log_softmax(whole.logits(hidden, np.arange(len(hidden))))
    expected = rows[np.arange(long.prompt_length - 1), long.tokens[1 : long.prompt_length]]
    np.testing.assert_allclose(long.input_logprobs, expected, atol=1e-9)


def test_a_token_belongs_to_the_weights_that_sampled_it() -> None:
    quiet = scheduler_of()
    unchanged = submit(quiet, PROMPT, max_new_tokens=60, temperature=0, ignore_eos=True)
    run(quiet, unchanged)
    scheduler = scheduler_of()
    request = submit(scheduler, PROMPT, max_new_tokens=60, temperature=0, ignore_eos=True)
    while request.output_length < 25:
        scheduler.step(0.0)
    refusals: list[str | None] = []
    scheduler.pause("in_place")
    scheduler.step(0.0)
    assert request.output_length == 25
    scheduler.update(WeightUpdate("12", True, refusals.append), abort_all=False)
    assert refusals[0] is not None and "flush_cache" in refusals[0]
    assert scheduler.version == "default"
    scheduler.update(WeightUpdate("12", False, refusals.append), abort_all=False)
    assert refusals[1:] == [None]
    scheduler.resume()
    run(scheduler, request)
    assert request.spans == [("default", 0, 25), ("12", 25, 60)]
    assert output(request)[:25] == output(unchanged)[:25]
    assert request.logprobs[:25] == unchanged.logprobs[:25]
    assert request.logprobs[25:] != unchanged.logprobs[25:]
    # The next token is what the new weights say over the cache that the old ones left.
    by_hand = Decoder(scheduler.config, 0, "default")
    by_hand.extend(0, np.array(request.tokens[: len(PROMPT) + 24], dtype=np.int32), 0)
    by_hand.load("12")
    last = len(PROMPT) + 24
    hidden, _ = by_hand.decode([0], np.array([request.tokens[last]], dtype=np.int32), np.array([last]))
    row = log_softmax(by_hand.logits(hidden, np.array([last])))[0]
    assert int(row.argmax()) == output(request)[25]
    assert row.max() == pytest.approx(request.logprobs[25], abs=1e-9)


def test_a_retracted_request_is_computed_again_and_goes_on() -> None:
    scheduler = scheduler_of()
    whole = submit(scheduler, PROMPT, max_new_tokens=40, temperature=0, ignore_eos=True)
    run(scheduler, whole)
    request = submit(scheduler, PROMPT, max_new_tokens=40, temperature=0, ignore_eos=True)
    while request.output_length < 11:
        scheduler.step(0.0)
    scheduler.pause("retract")
    assert scheduler.loads().running == 0 and scheduler.loads().waiting == 1
    assert scheduler.flush()
    scheduler.resume()
    run(scheduler, request)
    assert request.retractions == 1
    assert output(request) == output(whole)
    np.testing.assert_array_equal(live_routes(request), live_routes(whole))


def test_slots_are_reused_without_mixing_requests() -> None:
    alone = scheduler_of()
    prompts = [encode_text(f"prompt {i} " * (1 + i % 4)) for i in range(14)]
    expected = []
    for i, prompt in enumerate(prompts):
        request = submit(alone, prompt, max_new_tokens=5 + 7 * (i % 5), temperature=0, ignore_eos=True)
        run(alone, request)
        expected.append(output(request))
    crowded = scheduler_of(max_running_requests=4)
    requests = [
        submit(crowded, prompt, max_new_tokens=5 + 7 * (i % 5), temperature=0, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    crowded.step(0.0)
    assert crowded.loads().running == 4 and crowded.loads().waiting == 10
    run(crowded, *requests)
    assert [output(request) for request in requests] == expected
    assert crowded.loads().running == 0


def test_answers_end_by_eos_after_varied_lengths_and_read_as_text() -> None:
    scheduler = scheduler_of()
    requests = [submit(scheduler, encode_text(f"Question {i}: "), max_new_tokens=600) for i in range(64)]
    run(scheduler, *requests)
    lengths = np.array([request.output_length for request in requests])
    assert all(request.finish == {"type": "stop", "matched": EOS_ID} for request in requests)
    assert 40 < lengths.mean() < 250
    assert lengths.std() > 0.4 * lengths.mean()
    letters = [c for r in requests for c in decode_tokens(output(r), skip_special=True, final=True)]
    assert np.mean([c.isascii() and c.isprintable() for c in letters]) > 0.8
    greedy = submit(scheduler, PROMPT, max_new_tokens=3000, temperature=0)
    run(scheduler, greedy)
    assert greedy.finish == {"type": "stop", "matched": EOS_ID}


def test_the_pace_caps_each_request_on_the_clock_that_step_is_given() -> None:
    scheduler = scheduler_of(tokens_per_second=10.0)
    requests = [submit(scheduler, PROMPT, max_new_tokens=50, ignore_eos=True) for _ in range(3)]
    now = 100.0
    for _ in range(40):
        scheduler.step(now)
        wait = scheduler.wait_seconds(now)
        assert wait is not None
        now += max(wait, 0.001)
    made = [request.output_length for request in requests]
    assert made[0] == made[1] == made[2]
    assert abs(made[0] - 10.0 * (now - 100.0)) <= 1.5


# --- the sampler ------------------------------------------------------------------------------------------------------


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]]))
    params = [SamplingParams()]
    counts = np.zeros(4)
    for position in range(4000):
        (token,), _ = sample(logits, params, [7], [position])
        counts[token] += 1
    np.testing.assert_allclose(counts / 4000, [0.5, 0.3, 0.15, 0.05], atol=0.03)


def test_uniform_depends_on_seed_and_position_only() -> None:
    draws = {(seed, position): uniform(seed, position) for seed in range(40) for position in range(40)}
    assert len(set(draws.values())) == len(draws)
    assert all(0.0 <= value < 1.0 for value in draws.values())
    assert uniform(3, 4) == draws[3, 4]
    assert 0.45 < np.mean(list(draws.values())) < 0.55


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.79}, [0, 1]),
        ({"top_p": 0.81}, [0, 1, 2]),
        ({"top_p": 0.01}, [0]),
        ({"min_p": 0.25}, [0, 1, 2]),
        ({"min_p": 0.31}, [0, 1]),
        ({"top_k": 3, "top_p": 0.53}, [0, 1]),
    ],
)
def test_filters_keep(params: dict[str, Any], kept: list[int]) -> None:
    mask = keep_mask(np.log(np.array([0.5, 0.3, 0.15, 0.05])), SamplingParams(**params))
    assert np.flatnonzero(mask).tolist() == kept


def test_a_filtered_token_is_never_drawn_and_top_1_is_greedy() -> None:
    scheduler = scheduler_of()
    greedy = submit(scheduler, PROMPT, max_new_tokens=30, temperature=0, ignore_eos=True)
    only = submit(scheduler, PROMPT, max_new_tokens=30, top_k=1, ignore_eos=True)
    few = submit(scheduler, PROMPT, max_new_tokens=30, top_k=3, ignore_eos=True, top_logprobs_num=3)
    run(scheduler, greedy, only, few)
    assert output(only) == output(greedy)
    assert all(token in ids for token, ids in zip(output(few), few.top.ids, strict=True))


def test_penalties_bias_and_a_minimum_length_move_the_logits() -> None:
    scheduler = scheduler_of()
    biased = submit(scheduler, PROMPT, max_new_tokens=6, temperature=0, logit_bias={"77": 100.0})
    long = submit(scheduler, PROMPT, max_new_tokens=9, min_new_tokens=5, temperature=0, logit_bias={str(EOS_ID): 100.0})
    spread = submit(
        scheduler,
        PROMPT,
        max_new_tokens=40,
        temperature=0,
        ignore_eos=True,
        frequency_penalty=2.0,
        presence_penalty=2.0,
    )
    plain = submit(scheduler, PROMPT, max_new_tokens=40, temperature=0, ignore_eos=True)
    run(scheduler, biased, long, spread, plain)
    assert output(biased) == [77] * 6
    assert len(output(long)) == 6 and output(long)[-1] == EOS_ID
    assert len(set(output(spread))) > len(set(output(plain)))
