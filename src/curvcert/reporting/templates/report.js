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
  let chosen = null;

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
    if (row === chosen) line.classList.add("is-chosen");
    const first = cell("", "number");
    const open = document.createElement("button");
    open.type = "button";
    open.className = "open";
    open.textContent = String(row);
    open.setAttribute("aria-label", `Show sample ${row}`);
    first.append(open);
    line.addEventListener("click", () => { choose(row); byId("sample").focus(); });
    line.append(first, cell(name(data.label[row]), "name"), cell(name(data.predicted[row]), "name predicted"));
    data.columns.forEach((key) => line.append(cell(number(data.numbers[key][row], data.decimals), key === "radius" ? "number strong" : "number")));
    line.append(cell(value("method", row), "name"));
    return line;
  };
  const paper = window.matchMedia("print");
  const MOST_PRINTED = 1000;
  const showPage = () => {
    const size = paper.matches ? MOST_PRINTED : Number(controls.size.value);
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
    const whole = part.length === shown.length;
    byId("range").textContent = whole ? "" : `, ${page ? `rows ${page * size + 1} to ${page * size + part.length}` : `the first ${part.length}`} of these`;
    byId("page").textContent = `Page ${page + 1} of ${last + 1}`;
    byId("matches").textContent = `${shown.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} samples`;
    byId("first").disabled = byId("previous").disabled = page === 0;
    byId("last").disabled = byId("next").disabled = page === last;
  };
  const select = () => {
    controls.epsilon.disabled = !["certified", "broken", "undecided"].includes(controls.status.value);
    shown = filtered().sort(compare);
    page = 0;
    showPage();
  };

  // ---- the address holds the filters, so that it can be handed on ----
  const PLAIN = { text: "", label: "", status: "", epsilon: "0", size: "25" };
  const writeAddress = () => {
    const held = new URLSearchParams();
    Object.entries(controls).forEach(([key, control]) => { if (control.value !== PLAIN[key]) held.set(key, control.value); });
    if (order.key !== "index" || !order.ascending) held.set("sort", `${order.ascending ? "" : "-"}${order.key}`);
    if (page) held.set("page", String(page + 1));
    if (chosen !== null) held.set("sample", String(chosen));
    if (String(held)) history.replaceState(null, "", `#samples?${held}`);
    else if (location.hash.startsWith("#samples?")) history.replaceState(null, "", "#samples");
  };
  const readAddress = () => {
    if (!location.hash.startsWith("#samples?")) return;
    const held = new URLSearchParams(location.hash.slice(9));
    Object.entries(controls).forEach(([key, control]) => {
      const wanted = held.get(key) ?? PLAIN[key];
      control.value = key === "text" || [...control.options].some((option) => option.value === wanted) ? wanted : PLAIN[key];
    });
    const sort = held.get("sort") || "index";
    const key = sort.replace(/^-/, "");
    const known = headings.some((heading) => heading.dataset.key === key);
    order = known ? { key, ascending: !sort.startsWith("-") } : { key: "index", ascending: true };
    showOrder();
    const wanted = Number(held.get("page") || 1) - 1;
    const sample = held.get("sample");
    select();
    page = Number.isInteger(wanted) ? wanted : 0;
    showPage();
    choose(/^\d+$/.test(sample ?? "") && rows.includes(Number(sample)) ? Number(sample) : null);
    byId("samples").scrollIntoView();
  };

  // ---- one sample: its picture, its radii by every method, the nearest attack ----
  const pictures = (row) => {
    const held = data.exhibits[row];
    if (!held) return [];
    const shownPictures = [["input", held.picture, name(data.label[row])]];
    if (held.broken) {
      shownPictures.push([held.source === "witness" ? "witness" : "by search", held.broken, name(held.class)]);
      shownPictures.push(["step", held.step, `× ${held.times}`]);
    }
    return shownPictures.map(([title, source, text]) => {
      const figure = document.createElement("figure");
      const image = document.createElement("img");
      const caption = document.createElement("figcaption");
      const strong = document.createElement("b");
      image.src = source;
      image.alt = `${title}, ${text}`;
      strong.textContent = text;
      caption.append(title, document.createElement("br"), strong);
      figure.append(image, caption);
      return figure;
    });
  };
  const choose = (row) => {
    chosen = row;
    byId("sample").hidden = row === null;
    if (row !== null) {
      const held = data.exhibits[row];
      const facts = [["Class", name(data.label[row])], ["Predicted", name(data.predicted[row])], ["Certified", `${number(data.numbers.radius[row], data.decimals)}, by ${value("method", row)}`]];
      Object.entries(data.radii).forEach(([method, radii]) => facts.push([`by ${method}`, radii[row] === null ? "not for every class" : number(radii[row], data.decimals)]));
      if (data.correct[row]) facts.push(["Limited by", data.runner_up[row] === null ? "no class" : name(data.runner_up[row])]);
      ["attack_radius", "search_radius"].filter((key) => data.columns.includes(key)).forEach((key) => facts.push([key === "attack_radius" ? "Nearest witness" : "Nearest found by search", number(data.numbers[key][row], data.decimals)]));
      if (held && held.distance !== null) facts.push(["Picture shows a point at", number(held.distance, data.decimals)]);
      byId("sample-title").textContent = `Sample ${row}`;
      byId("sample-pictures").replaceChildren(...pictures(row));
      byId("sample-facts").replaceChildren(...facts.map(([term, text]) => {
        const line = document.createElement("div");
        const left = document.createElement("dt");
        const right = document.createElement("dd");
        left.textContent = term;
        right.textContent = text;
        line.append(left, right);
        return line;
      }));
    }
    showPage();
    writeAddress();
  };
  const refresh = () => { select(); writeAddress(); };
  byId("sample-close").addEventListener("click", () => choose(null));

  // ---- what the filters leave, as a file ----
  const record = (row) => Object.fromEntries([["sample", row], ["class", name(data.label[row])], ["predicted", name(data.predicted[row])], ["correct", data.correct[row] === 1],
    ...data.columns.map((key) => [key, data.numbers[key][row]]), ...Object.entries(data.radii).map(([method, radii]) => [`radius by ${method}`, radii[row]]), ["method", value("method", row)]]);
  // A spreadsheet is not to take a name for a formula.
  const quoted = (entry) => {
    const text = entry === null ? "" : String(entry);
    const safe = typeof entry === "string" && /^\s*[=+\-@\uff1d\uff0b\uff0d\uff20]/.test(text) && Number.isNaN(Number(text)) && text !== "-inf" ? `'${text}` : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  const save = (file, type, text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = file;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  byId("save-csv").addEventListener("click", () => {
    const records = shown.map(record);
    const lines = [Object.keys(record(0)), ...records.map(Object.values)];
    save("samples.csv", "text/csv", lines.map((line) => line.map(quoted).join(",")).join("\n") + "\n");
  });
  byId("save-json").addEventListener("click", () => save("samples.json", "application/json", JSON.stringify(shown.map(record), null, 1)));

  const headings = all("#sample-table th[data-key]");
  const showOrder = () => headings.forEach((heading) => heading.setAttribute("aria-sort", heading.dataset.key !== order.key ? "none" : order.ascending ? "ascending" : "descending"));
  headings.forEach((heading) => heading.querySelector("button").addEventListener("click", () => {
    const key = heading.dataset.key;
    order = { key, ascending: order.key === key ? !order.ascending : true };
    showOrder();
    refresh();
  }));
  Object.values(controls).forEach((control) => control.addEventListener("input", refresh));
  const form = document.querySelector(".filters");
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(refresh));
  [["first", () => 0], ["previous", () => page - 1], ["next", () => page + 1], ["last", () => Infinity]].forEach(([id, target]) => byId(id).addEventListener("click", () => {
    page = target();
    showPage();
    writeAddress();
  }));
  paper.addEventListener("change", showPage);
  window.addEventListener("hashchange", readAddress);
  select();
  readAddress();
})();
