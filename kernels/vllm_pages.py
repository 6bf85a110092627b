"""How a vLLM tree places pages: which nestings and paddings its backends say they can meet.

Read off the backend's own source and its base class, no release number is known here. What a tree
does not say is left out.
"""

import re
from pathlib import Path

from kvfuzz.model.axes import Domain
from kvfuzz.model.vocabulary import NESTINGS, PAGES

BACKEND = "vllm/v1/attention/backend.py"
"""The base class of the backends."""

PACKED_NESTING: dict[str, str] = {
    "LBHNC": "layer_first",
    "LBNHC": "layer_first",
    "LHBNC": "head_first",
    "BLHNC": "block_first",
    "BLNHC": "block_first",
    "BHLNC": "block_head_first",
}
"""What the names of KVCacheLayout mean for a packed cache."""

PLAIN = Domain(allowed={"nesting": ("layer_first",), "page": ("exact",)})


def pages_of(root: Path, backend: str) -> Domain:
    """The nestings and pages that the source text `backend`, of the tree at `root`, can meet.

    By era: a backend names the layouts of KVCacheLayout that it supports, or none where it takes
    all, and any page may be padded; before that, a stride order with a dimension of layers puts
    them side by side in a block, of NHD caches and not of hybrid ones, and the base class may
    derive from it that padding is allowed; before that, neither.
    """
    base = root / BACKEND
    says = base.read_text() if base.is_file() else ""
    if "def supported_kv_cache_layouts" in says:
        names = re.findall(r"KVCacheLayout\.([LBHNC]{5})\b", backend) or list(PACKED_NESTING)
        found = {PACKED_NESTING[name] for name in names}
        nestings = tuple(each for each in NESTINGS if each in found)
        return Domain(allowed={"nesting": nestings, "page": PAGES})
    if re.search(r"return \(1, 0, 2,", backend):
        padded = "def indexes_kv_by_block_stride" in says
        return Domain(
            allowed={
                "nesting": ("layer_first", "block_first"),
                "page": PAGES if padded else ("exact",),
            },
            forbidden=(
                {"nesting": ("block_first",), "order": ("hnd", "shuffle")},
                {"nesting": ("block_first",), "layout": ("hybrid",)},
            ),
        )
    return PLAIN
