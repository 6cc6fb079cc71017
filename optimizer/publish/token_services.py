"""Decide which token services may get the password of a registry.

A registry answers 401 with the address of a token service (the realm), which gets the password and
gives a token. The registry chooses that address: a malicious one could name a host of its own, or
one inside this network (CVE-2026-48978 of oras-go, GHSA-28r5-37g7-p6mp). By https the
registry's own host, one of its domain, and those of DOCKER_HUB may have it; any other is the
user's to name (--token-service).

The domain is derived without the public suffix list, too small rather than too large in doubt:
what is not recognised must be named, and nobody's password goes to a stranger.
"""

from __future__ import annotations

import re
from collections.abc import Collection

DOCKER_HUB = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io", "auth.docker.io"})
SHARED = (
    *("amazonaws.com", "azurecr.cn", "azurecr.io", "azurecr.us", "cloudapp.net"),
    *("cloudfront.net", "cloudsmith.io", "fly.dev", "gcr.io", "github.io", "gitlab.io"),
    *("herokuapp.com", "jfrog.io", "ngrok.io", "ngrok.app", "ngrok-free.app", "nip.io", "ocir.io"),
    *("on.aws", "onrender.com", "oraclecloud.com", "pkg.dev", "quay.dev", "run.app", "sslip.io"),
    *("trycloudflare.com", "vercel.app", "web.app", "windows.net", "workers.dev"),
)
"""Domains below which each name is another customer's."""
SECOND_LEVEL = re.compile(r"[a-z]{2,3}|info|name|gouv|asso|priv|firm|store")
"""Labels below a country's domain that belong to nobody: co.uk, com.au, gouv.fr."""
ADDRESS = re.compile(r"[0-9.]+|\[.*\]?|.*:.*")
"""Of a host without its port: IPv4 or IPv6."""


def is_token_service(registry: str, service: str, named: Collection[str]) -> bool:
    """True for a host that may get the password by https.

    registry, service: HOST or HOST:PORT. named: by the user, in the same form; HOST is its port
    443.
    """
    registry, service = registry.lower(), service.lower().removesuffix(":443")
    if service in {host.lower().removesuffix(":443") for host in named}:
        return True
    if service == registry.removesuffix(":443"):
        return True
    if ":" in service:  # another port is another server
        return False
    host = re.sub(r":[0-9]+$", "", registry)
    if host in DOCKER_HUB:
        return service in DOCKER_HUB
    domain = registrable_domain(host)
    return bool(domain) and (service == domain or service.endswith(f".{domain}"))


def registrable_domain(host: str) -> str:
    """The part of a name that one owner has: example.com of registry.example.com. "" where that is
    not known: of an IP address, of a name without a dot, and below SHARED."""
    labels = host.rstrip(".").split(".")
    if ADDRESS.fullmatch(host) or len(labels) < 2 or not all(labels):
        return ""
    country = len(labels[-1]) == 2
    count = 3 if country and SECOND_LEVEL.fullmatch(labels[-2]) else 2
    domain = ".".join(labels[-count:])
    return "" if domain in SHARED or len(labels) < count else domain
