"""Kubeflow Pipelines: optimize, and publish, which fails where the gates did not pass.

    python pipeline.py                     # writes pipeline.yaml, to upload

IMAGE has optimize-toolchain in it (pipelines/images/cpu.Dockerfile); KFP adds its own package.
A run that ends at a gate is no failure of the first step, since KFP keeps no outputs of a failed
one: its verdict is an output, which the next step reads. (The local runner does not know dsl.If on
the output of a step: it skips what follows, and says that all went well.)
"""

from typing import NamedTuple

from kfp import compiler, dsl

IMAGE = "optimize-toolchain:latest"


@dsl.component(base_image=IMAGE)
def optimize(
    recipe: str,
    work: str,
    bundle: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
) -> NamedTuple("Outputs", [("verdict", str), ("digest", str)]):  # type: ignore[valid-type]
    """recipe: its file. work: a folder that is kept between runs, with the finished steps."""
    import json
    import shutil
    import subprocess
    import sys
    from collections import namedtuple
    from pathlib import Path

    out = Path(work, "outputs")
    places = ["--store", f"{work}/store", "--artifacts", f"{work}/artifacts"]
    command = ["optimize", "step", "--outputs", str(out), *places, "--", recipe]
    code = subprocess.run(command).returncode
    verdicts = {0: "pass", 3: "fail", 4: "inconclusive"}
    if code not in verdicts:  # the files may be missing
        sys.exit(f"exit code {code}")
    verdict, digest, folder = verdicts[code], *((out / n).read_text() for n in ("digest", "bundle"))
    for name, value in json.loads((out / "metrics.json").read_text()).items():
        metrics.log_metric(name, value)
    shutil.copy(out / "report.html", report.path)
    if folder:
        shutil.copytree(folder, bundle.path, dirs_exist_ok=True)
        bundle.metadata["digest"] = digest
    return namedtuple("Outputs", ["verdict", "digest"])(verdict, digest)


@dsl.component(base_image=IMAGE)
def publish(bundle: dsl.Input[dsl.Model], verdict: str, to: str):
    import subprocess
    import sys

    if verdict != "pass":
        sys.exit(f"not published: the verdict is {verdict}")
    subprocess.run(["optimize", "publish", "--", bundle.path, to], check=True)


@dsl.pipeline(name="optimize")
def release(recipe: str, work: str, publish_to: str):
    made = optimize(recipe=recipe, work=work)
    publish(bundle=made.outputs["bundle"], verdict=made.outputs["verdict"], to=publish_to)


if __name__ == "__main__":
    compiler.Compiler().compile(release, "pipeline.yaml")
