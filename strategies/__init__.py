"""What to generate: cases, as functions of integer choices, narrowed by a target's domain.

A case begins with its row, a level for every axis; only what the domain allows is drawn, so that
next to nothing is rejected, and every choice shrinks towards the smaller, plainer one. `cases` is
the Hypothesis strategy; `drawn_case` makes the same from a list of integers.
"""

from kvfuzz.strategies.cases import cases, drawn_case
from kvfuzz.strategies.rows import space
from kvfuzz.strategies.scenes import drawn_scene

__all__ = ["cases", "drawn_case", "drawn_scene", "space"]
