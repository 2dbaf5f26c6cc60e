"""The launcher reads the trainers' records while they are written."""

from __future__ import annotations

from pathlib import Path

import msgspec

from milepost.demo.records import RecordReader, RecordWriter, Stepped


def test_a_line_of_records_that_is_not_complete_yet_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    reader = RecordReader(path)
    assert reader.refresh() == []
    first, second = Stepped(1, 2.5, 0.0, 1.0), Stepped(2, 2.25, 1.0, 2.0)
    RecordWriter(path).write(first)
    line = msgspec.json.encode(second) + b"\n"
    with path.open("ab", buffering=0) as file:
        file.write(line[:10])
        assert reader.refresh() == [first]
        file.write(line[10:])
    assert reader.refresh() == [first, second]
