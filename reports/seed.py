"""A seed as text: its case as tables, what it is about, where it comes from."""

from kvfuzz.model.any_case import AnyCase
from kvfuzz.model.axes import facts
from kvfuzz.model.case import Case
from kvfuzz.model.seed import Seed
from kvfuzz.reports.cases import buffer_rows, launch_rows, view_rows
from kvfuzz.reports.text import Pairs, columns
from kvfuzz.reports.view import rows_of
from kvfuzz.reports.words import words


def _parts(case: AnyCase) -> list[str]:
    """The buffers and arguments of a case that has some."""
    if not isinstance(case, Case):
        return []
    return [
        "buffers: bytes, first content",
        *columns(buffer_rows(case)),
        "",
        "arguments: dtype, view",
        *columns(view_rows(case)),
        "",
    ]


def seed_lines(seed: Seed, path: str) -> list[str]:
    """Everything that a seed says."""
    provenance, expected = seed.provenance, seed.expected
    versions = f"kvfuzz {provenance.kvfuzz}, triton {provenance.triton}, torch {provenance.torch}"
    about: Pairs = [
        ("seed", f"{seed.id} (schema {seed.schema}), {path}"),
        ("target", f"{seed.target} ({seed.op})"),
        ("property", f"{seed.property}: {words(seed.property, seed.op).meaning}"),
        ("recorded", f"{expected.verdict}, digest {expected.digest or '(none)'}"),
        ("from", f"{versions}, lane {provenance.lane}, arch {provenance.arch}"),
        ("content", provenance.content),
    ]
    if provenance.note:
        about.append(("note", provenance.note))
    shown = ", ".join(f"{axis}={level}" for axis, level in facts(seed.case).items())
    return [
        *columns(about, indent=0),
        "",
        f"case, {seed.case.nbytes:,} bytes",
        *columns([*rows_of(seed.case), *launch_rows(expected.launches)]),
        "",
        *_parts(seed.case),
        "facts",
        *columns([(shown,)]),
    ]
