"""A seed: one case on disk, for a target and a property, that any later version can replay.

JSON with every field written and unknown fields refused; no pickles, no paths, no line numbers.
The id is a hash of what decides the verdict (case, target, property), so provenance can be edited
and equal findings get one file; a seed of an older schema has the id that it has in this one.
"""

import builtins
import hashlib
import json

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.any_case import AnyCase, check_case, op_of
from kvfuzz.model.axes import facts, nearest
from kvfuzz.model.case import Case
from kvfuzz.model.fill import ALGORITHM
from kvfuzz.model.lower import lower
from kvfuzz.model.round_trip import touched
from kvfuzz.model.script import ScriptCase
from kvfuzz.model.script_lowering import lower_script
from kvfuzz.model.upgrades import UPGRADES
from kvfuzz.model.verdict import ALL_PROPERTY_NAMES, Launch

SCHEMA = 4


class Expected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the recording run saw: a record to compare with, never the verdict of a replay."""

    verdict: str
    digest: str
    launches: tuple[Launch, ...] = ()


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a seed comes from. Outside the id."""

    kvfuzz: str
    triton: str
    torch: str
    lane: str
    arch: str
    content: str
    note: str = ""


class Seed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One case with the target and property it is about."""

    target: str
    op: str
    property: str
    case: AnyCase
    expected: Expected
    provenance: Provenance
    fill: str = ALGORITHM
    schema: int = SCHEMA

    @builtins.property  # `property` is one of the fields
    def id(self) -> str:
        """Sixteen hex digits that name the seed and its file."""
        parts = (self.target, self.op, self.property, self.case)
        canonical = msgspec.json.encode(parts, order="deterministic")
        return hashlib.sha256(canonical).hexdigest()[:16]


def dump(seed: Seed) -> bytes:
    """The file content of a seed."""
    return msgspec.json.encode(seed, order="deterministic") + b"\n"


def load(data: bytes, *, where: str) -> Seed:
    """The seed in `data`; `where` names it in messages.

    Raises UsageError for what is no JSON, of a newer version, has unknown or missing fields, or
    describes an impossible case.
    """
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"seed {where}: not JSON ({error})") from None
    version = raw.get("schema") if isinstance(raw, dict) else None
    if not isinstance(version, int) or version < 1:
        raise UsageError(
            f"seed {where}: schema={version!r}, expected an integer from 1 to {SCHEMA}"
        )
    if version > SCHEMA:
        raise UsageError(
            f"seed {where}: schema={version} is newer than this kvfuzz reads ({SCHEMA}); upgrade it"
        )
    try:
        for step in range(version, SCHEMA):
            raw = UPGRADES[step](raw)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        raise UsageError(f"seed {where}: not of schema {version} ({said})") from None
    try:
        seed = msgspec.convert(raw, Seed)
    except msgspec.ValidationError as error:
        raise UsageError(f"seed {where}: {error}") from None
    try:
        msgspec.msgpack.encode(seed)  # it goes to a worker so, and JSON holds more
    except (OverflowError, UnicodeEncodeError) as error:
        raise UsageError(
            f"seed {where}: neither 64 bits nor UTF-8 hold a value ({error})"
        ) from None
    if seed.fill != ALGORITHM:
        raise UsageError(f"seed {where}: fill={seed.fill!r}, expected {ALGORITHM!r}")
    if seed.property not in ALL_PROPERTY_NAMES:
        said = nearest(seed.property, ALL_PROPERTY_NAMES)
        raise UsageError(f"seed {where}: property={seed.property!r}; {said}")
    try:
        check_case(seed.case)
    except (UsageError, OverflowError) as error:
        raise UsageError(f"seed {where}: {error}") from None
    if isinstance(seed.case, Case):
        _check_scene(seed.case, where)
    elif isinstance(seed.case, ScriptCase):
        _check_script(seed.case, where)
    if op_of(seed.case) != seed.op:
        raise UsageError(f"seed {where}: op={seed.op!r} with a case of {op_of(seed.case)}")
    return seed


def _check_scene(case: Case, where: str) -> None:
    """Raise UsageError where a case is not what its scene means."""
    try:
        intended = lower(case.scene)
    except UsageError as error:
        raise UsageError(f"seed {where}: {error}") from None
    if _meaning(intended) != _meaning(case):
        raise UsageError(f"seed {where}: its scene and its case mean different things")


def _check_script(case: ScriptCase, where: str) -> None:
    """Raise UsageError where a case is not what its script means."""
    try:
        intended = lower_script(case.script)
    except UsageError as error:
        raise UsageError(f"seed {where}: {error}") from None
    if intended != case:
        raise UsageError(f"seed {where}: its script and its steps mean different things")


def _meaning(case: Case) -> object:
    """What a scene and a case must agree on: facts, sizes, and each row's slot."""
    return facts(case), case.geometry, [touched(case, step) for step in case.steps]
