"""What the nodes have written of a save, as the coordinator's planner finds it on storage.

Reads the manifest fragments and opens every data file, which proves that the nodes share the root.
Writes nothing. Must not import torch.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from isal import isal_zlib

from milepost.errors import MilepostError
from milepost.format import manifest
from milepost.storage.refusals import storage_error
from milepost.wire.messages import Cause, WrittenFile
from milepostd.planner.frames import IndexReady, IndexWanted
from milepostd.planner.refusals import UnseenFile, fault_of_ours


def read_fragments(directory: Path, request: IndexWanted) -> dict[int, manifest.FragmentFile]:
    """Return every rank's file. Each data file was seen at its full length.

    Raises:
        UnseenFile: a fragment or a data file is missing or too short.
        RequestRefused: the fragments contradict each other or the request.
        CorruptCheckpoint, StorageError: a fragment cannot be read.
    """
    files: dict[int, manifest.FragmentFile] = {}
    for name in request.fragments:
        if not name.startswith(manifest.FRAGMENT_PREFIX) or "/" in name:
            raise fault_of_ours(f"{name!r} is not a name of a manifest fragment")
        node = name.removeprefix(manifest.FRAGMENT_PREFIX)
        path = directory / name
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise _unseen(node, path) from error
        except OSError as error:
            raise storage_error("read", path, error) from error
        fragment = manifest.decode_fragment(data)
        if fragment.save_id != request.save.save_id:
            text = f"{path} is of save {fragment.save_id}, not {request.save.save_id}"
            raise fault_of_ours(text, node)
        for file in fragment.files:
            if file.rank in files:
                raise fault_of_ours(f"two fragments name a file of rank {file.rank}", node)
            if file.file and not re.fullmatch(rf"__{file.rank}_\d+\.distcp", file.file):
                text = f"{path} names {file.file!r} as a file of rank {file.rank}"
                raise fault_of_ours(text, node)
            if file.file:
                _check_length(directory / file.file, file.file_bytes, node)
            files[file.rank] = file
    told = {
        file.rank: WrittenFile(file.rank, file.layout_id, file.file, file.file_bytes)
        for file in files.values()
    }
    wanted = {file.rank: file for file in request.files}
    if told != wanted:
        ranks = sorted(r for r in told.keys() | wanted.keys() if told.get(r) != wanted.get(r))
        raise fault_of_ours(f"fragments and reports differ about the files of ranks {ranks}")
    return files


def built_before(directory: Path, request: IndexWanted) -> IndexReady | None:
    """Return the index that an earlier life of the coordinator wrote for this very save.

    None if there is none, or if it or one of its data files is not whole.
    """
    try:
        described = manifest.read_manifest(directory)
        pickled = (directory / manifest.METADATA_NAME).read_bytes()
        if (
            described is None
            or described.save_id != request.save.save_id
            or described.world != len(request.files)
            or described.index_crc != isal_zlib.crc32(pickled)
        ):
            return None
        for name, length in zip(described.files, described.file_bytes, strict=True):
            _check_length(directory / name, length, "")
        own_bytes = (directory / manifest.MANIFEST_NAME).stat().st_size + len(pickled)
    except (OSError, MilepostError, UnseenFile):
        return None
    return IndexReady(call=request.call, checkpoint_bytes=sum(described.file_bytes) + own_bytes)


def _check_length(path: Path, length: int, node: str) -> None:
    # Opened, not only looked up: on open a networked file system asks its server again.
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise _unseen(node, path) from error
    except OSError as error:
        raise storage_error("open", path, error) from error
    try:
        seen = os.fstat(file).st_size
    finally:
        os.close(file)
    if seen != length:
        raise UnseenFile(
            Cause(
                "corrupt",
                f"{path} has {seen} bytes, node {node} wrote {length}",
                "something else writes below the root, or the file system is damaged",
                node=node,
            )
        )


def _unseen(node: str, path: Path) -> UnseenFile:
    return UnseenFile(
        Cause(
            "root-not-shared",
            f"node {node} has written {path}, which this node cannot see",
            "the root must be one file system that all nodes mount at the same path",
            node=node,
        )
    )
