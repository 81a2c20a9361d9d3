"use strict";
// Zooms charts, reads values under the pointer, and hides runs. Without it the page shows all of each curve.
const [WIDTH, HEIGHT, LEFT, TOP] = [576, 210, 58, 8];
const SVG = "http://www.w3.org/2000/svg";

function ticks(from, to, wanted) {
  const rough = (to - from) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(n => n * power).find(s => s >= rough) ?? rough;
  const all = [];
  for (let n = Math.ceil(from / step); n * step <= to && all.length < 20; n++) all.push(n * step);
  return all;
}

function short(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  return size >= 1e-3 && size < 1e5 ? String(Number(value.toFixed(4))) : String(Number(value.toPrecision(3)).toExponential());
}

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

for (const figure of document.querySelectorAll("figure.chart[data-view]")) {
  const plot = figure.querySelector(".plot"), axes = figure.querySelector(".axes");
  const curves = figure.querySelector(".curves"), selection = figure.querySelector(".selection");
  const reading = figure.querySelector(".reading"), note = reading.textContent;
  const paths = [...curves.querySelectorAll("path")].map(path => ({
    path,
    name: path.dataset.name,
    points: path.dataset.points.split(" ").map(point => point.split(",").map(Number)),
  }));
  const all = figure.dataset.view.split(" ").map(Number);
  let view = all;

  function draw() {
    const [x0, x1, y0, y1] = view;
    // From the drawing of the whole to the drawing of the view.
    const sx = (all[1] - all[0]) / (x1 - x0), sy = (all[3] - all[2]) / (y1 - y0);
    const dx = (all[0] - x0) / (x1 - x0) * WIDTH, dy = (y1 - all[3]) / (y1 - y0) * HEIGHT;
    curves.setAttribute("transform", `matrix(${sx} 0 0 ${sy} ${dx} ${dy})`);
    axes.replaceChildren();
    for (const tick of ticks(x0, x1, 6)) {
      const x = LEFT + (tick - x0) / (x1 - x0) * WIDTH;
      axes.append(element("line", { x1: x, x2: x, y1: TOP, y2: TOP + HEIGHT }));
      axes.append(element("text", { x, y: TOP + HEIGHT + 16, "text-anchor": "middle" }, short(tick)));
    }
    for (const tick of ticks(y0, y1, 5)) {
      const y = TOP + (y1 - tick) / (y1 - y0) * HEIGHT;
      axes.append(element("line", { x1: LEFT, x2: LEFT + WIDTH, y1: y, y2: y }));
      axes.append(element("text", { x: LEFT - 5, y: y + 4, "text-anchor": "end" }, short(tick)));
    }
  }

  // Position of the pointer in the plot.
  function at(event) {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(plot.getScreenCTM().inverse());
    return [Math.min(Math.max(point.x, 0), WIDTH), Math.min(Math.max(point.y, 0), HEIGHT)];
  }

  let start = null;
  plot.addEventListener("pointerdown", event => {
    if (event.button !== 0) return;
    start = at(event);
    plot.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  plot.addEventListener("pointermove", event => {
    const [x, y] = at(event);
    if (start) {
      const box = { x: Math.min(x, start[0]), y: Math.min(y, start[1]), width: Math.abs(x - start[0]), height: Math.abs(y - start[1]) };
      for (const [key, value] of Object.entries(box)) selection.setAttribute(key, value);
    }
    const step = view[0] + x / WIDTH * (view[1] - view[0]);
    const values = paths.filter(({ path }) => path.style.display !== "none").map(({ name, points }) => {
      const near = points.reduce((best, point) => Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best);
      return `${name}: ${near[1].toPrecision(6)} at ${near[0]}`;
    });
    reading.textContent = values.join("   ");
  });
  plot.addEventListener("pointerleave", () => { reading.textContent = note; });
  plot.addEventListener("pointerup", event => {
    if (!start) return;
    const [x, y] = at(event), [fromX, fromY] = start;
    start = null;
    selection.setAttribute("width", 0);
    selection.setAttribute("height", 0);
    if (Math.abs(x - fromX) < 4 || Math.abs(y - fromY) < 4) return;
    const [x0, x1, y0, y1] = view, stepAt = px => x0 + px / WIDTH * (x1 - x0), valueAt = py => y1 - py / HEIGHT * (y1 - y0);
    const next = [stepAt(Math.min(x, fromX)), stepAt(Math.max(x, fromX)), valueAt(Math.max(y, fromY)), valueAt(Math.min(y, fromY))];
    if (next[1] - next[0] > (all[1] - all[0]) * 1e-9 && next[3] - next[2] > (all[3] - all[2]) * 1e-9) view = next;
    draw();
  });
  plot.addEventListener("dblclick", () => { view = all; draw(); });
}

for (const box of document.querySelectorAll("input[data-run]")) {
  box.addEventListener("change", () => {
    for (const path of document.querySelectorAll(".curves path")) {
      if (path.dataset.name === box.dataset.run) path.style.display = box.checked ? "" : "none";
    }
  });
}
