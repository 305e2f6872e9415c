// A line chart over the last two minutes, drawn by hand once a second.

const SPAN = 120;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The next of 1, 2, 5, 10, 20 … */
function nice(value) {
  const scale = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((factor) => value <= factor * scale * 1.0001) * scale;
}

/**
 * Draw `series` ([{values, colour, fill}], newest value last, null where there was none) into
 * `canvas`; `most` fixes the top, `label` writes it; `at` marks a place counted from the end.
 */
export function draw(canvas, series, { most, label, at = null }) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width) return;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const highest = Math.max(0, ...series.flatMap(({ values }) => values.filter((v) => v !== null)));
  const top = most ?? (highest > 0 ? nice(highest) : 1);
  const bottom = height - 1.5;
  const y = (value) => bottom - (Math.min(value, top) / top) * (height - 14);
  const x = (place, length) => width - ((length - 1 - place) / (SPAN - 1)) * width;

  pen.strokeStyle = colour("--line");
  pen.fillStyle = colour("--soft");
  pen.lineWidth = 1;
  pen.font = `11px ${colour("--sans")}`;
  for (const level of [0, 0.5, 1]) {
    const line = Math.round(y(level * top)) + 0.5;
    pen.beginPath();
    pen.moveTo(0, line);
    pen.lineTo(width, line);
    pen.stroke();
  }
  pen.fillText(label(top), 0, y(top) - 3);

  for (const { values, colour: name, fill } of series) {
    pen.strokeStyle = pen.fillStyle = colour(name);
    pen.lineWidth = 1.75;
    pen.lineJoin = "round";
    let begin = null;
    const close = (end) => {
      if (begin === null) return;
      pen.stroke();
      if (fill) {
        pen.lineTo(x(end, values.length), bottom);
        pen.lineTo(x(begin, values.length), bottom);
        pen.globalAlpha = 0.12;
        pen.fill();
        pen.globalAlpha = 1;
      }
      begin = null;
    };
    values.forEach((value, place) => {
      if (value === null) return close(place - 1);
      if (begin === null) {
        begin = place;
        pen.beginPath();
        pen.moveTo(x(place, values.length), y(value));
      } else pen.lineTo(x(place, values.length), y(value));
    });
    close(values.length - 1);
  }
  if (at !== null) {
    pen.strokeStyle = colour("--soft");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(width - (at / (SPAN - 1)) * width, 8);
    pen.lineTo(width - (at / (SPAN - 1)) * width, bottom);
    pen.stroke();
  }
}

/** The place under a pointer, counted from the newest point. */
export const placeAt = (canvas, event) => {
  const box = canvas.getBoundingClientRect();
  return Math.round((1 - (event.clientX - box.left) / box.width) * (SPAN - 1));
};
