"""Run a search as one task of a Ray cluster, on a node of the kind that it times.

A search is one sequence: the results of all trials so far propose the next, which is timed while
nothing else runs. So the whole search is one task, with all processors of its node, and its store
is a folder that the nodes share, or a bucket. The task of a node that dies starts again on another
one, and finds the steps that were finished.

Other nodes may make candidates ahead: each takes every n-th candidate through compress, export and
lower, whose keys do not name the machine, and the search finds these steps in the store. The search
waits for a step that another node is making, and for nothing else of them. It alone judges and
times, and decides which candidates are tried.

The keys of answers and times name the kind of machine (Machine.key): a search that continues on
another kind judges and times all candidates again there.
"""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimizer.foundation import atomic
from optimizer.foundation.errors import MachineError, StoreError, explain_system_error, suggest
from optimizer.foundation.process import library_settings
from optimizer.foundation.progress import say
from optimizer.harness.errors import ExplainedError
from optimizer.recipe.schema import Recipe
from optimizer.search.progress import ENDS, finished_steps
from optimizer.shared_store import Root, SharedStore

if TYPE_CHECKING:
    from optimizer.search.search import Result, Table

OPTION, AHEAD = "--ray-resource", "--ray-ahead"
SETTINGS = {**library_settings.ENVIRONMENT, library_settings.PROGRESS_BARS: "1"}
ELSEWHERE = (
    "Give --store a folder that every node mounts under the same path (NFS, Lustre, EFS, "
    "Filestore) or an address in a bucket, or name one machine's nodes with --ray-resource."
)
MEMORY = ("memory", "object_store_memory")  # resources of Ray that no task can ask for by name
Node = dict[str, Any]
Mark = Path | tuple[SharedStore, bytes]
"""Sign by which a node can tell that it reaches this store: a file, or the identity of a bucket."""


def run(
    recipe: Recipe,
    store: Root,
    times: Table | None = None,
    resources: Sequence[str] = (),
    ahead: Sequence[str] = (),
) -> Result:
    """Search on the Ray cluster that RAY_ADDRESS names, or on this machine's.

    store: place of the steps, which all nodes must see
    times: table of another machine's times, and the key that must have signed it; its files are
        read on the node
    resources: names that the search's node must all have, such as accelerator_type:H100
    ahead: names that the nodes must all have that make candidates ahead; none: no node does

    Raises MachineError without Ray, a cluster, a node with the resources, or a shared store, and
    where the search's process ends again and again; and the errors of search.run.
    """
    ray = _package()
    with redirect_stdout(sys.stderr), _connected(ray), _mark(store) as mark:
        nodes = _admitted(ray, resources)
        makers = _find_makers(ray, nodes, ahead)
        _check_nodes(ray, [*nodes, *makers], mark)
        table = None if times is None else tuple(p and p.resolve() for p in times)
        with _making_ahead(ray, makers, recipe, mark):
            outcome = _until_done(ray, _task(ray, nodes, resources), store, (recipe, mark, table))
    if isinstance(outcome, ExplainedError):
        raise outcome
    result: Result = outcome
    return result


def _package() -> Any:
    try:
        import ray
    except ImportError:
        raise MachineError(
            "Ray is not installed",
            where="command line: --on ray",
            fix="pip install 'optimize-toolchain[ray]', in the version of the cluster.",
        ) from None
    return ray


@contextmanager
def _connected(ray: Any) -> Iterator[None]:
    """Connect the process to the Ray cluster to search there during the `with`.

    A connection that existed before is kept.

    Raises MachineError if no cluster can be joined.
    """
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address="auto", logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise MachineError(
            f"no Ray cluster can be joined ({str(e).splitlines()[0]})",
            where="command line: --on ray",
            fix="Run the command on a machine of the cluster, such as one where `ray start --head` "
            "or `ray start --address=HEAD:6379` ran, or as a job (`ray job submit`).",
        ) from e
    try:
        yield
    finally:
        ray.shutdown()  # which also prints the last lines of the task


@contextmanager
def _mark(store: Root) -> Iterator[Mark]:
    """Yield a mark by which other nodes of Ray recognize the search's store.

    For a folder this is an empty file in it, removed at the end; for a bucket its identity.
    """
    if isinstance(store, SharedStore):
        yield store, store.identity()
        return
    with atomic.explain_disk_errors(store, "--store"):
        mark = store.resolve() / "search" / f"{uuid.uuid4().hex}.shared"
        mark.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(mark, b"")
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)


def _admitted(ray: Any, resources: Sequence[str], option: str = OPTION) -> list[Node]:
    """Return the cluster's living nodes for a search, that have all `resources`, by default a
    processor.

    option: command-line option that names the resources

    Raises MachineError if no node has them.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    names = resources or ("CPU",)
    admitted = [
        n
        for n in nodes
        if all(n["Resources"].get(name, 0) > 0 and name not in MEMORY for name in names)
    ]
    if not admitted:
        known = sorted({name for node in nodes for name in _resources(node)})
        near = "".join(suggest(name, known) for name in names if name not in known)
        named = "target" if names[-1] in MEMORY else names[-1]
        raise MachineError(
            f"no node of the Ray cluster has {' and '.join(map(repr, names))}{near}",
            where=f"command line: {option}",
            accepted="; ".join(
                f"{_name(node)}: " + (", ".join(_resources(node)) or "nothing") for node in nodes
            ),
            fix="Name a resource of such a node, or start one with it: ray start "
            f"--address=HEAD:6379 --resources='{{\"{named}\": 1}}'.",
        )
    return admitted


def _find_makers(ray: Any, nodes: Sequence[Node], ahead: Sequence[str]) -> list[Node]:
    """Return the nodes that make candidates ahead of the search: those with all resources `ahead`
    on which the search itself cannot run.

    nodes: nodes on which the search may run

    Raises MachineError if there is none.
    """
    if not ahead:
        return []
    busy = {node["NodeID"] for node in nodes}
    makers = [n for n in _admitted(ray, ahead, AHEAD) if n["NodeID"] not in busy]
    if not makers:
        raise MachineError(
            f"every node with {' and '.join(map(repr, ahead))} is one on which the search may run, "
            "where nothing else may disturb its times",
            where=f"command line: {AHEAD}",
            fix=f"Name the nodes that time with {OPTION}, by a resource that the others lack.",
        )
    return makers


def _resources(node: Node) -> list[str]:
    """Return the resources of a node of the Ray cluster that a user can give, without Ray's names
    of the node itself."""
    return sorted(
        name for name in node["Resources"] if not name.startswith("node:") and name not in MEMORY
    )


def _name(node: Node) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _check_nodes(ray: Any, nodes: Sequence[Node], mark: Mark) -> None:
    """Raise MachineError for a Ray node that does not see the store, or runs another version of
    this package."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(_why_not)
    answers = []
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": there, "max_retries": 0}
        answers.append(look.options(**options).remote(mark, _version()))
    for node, answer in zip(nodes, answers, strict=True):
        try:
            why, fix = ray.get(answer)
        except ray.exceptions.RayError as e:
            why = f"a task of this package fails there: {str(e).strip().splitlines()[-1]}"
            fix = f"Install optimize-toolchain {_version()} on every node."
        if why:
            raise MachineError(why, where=f"node {_name(node)}", fix=fix)


def _version() -> str:
    from optimizer import __version__

    return __version__


def _why_not(mark: Mark, version: str) -> tuple[str, str]:
    """Return (reason why this machine cannot run the search, fix); ("", "") if it can.

    mark: mark of the store, as `_mark` yields it
    version: version of the package that is required
    """
    if _version() != version:
        return (
            f"it has version {_version()} of optimize-toolchain, and this machine {version}",
            "Install the same version on every node.",
        )
    store = _store_of(mark)
    if isinstance(mark, Path):
        if not mark.is_file():
            return f"its folder {store} is not the store of this machine", ELSEWHERE
        return "", ""
    bucket, identity = mark
    try:
        same = bucket.identity() == identity
    except StoreError as e:
        return f"{e.where}: {e.problem}", e.fix
    return ("", "") if same else (f"{store} is another store there", "Give it the same endpoint.")


def _store_of(mark: Mark) -> Root:
    return mark.parent.parent if isinstance(mark, Path) else mark[0]


def _task(ray: Any, nodes: Sequence[Node], resources: Sequence[str]) -> Any:
    """Return the Ray task of a search.

    It takes all resources that the smallest of `nodes` has, so that no other task disturbs its
    times.
    """
    names = dict.fromkeys(("CPU", "GPU", *resources))
    takes = {name: min(node["Resources"].get(name, 0) for node in nodes) for name in names}
    say(
        f"search: one task on any of {len(nodes)} nodes ({', '.join(map(_name, nodes))}); "
        "it starts when all processors of one are free"
    )
    return ray.remote(_search).options(
        name="search",
        num_cpus=takes.pop("CPU"),
        num_gpus=takes.pop("GPU"),
        resources=takes,
        max_retries=0,
        runtime_env={"env_vars": SETTINGS},
    )


def _search(recipe: Recipe, mark: Mark, times: Table | None) -> Result | ExplainedError:
    """Search for the best candidate on this Ray node.

    An error of this package or of the system, such as a full disk, is returned and not raised: Ray
    would wrap it, and lose its error number.
    """
    from optimizer.search import search

    why, fix = _why_not(mark, _version())
    if why:
        return MachineError(why, where="the node of the search", fix=fix)
    try:
        return search.run(recipe, _store_of(mark), times=times)
    except ExplainedError as e:
        return e
    except Exception as e:
        if explained := explain_system_error(e):
            return explained
        raise


@contextmanager
def _making_ahead(ray: Any, makers: Sequence[Node], recipe: Recipe, mark: Mark) -> Iterator[None]:
    """Let each of `makers` make its share of the search's candidates ahead during the `with`.

    If one of them fails or dies, the search makes its candidates itself.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    tasks = []
    for number, node in enumerate(makers):
        options = {
            "name": "search, ahead",
            "num_cpus": node["Resources"].get("CPU", 0),
            "num_gpus": node["Resources"].get("GPU", 0),
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            "max_retries": 0,
            "runtime_env": {"env_vars": SETTINGS},
        }
        task = ray.remote(_make_share).options(**options)
        tasks.append(task.remote(recipe, mark, number, len(makers)))
    if makers:
        say(f"search: {len(makers)} nodes make candidates ahead ({', '.join(map(_name, makers))})")
    try:
        yield
    finally:
        for task in tasks:  # what a node has not finished is not needed any more
            ray.cancel(task, force=True)


def _make_share(recipe: Recipe, mark: Mark, number: int, of: int) -> int:
    """Make every `of`-th candidate of the search, from `number`, ahead of it on this Ray node;
    return how many.

    The order is that of the search before any result: candidates without a share in higher
    precision first, which need no measurement of modules.
    """
    from optimizer.search import candidates
    from optimizer.search.workbench import Workbench, explain_refusal

    space = sorted(candidates.list_candidates(recipe), key=lambda candidate: candidate.finer)
    bench, finished = Workbench(recipe, _store_of(mark), space[0]), 0
    bench.load()
    for candidate in space[number::of]:
        try:
            bench.make(candidate)
            finished += 1
        except Exception as e:  # the search has the same error, and reports it
            explain_refusal(candidate.label(recipe), e)
    return finished


def _until_done(ray: Any, task: Any, store: Root, arguments: tuple[Any, ...]) -> Any:
    """Run the search's Ray task until it returns; start it again after its node died or its process
    ended.

    search/progress.py then skips the candidate that ended the process.

    Raises MachineError after more than ENDS ends of the process without a finished step in between.
    """
    ended, steps = 0, -1
    while True:
        try:
            return ray.get(task.remote(*arguments))
        except ray.exceptions.NodeDiedError:
            say("search: its node died; it continues on another one, or waits for one")
        except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as e:
            now = finished_steps(store)
            ended, steps = ended + 1 if now == steps else 1, now
            if ended > ENDS:
                raise MachineError(
                    f"the process of the search ended {ended} times without finishing a step in "
                    f"between ({type(e).__name__})",
                    where="node of the search",
                    fix="It mostly lacked memory; name a larger node with --ray-resource. "
                    "Finished steps are kept.",
                ) from e
            say("search: its process ended, as for want of memory; it starts again")
