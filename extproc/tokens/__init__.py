"""Counting tokens: exact where the vocabulary is known, sampled where the prompt is long, corrected by what is learned.

Pure but for loading vocabularies from installed packages. Nothing here touches the network.
"""

from extproc.tokens.calibration import MOST, Calibration
from extproc.tokens.encodings import Encoding, encoding_for, encoding_of, measured_as
from extproc.tokens.estimate import estimate, is_long, recounted, spread
from extproc.tokens.vocabulary import preload

__all__ = [
    "MOST",
    "Calibration",
    "Encoding",
    "encoding_for",
    "encoding_of",
    "estimate",
    "is_long",
    "measured_as",
    "preload",
    "recounted",
    "spread",
]
