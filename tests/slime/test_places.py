"""Paths that cannot be what their flags say are bad input, named with the flag, and nothing is made."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strawq.errors import BadInput
from strawq_workers.slime import build_data_source
from strawq_workers.slime.places import require_places, require_readable, require_writable


def a_file(root: Path) -> Path:
    (root / "there").write_text("x")
    return root / "there"


def below_a_file(root: Path) -> Path:
    return a_file(root) / "below"


def a_link_to_nothing(root: Path) -> Path:
    (root / "there").symlink_to(root / "nothing")
    return root / "there"


def below_a_link_to_nothing(root: Path) -> Path:
    return a_link_to_nothing(root) / "below"


WRONG = pytest.mark.parametrize("wrong", [a_file, below_a_file, a_link_to_nothing, below_a_link_to_nothing])
FLAGS = ("save", "load", "rollout_data_dir", "save_debug_rollout_data")


@WRONG
@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("transport", ["straw", "object-store"])
def test_what_is_no_directory_is_refused_by_its_flag_and_nothing_is_made(
    tmp_path: Path, wrong: Callable[[Path], Path], name: str, transport: str
) -> None:
    given = {"save": str(tmp_path / "save"), name: str(wrong(tmp_path))}
    if name == "save_debug_rollout_data":
        given[name] += "/{rollout_id}"
    before = sorted(os.listdir(tmp_path))
    args = SimpleNamespace(rollout_batch_size=2, rollout_data_transport=transport, **given)
    if name == "rollout_data_dir" and transport == "object-store":
        build_data_source(args).close()  # not looked at
        return
    with pytest.raises(BadInput, match="--" + name.replace("_", "-")) as caught:
        build_data_source(args)
    assert caught.value.exit_code == 2 and str(tmp_path / "there") in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_directory_without_the_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may do everything, so the kernel's answer is put in its mouth."""
    refused = {os.W_OK | os.X_OK}
    monkeypatch.setattr(os, "access", lambda path, mode: not (Path(path) == tmp_path and mode in refused))
    with pytest.raises(BadInput, match=f"--save .* nothing may be written in {tmp_path}"):
        require_writable("--save", tmp_path / "new" / "deeper")
    require_readable("--load", tmp_path, directory=True)
    refused = {os.R_OK | os.X_OK}
    with pytest.raises(BadInput, match=r"--load .* may not be read"):
        require_readable("--load", tmp_path, directory=True)
    require_writable("--save", tmp_path / "new" / "deeper")


def test_what_can_be_made_is_not_made_by_looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    args: dict[str, Any] = {
        "save": "new/deeper", "load": "~/nothing", "rollout_data_dir": "link", "save_debug_rollout_data": "{rollout_id}"
    }  # fmt: skip
    require_places(SimpleNamespace(**args), pool=True)
    require_places(SimpleNamespace(save_debug_rollout_data="memory://x/{rollout_id}"), pool=True)
    require_places(SimpleNamespace(), pool=True)
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]
    with pytest.raises(BadInput, match="--rollout-storage-declaration gone: there is no such file"):
        require_places(SimpleNamespace(rollout_storage_declaration="gone"), pool=True)


def test_a_home_directory_is_the_same_place_for_saving_and_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    args = SimpleNamespace(rollout_batch_size=2, save="~/save", load="~/save")
    source = build_data_source(args)
    source.get_samples(3)
    source.save(4)
    assert [path.name for path in (tmp_path / "save" / "rollout").iterdir()] == ["global_dataset_state_dict_4.msgpack"]
    monkeypatch.chdir(tmp_path)
    again = build_data_source(args)
    assert again.load(4) and again.sample_group_index == 3
