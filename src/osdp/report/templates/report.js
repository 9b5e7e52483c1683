"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const state = { way: 0, from: 0, to: 1, at: null, batch: null };
  const way = () => data.ways[state.way];

  // ---- numbers as people read them
  const three = (x) => (x >= 999.5 ? Math.round(x).toLocaleString("en") : x >= 99.95 ? x.toFixed(0) : x >= 9.995 ? x.toFixed(1) : x >= 0.9995 ? x.toFixed(2) : x === 0 ? "0" : x.toPrecision(2));
  const bytes = (n) => { const u = ["B", "KiB", "MiB", "GiB", "TiB"]; let i = 0; while (n >= 1023.95 && i < 4) { n /= 1024; i++; } return `${i ? n.toFixed(1) : Math.round(n)} ${u[i]}`; };
  const seconds = (s) => (s >= 0.9995 ? `${three(s)} s` : s >= 0.0009995 ? `${three(s * 1e3)} ms` : `${three(s * 1e6)} µs`);
  const spent = (s) => (s ? seconds(s) : "–");
  const count = (n) => { const u = ["", " k", " M", " B", " T"]; let i = 0; while (n >= 999.5 && i < 4) { n /= 1000; i++; } return (i ? three(n) : String(n)) + u[i]; };
  const escaped = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" }[c]));

  // ---- drawing
  const NS = "http://www.w3.org/2000/svg";
  const add = (parent, tag, attributes, text) => {
    const node = document.createElementNS(NS, tag);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  };
  const canvas = (box, height) => {
    box.querySelector("svg")?.remove();
    const width = Math.max(260, box.clientWidth);
    const svg = document.createElementNS(NS, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    svg.setAttribute("aria-hidden", "true"); // the box around it says what it shows
    box.prepend(svg);
    return [svg, width];
  };
  const tipOf = (box) => { let tip = box.querySelector(".tip"); if (!tip) { tip = document.createElement("div"); tip.className = "tip"; tip.hidden = true; box.appendChild(tip); } return tip; };
  const place = (box, tip, x, html) => {
    tip.innerHTML = html; tip.hidden = false;
    const w = tip.offsetWidth, room = box.clientWidth;
    tip.style.left = `${Math.max(0, Math.min(room - w, x + (x > room / 2 ? -w - 14 : 14)))}px`;
    tip.style.top = "26px";
  };
  const ticks = (top, n) => { const raw = top / n, p = 10 ** Math.floor(Math.log10(raw)), s = [1, 2, 2.5, 5, 10].find((k) => k * p >= raw * 0.999) * p, out = []; for (let v = 0; v <= top * 1.0001; v += s) out.push(v); return out; };
  const byteTicks = (top, n) => { let unit = 1; while (top / unit >= 1024) unit *= 1024; return ticks(top / unit, n).map((v) => v * unit); };
  const legend = (id, items) => { $(id).innerHTML = items.map((e) => `<span><i class="${e.shape || ""}" style="${e.shape === "dash" || e.shape === "dots" ? `color:${e.color}` : `background:${e.color}`}"></i>${escaped(e.name)}${e.value ? ` <b>${e.value}</b>` : ""}</span>`).join(""); };

  const LEFT = () => (innerWidth < 600 ? 62 : 74), RIGHT = 10;
  const scale = (width) => {
    const a = state.from * way().end, b = state.to * way().end, left = LEFT();
    return { x: (t) => left + ((t - a) / (b - a)) * (width - left - RIGHT), t: (x) => a + ((x - left) / (width - left - RIGHT)) * (b - a), a, b, left };
  };
  const phases = (svg, s, width, top, bottom) => {
    const w = way(), bounds = [[0, w.forward_end, "forward"], [w.forward_end, w.backward_end, "backward"], [w.backward_end, w.end, "optimizer"]];
    for (const [from, to, name] of bounds) {
      const l = Math.max(s.left, s.x(from)), r = Math.min(width - RIGHT, s.x(to));
      if (from > s.a && from < s.b) add(svg, "line", { x1: s.x(from), x2: s.x(from), y1: top, y2: bottom, class: "phase" });
      if (r - l > name.length * 7) add(svg, "text", { x: (l + r) / 2, y: top - 7, "text-anchor": "middle" }, name);
    }
  };
  const timeAxis = (svg, s, width, y) => {
    const n = width < 500 ? 4 : 8, step = ticks(s.b - s.a, n)[1];
    for (let t = Math.ceil(s.a / step) * step; t <= s.b * 1.00001; t += step) {
      const last = s.x(t) > width - 34;
      add(svg, "text", { x: s.x(t), y: y + 17, "text-anchor": last ? "end" : "middle" }, t === 0 ? "0" : seconds(t));
    }
  };
  const cursor = (svg, x, top, bottom) => { svg.querySelector(".cursor")?.remove(); add(svg, "line", { x1: x, x2: x, y1: top, y2: bottom, class: "cursor" }); };
  const clip = (svg, id, s, width, height) => { const c = add(add(svg, "defs", {}), "clipPath", { id }); add(c, "rect", { x: s.left, y: 0, width: width - s.left - RIGHT, height }); return `url(#${id})`; };

  // ---- memory
  const sampleAt = (t) => { const times = way().seconds; let low = 0, high = times.length - 2; while (low < high) { const m = (low + high + 1) >> 1; if (times[m] <= t) low = m; else high = m - 1; } return low; };
  const bytesAt = (i) => way().bytes.map((row) => row[i] * data.unit);
  const TOP = 26;
  function drawMemory() {
    const box = $("memory-chart"), height = innerWidth < 600 ? 260 : 340, [svg, width] = canvas(box, height), s = scale(width), w = way();
    const bottom = height - 26, most = Math.max(data.limit, w.peak) * 1.08, y = (v) => bottom - (v / most) * (bottom - TOP);
    for (const v of byteTicks(most, 5)) {
      add(svg, "line", { x1: s.left, x2: width - RIGHT, y1: y(v), y2: y(v), class: "grid" });
      add(svg, "text", { x: s.left - 7, y: y(v) + 4, "text-anchor": "end" }, v ? bytes(v).replace(".0 ", " ").replace(" ", "\u00a0") : "0");
    }
    const inside = add(svg, "g", { "clip-path": clip(svg, "memory-clip", s, width, height) });
    const n = w.seconds.length - 1, base = new Array(n).fill(0);
    w.bytes.forEach((row, part) => {
      const up = [], down = [];
      for (let i = 0; i < n; i++) {
        const low = y(base[i] * data.unit), high = y((base[i] + row[i]) * data.unit), l = s.x(w.seconds[i]).toFixed(1), r = s.x(w.seconds[i + 1]).toFixed(1);
        up.push(`${l},${high.toFixed(1)} ${r},${high.toFixed(1)}`); down.push(`${r},${low.toFixed(1)} ${l},${low.toFixed(1)}`);
        base[i] += row[i];
      }
      add(inside, "polygon", { points: up.join(" ") + " " + down.reverse().join(" "), fill: `var(--p${part})`, "data-part": data.parts[part] });
    });
    phases(svg, s, width, TOP, bottom);
    add(svg, "line", { x1: s.left, x2: width - RIGHT, y1: y(data.limit), y2: y(data.limit), class: "limitline" });
    const over = w.peak > data.limit, label = `limit ${bytes(data.limit)}`;
    const px = s.x((w.seconds[w.peak_at] + w.seconds[w.peak_at + 1]) / 2), aside = px < (s.left + width - RIGHT) / 2; // the label keeps away from the peak's
    add(svg, "text", { x: aside ? width - RIGHT - 6 : s.left + 6, "text-anchor": aside ? "end" : "start", y: y(data.limit) + (over || y(data.limit) < TOP + 16 ? 15 : -6), class: "limit halo" }, label);
    if (px >= s.left && px <= width - RIGHT) {
      add(svg, "circle", { cx: px, cy: y(w.peak), r: 4, fill: "var(--ink)", stroke: "var(--card)", "stroke-width": 2 });
      const end = px > width * 0.6;
      add(svg, "text", { x: px + (end ? -9 : 9), y: y(w.peak) + (over ? -6 : 16), "text-anchor": end ? "end" : "start", class: "strong halo" }, `peak ${bytes(w.peak)}`);
    }
    timeAxis(svg, s, width, bottom);
    Object.assign(box, { geometry: { s, svg, bottom } });
    const spare = data.limit - w.peak;
    $("memory-summary").textContent = `${w.name}, micro-batch ${w.batch}: the peak is ${bytes(w.peak)} at ${w.places[w.peak_at]}, ${spare >= 0 ? `${bytes(spare)} below` : `${bytes(-spare)} above`} the limit of ${bytes(data.limit)}.${w.accumulation > 1 ? ` Shown is the last of ${w.accumulation} micro-batches, and the optimizer.` : ""}`;
    readMemory(false);
  }
  function readMemory(shown) {
    const box = $("memory-chart"), w = way(), i = state.at === null ? w.peak_at : sampleAt(state.at), parts = bytesAt(i), total = parts.reduce((a, b) => a + b, 0);
    legend("memory-legend", data.parts.map((name, p) => ({ name, color: `var(--p${p})`, value: bytes(parts[p]) })).filter((e, p) => w.bytes[p].some((v) => v)).reverse());
    const t = state.at === null ? (w.seconds[i] + w.seconds[i + 1]) / 2 : state.at, text = `${seconds(t)}: ${bytes(total)}, ${w.places[i]}`;
    box.setAttribute("aria-valuenow", Math.round((100 * t) / w.end));
    box.setAttribute("aria-valuetext", text);
    if (!shown) { tipOf(box).hidden = true; box.geometry.svg.querySelector(".cursor")?.remove(); return; }
    const { s, svg, bottom } = box.geometry;
    cursor(svg, s.x(t), TOP, bottom);
    const rows = parts.map((v, p) => [v, data.parts[p]]).filter((r) => r[0]).sort((a, b) => b[0] - a[0]).map((r) => `<tr><td>${r[1]}</td><td>${bytes(r[0])}</td></tr>`).join("");
    place(box, tipOf(box), s.x(t), `<b>${bytes(total)} of ${bytes(data.limit)}</b>${escaped(w.places[i])}, ${seconds(t)}<table>${rows}</table>`);
  }

  // ---- streams
  const COLORS = { compute: "var(--s-compute)", copy: "var(--s-copy)", optimizer: "var(--s-optimizer)", stall: "var(--stall)", all_gather: "var(--s-gather)", reduce_scatter: "var(--s-reduce)", all_reduce: "var(--s-all-reduce)" };
  const NAMES = { compute: "compute", copy: "copies", optimizer: "optimizer", stall: "stall: computation waits", all_gather: "all-gather", reduce_scatter: "reduce-scatter", all_reduce: "all-reduce" };
  const LANES = [["compute", 34], ["collectives", 90]], LANE = 40;
  function drawStreams() {
    const box = $("streams-chart"), height = 168, [svg, width] = canvas(box, height), s = scale(width), w = way();
    const inside = add(svg, "g", { "clip-path": clip(svg, "streams-clip", s, width, height) });
    LANES.forEach(([name, y]) => {
      add(inside, "rect", { x: s.left, y, width: width - s.left - RIGHT, height: LANE, fill: "var(--grid)", rx: 4 });
      add(svg, "text", { x: s.left - 7, y: y + LANE / 2 + 4, "text-anchor": "end" }, name);
    });
    for (const [stream, kind, , from, to] of w.spans) {
      if (to < s.a || from > s.b) continue;
      const x = s.x(from), wide = s.x(to) - x, y = LANES[stream][1];
      add(inside, "rect", { x: x.toFixed(2), y, width: Math.max(wide - (wide > 3 ? 0.6 : 0), kind === "stall" ? 1.2 : 0.4).toFixed(2), height: LANE, fill: COLORS[kind] || "var(--s-copy)", class: `span ${kind}` });
      if (kind === "stall") add(inside, "rect", { x: x.toFixed(2), y: y - 6, width: Math.max(wide, 2).toFixed(2), height: 4, fill: COLORS.stall });
    }
    for (const [, kind, name, from, to] of w.spans) {
      const wide = s.x(to) - s.x(from);
      if (wide > 58 && kind !== "stall" && to > s.a && from < s.b) add(inside, "text", { x: (Math.max(s.x(from), s.left) + Math.min(s.x(to), width - RIGHT)) / 2, y: LANES[kind.includes("_") ? 1 : 0][1] + LANE / 2 + 4, "text-anchor": "middle", style: "fill:#fff" }, w.names[name].length * 7 < wide ? w.names[name] : NAMES[kind]);
    }
    phases(svg, s, width, TOP - 2, 134);
    timeAxis(svg, s, width, 138);
    Object.assign(box, { geometry: { s, svg, bottom: 134 } });
    const stalls = w.spans.filter((e) => e[1] === "stall").reduce((a, e) => a + e[4] - e[3], 0);
    const sent = w.spans.filter((e) => e[0] === 1).reduce((a, e) => a + e[4] - e[3], 0);
    const sliced = w.sliced > 1e-3 * sent ? ` Of the communication, ${seconds(w.sliced)} are collectives of later slices, which run while their operator computes and are not drawn.` : "";
    $("streams-summary").textContent = `Communication takes ${seconds(sent + w.sliced)} of ${seconds(w.end)}; computation waits ${seconds(stalls)} for it (${((100 * stalls) / w.end).toFixed(1)} %).${sliced}${w.slowdown > 1.001 ? ` Compute and communication slow each other down here: durations are stretched by ${w.slowdown.toFixed(2)} to the stated step.` : ""}`;
    const kinds = [...new Set(w.spans.map((e) => e[1]))];
    legend("streams-legend", Object.keys(NAMES).filter((k) => kinds.includes(k)).map((k) => ({ name: NAMES[k], color: COLORS[k] })));
    readStreams(false);
  }
  function readStreams(shown) {
    const box = $("streams-chart"), w = way(), t = state.at === null ? 0 : state.at;
    const now = w.spans.filter((e) => e[3] <= t && t < e[4]);
    const words = now.map((e) => `${NAMES[e[1]] || e[1]} of ${w.names[e[2]]}, ${seconds(e[4] - e[3])}${e[5] ? `, ${bytes(e[5])}` : ""}`);
    box.setAttribute("aria-valuenow", Math.round((100 * t) / w.end));
    box.setAttribute("aria-valuetext", `${seconds(t)}: ${words.join("; ") || "nothing runs"}`);
    if (!shown) { tipOf(box).hidden = true; box.geometry.svg.querySelector(".cursor")?.remove(); return; }
    const { s, svg, bottom } = box.geometry;
    cursor(svg, s.x(t), TOP, bottom);
    place(box, tipOf(box), s.x(t), `<b>${seconds(t)}</b>${words.map(escaped).join("<br>") || "nothing runs"}`);
  }

  // ---- throughput
  function drawRates() {
    const box = $("rates-chart"), height = innerWidth < 600 ? 260 : 300, [svg, width] = canvas(box, height), left = LEFT(), bottom = height - 38;
    const all = data.rates.flatMap((r) => r.points), most = Math.max(...all.map((p) => p[0])), top = Math.max(data.bound, ...all.filter((p) => p[3]).map((p) => p[1])) * 1.18;
    const log = most > 12, fx = (b) => (log ? Math.log2(b) / Math.log2(most) : most > 1 ? (b - 1) / (most - 1) : 0.5), x = (b) => left + fx(b) * (width - left - RIGHT - 6), y = (v) => bottom - (v / top) * (bottom - 14);
    for (const v of ticks(top, 5)) { add(svg, "line", { x1: left, x2: width - RIGHT, y1: y(v), y2: y(v), class: "grid" }); add(svg, "text", { x: left - 7, y: y(v) + 4, "text-anchor": "end" }, three(v)); }
    add(svg, "text", { x: left + 6, y: 10 }, "samples/s");
    const marks = log ? Array.from({ length: Math.floor(Math.log2(most)) + 1 }, (_, i) => 2 ** i) : Array.from({ length: most }, (_, i) => i + 1);
    for (const b of marks) add(svg, "text", { x: x(b), y: bottom + 17, "text-anchor": "middle" }, b);
    add(svg, "text", { x: (left + width) / 2, y: height - 3, "text-anchor": "middle" }, "micro-batch of a device");
    if (data.bound) {
      const at = data.bound_batch, from = at ? Math.max(left, x(at) - 40) : left, to = at ? Math.min(width - RIGHT, x(at) + 40) : width - RIGHT;
      add(svg, "line", { x1: from, x2: to, y1: y(data.bound), y2: y(data.bound), class: "limitline" });
      add(svg, "text", { x: left + 6, y: y(data.bound) - 6, class: "limit halo" }, `no plan that fits ${at ? `at micro-batch ${at} ` : ""}exceeds ${three(data.bound)}`);
    }
    const c = add(add(svg, "defs", {}), "clipPath", { id: "rates-clip" }); add(c, "rect", { x: left, y: 0, width: width - left, height: bottom });
    const inside = add(svg, "g", { "clip-path": "url(#rates-clip)" });
    // One colour for a way, and one kind of line for each kind of recompute.
    const family = (name) => name.split(" with ")[0], families = [...new Set(data.rates.slice(1).map((r) => family(r.name)))];
    const color = (i) => `var(--w${i ? 1 + families.indexOf(family(data.rates[i].name)) : 0})`;
    const kind = (name) => (name.endsWith(" with full recompute") ? "dash" : name.endsWith("recompute") ? "dots" : "line");
    [...data.rates.keys()].reverse().forEach((i) => {
      const r = data.rates[i], fits = r.points.filter((p) => p[3]), not = [...fits.slice(-1), ...r.points.filter((p) => !p[3])], line = (ps) => ps.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ");
      const style = { fill: "none", stroke: color(i), "stroke-width": i ? 2 : 3.5, "stroke-linejoin": "round" }, dash = { dash: { "stroke-dasharray": "9 4" }, dots: { "stroke-dasharray": "3 3" } }[kind(r.name)] || {};
      add(inside, "polyline", { points: line(not), ...style, "stroke-width": 1.5, "stroke-dasharray": "1.5 5", opacity: 0.8 });
      add(inside, "polyline", { points: line(fits), ...style, ...dash });
      const edge = r.points.find((p) => p[0] === r.largest);
      if (edge) add(svg, "circle", { cx: x(edge[0]), cy: y(edge[1]), r: i ? 5 : 7, fill: "var(--card)", stroke: color(i), "stroke-width": 3 });
    });
    legend("rates-legend", data.rates.map((r, i) => ({ name: r.name, color: color(i), shape: kind(r.name), value: r.largest ? `fits up to ${r.largest}` : "does not fit" })));
    const sizes = [...new Set(all.map((p) => p[0]))].sort((a, b) => a - b);
    Object.assign(box, { geometry: { svg, x, bottom, sizes } });
    if (state.batch === null) state.batch = way().batch;
    readRates(false);
  }
  function readRates(shown) {
    const box = $("rates-chart"), { svg, x, bottom, sizes } = box.geometry, b = sizes.reduce((a, c) => (Math.abs(c - state.batch) < Math.abs(a - state.batch) ? c : a));
    const near = (r) => r.points.reduce((a, p) => (Math.abs(p[0] - b) < Math.abs(a[0] - b) ? p : a));
    const rows = data.rates.map((r) => [r.name, near(r)]).sort((a, c) => c[1][1] - a[1][1]);
    box.setAttribute("aria-valuenow", Math.round((100 * sizes.indexOf(b)) / Math.max(1, sizes.length - 1)));
    box.setAttribute("aria-valuetext", `micro-batch ${b}: ` + rows.map(([n, p]) => `${n} ${three(p[1])} samples/s${p[3] ? "" : ", does not fit"}`).join("; "));
    if (!shown) { tipOf(box).hidden = true; svg.querySelector(".cursor")?.remove(); return; }
    cursor(svg, x(b), 10, bottom);
    place(box, tipOf(box), x(b), `<b>micro-batch ${b}</b><table>${rows.map(([n, p]) => `<tr><td>${escaped(n)}${p[0] === b ? "" : ` at ${p[0]}`}</td><td>${three(p[1])}/s</td><td>${bytes(p[2])}${p[3] ? "" : " ✗"}</td></tr>`).join("")}</table>`);
  }

  // ---- the model
  function drawStrip() {
    const strip = $("strip");
    strip.innerHTML = "";
    strip.style.setProperty("--columns", data.stages.length);
    data.stages.forEach((stage, i) => {
      const cell = document.createElement("button"), total = stage.units.reduce((a, u) => a + u.parameters, 0);
      cell.type = "button"; cell.tabIndex = i ? -1 : 0; cell.className = stage.is_block ? "block" : "outside";
      cell.setAttribute("aria-label", `${stage.name}: ${[...new Set(stage.units.map((u) => u.mode))].join(", ") || "no parameters"}${stage.recompute ? `, ${stage.recompute} recompute` : ""}`);
      const svg = add(cell, "svg", { viewBox: "0 0 20 64", preserveAspectRatio: "none", "aria-hidden": "true" });
      add(svg, "rect", { width: 20, height: 64, fill: "var(--grid)" });
      let y = 0;
      const room = stage.recompute ? 50 : 64, floor = 2.5, spare = room - floor * stage.units.length;
      stage.units.forEach((u) => {
        const h = floor + (total ? (spare * u.parameters) / total : 0);
        add(svg, "rect", { y, width: 20, height: Math.max(0.5, h - (stage.units.length > 1 ? 0.7 : 0)), fill: `var(--m-${u.mode})` });
        if (u.splits > u.sharded && u.mode !== "replicate") add(svg, "rect", { y: y + (h * u.sharded) / u.splits, width: 20, height: (h * (u.splits - u.sharded)) / u.splits - 0.7, fill: "var(--m-replicate)" });
        for (let k = 1; k < u.splits; k++) add(svg, "line", { x1: 0, x2: 20, y1: y + (h * k) / u.splits, y2: y + (h * k) / u.splits, stroke: "var(--card)", "stroke-width": 0.8 });
        y += h;
      });
      if (stage.recompute) { add(svg, "rect", { y: 50, width: 20, height: 14, fill: "var(--card)" }); add(svg, "text", { x: 10, y: 61.5, "text-anchor": "middle", style: "font-size:13px;fill:var(--ink)" }, { full: "↻", selective: "½", host: "↑" }[stage.recompute]); }
      cell.addEventListener("pointerenter", () => detail(i));
      cell.addEventListener("focus", () => detail(i));
      strip.appendChild(cell);
    });
    const used = new Set(data.stages.flatMap((e) => e.units.flatMap((u) => (u.splits > u.sharded && u.mode !== "replicate" ? [u.mode, "replicate"] : [u.mode]))));
    legend("strip-legend", data.modes.filter(([m]) => used.has(m)).map(([m, text]) => ({ name: `${m}: ${text}`, color: `var(--m-${m})` })));
    detail(0);
  }
  function detail(i) {
    const stage = data.stages[i], cells = [...$("strip").children];
    cells.forEach((cell, k) => { cell.tabIndex = k === i ? 0 : -1; cell.setAttribute("aria-current", String(k === i)); });
    const rows = stage.units.map((u) => `<tr><th scope="row">${escaped(u.name)}</th><td>${u.mode}${u.two_levels ? ", two levels" : ""}${u.reduce_once ? ", reduced once" : ""}${u.all_reduce_once ? ", all-reduced once" : ""}${u.gather_once ? ", gathered once" : ""}${u.prefetch > 1 ? ", prefetch of two" : ""}${u.reduced_with ? `, reduced with ${escaped(u.reduced_with)}` : ""}${u.offload ? ", on the host" : ""}</td><td class="num">${u.splits > 1 ? `${u.splits}${u.splits > u.sharded ? ` (${u.splits - u.sharded} replicated)` : ""}` : "–"}</td><td class="num">${count(u.parameters)}</td><td class="num">${bytes(u.held)}</td><td class="num">${bytes(u.own_peak)}</td><td class="num">${spent(u.compute)}</td><td class="num">${spent(u.gather)}</td><td class="num">${spent(u.reduce)}</td><td class="num">${spent(u.stall)}</td></tr>`).join("");
    $("detail").innerHTML = `<h3>${escaped(stage.name)}</h3>${{ full: "Its activations are recomputed", selective: "Its activations are recomputed but what products and attention put out", host: "Its activations are recomputed, and its input is on the host until then" }[stage.recompute] || "Its activations are saved"}: ${bytes(Math.max(0, stage.saved))} stay after forward. Kernels take ${seconds(stage.forward)} in forward and ${seconds(stage.backward)} in backward.` + (rows ? `<div class="scroll"><table><thead><tr><th scope="col">unit</th><th scope="col">mode</th><th scope="col" class="num">slices</th><th scope="col" class="num">parameters</th><th scope="col" class="num">held always</th><th scope="col" class="num">at most</th><th scope="col" class="num">kernels</th><th scope="col" class="num">gather</th><th scope="col" class="num">reduce</th><th scope="col" class="num">waited for</th></tr></thead><tbody>${rows}</tbody></table></div>` : "");
  }

  // ---- what people do
  const drawStep = () => { drawMemory(); drawStreams(); };
  const drawAll = () => { drawStep(); drawRates(); };
  $("ways").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    state.way = Number(button.dataset.way); state.at = null;
    for (const each of $("ways").children) each.setAttribute("aria-pressed", String(each === button));
    drawStep();
  });
  const zoom = (how) => {
    const wide = state.to - state.from, middle = state.at === null ? (state.from + state.to) / 2 : state.at / way().end;
    const next = how === "all" ? 1 : Math.min(1, Math.max(1 / 256, how === "in" ? wide / 2 : wide * 2));
    state.from = Math.max(0, Math.min(1 - next, middle - next / 2)); state.to = state.from + next;
    drawStep();
  };
  document.querySelector(".zoom").addEventListener("click", (event) => { const button = event.target.closest("button"); if (button) zoom(button.dataset.zoom); });
  const moved = (t, read) => {
    const w = way(); state.at = Math.max(0, Math.min(w.end, t));
    const wide = state.to - state.from, part = state.at / w.end;
    if (part < state.from || part > state.to) { state.from = Math.max(0, Math.min(1 - wide, part - wide / 2)); state.to = state.from + wide; drawStep(); }
    read(true);
  };
  const pointed = (box, event) => event.clientX - box.getBoundingClientRect().left;
  for (const [id, read] of [["memory-chart", readMemory], ["streams-chart", readStreams]]) {
    const box = $(id);
    box.addEventListener("pointermove", (event) => { const { s } = box.geometry; moved(Math.max(s.a, Math.min(s.b, s.t(pointed(box, event)))), read); });
    box.addEventListener("pointerleave", () => { state.at = null; read(false); });
    box.addEventListener("blur", () => { state.at = null; read(false); });
    box.addEventListener("keydown", (event) => {
      const w = way(), wide = (state.to - state.from) * w.end, at = state.at === null ? w.seconds[w.peak_at] : state.at;
      const to = { ArrowRight: at + wide / 100, ArrowLeft: at - wide / 100, PageUp: at + wide / 10, PageDown: at - wide / 10, Home: 0, End: w.end }[event.key];
      if (to !== undefined) { moved(to, read); event.preventDefault(); }
      if (event.key === "+" || event.key === "=") { zoom("in"); read(true); }
      if (event.key === "-") { zoom("out"); read(true); }
      if (event.key === "Escape") { state.at = null; read(false); }
    });
  }
  const rates = $("rates-chart");
  rates.addEventListener("pointermove", (event) => { const g = rates.geometry, px = pointed(rates, event); state.batch = g.sizes.reduce((a, c) => (Math.abs(g.x(c) - px) < Math.abs(g.x(a) - px) ? c : a)); readRates(true); });
  rates.addEventListener("pointerleave", () => readRates(false));
  rates.addEventListener("blur", () => readRates(false));
  rates.addEventListener("keydown", (event) => {
    const { sizes } = rates.geometry, at = sizes.indexOf(sizes.reduce((a, c) => (Math.abs(c - state.batch) < Math.abs(a - state.batch) ? c : a)));
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: sizes.length - 1 }[event.key];
    if (to !== undefined) { state.batch = sizes[Math.max(0, Math.min(sizes.length - 1, to))]; readRates(true); event.preventDefault(); }
    if (event.key === "Escape") readRates(false);
  });
  $("strip").addEventListener("keydown", (event) => {
    const cells = [...$("strip").children], at = cells.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: cells.length - 1 }[event.key];
    if (to !== undefined && cells[to]) { cells[to].focus(); event.preventDefault(); }
  });
  let waiting = 0, lastWidth = 0;
  new ResizeObserver(() => { const w = document.body.clientWidth; if (w === lastWidth) return; lastWidth = w; cancelAnimationFrame(waiting); waiting = requestAnimationFrame(drawAll); }).observe(document.body);
  drawStrip();
  drawAll();
  document.documentElement.dataset.ready = "true";
})();
