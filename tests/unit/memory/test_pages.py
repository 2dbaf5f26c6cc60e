"""How much memory a process may still take."""

from __future__ import annotations

from pathlib import Path

from milepost.memory.pages import memory_free


def group(directory: Path, limit: str, used: int, stat_text: str, version: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        2: ("memory.max", "memory.current"),
    }[version]
    (directory / names[0]).write_text(limit + "\n")
    (directory / names[1]).write_text(f"{used}\n")
    (directory / "memory.stat").write_text(stat_text)


def test_memory_left_is_the_tightest_limit_above_the_process(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/pod/box\n")
    group(tmp_path / "pod" / "box", "max", 10, "inactive_file 0\n", 2)
    group(tmp_path / "pod", "1000", 700, "inactive_file 50\nactive_file 5\nshmem 600\n", 2)
    assert 355 == memory_free(own, tmp_path)


def test_memory_left_is_read_from_version_1_groups_too(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/\n4:cpu,memory:/a\n0::/\n")
    stat_text = "total_inactive_file 7\ntotal_active_file 0\n"
    group(tmp_path / "memory" / "a", "500", 600, stat_text, 1)
    assert 0 == memory_free(own, tmp_path)


def test_memory_left_in_a_container_is_read_from_the_top_of_its_mount(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/../../not/visible/here\n")
    group(tmp_path, "1000", 400, "inactive_file 0\n", 2)
    assert 600 == memory_free(own, tmp_path)


def test_memory_left_without_groups_is_the_machines(tmp_path: Path) -> None:
    assert memory_free(tmp_path / "missing", tmp_path) > 1 << 20
