// What a reader can choose: another number to draw, answers, runs, smoothing, light or dark.

// Any other number

const metrics = [...new Set(data.runs.flatMap((run) => Object.keys(run.series)))].sort();
const chooser = make('select', { 'aria-label': 'Metric' }, ...metrics.map((name) => make('option', {}, name)));
chooser.value = metrics.includes('rollout_corr/rollout_is_mean') ? 'rollout_corr/rollout_is_mean' : metrics[0];
const anyPlace = make('div', { class: 'grid' });
document
  .getElementById('any')
  .append(make('p', { class: 'lead' }, 'Every number of metrics.jsonl can be drawn: '), anyPlace);
document.querySelector('#any .lead').append(chooser);
const fixedCharts = view.charts.length;
function drawAny() {
  anyPlace.replaceChildren();
  view.charts.length = fixedCharts;
  chart(anyPlace, {
    title: chooser.value,
    text: '',
    wide: true,
    smooth: true,
    x: STEPS,
    at: atStep,
    y: { label: 'value', read: (value) => number(value, 6) },
    lines: ofAll([chooser.value, 'value']),
  });
}
chooser.addEventListener('change', drawAny);
drawAny();

// Answers

const answers = data.runs.flatMap((run) => run.samples.map((sample) => ({ ...sample, run })));
if (answers.length) {
  document.getElementById('answers').hidden = false;
  const option = (value, text) => make('option', { value }, text);
  const steps = [...new Set(answers.map((sample) => sample.step))].sort((a, b) => a - b);
  const step = make('select', {}, ...steps.map((value) => option(value, number(value))));
  step.value = steps.at(-1);
  const which = make('select', {}, option('all', 'all'), option('right', 'right'), option('wrong', 'not right'));
  document.getElementById('filters').append(make('label', {}, 'step ', step), make('label', {}, 'answers ', which));
  const place = document.getElementById('samples');
  const fill = () => {
    const right = (sample) => sample.reward !== null && sample.reward >= (sample.run.correct ?? 1);
    const chosen = answers.filter(
      (sample) =>
        sample.step === Number(step.value) &&
        !view.hidden.has(sample.run.index) &&
        (which.value === 'all' || (which.value === 'right') === right(sample)),
    );
    place.replaceChildren(
      ...chosen.map((sample) => {
        const badge = make(
          'span',
          { class: `reward ${right(sample) ? 'good' : 'bad'}` },
          `reward ${number(sample.reward)}`,
        );
        const who = make('span', {}, sample.run.name);
        who.style.color = sample.run.color;
        const facts = [
          badge,
          ...(several ? [who] : []),
          make('span', {}, `${number(sample.tokens)} tokens`),
          make('span', {}, sample.finish_reason === 'length' ? 'cut at the limit' : `ended: ${sample.finish_reason}`),
          make('span', {}, `expected: ${sample.answer}`),
        ];
        return make(
          'article',
          { class: 'sample' },
          make('div', {}, ...facts),
          make('details', {}, make('summary', {}, 'Prompt'), make('pre', {}, sample.prompt)),
          make('pre', { tabindex: 0 }, sample.completion),
        );
      }),
      ...(chosen.length ? [] : [make('p', { class: 'lead' }, 'No such answer at this step.')]),
    );
  };
  step.addEventListener('change', fill);
  which.addEventListener('change', fill);
  view.fillAnswers = fill;
  fill();
}

// What changes the view

function redraw() {
  for (const draw of view.charts) draw();
}
for (const button of document.querySelectorAll('button.run')) {
  button.addEventListener('click', () => {
    const run = Number(button.dataset.run),
      off = !view.hidden.has(run);
    if (off) view.hidden.add(run);
    else view.hidden.delete(run);
    button.setAttribute('aria-pressed', String(!off));
    redraw();
    view.fillAnswers?.();
  });
}
document.getElementById('controls').hidden = false;
document.getElementById('smoothing').addEventListener('input', (event) => {
  view.smoothing = Number(event.target.value);
  document.getElementById('smoothed').textContent = view.smoothing || 'none';
  redraw();
});
document.getElementById('theme').addEventListener('click', () => {
  const root = document.documentElement,
    now = root.dataset.theme || (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
  root.dataset.theme = now === 'dark' ? 'light' : 'dark';
});
