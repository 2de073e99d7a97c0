"""SipIt (arXiv 2510.15511): the prompt back from its hidden states."""

from typing import TYPE_CHECKING

from halfbyte.lazy import names_of

if TYPE_CHECKING:
    from halfbyte.recover.result import Calibration as Calibration
    from halfbyte.recover.result import Position as Position
    from halfbyte.recover.result import Recovery as Recovery
    from halfbyte.recover.search import recover_tokens as recover_tokens

__all__ = ["Calibration", "Position", "Recovery", "recover_tokens"]

if not TYPE_CHECKING:  # so that a checker still knows which names there are not
    __getattr__, __dir__ = names_of(
        __name__,
        {
            "halfbyte.recover.result": ("Calibration", "Position", "Recovery"),
            "halfbyte.recover.search": ("recover_tokens",),
        },
    )
