"""Load a bundle for mlflow.pyfunc.load_model; this file is copied into MLflow's model.

It needs only the packages in the bundle's requirements.txt, neither mlflow nor this toolchain. The
bundle's harness predicts, after its files were compared with the manifest.
https://mlflow.org/docs/latest/api_reference/python_api/mlflow.pyfunc.html, "Filesystem format".
"""

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any


class PyfuncModel:
    """Model object by which MLflow runs a bundle. folder: folder of the bundle"""

    def __init__(self, folder: Path) -> None:
        package = import_harness(folder)
        self.bundle: Any = importlib.import_module(f"{package}.bundle.bundle").Bundle(folder)
        self.name: str = self.bundle.task.inputs.name

    def predict(self, model_input: Any, params: Any = None) -> list[dict[str, Any]]:
        """Answer MLflow's calls: return one answer per input, as `harness predict --json` does.

        model_input: list of texts, or data frame or list of dicts with the columns "text" and,
            optionally, "text_pair"; other kinds of input have their own name in place of "text".

        Raises ValueError for other inputs, and for params, which are not supported.
        """
        if params:
            raise ValueError(f"params are not supported; {', '.join(params)} was given")
        rows = model_input.to_dict("records") if hasattr(model_input, "to_dict") else model_input
        if isinstance(rows, str | dict) or not hasattr(rows, "__iter__"):
            raise ValueError(f"a list or a data frame of {self.name}s is needed")
        inputs, pairs = [], []
        for number, row in enumerate(rows):
            values = row if isinstance(row, dict) else {self.name: row}
            if self.name not in values or {*values} - {self.name, f"{self.name}_pair"}:
                raise ValueError(
                    f"row {number} has the columns {', '.join(map(str, values))}; accepted: "
                    f"{self.name}, {self.name}_pair"
                )
            inputs.append(values[self.name])
            pair = values.get(f"{self.name}_pair")
            pairs.append(None if isinstance(pair, float) else pair)  # NaN: empty in a data frame
        seconds = pairs if any(pair is not None for pair in pairs) else None
        answers: list[dict[str, Any]] = self.bundle.predict(inputs, seconds)
        return answers


def import_harness(folder: Path) -> str:
    """Import, for MLflow, the bundle's package `harness` under a name unique to the bundle, and
    return the name. Raises ImportError for changed sources."""
    package = folder / "harness"
    digest = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    name = f"bundle_harness_{digest[:16]}"
    if name in sys.modules:
        return name
    spec = importlib.util.spec_from_file_location(
        name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{package} is not a package")
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.leave_no_bytecode(spec.cached)
    if problem := module.describe_damage(str(package)):
        raise ImportError(f"{folder}: {problem}")
    sys.modules[name] = module
    return name


def _load_pyfunc(data_path: str) -> PyfuncModel:
    """Open the published bundle at a path. mlflow.pyfunc.load_model calls this function by name."""
    return PyfuncModel(Path(data_path))
