"""What to generate: Hypothesis strategies for scenes, narrowed by a target's domain.

Strategies are plurals with keyword-only options. They draw only what the domain allows, so that
next to nothing is rejected, and every choice shrinks towards the smaller, plainer one.
"""

from kvfuzz.strategies.scenes import scenes

__all__ = ["scenes"]
