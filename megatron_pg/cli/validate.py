"""`megatron-pg validate`: the startup checks without starting. Exit code 0: it would start; 2: it would stop."""

import argparse
import sys

from megatron_pg.cli.checks import check
from megatron_pg.cli.launch import add_launch_options, read_arguments, read_launch
from megatron_pg.cli.terminal import say, show_json


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `validate`."""
    add_launch_options(parser)


def run(options: argparse.Namespace) -> int:
    """Print the verdict; every violation is a line on the standard error."""
    launch = read_launch(options)
    verdict = check(launch)
    valid = not verdict.violations
    if options.json:
        show_json(
            {
                "source": launch.source,
                "valid": valid,
                "violations": [{"rule": rule, "message": message} for rule, message in verdict.violations],
                "remarks": list(verdict.remarks),
                "caveats": list(launch.caveats),
                "arguments": read_arguments(launch) if valid else None,
                "other_arguments": list(launch.others),
            }
        )
    elif valid:
        say(f"valid: {launch.source}")
        for remark in (*verdict.remarks, *launch.caveats):
            say(f"  note: {remark}")
        say(f"  {len(launch.others)} further arguments belong to other parsers and were not checked")
    for rule, message in verdict.violations:
        sys.stderr.write(f"megatron-pg validate: [{rule}] {message}\n")
    return 0 if valid else 2
