// Browsers start no worker for pages opened from disk. There, a hidden frame runs the search's script in its place:
// what is posted to either side arrives at the other as a "message" event.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      this.inside.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => load(frame, next)), Promise.resolve());
      this.ready = load(frame, url);
      this.frame = frame;
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}

function load(frame, url) {
  return new Promise((done, failed) => {
    const script = frame.contentDocument.createElement("script");
    script.src = url;
    script.onload = done;
    script.onerror = failed;
    frame.contentDocument.body.append(script);
  });
}
