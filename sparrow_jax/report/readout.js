// Values of a chart for a reader: in words, under a pointer, by the arrow keys.

// What a reader without eyes for the curve hears.
function described(spec, lines) {
  const format = spec.y.format || number;
  const parts = lines
    .filter((line) => line.look !== 'area' || !line.unnamed)
    .slice(0, 12)
    .map((line) => {
      const values = (line.value || line.y).filter((value) => value !== null);
      if (!values.length) return '';
      const from = `from ${format(values[0])} to ${format(values.at(-1))}`;
      const within = `least ${format(Math.min(...values))}, greatest ${format(Math.max(...values))}`;
      return `${line.runName ? `${line.runName}, ` : ''}${line.name}: ${from}, ${within}`;
    });
  const rules = (spec.rules || []).map((rule) => rule.text);
  return `${spec.title}. ${[...parts, ...rules].filter(Boolean).join('; ')}.`;
}

// The cursor and its read-out, under a pointer or moved by the arrow keys.
function follow(svg, spec, lines, { px, bottom }) {
  const tip = document.getElementById('tip');
  const places = [...new Set(lines.flatMap((line) => line.x.filter((_, i) => line.y[i] !== null)))].sort(
    (a, b) => px(a) - px(b),
  );
  const cursor = shape('line', { y1: TOP, y2: bottom, class: 'cursor' }, { display: 'none' });
  svg.append(cursor);
  let at = places.length - 1;
  const show = (i, clientX, clientY) => {
    at = i;
    const x = places[i],
      format = spec.y.read || spec.y.format || number;
    cursor.setAttribute('x1', px(x));
    cursor.setAttribute('x2', px(x));
    cursor.style.display = '';
    tip.replaceChildren(make('b', {}, spec.at(x)));
    for (const line of lines) {
      const place = line.x.indexOf(x),
        value = place < 0 ? null : (line.value || line.y)[place];
      if (value === null || value === undefined) continue;
      const error = line.error && line.error[place] ? ` ± ${number(line.error[place], 2)}` : '';
      const range =
        line.lo && line.look !== 'area' && line.lo[place] !== line.hi[place]
          ? ` (${format(line.lo[place])} – ${format(line.hi[place])})`
          : '';
      const swatch = make('i', { class: 'swatch' });
      swatch.style.background = line.color;
      tip.append(
        make(
          'div',
          {},
          swatch,
          make('span', {}, line.runName ? `${line.runName}: ${line.name}` : line.name),
          make('em', {}, format(value) + error + range),
        ),
      );
    }
    tip.hidden = false;
    const box = svg.getBoundingClientRect(),
      own = tip.getBoundingClientRect();
    const x0 = clientX ?? box.left + px(x),
      y0 = clientY ?? box.top + 20;
    const fits = x0 + 16 + own.width < innerWidth - 6;
    tip.style.left = `${Math.max(6, fits ? x0 + 16 : x0 - 16 - own.width)}px`;
    tip.style.top = `${Math.max(6, Math.min(y0 + 14, innerHeight - own.height - 6))}px`;
  };
  const hide = () => {
    cursor.style.display = 'none';
    tip.hidden = true;
  };
  const pointed = (event) => {
    if (!places.length) return;
    const x = event.clientX - svg.getBoundingClientRect().left;
    let best = 0;
    places.forEach((place, i) => {
      if (Math.abs(px(place) - x) < Math.abs(px(places[best]) - x)) best = i;
    });
    show(best, event.clientX, event.clientY);
  };
  svg.addEventListener('pointermove', pointed);
  svg.addEventListener('pointerdown', pointed);
  svg.addEventListener('pointerleave', hide);
  svg.addEventListener('blur', hide);
  svg.addEventListener('keydown', (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === 'Escape') hide();
    if (!move || !places.length) return;
    event.preventDefault();
    show(Math.max(0, Math.min(places.length - 1, cursor.style.display === 'none' ? at : at + move)));
  });
}
