"""Messages about a wrong recipe: file, line, path, the value found, the values accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from optimizer.checks import accepted, timed_targets
from optimizer.checks.context import Context
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.yaml_lines import read_yaml
from optimizer.recipe import file as recipe_file
from optimizer.recipe import schema as recipe
from optimizer.recipe.recover import LossWeights
from optimizer.recipe.validate import Validate

GOOD = """\
name: x
model:
  source: somewhere
  task: sentence-embedding
calibrate:
  data: {source: text, files: [a.txt]}
quantize:
  weights: {bits: 8}
  activations: {range: mse}
targets:
  - runtime: onnxruntime
    device: cpu
validate:
  data: {source: text, files: [b.txt]}
  metric: cosine
"""


def read(tmp_path: Path, text: str, *overrides: str) -> recipe.Recipe:
    file = tmp_path / "r.yaml"
    file.write_text(text)
    made, lines = recipe_file.read_with_lines(file, overrides)
    with recipe_file.locate_errors(lines):
        accepted.check(made, Context())
        timed_targets.check(made, Context())
    return made


@pytest.mark.parametrize(
    ("latency", "message"),
    [
        ("iterations: 5, max_seconds: 0", ""),
        ("iterations: 40, max_seconds: 0, p99_ms: 9", r"never decide p99_ms, which takes 368 runs"),
        ("iterations: 5", ""),
        ("iterations: 368, max_seconds: 0, p99_ms: 9", ""),
    ],
)
def test_so_few_iterations_that_nothing_can_be_decided_are_refused_where_none_may_follow(
    tmp_path: Path, latency: str, message: str
) -> None:
    text = GOOD.replace("  metric: cosine", f"  metric: cosine\n  latency: {{{latency}}}")
    if not message:
        assert read(tmp_path, text).validate_.latency.iterations >= 5
        return
    with pytest.raises(RecipeError, match=message):
        read(tmp_path, text)


def test_a_gate_on_the_ratio_to_float_needs_the_float_model_timed(tmp_path: Path) -> None:
    untimed = "  metric: cosine\n  latency: {time_float: false}"
    with pytest.raises(RecipeError, match="nothing for must_beat_float to compare with"):
        read(tmp_path, GOOD.replace("  metric: cosine", untimed))


@pytest.mark.parametrize(
    ("line", "at", "now"),
    [
        ("  method: distill", "quantize.method", "scale_tuning"),
        ("  methods: [gptq, keep]", "quantize.methods.1", "pass_through"),
        ("  method: rotate", "quantize.method", "rotation"),
        ("  rotate: {seed: 1}", "quantize.rotate", "rotation"),
        ("  distill: {epochs: 1}", "quantize.distill", "scale_tuning"),
        ("  scale_tuning: {together: 1}", "quantize.scale_tuning.together", "batch_size"),
        ("  gptq: {asymmetric: true}", "quantize.gptq.asymmetric", "float_target"),
        ("  gptq: {widest: 3.0}", "quantize.gptq.widest", "max_scale_ratio"),
        ("  allocate: {together: true}", "quantize.allocate.together", "share_choice"),
    ],
)
def test_the_name_of_an_earlier_version_is_refused_with_the_new_one(
    tmp_path: Path, line: str, at: str, now: str
) -> None:
    text = GOOD.replace("  weights: {bits: 8}", line)
    with pytest.raises(RecipeError, match=rf"r\.yaml:8: {at}: .* renamed to {now}"):
        read(tmp_path, text)


def test_a_targets_option_of_an_earlier_version_is_refused_with_its_new_name(
    tmp_path: Path,
) -> None:
    text = GOOD.replace("    device: cpu", "    allow_wider: true")
    message = r"r\.yaml:12: targets\.0\.allow_wider: .* renamed to allow_precision_fallback"
    with pytest.raises(RecipeError, match=message):
        read(tmp_path, text)


ALSO = "  metric: cosine\n  also: {{novels: {{data: {data}, report_only: true}}}}"


def test_further_evaluation_sets_are_read_from_their_files(tmp_path: Path) -> None:
    (tmp_path / "novels.yaml").write_text("{source: text, files: [c.txt]}")
    text = GOOD.replace("  metric: cosine", ALSO.format(data="novels.yaml"))
    (novels,) = read(tmp_path, text).validate_.also.values()
    assert (novels.data.files, novels.report_only) == (("c.txt",), True)
    assert novels.data.base == str(tmp_path.resolve())


def test_adapters_are_named_alone_or_with_texts_that_judge_them(tmp_path: Path) -> None:
    (tmp_path / "sql.yaml").write_text("{source: text, files: [c.txt]}")
    kept = "{keep: hot, sources: {law: ./law, sql: {source: ./sql, data: sql.yaml}}}"
    recipe = read(tmp_path, GOOD.replace("model:\n", f"model:\n  adapters: {kept}\n"))
    assert recipe.model.hot == {"law": "./law", "sql": "./sql"}
    spec = recipe.data_specs["model.adapters.sources.sql.data"]
    assert (spec.files, spec.base) == (("c.txt",), str(tmp_path.resolve()))
    section = recipe.validation(recipe.targets[0])
    assert section.adapters == {"law": None, "sql": spec}
    assert recipe.model.without_data.adapter_data == {"law": None, "sql": None}


@pytest.mark.parametrize(
    ("data", "more", "message"),
    [
        ("{source: text, fils: []}", "", r"validate\.also\.novels\.data\.fils: unknown key; did"),
        (
            "{source: text, files: [c.txt]}, report: true",
            "",
            r"novels\.report: unknown key.*report_",
        ),
        ("{source: text}", "metric: retrieval", r"in also\.novels\.data\.columns, which has text"),
    ],
)
def test_a_wrong_further_set_is_named(tmp_path: Path, data: str, more: str, message: str) -> None:
    text = GOOD.replace("  metric: cosine", ALSO.format(data=data))
    if more:
        text = text.replace("metric: cosine", more)
        text = text.replace("[b.txt]}", "[b.txt], columns: {text: t, label: l}}")
    with pytest.raises(RecipeError, match=message):
        read(tmp_path, text)


def test_a_good_recipe_is_read_with_its_defaults(tmp_path: Path) -> None:
    r = read(tmp_path, GOOD)
    assert r.quantize.rounding.name == "rtn"
    assert r.calibrate is not None
    assert r.calibrate.samples == 256


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "  source: somewhere",
            "  sorce: somewhere",
            r'r\.yaml:3: model\.sorce: unknown key; did you mean "source"\?',
        ),
        (
            "device: cpu",
            "device: cup",
            r'r\.yaml:12: targets\.0\.device: "cup" was found; did you mean "cpu"\?',
        ),
        ("bits: 8", "bits: eight", r"r\.yaml:8: quantize\.weights\.bits: \"eight\" was found"),
        ("bits: 8", "bits: 8.5", r"r\.yaml:8: quantize\.weights\.bits: 8\.5 was found"),
        ("files: [b.txt]", "files: b.txt", r'Accepted: a list, such as \["b.txt"\]'),
        (
            "name: x",
            "name: x\nsearch: {over: {targets: 0}}",
            r"targets: 0 was found\. Accepted: 'all' or a list, such as \[0\]",
        ),
        ("name: x", "name: X y", r"r\.yaml:1: name: "),
        ("  metric: cosine", "", r"r\.yaml:13: validate\.metric: missing and required"),
        ("runtime: onnxruntime", "runtime: tensorflow", r"r\.yaml:11: targets\.0"),
        ("{bits: 8}", "{bits: 8, granularity: group}", r"r\.yaml:8: .*group_size is required"),
        ("{range: mse}", "{range: mse, percentile: 99}", r"percentile is given but range is mse"),
        ("calibrate:\n  data: {source: text, files: [a.txt]}\n", "", "calibrate is missing"),
        (
            "data: {source: text, files: [b.txt]}",
            "data: b.yaml",
            "was not found in .*, where its path starts",
        ),
        (
            "data: {source: text, files: [b.txt]}",
            "data: /no/b.yaml",
            "not found in /no. Correct",
        ),
        ("name: x", "name: x\nname: y", r"r\.yaml:2: key 'name' is given twice"),
        ("name: x", "name: [x", r"r\.yaml:\d+: not valid YAML"),
        ("name: x", "name: x\npackage: {version: ../victim}", r"r\.yaml:2: package\.version: "),
        ("files: [b.txt]}", "files: [b.txt], labels: [a, b, a]}", r"label 'a' is listed twice"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in GOOD
    with pytest.raises(RecipeError, match=message) as caught:
        read(tmp_path, GOOD.replace(old, new, 1))
    assert caught.value.exit_code == 2


TEXT = "text: text"


@pytest.mark.parametrize(
    ("task", "metric", "columns", "message"),
    [
        ("sentence-embedding", "accuracy", f"{TEXT}, label: l", "does not apply.*probe_accuracy"),
        ("sentence-embedding", "f1", f"{TEXT}, label: l", "does not apply"),
        ("feature-extraction", "retrieval", f"{TEXT}, label: l", "accepted: cosine"),
        (
            "text-classification",
            "probe_accuracy",
            f"{TEXT}, label: l",
            "accuracy, f1, micro_f1, spearman, cosine",
        ),
        ("token-classification", "spearman", f"{TEXT}, tags: t", "f1, accuracy, cosine"),
        ("sentence-embedding", "retrieval", TEXT, "a column for text_pair or label"),
        ("sentence-embedding", "spearman", f"{TEXT}, score: s", "text_pair and score"),
        ("sentence-embedding", "probe_accuracy", TEXT, "a column for label in data"),
        ("sentence-embedding", "probe_accuracy", f"{TEXT}, label: l", "needs a train block"),
        ("text-classification", "accuracy", f"{TEXT}, tags: t", "a column for label"),
        ("token-classification", "f1", f"{TEXT}, label: l", "a column for tags"),
    ],
)
def test_a_metric_must_suit_the_task_and_the_columns(
    tmp_path: Path, task: str, metric: str, columns: str, message: str
) -> None:
    with pytest.raises(RecipeError, match=rf"r\.yaml:13: validate: metric {metric} .*{message}"):
        read(tmp_path, judged(task, metric, columns))


@pytest.mark.parametrize(
    ("task", "metric", "columns"),
    [
        ("sentence-embedding", "retrieval", f"{TEXT}, text_pair: p"),
        ("sentence-embedding", "retrieval", f"{TEXT}, label: l"),
        ("sentence-embedding", "spearman", f"{TEXT}, text_pair: p, score: s"),
        ("text-classification", "spearman", f"{TEXT}, score: s"),
        ("token-classification", "f1", f"{TEXT}, tags: t"),
        ("feature-extraction", "cosine", TEXT),
    ],
)
def test_a_metric_with_its_columns_is_accepted(
    tmp_path: Path, task: str, metric: str, columns: str
) -> None:
    assert read(tmp_path, judged(task, metric, columns)).validate_.metric == metric


def test_a_method_that_learns_from_next_tokens_needs_a_task_that_generates(tmp_path: Path) -> None:
    weights = GOOD.replace("  activations: {range: mse}\n", "  method: scale_tuning\n")
    with pytest.raises(RecipeError, match=r"scale_tuning learns from.*text-generation"):
        read(tmp_path, weights)


def judged(task: str, metric: str, columns: str) -> str:
    text = GOOD.replace("sentence-embedding", task).replace("metric: cosine", f"metric: {metric}")
    return text.replace("files: [b.txt]", f"files: [b.txt], columns: {{{columns}}}")


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("{text: text}", "a column for label in train.columns"),
        ("{text: text, label: l}, labels: [b, a]", r"\['a', 'b'\] and train.labels \['b', 'a'\]"),
    ],
)
def test_a_probe_needs_train_rows_of_the_same_labels(
    tmp_path: Path, train: str, message: str
) -> None:
    text = judged("sentence-embedding", "probe_accuracy", f"{TEXT}, label: l")
    text = text.replace("label: l}}", "label: l}, labels: [a, b]}")
    text += f"  train: {{source: text, files: [t.txt], columns: {train}}}\n"
    with pytest.raises(RecipeError, match=message):
        read(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nothing\.yaml: it cannot be read"):
        recipe_file.read(tmp_path / "nothing.yaml")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="empty"):
        read(tmp_path, "")


def test_an_override_replaces_one_value(tmp_path: Path) -> None:
    r = read(tmp_path, GOOD, "quantize.activations.range=entropy", "targets.0.threads=1")
    assert r.quantize.activations is not None
    assert r.quantize.activations.range == "entropy"
    assert r.targets[0].threads == 1  # type: ignore[union-attr]


def test_a_wrong_override_is_named_as_an_override(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"--set quantize\.metod=rtn: quantize\.metod: unknown"):
        read(tmp_path, GOOD, "quantize.metod=rtn")


def test_an_override_without_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="not path=value"):
        read(tmp_path, GOOD, "quantize.method")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("validate.data.files=[c.txt]", r"validate\.data is 'b\.yaml' in the recipe, which has no"),
        ("validate.data.columns.text=a", r"set validate\.data=\.\.\., which sets the whole of it"),
        ("targets.1.threads=2", "targets is a list of 1 in the recipe.*an index below 1"),
    ],
)
def test_an_override_below_a_value_says_what_the_recipe_has_there(
    tmp_path: Path, override: str, message: str
) -> None:
    text = GOOD.replace("data: {source: text, files: [b.txt]}", "data: b.yaml")
    with pytest.raises(RecipeError, match=message):
        read(tmp_path, text, override)


def test_a_data_spec_file_is_read_and_its_lines_are_named(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text("source: text\nfilez: [b.txt]\n")
    with pytest.raises(RecipeError, match=r"b\.yaml:2: validate\.data\.filez: unknown key"):
        read(tmp_path, GOOD.replace("data: {source: text, files: [b.txt]}", "data: b.yaml"))


def test_where_a_data_spec_lies_does_not_enter_the_key(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    one, two = read(tmp_path, GOOD), read(tmp_path / "elsewhere", GOOD)
    assert one.model_dump(mode="json") == two.model_dump(mode="json")


def test_paths_start_at_the_recipe_and_typed_ones_at_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = (tmp_path / "recipes", tmp_path / "here")
    for folder in made:
        folder.mkdir()
    monkeypatch.chdir(made[1])
    student = "\nreduce: {student: ./small, recover: {}}\npublish: ['oci-layout:out:1']\n"
    text = GOOD.replace("  source: somewhere", "  source: ./model") + student
    own, here = map(str, made)
    r = read(made[0], text)
    assert r.reduce is not None
    assert r.reduce.student is not None
    assert (r.model.base, r.reduce.student.base, r.validate_.data.base) == (own, own, own)
    assert r.publish == ("oci-layout:../recipes/out:1",)
    typed = ("model.source=./model", "validate.data.files=[b.txt]", "publish=['oci-layout:out:1']")
    r = read(made[0], text, *typed)
    assert (r.model.base, r.validate_.data.base) == (here, here)
    assert (r.model.source, r.publish) == ("./model", ("oci-layout:out:1",))


RTX = "  - {runtime: tensorrt-rtx}\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "{bits: 8}\n  activations: {range: mse}",
            "{bits: 8, symmetric: false}",
            r"quantize\.weights\.symmetric: false is not accepted by target tensorrt-rtx.*onnx",
        ),
        (
            "{range: mse}",
            "{granularity: token}",
            r"quantize\.activations\.granularity: token is not accepted by target tensorrt-rtx",
        ),
        (
            "{bits: 8}",
            "{bits: 8, granularity: group, group_size: 48}",
            r"quantize\.weights\.group_size: 48 is not accepted",
        ),
        (
            "{bits: 8}",
            "{bits: 4, granularity: channel}",
            r"quantize\.weights\.granularity: channel",
        ),
        (
            "{bits: 8}",
            "{bits: 4, granularity: group, group_size: 32}",
            r"quantize\.weights: bits: 4.*no integer kernel",
        ),
    ],
)
def test_a_target_refuses_what_it_cannot_express(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    text = GOOD.replace("validate:", RTX + "validate:").replace(old, new)
    with pytest.raises(RecipeError, match=rf"r\.yaml:\d+: {message}"):
        read(tmp_path, text)


def test_the_json_schema_names_every_section() -> None:
    assert {"model", "calibrate", "quantize", "targets", "validate", "package"} <= set(
        recipe.build_json_schema()["properties"]
    )


@pytest.mark.parametrize("file", sorted(Path("recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_recipe_is_accepted(file: Path) -> None:
    assert recipe_file.read(file).name == file.stem


def test_a_module_of_a_decoder_is_not_taken_for_a_section(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("model:\n  source: x\n")
    lines = read_yaml(file)[1]
    for where, expected in (
        ("model.layers.0.mlp: activations", "model.layers.0.mlp: activations"),
        ("model.source", f"{file}:2: model.source"),
        ("model.subfolder", f"{file}:1: model.subfolder"),
    ):
        with pytest.raises(RecipeError) as caught, recipe_file.locate_errors(lines):
            raise RecipeError("wrong", where=where)
        assert caught.value.where == expected


def test_a_number_may_be_written_with_an_exponent_alone(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("a: 1e-3\nb: 5E+2\nc: 1.5e3\nd: e3\n")
    assert read_yaml(file)[0] == {"a": 1e-3, "b": 500.0, "c": 1500.0, "d": "e3"}


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("name: x", "name: 123", "r.yaml:1: name"),
        ("name: x", "name: true", "r.yaml:1: name"),
        ("metric: cosine", "metric: cosine\n  labels: {0: bad}", "r.yaml:16"),
    ],
)
def test_a_number_in_the_place_of_a_word_is_to_be_quoted(
    tmp_path: Path, old: str, new: str, where: str
) -> None:
    with pytest.raises(RecipeError, match=r"(?i)put it in quotes") as caught:
        read(tmp_path, GOOD.replace(old, new))
    assert where in str(caught.value)


@pytest.mark.parametrize("value", ["1e-320", "5e-324", "1e-200", "9.9e-13"])
@pytest.mark.parametrize("key", ["max_drop", "min_cosine"])
def test_a_number_that_is_nearly_0_is_refused_as_a_typing_error(
    key: str, value: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=rf"validate\.{key}.*closer to 0 than 1e-12"):
        read(tmp_path, f"{GOOD}  {key}: {value}\n")
    read(tmp_path, f"{GOOD}  max_drop: 1.0e-9\n")
    assert LossWeights(output=1e-20).output == 1e-20  # not a limit


def test_a_margin_in_nats_may_exceed_1_and_of_other_metrics_it_may_not(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"validate\.max_drop.*accepted: below 1 \(of perplexity"):
        read(tmp_path, f"{GOOD}  max_drop: 1.0\n")
    options = {"data": {"source": "text"}, "metric": "perplexity"}
    assert Validate(**options, max_drop=1.5).max_drop == 1.5
    with pytest.raises(ValidationError, match="less than or equal to 100"):
        Validate(**options, max_drop=101)


@pytest.mark.parametrize("blank", ["''", "' '", '"\\t"'])
@pytest.mark.parametrize("path", ["model.source", "validate.data.source"])
def test_a_source_of_nothing_is_refused(path: str, blank: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=path):
        read(tmp_path, GOOD, f"{path}={blank}")


def test_a_value_of_several_forms_is_refused_once_and_without_the_forms(tmp_path: Path) -> None:
    text = Path("recipes/minilm-int8-search.yaml").read_text(encoding="utf-8")
    text = text.replace("../calibration", str(Path("calibration").resolve()))
    file = tmp_path / "r.yaml"
    file.write_text(text.replace("type: [float32, int8, binary]", "type: [int4]"))
    with pytest.raises(RecipeError) as refused:
        recipe_file.read(file)
    assert "embeddings.type.0" in refused.value.where
    assert not refused.value.further


def test_a_missing_recipe_names_the_nearest_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "minilm-int8.yaml").write_text("name: a\n")
    with pytest.raises(RecipeError, match=r'did you mean "minilm-int8.yaml"'):
        recipe_file.read(tmp_path / "minilm-int.yaml")
