"""Workers of one host that push one sum: bytes on the host's link, the same bits, kill -9. Hosts are imitated by --host_id."""
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time

import tensors
from cluster import BIN, Cluster
from runner import program

NEEDS_SHARED = False


class Wire:
    """A port that passes everything on to another one and counts what comes up: the link between two hosts."""

    def __init__(self, port_file):
        self.port_file, self.up, self.lock = port_file, 0, threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", int(open(self.port_file).read())))
            threading.Thread(target=self._pass, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, False), daemon=True).start()

    def _pass(self, source, sink, up):
        try:
            while True:
                data = source.recv(1 << 20)
                if not data:
                    break
                if up:
                    with self.lock:
                        self.up += len(data)
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self):
        self.listener.close()


class Hosts(Cluster):
    """Workers on the host "left", one server on "right", the link between them a Wire."""

    def __init__(self, workers):
        super().__init__(servers=1, workers=workers)
        self.wire = Wire(self.port_file("server-0"))

    def _command(self, name):
        command = super()._command(name)
        if name.startswith("worker"):
            command.append("--host_id=left")
        if name.startswith("server"):
            command += ["--host_id=right", "--advertise=127.0.0.1:%d" % self.wire.port]
        return command

    def stop(self):
        super().stop()
        self.wire.close()


def spec(folder, workers, rounds):
    rows = os.path.join(folder, "hosts-rows.jsonl")
    if not os.path.exists(rows):
        with open(rows, "w") as f:
            for i in range(64):
                f.write(json.dumps([(i * 7 + j * j) % 64 for j in range(17)]) + "\n")
    return {
        "name": "hosts",
        "model": {"gpt2": {"layers": 2, "heads": 4, "width": 192, "context": 16, "vocabulary": 64}},
        "data": {"rows": {"path": rows}, "validation_fraction": 0},
        "train": {"rounds": rounds, "batch": 8, "eval_every": rounds},
        "optimizer": {"adamw": {"learning_rate": 1e-3}, "clip_norm": 1.0},
        "parallel": {"data": workers},
        "checkpoint": {"every_rounds": 0},
    }


def export_digest(c, job, folder):
    out = os.path.join(folder, "export-%d" % time.time_ns())
    c.sluice("export", job, out)
    return tensors.digest(os.path.join(out, "model.safetensors"))


def train(c, folder, workers, rounds, host_sum):
    """(parameters as a digest, bytes up through the wire, seconds a round, status)"""
    before, began = c.wire.up, time.time()
    job, status = c.run(spec(folder, workers, rounds), "transfer.host_sum=" + host_sum)
    seconds = (time.time() - began) / rounds
    return export_digest(c, job, folder), c.wire.up - before, seconds, status


def part_hosts(report, folder, quick):
    for name in ("host_sum_test", "host_sum_core_test", "host_sums_test", "host_sums_processes_test"):
        done = program(os.path.join(BIN, name))
        report.check("hosts: " + name, "passes", "exit %d" % done.returncode, done.returncode == 0)
    rounds = 20 if quick else 60
    for workers in (2, 4):
        with Hosts(workers) as c:
            apart, apart_bytes, apart_s, status = train(c, folder, workers, rounds, "OFF")
            payload = 4 * int(status["parameters"]) * rounds
            one, one_bytes, one_s, status = train(c, folder, workers, rounds, "AUTO")
        what = "%d workers on one host: " % workers
        sums = [(s.get("first", 0), s["ranks"]) for s in status.get("host_sums", [])]
        report.check(what + "add up", "[(0, %d)]" % workers, str(sums), sums == [(0, workers)])
        report.check(what + "parameters equal those without host sums", apart, one, apart == one)
        report.check(what + "bytes pushed by the host, of those without", "1/%d (5%% more at most)" % workers,
                     "%.4f (%.1f of %.1f MB)" % (one_bytes / apart_bytes, one_bytes / 1e6, apart_bytes / 1e6),
                     one_bytes / apart_bytes <= 1.05 / workers)
        report.check(what + "bytes pushed, of one gradient", "1 to 1.03", "%.4f" % (one_bytes / payload),
                     1 <= one_bytes / payload <= 1.03)
        report.shown(what + "ms a round through the counting wire, with and without",
                     "%.1f, %.1f" % (1e3 * one_s, 1e3 * apart_s))
    deaths(report, folder, 150 if quick else 400)
    limited(report, folder, 15 if quick else 40)


def deaths(report, folder, rounds):
    with Hosts(3) as c:
        undisturbed = train(c, folder, 3, rounds, "OFF")[0]
        for who, rank in (("leader", 0), ("member", 1)):
            job = c.submit(spec(folder, 3, rounds), "transfer.host_sum=AUTO")
            at = 0
            while at < rounds // 4:
                status = c.status(job)
                at = int(status.get("rounds_done", 0))
            name = status["plan"]["ranks"][rank]["node"]["name"]
            c.daemons[name].send_signal(signal.SIGKILL)  # the cluster starts it again
            status = c.wait(job)
            got = export_digest(c, job, folder)
            report.check("3 workers on one host: kill -9 of the host %s at round %d" % (who, at), undisturbed,
                         "%s, %s recoveries" % (got, status.get("recoveries", 0)),
                         got == undisturbed and int(status.get("recoveries", 0)) >= 1)


GIGABITS = 1


class Cable(Cluster):
    """Workers in a network namespace of their own, joined to the others by a veth pair of GIGABITS each way. Takes root."""

    def __init__(self, workers):
        super().__init__(servers=1, workers=workers)
        self.space = self.far = "slc%d" % os.getpid()
        self.near = self.far + "n"

    def __enter__(self):
        for line in ("netns add %s" % self.space, "link add %s type veth peer name %s netns %s" % (self.near, self.far, self.space),
                     "address add 10.77.1.1/24 dev " + self.near, "link set %s up" % self.near,
                     "-n %s address add 10.77.1.2/24 dev %s" % (self.space, self.far), "-n %s link set %s up" % (self.space, self.far),
                     "-n %s link set lo up" % self.space):
            subprocess.run(["ip", *line.split()], check=True, capture_output=True)
        shape = "root tbf rate %dgbit burst 1mb latency 20ms" % GIGABITS
        subprocess.run(["tc", "qdisc", "add", "dev", self.near, *shape.split()], check=True, capture_output=True)
        subprocess.run(["tc", "-n", self.space, "qdisc", "add", "dev", self.far, *shape.split()], check=True, capture_output=True)
        return super().__enter__()

    def _command(self, name):
        command = [word for word in super()._command(name) if not word.startswith(("--listen", "--scheduler"))]
        port = getattr(self, "scheduler_port", 0)
        if name == "scheduler":
            return command + ["--listen=0.0.0.0:%d" % port, "--advertise=10.77.1.1", "--insecure"]
        command += ["--scheduler=10.77.1.1:%d" % port, "--insecure"]
        if name.startswith("server"):
            return command + ["--listen=10.77.1.1:0", "--host_id=right"]
        return ["ip", "netns", "exec", self.space] + command + ["--listen=10.77.1.2:0", "--host_id=left"]

    def sent(self):
        """Bytes that the workers' host has put on the cable."""
        return int(open("/sys/class/net/%s/statistics/rx_bytes" % self.near).read())

    def stop(self):
        super().stop()
        subprocess.run(["ip", "netns", "del", self.space], capture_output=True)


def limited(report, folder, rounds):
    what = "4 workers on one host, a cable of %d Gbit/s: " % GIGABITS
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return report.skipped(what + "round time", "network namespaces take root and iproute2")
    cable = Cable(4)
    try:
        cable.__enter__()
    except subprocess.CalledProcessError as e:
        cable.stop()
        return report.skipped(what + "round time", "no namespace: " + e.stderr.decode().strip())
    try:
        rows = {}
        for host_sum in ("OFF", "AUTO"):
            before = cable.sent()
            job, status = cable.run(spec(folder, 4, rounds), "transfer.host_sum=" + host_sum)
            records = [r for r in cable.history(job)["records"] if not r.get("evaluation")][3:]
            seconds = sorted(r["seconds"] for r in records)[len(records) // 2]
            rows[host_sum] = export_digest(cable, job, folder), cable.sent() - before, seconds
    finally:
        cable.stop()
    (apart, apart_bytes, apart_s), (one, one_bytes, one_s) = rows["OFF"], rows["AUTO"]
    report.check(what + "parameters equal those without host sums", apart, one, apart == one)
    # Acknowledgements of what comes down are in both.
    report.check(what + "bytes sent by the host, of those without", "1/4 (15% more at most)",
                 "%.4f (%.1f of %.1f MB)" % (one_bytes / apart_bytes, one_bytes / 1e6, apart_bytes / 1e6), one_bytes / apart_bytes <= 1.15 / 4)
    report.check(what + "median round, of one without", "< 1", "%.2f (%.1f of %.1f ms)" % (one_s / apart_s, 1e3 * one_s, 1e3 * apart_s),
                 one_s < apart_s)
