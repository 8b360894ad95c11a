// What each action will do, in the words of its confirmation.

/** The published model is gigabytes: a ticket lets the browser itself save it, without the token in an address. */
function download({ url }) {
  const link = document.createElement("a");
  if (!/^api\/model\?/.test(url)) throw new Error("the ticket leads elsewhere");
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
    "Learners stand in step() and no round opens, until the run is resumed. Nothing is lost.",
    "A core that is started again meanwhile is paused too.",
  ],
  reason: true,
  yes: "Yes, pause",
  body: (reason) => ({ reason }),
});

export const resume = () => ({
  action: "resume",
  title: "Resume the run?",
  words: ["Learners go on with their next step, and rounds open again."],
  yes: "Yes, resume",
  body: () => ({}),
});

export const evict = (learner) => ({
  action: "evict",
  title: `Evict ${learner}?`,
  words: [
    "It is told to stop, and what waits of its work is refused. What was merged stays merged.",
    "Its name is not let in until an operator lets it in again.",
  ],
  reason: true,
  danger: true,
  yes: "Yes, evict",
  body: (reason) => ({ learner, reason }),
});

export const readmit = (learner) => ({
  action: "readmit",
  title: `Let ${learner} in again?`,
  words: ["Its name may join again. Its process has ended: start it again on its island."],
  yes: "Yes, let in again",
  body: () => ({ learner }),
});

export const checkpoint = () => ({
  action: "checkpoint",
  title: "Take a checkpoint?",
  words: ["The core writes a snapshot to its disk now. Training goes on; the oldest snapshot may go."],
  yes: "Yes, take one",
  body: () => ({}),
});

export const model = () => ({
  action: "download-ticket",
  title: "Download the model?",
  words: ["The published model of this moment is saved as one safetensors file: 4 bytes a parameter."],
  yes: "Yes, download",
  body: () => ({}),
  then: download,
});
