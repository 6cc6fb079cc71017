"""Airflow: optimize, then publish. Copy it to the folder of DAGs.

    airflow dags test optimize --conf '{"recipe": "recipe.yaml", "publish_to": "oci://..."}'

A gate that fails (3) or does not decide (4) skips what follows; an error fails. Only exit 1, which
may go better another time, is tried again: by Airflow's `retries`, which the store makes cheap.
"""

import json
import subprocess
from pathlib import Path

from airflow.sdk import Param, dag, task
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException


@dag(
    "optimize",
    schedule=None,
    params={
        "recipe": Param("recipe.yaml", type="string", description="The recipe's file."),
        "work": Param("optimize", type="string", description="A folder, kept between runs."),
        "publish_to": Param("", type="string", description="An address; empty: nowhere."),
    },
)
def release():
    @task(multiple_outputs=True, retries=1)
    def optimize(params: dict) -> dict:
        work = Path(params["work"])
        out = work / "outputs"
        places = ["--store", str(work / "store"), "--artifacts", str(work / "artifacts")]
        command = ["optimize", "step", "--outputs", str(out), *places, "--", params["recipe"]]
        code = subprocess.run(command).returncode
        file = out / "summary.md"  # missing where optimize was killed
        summary = file.read_text() if file.exists() else ""
        if code in (3, 4):
            raise AirflowSkipException(summary)
        if code:
            error = AirflowException if code == 1 else AirflowFailException
            raise error(f"exit code {code}: {summary}")
        values = {name: (out / name).read_text() for name in ("digest", "bundle")}
        return {
            "verdict": "pass",
            **values,
            "metrics": json.loads((out / "metrics.json").read_text()),
        }

    @task
    def publish(bundle: str, params: dict) -> None:
        if not params["publish_to"]:
            raise AirflowSkipException("publish_to is empty")
        subprocess.run(["optimize", "publish", "--", bundle, params["publish_to"]], check=True)

    publish(optimize()["bundle"])


release()
