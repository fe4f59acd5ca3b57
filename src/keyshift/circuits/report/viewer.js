// The pattern viewers of the page: a head's weights as a matrix and over the tokens, for the pointer and the keyboard.
"use strict";
for (const model of document.querySelectorAll(".model")) {
  const data = model.querySelector("script.patterns");
  if (data) startViewer(model, JSON.parse(data.textContent));
}

function startViewer(model, data) {
  const count = data.tokens.length;
  const find = (selector) => model.querySelector(selector);
  const viewer = find(".viewer"), select = find(".viewer select"), tip = find(".tip");
  const canvas = find(".matrix canvas"), row = find(".matrix .row"), cell = find(".matrix .cell");
  const items = data.tokens.map((text, place) => tokenItem(find(".tokens"), text, place));
  const choice = { values: null, most: 1, fixed: null };

  select.addEventListener("change", refresh);
  find(".ways").addEventListener("change", refresh);
  find(".tokens").addEventListener("keydown", moveFocus);
  find(".tokens").addEventListener("mouseleave", rest);
  canvas.addEventListener("mouseleave", rest);
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect();
    const at = (part, whole) => Math.min(count - 1, Math.max(0, Math.floor((part / whole) * count)));
    show(at(event.clientY - box.top, box.height), at(event.clientX - box.left, box.width), event);
  });
  items.forEach((item, place) => {
    item.addEventListener("mouseenter", () => (choice.fixed === null ? show(place) : show(choice.fixed, place)));
    item.addEventListener("focus", () => { choice.fixed = place; show(place); });
    item.addEventListener("blur", (event) => {
      const next = event.relatedTarget;  // null where the pointer went, and controls of the viewer: the token stays
      if (next && !viewer.contains(next)) { choice.fixed = null; rest(); }
    });
  });
  model.addEventListener("click", (event) => {
    const tile = event.target.closest("td[data-head]");
    if (!tile) return;
    select.value = tile.dataset.head;
    refresh();
    viewer.scrollIntoView({ block: "nearest" });
  });
  canvas.width = canvas.height = count;
  viewer.hidden = false;
  model.classList.add("ready");
  refresh();

  function refresh() {
    const [layer, head] = select.value.split(".").map(Number);
    const shifted = Boolean(data.shift && data.shift[layer][head].length);
    const flow = find("input[value=flow]");
    if (flow) {
      flow.disabled = !shifted;
      if (!shifted && flow.checked) find("input[value=plain]").checked = true;
    }
    const way = find(".ways input:checked").value;
    choice.values = valuesOf(data, layer, head, way);
    choice.most = choice.values.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
    find(".most").textContent = choice.most.toPrecision(3);
    find(".lowest").textContent = choice.values.some((value) => value < 0) ? (-choice.most).toPrecision(3) : "0";
    find(".scale").classList.toggle("both", choice.values.some((value) => value < 0));
    for (const tile of model.querySelectorAll("td[data-head]"))
      tile.classList.toggle("chosen", tile.dataset.head === select.value);
    paint(canvas, choice);
    rest();
  }

  function rest() {
    if (choice.fixed !== null) return show(choice.fixed);
    tip.hidden = row.hidden = cell.hidden = true;
    items.forEach((item) => { item.className = ""; item.style.backgroundColor = ""; });
  }

  function show(i, j, pointer) {
    const value = (source) => choice.values[i * count + source];
    items.forEach((item, place) => {
      const known = place <= i;
      item.className = place === i ? "present" : known ? (place === j ? "source" : "") : "later";
      item.style.backgroundColor = known ? colour(value(place) / choice.most) : "";
    });
    row.hidden = false;
    row.style.top = `${(100 * i) / count}%`;
    cell.hidden = j === undefined;
    row.style.height = cell.style.height = cell.style.width = `${100 / count}%`;
    if (j !== undefined) Object.assign(cell.style, { top: row.style.top, left: `${(100 * j) / count}%` });
    if (j !== undefined && j > i) tip.textContent = `${named(i)} cannot see ${named(j)}, which comes later`;
    else if (j !== undefined) tip.textContent = `${named(i)} → ${named(j)}: ${value(j).toFixed(3)}`;
    else tip.textContent = `${named(i)} → ${strongest(value, i)}`;
    tip.hidden = false;
    placeTip(pointer ? { left: pointer.clientX + 14, bottom: pointer.clientY + 14 } : items[i].getBoundingClientRect());
  }

  function placeTip(anchor) {
    const box = viewer.getBoundingClientRect();
    const left = Math.min(anchor.left - box.left, box.width - tip.offsetWidth);
    Object.assign(tip.style, { left: `${Math.max(0, left)}px`, top: `${anchor.bottom - box.top + 5}px` });
  }

  function strongest(value, i) {
    const sources = Array.from({ length: i + 1 }, (_, j) => j).sort((a, b) => Math.abs(value(b)) - Math.abs(value(a)));
    return sources.slice(0, 3).map((j) => `${named(j)} ${value(j).toFixed(3)}`).join(", ");
  }

  function named(place) {
    return `${place}\u00a0“${items[place].textContent}”`;
  }

  function moveFocus(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -count, End: count }[event.key];
    if (!step) return;
    event.preventDefault();
    const now = items.indexOf(document.activeElement);
    items[Math.min(count - 1, Math.max(0, now + step))].focus();
  }
}

function tokenItem(list, text, place) {
  const item = document.createElement("li");
  item.textContent = text;
  item.tabIndex = place ? -1 : 0;
  return list.appendChild(item);
}

// The matrix of one head, row by row: its weights, times the norms of values, or as value flow Σ_m β_m p[i, j + m].
function valuesOf(data, layer, head, way) {
  const count = data.tokens.length, start = (layer * data.heads + head) * ((count * (count + 1)) / 2);
  const packed = (data.bytes ??= Uint8Array.from(atob(data.weights), (letter) => letter.charCodeAt(0)));
  const weight = (i, j) => (j > i ? 0 : packed[start + (i * (i + 1)) / 2 + j] / 255);
  const ways = {
    plain: weight,
    weighted: (i, j) => weight(i, j) * data.norms[layer][head][j],
    flow: (i, j) => data.shift[layer][head].reduce((sum, beta, m) => sum + beta * weight(i, j + m), 0),
  };
  const values = new Float32Array(count * count);
  for (let i = 0; i < count; i++) for (let j = 0; j <= i; j++) values[i * count + j] = ways[way](i, j);
  return values;
}

function colour(strength) {
  return `rgb(${strength < 0 ? "213 94 0" : "0 114 178"} / ${Math.abs(strength).toFixed(3)})`;
}

function paint(canvas, choice) {
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  choice.values.forEach((value, place) => {
    image.data.set(value < 0 ? [213, 94, 0] : [0, 114, 178], 4 * place);
    image.data[4 * place + 3] = Math.round((255 * Math.abs(value)) / choice.most);
  });
  context.putImageData(image, 0, 0);
}
