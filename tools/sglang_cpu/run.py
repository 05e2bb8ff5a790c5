"""Runs the engine tests against a real SGLang on this machine's CPU (`make test-sglang`).

    python tools/sglang_cpu/run.py [pytest arguments]

The rule: nothing is taken from strawq's own environment, and nothing is left running. SGLang lives in a venv of its own
(2.6 GB, about three minutes to install the first time) at `$STRAWQ_SGLANG_VENV`, by default `~/.cache/strawq/sglang`;
the router lives in another beside it. Three servers are started, two of a MoE with routed experts and increments and
one of a dense model with neither, and a router before the first. Each must answer `/ready` before the tests begin;
the tests' exit code is this program's.

`$STRAWQ_SGLANG_URL`, if set, names servers that run already: then only the tests are run.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
HOME = Path(os.environ.get("STRAWQ_SGLANG_VENV") or Path.home() / ".cache" / "strawq" / "sglang").expanduser()
READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
PATIENT = ["-o", "faulthandler_timeout=900"]
"""Three servers on two busy cores: a test may take minutes there."""
MOE = ["--enable-return-routed-experts", "--incremental-streaming-output"]
SERVERS = {
    "moe": ("tiny-qwen3-moe", MOE),
    "moe-again": ("tiny-qwen3-moe", MOE),  # what one server began, another goes on with
    "dense": ("tiny-qwen2", []),
}
COMMON = [
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--host",
    "127.0.0.1",
    "--max-total-tokens",
    "20000",
]
SHIMMED = {"PYTHONPATH": str(HERE / "shim"), "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"}


def install(place: Path, *steps: list[str]) -> Path:
    """A venv at `place` with pip run once per step; repeated only when a requirements file changes. Returns its
    Python."""
    files = [Path(word) for step in steps for word in step if word.endswith(".txt")]
    stamp, wanted = place / "strawq-installed", hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()
    python = place / "bin" / "python"
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"installing into {place} ...", flush=True)
        if not python.exists():
            venv.create(place, with_pip=True)
        for step in steps:
            subprocess.run([str(python), "-m", "pip", "install", "-q", *step], check=True)
        stamp.write_text(wanted)
    return python


def make_models(python: Path) -> Path:
    models = HOME / "models"
    stamp, wanted = models / "made-by", hashlib.sha256((HERE / "make_models.py").read_bytes()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        subprocess.run([str(python), str(HERE / "make_models.py"), str(models)], check=True, env=os.environ | SHIMMED)
        stamp.write_text(wanted)
    return models


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Server:
    """One process group, its URL and its log."""

    def __init__(self, name: str, command: list[str], url: str, ready_path: str) -> None:
        self.name, self.url, self.ready_path = name, url, ready_path
        self.log = HOME / "logs" / f"{name}.log"
        self.log.parent.mkdir(exist_ok=True)
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env=os.environ | SHIMMED,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        end = time.monotonic() + READY_TIMEOUT_S
        while True:
            code = self.process.poll()
            if code is not None or time.monotonic() > end:
                tail = self.log.read_text(errors="replace")[-3000:]
                state = f"ended with code {code}" if code is not None else f"is not ready after {READY_TIMEOUT_S:g} s"
                raise SystemExit(f"{tail}\n{self.name} {state}; its log is {self.log}")
            try:
                with urllib.request.urlopen(self.url + self.ready_path, timeout=5) as answer:
                    if answer.status == 200:
                        print(f"{self.name} is ready at {self.url}", flush=True)
                        return
            except OSError:  # not listening yet, or 503
                time.sleep(0.5)

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def start_all(servers: list[Server]) -> dict[str, str]:
    """Fills `servers` as they start, so that the caller can stop them whatever happens. Returns the tests'
    environment."""
    python = install(
        HOME,
        ["-r", str(HERE / "requirements.txt")],
        ["--no-deps", "-r", str(HERE / "requirements-no-deps.txt")],
    )
    router_python = install(HOME / "router", ["-r", str(HERE / "requirements-router.txt")])
    models = make_models(python)
    for name, (model, arguments) in SERVERS.items():
        port = free_port()
        command = [str(python), "-m", "sglang.launch_server", "--model-path", str(models / model), "--port", str(port)]
        servers.append(Server(name, [*command, *COMMON, *arguments], f"http://127.0.0.1:{port}", "/ready"))
    for server in servers:
        server.wait_ready()
    port, metrics_port = free_port(), free_port()
    command = [str(router_python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics_port), "--worker-urls", servers[0].url, "--policy", "round_robin"]
    router = Server("router", command, f"http://127.0.0.1:{port}", "/readiness")
    first, again, dense = servers
    servers.append(router)
    router.wait_ready()
    return {
        # Each kind of engine is asked for the contract once; the second of a kind is only for what needs two.
        "STRAWQ_SGLANG_URL": f"{first.url},{dense.url}",
        "STRAWQ_SGLANG_PAIR": f"{first.url}@{first.process.pid} {again.url}@{again.process.pid}",
        "STRAWQ_SGLANG_ROUTER_URL": router.url,
    }


def main(arguments: list[str]) -> int:
    servers: list[Server] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        environment = {} if os.environ.get("STRAWQ_SGLANG_URL") else start_all(servers)
        command = [sys.executable, "-m", "pytest", "-m", "not campaign", *PATIENT, *(arguments or ["tests/sglang"])]
        return subprocess.run(command, cwd=REPOSITORY, env=os.environ | environment, check=False).returncode
    finally:
        for server in servers:
            server.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
