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
from milepost.storage.paths import absolute
from milepostd.ops.addresses import TCP_ADDRESS, check_http, is_wildcard, port_fault
from milepostd.ops.faults import parse_faults
from milepostd.ops.placement import parse_cores

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX: Final = "MILEPOSTD_"

HTTP_ADDRESS: Final = "127.0.0.1:9470"
"""What `http = "auto"` tries."""

_SERVICE_LINK: Final = re.compile(r"MILEPOSTD_(SERVICE_|PORT(_|$))")
"""Kubernetes sets these variables in every container if a Service is called `milepostd`. They are
no settings."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a daemon runs. Made by `load_settings`, and fixed as long as the daemon runs."""

    run_dir: Path = Path()
    """Directory of the local socket, the node's key pair and its lock. It is made with mode 0700.
    Two run directories on one host are two nodes. Empty: `$XDG_RUNTIME_DIR/milepost`, else
    `/tmp/milepost-<uid>`. Keep it short, because a socket's path may have 107 bytes at most."""

    roots: tuple[Path, ...] = ()
    """Directories under which trainers may save; any other root is refused with `root-refused`. In
    the environment separate them by `:`, on the command line repeat the flag. At least one is
    needed, unless the daemon is embedded: then trainers may name any root."""

    peer: Annotated[str, msgspec.Meta(pattern=TCP_ADDRESS)] = "tcp://127.0.0.1:0"
    """Address where the daemon listens for the daemons of other nodes. With port 0 it takes a free
    port and tells it to the trainers, so nobody has to choose one. The default is loopback: that
    other hosts can reach the daemon should be your decision."""

    advertise: Annotated[str, msgspec.Meta(pattern=TCP_ADDRESS)] = ""
    """Address that other daemons are told to connect to. Empty: the same as `peer`. Needed if
    `peer` is a wildcard such as `tcp://0.0.0.0:9471`, or behind address translation. Port 0 stands
    for the port that `peer` got."""

    http: str = "auto"
    """Address of the status page, `/status`, `/events`, `/metrics` and the probes, as `host:port`.
    `auto`: 127.0.0.1:9470; if that port is taken (by a second daemon on the host), or if the daemon
    is embedded, off. Empty: off. If you give an address and it is taken, the daemon does not
    start."""

    http_token: str = ""
    """Token that requests must carry, as `Authorization: Bearer <token>`; the page also takes
    `/?token=`, and the probes need none. Required for any address beyond loopback, because the
    status names paths, hosts and jobs. At least 16 characters. There is no flag for it, because
    every user of the host can read flags."""

    log_format: Literal["auto", "json", "text"] = "auto"
    """`json`: each line is a JSON object; `text`: for people; `auto`: text on a terminal, else
    json."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe level that is logged. `debug` logs a line for each message."""

    embedded: bool = False
    """Whether a trainer started the daemon for itself. Then the daemon accepts any root, serves no
    HTTP unless told to, and ends once no trainer is left and nothing is pending for `linger_s`."""

    linger_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 10.0
    """How long an embedded daemon stays when nothing is pending, in seconds. Long enough for a
    launcher to restart the trainers, which then find the daemon and their arenas."""

    drain_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 600.0
    """How long saves in flight may take to end after SIGTERM, in seconds. After that, or at a
    second SIGTERM, the daemon stops at once. The default is the default deadline of a save. The
    supervisor has to wait longer than this (`TimeoutStopSec`, `terminationGracePeriodSeconds`)."""

    writer_threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """How many images are written at the same time. With two, one keeps the disk busy while the
    other computes checksums. More help only on parallel file systems."""

    write_mbps: Annotated[float, msgspec.Meta(ge=0, le=1_000_000)] = 0.0
    """Limit on how fast the node writes images, in MB/s (1,000,000 bytes), all writer threads
    together. 0: no limit. Use it where others share the storage. A save that cannot meet its
    deadline at this speed fails as soon as that is certain, with the numbers. So stay well above
    the bytes that a node writes for one checkpoint, divided by the deadline (600 s, unless the
    trainers ask for another). The limit also holds while the daemon drains: the same goes for
    `drain_s`."""

    nice: Annotated[int, msgspec.Meta(ge=0, le=19)] = 10
    """Niceness of the daemon and its planner, added to what was inherited: training goes first on
    every core. Where the kernel groups tasks by session, the daemon's own session gets the same
    niceness."""

    io_class: Literal["best-effort", "idle", "none"] = "best-effort"
    """I/O class of the daemon's reads and direct writes. It has an effect with the disk schedulers
    bfq and mq-deadline, not with `none` and not on network file systems. `best-effort` is used at
    its lowest level: training's data loaders go first, and saves still make progress. `idle` waits
    until nobody else reads or writes; under bfq that may be for ever, and then the save misses its
    deadline. `none`: as inherited."""

    cpus: str = "auto"
    """Which cores the daemon and its planner use: `auto`, `all` or a list such as `8-11,14`. With
    `auto` they keep off the cores that the node's trainers are pinned to, if at least two other
    cores are left; off the hyperthread siblings of those cores too, if two are left then; else they
    run on any core. The daemon looks again while trainers come and go. With `auto` a supervised
    daemon never leaves the cores it was started on. An embedded one, or one with `all` or a list,
    may use all cores that its cpuset allows. Give a list if jobs share a host and only affinity
    masks, no cpusets, keep them apart."""

    faults: str = ""
    """For tests only: fault points that make the daemon misbehave, as
    `point:action[:argument][@step]`, separated by commas. Refused without `allow_faults`."""

    allow_faults: bool = False
    """For tests only: lets `faults` take effect. It is a setting of its own, so that a variable
    left over in an environment cannot harm a daemon that holds data."""

    @property
    def http_address(self) -> str:
        """The `host:port` to serve HTTP on; empty if HTTP is off."""
        if self.http == "auto":
            return "" if self.embedded else HTTP_ADDRESS
        return self.http

    @property
    def is_http_required(self) -> bool:
        """Whether the daemon refuses to start if the port is taken."""
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
"""The flag of each setting that has one."""

HTTP_TOKEN_CHARACTERS_MIN: Final = 16


def load_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None
) -> Settings:
    """Merge file < environment < flags over the defaults.

    Args:
        flags: values by setting name; None for a flag that was not given.
        environment: its variables `MILEPOSTD_<SETTING>` are read, others are ignored.
        file: a TOML file with settings at its top level, or None.

    Raises:
        UsageError: names every fault with its source: unknown names, values of a wrong type or out
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
        return Path(absolute(os.path.expanduser(value)))
    raise NotImplementedError(kind)


def _type_fault(error: msgspec.ValidationError, raw: Any, name: str) -> str:
    """Return which value was expected, and, unless it is a secret, which one was given."""
    shown = "" if name == "http_token" else f", got {raw!r}"
    text = str(error)
    if "regex" in text:
        text = "expected tcp://host:port"
    choices = get_args(get_type_hints(Settings).get(name))
    if "enum" in text and choices:
        return f"expected {', '.join(map(str, choices[:-1]))} or {choices[-1]}{shown}"
    return text[:1].lower() + text[1:] + ("" if ", got" in text else shown)


def _contradictions(settings: Settings, sources: Mapping[str, str]) -> list[str]:
    """Return what is wrong across fields, or in a way that a type cannot express."""
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
