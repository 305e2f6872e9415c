"""A proxy that keeps the bodies which clients send: `python record.py TARGET FILE` on a free port.

Prints its address. What it keeps is the corpus of the differential test.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TARGET, FILE = sys.argv[1], sys.argv[2]


class Recorder(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(size)
        kept = {"client": self.headers.get("user-agent", ""), "path": self.path}
        with open(FILE, "a") as file:
            file.write(json.dumps(kept | {"body": json.loads(body)}) + "\n")
        headers = {"content-type": "application/json"}
        asked = urllib.request.Request(TARGET + self.path, body, headers)
        try:
            reply = urllib.request.urlopen(asked, timeout=300)
        except urllib.error.HTTPError as error:
            reply = error  # type: ignore[assignment]
        self.send_response(reply.status)
        self.send_header("content-type", reply.headers["content-type"])
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(reply.read())

    def log_message(self, *words: object) -> None:
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
print(f"http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
