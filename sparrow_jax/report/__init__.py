"""From the logs of a run to one HTML page: reward, length, agreement of sampler and policy, cost, answers.

`logs` reads what is there, `figures` turns it into what is drawn, `headline` into a few numbers, `page` writes it down;
`charts.js` and `readout.js` draw, `page.js` says what, `controls.js` lets a reader choose. Nothing here needs JAX.
"""

from collections.abc import Sequence
from pathlib import Path

from sparrow_jax.report.logs import read_runs
from sparrow_jax.report.page import render
from sparrow_jax.workdir import REPORT_NAME, write_atomically


def write_report(workdirs: Sequence[str | Path], out: str | Path = '') -> Path:
    """Writes the report of these runs, laid over each other where there are several; returns where it is.

    Args:
        workdirs: their folders, local or mounted.
        out: file to write; by default report.html in the first folder.
    Raises:
        ConfigError: a folder is missing or holds no step of a run. Nothing is written then.
    """
    runs = read_runs([str(workdir) for workdir in workdirs])
    file = Path(out).expanduser() if out else runs[0].folder / REPORT_NAME
    write_atomically(file, render(runs))
    return file
