"""Ops that are about other things than K and V pages: each module has one kind of scene.

A module says what its scene is, when it is impossible, which case it means, which questions there
are about it, and how it becomes simpler; `kvfuzz.model.ops.table` is the list of them.
"""
