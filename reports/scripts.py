"""A script as a table: what happened, and on which cache."""

from kvfuzz.model.script import Action, ScriptCase
from kvfuzz.reports.plans import cache_rows
from kvfuzz.reports.text import Pairs, count

MOST_ACTIONS = 20


def script_rows(case: ScriptCase) -> Pairs:
    """The actions in order, then the cache."""
    actions = case.script.actions
    rows: Pairs = [
        ("op", f"{case.op}, {count(len(case.steps), 'step')}"),
        *(
            ("actions" if not number else "", f"{number + 1}. {action_words(action)}")
            for number, action in enumerate(actions[:MOST_ACTIONS])
        ),
    ]
    if len(actions) > MOST_ACTIONS:
        rows.append(("", f"and {len(actions) - MOST_ACTIONS} more"))
    dtypes = sorted({layer.cache_dtype for layer in case.plan.owners if layer.is_attention})
    rows.append(("dtypes", f"cache {', '.join(dtypes)}, model {case.script.model_dtype}"))
    return rows + cache_rows(case.plan)


def action_words(action: Action) -> str:
    """An action as one reads it aloud."""
    names = ", ".join(action.sequences)
    if action.rule == "fork":
        return f"fork {action.sequences[0]} as {action.sequences[1]}"
    return f"{action.rule} {names}" + (
        f", {count(action.tokens, 'token')}" if action.tokens else ""
    )
