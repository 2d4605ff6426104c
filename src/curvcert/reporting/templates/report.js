"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const all = (selector) => [...document.querySelectorAll(selector)];
  root.classList.add("scripted");

  // ---- theme: the reader's system by default, the button overrides it ----
  const systemDark = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (systemDark.matches ? "dark" : "light")) === "dark";
  const showTheme = () => {
    const other = isDark() ? "Light" : "Dark";
    byId("theme").querySelector(".label").textContent = other;
    byId("theme").setAttribute("aria-label", `Use the ${other.toLowerCase()} theme`);
  };
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  systemDark.addEventListener("change", showTheme);
  showTheme();

  // ---- numbers: shares are rounded to the safe side in whole numbers ----
  const share = (count, side) => {
    const tenths = side === "at least" ? Math.floor((1000 * count) / data.total) : Math.ceil((1000 * count) / data.total);
    return `${Math.floor(tenths / 10)}.${tenths % 10}%`;
  };
  const compact = (value) => String(Number(value.toPrecision(6)));
  const number = (value, decimals) => {
    if (value === null || value === undefined) return "n/a";
    if (value === "inf") return "∞";
    if (value === "-inf") return "-∞";
    return value.toFixed(decimals);
  };

  // ---- accuracy: legend, range, and reading off a value ----
  let range = 0;
  let reading = 0;
  const hidden = new Set();
  const slider = byId("epsilon");
  const titles = Object.fromEntries(all(".legend [data-series]").map((b) => [b.dataset.series, b.textContent.trim()]));

  const showReading = () => {
    const { epsilons, counts } = data.ranges[range];
    slider.value = String(reading);
    byId("epsilon-value").textContent = compact(epsilons[reading]);
    slider.setAttribute("aria-valuetext", `ε = ${compact(epsilons[reading])}`);
    const place = (1000 * epsilons[reading]) / (epsilons[epsilons.length - 1] || 1);
    all(".guide").forEach((guide) => guide.setAttribute("d", `M${place},0V1000`));
    const rows = Object.keys(counts).filter((name) => !hidden.has(name)).map((name) => {
      const side = data.sides[name];
      const row = document.createElement("div");
      const term = document.createElement("dt");
      const value = document.createElement("dd");
      term.textContent = titles[name];
      value.textContent = `${side === "at least" ? "≥" : "≤"} ${share(counts[name][reading], side)}`;
      row.dataset.series = name;
      row.append(term, value);
      return row;
    });
    byId("readout").replaceChildren(...rows);
  };
  all(".legend [data-series]").forEach((button) => button.addEventListener("click", () => {
    const name = button.dataset.series;
    const off = !hidden.has(name);
    if (off) hidden.add(name); else hidden.delete(name);
    button.setAttribute("aria-pressed", String(!off));
    all(`.plot path[data-series="${name}"]`).forEach((path) => path.classList.toggle("off", off));
    showReading();
  }));
  all("[data-range]").forEach((button) => button.addEventListener("click", () => {
    range = Number(button.dataset.range);
    all("[data-range]").forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
    all("[data-chart]").forEach((chart) => { chart.hidden = Number(chart.dataset.chart) !== range; });
    showReading();
  }));
  slider.addEventListener("input", () => { reading = Number(slider.value); showReading(); });
  all("[data-chart] svg").forEach((chart) => chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const steps = data.ranges[range].epsilons.length - 1;
    const place = Math.round((steps * (event.clientX - box.left)) / box.width);
    reading = Math.min(steps, Math.max(0, place));
    showReading();
  }));
  reading = Math.round((data.ranges[0].epsilons.length - 1) / 2);
  showReading();

  // ---- histograms: the bar under the pointer ----
  all(".column").forEach((bar) => {
    const line = bar.closest("figure").querySelector(".hover");
    bar.addEventListener("pointerenter", () => { line.textContent = bar.dataset.text; });
    bar.addEventListener("pointerleave", () => { line.textContent = line.dataset.rest; });
  });

  // ---- samples: filter, sort, page ----
  const controls = { text: byId("filter-text"), label: byId("filter-class"), status: byId("filter-status"), epsilon: byId("filter-epsilon"), size: byId("page-size") };
  [...new Set(data.label)].sort((a, b) => a - b).forEach((label) => controls.label.append(new Option(data.classes[label], String(label))));
  const rows = data.label.map((_, index) => index);
  const name = (label) => (label === null ? "unknown" : data.classes[label]);
  const value = (key, row) => {
    if (key === "index") return row;
    if (key === "method") return data.methods[data.method[row]];
    if (key === "label") return data.label[row];
    if (key === "predicted") return data.predicted[row];
    const entry = data.numbers[key][row];
    return entry === "inf" ? Infinity : entry === "-inf" ? -Infinity : entry;
  };
  // Whether a sample is certified or broken at one of the chosen ε is told by the exact radii, not the rounded ones.
  const tests = {
    "": () => true,
    correct: (row) => data.correct[row] === 1,
    misclassified: (row) => data.correct[row] === 0,
    certified: (row, eps) => data.certified_to[row] > eps,
    broken: (row, eps) => data.broken_from[row] <= eps,
    undecided: (row, eps) => !tests.certified(row, eps) && !tests.broken(row, eps),
  };
  let order = { key: "index", ascending: true };
  let page = 0;
  let shown = rows;

  const compare = (a, b) => {
    const left = value(order.key, a);
    const right = value(order.key, b);
    if (left === right) return a - b;
    if (left === null) return 1;
    if (right === null) return -1;
    return (left < right ? -1 : 1) * (order.ascending ? 1 : -1);
  };
  const filtered = () => {
    const text = controls.text.value.trim().toLowerCase();
    const eps = Number(controls.epsilon.value);
    const passes = tests[controls.status.value];
    return rows.filter((row) => {
      if (controls.label.value !== "" && data.label[row] !== Number(controls.label.value)) return false;
      if (!passes(row, eps)) return false;
      if (!text) return true;
      return String(row) === text || [name(data.label[row]), name(data.predicted[row]), value("method", row)].some((part) => part.toLowerCase().includes(text));
    });
  };
  const cell = (text, kind) => {
    const element = document.createElement("td");
    element.textContent = text;
    element.className = kind;
    if (kind.startsWith("name")) element.title = text;
    return element;
  };
  const tableRow = (row) => {
    const line = document.createElement("tr");
    if (!data.correct[row]) line.className = "wrong";
    line.append(cell(String(row), "number"), cell(name(data.label[row]), "name"), cell(name(data.predicted[row]), "name predicted"));
    data.columns.forEach((key) => line.append(cell(number(data.numbers[key][row], data.decimals), key === "radius" ? "number strong" : "number")));
    line.append(cell(value("method", row), "name"));
    return line;
  };
  const showPage = () => {
    const size = Number(controls.size.value);
    const last = Math.max(0, Math.ceil(shown.length / size) - 1);
    page = Math.min(last, Math.max(0, page));
    const part = shown.slice(page * size, (page + 1) * size);
    const body = byId("sample-table").tBodies[0];
    if (part.length) {
      body.replaceChildren(...part.map(tableRow));
    } else {
      const none = cell("No sample matches. Clear the filters to see all.", "");
      none.colSpan = data.columns.length + 4;
      const line = document.createElement("tr");
      line.append(none);
      body.replaceChildren(line);
    }
    byId("page").textContent = `Page ${page + 1} of ${last + 1}`;
    byId("matches").textContent = `${shown.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} samples`;
    byId("first").disabled = byId("previous").disabled = page === 0;
    byId("last").disabled = byId("next").disabled = page === last;
  };
  const refresh = () => {
    controls.epsilon.disabled = !["certified", "broken", "undecided"].includes(controls.status.value);
    shown = filtered().sort(compare);
    page = 0;
    showPage();
  };
  all("#sample-table th[data-key]").forEach((heading) => heading.querySelector("button").addEventListener("click", () => {
    const key = heading.dataset.key;
    order = { key, ascending: order.key === key ? !order.ascending : true };
    all("#sample-table th[data-key]").forEach((other) => other.setAttribute("aria-sort", other !== heading ? "none" : order.ascending ? "ascending" : "descending"));
    refresh();
  }));
  Object.values(controls).forEach((control) => control.addEventListener("input", refresh));
  const form = document.querySelector(".filters");
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(refresh));
  [["first", () => 0], ["previous", () => page - 1], ["next", () => page + 1], ["last", () => Infinity]].forEach(([id, target]) => byId(id).addEventListener("click", () => {
    page = target();
    showPage();
  }));
  refresh();
})();
