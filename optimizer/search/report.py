"""Results of a search for people and programs: a table, a JSON document, and report.html."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from optimizer.harness import tasks
from optimizer.load_test import tuned_server
from optimizer.package.report import plots
from optimizer.package.report.plots import Point
from optimizer.package.report.templating import environment
from optimizer.package.report.view import Card, Paragraph, ReportTable, badge, line
from optimizer.recipe.search import RATES
from optimizer.search import candidates, server_settings
from optimizer.search.expectation import kendall_tau
from optimizer.search.search import Result
from optimizer.search.sequential import LOOKS
from optimizer.search.trial import Outcome, Trial, get_objective, write_interval

HEADS = ("candidate", "outcome", "drop", "time / recipe", "MB")
COST = "cost of a million"
NO_MODULE = "no module"  # operators between modules
NAMED, ROWS = 3, 15  # modules in a sentence, and in a table


def build_document(result: Result, file: Path | None, report: Path) -> dict[str, Any]:
    """Return the document of `optimize search --json`.

    file: file of the recipe that was found, or None
    report: file of the page
    """
    search, winner = result.section, result.winner
    alpha = 1 - result.recipe.validate_.confidence
    return {
        "exit_code": result.exit_code,
        "verdict": result.verdict,
        "found": str(file) if file else None,
        "report": str(report),
        "objective": search.objective,
        "objective_text": describe_objective(result),
        "form": winner.label if winner else None,
        "server": _server_document(result),
        "is_the_recipe": winner is not None and winner is result.trials[0],
        "timed_again": result.raced,
        "pareto": [t.label for t in result.pareto],
        "trials": [
            t.as_dict() | {"rate": compute_rate(result, t), "cost_per_million": _cost(result, t)}
            for t in result.trials
        ],
        "price_per_hour": result.price,
        "confirmations": [
            {
                "form": c.candidate.label,
                "verdict": c.verdict,
                "why": c.why,
                "alpha": c.alpha,
            }
            for c in result.confirmations
        ],
        "space": result.space,
        "unmeasured": result.unmeasured or None,
        "ended": result.ended or None,
        "over": result.over or None,
        "rows": result.rows,
        "errors": {
            "stopped_within_the_margin": alpha,
            "winner_beyond_the_margin": alpha,
            "looks": list(LOOKS),
        },
        "kendall_tau": _tau(result),
        "times": result.times or None,
        "seconds": result.seconds,
    }


def _server_document(result: Result) -> dict[str, Any] | None:
    server = result.server
    if server is None:
        return None
    return {"verdict": server.verdict, "why": server.why, **server.document}


def _tau(result: Result) -> float | None:
    """Compute Kendall's tau of expected and measured objectives, over the trials after the first.

    None if both come from a table of another machine.
    """
    if result.times:
        return None
    pairs = [
        (t.expected["objective"], value)
        for t in result.trials
        if t.expected and (value := get_objective(t, result.section.objective)) is not None
    ]
    return kendall_tau(pairs)


def write_text(result: Result, document: dict[str, Any]) -> str:
    """Write the result of a search for a terminal: its trials as a table, the Pareto set, and the
    candidate that was found or why none was."""
    heads = _heads(result)
    rows = [heads, *(_entries(t, result) for t in _in_order(result))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    lines += ["", describe_objective(result)]
    lines += ["", f"Pareto set (drop, {'time, ' * _timed(result)}size):"]
    lines += [f"  {t.label}" for t in result.pareto] or ["  no candidate surely keeps the margin"]
    lines += ["", *write_conclusion(result, document)]
    return "\n".join(lines)


def _rows(result: Result) -> str:
    """Return the name of the examples by which a search judges: "windows" of text generation, else
    "rows"."""
    return "windows" if tasks.find_task(result.recipe.model.task).generates else "rows"


def _timed(result: Result) -> bool:
    return any(t.ratio is not None for t in result.trials)


def _in_order(result: Result) -> list[Trial]:
    """Return a search's trials sorted by outcome (kept, undecided, stopped, refused), then by
    objective."""
    outcomes = get_args(Outcome)

    def key(trial: Trial) -> tuple[int, float]:
        value = get_objective(trial, result.section.objective)
        return outcomes.index(trial.outcome), float("inf") if value is None else value

    return sorted(result.trials, key=key)


def describe_objective(result: Result) -> str:
    """Write a sentence on the figure by which a search compares candidates: its unit and batch."""
    search, answers = result.section, _answers(result)
    batch = search.choose_batch(result.recipe.validate_.latency)
    times = "between tokens" if answers == "tokens" else "end to end"
    unit = {
        "latency": f"milliseconds {times} at batch {batch}",
        "throughput": f"{answers} per second at batch {batch}",
        "cost_per_million": f"cost of a million {answers} at batch {batch} and "
        f"{result.price or 0:g} per hour",
        "size": "megabytes of the model's files",
        "quality": f"drop of {result.recipe.validate_.metric}",
    }
    return f"Objective: {search.objective}, {unit[search.objective]}."


def _answers(result: Result) -> str:
    return "tokens" if tasks.find_task(result.recipe.model.task).generates else "answers"


def compute_rate(result: Result, trial: Trial) -> dict[str, Any] | None:
    """Compute the answers, or tokens, per second of a search's trial: {"value", "interval"}.

    They are those of the recipe, at its median time, divided by the ratio of paired times, whose
    interval they have. None without times.
    """
    p50 = result.trials[0].p50
    if p50 is None or trial.ratio is None:
        return None
    own = 1000 * result.section.choose_batch(result.recipe.validate_.latency) / p50
    low, high = trial.ratio_interval
    interval = (None if high is None else own / high, None if low is None else own / low)
    return {"value": own / trial.ratio, "interval": interval}


def _cost(result: Result, trial: Trial) -> float | None:
    """Compute the cost of a million answers, or tokens, of a search's trial; None without a time or
    a price."""
    rate = compute_rate(result, trial)
    if result.price is None or rate is None:
        return None
    return float(1e6 * result.price / 3600 / rate["value"])


def _heads(result: Result) -> tuple[str, ...]:
    heads = (*HEADS, f"{_answers(result)} / s") if result.section.objective in RATES else HEADS
    return heads if result.price is None else (*heads, f"{COST} {_answers(result)}")


def _entries(trial: Trial, result: Result) -> tuple[str, ...]:
    size = "" if trial.size is None else f"{trial.size / 1e6:.2f}"
    entries = [trial.label, trial.outcome, trial.drop_text, trial.ratio_text, size]
    rate, cost = compute_rate(result, trial), _cost(result, trial)
    if result.section.objective in RATES:
        entries.append("" if rate is None else write_interval(rate["value"], rate["interval"], 1))
    if result.price is not None:
        entries.append("" if cost is None else f"{cost:.3g}")
    return tuple(entries)


def write_conclusion(result: Result, document: dict[str, Any]) -> list[str]:
    """Write sentences on the candidate that a search found, or why none was."""
    lost = [
        f"Not taken: {c.candidate.label}: {c.why}"
        for c in result.confirmations
        if c.verdict != "pass"
    ]
    winner = result.winner
    lost += _unmeasured(result)
    if result.ended:
        tried = f"{len(result.trials)} of {result.space} candidates"
        lost.append(f"Tried {tried}: {result.ended}. Raise search.budget.hours to try more.")
    if result.over:
        lost.append(f"The search ended after search.budget.hours: {result.over}.")
    if winner is not None:
        rows = f"{result.rows['held_out']:,} {_rows(result)}"
        again = ""
        if result.raced and result.raced["to_recipe"]:
            ratio = result.raced["to_recipe"]
            figures = write_interval(ratio["median"], ratio["interval"], 3)
            again = f", and timed again it takes {figures} of the recipe's time"
            high = ratio["interval"][1]
            again += ", so it is not surely faster" * (high is None or high >= 1)
        same = "the recipe itself: no other candidate that keeps the margin is better"
        if len(result.trials) < result.space:
            same = (
                f"the recipe itself, the best of {len(result.trials)} of {result.space} candidates"
            )
        name = same if winner is result.trials[0] else winner.label
        first = f"Found: {name}. It keeps the margin on {rows} that the search never read"
        if winner is not result.trials[0]:
            first += again
        if result.times:
            first += f". Times are predicted from {result.times}; time the candidate there"
        return [*lost, first + ".", *_server(result), *_next(result, document)]
    if result.verdict == "fail":
        return [*lost, _none(result)]
    undecided = [
        f"Undecided: {t.label}: {t.why}" for t in result.trials if t.outcome == "undecided"
    ]
    more = (
        f"Each number of {_rows(result)} above is for one half of validate.data, which needs twice "
        "that number."
    )
    if result.late:
        more = (
            "search.budget.hours did not suffice to confirm the best ones: raise it and search "
            "again; finished steps are reused."
        )
    return [*undecided, *lost, f"Inconclusive: no candidate was shown to keep the margin. {more}"]


def _unmeasured(result: Result) -> list[str]:
    """Return a sentence on a search's candidates that need sensitivities, where none were
    measured."""
    if not result.unmeasured:
        return []
    finer = candidates.name_finer_precision(result.recipe.quantize)
    return [
        f"Not tried: candidates with some modules in {finer}, because the sensitivities of modules "
        f"were not measured: {result.unmeasured}."
    ]


def _server(result: Result) -> list[str]:
    """Return a sentence on the tuned server of the candidate that a search found; [] without
    one."""
    server = result.server
    if server is None:
        return []
    if server.verdict == "pass":
        return [server_settings.write_sentence(server.document)]
    verdict = "misses" if server.verdict == "fail" else "was not shown to meet"
    return [
        f"Its server {verdict} section slo with the best settings that were tried: {server.why}."
    ]


def _next(result: Result, document: Mapping[str, Any]) -> list[str]:
    if result.chosen is not None:
        return [f"Next: optimize run {document['found']}"]
    return [
        "Next: loosen slo (a lower rate, a higher limit; more seconds where it is inconclusive), "
        "or remove search.over.server, and search again: finished trials are reused."
    ]


def _none(result: Result) -> str:
    """Return a sentence on a search that found no candidate."""
    tried = len(result.trials)
    if tried == result.space:
        return "Nothing keeps the margin and the limits."
    return (
        f"None of the {tried} of {result.space} candidates that were tried keeps the margin and "
        "the limits. Raise search.budget to try the others."
    )


def write_page(result: Result, document: dict[str, Any]) -> str:
    """Return the report.html of a search."""
    cards = [_plot(result), _table(result), _lost(result), _modules(result), _settings(result)]
    cards += [_errors(result, document)]
    content = {
        "name": f"{result.recipe.name}: search by {result.section.objective}",
        "verdict": result.verdict,
        "badge": badge(result.verdict),
        "lead": f"{len(result.trials)} of {result.space} candidates tried "
        f"in {result.seconds:.0f} s",
        "sentences": [describe_objective(result), *write_conclusion(result, document)],
        "cards": [c for c in cards if c is not None],
    }
    return environment().get_template("search.html").render(page=content)


def _plot(result: Result) -> Card | None:
    """Return the chart, in a search's report, of drop against time or size, the Pareto set marked;
    None without points."""
    timed, best = _timed(result), result.pareto
    points = []
    for trial in result.trials:
        across = trial.ratio if timed else trial.size and trial.size / 1e6
        if across is None or trial.drop is None:
            continue
        style = "candidate" if trial in best else "other"
        interval = trial.ratio_interval if timed else (across, across)
        name = trial.label if trial in (result.winner, result.trials[0]) else ""
        points.append(Point(name, across, trial.drop, interval, trial.drop_interval, style))
    allowed = result.section.constraints.max_drop
    margin = result.recipe.validate_.max_drop if allowed is None else allowed
    unit = "time / the recipe's" if timed else "MB"
    chart = plots.pareto(points, margin, f"Drop of the metric against {unit}", unit)
    hint = "Lower and further left is better. Marked: the Pareto set. Bars: intervals."
    return None if chart is None else Card("Candidates", hint, chart)


def _table(result: Result) -> Card:
    rows = tuple(tuple(line(entry) for entry in _entries(t, result)) for t in _in_order(result))
    heads = _heads(result)
    return Card("Trials", tables=(ReportTable("Trials", heads, rows, tuple(range(2, len(heads)))),))


def _lost(result: Result) -> Card:
    """Return the card, in a search's report, of reasons: why candidates were stopped, refused or
    not taken, and which modules the found one keeps in higher precision."""
    reasons = [(t.label, t.why) for t in result.trials if t.why]
    reasons += [(c.candidate.label, c.why) for c in result.confirmations if c.why]
    winner = result.winner
    reasons += [(t.label, why) for t in result.trials if winner and (why := _slower(t, winner))]
    if winner is not None and winner.kept:
        reasons.append((winner.label, f"kept finer: {', '.join(winner.kept)}"))
    rows = tuple((line(name), line(why)) for name, why in reasons)
    if not rows:
        return Card("Reasons", paragraphs=(Paragraph(line("Every candidate keeps the margin.")),))
    return Card("Reasons", tables=(ReportTable("Reasons", ("candidate", "reason"), rows),))


def _slower(trial: Trial, winner: Trial) -> str:
    """Return a sentence on the modules that make a search's trial slower than the winner.

    "" if the trial is not surely slower, or the times of its modules are unknown.
    """
    if trial is winner or not trial.modules or not winner.modules:
        return ""
    low, high = trial.ratio_interval[0], winner.ratio_interval[1]
    if low is None or high is None or low <= high:
        return ""
    added = _differences(trial.modules, winner.modules)
    named = [f"{name or NO_MODULE} (+{ms:.3f} ms)" for name, ms in added[:NAMED] if ms > 0]
    return f"slower than the found candidate, most in {', '.join(named)}" if named else ""


def _differences(one: Mapping[str, float], other: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return (module, ms in `one` - ms in `other`), of two trials of a search, in descending
    order."""
    added = {name: one.get(name, 0.0) - other.get(name, 0.0) for name in {**one, **other}}
    return sorted(added.items(), key=lambda item: (-item[1], item[0]))


def _modules(result: Result) -> Card | None:
    """Return the card, in a search's report, of time by module, of the found candidate and the
    recipe; None without times."""
    first, winner = result.trials[0], result.winner
    if winner is None or winner is first or not first.modules or not winner.modules:
        return None
    before, after = first.modules, winner.modules
    changed = sorted(_differences(before, after), key=lambda item: -abs(item[1]))[:ROWS]
    changes = [
        (name or NO_MODULE, before.get(name, 0.0), after.get(name, 0.0)) for name, _ in changed
    ]
    changes.append(("all modules", sum(before.values()), sum(after.values())))
    rows = tuple((line(name), line(f"{a:.3f}"), line(f"{b:.3f}")) for name, a, b in changes)
    heads = ("module", "the recipe, ms", "the found candidate, ms")
    hint = (
        f"The {len(changed)} modules that change most, in ONNX Runtime's profile of each "
        "candidate. Profiling slows small kernels: the ratio of whole times above is measured "
        "without it."
    )
    return Card(
        "Time by module", hint, tables=(ReportTable("Time by module", heads, rows, (1, 2)),)
    )


def _settings(result: Result) -> Card | None:
    """Return the card, in a search's report, of the server settings that were tried; None if none
    were."""
    if result.server is None:
        return None
    trials = result.server.document["trials"]
    rows = tuple(
        (
            line(tuned_server.format_settings(trial["settings"])),
            *(
                line("" if trial[name] is None else f"{trial[name]:.4g}")
                for name in ("met", "missed")
            ),
        )
        for trial in trials
    )
    heads = ("settings", "highest rate that met slo", "lowest that was not shown to")
    return Card("Server", tables=(ReportTable("Requests a second", heads, rows, (1, 2)),))


def _errors(result: Result, document: dict[str, Any]) -> Card:
    alpha = document["errors"]["winner_beyond_the_margin"]
    rows, what = result.rows, _rows(result)
    sentences = [
        f"A winner whose true drop is the margin or more is found with probability at most "
        f"{alpha:.3g}: it is judged on {rows['held_out']:,} held-out {what}, the recipe itself at "
        f"{alpha / 2:.3g} and the k-th of the other candidates at {alpha / 2:.3g} / (k (k + 1)).",
        f"A candidate within the margin is stopped with probability at most {alpha:.3g}, after "
        f"{', '.join(f'{share:.0%}' for share in LOOKS)} of {rows['search']:,} {what}.",
    ]
    if result.times:
        sentences.append(f"Times are predicted from {result.times}; no candidate was timed.")
    if document["kendall_tau"] is not None:
        sentences.append(
            f"Order of expected and measured objectives: Kendall's tau "
            f"{document['kendall_tau']:.2f} (1: the same order, -1: the opposite)."
        )
    return Card("Errors", paragraphs=tuple(Paragraph(line(s)) for s in sentences))
