"""Each public bug about cache bytes: how soon it is found where it is, and clean where it is not.

    python tests/benchmarks/upstream_bugs.py [--clean N] [--only WORD]

Prints JSON, one record a bug: the release that has it with the cases and seconds up to the first
failure and with its reduction, the property, the bytes of the first and of the smallest case; the
release that fixed it with its cases. Needs the source trees (`tests/thirdparty/sources.py`).
"""

import argparse
import importlib.util
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from kvfuzz.engine.campaign import Campaign, Options
from kvfuzz.errors import Exit
from kvfuzz.model.axes import parse_where
from kvfuzz.model.events import Event, Found, Progress, Summary
from kvfuzz.model.target import TargetSpec

GATHER, FLASH = "vllm:cp_mha_gather_cache", "vllm:reshape_and_cache_flash"
SHUFFLE, SHARED = "vllm:reshape_and_cache_shuffle", "vllm:shared_kv_attention"
DECODE, PAGED = "vllm:decode_attention", "vllm:paged_attention_2d"
UNIFIED, MERGE = "vllm:unified_attention", "vllm:merge_attn_states"
DIFFKV = "vllm:unified_attention_diffkv"
LOW = "numbers=low,window=cuts,phase=extend,model_dtype=fp16,cache_dtype=fp16,queries_per_kv=1|2"
DENSE = "nesting=layer_first,page=exact,reach=near"


class Bug(NamedTuple):
    """A bug, the release that has it and the one that fixed it; `where` leaves out other bugs."""

    name: str
    target: str
    red: str
    clean: str
    where: str = ""


BUGS = (
    Bug("37228 gather block stride", GATHER, "0.18.0", "0.19.0", "order=nhd,cache_dtype=bf16"),
    Bug("39192 SHUFFLE writer block stride", SHUFFLE, "0.19.0", "0.29.0", "scale=none"),
    Bug("43660 SHUFFLE gather stride", GATHER, "0.25.0", "0.29.0", "order=shuffle,scale=none"),
    Bug("39122 dequantised and cast back", GATHER, "0.19.0", "0.24.0", "order=nhd"),
    Bug("SHUFFLE gather ignores scales", GATHER, "0.30.0", "0.33.0", "order=shuffle"),
    Bug("SHUFFLE writer ignores scales", SHUFFLE, "0.30.0", "0.33.0"),
    Bug("37940 head stride of the writer", FLASH, "0.19.0", "0.24.0"),
    Bug("45361 int8 cut off", "vllm:per_token_head_quant", "0.23.0", "0.24.0"),
    Bug("51031 ranks by kernel blocks, V1", "vllm:slot_mapping_v1", "0.24.0", "0.28.0"),
    Bug("indexer gather overflows", "vllm:gather_indexer", "0.23.0", "0.24.0"),
    Bug("45111 page stride of MLA's decode", DECODE, "0.19.0", "0.24.0", "reach=near"),
    Bug("MLA's decode overflows", DECODE, "0.24.0", "0.25.0"),
    Bug("MLA's values by V's scale", DECODE, "0.18.0", "0.19.0", DENSE),
    Bug("51031 ranks by kernel blocks, V2", "vllm:slot_mapping_v2", "0.28.0", "0.29.0"),
    Bug("47305 slots behind a sequence", PAGED, "0.24.0", "0.25.0"),
    Bug("low scores of half precision", UNIFIED, "0.24.0", "0.33.0", LOW),
    Bug("low scores in diffkv", DIFFKV, "0.32.0", "0.33.0", LOW),
    Bug("39148 two empty parts merged", MERGE, "0.24.0", "0.26.0", "empties=both"),
    Bug("42642 strides of the suffix", MERGE, "0.24.0", "0.26.0", "empties=none|prefix|suffix"),
    Bug("55887 a shared cache without key", SHARED, "0.29.0", "0.30.0", "order=hnd"),
    Bug("shared SHUFFLE ignores scales", SHARED, "0.30.0", "0.33.0", "order=shuffle"),
    Bug("the same, last red release", SHARED, "0.32.0", "0.33.0", "order=shuffle"),
)


def tree(release: str) -> str:
    """The source tree of a release. Raises SystemExit where it was not fetched."""
    path = Path(__file__).parent.parent / "thirdparty" / "sources.py"
    spec = importlib.util.spec_from_file_location("kvfuzz_bench_sources", path)
    assert spec is not None
    assert spec.loader is not None
    sources = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sources)
    folder = sources.tree(release)
    if not sources.is_complete(folder):
        raise SystemExit(f"no tree of vLLM {release}: python tests/thirdparty/sources.py {release}")
    return str(folder)


def campaign(bug: Bug, release: str, cases: int) -> dict[str, Any]:
    """Run a campaign on a release; how it ended."""
    events: list[tuple[float, Event]] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as out:
        options = Options(
            target=TargetSpec(bug.target, {"vllm": tree(release)}),
            out=Path(out),
            where=parse_where(bug.where),
            budget_s=3600,
            max_cases=cases,
        )
        code = Campaign(options, lambda event: events.append((time.monotonic(), event))).run()
    (summary,) = [event for _, event in events if isinstance(event, Summary)]
    record: dict[str, Any] = {"release": release, "cases": summary.cases}
    if code != Exit.FINDING:
        return record | {"clean": code == Exit.CLEAN, "seconds": round(summary.elapsed_s, 1)}
    (found,) = [event for _, event in events if isinstance(event, Found)]
    first = next(at for at, event in events if _is_shrinking(event))
    return record | {
        "property": found.seed.property,
        "seconds_to_failure": round(first - started, 1),
        "seconds": round(summary.elapsed_s, 1),
        "first_bytes": found.shrunk_from_bytes,
        "smallest_bytes": found.seed.case.nbytes,
    }


def _is_shrinking(event: Event) -> bool:
    return isinstance(event, Found) or (isinstance(event, Progress) and event.phase == "shrink")


def main() -> None:
    """Print one record a bug."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clean", type=int, default=200, help="cases of a release without the bug")
    parser.add_argument("--only", default="", help="bugs whose name contains this")
    arguments = parser.parse_args()
    for bug in BUGS:
        if arguments.only in bug.name:
            found = campaign(bug, bug.red, 1000)
            fixed = campaign(bug, bug.clean, arguments.clean)
            record = {"bug": bug.name, "target": bug.target, "found": found, "fixed": fixed}
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
