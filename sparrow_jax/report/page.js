// Which charts the page shows, of all runs.

const data = JSON.parse(document.getElementById('data').textContent);
const several = data.runs.length > 1;
// Where a step stands on the axis: in the middle of the steps that it is drawn with.
const placeOf = (step) => (data.width > 1 ? (Math.floor(step / data.width) + 0.5) * data.width : step);
data.runs.forEach((run, i) => {
  run.index = i;
  run.x = run.steps.map(([first]) => placeOf(first));
  run.color = `var(--run-${i})`;
});

const atStep = (x) => {
  if (data.width === 1) return `step ${number(x)}`;
  const first = Math.floor(x / data.width) * data.width;
  return `steps ${number(first)} to ${number(first + data.width - 1)}`;
};
const STEPS = { label: 'step', whole: true };

// A metric of one run as a line, or nothing where the run has none.
function line(run, metric, name, more = {}) {
  const series = run.series[metric];
  if (!series || series.v.every((value) => value === null)) return [];
  const band = series.lo ? { lo: series.lo, hi: series.hi } : {};
  return [
    {
      run: run.index,
      runName: several ? run.name : '',
      name,
      color: run.color,
      x: run.x,
      y: series.v,
      ...band,
      ...more,
    },
  ];
}

const ofAll = (...metrics) =>
  data.runs.flatMap((run) =>
    metrics.flatMap(([metric, name, more]) => line(run, metric, name, typeof more === 'function' ? more(run) : more)),
  );

function section(title, lead) {
  const node = make('section', {}, make('h2', {}, title), make('p', { class: 'lead' }, lead)),
    grid = make('div', { class: 'grid' });
  node.append(grid);
  return (spec) => {
    if (!spec.lines.length) return;
    if (!node.parentNode) document.getElementById('charts').append(node);
    chart(grid, { smooth: true, x: STEPS, at: atStep, ...spec });
  };
}

// One rule where all runs have the same target, else one for each.
function targets(place) {
  const known = data.runs.filter((run) => typeof run.target === 'number');
  const same = new Set(known.map((run) => run.target)).size === 1;
  return (same ? known.slice(0, 1) : known).map((run) => ({
    ...place(run.target),
    text: `target ${run.target}${same ? '' : ` of ${run.name}`}`,
    ...(same ? {} : { run: run.index, color: run.color }),
  }));
}

const errors = (run) => ({ look: 'points', error: run.series['val/accuracy_stderr']?.v });
const evaluated = data.runs.flatMap((run) => {
  const rows = run.evaluations.filter((row) => row.sampler !== 'dense');
  return rows.length
    ? [
        {
          run: run.index,
          runName: several ? run.name : '',
          name: 'held-out accuracy of the sparse sampler',
          color: run.color,
          x: rows.map((row) => placeOf(row.step)),
          y: rows.map((row) => row.accuracy),
          error: rows.map((row) => row.stderr),
          look: 'points',
          hollow: true,
        },
      ]
    : [];
});

const learning = section(
  'Learning',
  'Whether training does what it is for: rewards of the answers it samples, and accuracy on problems that it ' +
    'never trains on.',
);
learning({
  title: 'Reward and held-out accuracy',
  y: { label: 'reward, accuracy', zero: true, most: 1 },
  text:
    'Reward is the mean over the sampled answers of a step. Held-out accuracy is that of the dense policy, with ' +
    'its standard error over problems.',
  lines: [
    ...ofAll(['critic/score/mean', 'reward in training'], ['val/accuracy', 'held-out accuracy', errors]),
    ...evaluated,
  ],
});
learning({
  title: 'Loss',
  y: { label: 'nats per token' },
  text: 'Of the worked solutions that supervised training imitates.',
  lines: ofAll(['supervised/loss', 'loss']),
});
const spread = (run) =>
  data.width === 1 && run.series['response_length/min']
    ? { lo: run.series['response_length/min'].v, hi: run.series['response_length/max'].v }
    : {};
learning({
  title: 'Response length',
  y: { label: 'tokens', zero: true },
  text:
    data.width === 1
      ? 'Mean length of an answer; the band reaches from the shortest to the longest of the step. A sudden fall is ' +
        'how a collapse begins.'
      : 'Mean length of an answer. A sudden fall is how a collapse begins.',
  lines: ofAll(
    ['response_length/mean', 'in training', spread],
    ['val/response_length/mean', 'on held-out problems', { look: 'points' }],
  ),
});
learning({
  title: 'Cut off, and well formed',
  y: { label: 'share of answers', zero: true, most: 1, format: percent },
  text: 'Answers that reached the length limit before they ended, and those in which an answer could be found at all.',
  lines: ofAll(
    ['response_length/clip_ratio', 'cut at the limit'],
    ['reward/format_valid', 'well formed', { dash: '5 3', faint: true }],
  ),
});
learning({
  title: 'Prompts that teach',
  y: { label: 'share of prompts', zero: true, most: 1, format: percent },
  text: 'Only where answers to one prompt got different rewards is there something to learn from comparing them.',
  lines: ofAll(['critic/groups_with_signal', 'with different rewards']),
});

const apart = section(
  'Sampler and policy',
  'alpha of a token is the sum, over the vocabulary, of the smaller of its two probabilities: under the sparse ' +
    'sampler that drew it and under the dense policy that is trained. It is 1 where the two agree. p05 is the ' +
    'value that 5% of the tokens lie below: this tail, not the mean, decides whether training is stable.',
);
const P05 = { label: 'p05 of alpha', most: 1, read: (value) => number(value, 6) };
apart({
  title: 'p05 by step',
  y: P05,
  rules: targets((y) => ({ y })),
  text:
    'Of all sampled tokens of a step. The floor is what numerical differences alone cost, with a dense sampler: ' +
    'nothing gets above it.',
  lines: ofAll(['sparse/alpha_p05', 'p05'], ['sparse/alpha_floor_p05', 'floor', { look: 'points', hollow: true }]),
});
const spanned = ([first, last]) =>
  first === last ? `step ${number(first)}` : `steps ${number(first)} to ${number(last)}`;
apart({
  title: 'p05 by length',
  y: P05,
  rules: targets((y) => ({ y })),
  smooth: false,
  x: { label: 'cached tokens', zero: true },
  text:
    'How well sampler and policy agree where a sequence has grown so long: dashed at the beginning of the run, ' +
    'solid at its end.',
  at: (x) => {
    const bin = data.runs.flatMap((run) => run.lengths?.bins || []).find(([low, high]) => (low + high) / 2 === x);
    return `${number(bin[0])} to ${number(bin[1])} cached tokens`;
  },
  lines: data.runs.flatMap((run) => {
    const lengths = run.lengths;
    if (!lengths) return [];
    const bar = {
      run: run.index,
      runName: several ? run.name : '',
      color: run.color,
      look: 'step',
      x: lengths.bins.map(([low, high]) => (low + high) / 2),
      edges: edgesOf(lengths.bins),
    };
    return [
      ...(lengths.first
        ? [
            {
              ...bar,
              name: several ? 'first steps' : spanned(lengths.first_steps),
              y: lengths.first,
              faint: true,
              dash: '4 3',
            },
          ]
        : []),
      { ...bar, name: several ? 'last steps' : spanned(lengths.last_steps), y: lengths.last },
    ];
  }),
});
function edgesOf(bins) {
  return [...bins.map(([low]) => low), bins.at(-1)[1]];
}
const measured = data.runs.filter((run) => run.alpha);
const beta = measured
  .filter((run) => run.alpha.fit)
  .map(({ name, alpha }) => {
    const fit = `Beta(${number(alpha.a, 3)}, ${number(alpha.b, 3)}), KS distance ${number(alpha.ks, 2)}`;
    const whose = `${percent(alpha.share)} of ${number(alpha.tokens)} tokens`;
    return `${several ? `${name}: ` : ''}${fit}, ${whose}`;
  });
apart({
  title: 'The tail of alpha',
  smooth: false,
  x: { label: 'alpha', domain: [0, 1] },
  y: { label: 'share of the tail', zero: true, format: percent },
  text:
    'Tokens below 0.999, lately, and the Beta distribution that fits them best (dashed); the KS distance is the ' +
    `largest difference between the shares of both below any alpha. ${beta.join('; ')}.`,
  at: (x) => {
    const width = measured[0].alpha.edges[1] / 2;
    return `alpha ${number(x - width, 3)} to ${number(x + width, 3)}`;
  },
  lines: measured.flatMap((run) => {
    const { edges, bars, fit } = run.alpha,
      x = edges.slice(1).map((edge, i) => (edge + edges[i]) / 2);
    const common = { run: run.index, runName: several ? run.name : '', color: run.color, x };
    return [
      { ...common, name: 'tokens', look: 'bars', edges, y: bars },
      ...(fit ? [{ ...common, name: 'Beta', look: 'line', dash: '5 3', y: fit }] : []),
    ];
  }),
});
apart({
  title: 'All of alpha',
  smooth: false,
  x: { label: '1 − alpha (agreement falls to the right)', log: true, domain: [1e-6, 1] },
  y: { label: 'share of tokens', log: true, format: percent, domain: [1e-4, 1] },
  text: 'How many tokens are at least so far from full agreement. A curve that stays below 5% at the target holds it.',
  rules: [
    { y: 0.05, text: '5%: p05 is where the curve crosses', early: true, under: true },
    ...targets((target) => ({ x: Math.max(1 - target, 1e-6) })),
  ],
  at: (x) => `1 − alpha at least ${number(x, 3)}`,
  lines: measured.map((run) => ({
    run: run.index,
    runName: several ? run.name : '',
    name: several ? 'tokens' : `tokens, ${spanned(run.alpha.steps)}`,
    color: run.color,
    x: run.alpha.gap,
    y: run.alpha.further.map((share) => (share >= 1e-4 ? share : null)),
    look: 'line',
  })),
});
apart({
  title: 'p01 by step',
  y: { ...P05, label: 'p01 of alpha' },
  text:
    'The value that 1% of the tokens lie below. Where no wrong token is forgiven, as in the digits of a sum, it ' +
    'says more than p05.',
  lines: ofAll(['sparse/alpha_p01', 'p01']),
});

const cost = section(
  'Budgets and cost',
  'What sparsity saves: pages of the KV cache that a token may read, what that comes to in bytes, and where the ' +
    'time of a step goes.',
);
for (const run of data.runs) {
  const last = run.budgets.length - 1;
  cost({
    title: several ? `Budgets by length: ${run.name}` : 'Budgets by length',
    y: { label: 'pages', zero: true },
    named: true,
    smooth: false,
    text:
      'Pages that the controller lets a token read, for each range of cached tokens (from light, short, to strong, ' +
      'long), reserved pages aside.',
    lines: run.budgets.flatMap(([low, high, metric], i) =>
      line(run, metric, `${number(low)} to ${number(high)}`, {
        runName: '',
        color: `color-mix(in oklab, var(--high) ${last ? Math.round((100 * i) / last) : 100}%, var(--low))`,
        lo: undefined,
        hi: undefined,
      }),
    ),
  });
}
cost({
  title: 'KV cache read',
  y: { label: 'of a dense sampler', zero: true, most: 1, format: percent },
  text:
    'Bytes of keys, values and landmarks that the sampler reads, of all layers, over what dense attention would ' +
    'read for the same answers.',
  lines: ofAll(
    ['sparse/kv_read_fraction', 'read'],
    ['sparse/probe_overhead', 'time spent on probes, of sampling', { faint: true, dash: '4 3' }],
  ),
});
cost({
  title: 'Pages read',
  y: { label: 'pages per token', zero: true },
  text: 'Mean over the sampled tokens of the pages that attention reads in a sparse layer, with the reserved ones.',
  lines: ofAll(
    ['sparse/pages_read/mean', 'read'],
    ['sparse/budget_pages/mean', 'of which chosen', { faint: true, dash: '4 3' }],
  ),
});
cost({
  title: 'Speed',
  y: { label: 'tokens/s', zero: true },
  text:
    'Tokens that sampling writes in a second, and tokens (prompts too) that whole steps get through on each ' +
    'device.',
  lines: ofAll(
    ['perf/rollout_tokens_per_s', 'sampling'],
    ['perf/throughput', 'whole step, per device', { faint: true, dash: '4 3' }],
  ),
});

const PARTS = {
  gen: 'sampling',
  probes: 'probes',
  reward: 'verifying',
  old_log_prob: 'scoring',
  update_actor: 'learning',
  floor: 'dense floor',
  rest: 'other',
  testing: 'evaluation',
};
function timeParts(run) {
  const times = {},
    zeros = run.x.map(() => 0),
    of = (name) => (run.series[name]?.v || zeros).map((value) => value || 0);
  for (const name of Object.keys(run.series))
    if (name.startsWith('timing_s/') && name !== 'timing_s/step') times[name.slice(9)] = of(name);
  const step = of('timing_s/step'),
    overhead = of('sparse/probe_overhead');
  const inside = Object.keys(times).filter((part) => part !== 'testing');
  times.rest = step.map((whole, i) => Math.max(0, whole - inside.reduce((sum, part) => sum + times[part][i], 0)));
  if (times.gen && run.series['sparse/probe_overhead']) {
    times.probes = times.gen.map((seconds, i) => seconds * overhead[i]);
    times.gen = times.gen.map((seconds, i) => seconds - times.probes[i]);
  }
  const order = Object.keys(PARTS).filter((part) => times[part]);
  const parts = [...order, ...inside.filter((part) => !PARTS[part])].filter((part) =>
    times[part].some((value) => value > 0),
  );
  const halves = [run.x[0] - data.width / 2, ...run.x.map((x) => x + data.width / 2)];
  const all = Object.keys(PARTS),
    others = inside.filter((part) => !PARTS[part]);
  const colour = (part) => (PARTS[part] ? all.indexOf(part) : all.length + others.indexOf(part));
  let base = zeros;
  return parts.map((part) => {
    const top = base.map((low, k) => low + times[part][k]);
    const found = {
      run: run.index,
      runName: '',
      name: PARTS[part] || part,
      color: `var(--part-${colour(part) % 8})`,
      x: run.x,
      edges: halves,
      y: times[part],
      value: times[part],
      lo: base,
      hi: top,
      look: 'area',
    };
    base = top;
    return found;
  });
}
for (const run of data.runs) {
  if (!run.series['timing_s/step']) continue;
  cost({
    title: several ? `Time of a step: ${run.name}` : 'Time of a step',
    y: { label: 'seconds', zero: true },
    named: true,
    wide: true,
    smooth: false,
    text:
      'Where the seconds of a step go, one part above the other; evaluation, which is not part of every step, on ' +
      'top.',
    lines: timeParts(run),
  });
}

const policy = section('The policy', 'Signs of health of the training itself.');
policy({
  title: 'Entropy',
  y: { label: 'nats per token', zero: true },
  text: 'How undecided the dense policy is over its tokens; near 0 it has stopped exploring.',
  lines: ofAll(['actor/entropy', 'entropy']),
});
policy({
  title: 'Sampler against policy: KL',
  y: { label: 'nats per token' },
  text: 'Mean log-ratio of dense policy and sampler over the sampled tokens, which importance weights correct for.',
  lines: ofAll(['rollout_corr/kl', 'KL']),
});
policy({
  title: 'Gradient',
  y: { label: 'norm', zero: true },
  text: 'Norm of the gradient before it is clipped; spikes are updates that went far.',
  lines: ofAll(['actor/grad_norm', 'gradient norm']),
});
policy({
  title: 'Policy loss',
  y: { label: 'loss' },
  text: 'Clipped policy gradient loss; its sign and size say little by themselves, jumps do.',
  lines: ofAll(['actor/pg_loss', 'loss']),
});
