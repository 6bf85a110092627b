"""Simpler scripts: fewer actions, then fewer tokens, layers and heads.

What an action that is taken out made impossible goes with it: the others mean the same, since they
name their sequences.
"""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model import plan_edits
from kvfuzz.model.cache_plan import CachePlan
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.fill import FP32_ONE
from kvfuzz.model.manager import BlockManager
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.script import Action, Script, ScriptCase
from kvfuzz.model.script_lowering import lower_script
from kvfuzz.model.search import Steps, fewest, first_of, smallest

Search = Steps[ScriptCase]


def simplifications(case: ScriptCase) -> Search:
    """Candidates that are simpler than `case`, pass after pass, until a round changes nothing."""
    seen: list[ScriptCase] = []
    while case not in seen:
        seen.append(case)
        case = yield from _fewer_actions(case)
        case = yield from first_of(case, _without_forks(case))
        case = yield from _fewer_names(case)
        case = yield from _fewer_tokens(case)
        case = yield from _plainer_plan(case)
        case = yield from _fewer_blocks(case)
        case = yield from first_of(case, _plainer_numbers(case))
    return case


def _with(case: ScriptCase, **changes: object) -> ScriptCase | None:
    """`case` with other parts of its script; None where that is impossible."""
    try:
        return lower_script(msgspec.structs.replace(case.script, **changes))
    except UsageError:
        return None


def possible(plan: CachePlan, host_blocks: int, actions: Sequence[Action]) -> tuple[Action, ...]:
    """The actions without those that cannot follow the ones before them."""
    manager = BlockManager(plan, host_blocks)
    kept = []
    for action in actions:
        try:
            manager.apply(action)
        except UsageError:
            continue
        kept.append(action)
    return tuple(kept)


def _with_actions(case: ScriptCase, actions: Sequence[Action]) -> ScriptCase | None:
    kept = possible(case.plan, case.script.host_blocks, actions)
    return _with(case, actions=kept) if kept else None


def _fewer_actions(case: ScriptCase) -> Search:
    return (yield from fewest(case, case.script.actions, lambda kept: _with_actions(case, kept), 1))


def _without_forks(case: ScriptCase) -> Iterator[ScriptCase | None]:
    """The script without one of its forks: what the second sequence does, the first one does."""
    actions = case.script.actions
    for at, action in enumerate(actions):
        if action.rule == "fork":
            parent, child = action.sequences
            later = [_renamed(each, child, parent) for each in actions[at + 1 :]]
            yield _with_actions(case, (*actions[:at], *later))


def _renamed(action: Action, old: str, new: str) -> Action:
    """An action of `new` instead of `old`, once."""
    names = dict.fromkeys(new if name == old else name for name in action.sequences)
    return msgspec.structs.replace(action, sequences=tuple(names))


def _fewer_names(case: ScriptCase) -> Search:
    """One sequence fewer in an action of several."""
    for at, action in enumerate(case.script.actions):
        for name in action.sequences if len(action.sequences) > 1 else ():
            if action.rule == "fork":
                continue
            left = tuple(each for each in action.sequences if each != name)
            fewer = msgspec.structs.replace(action, sequences=left)
            case = yield from first_of(case, [_replaced(case, at, fewer)])
    return case


def _replaced(case: ScriptCase, at: int, action: Action) -> ScriptCase | None:
    actions = case.script.actions
    if at >= len(actions):
        return None
    return _with_actions(case, (*actions[:at], action, *actions[at + 1 :]))


def _fewer_tokens(case: ScriptCase) -> Search:
    for at in range(len(case.script.actions)):
        if at >= len(case.script.actions) or case.script.actions[at].tokens < 2:
            continue
        case = yield from smallest(case, case.script.actions[at].tokens, 1, _token_editor(case, at))
    return case


def _token_editor(case: ScriptCase, at: int) -> Callable[[int], ScriptCase | None]:
    action = case.script.actions[at]
    return lambda tokens: _replaced(case, at, msgspec.structs.replace(action, tokens=tokens))


def _plainer_plan(case: ScriptCase) -> Search:
    """What makes a plan plainer, for as long as the actions are still possible on it."""
    search = plan_edits.plainer_plans(PlanCase("cache_views", case.plan))
    answer = None
    while True:
        try:
            plan = search.send(answer) if answer is not None else next(search)
        except StopIteration:
            return case
        candidate = _on(case, plan.plan)
        answer = candidate is not None and (yield candidate)
        if candidate is not None and answer:
            case = candidate


def _on(case: ScriptCase, plan: CachePlan) -> ScriptCase | None:
    """`case` on another plan; what is written is of the dtype of its pages, fp8 apart."""
    kept = possible(plan, case.script.host_blocks, case.script.actions)
    dtypes = {layer.cache_dtype for layer in plan.owners if layer.is_attention}
    wide = [each for each in dtypes if not DTYPES[each].is_quantised]
    written_in = wide[0] if wide else case.script.model_dtype
    return _with(case, plan=plan, actions=kept, model_dtype=written_in) if kept else None


def _fewer_blocks(case: ScriptCase) -> Search:
    case = yield from smallest(case, case.plan.num_blocks, 1, lambda n: _on_blocks(case, n))
    return (
        yield from smallest(
            case, case.script.host_blocks, 1, lambda count: _with(case, host_blocks=count)
        )
    )


def _on_blocks(case: ScriptCase, count: int) -> ScriptCase | None:
    smaller = plan_edits.with_num_blocks(PlanCase("cache_views", case.plan), count).plan
    kept = possible(smaller, case.script.host_blocks, case.script.actions)
    # Fewer blocks, and not fewer actions: those were tried.
    return _with(case, plan=smaller) if kept == case.script.actions else None


def _plainer_numbers(case: ScriptCase) -> Iterator[ScriptCase | None]:
    script: Script = case.script
    if script.model_dtype != plan_edits.PLAIN_DTYPE:
        yield _with(case, model_dtype=plan_edits.PLAIN_DTYPE)
    if (script.k_scale, script.v_scale) != (FP32_ONE, FP32_ONE):
        yield _with(case, k_scale=FP32_ONE, v_scale=FP32_ONE)
    for seed in (0, 1):
        if script.fill_seed > seed:
            yield _with(case, fill_seed=seed)
