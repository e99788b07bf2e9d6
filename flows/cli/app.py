"""The command `fcl`: all its commands by name. Nothing heavy is imported before a command needs it."""

import gc
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from flows.cli import inspect_commands, report_commands, run_commands, study_commands, weights_command
from flows.cli.exit_codes import INTERRUPTED, SUCCESS, report_end

EPILOG = (
    "Exit codes: 0 done, 1 something failed, 2 a mistake in settings or arguments, 130 stopped with Ctrl-C. "
    "Tables and JSON go to standard output, all else to standard error; colours only to a terminal."
)
GROUPS: dict[str, dict[str, Callable[..., None]]] = {  # in the order of a first day
    "Start": {
        "doctor": inspect_commands.run_doctor,
        "init": inspect_commands.init,
        "list": inspect_commands.list_plugins,
        "explain": inspect_commands.explain_method,
        "params": inspect_commands.explain_settings,
    },
    "Data": {
        "prepare": run_commands.prepare,
        "partition": run_commands.partition,
        "embed-labels": run_commands.embed_labels,
    },
    "Run": {
        "run": run_commands.run,
        "status": inspect_commands.show_status,
        "presets": inspect_commands.list_presets,
        "preset": run_commands.run_preset,
        "pretrain": run_commands.pretrain,
        "weights": weights_command.manage_weights,
    },
    "Compare": {
        "compare": report_commands.compare,
        "study": study_commands.run_study,
        "tune": study_commands.tune,
        "report": report_commands.write_report,
        "ledger": report_commands.show_ledger,
        "ui": inspect_commands.open_ui,
    },
    "Serve": {
        "predict": inspect_commands.predict,
        "stream": run_commands.stream,
    },
    "Extend": {
        "new-method": inspect_commands.write_method,
        "bench": inspect_commands.run_benchmarks,
    },
}
VERBOSE = {"PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO", "MLFLOW_LOGGING_LEVEL": "INFO"}

app = typer.Typer(
    name="fcl",
    help="Federated continual learning as a workflow: data, experiments, comparison.",
    epilog=EPILOG,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _group, _commands in GROUPS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_group)(_command)


@app.callback(invoke_without_command=True)
def fcl(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version and stop")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show Prefect's and MLflow's logs too")] = False,
) -> None:
    if verbose:
        os.environ |= VERBOSE  # before they are imported, which is when they read this
    if version:
        from importlib.metadata import version as find_version

        print(f"fclflow {find_version('fclflow')}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def run_command_line(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    try:
        code = app(list(arguments), prog_name="fcl", standalone_mode=False) or SUCCESS
    except (Exception, KeyboardInterrupt) as problem:
        return report_end(problem)
    return report_end(KeyboardInterrupt()) if code == INTERRUPTED else code


def main() -> None:
    gc.disable()  # importing creates many objects and no garbage; a flow enables it again before it works
    sys.exit(run_command_line(app, sys.argv[1:]))


if __name__ == "__main__":
    main()
