// Trace: the last minutes as a file for Perfetto.

import { card, h, wide } from "./dom.js";
import { download } from "./server.js";

export function showTrace(main, { failed, recovered }) {
  const minutes = h("input", { type: "number", min: 1, max: 60, value: 5, name: "minutes", required: true });
  const note = h("p", { class: "quiet", role: "status" });
  const form = h("form", { onsubmit: async (event) => {
    event.preventDefault();
    note.textContent = "Collecting …";
    try {
      await download(`console/trace?minutes=${Number(minutes.value)}`, "skyrl-tinker-trace.json");
      recovered();
      note.textContent = "Saved skyrl-tinker-trace.json.";
    } catch (error) {
      note.textContent = "";
      failed(error);
    }
  } }, h("label", {}, "Minutes back", minutes), h("button", { type: "submit" }, "Save trace"));
  main.append(h("h1", {}, "Trace"), wide(card("Trace of the last minutes", form, note,
    h("p", {}, "Open the file in ", h("a", { href: "https://ui.perfetto.dev", rel: "noreferrer noopener", target: "_blank" }, "ui.perfetto.dev"),
      " (it stays in your browser) or in chrome://tracing."),
    h("p", { class: "quiet" }, "Your requests, one track for each run and sampler: how long each waited, ran, and took to its answer. "
      + "Beside them the trainer's units of work, weights on their way to the samplers, and how many requests were not finished."))));
  return () => {};
}
