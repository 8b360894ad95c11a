// Opened from a disk (file://), a page may start no worker: the one that searches runs in a hidden frame there.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.document.open();
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      const loaded = new Promise((ready) => (script.onload = ready));
      script.src = url;
      inside.document.append(inside.document.createElement("html"));
      inside.document.documentElement.append(script);
      inside.document.close();
      this.postMessage = (data) => loaded.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
  };
}
