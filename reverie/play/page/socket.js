// The connection to a session: decodes views, acknowledges them and reconnects.

const FIRST_DELAY_MS = 250, MAX_DELAY_MS = 4000; // wait before reconnecting, doubled after each try

export class SessionConnection {
  // `handlers` are called with the status of the connection, text messages and views.
  constructor(session, token, handlers) {
    this.handlers = handlers;
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const query = new URLSearchParams({ token, session });
    this.url = `${scheme}://${location.host}/ws?${query}`;
    this.delay = FIRST_DELAY_MS;
    this.connect();
  }

  connect() {
    this.socket = new WebSocket(this.url);
    this.socket.binaryType = "arraybuffer";
    this.socket.onopen = () => { this.delay = FIRST_DELAY_MS; this.handlers.status("connected"); };
    this.socket.onmessage = (event) => {
      if (typeof event.data === "string") this.handlers.text(JSON.parse(event.data));
      else this.receiveView(event.data);
    };
    this.socket.onclose = (event) => {
      if (event.code === 1008 || event.code === 1013) { // refused, or too many messages or clients
        this.handlers.status("refused");
        return;
      }
      if (event.code === 1011) { // the run cannot be played; the server has sent the reason
        this.handlers.status("not available");
        return;
      }
      this.handlers.status("reconnecting");
      setTimeout(() => this.connect(), this.delay);
      this.delay = Math.min(this.delay * 2, MAX_DELAY_MS);
    };
  }

  // Decodes a binary message; its format is described in messages.py.
  async receiveView(buffer) {
    const length = new DataView(buffer).getUint32(0, true);
    const data = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    let start = 4 + length;
    const images = [];
    for (const image of data.images) {
      const bytes = new Uint8Array(buffer, start, image.bytes);
      start += image.bytes;
      images.push(createImageBitmap(new Blob([bytes], { type: image.type })));
    }
    const bitmaps = await Promise.all(images);
    this.handlers.view(data, bitmaps);
    this.send({ type: "ack", number: data.number });
  }

  send(message) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }
}
