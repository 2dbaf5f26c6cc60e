"""Addresses: how they are split, and who can reach them."""

from __future__ import annotations

import pytest

from milepost.errors import UsageError
from milepostd.ops.addresses import check_http, is_loopback, is_wildcard, parse_http_address


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:80", ("::1", 80)),
        (":80", ("127.0.0.1", 80)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_http_addresses_are_split(address: str, expected: tuple[str, int]) -> None:
    assert parse_http_address(address) == expected


@pytest.mark.parametrize("address", ["", "80", "host:", "host:x", "::1:80", "host:70000"])
def test_what_is_no_http_address_is_refused_with_what_came(address: str) -> None:
    with pytest.raises(UsageError, match=r"expected host:port for http, got|a port is at most"):
        parse_http_address(address)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.9", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("a.b", False)],
)
def test_only_this_machine_can_reach_a_loopback_address(host: str, expected: bool) -> None:
    assert expected == is_loopback(host)


def test_a_wildcard_stands_for_all_addresses_of_a_host() -> None:
    assert [True] * 3 == [is_wildcard(f"tcp://{host}:1") for host in ("*", "0.0.0.0", "[::]")]
    assert not is_wildcard("tcp://node-7:1")


def test_beyond_loopback_http_needs_a_token() -> None:
    assert ("127.0.0.1", 80) == check_http("127.0.0.1:80", "")
    assert ("10.0.0.1", 80) == check_http("10.0.0.1:80", "secret")
    with pytest.raises(UsageError, match="no http_token is set"):
        check_http("10.0.0.1:80", "")
