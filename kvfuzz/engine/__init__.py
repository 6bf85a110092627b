"""The engine: a parent that draws, journals, shrinks and saves; a worker that executes and judges.

The border between the two processes is the border between these imports: modules of
`engine.worker` load torch and triton and never hypothesis; all others the other way round.
"""
