"""Settings: who wins, what is refused, and that nothing is refused one at a time."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from docs.generate.config_pages import config_file, config_page, setting_docs

from milepost.errors import UsageError
from milepostd.ops.config import (
    FLAGS,
    Settings,
    load_settings,
)

REPOSITORY = Path(__file__).parents[3]
ROOTS: dict[str, object] = {"roots": ["/checkpoints"]}


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "milepostd.toml"
    path.write_text(text)
    return path


def refusal(flags: dict[str, object], environment: dict[str, str], file: Path | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        load_settings(flags, environment, file)
    return caught.value.message


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(
    tmp_path: Path,
) -> None:
    file = toml(
        tmp_path, 'roots = ["/a"]\nnice = 1\nwriter_threads = 3\nhttp = ""\nlog_level = "error"'
    )
    environment = {"MILEPOSTD_NICE": "2", "MILEPOSTD_WRITER_THREADS": "4"}
    settings = load_settings({"nice": 3, "writer_threads": None}, environment, file)
    assert settings.nice == 3
    assert settings.writer_threads == 4
    assert settings.log_level == "error"
    assert settings.drain_s == 600
    assert settings.roots == (Path("/a"),)


def test_the_environment_speaks_text_for_every_type() -> None:
    settings = load_settings(
        {},
        {
            "MILEPOSTD_ROOTS": "/a:/b c:",
            "MILEPOSTD_EMBEDDED": "true",
            "MILEPOSTD_LINGER_S": "2.5",
            "MILEPOSTD_HTTP": "127.0.0.1:0",
        },
        None,
    )
    assert settings.roots == (Path("/a"), Path("/b c"))
    assert settings.embedded is True
    assert settings.linger_s == 2.5
    assert settings.http_address == "127.0.0.1:0"


def test_everything_that_is_wrong_is_listed_at_once_with_its_source(tmp_path: Path) -> None:
    file = toml(tmp_path, "writer_thread = 3\nnice = 99\n")
    text = refusal(
        {"log_format": "xml"},
        {"MILEPOSTD_PEERS": "x", "MILEPOSTD_LINGER_S": "soon", "HOME": "/root"},
        file,
    )
    assert text.startswith("6 settings are wrong:")
    for part in (
        f"{file}: there is no setting 'writer_thread'; did you mean writer_threads?",
        f"{file}: nice: expected `int` <= 19, got 99",
        "MILEPOSTD_PEERS: there is no setting 'peers'; did you mean peer?",
        "MILEPOSTD_LINGER_S: linger_s: expected `float`, got",
        "--log-format: log_format: expected auto, json or text, got 'xml'",
        "roots: no root is given",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("peer", "127.0.0.1:1", "expected tcp://host:port"),
        ("peer", "tcp://127.0.0.1", "expected tcp://host:port"),
        ("peer", "tcp://127.0.0.1:70000", "at most 65535"),
        ("peer", "tcp://0.0.0.0:9471", "set advertise too"),
        ("advertise", "tcp://[::]:9471", "no address others can connect to"),
        ("http", "9470", "expected host:port"),
        ("http", "::1:9470", "expected host:port"),
        ("http", "0.0.0.0:9470", "no http_token is set"),
        ("http", "node-1.example:9470", "no http_token is set"),
        ("http_token", "short", "shorter than 16"),
        ("faults", "mid-write:kill", "--allow-faults"),
        ("run_dir", "/" + "x" * 100, "a socket's path may have 107"),
        ("nice", -1, ">= 0"),
        ("writer_threads", True, "expected `int`"),
        ("write_mbps", -1.0, ">= 0"),
        ("io_class", "realtime", "expected best-effort, idle or none, got 'realtime'"),
        ("cpus", "some", "expected auto, all or a list like 8-11,14, got 'some'"),
        ("cpus", "11-8", "11-8 is no range of cores"),
        ("cpus", "", "expected auto, all or a list"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_the_reason(
    name: str, value: object, part: str
) -> None:
    assert part in refusal({**ROOTS, name: value}, {})


@pytest.mark.parametrize("cpus", ["auto", "all", "3", "8-11,14"])
def test_cores_are_named_by_a_word_or_a_list(cpus: str) -> None:
    assert cpus == load_settings(ROOTS, {"MILEPOSTD_CPUS": cpus}, None).cpus


def test_a_limit_may_be_a_fraction_and_is_off_by_default() -> None:
    assert 0 == load_settings(ROOTS, {}, None).write_mbps
    assert 0.5 == load_settings(ROOTS, {"MILEPOSTD_WRITE_MBPS": "0.5"}, None).write_mbps


def test_a_secret_is_not_repeated_in_an_error(tmp_path: Path) -> None:
    assert "1234567890" not in refusal(ROOTS, {}, toml(tmp_path, "http_token = 1234567890"))
    assert "sesame" not in refusal(ROOTS, {"MILEPOSTD_HTTP_TOKEN": "sesame"})


def test_an_unknown_fault_point_is_refused_even_where_faults_are_allowed() -> None:
    text = refusal({**ROOTS, "allow_faults": True}, {"MILEPOSTD_FAULTS": "mid-flight:kill"})
    assert "MILEPOSTD_FAULTS: faults: unknown fault point 'mid-flight'" in text


def test_what_kubernetes_puts_there_for_a_service_is_not_taken_for_a_setting() -> None:
    environment = {
        "MILEPOSTD_SERVICE_HOST": "10.0.0.1",
        "MILEPOSTD_SERVICE_PORT": "9470",
        "MILEPOSTD_PORT": "tcp://10.0.0.1:9470",
        "MILEPOSTD_PORT_9470_TCP_ADDR": "10.0.0.1",
    }
    assert load_settings(ROOTS, environment, None).nice == 10


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "absent.toml"
    assert f"{missing}: cannot be read" in refusal(ROOTS, {}, missing)
    broken = toml(tmp_path, "roots = [")
    assert f"{broken}: not TOML" in refusal(ROOTS, {}, broken)


def test_the_run_directory_follows_the_session_else_the_user() -> None:
    assert load_settings(ROOTS, {"XDG_RUNTIME_DIR": "/run/user/7"}, None).run_dir == Path(
        "/run/user/7/milepost"
    )
    default = Path(f"/tmp/milepost-{os.getuid()}")
    assert load_settings(ROOTS, {}, None).run_dir == default
    assert load_settings({**ROOTS, "run_dir": ""}, {}, None).run_dir == default


def test_paths_are_absolute_whatever_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    settings = load_settings({"roots": ["a/../b", "~/c"], "run_dir": "r"}, {}, None)
    assert settings.roots == (tmp_path / "b", Path("/home/someone/c"))
    assert settings.run_dir == tmp_path / "r"


def test_an_embedded_daemon_needs_no_root_and_serves_no_http_unless_asked() -> None:
    settings = load_settings({"embedded": True}, {}, None)
    assert (settings.http_address, settings.is_http_required) == ("", False)
    asked = load_settings({"embedded": True, "http": "127.0.0.1:1"}, {}, None)
    assert (asked.http_address, asked.is_http_required) == ("127.0.0.1:1", True)


def test_the_default_http_port_is_tried_but_not_required() -> None:
    settings = load_settings(ROOTS, {}, None)
    assert (settings.http_address, settings.is_http_required) == ("127.0.0.1:9470", False)


def test_every_setting_has_a_text_and_all_but_secrets_and_faults_a_flag() -> None:
    docs = {row.name: row for row in setting_docs()}
    assert set(docs) == {field.name for field in msgspec.structs.fields(Settings)}
    assert all(len(row.text) > 40 for row in docs.values())
    assert set(docs) - set(FLAGS) == {"http_token", "faults"}


def test_the_pages_are_what_the_table_says() -> None:
    hint = "rewrite it: python -m docs.generate.config_pages --docs or --toml"
    assert config_page() == (REPOSITORY / "docs/config.md").read_text(), hint
    assert config_file() == (REPOSITORY / "deploy/config/milepostd.toml").read_text(), hint


def test_the_file_for_operators_is_valid_with_every_default_uncommented(tmp_path: Path) -> None:
    lines = config_file().splitlines()
    opened = [line.removeprefix("# ") if " = " in line else line for line in lines]
    settings = load_settings({}, {}, toml(tmp_path, "\n".join(opened)))
    assert settings == load_settings(ROOTS, {}, None)
