"""`kvfuzz doctor` as lines: versions, lanes, and what the cpu lane supports."""

from kvfuzz.model.checkup import Checkup, LaneState
from kvfuzz.model.verdict import PROPERTY_NAMES
from kvfuzz.reports.text import Pairs, columns


def checkup_lines(found: list[Checkup], *, ops: bool) -> list[str]:
    """What was found; `ops` lists every supported name instead of counting them."""
    versions = next((each.versions for each in found if each.versions), {})
    rows: Pairs = [("versions", ", ".join(f"{name} {said}" for name, said in versions.items()))]
    rows += [(f"lane {each.lane.name}", _lane_words(each.lane)) for each in found]
    lines = columns(rows, indent=0)
    supported = next((each.supported for each in found if each.supported), {})
    if supported:
        lines += ["", "supported on the cpu lane (anything else is not checked, with its line)"]
        shown = [
            (family, ", ".join(names) if ops else str(len(names)))
            for family, names in supported.items()
        ]
        lines += columns(shown)
    if supported and not ops:
        lines += ["", "kvfuzz doctor --ops lists them by name"]
    return lines


def _lane_words(lane: LaneState) -> str:
    if not lane.works:
        return f"does not work: {lane.trouble}"
    left = [name for name in PROPERTY_NAMES if name not in lane.decided]
    said = f"works on {lane.device}, for {lane.arch}: a gather was right"
    return f"{said}; not checked here: {', '.join(left)}" if left else f"{said}, all is checked"
