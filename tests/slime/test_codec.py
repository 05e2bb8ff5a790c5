import copy
import dataclasses
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from shapes import Newer, Older, answered

from strawq import Pool
from strawq.errors import BadInput, Damaged, FormatUnsupported, Misaligned
from strawq.model import VersionSpan
from strawq.queue import Queue
from strawq.samples import Group, Prompt, Sample, SegmentInfo, TopK, TopP
from strawq.work import Change, Work
from strawq_workers.slime import sample as ours
from strawq_workers.slime.codec import group_of, prompt_of, samples_of
from strawq_workers.slime.payload import MAGIC, MARK

KINDS = [Older, Newer, ours.Sample]


def stored(tmp_path: Any, group: Group) -> Group:
    """The group after its way through a pool."""
    with Pool.init(tmp_path / "pool") as pool:
        queue = pool.queue()
        queue.submit([group.prompt])
        (lease,) = queue.acquire(1).leases
        work = queue.open(lease)
        return saved(queue, work, msgspec.structs.replace(group, task_id=work.group.task_id)).group


def saved(queue: Queue, work: Work, group: Group) -> Work:
    """The work of the next holder, after this one has given the group back."""
    assert queue.report([Change(work, "yield", group)]).accepted
    (lease,) = queue.acquire(1).leases
    return queue.open(lease)


def assert_same(first: Any, second: Any, path: str = "it") -> None:
    """Equal, of the same types, all the way down."""
    assert type(first) is type(second), path
    if dataclasses.is_dataclass(first):
        assert_same(vars(first), vars(second), path)
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), path
        for name in first:
            assert_same(first[name], second[name], f"{path}.{name}")
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second), path
        for at, (one, other) in enumerate(zip(first, second, strict=True)):
            assert_same(one, other, f"{path}[{at}]")
    elif isinstance(first, np.ndarray):
        assert first.dtype == second.dtype, path
        np.testing.assert_array_equal(first, second, path)
    elif isinstance(first, float) and math.isnan(first):
        assert math.isnan(second), path
    else:
        assert first == second, path


def round_trip(samples: list[Any], kind: Any = None) -> list[Any]:
    first = samples[0] if not isinstance(samples[0], list) else samples[0][0]
    group = group_of("t", prompt_of(first, samples=len(samples)), samples)
    return samples_of(group, kind or type(first))


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_comes_back_equal_through_a_pool(kind: Any, tmp_path: Any) -> None:
    samples = [answered(kind, 28 + at) for at in range(3)]
    samples[1].reward = {"score": 1.0, "format": 0}
    samples[2].status = kind().status.__class__("failed")
    samples[2].remove_sample = True
    group = group_of("t", prompt_of(samples[0], samples=3), samples)
    assert_same(samples_of(stored(tmp_path, group), kind), samples)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_group_comes_back_as_its_copies_with_running_indices(kind: Any, tmp_path: Any) -> None:
    messages = [{"role": "user", "content": "1 + 1"}]
    given = kind(prompt=messages, label="2", index=40, group_index=10, metadata={"b": 1, "a": [1.0, None]})
    with Pool.init(tmp_path / "pool") as pool:
        queue = pool.queue()
        queue.submit([prompt_of(given, 10, samples=4)])
        (lease,) = queue.acquire(1).leases
        prompt = queue.open(lease).group
    back = samples_of(prompt, kind)
    wanted = [copy.deepcopy(given) for _ in range(4)]
    for at, sample in enumerate(wanted):
        sample.index = 40 + at
    assert_same(back, wanted)
    assert list(back[0].metadata) == ["b", "a"]
    back[0].metadata["a"].append(1)
    assert back[1].metadata["a"] == [1.0, None]


def test_nested_values_bytes_infinities_and_arrays_of_custom_fields_survive(tmp_path: Any) -> None:
    odd = {
        "tuple": (1, "a", None, True),
        "floats": [-math.inf, math.inf, math.nan, -0.0],
        "bytes": b"\x00\xff",
        "big": [1 << 80, -(1 << 63), (1 << 63) - 1],
        "text": "\ud800 half a pair",
        3: {("x", 1): None},
        "arrays": [
            np.arange(6, dtype=np.uint8).reshape(2, 3), np.array(2.5), np.zeros((0, 4), np.float16),
            np.array([1, 2], ">i4"), np.array(["ab", "c"]), np.float32(0.1), np.array([True]),
        ],
        "large": np.arange(40_000, dtype=np.float64),
    }  # fmt: skip
    samples = [answered(Newer, at) for at in range(2)]
    samples[0].trace = odd
    samples[0].metadata = {"source": "s", "odd": odd, "plain": [1, "b"]}
    samples[1].teacher_log_probs = [-1.0, -2.0, -math.inf, 0.0]
    samples[1].spec_info = Newer.SpecInfo(1, 2, 3, 4)
    samples[1].previous = answered(Newer, 0, status=Newer.Status.ABORTED)
    samples[1].verdict = Newer.Status.TRUNCATED
    group = group_of("t", prompt_of(samples[0], samples=2), samples)
    back = samples_of(stored(tmp_path, group), Newer)
    assert_same(back, samples)
    assert "odd" not in group.prompt.metadata
    assert any(name.startswith("slime.") for name in group.samples[0].tensors)
    back[0].trace["arrays"][0][0, 0] = 9  # arrays are one's own


def test_equal_content_gives_equal_bytes() -> None:
    def made() -> Group:
        sample = answered(Newer, 3, zeta={"a": (1, 2)}, alpha=np.arange(20_000))
        return group_of("t", prompt_of(sample, samples=1), [sample])

    first, second = made(), made()
    assert first.prompt.payload == second.prompt.payload
    assert first.samples[0].payload == second.samples[0].payload
    assert first.samples[0].tensors.keys() == second.samples[0].tensors.keys()


def test_a_group_costs_no_payload_where_columns_say_everything() -> None:
    samples = [answered(Newer, at) for at in range(4)]
    assert all(sample.payload is None for sample in group_of("t", prompt_of(samples[0]), samples).samples)


@pytest.mark.parametrize(
    ("value", "path", "name"),
    [
        ({"a": [object()]}, "sample 0.custom['a'][0]", "builtins.object"),
        ({1, 2}, "sample 0.custom", "builtins.set"),
        (lambda: 1, "sample 0.custom", "builtins.function"),
        ([np.array([None])], "sample 0.custom[0]", "array of object"),
        ({frozenset(): 1}, "sample 0.custom", "frozenset"),
    ],
)
def test_a_type_that_cannot_be_stored_is_refused_by_the_path_of_its_field(value: Any, path: str, name: str) -> None:
    sample = answered(Newer, 0)
    prompt = prompt_of(sample)
    sample.custom = value
    with pytest.raises(BadInput, match="Unsupported durable Sample field type") as caught:
        group_of("t", prompt, [sample])
    assert path in str(caught.value)
    assert name in str(caught.value)


def test_a_cycle_is_refused_and_a_shared_value_is_not() -> None:
    shared = [1]
    sample = answered(Newer, 0, custom={"a": shared, "b": shared})
    assert round_trip([sample])[0].custom == {"a": [1], "b": [1]}
    shared.append(sample.custom)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"Cyclic custom fields are not supported: .*custom\['a'\]\[1\]"):
        round_trip([sample])


def test_depth_is_bounded_by_name() -> None:
    deep: Any = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(BadInput, match="levels deep"):
        round_trip([answered(Newer, 0, custom=deep)])


def routes(rows: int, dtype: Any = np.int32) -> Any:
    return (np.arange(rows * 6).reshape(rows, 2, 3) % 128).astype(dtype)


@pytest.mark.parametrize("kind", [Older, Newer])
def test_r3_survives_whole_and_as_the_list_of_chunks_of_a_growing_sample(kind: Any, tmp_path: Any) -> None:
    whole, chunked = answered(kind, 0), answered(kind, 1)
    whole.rollout_routed_experts = routes(6)
    chunked.rollout_routed_experts = [routes(2), routes(4)]
    group = group_of("t", prompt_of(whole, samples=2), [whole, chunked])
    assert group.samples[1].r3 is not None
    assert group.samples[1].r3.shape == (6, 2, 3)
    assert_same(samples_of(stored(tmp_path, group), kind), [whole, chunked])


def test_sc_heads_survive_under_their_names(tmp_path: Any) -> None:
    top_k, lists, top_p, both = (answered(Newer, at) for at in range(4))
    top_k.rollout_topk_token_ids = np.arange(8, dtype=np.int32).reshape(4, 2)
    top_k.rollout_topk_log_probs = np.full((4, 2), -0.7, np.float32)
    lists.rollout_topk_token_ids = [[1, 2], [3, 4], [5, 6], [7, 8]]
    lists.rollout_topk_log_probs = [[-0.1, -0.2]] * 4  # doubles that float32 does not hold
    top_p.rollout_top_p_token_ids = np.arange(5, dtype=np.int32)
    top_p.rollout_top_p_token_offsets = np.array([0, 1, 1, 3, 5], np.int32)
    top_p.rollout_top_p_log_probs = np.full(5, -1.0, np.float32)
    both.rollout_topk_token_ids, both.rollout_topk_log_probs = (
        top_k.rollout_topk_token_ids,
        top_k.rollout_topk_log_probs,
    )
    both.rollout_top_p_token_ids = [1, 2]
    both.rollout_top_p_token_offsets = [0, 1, 1, 2, 2]
    samples = [top_k, lists, top_p, both]
    group = group_of("t", prompt_of(top_k, samples=4), samples)
    assert isinstance(group.samples[0].sc, TopK)
    assert isinstance(group.samples[2].sc, TopP)
    assert_same(samples_of(stored(tmp_path, group), Newer), samples)


@pytest.mark.parametrize(
    ("field", "value", "counts"),
    [
        ("rollout_routed_experts", routes(5), "5 rows, expected 6"),
        ("rollout_routed_experts", [routes(2), routes(2)], "4 rows, expected 6"),
        ("rollout_topk_token_ids", np.zeros((3, 2), np.int32), "3 rows, expected 4"),
        ("rollout_top_p_token_offsets", np.zeros(4, np.int32), "4 rows, expected 5"),
        ("rollout_log_probs", [-1.0], "cover 1 tokens, the response has 4"),
        ("loss_mask", [1] * 7, "covers 7 tokens, the response has 4"),
        ("response_length", 8, "response_length is 8, and there are 7 tokens"),
    ],
)
def test_an_incomplete_capture_is_refused_with_its_counts(field: str, value: Any, counts: str) -> None:
    sample = answered(Newer, 0)
    prompt = prompt_of(sample)
    setattr(sample, field, value)
    with pytest.raises(Misaligned, match=counts):
        group_of("t", prompt, [sample])


def test_a_sample_of_one_generation_is_read_as_the_other() -> None:
    newer = answered(Newer, 0, session_id="abc", rollout_id=4)
    (older,) = round_trip([newer], Older)
    assert type(older) is Older
    assert (older.session_id, older.rollout_id, older.status.value) == ("abc", 4, "completed")
    (again,) = round_trip([older], Newer)
    assert_same(again, newer)


def test_an_answer_that_was_split_keeps_its_nesting(tmp_path: Any) -> None:
    samples = [answered(Newer, 0), [answered(Newer, 1, rollout_id=1), answered(Newer, 1, rollout_id=1, count=2)]]
    group = group_of("t", prompt_of(samples[0], samples=2), samples)
    assert [sample.index for sample in group.samples] == [0, 1, 2]
    assert_same(samples_of(stored(tmp_path, group), Newer), samples)


def test_columns_hold_what_every_reader_of_the_pool_understands() -> None:
    sample = answered(Newer, 5, loss_mask=[0, 1, 1, 1], reward=1, remove_sample=False)
    prompt = prompt_of(sample, samples=1)
    (stored_sample,) = group_of("t", prompt, [sample]).samples
    assert (prompt.group_id, prompt.text, prompt.label, prompt.metadata) == (
        "7",
        "one two three",
        "four",
        {"source": "s"},
    )
    assert prompt.tokens is not None
    assert prompt.tokens.tolist() == [10, 11, 12]
    assert stored_sample.tokens.tolist() == [100, 101, 102, 103]
    assert stored_sample.loss_mask.tolist() == [0, 1, 1, 1]
    assert stored_sample.reward == 1.0
    assert stored_sample.status == "completed"
    assert stored_sample.versions == (VersionSpan(0, 4, "3"),)
    assert type(samples_of(Group("t", prompt, (stored_sample,)), Newer)[0].reward) is int


def test_a_removed_sample_is_masked_for_other_readers_and_has_its_own_mask_for_slime() -> None:
    sample = answered(Newer, 0, remove_sample=True)
    group = group_of("t", prompt_of(sample), [sample])
    assert group.samples[0].loss_mask.tolist() == [0, 0, 0, 0]
    assert_same(samples_of(group, Newer), [sample])


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_mask": None, "rollout_log_probs": None},
        {"rollout_log_probs": [-0.1, -0.2, -1e-50, -3.0]},
        {"loss_mask": np.array([1, 0, 1, 1]), "rollout_log_probs": np.full(4, -1.0)},
        {"reward": np.float64(0.25)},
        {"reward": {"a": np.float32(1.0), "b": (1, 2)}},
        {"reward": math.nan},
        {"reward": True},
        {"metadata": None},
        {"metadata": {}},
        {"response": None},
        {"label": {"answer": 4}},
        {"index": None},
        {"tokens": [], "response_length": 0, "loss_mask": [], "rollout_log_probs": []},
        {"weight_versions": ["1", "2", "default"]},
        {"prompt": [{"role": "user", "content": ("a", b"b")}]},
        {"prompt": ""},
        {"group_index": None},
    ],
)
def test_a_field_that_its_column_cannot_hold_exactly_comes_back_as_it_was(changes: dict[str, Any]) -> None:
    first, second = answered(Newer, 0), answered(Newer, 1, **changes)
    assert_same(round_trip([first, second]), [first, second])
    alone = answered(Newer, 0, **changes)
    assert_same(round_trip([alone]), [alone])


def test_what_a_worker_has_changed_counts_more_than_what_was_given() -> None:
    given = answered(Newer, 0, count=2, reward=np.float64(0.5), loss_mask=None, weight_versions=["1", "2"],
                     rollout_log_probs=[-0.1, -0.2], status=Newer.Status.ABORTED)  # fmt: skip
    given.rollout_routed_experts = [routes(1), routes(3)]
    group = group_of("t", prompt_of(given, samples=1), [given])
    (saved,) = group.samples
    assert saved.logprobs is not None
    grown = msgspec.structs.replace(
        saved,
        tokens=np.array([100, 101, 102], np.int32),
        logprobs=np.append(saved.logprobs, np.float32(-3)),
        loss_mask=np.array([0, 0, 1], np.uint8),
        versions=(*saved.versions, VersionSpan(2, 3, "9")),
        segments=(SegmentInfo(2, 3, {}),),
        r3=routes(5),
        reward=2.0,
        status="truncated",
        text="www",
    )
    (back,) = samples_of(Group("t", group.prompt, (grown,)), Newer)
    assert back.tokens == [10, 11, 12, 100, 101, 102]
    assert back.rollout_log_probs == [-0.1, -0.2, -3.0]
    assert back.loss_mask == [0, 0, 1]
    assert back.weight_versions == ["1", "2", "9"]
    assert [len(chunk) for chunk in back.rollout_routed_experts] == [1, 3, 1]
    assert (back.reward, back.status, back.response) == (2.0, Newer.Status.TRUNCATED, "www")


def test_a_prefix_keeps_its_versions_segments_and_tensors_when_it_is_given_back_longer(tmp_path: Any) -> None:
    with Pool.init(tmp_path / "pool") as pool:
        queue = pool.queue()
        given = answered(Newer, 0, count=2, status=Newer.Status.ABORTED)
        given.rollout_routed_experts = routes(4)
        prompt = prompt_of(given, samples=1)
        given.big = np.arange(20_000)
        queue.submit([prompt])
        (lease,) = queue.acquire(1).leases
        work = queue.open(lease)
        first = group_of(work.group.task_id, prompt, [given], work.group)
        work = saved(queue, work, first)
        (sample,) = samples_of(work.group, Newer)
        sample.tokens += [102, 103]
        sample.response_length, sample.response = 4, "wwww"
        sample.loss_mask += [1, 1]
        sample.rollout_log_probs += [-1.0, -1.0]
        sample.weight_versions.append("5")
        sample.rollout_routed_experts = [sample.rollout_routed_experts, routes(2)]
        longer = group_of(work.group.task_id, prompt, [sample], work.group)
        assert longer.samples[0].versions == (VersionSpan(0, 2, "3"), VersionSpan(2, 4, "5"))
        name = next(iter(work.group.samples[0].tensors))
        assert longer.samples[0].tensors[name] is work.group.samples[0].tensors[name]
        assert_same(samples_of(saved(queue, work, longer).group, Newer), [sample])


def test_groups_of_other_producers_are_readable() -> None:
    prompt = Prompt(group_id="q-1", text="hi", samples=2, payload=b"the user's own")
    back = samples_of(Group("t", prompt, (Sample(1, tokens=np.array([5], np.int32), status="completed"),)), Newer)
    assert [(sample.group_index, sample.index, sample.tokens) for sample in back] == [
        ("q-1", None, []),
        ("q-1", None, [5]),
    ]


def test_a_payload_that_is_damaged_or_newer_is_refused() -> None:
    with pytest.raises(Damaged):
        samples_of(Group("t", Prompt(text="x", samples=1, payload=MAGIC + b"\xc1")), Newer)
    with pytest.raises(FormatUnsupported):
        samples_of(Group("t", Prompt(text="x", samples=1, payload=MARK + b"\x09")), Newer)


def test_private_attributes_of_the_holder_are_not_stored() -> None:
    sample = answered(Newer, 0, _strawq_lease=object())
    (back,) = round_trip([sample])
    assert not hasattr(back, "_strawq_lease")


def test_torch_tensors_come_back_as_tensors_of_their_dtype(tmp_path: Any) -> None:
    torch = pytest.importorskip("torch")
    sample = answered(Newer, 0)
    sample.rollout_routed_experts = torch.from_numpy(routes(6))
    sample.rollout_topk_token_ids = torch.arange(8, dtype=torch.int32).reshape(4, 2)
    sample.rollout_topk_log_probs = torch.full((4, 2), -0.5)
    sample.multimodal_train_inputs = {
        "pixels": torch.randn(40_000).to(torch.bfloat16), "scalar": torch.tensor(3), "none": torch.empty(0, 4),
        "flags": torch.tensor([True, False]), "half": torch.randn(3, 2).to(torch.bfloat16),
    }  # fmt: skip
    group = group_of("t", prompt_of(answered(Newer, 0), samples=1), [sample])
    (back,) = samples_of(stored(tmp_path, group), Newer)
    for name, value in sample.multimodal_train_inputs.items():
        assert back.multimodal_train_inputs[name].dtype == value.dtype
        assert torch.equal(back.multimodal_train_inputs[name], value)
    for name in ("rollout_routed_experts", "rollout_topk_token_ids", "rollout_topk_log_probs"):
        assert torch.equal(getattr(back, name), getattr(sample, name))
        assert getattr(back, name).dtype == getattr(sample, name).dtype


def test_images_come_back_pixel_by_pixel() -> None:
    image = pytest.importorskip("PIL.Image")
    pictures = [image.effect_noise((300, 200), 50.0), image.new("RGBA", (3, 2), (1, 2, 3, 4))]
    pictures.append(pictures[0].convert("P"))
    sample = Newer(prompt="look", multimodal_inputs={"images": pictures})
    (back,) = samples_of(Group("t", prompt_of(sample, 0, samples=1)), Newer)
    for one, other in zip(pictures, back.multimodal_inputs["images"], strict=True):
        assert (one.mode, one.size, one.tobytes()) == (other.mode, other.size, other.tobytes())
        assert one.convert("RGB").tobytes() == other.convert("RGB").tobytes()


def test_our_own_sample_counts_what_it_appends() -> None:
    sample = ours.Sample(prompt="x", tokens=[1, 2])
    sample.append_response_tokens(None, tokens=[3], log_probs=[-1.0], text="a", meta_info={"weight_version": 4})
    sample.rollout_topk_token_ids, sample.rollout_topk_log_probs = [[7, 8]], [[-0.5, -1.0]]
    sample.append_response_tokens(None, tokens=[4, 5], trainable=False, text="bc")
    assert (sample.response, sample.response_length, sample.loss_mask) == ("abc", 3, [1, 0, 0])
    assert sample.rollout_log_probs == [-1.0, 0.0, 0.0]
    assert sample.rollout_topk_token_ids == [[7, 8], [0, 1], [0, 1]]
    assert sample.weight_versions == ["4"]
    assert sample.effective_response_length == 1
    with pytest.raises(Misaligned, match="require rollout log probabilities"):
        sample.append_response_tokens(None, tokens=[6])
    again = ours.Sample.from_dict({**sample.to_dict(), "status": "completed", "extra": 1})
    assert (again.status, again.extra) == (ours.Status.COMPLETED, 1)  # type: ignore[attr-defined]
    with pytest.raises(BadInput, match="'done' is none of"):
        ours.Sample.from_dict({"status": "done"})
