"""What the gate may try again: whole files, few of them, and never what a judge has found."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from xml.etree import ElementTree

import pytest
from tests.unit.tree.source_tree import TREE


@pytest.fixture(scope="module")
def flakes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flakes", TREE / ".ci" / "flakes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(*cases: tuple[str, str]) -> ElementTree.Element:
    """Return pytest's report of one passed test and of these: (file's name, what went wrong)."""
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite")
    ElementTree.SubElement(suite, "testcase", classname="tests.unit.test_x", name="test_a")
    for file, kind in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=file, name="test_b")
        ElementTree.SubElement(case, kind)
    return root


def test_the_files_of_failed_tests_are_run_again_whole(flakes: ModuleType) -> None:
    failed = results(("tests.faults.test_a", "failure"), ("tests.faults.test_a", "failure"))
    assert ("tests/faults/test_a.py",) == flakes.files_to_repeat(failed)


def test_what_a_fixture_found_is_never_tried_again(flakes: ModuleType) -> None:
    failed = results(("tests.faults.test_a", "failure"), ("tests.faults.test_b", "error"))
    assert () == flakes.files_to_repeat(failed)


def test_failures_in_many_files_are_no_flakes(flakes: ModuleType) -> None:
    many = [(f"tests.faults.test_{number}", "failure") for number in range(flakes.FILES_MAX + 1)]
    assert () == flakes.files_to_repeat(results(*many))
    assert flakes.FILES_MAX == len(flakes.files_to_repeat(results(*many[1:])))


def test_nothing_failed_means_nothing_to_repeat(flakes: ModuleType) -> None:
    assert () == flakes.files_to_repeat(results())
