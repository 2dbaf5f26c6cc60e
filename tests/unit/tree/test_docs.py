"""Pages say what the code says: error codes, messages, links, commands and files that are named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from docs.generate import api_page, save_machine_page
from docs.generate.protocol_page import page

from milepost.cli import app
from milepost.errors import CODES

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
    ]
)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_COMMAND = re.compile(r"(?:^|`|\$ )milepost ([a-z]+)\b", re.MULTILINE)
_SOURCE = re.compile(r"`((?:client|daemon|tests|deploy|docs)/[\w./@-]+)`")


def _sections(path: Path) -> dict[str, str]:
    """Return the text under each second-level heading."""
    parts = re.split(r"^## (.+)$", path.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_errors_page_has_a_section_for_each_code_in_the_order_of_the_code() -> None:
    assert list(CODES) == list(_sections(ROOT / "docs/errors.md"))


@pytest.mark.parametrize("code", CODES)
def test_a_section_of_the_errors_page_begins_with_the_meaning_of_its_code(code: str) -> None:
    said = " ".join(_sections(ROOT / "docs/errors.md")[code].split())
    meaning = CODES[code]
    assert said.startswith(f"{meaning[0].upper()}{meaning[1:]}. ")


@pytest.mark.parametrize("code", CODES)
def test_a_section_of_the_errors_page_quotes_a_text_and_says_what_to_do(code: str) -> None:
    _, *paragraphs = _sections(ROOT / "docs/errors.md")[code].strip().split("\n\n")
    quoted = [text for text in paragraphs if text.startswith("    ")]
    assert quoted or "Reserved" in paragraphs[0]
    assert len(quoted) < len(paragraphs)


def test_the_protocol_page_is_what_protocol_py_says() -> None:
    assert page() == (ROOT / "docs/protocol.md").read_text()


def test_the_page_of_the_python_interface_is_what_its_docstrings_say() -> None:
    assert api_page.page() == (ROOT / "docs/api.md").read_text()


def test_the_diagrams_of_a_save_are_drawn_from_its_tables() -> None:
    assert save_machine_page.page() == (ROOT / "docs/save-machine.md").read_text()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(path: Path) -> None:
    targets = [target for target in _LINK.findall(path.read_text()) if "://" not in target]
    assert [] == [target for target in targets if not (path.parent / target).exists()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_page_names_exist(path: Path) -> None:
    assert [] == [name for name in _SOURCE.findall(path.read_text()) if not (ROOT / name).exists()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_that_a_page_names_exist(path: Path) -> None:
    command = typer.main.get_command(app)
    known = set(getattr(command, "commands"))  # noqa: B009 - not on typer's own type
    assert set() == set(_COMMAND.findall(path.read_text())) - known


def _make_targets() -> Iterator[str]:
    for line in (ROOT / "Makefile").read_text().splitlines():
        if match := re.match(r"([a-z]+):", line):
            yield match[1]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_that_a_page_names_exist(path: Path) -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z]+)\b", path.read_text(), re.MULTILINE))
    assert set() == named - set(_make_targets())


def test_the_architecture_page_names_every_source_file_of_both_packages() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    sources = [
        *(ROOT / "client/milepost").rglob("*.py"),
        *(ROOT / "daemon/milepostd").rglob("*.py"),
    ]
    names = {path.stem for path in sources} - {"__init__", "__main__"}
    assert [] == [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)]
