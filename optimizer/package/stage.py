"""Stage package: assemble the bundle, one folder that runs on other machines.

Writes out/bundle/ and, unless package.tar is false, out/<name>-<version>.tar:
    manifest.json                   see harness/bundle/manifest.py
    model/<target>/                 portable ONNX; equal files of targets are stored once. For a
                                    decoder also genai_config.json, tokenizer and chat template, so
                                    that onnxruntime-genai opens the folder
    engines/<target>/               engine.json, and the engine where the runtime has one
    tokenizer/                      tokenizer files that the harness loads
    texts/                          the model that reads labels of requests, see label_texts.py; of
                                    a bundle that embeds images and texts a bundle of the latter
    harness/  requirements.txt      code that runs the bundle, and its pinned packages
    requirements-serve.txt          packages of `serve`, where installed here
    verify.py                       compares all files with the manifest before any code runs
    web/                            of target onnxruntime-web: the page, see web_page.py
    report.html  report.json        measurements, also of dropped targets
    LICENSE*  NOTICE*               of the model, where its checkpoint has them
The same inputs give the same bytes.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimizer import harness, targets
from optimizer.foundation import atomic
from optimizer.foundation.errors import MachineError, OptimizeError
from optimizer.foundation.references import resolve
from optimizer.harness import tasks
from optimizer.harness.bundle.manifest import TEXTS, read_manifest
from optimizer.harness.contract import adapter_file
from optimizer.harness.runtimes import table
from optimizer.load import outside_task
from optimizer.load.source import LICENCES
from optimizer.package import label_texts, on_fail, shipped
from optimizer.package import manifest as manifests
from optimizer.package.genai_config import TOKENIZER_FILES
from optimizer.recipe.schema import Packaging, Recipe, TargetSection
from optimizer.store import (
    Built,
    Estimate,
    LabelModelSteps,
    Shapes,
    Stage,
    digest_file,
    lowered_bytes,
    package_version,
)
from optimizer.targets.record import Packed
from optimizer.validate.judged import read_contract

MADE_WITH = (
    "datasets",
    "jinja2",
    "numpy",
    "onnx",
    "onnx-ir",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxscript",
    "optimize-toolchain",
    "tensorrt",
    "tensorrt-rtx",
    "tokenizers",
    "torch",
    "transformers",
)
HARNESS = Path(str(harness.__file__)).parent
PAGE = Path(__file__).parent / "web"
TEMPLATES = Path(__file__).parent / "report" / "templates"
VERIFY = Path("trust", "verify.py")
SERVE = ("grpcio", "h11", "llguidance", "orjson", "protobuf", "starlette", "uvicorn", "uvloop")
TRACES = ("opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk")
SUPERSEDED = {"onnxruntime-gpu": "onnxruntime"}
"""{package: a package with the same module that it makes unnecessary}"""
TWINS = {"onnxruntime-gpu": "onnxruntime", "onnxruntime": "onnxruntime-gpu"}
"""{package: other build of the same module}"""


def run(
    section: Packaging,
    source: Path,
    state: Path,  # noqa: ARG001
    built: Sequence[Built[Path]],
    texts: LabelModelSteps[Path] | Path | None = None,
    *,
    out: Path,
) -> None:
    """Write the bundle of all proven targets into `out`. built: folders of each finished target, in
    the recipe's order.

    state: not read; an input so that the bundle's key depends on it
    texts: the model that reads the labels of requests, or the folder of package of the side of
        texts

    Raises GateError where the finished bundle differs from what was judged (shipped.py).
    """
    bundle = out / "bundle"
    bundle.mkdir()
    names, sections = list_kept_targets(section)
    rules = [t.on_fail for t in sections]
    reports = on_fail.mark_dropped(rules, [_read(b.report / "report.json") for b in built])
    _add_tokenizer(bundle, source)
    _add_adapters(bundle, source)
    second = _add_texts(bundle, texts, source)
    engines: list[dict[str, Any]] = []
    shipped_targets: list[TargetSection] = []
    for name, target, steps, report in zip(names, sections, built, reports, strict=True):
        if report["dropped"]:
            continue
        shipped_targets.append(target)
        engines.append(_add_target(bundle, name, target, steps, engines))
        if beside := targets.look_up(target.runtime).package:
            resolve(beside)(
                Packed(section.name, bundle, engines[-1], source, steps.model, steps.engine, report)
            )
    licences = _add_licences(bundle, source)
    _add_harness(bundle, section.recipe.model.task)
    others = label_texts.PACKAGES if isinstance(texts, LabelModelSteps) else ()
    if section.recipe.texts is not None:
        others = section.recipe.texts.target.harness_packages
    (bundle / "requirements.txt").write_text(
        write_requirements(shipped_targets, section.recipe.model.task, others)
    )
    if serve := serve_requirements():
        (bundle / "requirements-serve.txt").write_text(serve)

    origin = _read(source / "source.json")
    document = {
        "name": section.name,
        "version": section.package.version,
        "verdict": on_fail.judge_targets(rules, [r["verdict"] for r in reports]),
        "verdicts": {
            n: r["verdict"] for n, r in zip(names, reports, strict=True) if not r["dropped"]
        },
        "dropped": [*list_left_out(section), *on_fail.describe_dropped(names, reports)],
        "source": origin,
        "licence": section.package.licence or origin.get("licence", ""),
        "licence_files": licences,
        "recipe": section.recipe.model_dump(mode="json", by_alias=True),
        "calibration": data_digests(section.recipe),
        "packages": {p: v for p in MADE_WITH if (v := package_version(p)) is not None},
        "contract": read_contract(source, built[0].report),
        **second,
        "engines": engines,
        "runnable": any(table.look_up(e["runtime"]).runs for e in engines),
    }
    _add_report(bundle, document, origin, reports)
    manifests.write(bundle, document)
    shipped.check(bundle, [b.report for b in built])
    if section.package.tar:
        label = f"{section.name}-{section.package.version}"
        write_tar(bundle, out / f"{label}.tar", label)


def name_targets(sections: Sequence[TargetSection]) -> list[str]:
    """Name each target's folder in the bundle: "onnxruntime-cpu"; if repeated also
    "onnxruntime-cpu-2"."""
    names: list[str] = []
    for base in (s.name for s in sections):
        same = sum(n == base or n.startswith(f"{base}-") for n in names)
        names.append(f"{base}-{same + 1}" if same else base)
    return names


def list_kept_targets(section: Packaging) -> tuple[list[str], list[TargetSection]]:
    """Return (names, sections) of the targets that every stage made, in the recipe's order."""
    missing, sections = {x.target for x in section.left_out}, section.recipe.targets
    named = enumerate(zip(name_targets(sections), sections, strict=True))
    here = [pair for i, pair in named if i not in missing]
    return [name for name, _ in here], [target for _, target in here]


def list_left_out(section: Packaging) -> list[dict[str, str]]:
    """Return {target, gate, message} of each target that a stage could not make; "gate" is the name
    of the stage."""
    names = name_targets(section.recipe.targets)
    return [
        {"target": names[x.target], "gate": x.stage, "message": x.message} for x in section.left_out
    ]


def write_requirements(
    sections: Sequence[TargetSection], task: str, others: Sequence[str] = ()
) -> str:
    """Return the text of a bundle's requirements.txt: packages that the harness imports for a task
    and the bundle's targets, and others, at the versions installed here."""
    known = tasks.find_task(task)
    packages = ["numpy", *known.inputs.requires]
    packages += sorted({p for s in sections for p in s.harness_packages} | set(others))
    packages += known.requires
    superseded = {SUPERSEDED.get(name) for name in packages}
    return "".join(f"{n}=={_version(n)}\n" for n in packages if n not in superseded)


def serve_requirements() -> str:
    """Return the text of a bundle's requirements-serve.txt at the versions installed here, with
    packages of `serve --otlp-endpoint` where installed; "" where a package of SERVE is missing."""
    versions = {name: package_version(name) for name in SERVE}
    if None in versions.values():
        return ""
    versions |= {name: v for name in TRACES if (v := package_version(name)) is not None}
    return "".join(f"{name}=={version}\n" for name, version in versions.items())


def _version(distribution: str) -> str:
    """Return a distribution's version to pin in a bundle's requirements: the installed one. A build
    of ONNX Runtime that is not installed gets the other build's minor release, "1.31.*", because
    patches may differ.

    Raises MachineError where no build is installed, so no version was tested.
    """
    version = package_version(distribution)
    if version is not None:
        return version
    other = package_version(TWINS.get(distribution, distribution))
    if other is None:
        raise MachineError(
            f"{distribution} is not installed, so no version of it was tested",
            where="requirements.txt of the bundle",
            fix=f"pip install {distribution}",
        )
    return ".".join([*other.split(".")[:2], "*"])


def data_digests(recipe: Recipe) -> dict[str, str]:
    """Return for a bundle's manifest {use: digest of the rows} of every data set that the recipe
    reads."""
    from optimizer.data import datasets

    reduce, recovery, training = recipe.reduce, recipe.recovery, recipe.training
    used = {
        "calibrate": recipe.calibrate.data if recipe.calibrate else None,
        "reduce": reduce.calibrate.data if reduce and reduce.calibrate else None,
        "recover": recovery.data if recovery else None,
        "qat": training.data if training else None,
        "validate": recipe.validate_.data,
        "train": recipe.validate_.train,
        "latency": recipe.validate_.latency.data,
        "queries": recipe.embeddings.queries if recipe.embeddings else None,
        "documents": recipe.embeddings.documents if recipe.embeddings else None,
        **{f"also.{name}": part.data for name, part in recipe.validate_.also.items()},
        **{
            f"adapter.{name}": spec or recipe.validate_.data
            for name, spec in recipe.model.adapter_data.items()
        },
    }
    return {use: datasets.digest_rows(spec) for use, spec in used.items() if spec is not None}


def write_tar(folder: Path, tar: Path, top: str) -> None:
    """Write the bundle's tar of `folder` under the name `top`, with the same bytes for the same
    files."""
    with tarfile.open(tar, "w", format=tarfile.PAX_FORMAT) as archive:
        for path in [folder, *sorted(folder.rglob("*"))]:
            name = Path(top) / path.relative_to(folder)
            archive.add(path, str(name), recursive=False, filter=strip_member)


def strip_member(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Strip a file's entry in the bundle's tar of owner and time, and set its mode to 644 or 755,
    so that equal bundles are equal bytes."""
    member.mtime = member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.isdir() else 0o644
    return member


def _add_target(
    bundle: Path,
    name: str,
    target: TargetSection,
    steps: Built[Path],
    earlier: list[dict[str, Any]],
) -> dict[str, Any]:
    """Copy into the bundle one target's model and engine, and return its entry in the manifest."""
    files = _add_model(
        bundle, name, targets.look_up(target.runtime).model_files(steps.model), earlier
    )
    engine = steps.engine
    built = _read(engine / "engine.json")
    folder = bundle / "engines" / name
    folder.mkdir(parents=True)
    shutil.copyfile(engine / "engine.json", folder / "engine.json")
    timings = built.get("timing_cache")
    for extra in filter(None, (built["engine"], timings)):
        atomic.copy(engine / extra, folder / extra)
    return {
        "target": name,
        "runtime": target.runtime,
        "device": target.device,
        "provider": target.execution_provider,
        "threads": target.intra_op_threads,
        "model": files[0],
        "model_files": files,
        "engine": f"engines/{name}/{built['engine']}" if built["engine"] else None,
        "timing_cache": f"engines/{name}/{timings}" if timings else None,
        "deferred": built["deferred"],
        "why": built["why"],
        "fit": built["fit"],
        "fallbacks": built["fallbacks"],
    }


def _add_model(
    bundle: Path, name: str, paths: Sequence[Path], earlier: list[dict[str, Any]]
) -> list[str]:
    """Copy a target's files to the bundle's model/<name>/, unless all files of an earlier target
    are equal and in the same order; return the names in the bundle."""
    digests = [digest_file(p) for p in paths]
    for other in earlier:
        same: list[str] = other["model_files"]
        if [digest_file(bundle / n) for n in same] == digests:
            return same
    folder = bundle / "model" / name
    folder.mkdir(parents=True)
    if len({path.name for path in paths}) < len(paths):
        raise OptimizeError(
            f"files of {name} have the same name: {', '.join(sorted(p.name for p in paths))}",
            where="package: model files",
            fix="The target's record must list files with different names (Target.files).",
        )
    for path in paths:
        atomic.copy(path, folder / path.name)
    return [f"model/{name}/{p.name}" for p in paths]


def _add_tokenizer(bundle: Path, source: Path) -> None:
    folder = bundle / "tokenizer"
    folder.mkdir()
    layers = (_read(source / "contract.json").get("embedding") or {}).get("file")
    for name in (*TOKENIZER_FILES, *([layers] if layers else [])):
        if (source / "checkpoint" / name).is_file():
            shutil.copyfile(source / "checkpoint" / name, folder / name)


def _add_texts(
    bundle: Path, texts: LabelModelSteps[Path] | Path | None, source: Path
) -> dict[str, Any]:
    """Add the second model of a bundle that has one.

    Returns {"texts": its content digest} if it is a bundle itself, else {}.

    texts: the model that reads labels of requests, the folder of stage package of the text model,
        or None
    source: folder of load of the image model
    """
    if isinstance(texts, LabelModelSteps):
        label_texts.add(bundle, texts, source)
    if isinstance(texts, LabelModelSteps) or texts is None:
        return {}
    shutil.copytree(texts / "bundle", bundle / TEXTS)
    return {"texts": read_manifest(bundle / TEXTS)["content_digest"]}


def _add_adapters(bundle: Path, source: Path) -> None:
    for file in sorted(source.glob(adapter_file("*"))):
        (bundle / file.relative_to(source)).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, bundle / file.relative_to(source))


def _add_licences(bundle: Path, source: Path) -> list[str]:
    licences = {p.name: p for glob in LICENCES for p in (source / "checkpoint").glob(glob)}
    for name, path in licences.items():
        shutil.copyfile(path, bundle / name)
    return sorted(licences)


def _add_harness(bundle: Path, task: str) -> None:
    """Copy the harness's sources as the package `harness`, verify.py also to the top folder, and
    the module of a task that another package defines."""
    for path in sorted(HARNESS.rglob("*.py")):
        target = bundle / "harness" / path.relative_to(HARNESS)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    shutil.copyfile(HARNESS / VERIFY, bundle / VERIFY.name)
    brought = outside_task.read_source(task)
    if brought is not None:
        (bundle / "harness" / "tasks" / outside_task.name_file(task)).write_text(brought)


def _add_report(
    bundle: Path, document: dict[str, Any], source: dict[str, Any], reports: list[dict[str, Any]]
) -> None:
    from optimizer.package.report.page import render

    page = render(
        {
            "name": document["name"],
            "recipe": document["recipe"],
            "source": source,
            "reports": reports,
            "manifest": document,
        }
    )
    (bundle / "report.html").write_text(page, encoding="utf-8")
    text = json.dumps(reports, indent=1, sort_keys=True)
    (bundle / "report.json").write_text(text, encoding="utf-8")


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def estimate(section: Packaging, shapes: Shapes) -> Estimate:
    """Predict the needs of writing the bundle. Disk: models and engines, twice with a tar. Memory:
    a process that opens one engine at a time and answers judged rows."""
    records = [targets.look_up(t.runtime) for t in section.recipe.targets]
    widths = [4 if t.float_type == "fp32" else 2 for t in section.recipe.targets]
    sizes = [lowered_bytes(shapes, width) for width in widths]
    size = sum(s * (2 if r.engine_files else 1) for s, r in zip(sizes, records, strict=True))
    opened = [r.cost.memory + round(r.cost.copies * s) for s, r in zip(sizes, records, strict=True)]
    copies = 2 if section.package.tar else 1
    return Estimate(
        memory=max(opened), disk=copies * size, seconds=len(records) + copies * size / 200e6
    )


def digest_sources(
    section: Packaging, folder: Path = HARNESS, templates: Path = TEMPLATES
) -> dict[str, str]:
    """Return, for the key of stage package, {name: digest} of the harness's sources, the report's
    templates, the web page, and the code that adds files to a target's model."""
    code: dict[str, str] = {}
    for target in section.recipe.targets:
        code |= targets.look_up(target.runtime).code("package")
    return (
        code
        | {
            f"harness/{p.relative_to(folder).as_posix()}": digest_file(p)
            for p in sorted(folder.rglob("*.py"))
        }
        | {f"report/{p.name}": digest_file(p) for p in sorted(templates.iterdir())}
        | {f"web/{p.name}": digest_file(p) for p in sorted(PAGE.iterdir())}
        | outside_task.digest_files(section.recipe.model.task)
    )


STAGE = Stage("package", 2, run, packages=MADE_WITH, files=digest_sources, estimate=estimate)
