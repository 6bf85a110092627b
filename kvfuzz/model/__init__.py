"""Plain frozen data that both processes share: layouts, scenes, cases, seeds, verdicts.

Everything here goes to JSON and back. Only the standard library and msgspec are imported, so that
the parent (which must not load torch) and the worker (which must not load hypothesis) speak the
same words.
"""
