"""Addresses in settings: what they look like, who can reach them, and where HTTP may be served."""

from __future__ import annotations

import ipaddress
from typing import Final

from milepost.errors import UsageError

PORT_MAX: Final = 65535

TCP_ADDRESS: Final = r"^(tcp://([^\[\]:/\s]+|\[[0-9A-Fa-f:.%]+\]):[0-9]{1,5})?$"
"""A pattern of `tcp://host:port`, or nothing."""

_PORT_DIGITS: Final = 9


def port_fault(address: str) -> str:
    """Return what is wrong with the port of `tcp://host:port`; empty if nothing is."""
    if address and int(address.rpartition(":")[2]) > PORT_MAX:
        return f"{address}: a port is at most {PORT_MAX}"
    return ""


def is_wildcard(address: str) -> bool:
    """Whether `tcp://host:port` stands for all of a host's addresses."""
    host = address.removeprefix("tcp://").rpartition(":")[0]
    return host in ("*", "0.0.0.0", "[::]")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_http_address(address: str) -> tuple[str, int]:
    """Split `host:port`. An IPv6 host stands in brackets, an empty host is 127.0.0.1. Raises
    UsageError.
    """
    host, colon, port = address.rpartition(":")
    host = host or "127.0.0.1"
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if port.isascii() and port.isdigit() and len(port) < _PORT_DIGITS and int(port) > PORT_MAX:
        raise UsageError("usage", f"{address}: a port is at most {PORT_MAX}")
    if not colon or not port.isascii() or not port.isdigit() or len(port) >= _PORT_DIGITS:
        raise UsageError("usage", f"expected host:port for http, got {address!r}")
    return host, int(port)


def check_http(address: str, token: str) -> tuple[str, int]:
    """Return host and port if HTTP may be served there. Raises UsageError that says why not."""
    host, port = parse_http_address(address)
    if not token and not is_loopback(host):
        raise UsageError(
            "usage",
            f"{address} can be reached from other machines and no http_token is set; "
            "status names paths, hosts and jobs",
            "set MILEPOSTD_HTTP_TOKEN, or listen on 127.0.0.1 behind a proxy that does TLS",
        )
    return host, port
