"""Files of other formats as sources: torch.save files, safetensors, and sharded directories of
either, as Hugging Face lays them out.
"""

from __future__ import annotations

import ctypes
import json
import mmap
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import torch
from isal import isal_zlib

from milepost.dcp_format.archive import Archive, ArchiveError
from milepost.errors import CorruptCheckpoint, LoadFailed, UsageError, listed
from milepost.exchange.bands import bands
from milepost.exchange.blobs import DataFiles, memory_of
from milepost.exchange.opening import open_archive
from milepost.exchange.safetensors import Stored, read_header
from milepost.exchange.source import BLOCK_BYTES, Source, TensorForm
from milepost.state.flattening import flatten
from milepost.state.tensors import plain_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

INDEX_BYTES_MAX: Final = 256 << 20
"""Largest index of a sharded directory; one of 100,000 tensors has 10 MB."""

FOLDER_FILES: Final = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
"""The files to look for in a directory, in this order. It is the order of transformers."""

_MADV_PAGEOUT: Final = 21
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def open_file(path: Path, *, allow_pickle: bool, on_checked: Callable[[int], None]) -> Source:
    """Return a file, or a directory of files, as a source; the caller closes it.

    Args:
        path: a file of torch.save or safetensors, the index of a sharded directory, or a directory
            that holds one of `FOLDER_FILES` or a single *.safetensors.
        on_checked: called with the number of bytes that were compared with their checksums, or that
            have none.

    Raises:
        UsageError: there is no such file, or it has neither format.
        LoadFailed: it needs `allow_pickle`, or cannot be read.
        CorruptCheckpoint: it is damaged.
    """
    try:
        file = _file_in(path)
        if file.suffix == ".json":
            return _Sharded(file, allow_pickle, on_checked)
        return _open_one(file, allow_pickle, on_checked)
    except OSError as error:
        raise _unreadable(path, error) from error


def measure(path: Path) -> int:
    """Return how many bytes `open_file` checks before it returns; 0 if that is not known."""
    try:
        file = _file_in(path)
        files = _shards(file, _weight_map(file)) if file.suffix == ".json" else [file]
        return sum(each.stat().st_size for each in files if not _is_safetensors(each))
    except (OSError, UsageError, CorruptCheckpoint):
        return 0


def _file_in(path: Path) -> Path:
    """Return the path, or, for a directory, the file to begin with. Raises UsageError."""
    if not path.exists():
        raise UsageError("usage", f"{path}: no such file")
    if not path.is_dir():
        return path
    for name in FOLDER_FILES:
        if (path / name).is_file():
            return path / name
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    raise UsageError(
        "usage",
        f"{path} holds none of {listed(FOLDER_FILES)}"
        + (f", and {len(found)} other safetensors files" if found else ""),
        "name the file",
    )


def _open_one(file: Path, allow_pickle: bool, on_checked: Callable[[int], None]) -> Source:
    if not file.is_file():
        raise UsageError("usage", f"{file}: not a file")
    with file.open("rb") as stream:
        start = stream.read(16)
    # A pickle of torch before 1.6, an archive of torch since then, or a header of JSON.
    if start.startswith((b"PK\x03\x04", b"\x80")) and not _is_safetensors(file):
        return _torch_file(file, allow_pickle, on_checked)
    if _is_safetensors(file):
        return _Safetensors(file)
    raise UsageError(
        "usage", f"{file} is neither a torch.save file nor safetensors", "name another file"
    )


def _is_safetensors(file: Path) -> bool:
    with file.open("rb") as stream:
        start = stream.read(9)
    return file.suffix == ".safetensors" or (len(start) == 9 and start[8:] == b"{")


def _unreadable(path: Path, error: OSError) -> LoadFailed:
    code = "permission" if isinstance(error, PermissionError) else "io-error"
    return LoadFailed(code, f"{path} cannot be read: {(error.strerror or str(error)).lower()}")


# --- safetensors --------------------------------------------------------------------------------


class _Safetensors(Source):
    """One safetensors file. It has no checksums, so only its form can be checked."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._name = file.name
        self._files = DataFiles(file.parent)
        self._stored, metadata = read_header(file)
        # A tied tensor is written once; the metadata names the other keys.
        for alias, kept in metadata.items():
            if alias != "format" and kept in self._stored and alias not in self._stored:
                self._stored[alias] = self._stored[kept]
        self.tensors = {key: stored.form for key, stored in self._stored.items()}
        self.paths = {key: (key,) for key in self._stored}
        self.unchecked = list(self._stored)
        self._block = mmap.mmap(-1, BLOCK_BYTES)

    def blocks(self, key: str, block_bytes: int = BLOCK_BYTES) -> Iterator[memoryview]:
        """See `Source`."""
        stored: Stored = self._stored[key]
        block = memoryview(self._block)
        for at in range(0, stored.form.bytes, block_bytes):
            part = block[: min(block_bytes, stored.form.bytes - at)]
            self._files.read_into(self._name, stored.begin + at, part)
            yield part

    def value(self, key: str) -> Any:
        """See `Source`; there are no objects."""
        raise KeyError(key)

    def close(self) -> None:
        """Close the file."""
        self._files.close()


# --- torch.save ---------------------------------------------------------------------------------


class StateSource(Source):
    """A nested state in memory, or mapped from a file, as a source."""

    def __init__(self, state: Mapping[Any, Any]) -> None:
        """Flatten the state as DCP does. Raises UsageError for keys that collide."""
        super().__init__()
        flat, paths = flatten(state)
        self.paths, self.nesting = paths, paths.nesting()
        self._values: dict[str, Any] = {}
        for key, value in flat.items():
            if not isinstance(value, torch.Tensor):
                self.objects.append(key)
                self._values[key] = value
                continue
            try:
                tensor = plain_tensor(value)
            except ValueError as error:
                self.unreadable[key] = str(error)
                continue
            self.tensors[key] = TensorForm(
                tensor.dtype, tuple(tensor.size()), bool(value.requires_grad)
            )
            self._values[key] = tensor.detach()

    def blocks(self, key: str, block_bytes: int = BLOCK_BYTES) -> Iterator[memoryview]:
        """See `Source`. If the tensors are mapped from a file, drops yielded bytes from memory."""
        tensor: torch.Tensor = self._values[key]
        form = self.tensors[key]
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            whole = memory_of(tensor)
            for at in range(0, len(whole), block_bytes):
                yield whole[at : at + block_bytes]
                self._drop(tensor.data_ptr() + at, min(block_bytes, len(whole) - at))
            return
        for offsets, sizes in bands(form.size, form.dtype.itemsize, block_bytes):
            part = tensor
            for dim, (at, length) in enumerate(zip(offsets, sizes, strict=True)):
                part = part.narrow(dim, at, length)
            part = part.resolve_conj().resolve_neg().contiguous()
            yield memory_of(part)

    def _drop(self, address: int, length: int) -> None:
        """Give back memory that was read, if it is mapped from a file."""

    def tensor(self, key: str) -> torch.Tensor:
        """Return a tensor itself."""
        tensor: torch.Tensor = self._values[key]
        return tensor

    def value(self, key: str) -> Any:
        """See `Source`."""
        return self._values[key]

    def close(self) -> None:
        """Let go of the state."""
        self._values.clear()


class _MappedState(StateSource):
    """A state whose tensors are mapped from a file."""

    def _drop(self, address: int, length: int) -> None:
        page = mmap.PAGESIZE
        low, high = -(-address // page) * page, (address + length) // page * page
        if low < high:
            # This loses nothing, since the file still has the bytes. A kernel that does not know
            # the call (before 5.4) reclaims the pages once memory is short.
            _LIBC.madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), _MADV_PAGEOUT)


def _torch_file(file: Path, allow_pickle: bool, on_checked: Callable[[int], None]) -> Source:
    """Return what torch.save wrote, its tensors mapped; a file of torch before 1.6 is read whole.

    torch never looks at the checksums that it writes, so they are compared here first.
    """
    with file.open("rb") as stream:
        is_archive = stream.read(2) == b"PK"
    damaged: dict[str, tuple[int, int]] = {}
    is_checked = False
    if is_archive:
        is_checked, damaged = _check_archive(file, on_checked)
        for record in damaged:
            if "/data/" not in record:
                raise _damaged(file, record, [])
    state = open_archive(file, allow_pickle=allow_pickle, is_mapped=is_archive)
    if not isinstance(state, Mapping):
        raise UsageError(
            "usage",
            f"{file} holds a {type(state).__name__}, not a dict of tensors",
            "save model.state_dict() instead" if isinstance(state, torch.nn.Module) else "",
        )
    source = _MappedState(state) if is_archive else StateSource(state)
    for record, (size, crc) in damaged.items():
        keys = [key for key in source.tensors if _is_in(source.tensor(key), size, crc)]
        raise _damaged(file, record, keys)
    if not is_checked:
        source.unchecked += source.tensors
    return source


def _is_in(tensor: torch.Tensor, size: int, crc: int) -> bool:
    """Whether a tensor's elements are in the record with this size and checksum."""
    storage = tensor.untyped_storage()
    if storage.nbytes() != size:
        return False
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    return isal_zlib.crc32(memory_of(whole)) == crc


def _damaged(file: Path, record: str, keys: Sequence[str]) -> CorruptCheckpoint:
    named = f" ({listed([repr(key) for key in keys])})" if keys else ""
    return CorruptCheckpoint(
        "corrupt",
        f"{file}: the CRC-32 of its record {record}{named} does not match",
        "get the file again",
    )


def _check_archive(
    file: Path, on_checked: Callable[[int], None]
) -> tuple[bool, dict[str, tuple[int, int]]]:
    """Compare the checksums of an archive. Return whether it has any, and, for each damaged record,
    its size and the checksum of its bytes.
    """
    damaged: dict[str, tuple[int, int]] = {}
    files = DataFiles(file.parent)
    try:
        archive = Archive(
            lambda at, length: files.read(file.name, at, length), files.length(file.name)
        )
        block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        for name in archive.names() if archive.has_crcs else ():
            at, length, written = archive.entry(name)
            crc, end = 0, at + length
            while at < end:
                part = block[: min(BLOCK_BYTES, end - at)]
                files.read_into(file.name, at, part)
                crc = isal_zlib.crc32(part, crc)
                at += len(part)
                on_checked(len(part))
            if crc != written:
                damaged[name] = (length, crc)
        return archive.has_crcs, damaged
    except ArchiveError as error:
        raise CorruptCheckpoint(
            "corrupt", f"{file} is not a whole torch.save file: {error}"
        ) from error
    finally:
        files.close()


# --- sharded directories ------------------------------------------------------------------------


def _weight_map(index: Path) -> dict[str, str]:
    """Return which file holds which tensor. Raises CorruptCheckpoint, OSError."""
    if index.stat().st_size > INDEX_BYTES_MAX:
        raise CorruptCheckpoint("corrupt", f"{index} is too large for an index")
    try:
        found = json.loads(index.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint("corrupt", f"{index} is no JSON: {error}") from error
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError("usage", f"{index} is not an index: it has no weight_map")
    for name in weight_map.values():
        path = PurePosixPath(str(name))
        if not isinstance(name, str) or path.is_absolute() or ".." in path.parts or not path.parts:
            raise CorruptCheckpoint("corrupt", f"{index} names the file {name!r}, outside its own")
    return weight_map


def _shards(index: Path, weight_map: Mapping[str, str]) -> list[Path]:
    files = [index.parent / name for name in dict.fromkeys(weight_map.values())]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CorruptCheckpoint(
            "corrupt", f"{index} names files that are not there: {listed(absent)}"
        )
    return files


class _Sharded(Source):
    """The files that an index names, as one source."""

    def __init__(self, index: Path, allow_pickle: bool, on_checked: Callable[[int], None]) -> None:
        super().__init__()
        weight_map = _weight_map(index)
        self._source_of: dict[str, Source] = {}
        self._sources: list[Source] = []
        paths: dict[str, tuple[Any, ...]] = {}
        for file in _shards(index, weight_map):
            source = _open_one(file, allow_pickle, on_checked)
            self._sources.append(source)
            for key in (*source.tensors, *source.objects, *source.unreadable):
                if key in self._source_of:
                    raise CorruptCheckpoint(
                        "corrupt",
                        f"{index}: two of its files hold {key!r}, one of them {file.name}",
                    )
                self._source_of[key] = source
                paths[key] = source.paths[key]
            self.tensors |= source.tensors
            self.objects += source.objects
            self.unreadable |= source.unreadable
            self.unchecked += source.unchecked
        self.paths = paths
        absent = [repr(key) for key in weight_map if key not in self._source_of]
        if absent:
            raise CorruptCheckpoint(
                "corrupt", f"{index} names tensors that its files do not hold: {listed(absent)}"
            )

    def blocks(self, key: str, block_bytes: int = BLOCK_BYTES) -> Iterator[memoryview]:
        """See `Source`."""
        return self._source_of[key].blocks(key, block_bytes)

    def value(self, key: str) -> Any:
        """See `Source`."""
        return self._source_of[key].value(key)

    def close(self) -> None:
        """Close all files."""
        for source in self._sources:
            source.close()
