"""python -m sparrow_jax.report --workdir=W[,B,...] [--out=FILE]

Writes W/report.html from W's logs alone: one file to open in a browser, now or while the run goes on, or to send to
somebody. Several runs, with commas between them, are laid over each other in the report of the first, or in FILE.
"""

from pathlib import Path

from absl import flags

from sparrow_jax import commands
from sparrow_jax.config import ConfigError
from sparrow_jax.console import Console
from sparrow_jax.report import write_report

MOST_RUNS = 8  # that colours can tell apart


def report(workdir: str, out: str) -> int:
    """Writes the report; returns the exit code."""
    # A folder may have a comma in its name.
    workdirs = [workdir] if Path(workdir).expanduser().is_dir() else [part for part in workdir.split(',') if part]
    if not workdirs:
        raise ConfigError(f'--workdir={workdir}: names no folder; give that of a run')
    if len(workdirs) > MOST_RUNS:
        raise ConfigError(f'--workdir: names {len(workdirs)} runs; a report can show {MOST_RUNS}')
    if out and not Path(out).expanduser().parent.is_dir():
        raise ConfigError(f'--out={out}: there is no folder {Path(out).expanduser().parent}; make it first')
    if out and Path(out).expanduser().is_dir():
        raise ConfigError(f'--out={out}: is a folder; give a file')
    file = write_report(workdirs, out)
    with Console() as console:
        console.message(f'wrote {file} ({file.stat().st_size / 1e3:,.0f} kB); open it in a browser')
    return 0


def _flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        'out', '', 'file to write, report.html in the folder of the (first) run by default', flag_values=values
    )


if __name__ == '__main__':
    commands.run(report, config_required=False, uses_jax=False, define_flags=_flags)
