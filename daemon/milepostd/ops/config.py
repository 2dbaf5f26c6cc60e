"""The settings of a daemon: one table that gives each setting's default, unit, bounds and reason.

`load_settings` merges a TOML file, the environment and the command line. Later sources win, and
everything that is wrong is reported at once. `docs/config.md` and `deploy/config/milepostd.toml`
are made from the table (`docs/generate/config_pages.py`). Opens no socket and makes no directory.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_type_hints

import msgspec

from milepost.errors import UsageError
from milepost.link.run_dir import SOCKET_NAME, SOCKET_PATH_BYTES_MAX, default_run_dir, socket_path
from milepostd.ops.addresses import TCP_ADDRESS, check_http, is_wildcard, port_fault
from milepostd.ops.faults import parse_faults
from milepostd.ops.placement import parse_cores

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX: Final = "MILEPOSTD_"

HTTP_ADDRESS: Final = "127.0.0.1:9470"
"""What `http = "auto"` tries."""

_SERVICE_LINK: Final = re.compile(r"MILEPOSTD_(SERVICE_|PORT(_|$))")
"""Kubernetes puts these into every container when a Service is called `milepostd`; they are not
ours."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a daemon runs. Made by `load_settings`; never changes while the daemon lives."""

    run_dir: Path = Path()
    """Directory of the local socket, the node's key pair and its lock; made with mode 0700. Two run
    directories on one host are two nodes. Empty:
    `$XDG_RUNTIME_DIR/milepost`, else `/tmp/milepost-<uid>`. Short, because a socket's path has to
    fit into 107 bytes."""

    roots: tuple[Path, ...] = ()
    """Directories under which trainers may have checkpoints written; everything else is refused
    with `root-refused`. In the environment separated by `:`, as a flag given several times. At
    least one, unless the daemon is embedded, where the trainer that started it names any."""

    peer: Annotated[str, msgspec.Meta(pattern=TCP_ADDRESS)] = "tcp://127.0.0.1:0"
    """Where the daemon listens for the daemons of other nodes. Port 0 takes a free port and tells
    it to the trainers, so nothing has to be agreed upon. Loopback by default, because a daemon that
    other hosts can reach should be a decision."""

    advertise: Annotated[str, msgspec.Meta(pattern=TCP_ADDRESS)] = ""
    """What other daemons are told to connect to; empty: the same as `peer`. Needed where `peer` is
    a wildcard such as `tcp://0.0.0.0:9471`, or behind address translation. Port 0 here stands for
    the port that `peer` got."""

    http: str = "auto"
    """Address of the status page, `/status`, `/events`, `/metrics` and the probes, as `host:port`.
    `auto`: 127.0.0.1:9470, without it if that port is taken (a second daemon on the host), and off
    if embedded. Empty: off. An address that is given and taken is an error."""

    http_token: str = ""
    """What a request has to bring as `Authorization: Bearer <token>` (the page also takes
    `/?token=`). Required for any address beyond loopback: status names paths, hosts and jobs. Not a
    flag, because flags can be read by every user of the host. At least 16 characters; the probes
    need none."""

    log_format: Literal["auto", "json", "text"] = "auto"
    """`json`: a JSON object a line; `text`: for people; `auto`: text on a terminal, else json."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged. `debug` is a line for each message."""

    embedded: bool = False
    """The daemon was started by a trainer for itself: it takes any root, serves no HTTP unless
    asked, and ends `linger_s` after its last trainer left and nothing is pending."""

    linger_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 10.0
    """How long an embedded daemon stays when nothing is pending, in seconds. Long enough for a
    launcher to restart its trainers, which then find their arenas served."""

    drain_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 600.0
    """After SIGTERM: how long saves in flight may take to end, in seconds; then, or at a second
    SIGTERM, the daemon stops at once. Equal to the default deadline of a save. What supervises the
    daemon has to wait longer (`TimeoutStopSec`, `terminationGracePeriodSeconds`)."""

    writer_threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """Images written at the same time. Two keep one disk busy while the other one computes
    checksums; more helps on parallel file systems only."""

    write_mbps: Annotated[float, msgspec.Meta(ge=0, le=1_000_000)] = 0.0
    """Most that the node writes of its images, in MB/s (1,000,000 bytes), all writer threads
    together; 0: no limit. For storage that others share. A save that cannot meet its deadline at
    this speed fails as soon as that is certain, with the numbers. So stay well above what a node
    writes of one checkpoint, divided by the deadline (600 s unless the trainers ask for another)
    and, since the limit also holds while the daemon drains, by `drain_s`."""

    nice: Annotated[int, msgspec.Meta(ge=0, le=19)] = 10
    """Niceness of the daemon and its planner, so that training wins every contest for a core. Added
    to what was inherited. Where the kernel groups tasks by session, that of the daemon's own
    session is set too."""

    io_class: Literal["best-effort", "idle", "none"] = "best-effort"
    """Class of the daemon's reads and direct writes, for the disk schedulers that know classes (bfq
    and mq-deadline; `none` and network file systems do not). `best-effort`, at its lowest level:
    training's data loaders go first and saves still get on. `idle` waits until nobody else reads or
    writes, under bfq without end, and then a save misses its deadline: the default is the one that
    cannot starve. `none`: as it was inherited."""

    cpus: str = "auto"
    """Which cores the daemon and its planner use: `auto`, `all` or a list such as `8-11,14`.
    `auto`: away from the cores that the node's trainers are pinned to, if at least two others are
    left, without their hyperthread siblings if that still leaves two; else anywhere. Looked at
    again while trainers come and go. `auto` never leaves the cores that a supervised daemon was
    started on; an embedded one, and one with `all` or a list, may use whatever its cpuset allows.
    Name a list where jobs share a host and only an affinity mask, no cpuset, keeps them apart."""

    faults: str = ""
    """For tests only: fault points that make the daemon misbehave, as
    `point:action[:argument][@step]`, separated by commas. Refused without `allow_faults`."""

    allow_faults: bool = False
    """For tests only: lets `faults` take effect. A switch of its own, so that a variable left over
    in an environment cannot harm a daemon that holds data."""

    @property
    def http_address(self) -> str:
        """Where HTTP is to be served, `host:port`; empty: nowhere."""
        if self.http == "auto":
            return "" if self.embedded else HTTP_ADDRESS
        return self.http

    @property
    def is_http_required(self) -> bool:
        """Whether a taken port ends the start."""
        return self.http not in ("", "auto")

    @property
    def socket_path(self) -> Path:
        """The local socket."""
        return socket_path(self.run_dir)


FLAGS: Final[dict[str, str]] = {
    "run_dir": "--run-dir",
    "roots": "--root",
    "peer": "--peer",
    "advertise": "--advertise",
    "http": "--http",
    "log_format": "--log-format",
    "log_level": "--log-level",
    "embedded": "--embedded",
    "linger_s": "--linger-s",
    "drain_s": "--drain-s",
    "writer_threads": "--writer-threads",
    "write_mbps": "--write-mbps",
    "nice": "--nice",
    "io_class": "--io-class",
    "cpus": "--cpus",
    "allow_faults": "--allow-faults",
}
"""Settings that are flags too."""

HTTP_TOKEN_CHARACTERS_MIN: Final = 16


def load_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None
) -> Settings:
    """Merge file < environment < flags over the defaults.

    Args:
        flags: by setting name; None stands for a flag that was not given.
        environment: variables `MILEPOSTD_<SETTING>` count; others are ignored.
        file: a TOML file with settings at its top level, or None.

    Raises:
        UsageError: naming every fault with its source: unknown names, values of a wrong type or out
            of bounds, settings that contradict each other, a file that cannot be read.
    """
    faults: list[str] = []
    values: dict[str, Any] = {"run_dir": default_run_dir(environment)}
    sources: dict[str, str] = {"run_dir": "the default"}
    types = get_type_hints(Settings, include_extras=True)

    def take(name: str, source: str, raw: Any, *, is_text: bool) -> None:
        if name not in types:
            close = difflib.get_close_matches(name, types, 1)
            guess = f"; did you mean {close[0]}?" if close else ""
            faults.append(f"{source}: there is no setting {name!r}{guess}")
            return
        if name == "run_dir" and raw == "":
            return
        if is_text and name == "roots":
            raw = [part for part in raw.split(os.pathsep) if part]
        try:
            values[name] = msgspec.convert(
                raw, types[name], strict=not is_text, dec_hook=_decode_path
            )
        except msgspec.ValidationError as error:
            faults.append(f"{source}: {name}: {_type_fault(error, raw, name)}")
        else:
            sources[name] = source

    for name, raw in _read_file(file, faults).items():
        take(name, str(file), raw, is_text=False)
    for variable in sorted(environment):
        if variable.startswith(PREFIX) and not _SERVICE_LINK.match(variable):
            name = variable.removeprefix(PREFIX).lower()
            take(name, variable, environment[variable], is_text=True)
    for name, raw in flags.items():
        if raw is not None:
            take(name, FLAGS.get(name, name), raw, is_text=False)
    settings = Settings(**values)
    faults += _contradictions(settings, sources)
    if faults:
        count = f"{len(faults)} settings are wrong" if len(faults) > 1 else "a setting is wrong"
        raise UsageError(
            "usage",
            "\n  ".join([f"{count}:", *faults]),
            "docs/config.md lists every setting; file < environment < flag",
        )
    return settings


def _read_file(file: Path | None, faults: list[str]) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        faults.append(f"{file}: cannot be read: {error.strerror}")
    except ValueError as error:
        faults.append(f"{file}: not TOML: {error}")
    return {}


def _decode_path(kind: Any, value: Any) -> Any:
    if kind is Path:
        if not isinstance(value, str | Path):
            raise ValueError(f"expected a path, got {type(value).__name__}")
        return Path(os.path.abspath(os.path.expanduser(value)))
    raise NotImplementedError(kind)


def _type_fault(error: msgspec.ValidationError, raw: Any, name: str) -> str:
    """Say what was expected and what came; a secret is not repeated."""
    shown = "" if name == "http_token" else f", got {raw!r}"
    text = str(error)
    if "regex" in text:
        text = "expected tcp://host:port"
    choices = get_args(get_type_hints(Settings).get(name))
    if "enum" in text and choices:
        return f"expected {', '.join(map(str, choices[:-1]))} or {choices[-1]}{shown}"
    return text[:1].lower() + text[1:] + ("" if ", got" in text else shown)


def _contradictions(settings: Settings, sources: Mapping[str, str]) -> list[str]:
    """Check what concerns more than one field, or more than a type can say."""
    faults: list[str] = []

    def fault(name: str, text: str) -> None:
        faults.append(f"{sources.get(name, 'the default')}: {name}: {text}")

    if not settings.roots and not settings.embedded:
        faults.append(
            "roots: no root is given; name the directories trainers may write under (--root)"
        )
    length = len(os.fsencode(settings.socket_path))
    if length > SOCKET_PATH_BYTES_MAX:
        fault(
            "run_dir",
            f"{settings.run_dir}/{SOCKET_NAME} is {length} bytes long, a socket's path may have "
            f"{SOCKET_PATH_BYTES_MAX}",
        )
    for name, address in (("peer", settings.peer), ("advertise", settings.advertise)):
        if text := port_fault(address):
            fault(name, text)
    if not settings.peer:
        fault("peer", "expected tcp://host:port, got ''")
    if is_wildcard(settings.peer) and not settings.advertise:
        fault("peer", f"{settings.peer} is no address others can connect to; set advertise too")
    if is_wildcard(settings.advertise):
        fault("advertise", f"{settings.advertise} is no address others can connect to")
    if settings.http_address:
        try:
            check_http(settings.http_address, settings.http_token)
        except UsageError as error:
            fault("http", error.message)
    if settings.http_token and len(settings.http_token) < HTTP_TOKEN_CHARACTERS_MIN:
        fault("http_token", f"shorter than {HTTP_TOKEN_CHARACTERS_MIN} characters")
    try:
        if settings.cpus not in ("auto", "all"):
            parse_cores(settings.cpus)
    except UsageError as error:
        fault("cpus", error.message)
    if settings.faults and not settings.allow_faults:
        fault("faults", "refused, because the daemon was not started with --allow-faults")
    try:
        parse_faults(settings.faults)
    except UsageError as error:
        fault("faults", error.message)
    return faults
