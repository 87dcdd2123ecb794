"""What a rank serves at the port for metrics: ``/metrics`` for Prometheus, ``/`` for a browser, and what commands ask.

This machine may ask for all of it. Whoever asks from another one for a view or a dump proves that they know the job's
secret, by a keyed code of the path and the time; the secret itself is never sent. Metrics are as open as the address.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET, AF_INET6
from urllib.parse import parse_qsl, urlsplit

LIVE_PAGE = Path(__file__).with_name("live_page.html")
"""Asks for ``/view`` every two seconds, and for nothing else."""
CODE = "Syncline-Code"
NEEDS_SECRET = (
    b"from another machine, or by a name, this needs the job's secret, which syncline top, explain and dump prove "
    b"where clocks differ by less than a minute; a browser goes by ssh -L PORT:127.0.0.1:PORT HOST to 127.0.0.1\n"
)
VALID_S = 60.0
"""Clocks may differ by so much, and a code that was overheard is good for no longer."""

Page = Callable[[Mapping[str, str]], tuple[int, str, bytes]]
"""Takes what the address asks behind its path; returns status, content type and body."""


def make_code(secret: bytes, path: str, now_s: float | None = None) -> str:
    """Return what proves that the sender knows ``secret``, for one path, now.

    >>> is_valid(make_code(b"s" * 32, "/view"), b"s" * 32, "/view")
    True
    """
    time_text = f"{time.time() if now_s is None else now_s:.0f}"
    return f"{time_text}.{hmac.new(secret, f'syncline {path} {time_text}'.encode(), hashlib.sha256).hexdigest()}"


def is_valid(code: str, secret: bytes, path: str) -> bool:
    """Whether a code is of this path, and not old."""
    text = code.partition(".")[0]
    if not text.isdecimal() or abs(time.time() - int(text)) > VALID_S:
        return False
    return hmac.compare_digest(code.encode(), make_code(secret, path, int(text)).encode())


def serve(
    address: str, port: int, pages: Mapping[str, Page], secret: bytes | None, *, is_open: str
) -> Callable[[], None]:
    """Serve ``pages`` by their paths; return what ends that. Only the path ``is_open`` needs no code from elsewhere.

    Raises ``OSError`` or ``OverflowError`` for an address that cannot be had.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, body = self._answer()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _answer(self) -> tuple[int, str, bytes]:
            path, _, query = self.path.partition("?")
            if path not in pages:
                return 404, "text/plain", f"there is {', '.join(pages)}\n".encode()
            is_here = is_near(self.client_address[0]) and is_address(self.headers.get("Host", ""))
            if path != is_open and not is_here:
                code = self.headers.get(CODE, "")
                if secret is None or not is_valid(code, secret, path):
                    return 403, "text/plain", NEEDS_SECRET
            return pages[path](dict(parse_qsl(query)))

        def log_message(self, *_: object) -> None:
            """Write nothing: the output is the job's."""

    class Server(ThreadingHTTPServer):
        address_family = AF_INET6 if ":" in address else AF_INET

    server = Server((address, port), Handler)
    thread = threading.Thread(target=server.serve_forever, name="syncline-metrics", daemon=True)
    thread.start()

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end


def is_address(host: str) -> bool:
    """Whether a ``Host`` header has no other name than localhost: by one of its own a page elsewhere could ask here.

    >>> is_address("127.0.0.1:9470"), is_address("[::1]:9470"), is_address("localhost"), is_address("evil.example:9470")
    (True, True, True, False)
    """
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def is_near(address: str) -> bool:
    """Whether an address is this machine's loopback.

    >>> is_near("::ffff:127.0.0.1"), is_near("::ffff:10.0.0.1")
    (True, False)
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback
