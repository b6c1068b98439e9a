"""--profile kubernetes submits each notebook as a Job. The API server here is a stand-in that runs a Job's command as a process."""

import json
import os
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from checkout import PARAMETERS, Checkout, count, notebook, record


class Api(ThreadingHTTPServer):
    "As much of the Kubernetes API as Snakemake's executor asks for."

    def __init__(self, env: dict[str, str]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.env, self.jobs, self.bodies = env, {}, []

    def submit(self, body: dict) -> None:
        container = body["spec"]["template"]["spec"]["containers"][0]
        self.bodies.append(body)
        self.jobs[body["metadata"]["name"]] = subprocess.Popen([*container["command"], *container["args"]], env=self.env, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def status(self, name: str) -> dict:
        code = self.jobs[name].poll()
        return {} if code is None else {"succeeded": 1} if code == 0 else {"failed": 1}


class Handler(BaseHTTPRequestHandler):
    def _answer(self, data: dict, code: int = 200) -> None:
        text = json.dumps(data).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _body(self) -> dict:
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")

    def do_POST(self) -> None:
        body = self._body()
        if self.path.startswith("/apis/batch/v1/namespaces/science/jobs"): self.server.submit(body)
        self._answer(body, 201)

    def do_GET(self) -> None:
        found = re.match(r"/apis/batch/v1/namespaces/science/jobs/([^/?]+)/status", self.path)
        self._answer({"metadata": {"name": found[1]}, "status": self.server.status(found[1])} if found else {"items": []})

    def do_DELETE(self) -> None:
        self._body()
        self._answer({})

    def log_message(self, *_) -> None: ...


@pytest.fixture
def api(checkout: Checkout):
    server = Api(checkout.env)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    for process in server.jobs.values():
        if process.poll() is None: process.kill()


def test_notebooks_as_kubernetes_jobs(checkout: Checkout, api: Api, monkeypatch):
    kubeconfig = {"apiVersion": "v1", "kind": "Config", "current-context": "test", "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{api.server_port}"}}],
                  "users": [{"name": "test", "user": {}}], "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}]}
    (checkout.root / "kubeconfig").write_text(json.dumps(kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(checkout.root / "kubeconfig"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    mine = checkout.root / "mine"
    shutil.copytree(checkout.root / "ci" / "profiles" / "kubernetes", mine)
    text = (mine / "config.yaml").read_text()
    (mine / "config.yaml").write_text(text.replace("namespace: default", "namespace: science").replace("/srv/neurips26_lit", str(checkout.root)).replace("checks: 5", "checks: 1"))
    checkout.paper("toy", {"01_method": notebook(count("01")), "90_reproduce": notebook(PARAMETERS, count("90"), record("it", 0.5, 0.4, 0.6))})

    result = checkout.run("reproduce", "toy", "--profile", str(mine), "--cores", "2")
    assert result.code == 0, result.err
    assert "executed 2 of 2, skipped 0" in result.out and sorted(checkout.ran) == ["01", "90"]
    assert json.loads((checkout.runs("toy") / "claims.json").read_text())["claims"][0]["value"] == 0.5
    assert len(api.bodies) == 2
    container = api.bodies[0]["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "python:3.11" and container["resources"]["requests"]["memory"] == "3000M"
    assert {"name": "neurips26-lit", "mountPath": str(checkout.root)} in container["volumeMounts"]
    assert os.environ["KUBECONFIG"]
