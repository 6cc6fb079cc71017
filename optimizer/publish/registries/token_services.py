"""Decide which token services may get the password of a registry.

A registry answers 401 with the address of a token service (the realm), which takes the password and
returns a token. A malicious registry could name any host, also one inside this network
(CVE-2026-48978 of oras-go, GHSA-28r5-37g7-p6mp). Accepted are the registry's host and port, its
host in SERVICES, and hosts that the user gives (--token-service). Hosts of one domain may belong to
different owners, and are not accepted for that reason alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

SERVICES: Mapping[str, str] = {
    # docs.docker.com/reference/api/registry/auth
    **dict.fromkeys(("docker.io", "index.docker.io", "registry-1.docker.io"), "auth.docker.io"),
    # WWW-Authenticate of https://registry.gitlab.com/v2/: realm="https://gitlab.com/jwt/auth"
    "registry.gitlab.com": "gitlab.com",
}
"""{registry: its token service} for registries with the service on another host."""


def is_token_service(registry: str, service: str, allowed: Collection[str]) -> bool:
    """Return True for a service that may get the registry's password by https.

    registry, service: HOST or HOST:PORT; HOST means port 443.
    allowed: services given by the user, written alike.
    """
    registry, service = _strip_default_port(registry), _strip_default_port(service)
    return service in {registry, SERVICES.get(registry), *map(_strip_default_port, allowed)}


def _strip_default_port(host: str) -> str:
    return host.lower().removesuffix(":443")
