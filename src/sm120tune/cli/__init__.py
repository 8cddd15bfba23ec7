"""The command line: one module per command, and the one place where errors become exit codes."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

import click

from sm120tune import __version__
from sm120tune.devices import ask_early
from sm120tune.errors import UserError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

_IMPLICIT = "tune"
_COMMANDS = ("tune", "check", "explain", "install", "uninstall", "list", "verify", "convert", "compare", "calibrate")
"""Each is ``NAME_command`` in the module of its name, if _MODULES has no other."""
_MODULES = {"list": "installed"}
"""A module named list would hide the built-in one in here."""
_OWN_OPTIONS = ("--help", "-h", "--version")


class _Commands(click.Group):
    """Imports a command when it is asked for: torch and Triton take seconds to import."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = _MODULES.get(cmd_name, cmd_name)
        command = getattr(importlib.import_module(f"sm120tune.cli.{module}"), f"{cmd_name}_command")
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="sm120tune")
def commands() -> None:
    """Tune SGLang's fused-MoE Triton kernel and write the pair of config files that SGLang loads.

    `python -m sm120tune --experts 256 --tp 8 --inter 2048` is short for `… tune --experts …`;
    `python -m sm120tune tune --help` lists its options.
    """


def run(argv: Sequence[str]) -> int:
    """Run one command; returns the exit code (0 done, 1 fell short, 2 bad input, 130 interrupted)."""
    began = time.monotonic()
    try:
        os.getcwd()
    except OSError:
        return _fail("the working directory is gone; cd to one that is there")
    args = list(argv)
    if args and args[0].startswith("-") and args[0] not in _OWN_OPTIONS:
        args.insert(0, _IMPLICIT)
    _end_on_signals()
    if args[:1] == [_IMPLICIT] and not {"--help", "-h"} & set(args):
        ask_early()
    try:
        code = commands.main(args=args, prog_name="sm120tune", standalone_mode=False, obj=began)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_BAD_INPUT
    except click.ClickException as error:
        return _fail(error.format_message())
    except UserError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, click.exceptions.Abort):
        print("interrupted; everything finished is saved, the same command goes on from there", file=sys.stderr)
        return EXIT_INTERRUPTED
    return int(code or 0)


def _end_on_signals() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A script's background: Ctrl-C is not meant for this process, but SIGTERM needs the handlers of Ctrl-C.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(_signal: int, frame: FrameType | None) -> None:
    # As Ctrl-C: while asyncio runs it cancels in an orderly way. An exception from here could hit its own code in any
    # line, where a lost wake-up would make the end wait for ever.
    interrupt = signal.getsignal(signal.SIGINT)
    assert callable(interrupt)
    interrupt(signal.SIGINT, frame)


def _fail(message: str) -> int:
    print(f"sm120tune: error: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_BAD_INPUT
