"""What to generate: scenes, as functions of integer choices, narrowed by a target's domain.

A scene begins with its row, a level for every axis; only what the domain allows is drawn, so that
next to nothing is rejected, and every choice shrinks towards the smaller, plainer one. `scenes` is
the Hypothesis strategy; `drawn_scene` makes the same scenes from a list of integers.
"""

from kvfuzz.strategies.rows import space
from kvfuzz.strategies.scenes import drawn_scene, scenes

__all__ = ["drawn_scene", "scenes", "space"]
