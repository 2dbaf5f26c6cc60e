"""Whether an index describes whole tensors: the shards tile each, and a file holds each shard."""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from milepost.format.tiling import GAP, IndexProblem, check_tiling


def index_problems(metadata: Metadata) -> list[IndexProblem]:
    """Check that the shards of each tensor tile it, and that a file holds each shard and object."""
    problems = []
    # A MetadataIndex is its key and offset; a whole tensor may have been stored without an offset.
    held = {(index.fqn, index.offset) for index in metadata.storage_data}
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            if not any((key, offset) in held for offset in (None, ())):
                text = "no file holds the object"
                problems.append(IndexProblem(code=GAP, key=key, text=text))
            continue
        boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        problem = check_tiling(tuple(entry.size), boxes)
        if problem is not None:
            problems.append(IndexProblem(code=problem.code, key=key, text=problem.text))
        problems += _unheld(key, entry, held)
    return problems


def _unheld(
    key: str, entry: TensorStorageMetadata, held: set[tuple[str, object]]
) -> list[IndexProblem]:
    """Return the shards of a tensor that have no place in any file."""
    return [
        IndexProblem(
            code=GAP, key=key, text=f"no file holds the shard at {list(chunk.offsets)}"
        )
        for chunk in entry.chunks
        if (key, chunk.offsets) not in held
        and not (len(entry.chunks) == 1 and (key, None) in held)
    ]  # fmt: skip
