"""Commands run in this process, as the console script runs them."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from milepost import cli


class Commands:
    """What the last command has printed is in `out` and `err`."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self.out = ""
        self.err = ""

    def __call__(self, *arguments: object) -> int:
        self._monkeypatch.setattr(sys, "argv", ["milepost", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        self.out, self.err = self._capsys.readouterr()
        code = caught.value.code
        assert isinstance(code, int)
        return code

    def json(self, *arguments: object) -> tuple[int, Any]:
        """Return exit code and object of a command with `--json`."""
        code = self(*arguments, "--json")
        return code, json.loads(self.out)
