"""Writes one rank's staged image to its data file, by direct I/O from shared memory.

Runs in threads. Knows the arena, the layout table and the storage functions, nothing of sessions or
messages. The daemon puts the CRCs into the image, not the trainer, so that training pays for one
copy only. The GIL is free during large reads and writes. What a client wrote into the arena is
checked before it is used.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from isal import isal_zlib

from milepost.errors import StorageError
from milepost.format.layout import PAGE_BYTES, align
from milepost.format.manifest import (
    FRAGMENT_PREFIX,
    Fragment,
    FragmentFile,
    encode_fragment,
    pack_crcs,
)
from milepost.memory.arena import Arena, SlotRecord
from milepost.storage.homes import Home
from milepost.storage.names import check_name
from milepost.wire.messages import SaveRef
from milepostd.executors.arenas import OpenArenas
from milepostd.executors.sealing import Containers, Sealing, invalid_arena
from milepostd.executors.throttle import Pace


def write_rank(
    home: Home,
    save: SaveRef,
    arena_path: str,
    slot: int,
    layout_id: str,
    on_bytes: Callable[[int], None],
    arenas: OpenArenas | None = None,
    pace: Pace | None = None,
) -> FragmentFile:
    """Write what a rank staged into the save's directory; return the file as the manifest describes
    it.

    The file is synced when this returns; its name is synced with the fragment (`write_fragment`).
    Each call makes a new file. A file that a broken call left stays beside it until the save is
    published or given up.

    Args:
        home: where the save is published.
        save: which save.
        arena_path: the rank's arena.
        slot: index of the slot that holds the image.
        layout_id: the layout under which it was staged.
        on_bytes: called on this thread after each block, with its number of bytes; if it raises,
            the write ends.
        arenas: keeps the arena mapped; without it, the arena is mapped for this call only.
        pace: when each block may be written; without it, as fast as the device takes it.

    Raises:
        Rejected: "arena-invalid" if the slot does not hold this save under this layout, or was
            staged anew meanwhile.
        StorageError: the write failed; no file of this call remains.
        SaveFailed, Rejected: "aborted", "already-committed": the save has ended; "timeout": it
            cannot be written in time at this pace.
    """
    pace = pace or Pace()
    pace.check()
    arena = Arena.open(Path(arena_path)) if arenas is None else arenas.get(arena_path)
    try:
        containers = Containers(arena) if arenas is None else arenas.containers(arena)
        return _write(home, save, arena, containers, slot, layout_id, on_bytes, pace)
    finally:
        if arenas is None:
            arena.close()


def _write(
    home: Home,
    save: SaveRef,
    arena: Arena,
    containers: Containers,
    slot: int,
    layout_id: str,
    on_bytes: Callable[[int], None],
    pace: Pace,
) -> FragmentFile:
    if not 0 <= slot < len(arena.slots):
        raise invalid_arena(arena, f"no slot {slot}")
    staged = arena.slots[slot]
    record = staged.record()
    _check_record(arena, record, save, layout_id)
    if containers.end > record.image_bytes:
        raise invalid_arena(arena, f"layout names bytes outside the {record.image_bytes} staged")
    if not record.image_bytes:
        return FragmentFile(
            rank=record.rank,
            layout_id=layout_id,
            file="",
            file_bytes=0,
            crcs=(),
            objects=(),
            digests=record.digests,
        )
    file_bytes = align(record.image_bytes, PAGE_BYTES)
    with staged.image[:file_bytes] as image:
        objects = tuple(
            (item, offset, length, isal_zlib.crc32(image[offset : offset + length]))
            for item, offset, length in record.objects
        )
        # Clear what an earlier, longer image left in the last page.
        image[record.image_bytes :] = bytes(file_bytes - record.image_bytes)
        home.check_shared(save.job)
        directory = home.open_save(save)
        with Sealing(containers, image) as sealing:

            def before_block(count: int, left: int) -> None:
                pace.await_turn(count, left)
                sealing.await_sealed(file_bytes - left + count)

            name = _write_under_free_name(
                home, directory, record.rank, image, on_bytes, before_block, pace.block_bytes
            )
            sums = sealing.checksums()
    if staged.record() != record:
        raise invalid_arena(arena, f"slot {slot} was staged anew while it was written")
    return FragmentFile(
        rank=record.rank,
        layout_id=layout_id,
        file=name,
        file_bytes=file_bytes,
        crcs=tuple(sums.containers),
        stretches=pack_crcs(sums.stretches),
        objects=objects,
        digests=record.digests,
    )


def write_fragment(home: Home, save: SaveRef, node_id: str, files: Sequence[FragmentFile]) -> str:
    """Write this node's manifest fragment and return its file name. The fragment and all names in
    the save's directory are durable when this returns.

    Makes the directory if the node's ranks had nothing to write. Raises as `write_rank` does.
    """
    home.check_shared(save.job)
    name = FRAGMENT_PREFIX + check_name(node_id)
    fragment = Fragment(node_id=node_id, save_id=save.save_id, files=tuple(files))
    home.write_file(home.open_save(save) / name, encode_fragment(fragment))
    return name


def _check_record(arena: Arena, record: SlotRecord, save: SaveRef, layout_id: str) -> None:
    found = (record.job, record.save_id, record.step, record.name, record.layout_id)
    if found != (save.job, save.save_id, save.step, save.name, layout_id):
        raise invalid_arena(
            arena,
            f"holds save {record.save_id} of step {record.step} under layout {record.layout_id},"
            f" not save {save.save_id} of step {save.step} under {layout_id}",
        )
    if arena.layout_id != layout_id:
        raise invalid_arena(arena, f"was made for layout {arena.layout_id}, not {layout_id}")


def _write_under_free_name(
    home: Home,
    directory: Path,
    rank: int,
    image: memoryview,
    on_bytes: Callable[[int], None],
    before_block: Callable[[int, int], None],
    block_bytes: int,
) -> str:
    """Write the image under the rank's first free name, and return the name.

    Names are taken by files of earlier calls, whose writers may still hang. They are tried one by
    one: to list the directory is slow, because thousands of ranks write into it.
    """
    for number in count():
        name = f"__{rank}_{number}.distcp"
        if home.is_taken(name):
            continue
        try:
            home.write_image(
                directory / name,
                image,
                on_block=on_bytes,
                before_block=before_block,
                block_bytes=block_bytes,
            )
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
        else:
            return name
    raise AssertionError("numbers do not end")
