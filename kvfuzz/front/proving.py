"""`kvfuzz prove`: which views of which plans hold for every block id and block count."""

import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import msgspec

from kvfuzz.engine.findings import replay_command
from kvfuzz.engine.pool import Worker
from kvfuzz.engine.proving import Subject, drawn_plans, proved
from kvfuzz.engine.store import OutputFolder
from kvfuzz.engine.worker.entry import WorkerConfig
from kvfuzz.errors import Exit, UsageError
from kvfuzz.front.config import load_config
from kvfuzz.front.options import checked_sources, parse_sources
from kvfuzz.front.replaying import STDIN
from kvfuzz.model import plan_case
from kvfuzz.model.axes import Domain
from kvfuzz.model.cache_plan import CachePlan
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.preset_plans import LAYOUTS, PresetOptions, plan_of
from kvfuzz.model.presets import presets
from kvfuzz.model.proof import Proof, TensorsFile, check_tensors
from kvfuzz.model.seed import load
from kvfuzz.model.target import DEFAULT_ARCH, DEFAULT_LANE, TargetSpec
from kvfuzz.reports.finding import render
from kvfuzz.reports.proof import proof_lines, summary_line
from kvfuzz.reports.view import view_of

PRESET, ALL_PRESETS, DRAWN = "preset:", "presets", "drawn:"


class ProveOptions(msgspec.Struct, frozen=True):
    """The options of `kvfuzz prove`, as typed."""

    target: str
    source: tuple[str, ...]
    preset: PresetOptions
    out: str
    every_count: bool = True
    seed: int = 0


def prove_subjects(names: Sequence[str], options: ProveOptions, *, folder: Path) -> Exit:
    """Prove what `names` mean, and report each.

    Raises UsageError for a name, a file or a target that means nothing.
    """
    configured = checked_sources(load_config(folder).source, relative_to=folder)
    sources = configured | parse_sources(options.source)
    spec = TargetSpec(options.target, sources, "cache_views" if ".py:" in options.target else "")
    out = OutputFolder(Path(options.out).expanduser())
    config = WorkerConfig(spec, DEFAULT_LANE, DEFAULT_ARCH)
    worst, results = Exit.CLEAN, list[Proof]()
    with Worker(config, case_timeout_s=60.0) as worker:
        description = worker.describe()
        domain = description.info.domain.narrowed(description.info.op)
        subjects = [subjects_of(name, options, domain) for name in names]
        every_count, asked = options.every_count, False
        for each in proved(worker, description, chain(*subjects), every_count=every_count):
            results.append(each.proof)
            asked = asked or isinstance(each.subject.case, PlanCase)
            lines = proof_lines(each.subject.name, each.subject.case, each.proof)
            print("\n".join(lines), flush=True)
            if each.seed is not None and each.verdict is not None:
                path = out.save(each.seed)
                view = view_of(
                    each.seed,
                    each.verdict,
                    path=str(path),
                    replay=replay_command(path, spec),
                )
                print("\n" + render(view) + "\n", flush=True)
            if each.proof.refuted:
                worst = Exit.FINDING
            elif each.proof.undecided and worst == Exit.CLEAN:
                worst = Exit.NOT_CHECKED
    print(summary_line(results, description.info.name if asked else ""))
    return worst


def subjects_of(name: str, options: ProveOptions, domain: Domain) -> Iterable[Subject]:
    """What one argument of `kvfuzz prove` means. Raises UsageError where it means nothing."""
    if name == ALL_PRESETS:
        complete = [key for key, preset in presets().items() if not preset.incomplete]
        return [_of_preset(key, options.preset, strict=False) for key in complete]
    if name.startswith(PRESET):
        return [_of_preset(name.removeprefix(PRESET), options.preset, strict=True)]
    if name.startswith(DRAWN):
        count = name.removeprefix(DRAWN)
        if not count.isdigit() or not int(count):
            raise UsageError(f"{name}: expected {DRAWN}COUNT, for instance {DRAWN}200")
        return drawn_plans(domain, int(count), random_seed=options.seed)
    return [_of_file(name)]


def _of_preset(key: str, options: PresetOptions, *, strict: bool) -> Subject:
    """The plan of a preset; unless `strict`, one that cannot be laid out so is not decided."""
    name = f"{PRESET}{key}, {options.layout}"
    try:
        return Subject(name, PlanCase("cache_views", plan_of(key, options)))
    except UsageError as error:
        if strict or options.layout not in LAYOUTS:
            raise UsageError(f"{name}: {error}") from None
        return Subject(name, str(error))


def _of_file(name: str) -> Subject:
    """A seed, a plan, or the views of an engine, by what its JSON has."""
    try:
        data = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{name}: no such file ({error.strerror}), and neither {PRESET}NAME, {ALL_PRESETS} nor "
            f"{DRAWN}COUNT"
        ) from None
    try:
        raw = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise UsageError(f"{name}: not JSON ({error})") from None
    keys = set(raw) if isinstance(raw, dict) else set()
    try:
        if "schema" in keys:
            case = load(data, where=name).case
            if not isinstance(case, PlanCase):
                raise UsageError(f"{name}: a seed of {load(data, where=name).op}, not of a plan")
            return Subject(name, case)
        if "views" in keys:
            return Subject(name, _checked(name, msgspec.json.decode(data, type=TensorsFile)))
        plan = msgspec.json.decode(data, type=CachePlan)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{name}: {error}; expected a seed, a plan (num_blocks, layers, groups, allocations, "
            "placements), or tensors (num_blocks, groups, allocations, views)"
        ) from None
    case = PlanCase("cache_views", plan)
    try:
        plan_case.check(case)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    return Subject(name, case)


def _checked(name: str, file: TensorsFile) -> TensorsFile:
    try:
        check_tensors(file)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    return file
