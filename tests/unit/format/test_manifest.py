"""The manifest and its fragments: read back as written, by older and newer readers too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgpack
import msgspec
import pytest

from milepost.errors import CorruptCheckpoint
from milepost.format.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    STRETCH_BYTES,
    Fragment,
    FragmentFile,
    Manifest,
    decode_fragment,
    decode_manifest,
    encode_fragment,
    encode_manifest,
    pack_crcs,
    read_manifest,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FRAGMENT = Fragment(
    node_id="node-a",
    save_id="1-7",
    files=(
        FragmentFile(
            rank=3,
            layout_id="1f",
            file="__3_0.distcp",
            file_bytes=1 << 40,
            crcs=(0, 0xFFFFFFFF),
            objects=((2, 4096, 1261, 0x12345678),),
            stretches=pack_crcs([7, 0xFFFFFFFF]),
        ),
        FragmentFile(rank=4, layout_id="2e", file="", file_bytes=0, crcs=(), objects=()),
    ),
)

MANIFEST = Manifest(
    job="run", save_id="1-7", step=7, world=5, torch_version="2.13.0", milepost_version="0.1.0",
    committed_at_ms=1_750_000_000_000, nesting=b"\x93\xff",
    files=("__3_0.distcp",), file_bytes=(1 << 40,),
    keys=("w", "épöch"), files_of=(0, 0), offsets=(0, 4096), lengths=(1577, 1261),
    crcs=(0xFFFFFFFF, 0), stretch_bytes=STRETCH_BYTES, stretches=(pack_crcs([7, 0xFFFFFFFF]),),
)  # fmt: skip


def test_a_fragment_reads_back_as_written() -> None:
    assert decode_fragment(encode_fragment(FRAGMENT)) == FRAGMENT


def test_a_manifest_reads_back_as_written(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(encode_manifest(MANIFEST))
    assert read_manifest(tmp_path) == MANIFEST


def test_a_checkpoint_that_stock_torch_wrote_has_no_manifest(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


def test_a_manifest_with_unknown_fields_and_without_known_ones_is_read() -> None:
    written = msgpack.packb({"format": FORMAT_VERSION + 1, "step": 7, "colour": "blue"})
    assert Manifest(format=FORMAT_VERSION + 1, step=7) == decode_manifest(written)


def test_every_flipped_byte_of_a_manifest_is_found() -> None:
    written = encode_manifest(MANIFEST)
    for at in range(len(written)):
        damaged = bytearray(written)
        damaged[at] ^= 0x10
        with pytest.raises(CorruptCheckpoint, match="malformed manifest"):
            decode_manifest(bytes(damaged))


def test_a_manifest_from_before_it_had_a_checksum_is_read() -> None:
    fields = msgspec.to_builtins(MANIFEST, builtin_types=(bytes,))
    del fields["stretches"], fields["stretch_bytes"]
    before = msgspec.structs.replace(MANIFEST, stretches=(), stretch_bytes=0)
    assert decode_manifest(msgpack.packb(fields)) == before


@pytest.mark.parametrize("decode", [decode_fragment, decode_manifest])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode_manifest(MANIFEST)[:-1],
        encode_fragment(FRAGMENT) + b"\0",
        msgpack.packb(7),
        msgpack.packb({"save_id": 7, "node_id": "a", "files": []}),
    ],
)
def test_damage_is_reported_as_corrupt(decode: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(CorruptCheckpoint, match="malformed manifest") as caught:
        decode(data)
    assert caught.value.code == "corrupt"


def test_an_unreadable_manifest_is_not_taken_for_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).mkdir()
    with pytest.raises(IsADirectoryError):
        read_manifest(tmp_path)
