"""SipIt (arXiv 2510.15511): the prompt back from its hidden states."""

from halfbyte.recover.result import Calibration, Position, Recovery
from halfbyte.recover.search import recover_tokens

__all__ = ["Calibration", "Position", "Recovery", "recover_tokens"]
