"""Metaflow: `python flow.py run --recipe recipe.yaml`. A gate that fails ends the flow."""

import json
import subprocess
from pathlib import Path

from metaflow import FlowSpec, Parameter, step


class Optimize(FlowSpec):
    recipe = Parameter("recipe", required=True, help="The recipe's file.")
    work = Parameter("work", default="optimize", help="A folder that is kept between runs.")
    publish_to = Parameter("publish-to", default="", help="An address; empty: nowhere.")

    @step
    def start(self):
        work = Path(self.work)
        out = work / "outputs"
        places = ["--store", str(work / "store"), "--artifacts", str(work / "artifacts")]
        command = ["optimize", "step", "--outputs", str(out), *places, "--", self.recipe]
        code = subprocess.run(command).returncode
        if code:  # the files say why, where there are any
            raise SystemExit(f"exit code {code}")
        self.verdict = "pass"
        self.digest, self.bundle = ((out / name).read_text() for name in ("digest", "bundle"))
        self.metrics = json.loads((out / "metrics.json").read_text())
        self.report = (out / "report.html").read_text() if self.bundle else ""
        self.next(self.publish)

    @step
    def publish(self):
        if self.publish_to:
            subprocess.run(["optimize", "publish", "--", self.bundle, self.publish_to], check=True)
        self.next(self.end)

    @step
    def end(self):
        print(self.verdict, self.digest)


if __name__ == "__main__":
    Optimize()
