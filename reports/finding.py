"""The text of a finding: about one screen, the replay command alone on the last line."""

from kvfuzz.model.events import Found
from kvfuzz.reports.text import Pairs, columns, paragraph, printable
from kvfuzz.reports.view import FindingView, finding_view

HEADING = "FINDING"


def finding_text(found: Found) -> str:
    """The text of an event."""
    return render(finding_view(found))


def render(view: FindingView) -> str:
    """The lines of a view; labels are aligned over all sections."""
    others: Pairs = [
        ("also failed" if not index else "", f"{name}: {message}")
        for index, (name, message) in enumerate(view.others)
    ]
    sections = [view.subject, view.evidence + others, view.case + view.launches, view.record]
    size = max(len(label) for section in sections for label, _ in section)
    lines = paragraph(f"{HEADING}  {view.title}")
    for section in filter(None, sections):
        lines += ["", *columns((label.ljust(size), value) for label, value in section)]
    return "\n".join([*lines, "", printable(view.replay)])
