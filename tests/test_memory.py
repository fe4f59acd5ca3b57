"""Free memory is what the machine has, or less where a control group sets a limit."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from confined import memory_limit, run_in

from keyshift.memory import _left_in_groups, free_memory

GIB = 2**30


def group(folder: Path, version: int, limit: str, used: int, files: int) -> None:
    """A control group's files as the kernel writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    prefix = "" if version == 2 else "total_"
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(f"{used}\n")
    stat = {
        "anon": used - files,
        f"{prefix}inactive_file": files // 2,
        f"{prefix}active_file": files - files // 2,
    }
    (folder / "memory.stat").write_text("".join(f"{name} {count}\n" for name, count in stat.items()))


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_limit_around_the_process_counts(tmp_path: Path, version: int) -> None:
    mounted = tmp_path / "groups" / ("memory" if version == 1 else "")
    none = str(2**63 - 4096) if version == 1 else "max"
    group(mounted / "slice", version, str(8 * GIB), used=6 * GIB, files=GIB)
    group(mounted / "slice" / "job", version, none, used=3 * GIB, files=GIB)
    group(mounted / "slice" / "job" / "step", version, str(4 * GIB), used=3 * GIB, files=GIB)
    membership = tmp_path / "cgroup"
    controllers = "cpu,memory" if version == 1 else ""
    membership.write_text(f"5:devices:/elsewhere\n4:{controllers}:/slice/job/step\n")
    left = list(_left_in_groups(membership, tmp_path / "groups"))
    assert min(left) == 2 * GIB  # the step's, with what files were read into
    assert sorted(left)[1] == 3 * GIB  # the slice's


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_sees_the_path_of_its_host_and_its_own_group_at_the_root(
    tmp_path: Path, version: int
) -> None:
    mounted = tmp_path / "groups" / ("memory" if version == 1 else "")
    group(mounted, version, str(GIB), used=GIB // 4, files=0)
    membership = tmp_path / "cgroup"
    membership.write_text(f"7:{'memory' if version == 1 else ''}:/kubepods/pod1/abc\n")
    assert list(_left_in_groups(membership, tmp_path / "groups")) == [GIB * 3 // 4]


def test_a_group_above_its_limit_has_nothing_left(tmp_path: Path) -> None:
    group(tmp_path, 2, str(GIB), used=GIB + 1, files=0)
    (tmp_path / "cgroup").write_text("0::/\n")
    assert list(_left_in_groups(tmp_path / "cgroup", tmp_path)) == [0]


@pytest.mark.parametrize(
    ("file", "content", "left"),
    [
        ("memory.max", None, []),
        ("memory.max", "", []),
        ("memory.current", None, []),
        ("memory.stat", None, [GIB // 2]),
        ("memory.stat", "\ninactive_file\n", [GIB // 2]),
    ],
)
def test_what_cannot_be_read_sets_no_limit(
    tmp_path: Path, file: str, content: str | None, left: list[int]
) -> None:
    group(tmp_path / "groups", 2, str(GIB), used=GIB // 2, files=GIB // 4)
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "groups" / file).unlink()
    if content is not None:
        (tmp_path / "groups" / file).write_text(content)
    else:
        (tmp_path / "groups" / file).mkdir()  # which even root cannot read
    assert list(_left_in_groups(tmp_path / "cgroup", tmp_path / "groups")) == left


def test_without_control_groups_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keyshift.memory.MEMBERSHIP", tmp_path / "absent")
    assert GIB // 4 < free_memory() <= psutil.virtual_memory().total


def test_a_real_limit_is_seen() -> None:
    with memory_limit(GIB) as group:
        seen = run_in(group, "-c", "from keyshift.memory import free_memory; print(free_memory())")
    assert GIB // 2 < int(seen.stdout) <= GIB
