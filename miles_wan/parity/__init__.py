"""Do engine and trainer compute the same? ``compare`` answers for two sides that are there, ``check_parity`` builds them from
a configuration; the answer is a ``ParityReport``, with the likely cause where it is no. It knows no Ray and no rewards.
"""

from miles_wan.parity.command import check_parity
from miles_wan.parity.comparison import compare
from miles_wan.parity.display import show
from miles_wan.parity.report import Cause, Check, ParityReport, StepRow

__all__ = ["Cause", "Check", "ParityReport", "StepRow", "check_parity", "compare", "show"]
