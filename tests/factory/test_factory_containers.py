"""A chart's pods by podman, without a network: an answer, promoted, broken, refused, rolled back.

podman runs what the rendered chart calls a pod. What a cluster does beside it is done here: the
probes are asked over HTTP, requests are spread, a pod that goes is given its time. Four things of
the pod are changed, for podman 4.3: it uses this network namespace with an address of loopback of
its own, empty folders are ones of the host, annotations, which podman wants short, are gone, and
what an image volume has is a folder into which oras brings each layer under its title.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from factory_cell import AT_LEAST, Made, flip
from helm import rendered
from oras.provider import Registry
from test_factory_airgap import Service, without_a_network

from headrace.base.config import EngineOptions
from headrace.base.version import VERSION
from headrace.factory.build import Build, BuildOptions
from headrace.loader import open_model
from tiny import talker

pytestmark = pytest.mark.slow

NEEDED = "podman", "runc", "docker-registry"
PATHS = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
CONTAINERS = """[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
log_driver = "k8s-file"
[engine]
runtime = "runc"
"""
REGISTRY = """version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {root}}}}}
http: {{addr: "{host}"}}
"""
OWNER = 65532


@contextmanager
def registry(root: Path) -> Iterator[str]:
    """Debian's registry on loopback of this namespace, which nobody else has; → its host."""
    host = "127.0.0.1:5000"
    (root.parent / "registry.yml").write_text(REGISTRY.format(root=root, host=host))
    program = shutil.which("docker-registry", path=PATHS)
    assert program is not None
    words = [program, "serve", str(root.parent / "registry.yml")]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            await_answer(host, "/v2/", 0.1, 300, lambda: process.poll() is None)
            yield host
        finally:
            process.terminate()


def await_answer(
    host: str, path: str, period: float, tries: int, alive: Callable[[], bool]
) -> None:
    """Ask as a probe does: every `period` seconds, so many times, for a status of success. Who has
    ended is not waited for."""
    for _ in range(tries):
        assert alive(), f"what is to answer at {host} has ended"
        connection = HTTPConnection(host, timeout=5)
        try:
            connection.request("GET", path)
            if connection.getresponse().status < 400:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(period)
    raise AssertionError(f"no answer from {host}{path}")


@dataclass
class Pod:
    """A pod that podman runs."""

    place: Podman
    name: str
    url: str

    def signal(self) -> None:
        """SIGTERM; the chart's time until it is killed."""
        grace = str(self.place.pod["spec"]["terminationGracePeriodSeconds"])
        self.place("pod", "stop", "--time", grace, self.name)

    def wait(self) -> int:
        """The server's exit status; the pod is gone then."""
        status = int(self.place("wait", f"{self.name}-serve"))
        self.place("pod", "rm", "--force", self.name)
        return status


class Podman:
    """podman with folders of its own, and the chart whose pods it runs."""

    def __init__(self, root: Path) -> None:
        self.root, self.pod, self.settings = root, {}, []  # type: ignore[var-annotated]
        (root / "containers.conf").write_text(CONTAINERS)

    def __call__(self, *words: str, check: bool = True) -> str:
        command = ["podman", "--root", f"{self.root}/c", "--runroot", f"{self.root}/r", *words]
        environment = {**os.environ, "CONTAINERS_CONF": f"{self.root}/containers.conf"}
        done = subprocess.run(
            command, env={**environment, "PATH": PATHS}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 or not check, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + ("" if check else done.stderr)

    def runs(self, name: str) -> bool:
        """Does the pod's server run? Where its loader refused, there is none."""
        words = ("ps", "--filter", f"name=^{name}-serve$", "--format", "{{.Names}}")
        return self(*words).strip() == f"{name}-serve"

    def end(self) -> None:
        self("pod", "rm", "--all", "--force", "--time", "1", check=False)
        self("rmi", "--all", "--force", check=False)

    def take(self, chart: Path, *settings: str) -> None:
        """Render a chart, by Helm: pods are of this one from now on."""
        found = rendered(chart, *settings)
        (self.pod,) = [one["spec"]["template"] for one in found if one["kind"] == "Deployment"]
        self.settings = [one for one in found if one["kind"] == "ConfigMap"]

    def play(self, name: str, address: str) -> str:
        """Start a pod; → what podman said, or what its containers did where it does not start."""
        pod, settings = json.loads(json.dumps([self.pod, self.settings]))
        spec = pod["spec"] | {"hostNetwork": True, "restartPolicy": "Never"}
        for volume in spec["volumes"]:
            folder = self.root / name / volume["name"]
            if "emptyDir" in volume:
                del volume["emptyDir"]
                folder.mkdir(parents=True)
                os.chown(folder, OWNER, OWNER)
                volume["hostPath"] = {"path": str(folder)}
            elif "image" in volume:
                if not folder.exists():
                    Registry(insecure=True).pull(volume["image"]["reference"], outdir=str(folder))
                del volume["image"]
                volume["hostPath"] = {"path": str(folder)}
        for part in ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"):
            del spec["containers"][0][part]
        for one in settings:
            if "options.toml" in one["data"]:
                text = one["data"]["options.toml"]
                one["data"]["options.toml"] = text.replace("0.0.0.0", address)
        meta = {"name": name, "labels": pod["metadata"]["labels"]}
        made = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
        file = self.root / f"{name}.yaml"
        file.write_text("\n---\n".join(json.dumps(one) for one in [*settings, made]))
        said = self("kube", "play", "--tls-verify=false", str(file), check=False)
        return said + self("logs", f"{name}-load", check=False)


class Pods(Service):
    """Pods behind one name; a new one is ready before an old one goes."""

    def __init__(self, podman: Podman, stack: ExitStack) -> None:
        super().__init__(podman.root, stack)
        self.podman, self._count = podman, 0

    def start(self) -> Any:
        """One more pod, once its probe was answered."""
        self._count += 1
        name, address = f"river-{self._count}", f"127.0.0.{self._count + 1}"
        said = self.podman.play(name, address)
        serve = self.podman.pod["spec"]["containers"][0]
        (port,) = [one["containerPort"] for one in serve["ports"] if one["name"] == "http"]
        probe = serve["startupProbe"]
        path, period = probe["httpGet"]["path"], probe["periodSeconds"]
        try:
            alive = partial(self.podman.runs, name)
            await_answer(f"{address}:{port}", path, period, probe["failureThreshold"], alive)
        except AssertionError as error:
            logs = self.podman("logs", f"{name}-serve", check=False)
            raise AssertionError(f"{error}: {said}{logs}") from None
        return Pod(self.podman, name, f"http://{address}:{port}")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the engine's image, made before there is no network."""
    if lacking := [name for name in NEEDED if shutil.which(name, path=PATHS) is None]:
        pytest.skip(f"{lacking[0]} is not installed")
    store = tmp_path_factory.mktemp("image") / "store"
    words = [sys.executable, "-m", "headrace", "factory", "image", "--architectures", "amd64"]
    done = subprocess.run([*words, "--store", str(store)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the image could not be made: {done.stderr.strip()[-200:]}")
    return store


def test_who_has_ended_is_not_waited_for() -> None:
    """A pod whose server dies while it starts had its probe asked for ten minutes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{free.getsockname()[1]}"
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"]) as process:
        process.wait()
        with pytest.raises(AssertionError, match=f"{host} has ended"):
            await_answer(host, "/v1/health/ready", 2, 300, lambda: process.poll() is None)


@pytest.mark.parametrize("name", ["tiny", pytest.param("default", marks=pytest.mark.model)])
def test_pods_of_a_chart_are_promoted_refused_and_rolled_back(
    name: str, image: Path, tmp_path: Path
) -> None:
    model = talker.make(tmp_path / "tiny") if name == "tiny" else open_model(DEFAULT).path
    podman = Podman(Path(tempfile.mkdtemp(prefix="pod-")))
    engine = EngineOptions(model=str(model), cache_dir=str(tmp_path / "factory" / "cache"))
    cells, made = [], None
    for one in (engine, replace(engine, max_sequences=4)):
        build = Build(one, BuildOptions(at_least=AT_LEAST, without="accuracy,sbom"))
        made = Made(model, tmp_path / "factory" / "cache", build.run(), build.cell)
        cells.append(build.cell)
    assert made is not None
    with without_a_network() as packets, ExitStack() as stack:
        stack.callback(shutil.rmtree, podman.root, ignore_errors=True)
        stack.callback(podman.end)
        host = stack.enter_context(registry(tmp_path / "registry"))
        site = replace(made, cache=tmp_path / "site")
        keys = Path("factory") / "trusted"
        shutil.copytree(made.cache / keys, site.cache / keys)
        words = (f"headrace:{VERSION}", f"{host}/headrace:1", "--store", str(image))
        engines = f"{host}/headrace@{made.call('publish', *words).split()[1][:-1]}"
        charts = []
        for number, cell in enumerate(cells):
            said = made.call("publish", cell, f"{host}/models:{number}")
            print(said.strip())
            assert site.call("load", f"{host}/models:{number}") == f"{cell}: taken in\n"
            reference = f"{host}/models@{said.split()[1][:-1]}"
            charts.append(tmp_path / f"chart{number}")
            site.call("chart", str(charts[-1]), cell, reference, "--image", engines)
        gates = ("production", "--unevaluated", "accuracy")
        site.call("promote", cells[0], *gates)
        pods = Pods(podman, stack)
        pods.words["model"] = model.name
        podman.take(charts[0])
        print(f"first pods: {pods.roll():.1f} s")
        with pods.asked():
            first = pods.ask(0)
            site.call("promote", cells[1], *gates)
            podman.take(charts[1])
            print(f"promoted: {pods.roll():.1f} s")
            # One bit of the new profile in the registry, and in the store.
            listed = json.loads(site.call("profiles", "--json"))
            digest = next(one["digest"] for one in listed if one["profile"] == cells[1])[7:]
            blobs = tmp_path / "registry/docker/registry/v2/blobs/sha256"
            for path in (blobs / digest[:2] / digest / "data", site.store.blob(f"sha256:{digest}")):
                path.chmod(0o644)
                path.write_bytes(flip(path.read_bytes()))
            assert podman.runs("river-3")
            assert digest in site.call("verify", status=6)
            said = podman.play("refused", "127.0.0.99")
            assert f"{digest} came with other bytes" in said
            assert not podman.runs("refused")
            begin = time.monotonic()
            assert site.call("rollback", "production").startswith("production 3: ")
            podman.take(charts[0])
            pods.roll()
            print(f"rolled back: {time.monotonic() - begin:.1f} s")
            last = pods.ask(0)
            podman.take(charts[0], "weights.from=volume")
            assert "initContainers" not in podman.pod["spec"]
            print(f"with mounted weights: {pods.roll():.1f} s")
        mounted = pods.ask(0)
        changed = shutil.copytree(podman.root / "river-8/weights", podman.root / "changed/weights")
        largest = max(changed.rglob("*"), key=lambda path: path.stat().st_size)
        largest.write_bytes(flip(largest.read_bytes()))
        podman.play("changed", "127.0.0.99")
        assert podman("wait", "changed-serve").strip() == "6"
        assert largest.name in podman("logs", "changed-serve", check=False)
        print(f"{len(pods.answers)} answers, {len(pods.errors)} errors, {packets()} packets out")
        assert pods.errors == []
        assert first == last == mounted
        assert set(pods.answers) == {first}
        assert packets() == 0


DEFAULT = "qwen2.5-coder-0.5b"
