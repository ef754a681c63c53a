"use strict";

const report = JSON.parse(document.getElementById("data").textContent);
const outcomes = report.outcomes;
const lanes = Object.keys(report.slo_s);
const loads = [...new Set(outcomes.map((one) => one.load))];
const policies = [...new Set(outcomes.map((one) => one.policy))];
const chosen = {
  load: loads.includes(2) ? 2 : loads[loads.length - 1],
  policy: policies.includes("tidegate") ? "tidegate" : policies[policies.length - 1],
};
const NAMES = { none: "no gateway", fifo: "one queue", priority: "strict priority", tidegate: "tidegate" };
const SYMBOLS = { none: "circle", fifo: "square", priority: "diamond", tidegate: "triangle-up" };

const at = (load, policy) => outcomes.find((one) => one.load === load && one.policy === policy);
const named = (policy) => NAMES[policy] || policy;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const laneColor = (index) => css(`--lane${Math.min(index, 3)}`);
const percent = (share, digits = 1) => (share == null ? "-" : `${(100 * share).toFixed(digits)} %`);
const whole = (number) => Math.round(number).toLocaleString("en");
const short = (number) =>
  number >= 1e6 ? `${(number / 1e6).toFixed(1)} M` : number >= 1e4 ? `${(number / 1e3).toFixed(0)} k` : whole(number);
const seconds = (number) => (number == null ? "-" : number >= 10 ? number.toFixed(0) : number.toFixed(2));
const sum = (counts) => Object.values(counts).reduce((all, one) => all + one, 0);

function draw(id, traces, more = {}, height = 280) {
  const place = typeof id === "string" ? document.getElementById(id) : id;
  const axis = { gridcolor: css("--grid"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true };
  const { xaxis = {}, yaxis = {}, ...rest } = more;
  for (const one of [xaxis, yaxis]) if (one.title) one.title = { ...one.title, font: { size: 13, color: css("--soft") } };
  const layout = {
    height,
    margin: { l: 52, r: 12, t: 8, b: 40 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 13, color: css("--ink") },
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") } },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal" },
    ...rest,
    xaxis: { ...axis, ...xaxis },
    yaxis: { ...axis, ...yaxis },
  };
  Plotly.react(place, traces, layout, { displayModeBar: false, responsive: true });
}

function line(policy, values, extra = {}) {
  return {
    x: loads, y: values, name: named(policy), mode: "lines+markers",
    line: { color: css(`--${policy}`), width: policy === "tidegate" ? 3 : 2 },
    marker: { size: policy === "tidegate" ? 11 : 8, symbol: SYMBOLS[policy] || "circle" }, ...extra,
  };
}

function asLoadGrows() {
  const section = document.getElementById("loads");
  section.hidden = loads.length < 2;
  if (section.hidden) return;
  const xaxis = { title: { text: "load", standoff: 6 }, tickvals: loads, rangemode: "tozero" };
  const row = document.getElementById("load-lanes");
  if (!row.children.length) {
    lanes.forEach((lane, index) => {
      const figure = row.appendChild(document.createElement("figure"));
      figure.appendChild(document.createElement("h3")).textContent = `${lane}: first token within ${report.slo_s[lane]} s`;
      figure.appendChild(document.createElement("div")).id = `load-lane-${index}`;
    });
  }
  lanes.forEach((lane, index) => {
    const traces = policies.map((policy) =>
      line(policy, loads.map((load) => at(load, policy).lanes[lane].attainment), {
        hovertemplate: "%{y:.1%}<extra>%{fullData.name}</extra>",
      }));
    draw(`load-lane-${index}`, traces, {
      xaxis, showlegend: false, yaxis: { tickformat: ".0%", range: [-0.03, 1.05], dtick: 0.25 },
    }, 260);
  });
  const perMinute = (one) => 60 * one.all.in_slo / one.span_s;
  const offered = loads.map((load) => {
    const one = at(load, policies[0]);
    return 60 * one.all.offered / one.span_s;
  });
  draw("goodput", [
    ...policies.map((policy) => line(policy, loads.map((load) => perMinute(at(load, policy))), {
      hovertemplate: "%{y:,.0f}/min<extra>%{fullData.name}</extra>",
    })),
    { x: loads, y: offered, name: "offered", mode: "lines", line: { color: css("--soft"), dash: "dot", width: 1.5 },
      hovertemplate: "%{y:,.0f}/min<extra>offered</extra>" },
  ], { xaxis, showlegend: false, yaxis: { title: { text: "answers per minute" }, rangemode: "tozero",
       range: [0, 1.35 * Math.max(1, ...outcomes.map(perMinute))] } });
  draw("wasted", policies.map((policy) => line(policy, loads.map((load) => at(load, policy).wasted), {
    hovertemplate: "%{y:,.0f} tokens<extra>%{fullData.name}</extra>",
  })), { xaxis, showlegend: false, yaxis: { title: { text: "tokens" }, rangemode: "tozero", tickformat: "~s" } });
}

function cards() {
  const mine = at(chosen.load, "tidegate") || at(chosen.load, policies[policies.length - 1]);
  const alone = at(chosen.load, "none");
  const best = lanes[0];
  const found = [
    [`${best} within its SLO`, percent(mine.lanes[best].attainment), alone && `no gateway: ${percent(alone.lanes[best].attainment)}`],
    ["Goodput per minute", whole(60 * mine.goodput), alone && (alone.goodput
      ? `${(mine.goodput / alone.goodput).toFixed(2)}x no gateway's ${whole(60 * alone.goodput)}` : "no gateway: 0")],
    ["Tokens above a limit", short(mine.over), alone && `no gateway: ${short(alone.over)}`],
    ["Tokens spent for nobody", short(mine.wasted), alone && `no gateway: ${short(alone.wasted)}`],
    ["Promises kept", percent(mine.promises.share), `${whole(mine.promises.told)} retries when told`],
  ];
  if (outcomes.some((one) => one.preempted)) {
    found.push(["Preempted by the engine", whole(mine.preempted), alone && `no gateway: ${whole(alone.preempted)}`]);
  }
  const row = document.getElementById("cards");
  row.replaceChildren(...found.map(([what, figure, beside]) => {
    const card = document.createElement("div");
    card.className = "card";
    card.appendChild(document.createElement("span")).textContent = what;
    card.appendChild(document.createElement("b")).textContent = figure;
    card.appendChild(document.createElement("span")).textContent = beside || "";
    return card;
  }));
}

function bars(value, text, hover) {
  return policies.map((policy) => ({
    type: "bar", name: named(policy), x: lanes, y: lanes.map((lane) => value(at(chosen.load, policy).lanes[lane])),
    text: lanes.map((lane) => text(value(at(chosen.load, policy).lanes[lane]))), textposition: "outside", cliponaxis: false,
    textangle: 0, textfont: { size: 12 }, marker: { color: css(`--${policy}`) }, hovertemplate: hover,
  }));
}

function atOneLoad() {
  cards();
  draw("attainment", bars((lane) => lane.attainment, (share) => `${(100 * share).toFixed(0)}`,
    "%{y:.1%}<extra>%{fullData.name}, %{x}</extra>"),
    { barmode: "group", bargap: 0.25, yaxis: { tickformat: ".0%", range: [0, 1.1], dtick: 0.25 } }, 300);
  const slo = lanes.map((lane, index) => ({
    type: "line", xref: "x", yref: "y", x0: index - 0.45, x1: index + 0.45, y0: report.slo_s[lane], y1: report.slo_s[lane],
    line: { color: css("--bad"), width: 2, dash: "dash" },
  }));
  draw("p99", bars((lane) => lane.first_token_s.p99, seconds, "%{y:.2f} s<extra>%{fullData.name}, %{x}</extra>"), {
    barmode: "group", bargap: 0.25, shapes: slo,
    yaxis: { type: "log", title: { text: "seconds" }, dtick: 1, tickformat: "~g", range: logRange() },
  }, 300);
  fates();
  reasons();
  promises();
}

function logRange() {
  const all = policies.flatMap((policy) => lanes.map((lane) => at(chosen.load, policy).lanes[lane].first_token_s.p99));
  const known = [...all.filter((one) => one != null && one > 0), ...Object.values(report.slo_s)];
  return [Math.floor(Math.log10(Math.min(...known)) - 0.01), Math.log10(Math.max(...known)) + 0.25];
}

function fates() {
  const rows = lanes.flatMap((lane) => policies.map((policy) => [lane, policy]));
  const kinds = [
    ["within the SLO", "--good", (lane) => lane.in_slo],
    ["served too late", "--late", (lane) => lane.served - lane.in_slo],
    ["shed", "--shed", (lane) => sum(lane.shed)],
    ["waited its longest", "--expired", (lane) => sum(lane.expired)],
    ["failed", "--failed", (lane) => sum(lane.failed)],
    ["client gave up", "--gone", (lane) => lane.gone],
  ];
  const traces = kinds.map(([name, color, count]) => ({
    type: "bar", orientation: "h", name,
    y: [rows.map(([lane]) => lane), rows.map(([, policy]) => named(policy))],
    x: rows.map(([lane, policy]) => {
      const one = at(chosen.load, policy).lanes[lane];
      return one.offered ? count(one) / one.offered : 0;
    }),
    customdata: rows.map(([lane, policy]) => count(at(chosen.load, policy).lanes[lane])),
    marker: { color: css(color) }, hovertemplate: "%{customdata:,} (%{x:.1%})<extra>" + name + "</extra>",
  })).filter((trace) => trace.customdata.some((count) => count > 0));
  draw("fates", traces, {
    barmode: "stack", bargap: 0.28, margin: { l: 150, r: 12, t: 8, b: 40 },
    xaxis: { tickformat: ".0%", range: [0, 1] }, yaxis: { autorange: "reversed", dividercolor: css("--line") },
  }, 110 + 30 * rows.length);
}

function reasons() {
  const counts = (policy) => {
    const one = at(chosen.load, policy);
    const found = { ...one.refusals };
    for (const [name, seen] of Object.entries(one.upstreams)) {
      for (const [status, count] of Object.entries(seen.refused)) found[`${name}: ${status}`] = count;
    }
    return found;
  };
  const words = [...new Set(policies.flatMap((policy) => Object.keys(counts(policy))))];
  const shades = ["--shed", "--expired", "--late", "--failed", "--gone", "--priority", "--fifo", "--lane0"];
  const traces = words.map((word, index) => ({
    type: "bar", orientation: "h", name: word, y: policies.map(named), x: policies.map((policy) => counts(policy)[word] || 0),
    marker: { color: css(shades[index % shades.length]) }, hovertemplate: `%{x:,}<extra>${word}</extra>`,
  }));
  draw("reasons", traces, {
    barmode: "stack", bargap: 0.35, margin: { l: 110, r: 12, t: 8, b: 40 }, showlegend: true,
    xaxis: { title: { text: "requests" }, rangemode: "tozero" }, yaxis: { autorange: "reversed" },
  });
}

function promises() {
  const asked = policies.filter((policy) => at(chosen.load, policy).promises.told > 0);
  const shares = asked.map((policy) => at(chosen.load, policy).promises.share);
  const goal = [{ type: "line", xref: "x", yref: "paper", x0: 0.9, x1: 0.9, y0: 0, y1: 1,
                  line: { color: css("--ok"), width: 2, dash: "dash" } }];
  draw("promises", [{
    type: "bar", orientation: "h", y: asked.map(named), x: shares, marker: { color: asked.map((policy) => css(`--${policy}`)) },
    text: asked.map((policy) => {
      const { told, kept, share } = at(chosen.load, policy).promises;
      return `${percent(share)} (${whole(kept)} of ${whole(told)})`;
    }),
    textposition: "auto", insidetextfont: { color: css("--card") }, hoverinfo: "none",
  }], { bargap: 0.35, shapes: asked.length ? goal : [], margin: { l: 110, r: 12, t: 8, b: 40 },
        xaxis: { tickformat: ".0%", range: [0, 1.05] }, yaxis: { autorange: "reversed" },
        annotations: asked.length ? [] : [{ text: "nobody was told to come back", showarrow: false, xref: "paper",
          yref: "paper", x: 0.5, y: 0.5, font: { color: css("--soft") } }] });
}

function overTime() {
  const one = at(chosen.load, chosen.policy);
  const width = one.span.at_s.length > 1 ? one.span.at_s[1] : 1;
  const shapes = report.faults.map((fault) => ({
    type: "rect", xref: "x", yref: "paper", x0: fault.at_s, x1: fault.at_s + fault.for_s, y0: 0, y1: 1,
    fillcolor: css("--fault"), line: { width: 0 }, layer: "below",
  }));
  const last = one.series.at_s[one.series.at_s.length - 1] || 1;
  const xaxis = { title: { text: "seconds", standoff: 6 }, range: [0, last] };
  const plain = { xaxis, shapes, hovermode: "x unified" };
  draw("t-slo", lanes.map((lane, index) => ({
    x: one.span.at_s.map((start) => start + width / 2), name: lane, mode: "lines", line: { color: laneColor(index), width: 2 },
    y: one.span.offered[lane].map((count, bin) => (count ? one.span.in_slo[lane][bin] / count : null)),
    hovertemplate: "%{y:.0%}", connectgaps: false,
  })), { ...plain, yaxis: { tickformat: ".0%", range: [-0.03, 1.05], dtick: 0.25 } });
  stacked("t-waiting", one, one.series.waiting, plain, (index) => laneColor(index), "requests");
  const bucket = [...pairs(one.series.account, "provider", "solid"), ...pairs(one.series.bucket, "gateway", "dot")];
  shown("t-bucket", bucket, plain, one, { tickformat: ".0%", range: [Math.min(-0.03, ...bucket.flatMap((t) => t.y)), 1.05] });
  const kv = [...pairs(one.series.kv, "engine", "solid"), ...pairs(one.series.known, "gateway", "dot")];
  shown("t-kv", kv, plain, one, { tickformat: ".0%", range: [-0.03, 1.05] });
  const running = Object.entries(one.series.running).map(([name, values]) => ({
    x: one.series.at_s, y: values, name: `${name}, running`, mode: "lines", line: { color: hue(name), width: 2 },
  }));
  const queued = Object.entries(one.series.queued).map(([name, values]) => ({
    x: one.series.at_s, y: values, name: `${name}, in its own line`, mode: "lines",
    line: { color: hue(name), width: 1.5, dash: "dot" },
  }));
  draw("t-running", [...running, ...queued], { ...plain, showlegend: true, yaxis: { title: { text: "requests" }, rangemode: "tozero" } });
}

function hue(upstream) {
  const colors = ["--priority", "--fifo", "--lane2", "--lane0", "--none"];
  return css(colors[Object.keys(outcomes[0].upstreams).indexOf(upstream) % colors.length]);
}

function pairs(rows, whose, dash) {
  const one = at(chosen.load, chosen.policy);
  const many = Object.keys(rows).length > 1;
  return Object.entries(rows).map(([name, values]) => ({
    x: one.series.at_s, y: values, name: many ? `${name}, ${whose}` : whose, mode: "lines",
    line: { color: dash === "dot" && !many ? css("--tidegate") : hue(name), width: dash === "dot" ? 1.5 : 2, dash },
    hovertemplate: "%{y:.0%}",
  }));
}

function shown(id, traces, plain, one, yaxis) {
  document.getElementById(id).closest("figure").hidden = !traces.length;
  if (traces.length) draw(id, traces, { ...plain, showlegend: true, yaxis });
}

function stacked(id, one, rows, plain, color, title) {
  const traces = Object.entries(rows).map(([name, values], index) => ({
    x: one.series.at_s, y: values, name, mode: "lines", stackgroup: "one", line: { color: color(index), width: 1 },
    hovertemplate: "%{y:,.0f}",
  }));
  shown(id, traces, plain, one, { title: { text: title }, rangemode: "tozero" });
}

function table() {
  const heads = ["load", "policy", "lane", "offered", "in SLO", "served", "late", "shed", "expired", "failed", "gave up",
                 "first token p50", "p95", "p99", "silence s"];
  const rows = loads.flatMap((load) => policies.flatMap((policy) => [...lanes, "all"].map((lane, index) => {
    const run = at(load, policy);
    const one = lane === "all" ? run.all : run.lanes[lane];
    const share = one.offered ? one.in_slo / one.offered : 1;
    return [index === 0, [load, named(policy), lane, whole(one.offered), percent(share), whole(one.served),
      whole(one.served - one.in_slo), whole(sum(one.shed)), whole(sum(one.expired)), whole(sum(one.failed)), whole(one.gone),
      seconds(one.first_token_s.p50), seconds(one.first_token_s.p95), seconds(one.first_token_s.p99), whole(one.silence_s)]];
  })));
  const place = document.getElementById("figures");
  const word = (index) => (index === 1 || index === 2 ? "word" : "");
  const head = document.createElement("tr");
  heads.forEach((text, index) => {
    const cell = head.appendChild(document.createElement("th"));
    cell.textContent = text;
    cell.className = word(index);
  });
  place.replaceChildren(head, ...rows.map(([first, cells]) => {
    const row = document.createElement("tr");
    row.className = first ? "first" : "";
    cells.forEach((text, index) => {
      const cell = row.appendChild(document.createElement("td"));
      cell.textContent = text;
      cell.className = word(index);
    });
    return row;
  }));
}

function picker(id, values, key, label, after) {
  const place = document.getElementById(id);
  place.replaceChildren(...values.map((value) => {
    const button = document.createElement("button");
    button.textContent = label(value);
    button.setAttribute("aria-pressed", String(chosen[key] === value));
    button.addEventListener("click", () => {
      chosen[key] = value;
      picker(id, values, key, label, after);
      after();
    });
    return button;
  }));
}

function legend() {
  document.getElementById("legend").replaceChildren(...policies.map((policy) => {
    const entry = document.createElement("span");
    const dot = entry.appendChild(document.createElement("i"));
    dot.style.background = `var(--${policy})`;
    entry.append(named(policy));
    return entry;
  }));
}

function everything() {
  asLoadGrows();
  atOneLoad();
  overTime();
}

document.getElementById("title").textContent = report.title;
document.getElementById("lead").textContent = report.assumed[0] || "";
const balance = document.getElementById("balance");
balance.textContent = report.broken.length
  ? `Does not balance: ${report.broken.join("; ")}`
  : "Everything balances: every request has one end, was settled once, and nothing is held.";
balance.className = report.broken.length ? "bad" : "ok";
document.getElementById("assumed").replaceChildren(...report.assumed.map((text) => {
  const item = document.createElement("li");
  item.textContent = text;
  return item;
}));
picker("pick-load", loads, "load", String, () => { atOneLoad(); overTime(); });
picker("pick-policy", policies, "policy", named, overTime);
legend();
everything();
table();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", everything);
