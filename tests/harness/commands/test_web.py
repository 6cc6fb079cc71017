"""The page of a bundle, as `python -m harness web` serves it. No browser: see
tests/package/test_web_page.py."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from optimizer.harness.__main__ import main
from optimizer.harness.commands.web import PageServer, find_pages
from optimizer.harness.errors import BundleError, MachineError
from tests.package.bundles import web_bundle


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a page. Read-only."""
    return web_bundle.make(tmp_path_factory.mktemp("web"))


@pytest.fixture(scope="module")
def server(made: Path) -> Iterator[PageServer]:
    with PageServer(find_pages(made)) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def answer(server: PageServer, path: str, method: str = "GET", **headers: str) -> HTTPResponse:
    connection = HTTPConnection(*server.server_address[:2])
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    response.data = response.read()  # type: ignore[attr-defined]
    connection.close()
    return response


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("web/", "text/html; charset=utf-8"),
        ("web/page.mjs", "text/javascript; charset=utf-8"),
        ("web/page.css", "text/css; charset=utf-8"),
        ("web/bundle.json", "application/json"),
        ("web/onnxruntime-web/ort-wasm-simd-threaded.wasm", "application/wasm"),
        ("model/onnxruntime-cpu/model.onnx", "application/octet-stream"),
    ],
)
def test_files_are_served_by_their_names_and_types(
    server: PageServer, made: Path, name: str, kind: str
) -> None:
    response = answer(server, f"/{name}")
    file = made / (f"{name}index.html" if name.endswith("/") else name)
    assert (response.status, response.headers["Content-Type"]) == (200, kind)
    assert response.data == file.read_bytes()  # type: ignore[attr-defined]


def test_the_page_may_load_from_here_alone_and_its_wasm_may_have_threads(
    server: PageServer,
) -> None:
    headers = answer(server, "/web/").headers
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
    assert headers["Cross-Origin-Embedder-Policy"] == "require-corp"
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/manifest.json",  # the recipe, which the page does not need
        "/harness/web.py",
        "/web/../manifest.json",
        "/web/%2e%2e/manifest.json",
        "/../../etc/passwd",
        "//etc/passwd",
        "/web/index.html%00.mjs",
        "/web",
    ],
)
def test_nothing_else_is_served(server: PageServer, path: str) -> None:
    response = answer(server, path)
    assert response.status == (302 if path == "/web" else 404)
    assert response.data == b""  # type: ignore[attr-defined]


def test_a_name_that_was_made_to_point_here_is_refused(server: PageServer) -> None:
    assert answer(server, "/web/", Host="attacker.example").status == 421
    assert answer(server, "/web/", Host=f"localhost:{server.server_port}").status == 200


def test_nothing_is_received(server: PageServer) -> None:
    assert answer(server, "/web/", "POST").status == 501
    assert answer(server, "/web/", "PUT").status == 501


@pytest.mark.parametrize(("error", "shown"), [(ConnectionResetError, False), (ValueError, True)])
def test_a_browser_that_goes_away_is_no_error(
    server: PageServer, capsys: pytest.CaptureFixture[str], error: type[Exception], shown: bool
) -> None:
    try:
        raise error
    except error:
        server.handle_error(None, ("127.0.0.1", 1))
    assert (error.__name__ in capsys.readouterr().err) == shown


def test_only_this_machine_is_listened_to(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "name",
    ["web/page.mjs", "model/onnxruntime-cpu/model.onnx", "web/float/model.onnx", "web/bundle.json"],
)
def test_a_damaged_file_is_found_before_anything_is_served(
    made: Path, tmp_path: Path, name: str
) -> None:
    bundle = Path(shutil.copytree(made, tmp_path / "bundle"))
    data = bytearray((bundle / name).read_bytes())
    data[-1] ^= 1
    (bundle / name).write_bytes(data)
    with pytest.raises(BundleError, match=f"damaged or missing: {name}"):
        find_pages(bundle)


def test_a_file_beside_the_page_that_the_manifest_does_not_list_is_refused(
    made: Path, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(made, tmp_path / "bundle"))
    (bundle / "web" / "more.mjs").write_text("")
    with pytest.raises(BundleError, match=r"not in the manifest: web/more\.mjs"):
        find_pages(bundle)


def test_a_bundle_without_a_page_says_which_target_makes_one(
    made: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tests.package.bundles import small_bundle

    bundle = small_bundle.make(tmp_path) / "bundle"
    assert main(["web", "--bundle", str(bundle)]) == 2
    assert "onnxruntime-web" in capsys.readouterr().err


def test_a_port_in_use_is_named(server: PageServer) -> None:
    with pytest.raises(MachineError, match=f"port {server.server_port}"):
        PageServer({}, server.server_port)


def test_the_command_says_where_the_page_is(made: Path) -> None:
    command = [sys.executable, "-m", "harness", "web", "--json"]
    with subprocess.Popen(command, cwd=made, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        process.terminate()
    assert address.startswith("http://127.0.0.1:")
    assert address.endswith("/web/")
