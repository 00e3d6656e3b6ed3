'use strict';
// Charts in SVG: lines with bands, points with error bars, steps and stacked areas, over linear or logarithmic axes.
// `chart` draws into a figure, again when its width, the hidden runs or the smoothing change.

const HEIGHT = 236,
  TOP = 26,
  BOTTOM = 36,
  LEFT = 50,
  RIGHT = 14;
const view = { hidden: new Set(), smoothing: 0, charts: [] };

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function shape(tag, attributes = {}, style = {}, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  Object.assign(node.style, style);
  node.append(...children);
  return node;
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return '–';
  const size = Math.abs(value);
  if (size >= 1e7 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return value.toLocaleString('en', {
    maximumSignificantDigits: size >= 10 ** digits ? Math.ceil(Math.log10(size + 1)) : digits,
  });
}

const percent = (value) => `${number(100 * value, 3)}%`;

function tickText(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${number(value / 1e6)}M`;
  if (size >= 1e4) return `${number(value / 1e3)}k`;
  return number(value, 5);
}

function ticks(low, high, count) {
  const rough = (high - low) / count,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step || 0); // never -0
  return found;
}

const SUPERSCRIPT = '⁰¹²³⁴⁵⁶⁷⁸⁹';
const powerText = (value) => (value >= 0.01 ? number(value) : `10⁻${SUPERSCRIPT[Math.round(-Math.log10(value))]}`);

function logTicks(low, high) {
  const found = [];
  for (let i = Math.ceil(Math.log10(low) - 1e-9); 10 ** i <= high * (1 + 1e-9); i++) found.push(10 ** i);
  return found.length > 1 ? found : [low, high];
}

function scale(low, high, from, to, log) {
  const place = log ? Math.log10 : (value) => value;
  const a = place(low),
    b = place(high);
  return (value) => from + ((place(value) - a) / (b - a)) * (to - from);
}

// The exponential mean of a line, corrected at its beginning.
function smoothed(values, share) {
  let mean = 0,
    weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = share * mean + (1 - share) * value;
    weight = share * weight + 1 - share;
    return mean / weight;
  });
}

function extent(lines, axis, others) {
  const values = others.slice();
  for (const line of lines) {
    line.y.forEach((value, i) => {
      if (value === null) return;
      const error = line.error ? line.error[i] || 0 : 0;
      values.push(...(line.lo ? [line.lo[i], line.hi[i]] : [value - error, value + error]));
    });
  }
  const usable = values.filter((value) => value !== null && (!axis.log || value > 0));
  let low = Math.min(...usable),
    high = Math.max(...usable);
  if (axis.log) return [10 ** Math.floor(Math.log10(low) + 1e-9), 10 ** Math.ceil(Math.log10(high) - 1e-9)];
  if (axis.zero) low = Math.min(low, 0);
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.05 || 0.5;
  const bottom = axis.zero && low === 0 ? 0 : low - pad,
    most = axis.most ?? Infinity;
  return [bottom, high <= most ? Math.min(high + pad, Math.max(most, bottom + pad)) : high + pad];
}

// spec: title, text; x and y: {label, log, zero, most, format}; at: what an x is called;
//   lines: {run, name, color, x, y, lo, hi, error, edges, look, faint, value}, with `look` one of
//     line, points, step, bars, area;
//   rules: {x or y, text}; wide, height.
function chart(parent, spec) {
  const several = new Set(spec.lines.map((line) => line.run)).size > 1 || spec.named;
  const figure = make('figure', spec.wide ? { class: 'wide' } : {});
  const keys = make('ul', { class: 'keys' }),
    plot = make('div', { class: 'plot' });
  figure.append(make('figcaption', {}, make('h3', {}, spec.title), make('p', {}, spec.text)), keys, plot);
  parent.append(figure);
  const state = { width: 0, svg: null, focus: null };
  const draw = () => {
    const lines = spec.lines.filter((line) => !view.hidden.has(line.run));
    fillKeys(keys, lines, several);
    plot.replaceChildren(
      lines.length && state.width > 80 ? drawn(spec, lines, state) : make('p', { class: 'lead' }, 'No run is chosen.'),
    );
  };
  const resized = () => {
    const width = Math.round(plot.clientWidth);
    if (width !== state.width) {
      state.width = width;
      draw();
    }
  };
  resized();
  new ResizeObserver(() => requestAnimationFrame(resized)).observe(plot); // drawing at once would resize again
  view.charts.push(draw);
  return { figure, draw, spec };
}

// What colours and shapes mean: with several runs each run once, then each kind of line once.
function fillKeys(keys, lines, several) {
  const runs = new Map(),
    kinds = new Map();
  for (const line of lines) {
    if (several && line.runName) runs.set(line.runName, { ...line, look: 'area' });
    if (!kinds.has(line.name)) kinds.set(line.name, several && line.runName ? { ...line, color: 'var(--dim)' } : line);
  }
  const shown = [...runs, ...(runs.size && kinds.size < 2 ? [] : kinds)];
  keys.replaceChildren(
    ...shown.map(([name, line]) => {
      const svg = shape('svg', { viewBox: '0 0 22 10', 'aria-hidden': 'true' });
      if (line.look === 'area' || line.look === 'bars')
        svg.append(
          shape(
            'rect',
            { x: 5, y: 0, width: 12, height: 10, rx: 2 },
            { fill: line.color, opacity: line.look === 'bars' ? 0.55 : 1 },
          ),
        );
      else if (line.look === 'points') svg.append(diamond(11, 5, line));
      else svg.append(shape('path', { d: 'M1 5H21' }, stroke(line)));
      return make('li', {}, svg, name);
    }),
  );
  keys.hidden = shown.length < 2 && !several;
}

const stroke = (line) => ({
  stroke: line.color,
  strokeWidth: line.faint ? 1.3 : 2,
  strokeDasharray: line.dash || 'none',
  opacity: line.faint ? 0.75 : 1,
  fill: 'none',
  strokeLinejoin: 'round',
});

function diamond(x, y, line) {
  return shape(
    'path',
    { d: `M${x} ${y - 4.5}l4.5 4.5l-4.5 4.5l-4.5 -4.5z` },
    { fill: line.hollow ? 'var(--panel)' : line.color, stroke: line.color, strokeWidth: 1.6 },
  );
}

function path(points, gapless = true) {
  let text = '',
    pen = 'M';
  for (const point of points) {
    if (point === null) {
      if (!gapless) pen = 'M';
      continue;
    }
    text += `${pen}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
    pen = 'L';
  }
  return text;
}

function drawn(spec, lines, state) {
  const { width } = state,
    height = spec.height || HEIGHT,
    rules = (spec.rules || []).filter((rule) => rule.run === undefined || !view.hidden.has(rule.run));
  const [low, high] =
    spec.y.domain ||
    extent(
      lines,
      spec.y,
      rules.filter((rule) => rule.y !== undefined).map((rule) => rule.y),
    );
  const xs = lines.flatMap((line) => line.edges || line.x);
  let [left, right] = spec.x.domain || [Math.min(...xs), Math.max(...xs)];
  if (left === right) {
    left -= 1;
    right += 1;
  }
  const px = scale(left, right, LEFT, width - RIGHT, spec.x.log),
    py = scale(low, high, height - BOTTOM, TOP, spec.y.log);
  const svg = shape('svg', {
    viewBox: `0 0 ${width} ${height}`,
    height,
    role: 'img',
    tabindex: 0,
    'aria-label': described(spec, lines),
  });

  const yTicks = spec.y.log ? logTicks(low, high) : ticks(low, high, 4),
    yText = spec.y.format || tickText,
    xText = spec.x.format || (spec.x.log ? powerText : tickText);
  const xTicks = spec.x.log
    ? logTicks(Math.min(left, right), Math.max(left, right))
    : ticks(left, right, Math.max(2, Math.floor(width / 95)));
  for (const value of yTicks) {
    svg.append(shape('line', { x1: LEFT, x2: width - RIGHT, y1: py(value), y2: py(value), class: 'gridline' }));
    svg.append(shape('text', { x: LEFT - 8, y: py(value) + 4, 'text-anchor': 'end' }, {}, yText(value)));
  }
  for (const value of spec.x.whole ? xTicks.filter(Number.isInteger) : xTicks)
    svg.append(shape('text', { x: px(value), y: height - BOTTOM + 17, 'text-anchor': 'middle' }, {}, xText(value)));
  svg.append(shape('line', { x1: LEFT, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM, class: 'axis' }));
  svg.append(shape('text', { x: width - RIGHT, y: height - 5, 'text-anchor': 'end' }, {}, spec.x.label));
  svg.append(shape('text', { x: 0, y: 11 }, {}, spec.y.label));

  const bottom = height - BOTTOM,
    inside = (value) => !spec.y.log || value > 0;
  const stairs = (line, values) =>
    values.flatMap((value, i) =>
      value === null
        ? [null]
        : [
            [px(line.edges[i]), py(value)],
            [px(line.edges[i + 1]), py(value)],
          ],
    );
  for (const line of lines) {
    const at = (values) =>
      values.map((value, i) => (value === null || !inside(value) ? null : [px(line.x[i]), py(value)]));
    if (line.lo) {
      const up = (line.look === 'area' ? stairs(line, line.hi) : at(line.hi)).filter(Boolean);
      const down = (line.look === 'area' ? stairs(line, line.lo) : at(line.lo)).filter(Boolean).reverse();
      svg.append(
        shape(
          'path',
          { d: `${path(up)}${path(down).replace('M', 'L')}Z` },
          { fill: line.color, opacity: line.look === 'area' ? 1 : 0.14 },
        ),
      );
    }
    if (line.look === 'area') continue;
    if (line.look === 'step' || line.look === 'bars') {
      const corners = stairs(line, line.y);
      if (line.look === 'bars')
        svg.append(
          shape(
            'path',
            { d: `${path([[px(line.edges[0]), bottom], ...corners, [px(line.edges.at(-1)), bottom]])}Z` },
            { fill: line.color, opacity: 0.3 },
          ),
        );
      svg.append(shape('path', { d: path(corners, false) }, stroke(line)));
    } else if (line.look === 'points') {
      svg.append(shape('path', { d: path(at(line.y)) }, { ...stroke(line), strokeWidth: 1, opacity: 0.5 }));
      line.y.forEach((value, i) => {
        if (value === null) return;
        const error = line.error ? line.error[i] || 0 : 0;
        if (error)
          svg.append(
            shape(
              'path',
              { d: `M${px(line.x[i])} ${py(value - error)}V${py(value + error)}` },
              { stroke: line.color, strokeWidth: 1.5 },
            ),
          );
        svg.append(diamond(px(line.x[i]), py(value), line));
      });
    } else {
      const smooth = view.smoothing > 0 && spec.smooth;
      const whole = path(at(line.y));
      svg.append(
        shape('path', { d: whole }, { ...stroke(line), ...(smooth ? { opacity: 0.25, strokeWidth: 1 } : {}) }),
      );
      if (smooth) svg.append(shape('path', { d: path(at(smoothed(line.y, view.smoothing))) }, stroke(line)));
      const there = at(line.y).filter(Boolean);
      if (there.length === 1)
        svg.append(shape('circle', { cx: there[0][0], cy: there[0][1], r: 3 }, { fill: line.color }));
    }
  }
  for (const rule of rules) {
    const across = rule.y !== undefined,
      place = across ? py(rule.y) : px(rule.x);
    svg.append(
      shape(
        'path',
        { d: across ? `M${LEFT} ${place}H${width - RIGHT}` : `M${place} ${TOP}V${bottom}`, class: 'rule' },
        rule.color ? { stroke: rule.color } : {},
      ),
    );
    const text = across
      ? {
          x: rule.early ? LEFT + 5 : width - RIGHT - 4,
          y: place + (place < TOP + 16 || rule.under ? 14 : -5),
          'text-anchor': rule.early ? 'start' : 'end',
        }
      : {
          x: place + (place > width * 0.6 ? -5 : 5),
          y: TOP + 12,
          'text-anchor': place > width * 0.6 ? 'end' : 'start',
        };
    svg.append(shape('text', { ...text, class: 'ruled' }, {}, rule.text));
  }
  follow(svg, spec, lines, { px, bottom });
  return svg;
}
