// Points and reports of runs, as they are learned, and the curves through them.

import { get } from "./server.js";

// The points behind those that are known.
export async function more(kept) {
  let answer;
  do {
    answer = await get(`console/runs/${encodeURIComponent(kept.run)}/points?after=${kept.next}`);
    for (const [column, values] of Object.entries(answer.columns)) (kept.columns[column] ??= []).push(...values);
    kept.next = answer.next;
  } while (answer.more);
}

// Of several reports of one step the last counts. `only`: options of the question.
export async function moreReports(part, kept, only = "") {
  let answer;
  do {
    answer = await get(`console/runs/${encodeURIComponent(part.run)}/metrics?after=${part.next}${only}`);
    for (const { step, reward, values } of answer.reports) {
      if (reward !== null) kept.reward.set(step, reward);
      for (const [name, value] of Object.entries(values)) {
        if (!kept.values.has(name)) kept.values.set(name, new Map());
        kept.values.get(name).set(step, value);
      }
    }
    part.next = answer.next;
  } while (answer.more);
}

// A curve through the parents of a run, as far as it goes on from each, and the run itself.
export function joined(parts, column, axis) {
  const rows = parts.flatMap(({ columns, before, until }) => (columns.step ?? []).map((step, place) =>
    ({ step: before + step, at: columns.at[place], tokens: columns.tokens[place], value: columns[column][place] })).filter(({ step }) => step <= until));
  let tokens = 0;
  const places = rows.map((row) => {
    tokens += row.tokens;
    return axis === "tokens" ? tokens : axis === "minutes" ? (row.at - rows[0].at) / 60 : row.step;
  });
  return [places, rows.map(({ value }) => value)];
}

// The mean of the values so far, each `weight` of the one behind it. Gaps stay.
export function smoothed(values, weight) {
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    total = weight * total + (1 - weight);
    mean += ((1 - weight) / total) * (value - mean); // so that what is constant stays so
    return mean;
  });
}

export function curve(bySteps) {
  return [[...bySteps.keys()], [...bySteps.values()]];
}

// Join curves of different places on one axis. Null is a value that is not known: a gap. Undefined is a step of others: none.
export function aligned(curves) {
  const steps = [...new Set(curves.flatMap(([steps]) => steps ?? []))].sort((one, other) => one - other);
  return [steps, ...curves.map(([own, values]) => {
    const byStep = new Map((own ?? []).map((step, place) => [step, values[place]]));
    return steps.map((step) => byStep.get(step));
  })];
}
