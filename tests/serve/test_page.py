"""The page at `/` in a real browser, against a small server that says what ours says.

No driver is needed: the page is served with a script that types and presses the button, and the
browser prints what became of it. Skipped where there is no Chromium.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "src" / "selfspec" / "serve" / "page.html"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
TYPES = """<script>
const late = (after) => new Promise((done) => setTimeout(done, after));
(async () => {
  for (const text of %s) {
    document.getElementById("words").value = text;
    document.getElementById("send").click();
    await late(50);
    while (document.getElementById("send").textContent === "Stop") await late(20);
  }
  document.querySelector(".facts button:last-of-type")?.click();
  await late(500);
  document.body.dataset.done = "yes";
})();
</script></body>"""


def chunk(text: str, tokens: list[str] | None, accepted: int, rejected: list[str]) -> Any:
    more = {"tokens": tokens, "accepted": accepted, "rejected": rejected}
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return {"choices": [choice | ({"selfspec": more} if tokens is not None else {})]}


ROUNDS = [
    chunk("Héllo", ["H", "éllo"], 1, []),
    chunk("", [" <b"], 0, [" wrong", " guess"]),  # text lags behind tokens
    chunk(" <b>bold ☃", [">", "bold", " ☃"], 2, []),
    chunk("!", None, 0, []),  # a server that does not say
]
END = [
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"completion_tokens": 7}},
]


class Handler(BaseHTTPRequestHandler):
    asked: list[Any]
    script = ""

    def log_message(self, *_: Any) -> None:
        """Nothing in the tests' output."""

    def do_GET(self) -> None:
        body = PAGE.read_text(encoding="utf-8").replace("</body>", self.script)
        if self.path.startswith("/v1/models"):
            body = json.dumps({"data": [{"id": "a-model"}]})
        self._head(200, "text/html; charset=utf-8")
        self.wfile.write(body.encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(asked)
        if asked["messages"][-1]["content"] == "fail":
            self._head(429, "application/json")
            self.wfile.write(json.dumps({"error": {"message": "too <many> requests"}}).encode())
            return
        self._head(200, "text/event-stream")
        events = [f"data: {json.dumps(each, ensure_ascii=False)}" for each in [*ROUNDS, *END]]
        stream = "\r\n\r\n".join([": a comment", *events, "data: [DONE]", ""]).encode()
        for begin in range(0, len(stream), 7):  # cuts events and characters
            self.wfile.write(stream[begin : begin + 7])
            self.wfile.flush()

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    handler = type("Fresh", (Handler,), {"asked": []})
    found = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{found.server_address[1]}/", handler
    found.shutdown()
    found.server_close()
    thread.join()


def browse(url: str, folder: Path, *more: str) -> str:
    """What a browser makes of the page."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"there is no browser here ({', '.join(BROWSERS)})")
    command = [
        *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={folder}", "--virtual-time-budget=15000", *more, "--dump-dom", url),
    ]
    run = subprocess.run(command, capture_output=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr.decode(errors="replace")[-2000:]
    return run.stdout.decode()


def spans(page: str) -> list[tuple[str, str]]:
    """The coloured pieces of the first answer: kind and text."""
    answer = page.split('<article class="answer">')[1].split("</p>")[0]
    found = re.findall(r'<span(?: class="(\w*)")?>(.*?)</span>', answer, flags=re.DOTALL)
    return [(kind, html.unescape(text)) for kind, text in found]


def test_a_conversation_in_a_browser(server: tuple[str, type[Handler]], tmp_path: Path) -> None:
    """Colours that slip against the text, markup of a model's that becomes part of the page, half
    characters, a second turn that forgot the first, an error that nobody sees."""
    url, handler = server
    handler.script = TYPES % json.dumps(["Hi <i>", "fail", "more"])
    page = browse(url, tmp_path)
    assert 'data-done="yes"' in page, "the script did not come to its end"
    assert "a-model" in page
    found = spans(page)
    assert "".join(text for _, text in found) == "Héllo <b>bold ☃!"
    assert found == [
        ("kept", "H"),
        ("own", "éllo"),
        ("own", " <b"),
        ("kept", ">"),
        ("kept", "bold"),
        ("own", " ☃"),
        ("", "!"),
    ]
    assert "too &lt;many&gt; requests" in page
    assert "3 of 5 drafts kept" in page and "7 tokens" in page
    assert "the same text</div>" in page and "NaN" not in page
    first, failed, again, plain = handler.asked
    assert first["stream"] is True and first["selfspec"] == {"stats": True}
    assert [turn["role"] for turn in again["messages"]] == ["user", "assistant", "user"]
    assert len(failed["messages"]) == 3, "a turn that failed is no part of the conversation"
    assert plain["selfspec"] == {"stats": True, "draft": "none"}
    assert plain["messages"] == first["messages"]


def test_the_page_is_whole_and_asks_nobody_else() -> None:
    """A tag left open, or a font or script from elsewhere: a server without internet shows half a
    page."""

    class Tags(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag not in ("meta", "link", "input", "br"):
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    text = PAGE.read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert not re.findall(r"https?://|src=|innerHTML", text)
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
