"""The program: its verbs in the order of ``--help``, and what becomes of an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from hbmtwin import __version__
from hbmtwin.cli.bench import bench_kernels, calibrate
from hbmtwin.cli.bench_collectives import bench_collectives
from hbmtwin.cli.bench_command import HELP, BenchCommand
from hbmtwin.cli.dashboard import dashboard
from hbmtwin.cli.exits import FAILURE, OK, USAGE, exit_code_of, subtraction
from hbmtwin.cli.explain import explain
from hbmtwin.cli.export import export
from hbmtwin.cli.fit import FitCommand, fit
from hbmtwin.cli.oom_point import oom_point
from hbmtwin.cli.operations import replay, validate_allocator
from hbmtwin.cli.plan import plan
from hbmtwin.cli.process import (
    INTERRUPTED,
    TERMINATED,
    Terminated,
    interrupted,
    open_closed_streams,
    print_what_can_be_shown,
    sigterm_raises,
)
from hbmtwin.cli.simulate import compare, run
from hbmtwin.cli.start import catalog, init
from hbmtwin.cli.sweep import GridCommand, sweep
from hbmtwin.cli.validate_run import validate_run
from hbmtwin.cli.workload import workload_app
from hbmtwin.cli.workload_model import generate, learn

app = typer.Typer(
    name="hbmtwin",
    help="A discrete-event twin of accelerator memory (HBM) under LLM serving: will it start, how many users fit, "
    "when does it run out of memory, and why.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for verb in (export, init, catalog):
    app.command()(verb)
app.command(cls=FitCommand)(fit)
app.command()(explain)
app.command(cls=BenchCommand, epilog=HELP)(run)
app.command(cls=BenchCommand, epilog=HELP)(compare)
app.command(cls=GridCommand)(sweep)
app.command(cls=BenchCommand, epilog=HELP)(plan)
app.command()(oom_point)
app.command()(replay)
app.command()(dashboard)

validate_app = typer.Typer(help="Hold the simulator to the real thing.", no_args_is_help=True)
app.add_typer(validate_app, name="validate")
validate_app.command("allocator")(validate_allocator)
validate_app.command("run")(validate_run)
bench_app = typer.Typer(help="Time what this machine has.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
bench_app.command("kernels")(bench_kernels)
bench_app.command("collectives")(bench_collectives)
app.command()(calibrate)
app.add_typer(workload_app, name="workload")
workload_app.command()(learn)
workload_app.command()(generate)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; never a traceback for a user's mistake."""
    open_closed_streams()
    print_what_can_be_shown()
    try:
        with sigterm_raises():
            code = app(args=argv, prog_name="hbmtwin", standalone_mode=False)
        if code == INTERRUPTED:  # Typer has taken it, and said nothing
            return interrupted()
        sys.stdout.flush()  # a closed pipe shows here, not at interpreter exit
        return code if isinstance(code, int) else OK
    except typer.TyperException as error:
        return _complain(error.format_message(), error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return interrupted()
    except Terminated:
        return TERMINATED
    except BrokenPipeError:  # `hbmtwin catalog | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left must not fail again at exit
        return FAILURE
    except Exception as error:
        code = exit_code_of(error)
        if code is None:
            raise
        where = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
        return _complain(where + str(error) + subtraction(error), code)


def _complain(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        print(f"hbmtwin {__version__}")
        raise typer.Exit(OK)
    if context.invoked_subcommand is None:
        print(context.get_help(), end="")
        raise typer.Exit(USAGE)
