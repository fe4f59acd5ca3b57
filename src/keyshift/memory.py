"""The memory that this process can still have: the machine's, or less in a container or a scheduler's job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MEMBERSHIP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes that can be allocated before the machine runs out of memory, or a control group that this process
    is in reaches its limit, which ends the process without a word."""
    import psutil

    return min([psutil.virtual_memory().available, *_left_in_groups(MEMBERSHIP, GROUPS)])


def _left_in_groups(membership: Path, groups: Path) -> Iterator[int]:
    """What each limit leaves, of control groups of either version (Linux) and of those around them.

    Args:
        membership: lines of ``number:controllers:path``, no controllers for version 2.
        groups: where control groups are mounted.
    """
    if not membership.exists():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted, limit, used = groups, "memory.max", "memory.current"
        if controllers:
            mounted, limit, used = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        own = mounted / path.lstrip("/")
        for group in (own, *own.parents):
            # In a container the path may be the host's, and only the mounted root be there.
            if group.is_relative_to(mounted) and (group / limit).exists():
                text = (group / limit).read_text().strip()
                if text != "max":
                    yield max(0, int(text) - int((group / used).read_text()) + _reclaimable(group))


def _reclaimable(group: Path) -> int:
    """Bytes of a group that files were read into, which the kernel takes back when memory is asked for."""
    lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    counts = {name: int(count) for name, count in lines}
    return sum(counts.get(f"total_{name}", counts.get(name, 0)) for name in ("inactive_file", "active_file"))
