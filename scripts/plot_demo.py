"""python scripts/plot_demo.py W [W ...] --out docs/demo.png

The picture of a run in the README, from metrics.jsonl alone.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt

PANELS = (
    ('held-out accuracy, dense policy', 'val/accuracy', (0, 1.05)),
    ('response length, tokens', 'response_length/mean', None),
    ('share of the KV cache read', 'sparse/kv_read_fraction', (0, 1.05)),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('workdirs', nargs='+', type=Path)
    parser.add_argument('--labels', nargs='*', default=[])
    parser.add_argument('--out', type=Path, required=True)
    options = parser.parse_args()
    figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 3.1), layout='constrained')
    for i, workdir in enumerate(options.workdirs):
        rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
        label = options.labels[i] if i < len(options.labels) else workdir.name
        for axis, (_, name, _) in zip(axes, PANELS, strict=True):
            points = [(row['step'], row[name]) for row in rows if row.get(name) is not None]
            marker = 'o' if name.startswith('val/') else None
            axis.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=4, linewidth=1.6)
    for axis, (title, _, limits) in zip(axes, PANELS, strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel('step', fontsize=9)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        axis.spines[['top', 'right']].set_visible(False)
        if limits:
            axis.set_ylim(*limits)
    axes[0].legend(fontsize=8, frameon=False, loc='lower right')
    figure.savefig(options.out, dpi=130)


if __name__ == '__main__':
    main()
