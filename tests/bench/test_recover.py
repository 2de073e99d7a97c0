"""`halfbyte bench recover`: the quick cases run, a wrong token is an error, the tables say what is extrapolated."""

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from halfbyte.bench import recover as bench
from halfbyte.bench import runs
from halfbyte.cli import app
from halfbyte.measure import records
from halfbyte.recover.policies import POLICIES

pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")

PROVIDERS = ["halfbyte, gradient", "halfbyte, exhaustive", "plain loop", "plain loop, 128 at once"]


@pytest.mark.slow
def test_the_quick_cases_make_a_record(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "recover", "--quick", "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("*/recover.json")
    record = records.read(path)
    for rows in bench._by_case(record):
        assert [row["provider"] for row in rows] == PROVIDERS
        assert [row["extrapolated"] for row in rows] == [False, False, True, True]
        assert rows[1]["tried"] == rows[1]["vocabulary"]  # exhaustive tries all
        assert rows[2]["sampled"] == {"positions": [0, 1, 2, 4, 5], "calls": 8, "candidates_a_call": 1}
    text = bench.markdown(record)
    assert text.count("≈") == 2 * 2 + 1
    assert "| tiny, nf4, bfloat16, 1 × 6 tokens | halfbyte, gradient |" in text


def test_the_plain_loop_is_extrapolated_to_the_candidates_that_it_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = torch.tensor([9, 0, 4, 19, 7])
    monkeypatch.setattr(bench, "clock", lambda run, device: 1e3 * (1 + len(run.args[1])))  # a second and the prefix's
    model = type("Model", (), {"config": type("Config", (), {"vocab_size": 20})})
    row = bench._plain(model, [prompt], [torch.zeros(5, 2)], 1, torch.device("cpu"))
    assert row["seconds"] == pytest.approx(10 * 1 + 1 * 2 + 5 * 3 + 20 * 4 + 8 * 5)
    row = bench._plain(model, [prompt], [torch.zeros(5, 2)], 8, torch.device("cpu"))
    assert row["seconds"] == pytest.approx(2 * 1 + 1 * 2 + 1 * 3 + 3 * 4 + 1 * 5)


@pytest.mark.slow
def test_a_wrong_token_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = bench.QUICK["tiny-gpt2"]
    monkeypatch.setattr(bench, "_states", lambda model, prompt: torch.randn(len(prompt), 64))
    rows: list[dict[str, Any]] = []
    for row in bench.recover_rows(case, torch.device("cpu"), lambda step: None):
        rows.append(row)
        if len(rows) == 2:
            break
    assert all("nothing is claimed" in row["error"] for row in rows)
    assert not any("seconds" in row for row in rows)
    assert "wrong" in bench.markdown(
        {"bench": "recover", "rows": rows, "environment": records.environment(torch.device("cpu"))}
    )


def test_cases_that_ran_before_stay_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"provider": "halfbyte, gradient", "dtype": "float32", "prompts": 1, "tokens": 6, "seconds": 1.0, "tried": 9}
    turn = iter(range(9))
    monkeypatch.setattr(
        bench,
        "recover_rows",
        lambda case, device, say: [made | {"case": case.name, "extrapolated": False, "turn": next(turn)}],
    )
    for name in ("tiny", "tiny-gpt2", "tiny"):
        runs.run_recovery([bench.QUICK[name]], torch.device("cpu"), tmp_path)
    (path,) = tmp_path.glob("*/recover.json")
    found = [(row["case"], row["turn"]) for row in records.read(path)["rows"]]
    assert found == [("tiny, nf4", 2), ("tiny-gpt2, trained", 1)]


def test_gpt2_has_every_policy_on_random_and_on_trained_weights() -> None:
    cases = bench.cases_of("gpt2-small,gpt2-small-trained", False, 0, 0)
    assert [case.weights for case in cases] == ["random", "trained"]
    for case in cases:
        assert set(case.policies) == set(POLICIES)
        assert (case.prompts, case.tokens) == (20, 20)


def test_names_that_there_are_not() -> None:
    with pytest.raises(ValueError, match="case 'gpt5' is none; there are gpt2-small"):
        bench.cases_of("gpt5", False, 0, 0)
    (case,) = bench.cases_of("mistral-7b", False, 0, 10)
    assert (case.prompts, case.tokens) == (1, 10)
