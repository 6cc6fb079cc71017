"""Decide which token services may get the password of a registry.

A registry answers 401 with the address of a token service (the realm), which gets the password and
gives a token. The registry chooses that address: a malicious one could name a host of its own, or
one inside this network (CVE-2026-48978 of oras-go, GHSA-28r5-37g7-p6mp). The registry's own host
and port, the host that SERVICES has for it, and those that the user names (--token-service) may
have it. Two names of one domain are not taken for one owner: that is not known without the
public suffix list.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

SERVICES: Mapping[str, str] = {
    # docs.docker.com/reference/api/registry/auth
    **dict.fromkeys(("docker.io", "index.docker.io", "registry-1.docker.io"), "auth.docker.io"),
    # WWW-Authenticate of https://registry.gitlab.com/v2/: realm="https://gitlab.com/jwt/auth"
    "registry.gitlab.com": "gitlab.com",
}
"""{registry: its token service} where the two are different hosts."""


def is_token_service(registry: str, service: str, named: Collection[str]) -> bool:
    """True for a host that may get the password by https.

    registry, service: HOST or HOST:PORT. named: by the user, in the same form; HOST is its port
    443.
    """
    known, host = _without_default_port(registry), _without_default_port(service)
    return host in {known, SERVICES.get(known), *map(_without_default_port, named)}


def _without_default_port(host: str) -> str:
    return host.lower().removesuffix(":443")
