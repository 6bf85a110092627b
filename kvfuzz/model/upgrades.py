"""From the JSON of one seed schema to the next: pure functions of dicts, kept for ever.

Version 2 gives an attention layer its nesting, page padding, granularity and size of V, a field its
own fill, and a step the fields of its scales, where version 1 had one scale of each side and knew
nothing of the rest. Version 3 says of which family a case is: of kernels, as all were until then,
of cache plans, or of scripts. Version 4 gives a scene the rows and entries behind its batch.
"""

from collections.abc import Callable
from typing import Any

Raw = dict[str, Any]


def _to_2(seed: Raw) -> Raw:
    case = seed["case"]
    buffer_of = {tensor[0]: tensor[1] for tensor in case["tensors"]}
    first = case["steps"][0]["tensors"] if case["steps"] else {}
    scales = [
        {
            "name": name,
            "buffer": buffer_of[first[name]],
            "dtype": "fp32",
            "base": 0,
            "terms": [],
            "extents": {},
            "layer": case["scene"]["layer"],
            "blocks": [],
        }
        for name in ("k_scale", "v_scale")
        if name in first
    ]
    caches = {buffer_of.get(step["tensors"].get("key_cache")) for step in case["steps"]}
    fields = list(case["fields"])
    # Behind the pages, as lowering has them: a case that is lowered again is the same.
    at = sum(field["buffer"] in caches for field in fields)
    fields[at:at] = scales
    bound = {each["name"]: each["name"] for each in scales}
    return {
        **seed,
        "schema": 2,
        "case": {
            **case,
            "fields": [{**field, "fill": None} for field in fields],
            "steps": [{**step, "fields": {**step["fields"], **bound}} for step in case["steps"]],
            "scene": {**case["scene"], "plan": _plan_to_2(case["scene"]["plan"])},
        },
    }


def _plan_to_2(plan: Raw) -> Raw:
    new = {"nesting": "layer_first", "page_padding": 0, "granularity": "tensor"}
    return {
        **plan,
        "layers": [
            {**layer, **new, "geometry": {**layer["geometry"], "head_size_v": 0}}
            if layer["type"] == "attention"
            else layer
            for layer in plan["layers"]
        ],
    }


def _to_3(seed: Raw) -> Raw:
    return {**seed, "schema": 3, "case": {**seed["case"], "type": "tokens"}}


def _to_4(seed: Raw) -> Raw:
    case = seed["case"]
    if case["type"] == "tokens":
        scene = {**case["scene"], "spare_rows": 0, "spare_entries": 0}
        case = {**case, "scene": scene}
    return {**seed, "schema": 4, "case": case}


UPGRADES: dict[int, Callable[[Raw], Raw]] = {1: _to_2, 2: _to_3, 3: _to_4}
"""From schema version to the function that returns the same seed one version later."""
