"""What every worker imports and no target changes: the server imports it once, and workers fork
from there (`kvfuzz.engine.pool.FORKED`).

Nothing here may touch a device, or start a thread that does not begin anew after a fork, as those
of NumPy's OpenBLAS do. What cannot be imported is left to the worker, which says why.
"""

import contextlib
import importlib

for name in ("torch", "triton", "kvfuzz.engine.worker.judge", "kvfuzz.kernels.resolve"):
    with contextlib.suppress(Exception):
        importlib.import_module(name)
