"""Settings of a mount are read as they are, each dangerous one is named, and a declaration cannot contradict them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strawq.errors import BadInput
from strawq.storage.mounts import (
    JuiceFSSettings,
    MeasuredStorage,
    Mount,
    StorageDeclaration,
    check_declaration,
    judge_mount,
    measured_storage,
    mount_of,
    parse_juicefs_config,
    parse_mounts,
    read_declaration,
    read_juicefs_settings,
)
from tools.juicefs.volume import Volume

MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
JuiceFS:pools /mnt/my\\040pools fuse.juicefs rw,nosuid,max_read=131072 0 0
server:/x /mnt/nfs nfs4 rw,vers=4.2,lookupcache=pos,local_lock=none,acregmax=3,acdirmax=5 0 0
tmpfs /mnt/nfs/hidden tmpfs rw 0 0
/dev/sdb1 /mnt/nfs/hidden xfs rw,noquota 0 0
"""

# As JuiceFS 1.4 writes it, cut to what is read.
CONFIG: dict[str, Any] = {
    "Meta": {"OpenCache": 0, "ReadOnly": False, "Sid": 7},
    "Format": {"UUID": "51e9", "TrashDays": 1},
    "Chunk": {"Writeback": False},
    "Version": "1.4.2+2026-10-26.pypi",
    "AttrTimeout": 1000000000,
    "DirEntryTimeout": 1000000000,
    "NegEntryTimeout": 0,
    "EntryTimeout": 1000000000,
    "ReaddirCache": False,
    "FuseOpts": {"EnableLocks": True, "EnableWriteback": False},
}
JUICEFS = Mount("JuiceFS:pools", "/mnt/pools", "fuse.juicefs", {"rw": ""})


def settings(**changes: Any) -> JuiceFSSettings:
    config = json.loads(json.dumps(CONFIG))
    for path, value in changes.items():
        *parents, name = path.split("__")
        place = config
        for parent in parents:
            place = place[parent]
        place[name] = value
    return parse_juicefs_config(config)


def weights(mount: Mount, juicefs: JuiceFSSettings | None = None, accept_writeback: bool = False) -> list[str]:
    findings = judge_mount(mount, juicefs, accept_writeback=accept_writeback)
    return [finding.weight for finding in findings if finding.weight != "note"]


class TestMountTable:
    @pytest.mark.parametrize(
        ("path", "point", "kind"),
        [
            ("/home/x", "/", "ext4"),
            ("/mnt/my pools/a", "/mnt/my pools", "fuse.juicefs"),
            ("/mnt/my poolside", "/", "ext4"),
            ("/mnt/nfs", "/mnt/nfs", "nfs4"),
            ("/mnt/nfs/hidden/x", "/mnt/nfs/hidden", "xfs"),
        ],
    )
    def test_the_deepest_and_last_mount_holds_a_path(self, path: str, point: str, kind: str) -> None:
        found = mount_of(path, parse_mounts(MOUNTS))
        assert (found.mount_point, found.fs_type) == (point, kind)

    def test_options(self) -> None:
        options = mount_of("/mnt/nfs/x", parse_mounts(MOUNTS)).options
        assert options["lookupcache"] == "pos"
        assert options["rw"] == ""

    def test_a_symbolic_link_is_resolved_first(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("/proc")
        assert mount_of(str(tmp_path / "link")).fs_type == "proc"

    def test_an_empty_table_is_an_error(self) -> None:
        with pytest.raises(BadInput, match="/proc/mounts"):
            mount_of("/x", [])


class TestJuiceFS:
    def test_the_usual_settings_are_fit(self) -> None:
        assert weights(JUICEFS, settings()) == []
        assert settings() == JuiceFSSettings(
            version="1.4.2+2026-10-26.pypi",
            volume="51e9",
            session=7,
            read_only=False,
            writeback=False,
            kernel_writeback=False,
            open_cache_s=0.0,
            attribute_cache_s=1.0,
            entry_cache_s=1.0,
            negative_entry_cache_s=0.0,
            readdir_cache=False,
            locks=True,
            trash_days=1,
        )

    @pytest.mark.parametrize(
        ("change", "value", "weight", "remedy"),
        [
            ("NegEntryTimeout", 1, "unfit", "--negative-entry-cache 0"),
            ("Chunk__Writeback", True, "unfit", "without --writeback"),
            ("Meta__ReadOnly", True, "unfit", "without --read-only"),
            ("FuseOpts__EnableWriteback", True, "warning", "writeback_cache"),
            ("Meta__OpenCache", 10**9, "warning", "--open-cache 0"),
            ("ReaddirCache", True, "warning", "--readdir-cache"),
            ("AttrTimeout", 2 * 10**9, "warning", "2 s"),
            ("EntryTimeout", 3 * 10**9, "warning", "3 s"),
            ("DirEntryTimeout", 4 * 10**9, "warning", "4 s"),
            ("FuseOpts__EnableLocks", False, "warning", "locks"),
        ],
    )
    def test_each_dangerous_setting_is_named(self, change: str, value: object, weight: str, remedy: str) -> None:
        findings = [f for f in judge_mount(JUICEFS, settings(**{change: value})) if f.weight != "note"]
        assert [finding.weight for finding in findings] == [weight]
        assert remedy in findings[0].text

    def test_writeback_can_be_accepted_and_nothing_else_with_it(self) -> None:
        assert weights(JUICEFS, settings(Chunk__Writeback=True), accept_writeback=True) == ["warning"]
        assert weights(JUICEFS, settings(NegEntryTimeout=1), accept_writeback=True) == ["unfit"]

    def test_settings_that_cannot_be_read_are_a_warning(self) -> None:
        assert weights(JUICEFS, None) == ["warning"]

    def test_a_read_only_mount(self) -> None:
        assert weights(Mount("/dev/sda1", "/", "ext4", {"ro": ""})) == ["unfit"]

    @pytest.mark.juicefs
    def test_a_real_mount(self, juicefs: Volume) -> None:
        client = juicefs.clients["a"]
        mount = mount_of(str(client.path))
        assert mount.is_juicefs
        found = read_juicefs_settings(mount.mount_point)
        assert found is not None
        assert found.version.startswith("1.")
        assert (found.writeback, found.open_cache_s, found.negative_entry_cache_s, found.locks) == (False, 0, 0, True)
        assert found.attribute_cache_s == 1.0
        assert measured_storage(mount, found).client_version == found.version


def nfs(**options: str) -> Mount:
    return Mount("server:/x", "/mnt", "nfs4", {"rw": "", "lookupcache": "pos", "actimeo": "1", **options})


class TestOthers:
    @pytest.mark.parametrize(
        ("mount", "wanted"),
        [
            (nfs(), []),
            (nfs(lookupcache="none"), []),
            (nfs(lookupcache="all"), ["unfit"]),
            (Mount("server:/x", "/mnt", "nfs", {"rw": "", "actimeo": "1"}), ["unfit"]),
            (nfs(nolock=""), ["warning"]),
            (nfs(local_lock="flock"), ["warning"]),
            (nfs(local_lock="posix"), []),
            (nfs(soft=""), ["warning"]),
            (nfs(actimeo="60"), ["warning"]),
            (Mount("server:/x", "/mnt", "nfs", {"rw": "", "lookupcache": "pos"}), ["warning"]),
            (nfs(actimeo="60", noac=""), []),
            (Mount("tmpfs", "/mnt", "tmpfs", {"rw": ""}), ["warning"]),
            (Mount("overlay", "/", "overlay", {"rw": ""}), ["warning"]),
            (Mount("/dev/sda1", "/", "xfs", {"rw": ""}), []),
            (Mount("/dev/sda1", "/", "ext4", {"rw": "", "barrier": "0"}), ["warning"]),
            (Mount("bucket", "/mnt", "fuse.s3fs", {"rw": ""}), ["warning"]),
        ],
    )
    def test_settings_decide(self, mount: Mount, wanted: list[str]) -> None:
        assert weights(mount) == wanted


DECLARED = StorageDeclaration(
    direct_mount=True,
    writeback=False,
    open_cache=0,
    readdir_cache=False,
    client_version="1.4.2",
    durability_description="three copies",
)


class TestDeclaration:
    def test_one_that_holds(self) -> None:
        check_declaration(DECLARED, measured_storage(JUICEFS, settings()))
        check_declaration(DECLARED, MeasuredStorage())

    @pytest.mark.parametrize(
        ("field", "value"),
        [("direct_mount", False), ("writeback", True), ("open_cache", 5.0), ("readdir_cache", True)],
    )
    def test_a_field_that_the_mount_contradicts_is_named(self, field: str, value: object) -> None:
        measured = MeasuredStorage(**{field: value})  # type: ignore[arg-type]
        with pytest.raises(BadInput, match=f"{field} is declared as .*, but the mount has"):
            check_declaration(DECLARED, measured)

    @pytest.mark.parametrize(
        ("field", "value"),
        [("direct_mount", False), ("writeback", True), ("open_cache", 5.0), ("readdir_cache", True)],
    )
    def test_an_honest_declaration_of_something_unsafe_is_refused(self, field: str, value: object) -> None:
        fields = {name: getattr(DECLARED, name) for name in DECLARED.__struct_fields__} | {field: value}
        with pytest.raises(BadInput, match=f"{field} is declared as .*, and must be"):
            check_declaration(StorageDeclaration(**fields), MeasuredStorage())

    @pytest.mark.parametrize(
        ("declared", "found", "same"),
        [
            ("1.4.2", "1.4.2+2026-10-26.pypi", True),
            ("1.4.2+2026-10-26.pypi", "1.4.2+2026-10-26.pypi", True),
            ("1.4", "1.4.2", False),
            ("1.4.1", "1.4.2", False),
            ("", "1.4.2", False),
        ],
    )
    def test_the_client_version(self, declared: str, found: str, same: bool) -> None:
        fields = {name: getattr(DECLARED, name) for name in DECLARED.__struct_fields__} | {"client_version": declared}
        if same:
            check_declaration(StorageDeclaration(**fields), MeasuredStorage(client_version=found))
        else:
            with pytest.raises(BadInput, match="client_version"):
                check_declaration(StorageDeclaration(**fields), MeasuredStorage(client_version=found))

    def test_all_faults_are_told_at_once(self) -> None:
        bad = measured_storage(JUICEFS, settings(Chunk__Writeback=True, ReaddirCache=True))
        with pytest.raises(BadInput, match=r"writeback.*readdir_cache"):
            check_declaration(DECLARED, bad)

    def test_reading(self, tmp_path: Path) -> None:
        path = tmp_path / "storage.json"
        fields: dict[str, Any] = {name: getattr(DECLARED, name) for name in DECLARED.__struct_fields__}
        path.write_text(json.dumps(fields))
        assert read_declaration(path) == DECLARED

    @pytest.mark.parametrize(
        ("change", "named"),
        [({"writeback": "no"}, "writeback"), ({"cached": True}, "cached"), ({"open_cache": None}, "open_cache")],
    )
    def test_a_file_that_is_not_one(self, tmp_path: Path, change: dict[str, Any], named: str) -> None:
        path = tmp_path / "storage.json"
        fields: dict[str, Any] = {name: getattr(DECLARED, name) for name in DECLARED.__struct_fields__}
        path.write_text(json.dumps(fields | change))
        with pytest.raises(BadInput, match=rf"storage\.json.*{named}"):
            read_declaration(path)
        path.write_text("not json")
        with pytest.raises(BadInput, match=r"storage\.json"):
            read_declaration(path)
        with pytest.raises(BadInput, match="No such file"):
            read_declaration(tmp_path / "none")
