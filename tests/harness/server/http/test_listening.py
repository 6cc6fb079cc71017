"""Addresses of a server, access to it, and the names of a Host header."""

import socket
from pathlib import Path

import pytest

from optimizer.harness.__main__ import main
from optimizer.harness.errors import InputError, MachineError
from optimizer.harness.server.http.hosts import Hosts
from optimizer.harness.server.http.listening import open_sockets, resolve_addresses


def test_a_port_that_another_has_is_named_and_exit_5(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(MachineError) as e:
            open_sockets(resolve_addresses("127.0.0.1", port))
        assert e.value.exit_code == 5
        assert f"127.0.0.1:{port}" in str(e.value)
        assert "another program listens there" in str(e.value)


@pytest.mark.parametrize(
    "host", ["256.1.1.1", "no such host", "1.2.3.4.5", "a" * 300, "203.0.113.9"]
)
def test_a_host_that_is_no_address_of_this_machine_is_exit_2(host: str) -> None:
    with pytest.raises(InputError) as e:
        open_sockets(resolve_addresses(host, 0))
    assert e.value.exit_code == 2
    assert "--host" in str(e.value)


def test_a_server_that_others_reach_asks_for_a_token_or_is_told_that_it_is_on_purpose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the bundle is opened: there is none."""
    for host in ("0.0.0.0", "::", ""):
        assert main(["serve", "--bundle", str(tmp_path), "--host", host]) == 2
        assert "--insecure" in capsys.readouterr().err


def test_serve_says_in_a_sentence_that_it_cannot_listen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        words = ["serve", "--bundle", str(tmp_path)]
        assert main([*words, "--port", str(other.getsockname()[1])]) == 5
        assert "cannot listen" in capsys.readouterr().err
    assert main([*words, "--host", "256.1.1.1"]) == 2
    assert "256.1.1.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("header", "address", "accepted"),
    [
        ("localhost:8000", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.2:80", "127.0.0.1", True),
        ("[::1]:8000", "::1", True),
        ("LOCALHOST.", "127.0.0.1", True),
        ("model.example:80", "127.0.0.1", True),
        ("", "127.0.0.1", True),  # no browser
        ("evil.example", "127.0.0.1", False),
        ("localhost.evil.example", "127.0.0.1", False),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("10.0.0.5", "10.0.0.5", True),  # a probe, by a pod's address
        ("localhost", "10.0.0.5", False),
        ("[", "127.0.0.1", False),
        ("::1", "127.0.0.1", False),  # not as it is written in a header
    ],
)
def test_a_server_is_asked_by_its_own_names(header: str, address: str, accepted: bool) -> None:
    assert Hosts(frozenset({"model.example"})).accept(header, address) is accepted
