"""The commands and their options; what each does is in a module of its own."""

import sys
from pathlib import Path

import click

from kvfuzz.errors import Exit, KvfuzzError
from kvfuzz.model.target import DEFAULT_ARCH, LANES

SOURCE_HELP = "Source tree of a project, loaded without install or build (repeatable)."


def run_command(argv: list[str]) -> int:
    """Run `argv` and return the exit code; a KvfuzzError becomes one line on stderr."""
    try:
        code = cli.main(argv, prog_name="kvfuzz", standalone_mode=False)
    except KvfuzzError as error:
        complain(error)
        return error.exit_code
    except click.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        error.show()
        return error.exit_code
    return code if isinstance(code, int) else 0


def complain(error: KvfuzzError) -> None:
    """Print `kvfuzz: MESSAGE` on stderr, in one line."""
    from kvfuzz.reports.text import printable

    sys.stdout.flush()
    message = " ".join(printable(str(error)).split("\n"))
    print(f"kvfuzz: {message}", file=sys.stderr, flush=True)


def _print_version(context: click.Context, option: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from kvfuzz.front.listing import version_line

        click.echo(version_line())
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the versions that decide what a run does.",
)
def cli() -> None:
    """Fuzz KV-cache layouts on real Triton kernels, and compare every byte.

    Exit codes: 0 clean, 1 finding, 2 usage, 3 infrastructure, 4 not checked, 130 interrupted.
    """


@cli.command()
@click.argument("target")
@click.option(
    "--where",
    multiple=True,
    metavar="AXIS=LEVEL,...",
    help="Draw only these levels; LEVEL|LEVEL for several. `kvfuzz list axes` shows all.",
)
@click.option("--budget", metavar="60s|5m|2h", help="How long to draw.  [default: 60s]")
@click.option("--max-cases", type=click.IntRange(min=1), help="Stop after this many cases.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    metavar="N",
    help="Random number that the draws start from.  [default: 0]",
)
@click.option("--lane", type=click.Choice(LANES), help="Where kernels run.  [default: cpu]")
@click.option("--arch", metavar="GFX", help="What the cpu lane compiles for.  [default: gfx942]")
@click.option("--out", metavar="DIR", help="Seeds, journal, event log.  [default: kvfuzz-out]")
@click.option("--source", multiple=True, metavar="PROJECT=DIR", help=SOURCE_HELP)
@click.option("--op", help="What a file target is, where its parameters leave that open.")
@click.option("--keep-going/--stop", default=None, help="Go on after a finding.  [default: --stop]")
@click.option(
    "--until-coverage",
    is_flag=True,
    default=None,
    help="End when every combination of three levels was shown; 4 where the budget ends first.",
)
@click.option("--case-timeout", metavar="30s", help="When a case hangs.  [default: 30s]")
def run(
    target: str,
    where: tuple[str, ...],
    budget: str | None,
    max_cases: int | None,
    seed: int | None,
    lane: str | None,
    arch: str | None,
    out: str | None,
    source: tuple[str, ...],
    op: str | None,
    keep_going: bool | None,
    until_coverage: bool | None,
    case_timeout: str | None,
) -> int:
    """Fuzz TARGET until its first finding, or until the budget ends.

    TARGET is a name from `kvfuzz list`, or path/to/file.py:function. Defaults come from
    kvfuzz.toml or [tool.kvfuzz] in pyproject.toml; flags win.
    """
    from kvfuzz.front.running import run_campaign

    flags = {
        "where": ",".join(where) or None,
        "budget": budget,
        "max_cases": max_cases,
        "seed": seed,
        "lane": lane,
        "arch": arch,
        "out": out,
        "op": op,
        "keep_going": keep_going,
        "until_coverage": until_coverage,
        "case_timeout": case_timeout,
    }
    return run_campaign(target, flags, source, folder=Path())


@cli.command()
@click.argument("seeds", nargs=-1, required=True, metavar="SEED...")
@click.option("--target", default="", help="Run on this target instead of the seed's.")
@click.option("--source", multiple=True, metavar="PROJECT=DIR", help=SOURCE_HELP)
@click.option("--lane", type=click.Choice(LANES), help="Instead of the seed's lane.")
@click.option("--arch", default="", metavar="GFX", help="Instead of the seed's arch.")
@click.option("--case-timeout", default="60s", metavar="60s", help="When a case hangs.")
@click.option(
    "--bisect",
    is_flag=True,
    help="For `git bisect run`: 0 clean, 1 finding, 125 for everything else.",
)
def replay(
    seeds: tuple[str, ...],
    target: str,
    source: tuple[str, ...],
    lane: str | None,
    arch: str,
    case_timeout: str,
    bisect: bool,
) -> int:
    """Run saved cases again; `-` reads a pasted seed from stdin.

    The exit code says what happens now, whatever was recorded. Of several seeds, a finding wins
    over a failure of the machine, that over not checked.
    """
    from kvfuzz.front.replaying import ReplayOptions, replay_seeds

    # entry.main maps the exit code, since a crash of kvfuzz must count too.
    del bisect
    options = ReplayOptions(target, source, lane or "", arch, case_timeout)
    return replay_seeds(seeds, options, folder=Path())


@cli.command()
@click.argument("plans", nargs=-1, required=True, metavar="PLAN...")
@click.option(
    "--target",
    default="builtin:cache_views",
    show_default=True,
    help="Whose views: a builder from `kvfuzz list`, or path/to/file.py:function.",
)
@click.option("--source", multiple=True, metavar="PROJECT=DIR", help=SOURCE_HELP)
@click.option(
    "--layout",
    default="separate",
    show_default=True,
    metavar="separate|packed|LBHNC|...",
    help="How a preset's layers are placed.",
)
@click.option("--form", default="", metavar="FORM", help="How a preset's attention is read.")
@click.option("--cache-dtype", default="bf16", show_default=True, help="Of a preset.")
@click.option(
    "--num-blocks",
    type=click.IntRange(min=1),
    metavar="N",
    help="Prove for N blocks alone.  [default: for every number of blocks]",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="For drawn:N.")
@click.option("--out", default="kvfuzz-out", show_default=True, metavar="DIR", help="For seeds.")
def prove(
    plans: tuple[str, ...],
    target: str,
    source: tuple[str, ...],
    layout: str,
    form: str,
    cache_dtype: str,
    num_blocks: int | None,
    seed: int,
    out: str,
) -> int:
    """Prove that no two layers of a PLAN share a byte that they must not share.

    PLAN is preset:NAME (`kvfuzz list presets`), presets for all of them, drawn:N for N plans of the
    target's domain, or a JSON file: a seed, a plan, or the tensors of a running engine. Ends with 0
    where all is proved, with 1 and a seed that shows it where something is refuted, with 4 where a
    plan is outside the target's domain.
    """
    from kvfuzz.front.proving import ProveOptions, prove_subjects
    from kvfuzz.model.preset_plans import PresetOptions

    preset = PresetOptions(layout, form, cache_dtype, num_blocks or PresetOptions().num_blocks)
    options = ProveOptions(target, source, preset, out, num_blocks is None, seed)
    return prove_subjects(plans, options, folder=Path())


@cli.group()
def seeds() -> None:
    """Work on saved seeds."""


@seeds.command()
@click.argument("names", nargs=-1, required=True, metavar="SEED...")
@click.option("--target", default="", help="Reduce on this target instead of the seed's.")
@click.option("--source", multiple=True, metavar="PROJECT=DIR", help=SOURCE_HELP)
@click.option("--lane", type=click.Choice(LANES), help="Instead of the seed's lane.")
@click.option("--arch", default="", metavar="GFX", help="Instead of the seed's arch.")
@click.option("--case-timeout", default="60s", metavar="60s", help="When a case hangs.")
@click.option(
    "--budget", default="60s", metavar="60s|5m|2h", show_default=True, help="How long, each seed."
)
@click.option("--out", default="", metavar="DIR", help="Where to write.  [default: by the seed]")
def minimize(
    names: tuple[str, ...],
    target: str,
    source: tuple[str, ...],
    lane: str | None,
    arch: str,
    case_timeout: str,
    budget: str,
    out: str,
) -> int:
    """Write a smaller seed beside each SEED that fails in the same way; `-` reads stdin.

    SEED itself stays as it is. Ends with 0 where every seed is minimised or was minimal, with 4
    where one does not fail any more or its target is absent.
    """
    from kvfuzz.front.minimizing import minimize_seeds
    from kvfuzz.front.replaying import ReplayOptions

    options = ReplayOptions(target, source, lane or "", arch, case_timeout)
    return minimize_seeds(names, options, budget=budget, out=out, folder=Path())


@cli.command()
@click.argument("seed")
def show(seed: str) -> None:
    """Print the case of SEED as tables, without running anything; `-` reads stdin."""
    from kvfuzz.front.replaying import read
    from kvfuzz.reports.seed import seed_lines

    click.echo("\n".join(seed_lines(read(seed), seed)))


@cli.command()
@click.option("--arch", default=DEFAULT_ARCH, metavar="GFX", help="What the cpu lane compiles for.")
@click.option("--ops", is_flag=True, help="Name every operation that the cpu lane supports.")
def doctor(arch: str, ops: bool) -> int:
    """Say what this machine can run: versions, lanes, supported operations.

    Runs a kernel on each lane. Ends with 0 where some lane works, with 4 where none does.
    """
    from kvfuzz.engine.checkup import check_lanes
    from kvfuzz.reports.checkup import checkup_lines

    found = check_lanes(arch)
    click.echo("\n".join(checkup_lines(found, ops=ops)))
    return Exit.CLEAN if any(each.lane.works for each in found) else Exit.NOT_CHECKED


@cli.command("list")
@click.argument(
    "what", type=click.Choice(("all", "targets", "mutants", "axes", "presets")), default="all"
)
def list_(what: str) -> None:
    """List what there is: targets, mutants, axes with their levels, presets."""
    from kvfuzz.front.listing import listing_lines

    click.echo("\n".join(listing_lines(what)))
