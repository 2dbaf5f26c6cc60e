"""Every block of code on a page for people runs in an environment that `pip install .` has made,
without the packages of the tests: each page in a folder and run directory of its own.

`python` blocks run as scripts (under the name their first line gives, `# train.py`, so that later
blocks can use them), `sh` blocks in bash, both in the order of the page. A block that must not run
says so, and why, in a comment above it: `<!-- not run: ... -->`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from milepost.link.embedded import is_running

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(
        f"docs/{name}.md"
        for name in ("architecture", "assumptions", "dcp", "errors", "format", "glossary",
                     "loading", "testing", "tools", "troubleshooting")
    ),
)  # fmt: skip
BLOCK_S = 90
_BLOCK = re.compile(
    r"(?P<skip><!-- not run: (?P<why>[^>]+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    language: str
    code: str
    why_not: str


def _blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [
        Block(match["language"], match["code"], match["why"] or "")
        for match in _BLOCK.finditer(text)
    ]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: a socket's must fit into 107 bytes. Its daemon ends with it."""
    made = Path(tempfile.mkdtemp(prefix="mp-"))
    (made / "run").mkdir(mode=0o700)
    (made / "work").mkdir()
    yield made
    run_dir = made / "run/milepost"
    if is_running(run_dir):
        os.kill(int((run_dir / "lock").read_text()), signal.SIGTERM)
        until_s = time.monotonic() + 20
        while is_running(run_dir) and time.monotonic() < until_s:
            time.sleep(0.02)
    shutil.rmtree(made, ignore_errors=True)


def _run(command: list[str], folder: Path, alone: Path) -> str:
    private = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MILEPOST", "PYTHON"))
    }
    private |= {
        "XDG_RUNTIME_DIR": str(folder / "run"),
        "PATH": f"{alone.parent}:{os.environ['PATH']}",
        "MILEPOSTD_LINGER_S": "60",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, cwd=folder / "work", env=private, timeout=BLOCK_S, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES)
def test_the_code_blocks_of_a_page_run(page: str, folder: Path, alone: Path) -> None:
    blocks = [block for block in _blocks(page) if block.language and not block.why_not]
    for number, block in enumerate(blocks):
        assert block.language in ("python", "sh"), f"{page} has a block of {block.language!r}"
        if block.language == "sh":
            printed = _run(["bash", "-euo", "pipefail", "-c", block.code], folder, alone)
            promised = re.findall(r"^torchrun .*#\s(.+)$", block.code, re.MULTILINE)
            assert promised == [line for line in printed.splitlines() if line in promised], printed
            continue
        named = re.match(r"# (\w+\.py)", block.code)
        script = folder / "work" / (named[1] if named else f"block{number}.py")
        script.write_text(block.code)
        if "torchrun" not in block.code.splitlines()[0]:
            _run([str(alone), script.name], folder, alone)


def test_the_readme_shows_saving_resuming_looking_and_the_daemon() -> None:
    code = "".join(block.code for block in _blocks("README.md") if not block.why_not)
    for shown in ("ck.save(", "ck.load(", "milepost verify", "milepost inspect", "milepostd --run"):
        assert shown in code
