"""Search on a node of Slurm, by submitit: python search.py my.yaml --cpus 8 --hours 12

Run it on a login node; recipe, model, data and store lie on a file system that the nodes share.
A job that is preempted, or reaches its time, is queued again, and finds its finished steps.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import submitit


class Search:
    """Job: one search, with its files beside the recipe."""

    def __init__(self, recipe: str) -> None:
        self.recipe = Path(recipe).resolve()

    def __call__(self) -> int:
        to = str(self.recipe.parent / "artifacts")
        store = f"{to}/store"
        words = ["optimize", "search", "--store", store, "--artifacts", to, "--", str(self.recipe)]
        return subprocess.run(words).returncode

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Queue the job again."""
        return submitit.helpers.DelayedSubmission(self)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--partition")
    parser.add_argument("--cpus", type=int, default=8)
    parser.add_argument("--hours", type=float, default=12.0)
    parser.add_argument("--logs", default="logs")
    parser.add_argument("--cluster", help="local: on this machine, without Slurm")
    args = parser.parse_args()
    executor = submitit.AutoExecutor(folder=args.logs, cluster=args.cluster)
    executor.update_parameters(
        name="optimize-search",
        timeout_min=round(60 * args.hours),
        cpus_per_task=args.cpus,
        slurm_exclusive=True,  # so that nothing else runs on the node
        **({"slurm_partition": args.partition} if args.partition else {}),
    )
    job = executor.submit(Search(args.recipe))
    print(f"job {job.job_id}: {job.paths.stderr}", flush=True)
    return int(job.result())


if __name__ == "__main__":
    raise SystemExit(main())
