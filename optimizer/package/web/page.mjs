// The page: text in, answer out, and how long it took, the float model beside it where the bundle
// has one. ?threads=N instead of the bundle's. A program drives it through `globalThis.page`.

import { open, overHttp } from "./model.mjs";
import { line, numbers } from "./show.mjs";

const ROUNDS = 40;
const WARM_UP = 5;
const at = (id) => document.getElementById(id);
const models = {};

const threads = Number(new URLSearchParams(location.search).get("threads")) || undefined;
const read = overHttp(new URL("../", import.meta.url));

/** The model that answers: what people wait for. */
async function load() {
  models.quantized = await open(read, { threads });
  const { bundle, checked } = models.quantized;
  document.title = at("name").textContent = bundle.name;
  at("state").textContent =
    `Ready: ${checked.texts} texts are answered as where the bundle was made ` +
    `(${checked.worst.toPrecision(2)} apart, limit ${checked.limit.toPrecision(2)}). ` +
    "What you write stays in this browser.";
  for (const button of document.querySelectorAll("button")) button.disabled = false;
  document.documentElement.dataset.state = "ready";
}

/** The float model, to compare with, where the bundle has it. */
async function loadFloat() {
  await ready;
  if (!models.quantized.bundle.models.float) {
    at("note").textContent = "The float model is not in this bundle (include_float).";
    return;
  }
  at("note").textContent = "Loading the float model too, to compare with…";
  models.float = await open(read, { which: "float", threads });
  at("note").textContent = "";
}

function refuse(error) {
  at("state").textContent = error.message;
  document.documentElement.dataset.state = "refused";
}

/** {quantized, float}: what each model answers to the text. */
async function ask(text) {
  const results = {};
  for (const [name, model] of Object.entries(models)) results[name] = await model.answer(text);
  return results;
}

/** {name: [ms of each round]}: both models end to end on one text, interleaved, who is first changing
 * from round to round; the first rounds are left out. */
async function measure(text, rounds = ROUNDS) {
  const names = Object.keys(models);
  const times = Object.fromEntries(names.map((name) => [name, []]));
  for (let i = 0; i < rounds + WARM_UP; i++) {
    for (const name of i % 2 ? names : [...names].reverse()) {
      const { milliseconds } = await models[name].answer(text);
      if (i >= WARM_UP) times[name].push(milliseconds.tokenize + milliseconds.run);
    }
  }
  return times;
}

function show(results) {
  const { answer, cut } = results.quantized;
  at("answer").textContent = line(answer) + (cut ? "\n(The end of the text was cut off.)" : "");
  const rows = Object.entries(results).map(([name, r]) => [
    name,
    r.tokens,
    r.milliseconds.tokenize.toFixed(1),
    r.milliseconds.run.toFixed(1),
    results.float && name !== "float" ? `${(r.milliseconds.run / results.float.milliseconds.run).toFixed(2)}×` : "",
    results.float && name !== "float" ? cosine(numbers(answer), numbers(results.float.answer)).toFixed(5) : "",
  ]);
  at("times").hidden = false;
  at("times").tBodies[0].replaceChildren(...rows.map(tableRow));
}

function tableRow(cells) {
  const row = document.createElement("tr");
  for (const [i, cell] of cells.entries()) {
    row.append(Object.assign(document.createElement(i ? "td" : "th"), { textContent: cell }));
  }
  return row;
}

function cosine(a, b) {
  const dot = (x, y) => x.reduce((sum, v, i) => sum + v * y[i], 0);
  return dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b));
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
}

at("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    show(await ask(at("text").value));
  } catch (error) {
    at("answer").textContent = error.message;
  }
});
at("measure").addEventListener("click", async () => {
  try {
    const times = await measure(at("text").value || "The service was quick.");
    const each = Object.entries(times).map(([name, t]) => `${name} ${median(t).toFixed(1)} ms`);
    const ratios = times.float && times.quantized.map((t, i) => t / times.float[i]);
    at("note").textContent =
      `Median of ${ROUNDS} rounds: ${each.join(", ")}` + (ratios ? `, ratio ${median(ratios).toFixed(2)}` : "");
  } catch (error) {
    at("note").textContent = error.message;
  }
});

const ready = load();
const complete = loadFloat();
ready.catch(refuse);
complete.catch((error) => {
  at("note").textContent = error.message;
});
globalThis.page = { ready, complete, ask, measure };
