"""Tests that a registry's password goes only to its token service, and only by https."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from optimizer.foundation.errors import MachineError
from optimizer.publish.registries.token_services import is_token_service
from tests.publish.servers import oci_server

OWN = [
    ("registry.example.com", "registry.example.com"),
    ("registry.example.com:443", "registry.example.com"),
    ("registry.example.com:5000", "registry.example.com:5000"),
    ("registry.gitlab.com", "gitlab.com"),
    ("registry-1.docker.io", "auth.docker.io"),
    ("docker.io", "auth.docker.io"),
    ("REGISTRY.example.com", "Registry.Example.com:443"),
]
OTHERS = [
    ("registry.example.com", "example.org"),
    ("registry.example.com", "gitlab.example.com"),
    ("mine.netlify.app", "evil.netlify.app"),
    ("registry-1.docker.io", "evil.docker.io"),
    ("registry.gitlab.com", "gitlab.com:8443"),
    ("registry.gitlab.com:5000", "gitlab.com"),
    ("gitlab.com", "registry.gitlab.com"),
    ("registry.example.com", "registry.example.com.evil.org"),
    ("registry.example.com", "evilexample.com"),
    ("registry.example.com", "gitlab.example.com:8443"),
    ("registry.example.com", "registry.example.com:5001"),
    ("example.co.uk", "evil.co.uk"),
    ("example.com.au", "evil.com.au"),
    ("mine.azurecr.io", "evil.azurecr.io"),
    ("mine.jfrog.io", "evil.jfrog.io"),
    ("one.dkr.ecr.eu-west-1.amazonaws.com", "evil.s3.amazonaws.com"),
    ("10.0.0.1:5000", "10.0.0.2"),
    ("10.0.0.1:5000", "169.254.169.254"),
    ("[::1]:5000", "[::2]"),
    ("registry:5000", "auth"),
    ("localhost:5000", "localhost"),
    ("registry.example.com", "auth.docker.io"),
    ("registry.example.com.", "evil.com."),
]


@pytest.mark.parametrize(("registry", "service"), OWN)
def test_a_registrys_own_service_is_asked(registry: str, service: str) -> None:
    assert is_token_service(registry, service, ())


@pytest.mark.parametrize(("registry", "service"), OTHERS)
def test_another_hosts_service_is_used_only_if_the_user_names_it(
    registry: str, service: str
) -> None:
    assert not is_token_service(registry, service, ())
    assert not is_token_service(registry, service, (f"{service}:1", "other.example.com"))
    assert is_token_service(registry, service, (service,))


def logged_in(folder: Path, host: str) -> Path:
    pair = base64.b64encode(f"{oci_server.USER}:{oci_server.PASSWORD}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {host: {"auth": pair}}}))
    return folder


@pytest.mark.parametrize(
    "realm",
    [
        "http://{stranger}/token",
        "https://{stranger}/token",
        "https://169.254.169.254/token",
        "//{stranger}/token",
        "http://{own}@{stranger}/token",
        "http://[::1",
        "http://{own}:x/token",
        "ftp://{own}/token",
        "http://{own}:99999/token",
    ],
)
def test_the_password_reaches_no_other_host_or_port(tmp_path: Path, realm: str) -> None:
    with oci_server.serving() as own, oci_server.serving() as stranger:
        own.authorization = "Bearer"
        own.realm = realm.format(own=own.host, stranger=stranger.host)
        client = own.client(logged_in(tmp_path, own.host))
        with pytest.raises(MachineError) as refused:
            client.tags()
        assert oci_server.PASSWORD not in str(refused.value)
        assert stranger.log == []
        assert {authorization for *_, authorization in own.log} == {""}


def test_an_anonymous_request_is_not_said_to_send_a_password() -> None:
    with oci_server.serving() as own, oci_server.serving() as stranger:
        own.authorization, own.realm = "Bearer", f"https://{stranger.host}/token"
        with pytest.raises(MachineError, match=rf"--token-service {stranger.host}") as refused:
            own.client().tags()
        assert "password" not in str(refused.value)
