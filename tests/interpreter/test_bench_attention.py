"""The bench of attention: every provider is right, and its record becomes a table.

In fp16: the interpreter keeps bf16 as integers, and multiplies these.
"""

from __future__ import annotations

import pytest
import torch

from halfbyte.bench import attention as bench
from halfbyte.bench.case import make_record, run


@pytest.mark.parametrize("model", ["gemma-2-9b", "gpt-oss-120b"])
def test_providers_agree(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "input_sets", lambda *_: 2)
    torch.manual_seed(0)
    rows = []
    for load in bench.loads_of("1x64x32,2x66x66x3"):
        case = bench._case(f"{model} {load}", bench.models_of(model)[model], load, torch.float16, torch.device("cpu"))
        assert case.sets == 2
        rows += run(case, 1)
    assert [row.error for row in rows] == [None] * len(rows)
    assert [row.provider for row in rows].count("halfbyte") == 2
    keys_and_values = 2 * 2 * 32 * bench.models_of(model)[model].keys * bench.models_of(model)[model].size
    assert rows[0].bytes > keys_and_values
    table = bench.markdown(make_record("attention", torch.device("cpu"), rows, 10.0))
    assert table.count("\n| ") == 1 + len(rows) - 2 * 2
