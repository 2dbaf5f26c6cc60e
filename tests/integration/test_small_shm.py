"""File systems that are too small or lack a function: the error has the numbers, and there is no
SIGBUS and no half-written file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
    ),
]


def in_own_file_system(mount_point: Path, mount: str, script: str) -> list[str]:
    """Run the script with a file system on the mount point (its argument) that it alone sees."""
    shell = f'mount -t {mount} none "$1" && exec "$2" -c "$3" "$1"'
    run = subprocess.run(
        ["unshare", "-rm", "sh", "-c", shell, "sh", mount_point, sys.executable, script],
        capture_output=True,
        text=True,
    )
    if run.returncode and run.stderr.startswith("unshare:"):
        pytest.skip("no namespaces here")
    assert (0, "") == (run.returncode, run.stderr)
    return run.stdout.splitlines()


ARENA = """
import os, sys
from pathlib import Path
from milepost.memory import pages
from milepost.memory.arena import Arena, arena_dir, arena_path
from milepost.errors import Rejected

def create(generation, image_bytes):
    path = arena_path("job", 1, 0, generation)
    return Arena.create(path, layout_id="l", table=b"", slots=2, image_bytes=image_bytes,
                        record_bytes=4096)

if sys.argv[1] != "/dev/shm":
    os.environ["MILEPOST_SHM_DIR"] = sys.argv[1]
assert str(arena_dir()) == sys.argv[1]
one = create(0, 1 << 20)
one.slots[1].image[:] = b"x" * (1 << 20)
for check in (pages.check_room, lambda directory, wanted: None):
    pages.check_room = check
    try:
        create(1, 16 << 20)
    except Rejected as error:
        print(error.code)
        print(error.message)
        print(error.hint)
    print(len(os.listdir(arena_dir())))
assert bytes(one.slots[1].image) == b"x" * (1 << 20)
one.close()
one.unlink()
two = create(2, 3 << 20)
two.fault_in()
print(two.nbytes)
"""


@pytest.mark.parametrize("place", ["default", "setting"])
def test_an_image_that_does_not_fit_shared_memory_is_refused_before_a_page_is_touched(
    tmp_path: Path, place: str
) -> None:
    directory = Path("/dev/shm") if place == "default" else tmp_path
    lines = in_own_file_system(directory, "tmpfs -o size=8m", ARENA)
    wanted = 2 * (16 << 20) + 2 * 4096 + 4096
    free = (8 << 20) - 2 * (1 << 20) - 2 * 4096 - 4096
    # First by looking ahead; then as if another rank had taken the space in between.
    for code, message, hint, left in (lines[:4], lines[4:8]):
        assert "shm-too-small" == code
        assert message == (
            f"an arena in {directory} wants {wanted} bytes,"
            f" {free} bytes of the file system are free"
        )
        assert "MILEPOST_SHM_DIR" in hint
        assert "--shm-size" in hint
        assert "1" == left
    assert [str(2 * (3 << 20) + 3 * 4096)] == lines[8:]


HUGE = """
import os, sys
from pathlib import Path
from milepost.memory import pages
from milepost.memory.arena import Arena
from milepost.errors import Rejected

os.environ["MILEPOST_SHM_DIR"] = sys.argv[1]

def create(name, image_bytes):
    return Arena.create(Path(sys.argv[1]) / name, layout_id="l", table=b"", slots=2,
                        image_bytes=image_bytes, record_bytes=4096)

def mapped(arena, field):
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.endswith(str(arena.path)))
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))

def used():
    status = os.statvfs(sys.argv[1])
    return (status.f_blocks - status.f_bfree) * status.f_frsize

one = create("one", 8 << 20)
print(used() - one.nbytes < 2 << 20)
one.fault_in()
print(mapped(one, "Rss") == one.nbytes, mapped(one, "ShmemPmdMapped") >> 20)
print(not any(bytes(slot.image).strip(bytes(1)) for slot in one.slots))
one.slots[1].image[:] = b"x" * (8 << 20)
before, pages.check_room = used(), lambda directory, wanted: None
try:
    create("two", 40 << 20)
except Rejected as error:
    print(error.code, f" {(64 << 20) - before} bytes of the file system are free" in error.message)
print(used() == before, bytes(one.slots[1].image) == b"x" * (8 << 20))
one.close()
one.unlink()
print(used())
"""


@pytest.mark.parametrize(
    ("option", "mib"), [("huge=never", 0), ("huge=advise", 16), ("huge=always", 16)]
)
def test_huge_pages_are_taken_where_the_mount_gives_them(
    tmp_path: Path, option: str, mib: int
) -> None:
    lines = in_own_file_system(tmp_path, f"tmpfs -o size=64m,{option}", HUGE)
    assert lines == [
        "True", f"True {mib}", "True", "shm-too-small True", "True True", "0",
    ]  # fmt: skip


INTERRUPTED = """
import os, sys, threading
from pathlib import Path
from milepost.memory import pages
from milepost.memory.arena import Arena

def create(name):
    return Arena.create(Path(sys.argv[1]) / name, layout_id="l", table=b"", slots=2,
                        image_bytes=8 << 20, record_bytes=4096)

populate, calls, is_interrupted = pages._populate, [], threading.Event()

def interrupted(address, length):
    calls.append(1)
    if threading.current_thread() is threading.main_thread():
        is_interrupted.set()
        raise KeyboardInterrupt
    # The others must not be through before.
    assert is_interrupted.wait(20)
    return populate(address, length)

pages._FAULT_PIECE_BYTES, pages._populate = 1 << 20, interrupted
os.sched_getaffinity = lambda pid: range(8)
try:
    create("one")
except BaseException as error:
    print(type(error).__name__, len(calls) < 16, os.listdir(sys.argv[1]), threading.active_count())

# Other mount points of this machine, whose names may be any bytes.
pages._populate = populate
for name in (b"lat\\xe4n", b"a\\x0cb\\x0cc", b"two words"):
    there = os.path.join(os.fsencode(sys.argv[1]), name)
    os.mkdir(there)
    os.spawnlp(os.P_WAIT, "mount", "mount", "-t", "tmpfs", "none", there)
assert b"xe4n" not in Path("/proc/self/mountinfo").read_bytes()
assert b"lat\\xe4n" in Path("/proc/self/mountinfo").read_bytes()
print(create("two").nbytes >> 20, pages._may_be_huge(Path(sys.argv[1])))
"""


def test_an_interrupt_while_huge_pages_are_taken_goes_through_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    lines = in_own_file_system(tmp_path, "tmpfs -o size=64m,huge=advise", INTERRUPTED)
    assert lines == ["KeyboardInterrupt True [] 1", "16 True"]


TARGET = """
import mmap, os, sys
from pathlib import Path
from milepost.storage import blocks
from milepost.errors import StorageError
from milepost.format.manifest import Manifest, encode_manifest
from milepost.wire.messages import SaveRef
from milepost.storage.root import Root

MB = 1 << 20
image = memoryview(mmap.mmap(-1, 12 * MB))
image[:] = bytes(range(256)) * (12 * MB // 256)
root = Root(sys.argv[1])
root.prepare()

def save(count, data):
    ref = SaveRef("job", f"1-{count}", count, f"step_{count}")
    directory = root.open_save(ref)
    try:
        counts = []
        root.write_image(directory / "__0_0.distcp", data, on_block=counts.append)
    except StorageError as error:
        print(error.code, error.message.replace(sys.argv[1], "ROOT"))
        outcome = root.give_up(ref)
        left = os.listdir(directory.with_name(directory.name + ".aborted"))
        print(sum(counts) > 0, outcome, left)
        root.discard(ref)
        return
    manifest = Manifest(save_id=ref.save_id, step=count)
    root.write_file(directory / ".milepost", encode_manifest(manifest))
    root.write_file(directory / ".metadata", b"index")
    root.publish(ref)
    assert (root.path / ref.name / "__0_0.distcp").read_bytes() == data
    print("committed", ref.name)

save(1, image)
save(2, image)
blocks.reserve = lambda file, length: None
save(3, image)
print([each.name for each in root.checkpoints()], len(root.partials()))
assert (root.path / "step_1" / "__0_0.distcp").read_bytes() == image
root.remove_checkpoint("step_1")
save(4, image)
"""


def test_a_full_target_is_an_error_with_the_numbers_and_the_next_save_works_when_there_is_space(
    tmp_path: Path,
) -> None:
    wanted = 12 << 20
    expected = "no-space write ROOT/.partial/step_{0}.1-{0}/__0_0.distcp: no space left on device"
    assert [
        "committed step_1",
        f"{expected.format(2)} ({wanted} bytes wanted)",
        "False aborted []",
        f"{expected.format(3)} ({wanted} bytes wanted)",
        "True aborted []",
        "['step_1'] 0",
        "committed step_4",
    ] == in_own_file_system(tmp_path, "tmpfs -o size=16m", TARGET)


REFUSING = """
import errno, fcntl, mmap, os, sys
from milepost.wire.messages import SaveRef
from milepost.storage.root import Root

root = Root(sys.argv[1])
root.prepare()
path = root.open_save(SaveRef("job", "1-1", 1, "step_1")) / "f"
probe = os.open(root.path / "probe", os.O_WRONLY | os.O_CREAT)
try:
    fcntl.fcntl(probe, fcntl.F_SETFL, os.O_DIRECT)
except OSError as error:
    print(errno.errorcode[error.errno])
image = memoryview(mmap.mmap(-1, 20 << 20))
image[:] = bytes(range(256)) * ((20 << 20) // 256)
counts = []
root.write_image(path, image, on_block=counts.append)
print(sum(counts), path.read_bytes() == image)
"""


def test_an_image_is_written_even_without_direct_writes_and_fallocate(
    tmp_path: Path,
) -> None:
    refusal, *rest = in_own_file_system(tmp_path, "ramfs", REFUSING)
    assert "EINVAL" == refusal
    assert [f"{20 << 20} True"] == rest
