"""A search on a real Ray cluster of this machine whose node is killed, and what it refuses."""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from optimizer.cli import main
from optimizer.foundation.errors import MachineError, StoreError
from optimizer.recipe import file as recipe_file
from optimizer.recipe.schema import Recipe
from optimizer.search import on_ray, search
from optimizer.shared_store import SharedStore, folder_of
from optimizer.store import MADE_FROM
from tests.publish.servers import s3_server
from tests.search.test_search import write

MEMORY = 80 << 20  # bytes of a node's object store, nearly the least
NODE = {"num_cpus": 1, "resources": {"target": 1}, "object_store_memory": MEMORY}
ADDRESS = f"s3://{s3_server.BUCKET}/steps"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Cluster of two nodes with the resource `target`, and a head that runs no tasks; all find the
    credentials of a local S3 server in their environment."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with s3_server.serving(), pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            cluster.add_node(**NODE)
        ray.init(address=cluster.address)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def runs_search(node: Any) -> bool:
    """True for a node with a process that runs a search."""
    (raylet,) = node.all_processes["raylet"]
    children = psutil.Process(raylet.process.pid).children()
    return any("ray::search" in " ".join(child.cmdline()) for child in children)


def kill(cluster: Any, folder: Path, killed: list[Any], lose: bool) -> None:
    """Kill the node of the search once it is in stage lower. lose: remove its folder too"""
    while not any(folder.glob("lower/*.partial")):
        time.sleep(0.01)
    (node,) = (node for node in cluster.worker_nodes if runs_search(node))
    if lose:  # its process ends first: it would name the missing folder before Ray ends it
        (raylet,) = node.all_processes["raylet"]
        children = psutil.Process(raylet.process.pid).children()
        for child in children:
            child.kill()
        psutil.wait_procs(children, timeout=10)
        folder.rename(folder.with_name("lost"))
    cluster.remove_node(node, allow_graceful=False)
    killed.append(node)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Recipe:
    return recipe_file.read(write(tmp_path_factory.mktemp("recipe"), tiny_bert))


@pytest.fixture(scope="module")
def alone(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> search.Result:
    """Return the result of the search on one machine."""
    return search.run(recipe, tmp_path_factory.mktemp("alone"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", s3_server.KIND])
def test_a_search_whose_node_is_killed_ends_with_the_same_pareto_set(
    cluster: Any, tmp_path: Path, recipe: Recipe, alone: search.Result, kind: str
) -> None:
    """On S3 the next node has none of the folders of the first."""
    store = tmp_path / "store" if kind == "folder" else SharedStore(ADDRESS, tmp_path / "cache")
    killed = list[Any]()
    arguments = (cluster, folder_of(store), killed, kind != "folder")
    killer = threading.Thread(target=kill, args=arguments, daemon=True)
    killer.start()
    found = on_ray.run(recipe, store, resources=("target",))
    killer.join()
    cluster.add_node(**NODE)  # for the next test, in the main thread as Ray requires
    assert len(killed) == 1
    assert (found.trials, found.pareto) == (alone.trials, alone.pareto)
    assert found.chosen == alone.chosen
    assert not list((folder_of(store) / "search").glob("*.shared"))


@pytest.mark.slow
def test_candidates_that_another_node_made_ahead_are_not_made_again(
    cluster: Any,
    tmp_path: Path,
    recipe: Recipe,
    alone: search.Result,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import ray

    node = cluster.add_node(**{**NODE, "resources": {"worker": 1}})
    nodes = on_ray._admitted(ray, ["target"])
    makers = on_ray._find_makers(ray, nodes, ["worker"])
    with on_ray._mark(tmp_path) as mark, on_ray._making_ahead(ray, makers, recipe, mark):
        deadline = time.monotonic() + 300
        while len(list(tmp_path.glob(f"lower/*[!l]/{MADE_FROM}"))) < len(alone.trials):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    cluster.remove_node(node)
    capsys.readouterr()
    assert search.run(recipe, tmp_path).trials == alone.trials
    made = capsys.readouterr().err
    assert "judged: running" in made
    assert "compress: running" not in made
    with pytest.raises(MachineError, match=r"every node with 'target' is one on which the search"):
        on_ray._find_makers(ray, nodes, ["target"])


@pytest.mark.slow
def test_each_node_makes_its_share_of_the_candidates_modules_in_float_included(
    tmp_path: Path, tiny_bert: Path
) -> None:
    over = ["search.over={method: [rtn], precision: per_module}"]
    recipe = recipe_file.read(write(tmp_path, tiny_bert), over)
    store = tmp_path / "store"
    with on_ray._mark(store) as mark:
        shares = [on_ray._make_share(recipe, mark, number, 4) for number in range(4)]
    assert shares == [2, 2, 1, 1]  # six shares of weights in float
    stages = {file.parent.parent.name for file in store.glob(f"*/*/{MADE_FROM}")}
    assert stages == {"load", "compress", "export", "lower", "sensitivity"}


@pytest.mark.slow
def test_a_resource_that_no_node_has_is_refused_with_those_of_the_nodes(
    cluster: Any, tmp_path: Path, tiny_bert: Path
) -> None:
    recipe = recipe_file.read(write(tmp_path, tiny_bert))
    with pytest.raises(MachineError, match=r'has .targe.; did you mean "target".*CPU, target'):
        on_ray.run(recipe, tmp_path / "store", resources=("targe",))
    with pytest.raises(MachineError, match="has 'memory'"):
        on_ray.run(recipe, tmp_path / "store", resources=("memory",))


def test_a_node_that_does_not_mount_the_store_is_named_with_what_it_needs(tmp_path: Path) -> None:
    with on_ray._mark(tmp_path / "store") as mark:
        assert on_ray._why_not(mark, on_ray._version()) == ("", "")
        assert (
            "its folder" in on_ray._why_not(tmp_path / "x" / "y" / mark.name, on_ray._version())[0]
        )
        assert "version 0" in on_ray._why_not(mark, "0")[0]


def test_a_full_disk_of_the_node_has_the_exit_code_of_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/store/x")

    monkeypatch.setattr(search, "run", full)
    with on_ray._mark(tmp_path) as mark:
        error = on_ray._search(Recipe.model_construct(), mark, None)
    assert isinstance(error, StoreError)
    assert (error.exit_code, error.where) == (5, "/store/x")


def test_without_ray_it_says_what_to_install(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    recipe = write(tmp_path, tiny_bert)
    words = ["search", str(recipe), "--on", "ray", "--store", str(tmp_path / "store")]
    done = CliRunner().invoke(main, [*words, "--artifacts", str(tmp_path)])
    assert done.exit_code == 5
    assert "pip install 'optimize-toolchain[ray]'" in done.output


@pytest.mark.parametrize("option", ["--ray-resource", "--ray-ahead"])
def test_a_resource_without_a_cluster_is_refused(tmp_path: Path, option: str) -> None:
    done = CliRunner().invoke(main, ["search", str(tmp_path), option, "target"])
    assert done.exit_code == 2
    assert f"{option} is for --on ray" in done.output
