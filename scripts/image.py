"""`scripts/image`: what deploy/Dockerfile does, step by step, in a folder of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SYSTEM = ("apt-get", "useradd")  # what only an image may do


def steps() -> list[tuple[str, str]]:
    """Instructions and what they say, lines that go on joined."""
    text = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", text)).splitlines()
    found = [line.split(None, 1) for line in lines if line.strip()]
    return [(name, rest.strip()) for name, rest in found]


def build(folder: Path, pip: list[str]) -> dict[str, str]:
    """Copy and install as the steps say. The environment that they leave."""
    app, own = folder / "app", folder / "venv"
    app.mkdir()
    subprocess.run([sys.executable, "-m", "venv", own], check=True)
    variables = {"PATH": f"{own}/bin:{os.environ['PATH']}", "HOME": str(folder)}
    for name, rest in steps():
        if name == "COPY":
            *sources, target = rest.split()
            for source in sources:
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, app / (target if copy is shutil.copytree else ""))
        elif name == "RUN" and rest.startswith(SYSTEM):
            print("left out:", rest)
        elif name == "RUN":
            command = rest.replace("$PIP_ARGS", shlex.join(pip))
            print("+", command)
            subprocess.run(command, shell=True, cwd=app, check=True, env=os.environ | variables)
        elif name == "ENV":
            made = (each.split("=", 1) for each in rest.split())
            variables |= {key: str(folder) + value for key, value in made}
    return variables


def run(folder: Path, variables: dict[str, str]) -> None:
    """Start what the image starts, look at its health, ask it once, and end it."""
    told = dict(steps())
    port = 18080
    command = [*json.loads(told["ENTRYPOINT"]), *json.loads(told["CMD"])]
    command = [str(port) if each == "8000" else each for each in command]
    command = ["127.0.0.1" if each == "0.0.0.0" else each for each in command]
    print("+", shlex.join(command))
    environment = os.environ | variables
    command[0] = str(folder / "venv/bin" / command[0])
    process = subprocess.Popen(command, cwd=folder, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        until(url + "/ready", process)
        health = re.search(r'CMD python -c "(.*)"$', told["HEALTHCHECK"])
        assert health, "the image's health check is none that is known here"
        check = health[1].replace("8000", str(port))
        subprocess.run([sys.executable, "-c", check], check=True)
        body = {"prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}
        asked = urllib.request.Request(
            url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        print("answered:", json.load(urllib.request.urlopen(asked))["choices"][0]["text"])
        process.send_signal(signal.Signals[told["STOPSIGNAL"]])
        assert process.wait(60) == 0, "it did not end with status 0"
    finally:
        process.kill()


def until(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait for a status of 200, at most as long as an image's first start may take."""
    end = time.monotonic() + 600
    while True:
        assert process.poll() is None, "the server has ended"
        assert time.monotonic() < end, "the server is not ready after ten minutes"
        try:
            if urllib.request.urlopen(url).status == 200:
                return
        except OSError:
            time.sleep(1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        run(Path(made), build(Path(made), sys.argv[1:]))
    print("the image's steps work here")
