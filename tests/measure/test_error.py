"""How far a result is from the right one."""

import pytest
import torch

from halfbyte.measure.error import relative_error


def test_relative_error() -> None:
    right = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(torch.tensor([3.0, 4.5]), right) == pytest.approx(0.1)
