// The confirmation dialog of each operator action.

/** Lets the browser download the model, which can be many gigabytes. The URL has a ticket, not the token. */
function download({ url }) {
  const link = document.createElement("a");
  if (!/^api\/model\?/.test(url)) throw new Error("the download link does not belong to this dashboard: reload the page");
  link.href = url;
  link.download = "";
  document.body.append(link);
  link.click();
  link.remove();
}

export const pause = () => ({
  action: "pause",
  title: "Pause the run?",
  words: [
    "Learners wait in step(), and no round opens until the run is resumed. No work is lost.",
    "The run stays paused if the core restarts.",
  ],
  reason: true,
  yes: "Yes, pause",
  body: (reason) => ({ reason }),
});

export const resume = () => ({
  action: "resume",
  title: "Resume the run?",
  words: ["Learners continue with their next step, and rounds open again."],
  yes: "Yes, resume",
  body: () => ({}),
});

export const evict = (learner) => ({
  action: "evict",
  title: `Evict ${learner}?`,
  words: [
    "The learner stops, and its pending work is refused. Its merged work stays in the model.",
    "Until an operator readmits it, neither it nor new processes with its fleet's certificate can join.",
    `If its process has only ended, cancel, and use: atoll evict ${learner} --gone`,
  ],
  reason: true,
  danger: true,
  yes: "Yes, evict",
  body: (reason) => ({ learner, reason }),
});

export const readmit = (learner) => ({
  action: "readmit",
  title: `Readmit ${learner}?`,
  words: ["The learner may join again. If its process has ended, start the process again on its machine."],
  yes: "Yes, readmit",
  body: () => ({ learner }),
});

export const checkpoint = () => ({
  action: "checkpoint",
  title: "Take a checkpoint?",
  words: ["The core writes a checkpoint to its disk. Training continues. The core may delete the oldest checkpoint."],
  yes: "Yes, take it",
  body: () => ({}),
});

export const model = () => ({
  action: "download-ticket",
  title: "Download the model?",
  words: ["The browser saves the current published model as one safetensors file."],
  yes: "Yes, download",
  body: () => ({}),
  then: download,
});
