// A page that is opened from a folder may start no worker.  There the worker's script runs in a hidden frame, and
// messages pass between the two as they would.  (The name tells the theme that this is here, so it fetches no other.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      const own = new URL(url, location.href);
      this.ready = new Promise((resolve, reject) => {
        const start = () => {
          document.body.append(this.frame);
          const inside = this.frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          inside.importScripts = (...urls) => urls.reduce((last, next) => last.then(() => load(next)), Promise.resolve());
          const load = (source) =>
            new Promise((done, failed) => {
              const script = inside.document.createElement("script");
              script.src = new URL(source, own);
              script.onload = done;
              script.onerror = failed;
              inside.document.body.append(script);
            });
          load(own).then(() => resolve(inside), reject);
        };
        if (document.body) start();
        else addEventListener("DOMContentLoaded", start);
      });
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
